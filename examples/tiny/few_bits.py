"""Measure what few bits cost a model made by `train.py`: its answers, and how well it foretells the expected ones.

Every variant, llamoe's formats and those of bitsandbytes beside 16 bit, gets the same questions in the same batches,
those of the three columns of `evaluate.py`. So the answers to each question are compared in pairs, and the standard
error is that of the differences. The perplexity is that of the expected answers, their end included, after picture and
question.
"""

import argparse
import importlib.metadata
import json
import logging
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BARS = {"int8": 0.2, "int4": 2.0}
"""Points of accuracy that llamoe's formats may cost."""
BEGIN, END = "<!-- quality: written by `examples/tiny/few_bits.py --page` -->", "<!-- end of quality -->"
BASE = "16 bit"
IN_32_BIT = "32 bit"


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What few bits cost a checkpoint made by train.py.")
    parser.add_argument("--model", default="examples/llamoe-tiny", help="default: %(default)s")
    parser.add_argument("--count", type=int, default=3840, help="questions per column (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="*", help="names of variants to measure anew; others are kept from the results"
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/quality.json"))
    parser.add_argument("--page", type=Path, help="Markdown file, for its part between <!-- quality ... -->")
    return parser.parse_args()


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()

import torch
from evaluate import WORDINGS, draw_cases, prompts
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

import llamoe
from llamoe.modeling.checkpoints.quantization import stored_bytes

# What llamoe's formats leave in 16 bit, for bitsandbytes to leave, too.
_KEPT = ["lm_head", "vision_model", "multi_modal_projector"]
_EXPERTS = ["experts"]


def _nf4(skip: list[str]) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=skip,
    )


def variants() -> dict[str, dict[str, Any]]:
    """Name to arguments of `from_pretrained`."""
    found: dict[str, dict[str, Any]] = {IN_32_BIT: {"dtype": torch.float32}, BASE: {}}
    for name, fields in {
        "int8": {"weights": "int8"},
        "int4, groups of 32": {"weights": "int4", "group_size": 32},
        "int4, groups of 64": {"weights": "int4", "group_size": 64},
    }.items():
        for suffix, more in {
            "": {},
            ", experts in 16 bit": {"experts": False},
            ", without search": {"search": False},
        }.items():
            found[name + suffix] = {"quantization_config": llamoe.QuantizationConfig(**fields, **more)}
    for name, make in {
        "bitsandbytes 8 bit": lambda skip: BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip),
        "bitsandbytes nf4": _nf4,
    }.items():
        found[name] = {"quantization_config": make(_KEPT)}
        found[f"{name}, experts in 16 bit"] = {"quantization_config": make(_KEPT + _EXPERTS)}
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
        assert end in base.generation_config.eos_token_id, end
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
            decoded = self.processor.batch_decode(generated, skip_special_tokens=True)
            texts += [text.strip() for text in decoded]
        weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        nbytes = sum(stored_bytes(tensor) for name, tensor in weights.items() if "language_model" in name)
        return Answers(texts, torch.cat(surprise), nbytes)

    def right(self, answers: Answers) -> torch.Tensor:
        """Whether each answer is the expected one, as numbers."""
        pairs = zip(answers.texts, self.answers, strict=True)
        return torch.tensor([text == expected for text, expected in pairs], dtype=torch.float64)


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
    change, change_error = mean_and_error(right - exam.right(base))
    total = exam.tokens.sum()
    more = given.surprise - base.surprise
    per_token = (more.sum() / total).item()
    # A ratio of two sums: what a question adds beyond its part of the tokens.
    _, error = mean_and_error((more - per_token * exam.tokens) / exam.tokens.mean())
    parts = zip(exam.sizes, right.split(list(exam.sizes.values())), strict=True)
    return Row(
        name=name,
        decoder_bytes=given.nbytes,
        accuracy=right.mean().item(),
        columns={wording: part.mean().item() for wording, part in parts},
        change=change,
        change_error=change_error,
        same=sum(a == b for a, b in zip(given.texts, base.texts, strict=True)) / len(base.texts),
        perplexity=math.exp((given.surprise.sum() / total).item()),
        surprise_change=per_token,
        surprise_error=error,
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of measured rows."""
    lines = [
        "| | decoder | right answers | change in points | answers of 16 bit | perplexity | its change |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        is_base = row["name"] == BASE
        change = "" if is_base else f"{100 * row['change']:+.2f} ± {100 * row['change_error']:.2f}"
        # Of small numbers the logarithm's change is the relative one.
        more, error = (100 * row[key] for key in ("surprise_change", "surprise_error"))
        lines.append(
            f"| {row['name']} | {row['decoder_bytes'] / 1e6:.2f} MB | {row['accuracy']:.2%} | {change} "
            f"| {'' if is_base else format(row['same'], '.1%')} | {row['perplexity']:.4f} "
            f"| {'' if is_base else f'{more:+.2f}% ± {error:.2f}'} |"
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


def write_page(page: Path, text: str) -> None:
    """Write the table between the marks of a page."""
    content = page.read_text()
    pattern = re.escape(BEGIN) + r".*" + re.escape(END)
    assert re.search(pattern, content, re.DOTALL), f"{page} has no part between {BEGIN} and {END}"
    page.write_text(re.sub(pattern, lambda _: f"{BEGIN}\n\n{text}\n\n{END}", content, flags=re.DOTALL))


def main() -> None:
    """Measure, write the results, print the table."""
    arguments = read_arguments()
    # It says for every layer of every batch in which dtype it multiplies.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    wanted = variants()
    names = list(wanted) if arguments.only is None else arguments.only
    kept: dict[str, dict[str, Any]] = {}
    if arguments.only is not None and arguments.results.exists():
        kept = {row["name"]: row for row in json.loads(arguments.results.read_text())["rows"]}
    if names:
        exam = Examination(arguments.model, arguments.count)
        base = exam.ask(wanted[BASE])
        for name in names:
            answers = base if name == BASE else exam.ask(wanted[name])
            kept[name] = asdict(compare(exam, name, answers, base))
            print(table([kept[name]]).splitlines()[-1], flush=True)
        content = {
            "questions": len(exam.answers),
            "tokens": int(exam.tokens.sum()),
            "versions": {
                package: importlib.metadata.version(package)
                for package in ("torch", "transformers", "bitsandbytes")
            },
            "rows": [kept[name] for name in wanted if name in kept],
        }
        arguments.results.write_text(json.dumps(content, indent=1) + "\n")
    rows = json.loads(arguments.results.read_text())["rows"]
    print(table(rows))
    print("\n".join(missed(rows)))
    if arguments.page:
        write_page(arguments.page, table(rows))


if __name__ == "__main__":
    main()
