r"""Chat with a language model from a folder; its answers are streamed.

    python examples/chat.py chat                           # a conversation; an empty line ends it
    python examples/chat.py chat --prompt "Who are you?"   # one question

With a chat template, each line is a message of a conversation. Without one, the model continues each line.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

DTYPES = ("auto", "float32", "bfloat16", "float16")


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2, as argparse does."""
    print(f"chat: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def lines(prompt: str | None):
    """Yield the prompt, or the lines typed until an empty one."""
    if prompt is not None:
        yield prompt
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def main() -> None:
    """Read the command line, load the model and answer."""
    parser = argparse.ArgumentParser(description="Talk with a language model.")
    parser.add_argument("model", help="folder with config.json, weights and tokenizer")
    parser.add_argument("--prompt", help="one question instead of a conversation")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as the weights were saved")
    parser.add_argument("--device-map", default="auto", help="auto, cpu, cuda, ...; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 1:
        parser.error(f"argument --max-new-tokens: must be at least 1, not {arguments.max_new_tokens}")
    if not Path(arguments.model).is_dir():
        fail(f"no such model folder: {arguments.model}")
    if not (Path(arguments.model) / "config.json").is_file():
        fail(f"{arguments.model} has no config.json, so it is not a model folder; `llamoe convert` makes one")
    # Imported here: help and mistakes are shown before that, which takes seconds.
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
    from transformers.utils import logging

    import llamoe

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    # Load stock folders with llamoe's models.
    llamoe.adopt()
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model: Any = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=arguments.dtype, device_map=arguments.device_map
        )
    except (OSError, ValueError) as error:
        fail(f"{arguments.model}: {error}")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    for line in lines(arguments.prompt):
        if tokenizer.chat_template:
            messages.append({"role": "user", "content": line})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:
            inputs = tokenizer(line, return_tensors="pt")
        output = model.generate(
            **inputs.to(model.device), streamer=streamer, max_new_tokens=arguments.max_new_tokens
        )
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer.strip()})


if __name__ == "__main__":
    main()
