"""What few bits cost the small model: its answers, and how well it foretells the expected ones; and its experts' hits.

    python -m benchmarks.quality        # writes results/quality.json and a table of docs/quantization.md
    python -m benchmarks.quality rows   # rows in 8 bits: results/quality_rows.json and the table after it
    python -m benchmarks.quality hits   # the table and the figure of docs/expert_hit_rates.md

Every variant, llamoe's formats and those of bitsandbytes beside 16 bit, gets the same questions in the same batches,
those of the three columns of `examples/tiny/examine.py`. So the answers to each question are compared in pairs, and
the standard error is that of the differences. The perplexity is that of the expected answers, their end included, after
picture and question. Hits are those that the model's own store counts while it answers one question after the other.
"""

import importlib.metadata
import json
import logging
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
)

import llamoe
from llamoe.modeling.formats import Int4, Int8
from llamoe.modeling.kernels import cpp_kernels, float32_blocks, rows_in_bytes

from .command_line import RESULTS
from .large_mixtures import Expert, passes_of, simulate
from .report import ROOT, replaced

sys.path.append(str(ROOT / "examples/tiny"))
from examine import WORDINGS, Case, draw_cases, prompts

FOLDER = ROOT / "examples/llamoe-tiny"
COUNT = 3840
"""Questions in each column."""
HITS_COUNT = 480
"""Questions for the hit rates."""
BARS = {"int8": 0.2, "int4": 2.0}
"""Points of accuracy that llamoe's formats may cost."""
BASE = "16 bit"
ROWS = {"rows in 16 bit": "float", "rows in 8 bits": "int8"}
GROUP = 32
"""Inputs that share a scale where the kernels quantize rows."""
OUTLIERS = (1, 10, 100)
"""What an input in each group of a scale is multiplied by where products are compared."""
# What llamoe's formats leave in 16 bit, for bitsandbytes to leave, too.
_KEPT = ["lm_head", "vision_model", "multi_modal_projector"]


def variants() -> dict[str, dict[str, Any]]:
    """Name to arguments of `from_pretrained`."""
    found: dict[str, dict[str, Any]] = {"32 bit": {"dtype": torch.float32}, BASE: {}}
    for name, fields in {
        "int8": {"weights": "int8"},
        "int4, groups of 32": {"weights": "int4", "group_size": 32},
        "int4, groups of 64": {"weights": "int4", "group_size": 64},
    }.items():
        ways = {"": {}, ", experts in 16 bit": {"experts": False}, ", without search": {"search": False}}
        for suffix, more in ways.items():
            config = llamoe.QuantizationConfig(**fields, **more, activations="float")
            found[name + suffix] = {"quantization_config": config}
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    for name, fields in {"bitsandbytes 8 bit": {"load_in_8bit": True}, "bitsandbytes nf4": nf4}.items():
        for suffix, skipped in {"": _KEPT, ", experts in 16 bit": [*_KEPT, "experts"]}.items():
            config = BitsAndBytesConfig(**fields, llm_int8_skip_modules=skipped)
            found[name + suffix] = {"quantization_config": config}
    return found


def variants_of_rows() -> dict[str, dict[str, Any]]:
    """The same for rows in 8 bits, which the kernels of a CPU multiply by packed weights, and rows as they are."""
    found: dict[str, dict[str, Any]] = {BASE: {}}
    for name, fields in {
        "int8": ("int8",),
        "int4, groups of 32": ("int4", 32),
        "int4, groups of 64": ("int4", 64),
    }.items():
        for rows, activations in ROWS.items():
            config = llamoe.QuantizationConfig(*fields, activations=activations)
            found[f"{name}, {rows}"] = {"quantization_config": config}
    return found


@dataclass
class Answers:
    """What a variant answered.

    Attributes:
        texts: of each question the answer.
        surprise: of each question the negative log likelihood of the expected answer's tokens, `[questions]` float64.
        nbytes: bytes of the decoder.
    """

    texts: list[str]
    surprise: torch.Tensor
    nbytes: int


class Examination:
    """Questions, ready for any variant."""

    def __init__(self, folder: str | Path, count: int):
        self.folder = folder
        self.processor = AutoProcessor.from_pretrained(folder)
        base = AutoModelForImageTextToText.from_pretrained(folder)
        self.sizes = dict.fromkeys(WORDINGS, count)
        self.batches: list[Any] = []
        self.answers: list[str] = []
        for wording in WORDINGS:
            # Answers of one length together: a batch is generated until its longest one ends.
            cases = sorted(draw_cases(count, wording), key=lambda case: len(case.answer))
            self.answers += [case.answer for case in cases]
            # Pixels have the numbers of bfloat16 in any dtype. The pictures themselves would fill gigabytes.
            given = [case.picture for case in cases], [case.question for case in cases]
            self.batches += prompts(base, self.processor, *given)
        tokenizer = self.processor.tokenizer
        end = tokenizer.convert_tokens_to_ids("<|eot|>")
        self.expected = [
            [*tokenizer(answer, add_special_tokens=False)["input_ids"], end] for answer in self.answers
        ]
        self.tokens = torch.tensor([len(ids) for ids in self.expected], dtype=torch.float64)

    @torch.inference_mode()
    def ask(self, arguments: dict[str, Any]) -> Answers:
        """Load a variant, ask it everything, and measure how likely the expected answers are for it."""
        model: Any = AutoModelForImageTextToText.from_pretrained(self.folder, **arguments).eval()
        texts: list[str] = []
        surprise: list[torch.Tensor] = []
        for inputs in self.batches:
            inputs = inputs.to(dtype=model.dtype)
            generated = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
            # Without the texts of this batch, their number is that of the questions before it.
            expected = self.expected[len(texts) : len(texts) + len(generated)]
            surprise.append(surprise_of(model, inputs, expected))
            texts += [
                text.strip() for text in self.processor.batch_decode(generated, skip_special_tokens=True)
            ]
        weights = [*model.named_parameters(), *model.named_buffers()]
        nbytes = sum(stored_bytes(tensor) for name, tensor in weights if "language_model" in name)
        return Answers(texts, torch.cat(surprise), nbytes)

    def right(self, answers: Answers) -> torch.Tensor:
        """Whether each answer is the expected one, as numbers."""
        pairs = zip(answers.texts, self.answers, strict=True)
        return torch.tensor([text == expected for text, expected in pairs], dtype=torch.float64)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, with the scales and codes of one that bitsandbytes has quantized."""
    state, scales = getattr(tensor, "quant_state", None), getattr(tensor, "SCB", None)
    parts = [] if state is None else list(state.as_dict(packed=True).values())
    parts += [] if scales is None else [scales]
    return tensor.nbytes + sum(part.nbytes for part in parts)


def surprise_of(model: Any, inputs: Any, expected: list[list[int]]) -> torch.Tensor:
    """Negative log likelihood of each row's expected tokens after its prompt, `[rows]` float64."""
    longest = max(map(len, expected))
    rows = torch.tensor([ids + [0] * (longest - len(ids)) for ids in expected])
    is_there = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in expected])
    whole = dict(inputs)
    whole["input_ids"] = torch.cat([inputs["input_ids"], rows], 1)
    whole["attention_mask"] = torch.cat([inputs["attention_mask"], is_there], 1)
    logits = model(**whole).logits[:, -longest - 1 : -1].double()
    chosen = logits.log_softmax(-1).gather(2, rows[:, :, None])[:, :, 0]
    return -(chosen * is_there).sum(1)


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """The mean, and its standard error."""
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item()


@dataclass(frozen=True)
class Row:
    """What is told of a variant.

    Attributes:
        name: of the variant.
        decoder_bytes: bytes of the decoder's weights.
        accuracy: part of the answers that are exactly right.
        columns: the same for each column.
        change, change_error: of the accuracy against 16 bit, question by question, and its standard error.
        same: part of the answers that are those of 16 bit, right or wrong.
        perplexity: of the expected answers.
        surprise_change, surprise_error: of its logarithm, against 16 bit, and its standard error.
    """

    name: str
    decoder_bytes: int
    accuracy: float
    columns: dict[str, float]
    change: float
    change_error: float
    same: float
    perplexity: float
    surprise_change: float
    surprise_error: float


def compare(exam: Examination, name: str, given: Answers, base: Answers) -> Row:
    """The row of a variant."""
    right = exam.right(given)
    total = exam.tokens.sum()
    more = given.surprise - base.surprise
    per_token = (more.sum() / total).item()
    # A ratio of two sums: what a question adds beyond its part of the tokens.
    _, error = mean_and_error((more - per_token * exam.tokens) / exam.tokens.mean())
    parts = zip(exam.sizes, right.split(list(exam.sizes.values())), strict=True)
    columns = {wording: part.mean().item() for wording, part in parts}
    same = sum(a == b for a, b in zip(given.texts, base.texts, strict=True)) / len(base.texts)
    perplexity = math.exp((given.surprise.sum() / total).item())
    change = mean_and_error(right - exam.right(base))
    return Row(name, given.nbytes, right.mean().item(), columns, *change, same, perplexity, per_token, error)


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of measured rows."""
    lines = [
        "| | bytes of the decoder | right answers | change in points | same answer as in 16 bit | perplexity "
        "| change of perplexity |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        change, same, more = "", "", ""
        if row["name"] != BASE:
            change = f"{100 * row['change']:+.2f} ± {100 * row['change_error']:.2f}"
            same = f"{row['same']:.1%}"
            # Of small numbers the logarithm's change is the relative one.
            more = f"{100 * row['surprise_change']:+.2f}% ± {100 * row['surprise_error']:.2f}"
        lines.append(
            f"| {row['name']} | {row['decoder_bytes'] / 1e6:.2f} MB | {row['accuracy']:.2%} | {change} | {same} "
            f"| {row['perplexity']:.4f} | {more} |"
        )
    return "\n".join(lines)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Sentences on formats that cost more than their bar."""
    return [
        f"{row['name']}: {-100 * row['change']:.2f} points lost, {bar} were allowed"
        for row in rows
        for kind, bar in BARS.items()
        if row["name"].startswith(kind) and -100 * row["change"] > bar
    ]


def ask_all(wanted: dict[str, dict[str, Any]], count: int, results: Path, **more: Any) -> str:
    """Ask some variants and write the results; their table."""
    # It says for every layer of every batch in which dtype it multiplies.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    exam = Examination(FOLDER, count)
    base, rows = exam.ask(wanted[BASE]), []
    for name, arguments in wanted.items():
        rows.append(asdict(compare(exam, name, base if name == BASE else exam.ask(arguments), base)))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "bitsandbytes")}
    content = {
        "questions": len(exam.answers),
        "tokens": int(exam.tokens.sum()),
        "versions": versions,
        "rows": rows,
        **more,
    }
    results.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(missed(rows)))
    return table(rows)


def few_bits(count: int = COUNT, results: Path = RESULTS / "quality.json") -> str:
    """What the weights' formats cost."""
    return ask_all(variants(), count, results)


def few_bits_of_rows(count: int = COUNT, results: Path = RESULTS / "quality_rows.json") -> str:
    """What rows in 8 bits cost beside them, in answers and in products.

    Raises:
        RuntimeError: no kernel multiplies rows in 8 bits here.
    """
    if absence := cpp_kernels.why_no_cpp_kernels():
        raise RuntimeError(f"rows in 8 bits need llamoe's C++ kernels: {absence[0]}")
    # With AMX, many rows are multiplied as they are.
    with mock.patch.object(float32_blocks, "_HAS_AMX", False):
        if rows_in_bytes() < sys.maxsize:
            raise RuntimeError(f"only {rows_in_bytes()} rows would be in 8 bits")
        products = errors_of_products()
        text = ask_all(variants_of_rows(), count, results, products=products)
    return f"{text}\n\n{table_of_products(products)}"


def errors_of_products(num_out: int = 512, num_in: int = 2048, num_rows: int = 64) -> list[dict[str, Any]]:
    """Relative errors of products by the kernels: root mean squares, over those of the exact products.

    Rows and weights are normal numbers. Of the inputs that share a scale one is multiplied by a factor, as a few
    channels of trained models are large.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, num_in, generator=generator) for size in (num_out, num_rows))
    found = []
    for factor in OUTLIERS:
        rows = x.clone()
        rows[:, ::GROUP] *= factor
        rows = rows.bfloat16()
        exact = rows.double() @ weight.double().T
        for name, form in {"int8": Int8(), "int4, groups of 32": Int4(32)}.items():
            parts, sizes = form.quantize(weight), (num_out, num_in)
            meant = rows.double() @ form.matrix(parts, sizes, torch.float32).double().T
            given = replace(form, in_bytes=True).multiply(rows, parts, sizes).double()
            errors = {"weights": meant - exact, "rows": given - meant, "both": given - exact}
            row = {
                part: (error.square().mean() / exact.square().mean()).sqrt().item()
                for part, error in errors.items()
            }
            found.append({"name": name, "factor": factor, **row})
    return found


def table_of_products(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of products' errors."""
    lines = [
        "| a product in | one input of 32 multiplied by | error from the weights | from rows in 8 bits | from both |",
        "|:--|--:|--:|--:|--:|",
    ]
    for row in rows:
        errors = " | ".join(f"{row[part]:.2%}" for part in ("weights", "rows", "both"))
        lines.append(f"| {row['name']} | {row['factor']} | {errors} |")
    return "\n".join(lines)


@torch.no_grad()
def trace_answers(model: Any, processor: Any, cases: list[Case]) -> tuple[list[list[Expert]], list[bool]]:
    """Ask one question after the other; what each pass asks of a store, and whether it is a prompt's."""
    passes, of_prompts = [], []
    for case in cases:
        (inputs,) = prompts(model, processor, [case.picture], [case.question])
        with llamoe.trace_experts(model) as trace:
            model.generate(**inputs)
        length = inputs["input_ids"].shape[1]
        prompt, answer = trace.experts().tensor_split([length], dim=1)
        passes += [sorted({expert for token in passes_of(prompt) for expert in token}), *passes_of(answer)]
        of_prompts += [True, *[False] * answer.shape[1]]
    return passes, of_prompts


def hits(count: int = HITS_COUNT, figure: Path = ROOT / "docs/expert_hit_rates.svg") -> str:
    """Hit rates with room for one expert, for two, and so on, as a table; and as a figure."""
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(FOLDER)
    cases = draw_cases(count, "trained")
    model = llamoe.LlamoeForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()
    text = model.config.text_config
    total = len(text.moe_layers) * text.num_local_experts
    passes, of_prompts = trace_answers(model, processor, cases)
    used = Counter(
        expert
        for asked, is_prompt in zip(passes, of_prompts, strict=True)
        if not is_prompt
        for expert in asked
    )
    lines: dict[str, list[float]] = {
        "tokens of answers": [],
        "prompts": [],
        "most used ones, for answers": [],
    }
    asked = Counter(dict.fromkeys((False, True), 0))
    for each, is_prompt in zip(passes, of_prompts, strict=True):
        asked[is_prompt] += len(each)
    for room in range(1, total + 1):
        found = Counter()
        for (pass_hits, _), is_prompt in zip(simulate(passes, room), of_prompts, strict=True):
            found[is_prompt] += pass_hits
        of_answer, of_prompt = (found[is_prompt] / asked[is_prompt] for is_prompt in (False, True))
        kept = sum(number for _, number in used.most_common(room)) / used.total()
        for values, value in zip(lines.values(), (of_answer, of_prompt, kept), strict=True):
            values.append(value)
    draw_hits([room / total for room in range(1, total + 1)], lines, figure)
    rows = [
        f"| {room} of {total} | " + " | ".join(f"{value:.1%}" for value in (*values, room / total)) + " |"
        for room, values in enumerate(zip(*lines.values(), strict=True), start=1)
    ]
    head = "| experts in memory | answers | prompts | answers, the most used kept | even choices |"
    said = f"{count} questions; {asked[False]:,} choices for tokens of answers, {asked[True]:,} experts of prompts."
    return "\n".join([said, "", head, "|---|---|---|---|---|", *rows])


def draw_hits(shares: list[float], lines: dict[str, list[float]], path: Path) -> None:
    """Draw the figure of hit rates."""
    from .plot import COLOURS, MARKERS, STYLE, pyplot

    with pyplot.rc_context(STYLE):
        figure, panel = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
        for (name, values), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
            panel.plot(shares, values, color=colour, marker=marker, label=name)
        panel.plot([0, 1], [0, 1], color="#888888", linestyle="--", label="even choices, expected")
        panel.set(xlabel="room for experts, share of all", ylabel="hit rate", xlim=(0, 1.02), ylim=(0, 1.03))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:.0%}")
        panel.legend()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


MEASURED = {
    "": (few_bits, "quality", "docs/quantization.md"),
    "rows": (few_bits_of_rows, "quality of rows", "docs/quantization.md"),
    "hits": (hits, "hit rates", "docs/expert_hit_rates.md"),
}

if __name__ == "__main__":
    measured, what, name = MEASURED["".join(sys.argv[1:])]
    text = measured()
    print(text)
    (ROOT / name).write_text(replaced((ROOT / name).read_text(), text, what, name))
