"""The command that says what is installed here, and what serves each step of a model."""

import dataclasses
import importlib
from typing import Annotated, Any

import typer

from .app import app, load
from .options import AsJson, Quiet
from .printing import print_sections, status


@app.command()
def doctor(
    try_all: Annotated[
        bool,
        typer.Option(
            "--try",
            help="Also import every package that is installed, and check the kernel for few rows of experts on each "
            "GPU, in tens of seconds (estimated).",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what is installed, which devices there are, and which kernels serve which step on them.

    What is missing comes with one line of advice.
    The C++ kernels for this processor are compiled and tested, which takes a few seconds once.

        llamoe doctor
    """
    is_silent = as_json or quiet
    # Not by `load`: what is wrong with torch or transformers is told here.
    packages = importlib.import_module("llamoe_command.doctor_packages")
    with status("looking at packages …", is_silent):
        found = packages.find_packages(try_all)
    content: dict[str, Any] = {
        "versions": packages.versions(),
        "packages": found,
        "devices": {},
        "steps": [],
        "environment": packages.environment(),
        "advice": [],
    }
    try:
        steps = load("llamoe_command.doctor_steps", is_silent)
    # A broken torch raises whatever its loader meets.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        content["advice"].append(f"llamoe cannot be imported, so that no step can be shown: {reason}")
    else:
        from transformers.utils import logging

        # The line of `status` takes the place of what kernels tell while they are compiled.
        logging.disable_progress_bar()
        with status("compiling and testing kernels …", is_silent):
            content["steps"] = steps.find_steps(try_all)
        content["devices"] = steps.describe_devices()
        content["advice"] += [*steps.advice_on_devices(), *steps.advice_on_steps(content["steps"])]
    has_gpu = any(name.startswith("cuda") for name in content["devices"])
    content["advice"] += [
        package.advice for package in found if package.advice and (has_gpu or not package.needs_gpu)
    ]
    for name in ("packages", "steps"):
        content[name] = [dataclasses.asdict(row) for row in content[name]]
    print_sections(content, _sections(content), as_json)


def _sections(content: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    needed, optional = (
        [
            (package["name"], _installed(package))
            for package in content["packages"]
            if package["is_needed"] == is_needed
        ]
        for is_needed in (True, False)
    )
    sections = [
        ("versions", [*content["versions"].items(), *needed]),
        ("optional packages", optional),
        ("devices", [(name, _in_words(facts)) for name, facts in content["devices"].items()]),
    ]
    for device in content["devices"]:
        rows = [
            (step["step"], "; ".join(filter(None, (step["served_by"], step["why"]))))
            for step in content["steps"]
            if step["device"] == device
        ]
        sections.append((f"on {device}", rows))
    if len(content["devices"]) == 1:
        sections.append(("on a GPU", [("", "torch sees none here, so that nothing runs on one")]))
    sections += [
        ("environment", list(content["environment"].items())),
        ("advice", [("", line) for line in content["advice"] or ["nothing is missing"]]),
    ]
    return [(title, rows) for title, rows in sections if rows]


def _installed(package: dict[str, Any]) -> str:
    told = package["version"] or "missing"
    if package["is_needed"]:
        return told
    return f"{told}: {package['purpose']}{', on a GPU' if package['needs_gpu'] else ''}"


def _in_words(facts: dict[str, Any]) -> str:
    # Here, since the import takes seconds; where there are devices it is done already.
    from llamoe.modeling.checkpoints import in_units

    words = [facts["name"]]
    if "capability" in facts:
        words.append(f"capability {facts['capability']}")
    if "cores" in facts:
        bfloat16 = " with bfloat16" if facts["bfloat16_instructions"] else ""
        words.append(f"{facts['instructions']}{bfloat16}")
        words.append(f"{facts['cores']} cores, {facts['threads']} threads of torch")
    if "memory" in facts:
        words.append(f"{in_units(facts['memory'])} of memory, {in_units(facts['free_memory'])} free")
    return ", ".join(words)
