"""Measure how often an expert is in memory while a model made by `train.py` answers held-out questions; draw it.

The experts are on disk, with room for one of them, for two, and so on. Questions are asked one after the other. Hits
are those that the model's own store counts. With `--page docs/expert_hit_rates.md` the table of that page is written,
and the figure beside it.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Hit rates of a checkpoint made by train.py, with experts on disk."
    )
    parser.add_argument("--model", default="examples/llamoe-tiny", help="default: %(default)s")
    parser.add_argument("--count", type=int, default=480, help="questions (default: %(default)s)")
    parser.add_argument(
        "--page", type=Path, help="Markdown file, for its part between <!-- hit rates ... -->"
    )
    return parser.parse_args()


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()
import torch
from evaluate import Case, draw_cases
from transformers import AutoConfig, AutoProcessor, LogitsProcessorList
from transformers.utils import logging

import llamoe
from llamoe.modeling.elsewhere import ExpertsStatistics

BEGIN = "<!-- hit rates: written by `examples/tiny/expert_hit_rates.py --page` -->"
END = "<!-- end of hit rates -->"


def load(folder: str, experts: int) -> Any:
    """The model with room for so many experts."""
    text = AutoConfig.from_pretrained(folder).text_config
    nbytes = 3 * text.hidden_size * text.intermediate_size * torch.bfloat16.itemsize
    return llamoe.LlamoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"experts": "disk"}, experts_memory=experts * nbytes
    ).eval()


@torch.no_grad()
def ask(model, processor, cases: list[Case]) -> tuple[list[ExpertsStatistics], list[torch.Tensor], list[int]]:
    """Ask one question after the other.

    Returns:
        the counts of all prompts and of all answers' tokens; of each question the experts of its tokens,
            `[mixture layers, tokens]`; and its prompt's length.
    """
    counts = [ExpertsStatistics(), ExpertsStatistics()]
    chosen, lengths = [], []

    def count(index: int) -> None:
        counts[index] += sum(model.experts_statistics(reset=True).values(), ExpertsStatistics())

    for case in cases:
        content = [{"type": "image", "image": case.picture}, {"type": "text", "text": case.question}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt",
        ).to(dtype=model.dtype)  # fmt: skip
        length = inputs["input_ids"].shape[1]

        def after_pass(ids: torch.Tensor, scores: torch.Tensor, length=length) -> torch.Tensor:
            # The first token is chosen after the pass of the prompt.
            if ids.shape[1] == length:
                count(0)
            return scores

        with llamoe.trace_experts(model) as trace:
            model.generate(**inputs, logits_processor=LogitsProcessorList([after_pass]))
        count(1)
        chosen.append(trace.experts()[..., 0])
        lengths.append(length)
    return counts, chosen, lengths


def most_used(chosen: list[torch.Tensor], lengths: list[int], total: int) -> list[float]:
    """The share of answers' tokens that go to the experts used most by them, for one such expert, two, and so on."""
    used = Counter(
        (layer, expert)
        for experts, length in zip(chosen, lengths, strict=True)
        for layer, its in enumerate(experts[:, length:].tolist())
        for expert in its
    )
    order = sorted(used.values(), reverse=True)
    return [sum(order[:count]) / sum(order) for count in range(1, total + 1)]


def main() -> None:
    """Measure, print the table, draw, and write the page."""
    arguments = read_arguments()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(arguments.model)
    cases = draw_cases(arguments.count, "trained")
    text = AutoConfig.from_pretrained(arguments.model).text_config
    total = len(text.moe_layers) * text.num_local_experts
    prompts, answers, static, asked = [], [], [], None
    for experts in range(1, total + 1):
        model = load(arguments.model, experts)
        (prompt, answer), chosen, lengths = ask(model, processor, cases)
        model.close()
        prompts.append(prompt.hit_rate)
        answers.append(answer.hit_rate)
        now_asked = prompt.hits + prompt.misses, answer.hits + answer.misses
        if asked not in (None, now_asked):
            raise RuntimeError(
                f"with room for {experts}, experts were asked for {now_asked} times, before {asked}"
            )
        asked = now_asked
        static = most_used(chosen, lengths, total)
    table = [
        f"{len(cases)} questions; {asked[1]:,} choices for tokens of answers, {asked[0]:,} experts of prompts.",
        "",
        "| room for | answers | prompts | the most used ones, for answers | even choices |",
        "|---|---|---|---|---|",
        *(
            f"| {count} of {total} | {own:.1%} | {first:.1%} | {kept:.1%} | {count / total:.1%} |"
            for count, own, first, kept in zip(range(1, total + 1), answers, prompts, static, strict=True)
        ),
    ]
    print("\n".join(table))
    if arguments.page:
        before, _, rest = arguments.page.read_text().partition(BEGIN)
        _, _, behind = rest.partition(END)
        arguments.page.write_text("\n\n".join([before + BEGIN, "\n".join(table), END + behind]))
        shares = [experts / total for experts in range(1, total + 1)]
        lines = {"tokens of answers": answers, "prompts": prompts, "most used ones, for answers": static}
        draw(shares, lines, arguments.page.with_suffix(".svg"))


def draw(shares: list[float], lines: dict[str, list[float]], path: Path) -> None:
    """Draw the figure."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    style = {
        "font.size": 9,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "svg.fonttype": "none",
        "svg.hashsalt": "llamoe",
    }
    with pyplot.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panel = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
        looks = zip(("#0072B2", "#D55E00", "#009E73"), "osD", strict=True)
        for (name, values), (colour, marker) in zip(lines.items(), looks, strict=True):
            panel.plot(shares, values, color=colour, marker=marker, label=name)
        panel.plot([0, 1], [0, 1], color="#888888", linestyle="--", label="even choices, expected")
        panel.set(xlabel="room for experts, share of all", ylabel="hit rate", xlim=(0, 1.02), ylim=(0, 1.03))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
        panel.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
