"""Results as JSON (everything), Markdown (tables) and lines for the terminal."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from . import AGAIN, REFERENCE, bars

ROOT = Path(__file__).parents[1]

TITLES = {
    "cpu": "Speed on a CPU",
    "cpu_avx2": "Speed on a CPU that is held to AVX2",
    "gpu": "Speed on a GPU",
}
GROUPS = {
    "block": "Mixture block, forward",
    "training": "Mixture block, forward and backward",
    "adapters": "LoRA on experts: a mixture block, forward and backward; a decoder, one step",
    "decoder": "Whole decoder, every layer a mixture",
    "dense": "Dense LLaMA",
    "chunked": "One layer of chunked attention, prefill, with its masks built",
    "window": "One layer of attention under a sliding window, prefill, with its masks built",
    "mixtral": "Mixtral's block, 8 experts, 2 chosen",
    "vision": "Vision tower",
    "parts": "Small parts",
    "few": "Quantization: a token, prefill, quantizing, adapters",
    "llama.cpp": "One row beside llama.cpp: a token, also in a long context, prefill, two threads",
    "7b": "Sizes of 7B models: a token, a prompt",
    "large": "Layers of a published size in int4",
    "offload": "Experts on disk: a token, and reading all",
    "loading": "`from_pretrained`",
}
NOTES = {
    "block": "`stock` is transformers' `Llama4TextMoe`, `llamoe` our block as it comes; `grouped_mm` and `batched_mm` "
    "are our block with transformers' implementations of the experts. All hold the same weights. B tokens of B rows, "
    "or T tokens of one. Each token's expert is drawn evenly, or by Zipf's law.",
    "training": "Gradients of weights and inputs are compared.",
    "adapters": "`stock` is peft's own wrapper of a parameter, which adds the update to the weights of all experts; "
    "`llamoe` adds it to their products. Both are around our block, or decoder, with the same weights and factors, "
    "r = 16; `frozen` is that without adapters. Gradients of inputs and factors are compared.",
    "decoder": "`Llama4ForCausalLM` and `LlamoeForCausalLM` with logits of all positions. Decoding is one step after "
    "64 cached tokens a row. On the CPU the head has 2048 rows: 1 % of the weights, as in Scout.",
    "dense": f"`LlamaForCausalLM` and `LlamoeDenseForCausalLM`, as above. `{AGAIN}` is stock against itself: how "
    "far its ratio lies from one is noise.",
    "chunked": "The layer's feed-forward is as small as its attention.",
    "window": "`MistralModel` and `LlamoeDenseModel`; the layer's feed-forward is as small as its attention.",
    "mixtral": "`stock` is transformers' `MixtralSparseMoeBlock` with `grouped_mm`, which its models choose, and "
    "with its other implementations. All hold the same weights.",
    "parts": "`nn.LayerNorm` computes another function and is not compared.",
    "few": "Our models with 114 million (dense) and 197 million parameters (mixture). Ratios are the time in bfloat16 "
    "over the contestant's. Quantizing is `from_pretrained` of a folder in float32 that the page cache holds. MB of "
    "weights are those of all parameters and buffers. Adapters are `lora_config`'s, beside weights in each "
    "precision; a step is a forward and a backward pass.",
    "llama.cpp": "The same models, one row, greedily, by `generate`; times are of one token, the mean of the first "
    "24. In a long context the cache holds 2,000 tokens before them. A prefill yields the logits of all tokens. Two "
    "threads are measured in wall time, and not at all where other "
    "load would decide. `stock` is transformers in float32. llama.cpp's "
    "files are those that its converter makes, and its quantizer for q4_0 (with AMX: `benchmarks/held.py`): there "
    "all matrices have that type, but the head has q6_K; the head is below 1 % of the weights. "
    "Logits are compared in float32. After a contestant's name stand the MB of its weights, and how many of its first "
    "tokens are those of the first contestant: with random weights rounding soon leads to another token. Of llama.cpp "
    "peak memory is not seen.",
    "7b": "One row, one thread; times are of one token, or of a prompt with the logits of its last token. Three layers "
    "of Mistral 7B's sizes; two of Mixtral 8x7B's with four experts, two of them for a token. Weights and what is "
    "cached are random. Ratios are the time of transformers in bfloat16 over the contestant's.",
    "large": "Four of Mixtral 8x7B's layers, with embedding and head, from random codes and scales. Ratios are the "
    "time of a plain read of as many bytes as a token's weights have, over the token's.",
    "offload": "A mixture of 6 layers with 64 experts of 6.3 MB, one of them for a token, in bfloat16; "
    "which one is drawn. "
    "One row, a token a pass, after 96 tokens that fill the memory. Wall time, of each token the fastest of the "
    "rounds in which the three alike take turns; ratios are the time with all experts in memory over the "
    "contestant's. `llamoe` reads past the page cache into memory for a share of the experts, `page cache` reads "
    "through it into the same memory; `mapped, with advice` leaves the experts mapped, announces those that come, "
    "and takes out those that an equal memory would replace; `accelerate` is its offload of the same experts, "
    "which has no memory for them. Nobody finds experts in the page cache for which there was no room: they are "
    "dropped before each token. Logits have the same bits, accelerate's up to rounding. Peak memory is the "
    "process's above imports and all other weights, in brackets without mapped files. Then all "
    "experts are read, with room for a quarter: by the store alone (`llamoe`), and in a pass (`with products`), "
    "beside as many bytes of the same files in direct requests of 4 MiB by 8 threads; there a ratio is a share of the "
    "drive's rate, and the target judges the fastest round of each.",
    "loading": f"Wall clock, files in the page cache; stock, ours and stock once more (`{AGAIN}`) in processes that "
    "take turns. The second checkpoint has many small tensors in many shards. On a CPU transformers maps the files; so "
    "each weight is read once, and the time until then is given, in brackets that of `from_pretrained` alone. The peak "
    "is the process's at its first load, above what it held before, with mapped pages of the files; in brackets "
    "without them.",
}
HOW = {
    "cpu": "One thread; processor time of the process. Other data is read before each sample, since in a model of many "
    "layers a layer's weights have left the caches: of repeated runs they would not, which flatters whoever reads "
    "little. Up to 16 tokens go through equal blocks in turn for the same reason; one token is measured on a single "
    "block besides, again and again. Peak memory is what torch's allocator gives out above weights and inputs.",
    "cpu_avx2": "A processor with AVX-512, held to AVX2 without AVX-VNNI: torch, oneDNN and MKL by their variables, "
    "llamoe's kernels and llama.cpp by what they were compiled for (`benchmarks/held.py`). Its caches and memory stay "
    "what they are. One thread; processor time.",
    "gpu": "Time between CUDA events around runs that follow one another; peak memory is that of torch's allocator, "
    "above weights and inputs. Runs from CUDA graphs have their memory in the graph's pool, where it is not seen.",
}


def merge(results: dict, new: dict, order: Sequence[str]) -> dict:
    """Merge a group's new results into earlier results, in place of the group's old ones.

    Args:
        results: `{"runs": [...], "cases": [...]}`, or empty.
        new: the run's `about`, the name of the `group`, and its `results`.
        order: order of the groups.

    Returns:
        the merged results, without runs that no case refers to.
    """
    runs, cases = list(results.get("runs", [])), results.get("cases", [])
    if new["about"] not in runs:
        runs.append(new["about"])
    number = runs.index(new["about"])
    cases = [case for case in cases if case["group"] != new["group"]]
    cases += [{"run": number, **case} for case in new["results"]]
    cases.sort(key=lambda case: order.index(case["group"]) if case["group"] in order else len(order))
    used = sorted({case["run"] for case in cases})
    return {
        "runs": [runs[number] for number in used],
        "cases": [{**case, "run": used.index(case["run"])} for case in cases],
    }


def write(results: dict, folder: Path, name: str) -> None:
    """Write the figure, where matplotlib is installed, and the page."""
    if name == "cpu_avx2":
        return write_page(results, folder, name)
    try:
        from .plot import draw
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _say_once(
            "matplotlib is not installed: no figure. `python -m benchmarks.plot` draws it from the results."
        )
    else:
        draw(results, folder / f"{name}.svg")
    write_page(results, folder, name)


def write_page(results: dict, folder: Path, name: str) -> None:
    """Write the page alone, with the figure that is there."""
    (folder / f"{name}.md").write_text(page(results, name, (folder / f"{name}.svg").exists()))


def replaced(text: str, body: str, what: str, name: str) -> str:
    """A page's text with a new body between `<!-- what: written by ... -->` and `<!-- end of what -->`.

    Raises:
        ValueError: the marks do not stand once each, in order.
    """
    marks = re.findall(rf"<!-- (?:{what}: |end of {what} )", text)
    found = re.search(rf"(<!-- {what}: .*? -->\n).*(<!-- end of {what} -->)", text, re.DOTALL)
    if found is None or len(marks) != 2:
        raise ValueError(
            f"{name} needs the marks <!-- {what}: ... --> and after it <!-- end of {what} -->, once each"
        )
    return f"{text[: found.end(1)]}\n{body}\n\n{text[found.start(2) :]}"


@cache
def _say_once(text: str) -> None:
    print(text)


def page(results: dict, name: str, has_figure: bool = True) -> str:
    """The results as a Markdown page."""
    lines = [f"# {TITLES[name]}", "", HOW[name], ""]
    lines += [
        "Ratios are stock's time over the contestant's, the median of the rounds, quartiles in brackets. The roofline "
        "is the larger of two times, over the measured one: the bytes that must move at the rate of a large copy, "
        "the operations at the rate of a large product.",
        "",
    ]
    if has_figure:
        lines += [f"![Ratios and memory]({name}.svg)", ""]
    lines += ["## What is wanted", "", *bars.table(results, name), ""]
    groups = list(dict.fromkeys(case["group"] for case in results["cases"]))
    for kind, title in GROUPS.items():
        its = [group for group in groups if group.split("-")[0] == kind]
        if not its:
            continue
        lines += [f"## {title}", ""]
        if kind in NOTES:
            lines += [NOTES[kind], ""]
        for group in its:
            cases = [case for case in results["cases"] if case["group"] == group]
            if len(its) > 1:
                lines += [f"### {group}", ""]
            lines += [*group_table(cases), ""]
    lines += ["## Made by", ""]
    for number, about in enumerate(results["runs"]):
        its = list(dict.fromkeys(case["group"] for case in results["cases"] if case["run"] == number))
        lines += [f"- `{about['command']}` ({', '.join(its)}): {about_line(about)}"]
    if failed := failures(results):
        lines += ["", "## Failures", "", *(f"- {line}" for line in failed)]
    return "\n".join(lines) + "\n"


def failures(results: dict) -> list[str]:
    """Failures in words."""
    found = ((f"{case['group']}, {case['case']}", case["failures"]) for case in results["cases"])
    return [f"{where}: {text}" for where, texts in found for text in texts]


def group_table(cases: list[dict]) -> list[str]:
    """Table rows, one for each contestant of each case."""
    lines = ["| case | | ms | quartiles | ratio | peak MB | roofline |", "|---|---|---|---|---|---|---|"]
    for case in cases:
        label = case["case"]
        if "distinct" in case:
            label += f" ({case['distinct']} experts hit, largest share {case['largest_share']:.0%})"
        for name, row in case["contestants"].items():
            cells = [label, name + _aside(case, name)]
            if row.get("seconds"):
                low, high = row["quartiles"]
                median = milliseconds(row["median"])
                if "returned" in row:
                    median += f" ({milliseconds(row['returned'])})"
                cells += [median, f"{milliseconds(low)}–{milliseconds(high)}"]
                cells += [ratio(row), megabytes(row), percent(row.get("roofline"))]
            else:
                cells += [f"skipped: {row.get('skipped', '')}", "", "", megabytes(row), ""]
            lines.append("| " + " | ".join(cells) + " |")
            label = ""
        if not case["contestants"]:
            lines.append(f"| {label} | failed, see below | | | | | |")
    return lines


def _aside(case: dict, name: str) -> str:
    """The size of a contestant's weights, its first tokens, hits and bytes, where the case has them."""
    said = []
    if nbytes := case.get("nbytes_of", {}).get(name):
        said.append(f"{nbytes / 1e6:.0f} MB")
    if name in (first := case.get("first_tokens", {})):
        said.append(f"{first[name]} of {case['new']} tokens")
    row = case["contestants"][name]
    if "hit_rate" in row:
        said.append(f"{row['hit_rate']:.1%} hits")
    if "read_bytes" in row:
        said.append(f"{row['read_bytes'] / 1e6:.1f} MB read")
    return f" ({', '.join(said)})" if said else ""


def milliseconds(seconds: float) -> str:
    """A time with three significant digits."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio(row: dict) -> str:
    """A contestant's ratio with its quartiles."""
    if "ratio" not in row:
        return "—"
    low, high = row["ratio_quartiles"]
    return f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})"


def megabytes(row: dict) -> str:
    """A contestant's peak memory."""
    if row.get("peak_bytes") is None:
        return "—"
    text = f"{row['peak_bytes'] / 1e6:.1f}"
    return f"{text} ({row['anonymous_bytes'] / 1e6:.1f})" if "anonymous_bytes" in row else text


def percent(fraction: float | None) -> str:
    """A fraction of the roofline."""
    return "—" if fraction is None else f"{fraction:.0%}"


def about_line(about: dict) -> str:
    """Machine, versions and rates in one line."""
    where = (
        about.get("device") or f"{about['processor']}, {about['threads']} of {about['processors']} processors"
    )
    where += f", {about['instructions']}" if "instructions" in about else ""
    versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
    at = f" at {about['commit']}" if about.get("commit") else ""
    return (
        f"{about['date']}{at}, {where}, {about['system']}, Python {about['python']}, {versions}; {about['dtype']}; "
        f"copy {about['bytes_per_second'] / 1e9:.3g} GB/s, product {about['flops_per_second'] / 1e9:.3g} GFLOP/s"
    )


def case_line(result: dict) -> str:
    """A case's result in one line, for the terminal."""
    parts = []
    for name, row in result["contestants"].items():
        if not row.get("seconds"):
            parts.append(f"{name} skipped ({row.get('skipped', '')})")
        elif name == REFERENCE:
            parts.append(f"{name} {milliseconds(row['median'])} ms")
        else:
            ratio = f" = {row['ratio']:.2f}x" if "ratio" in row else ""
            parts.append(f"{name} {milliseconds(row['median'])} ms{ratio}")
    parts += [f"FAILED: {failure}" for failure in result["failures"]]
    return f"{result['group']}: {result['case']}: {'; '.join(parts)}"
