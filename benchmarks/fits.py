"""Writes the README's table of published models and the machines that they fit, from the planner.

python -m benchmarks.fits
python -m benchmarks.fits --check    # exit status 1 if the README does not have this table

It is arithmetic on published configurations: no weight is read, and nothing is run.
"""

import argparse
import sys
from collections.abc import Iterable

from llamoe import plan_placement
from llamoe.planning import PlacementPlan

from .report import ROOT, replaced

MODELS = {
    "mistral-7b-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "llama-4-maverick": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
}
"""Name of a preset to the model's name on the Hub."""
MACHINES = {
    "laptop, 32 GB": {"gpus": 0, "ram": "32GB"},
    "24 GB card, 64 GB RAM": {"gpus": 1, "gpu_memory": "24GB", "ram": "64GB"},
    "80 GB card, 128 GB RAM": {"gpus": 1, "gpu_memory": "80GB", "ram": "128GB"},
    "8 cards of 80 GB": {"gpus": 8, "gpu_memory": "80GB", "ram": "512GB"},
}
FORMATS = {"16 bit": None, "int8": "int8", "int4": "int4"}
"""Title of a format to what `plan_placement` calls it, the largest first."""


def table(models: Iterable[str] = MODELS) -> list[str]:
    """The table's lines for these presets, each by itself."""
    return [
        "| model | name for `llamoe inspect` | parameters | 16 bit, int8, int4 (GB) | "
        + " | ".join(MACHINES)
        + " |",
        "|---|---|--:|--:|" + "---|" * len(MACHINES),
        *map(row, models),
    ]


def row(name: str) -> str:
    """A preset's line."""
    plans = {title: plan_placement(name, quantization=form, gpus=["1TB"]) for title, form in FORMATS.items()}
    parameters = sum(count for count, _ in plans["int4"].parts.values())
    sizes = ", ".join(f"{sum(plan.weights.values()) / 1e9:.0f}" for plan in plans.values())
    places = [_place(name, machine) for machine in MACHINES.values()]
    cells = [f"`{MODELS[name]}`", f"`{name}`", f"{parameters / 1e9:.0f} B", sizes, *places]
    return f"| {' | '.join(cells)} |"


def _place(name: str, machine: dict) -> str:
    """The largest format that fits whole, else where int4 keeps its experts; with the speed where no GPU takes part."""
    for title, form in FORMATS.items():
        try:
            plan = plan_placement(name, quantization=form, **machine)
        except ValueError:
            continue
        offloaded = _offloaded(plan)
        if not offloaded or title == "int4":
            return title + offloaded + _speed(plan)
    return "–"


def _speed(plan: PlacementPlan) -> str:
    """Tokens a second by reading alone; "" with a GPU, where nothing was run."""
    on_cpu = next(iter(plan.room)) == "cpu"
    return f", ≤ {plan.tokens_per_second:.2g} a second" if on_cpu else ""


def _offloaded(plan: PlacementPlan) -> str:
    """What is not where it is computed, as a cell says it; "" for nothing."""
    if plan.experts_memory is not None:
        return ", experts on disk" if plan.experts.get("disk") else ", experts in RAM"
    away = {"cpu", "disk"} - {next(iter(plan.room))}
    return ", layers in RAM" if away & {place for place, size in plan.weights.items() if size} else ""


def main() -> None:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    written = replaced(text, "\n".join(table()), "fits", "README.md")
    if check:
        sys.exit(written != text)
    page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
