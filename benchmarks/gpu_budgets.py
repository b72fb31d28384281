"""What models of published sizes ask of a GPU, counted without one, and how much of it is allowed.

    python -m benchmarks.gpu_budgets            # counts all cases; writes results/gpu_budgets.json and docs/gpu.md
    python -m benchmarks.gpu_budgets --check    # counts nothing: whether the page and the limits fit the file

A decode step is one token of one row, behind a prompt of 40; a prompt is one row. Models have few layers
(`fake_models.FAMILIES`) on cards of compute capability 8.0, 9.0 and 12.0 that are not there (`fake_cards`).
"""

import argparse
import itertools
import json
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import fake_models
from .cards import CARDS
from .fake_cards import pretend
from .report import ROOT, replaced

RESULTS = ROOT / "benchmarks/results/gpu_budgets.json"
PAGE = ROOT / "docs/gpu.md"
DECODE_CARDS = ("A100", "H100", "RTX 5090")
LENGTHS = (8192, 32768)

LAUNCHES = 45
"""Kernels that a layer may launch in a decode step, whatever attention, cache and adapters it has."""
WAITS = 1
"""Times that the host may wait for a value in a step."""
BYTES = {"bf16": 2.05, "int8": 1.1, "int4": 0.65, "nf4": 0.65}
"""Bytes that a step may move for each weight that it multiplies."""
LORA_BYTES = 1.02
"""Times as many with adapters of rank 8."""
GROWTH = 1.05
"""Times the ratio of tokens, how much more memory a longer prompt may take: none that grows with their square."""
PEAKS = {"dense": 2.77, "mixtral": 2.56, "llama4": 1.34, "llama4-pictures": 1.36}
"""GB beside the weights that a prompt of `LENGTHS[0]` tokens may take in 16 bits, behind cached tokens, too: 1.05 times
what was counted. In 32 bits twice as many, and for a longer prompt by its tokens."""
MORE_PEAKS = {
    ("llama4-pictures", "int4"): 0.17,
    ("llama4-pictures", "int8"): 0.04,
}
"""What unpacking the largest matrix takes besides, where a prompt has more rows than the kernels take."""


def decode_cases() -> Iterator[dict[str, Any]]:
    """All cases of a decode step."""
    what = {
        "family": fake_models.FAMILIES,
        "weights": fake_models.FORMATS,
        "lora": (False, True),
        "attention": ("sdpa", "eager"),
        "cache": ("dynamic", "static"),
        "card": DECODE_CARDS,
    }
    for values in itertools.product(*what.values()):
        yield dict(zip(what, values, strict=True))


def decode(case: dict[str, Any]) -> dict[str, Any]:
    """Counts of a decode step."""
    with pretend(CARDS[case["card"]]) as recorder:
        model = fake_models.build(case["family"], case["weights"], case["attention"], case["lora"])
        found = fake_models.decode_step(recorder, model, case["cache"])
    counts = found["counts"]
    return {
        **case,
        "launches_a_layer": round(found["launches_a_layer"], 2),
        "launches": counts.launches,
        "waits": counts.waits,
        "results_on_host": counts.on_host,
        "bytes_a_weight": round(found["bytes_a_weight"], 3),
        "attention_kernels": sorted(counts.kernels),
    }


def prefill_cases() -> Iterator[dict[str, Any]]:
    """All cases of a prompt; on cards without bfloat16, or in float32, the kernel of attention is another."""
    for family in fake_models.FAMILIES:
        for dtype, card in (("bfloat16", "H100"), ("float32", "A100"), ("float16", "T4")):
            yield dict(card=card, family=family, dtype=dtype, weights="bf16")
        for weights in fake_models.FORMATS[1:]:
            yield dict(card="H100", family=family, dtype="bfloat16", weights=weights)


def prefill(case: dict[str, Any]) -> dict[str, Any]:
    """Peaks of memory of prompts of all lengths, and of one behind cached tokens, and attention's kernels."""
    with pretend(CARDS[case["card"]]) as recorder:
        model = fake_models.build(case["family"], case["weights"], dtype=getattr(torch, case["dtype"]))
        found = [fake_models.prefill(recorder, model, length) for length in LENGTHS]
        behind = fake_models.prefill(recorder, model, LENGTHS[0], LENGTHS[1])
    kernels = set().union(*(each.kernels for each in (*found, behind)))
    return {
        **case,
        "layers": len(fake_models.layers_of(model)),
        "peak": [each.peak for each in found],
        "peak_behind": behind.peak,
        "attention_kernels": sorted(kernels),
    }


def _hopper(*_: Any) -> tuple[int, int]:
    # Compilers follow functions, and no mocks.
    return 9, 0


def graphs(family: str, weights: str = "bf16", lora: bool = False) -> dict[str, Any]:
    """How many graphs a step with a cache of fixed length is, and how many heads of keys its attention is given."""
    from transformers import StaticCache

    made: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph

    torch._dynamo.reset()
    config = fake_models.config_of(family, "sdpa")
    with mock.patch.object(torch.cuda, "get_device_capability", _hopper), torch.no_grad():
        with fake_models.plain_fakes():
            model = fake_models.build(family, weights, lora=lora)
            model = model.get_base_model() if lora else model
            cache = StaticCache(config=config.get_text_config(decoder=True), max_cache_len=512)
            decoder: Any = getattr(model, "language_model", model)
            decoder(torch.ones(1, 8, dtype=torch.long, device="cuda"), past_key_values=cache)
            step = torch.compile(decoder.forward, fullgraph=True, backend=keep, dynamic=False)
            token, position = (torch.ones(1, 1, dtype=torch.long, device="cuda") for _ in range(2))
            step(token, past_key_values=cache, position_ids=position)
    torch._dynamo.reset()
    calls = [node for graph in made for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    heads = {
        (node.args[0].meta["example_value"].shape[1], node.args[1].meta["example_value"].shape[1])
        for node in calls
    }
    facts = {"family": family, "weights": weights, "lora": lora}
    return {**facts, "graphs": len(made), "heads_of_queries_and_keys": sorted(map(list, heads))}


def exceeded(results: dict[str, Any]) -> list[str]:
    """Sentences about what is above its limit."""
    found = []
    for row in results["decode"]:
        name = ", ".join(f"{key} {value}" for key, value in row.items() if key in KEYS)
        most = BYTES[row["weights"]] * (LORA_BYTES if row["lora"] else 1)
        limits = dict(launches_a_layer=LAUNCHES, waits=WAITS, results_on_host=0, bytes_a_weight=most)
        found += [
            f"{name}: {row[key]} {key}, at most {most}" for key, most in limits.items() if row[key] > most
        ]
        if "math" in row["attention_kernels"]:
            found.append(f"{name}: attention's scores are multiplied out")
    for row in results["prefill"]:
        name = ", ".join(f"{key} {value}" for key, value in row.items() if key in KEYS)
        if row["peak"][1] > GROWTH * LENGTHS[1] / LENGTHS[0] * row["peak"][0]:
            found.append(f"{name}: memory of a prompt grows faster than its tokens: {row['peak']}")
        most = PEAKS[row["family"]] * 1e9 * getattr(torch, row["dtype"]).itemsize / 2
        more = MORE_PEAKS.get((row["family"], row["weights"]), 0) * 1e9
        peaks = (*zip(LENGTHS, row["peak"], strict=True), (LENGTHS[0], row["peak_behind"]))
        found += [
            f"{name}: {peak / 1e9:.2f} GB for {length} tokens, at most {(most * length / LENGTHS[0] + more) / 1e9:.2f}"
            for length, peak in peaks
            if peak > most * length / LENGTHS[0] + more
        ]
        if "math" in row["attention_kernels"]:
            found.append(f"{name}: attention's scores are multiplied out")
    for row in results["compiled"]:
        if row["graphs"] != 1 or any(queries != keys for queries, keys in row["heads_of_queries_and_keys"]):
            found.append(f"compiled: {row}")
    return found


KEYS = ("card", "family", "weights", "attention", "cache", "lora", "dtype")
_NAMES = {
    "dense": "LLaMA 2 70B",
    "mixtral": "Mixtral 8x7B",
    "llama4": "Llama 4 Scout",
    "llama4-pictures": "the same with a picture",
}


def section(results: dict[str, Any]) -> str:
    """The tables of the page."""
    decoded = {tuple(row[key] for key in KEYS[:-1]): row for row in results["decode"]}

    def cells(family: str, weights: str, card: str) -> str:
        rows = [decoded[card, family, weights, "sdpa", "dynamic", lora] for lora in (False, True)]
        launches, waits = (
            " / ".join(f"{row[key]:g}" for row in rows) for key in ("launches_a_layer", "waits")
        )
        moved = " / ".join(f"{row['bytes_a_weight']:.2f}" for row in rows)
        return f"{launches} | {waits} | {moved}"

    lines = [
        "One token of one row by torch without a compiler, under `sdpa` with a cache that grows, on a card like an "
        "H100. Cells give the number without / with LoRA of rank 8 on all layers and experts. Launches are counted for "
        "one layer, and bytes for each weight that the layer multiplies:",
        "",
        "| | weights | launches | waits of the host | bytes a weight |",
        "|---|---|---|---|---|",
    ]
    for family, weights in itertools.product(("dense", "mixtral", "llama4"), fake_models.FORMATS):
        lines.append(f"| {_NAMES[family]} | {weights} | {cells(family, weights, 'H100')} |")
    lines += [
        "",
        "Prompts: the peak memory beside the weights, in GB, of models with few layers, and the kernel that torch's "
        f"attention chooses. In the last column a prompt of {LENGTHS[0]} tokens follows {LENGTHS[1]} cached tokens. A "
        "picture's 144 tokens are added to a prompt:",
        "",
        f"| | layers | card like | weights | dtype | kernel | {LENGTHS[0]} tokens | {LENGTHS[1]} tokens | "
        "behind cached ones |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["prefill"]:
        peaks = " | ".join(f"{peak / 1e9:.2f}" for peak in (*row["peak"], row["peak_behind"]))
        lines.append(
            f"| {_NAMES[row['family']]} | {row['layers']} | {row['card']} | {row['weights']} | {row['dtype']} | "
            f"{', '.join(row['attention_kernels'])} | {peaks} |"
        )
    graphs = {row["graphs"] for row in results["compiled"]}
    if graphs == {1}:
        lines += [
            "",
            "A decode step that `torch.compile` compiles, with a cache of fixed length, is one graph without a break, "
            "in all four formats, with LoRA and without, of the three decoders.",
        ]
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 120) for line in lines)


def count() -> dict[str, Any]:
    """All cases."""
    results: dict[str, Any] = {"decode": [], "prefill": [], "compiled": []}
    for case in decode_cases():
        results["decode"].append(decode(case))
        print(results["decode"][-1], flush=True)
    for case in prefill_cases():
        results["prefill"].append(prefill(case))
        print(results["prefill"][-1], flush=True)
    for case in itertools.product(("dense", "mixtral", "llama4"), fake_models.FORMATS, (False, True)):
        results["compiled"].append(graphs(*case))
        print(results["compiled"][-1], flush=True)
    return results


def write(results: dict[str, Any], path: Path) -> None:
    """Write results, a case a line."""
    blocks = [
        f'"{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"
        for name, rows in results.items()
    ]
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def main() -> int:
    """Count, or check the page; exit status 1 where something is above its limit, or the page is stale."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_budgets", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="count nothing and write nothing")
    options = parser.parse_args()
    if not options.check:
        warnings.simplefilter("ignore")
        write(count(), RESULTS)
    results, text = json.loads(RESULTS.read_text()), PAGE.read_text()
    wanted = replaced(text, section(results), "budgets", PAGE.name)
    problems = exceeded(results)
    if options.check and wanted != text:
        problems.append("docs/gpu.md is stale: run `python -m benchmarks.gpu_budgets`")
    elif wanted != text:
        PAGE.write_text(wanted)
    print(*problems, sep="\n", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
