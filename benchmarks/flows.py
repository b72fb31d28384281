"""How much of the library a reader meets: functions, files and changes of room in what people do most.

    python -m benchmarks.flows

A Mixtral of two layers on a CPU is loaded, asked for one token and trained, in 16 bit, in int4 and with its experts on
disk. Calls of functions of `configuration`, `modeling`, `planning` and `serving` are counted; a room is a folder, and a
change of room is a call of a function from another room's. Counts depend on the processor: `LLAMOE_CPP_KERNELS=0` and
`ATEN_CPU_CAPABILITY=avx2` show those without AVX-512.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import llamoe

ROOT = Path(llamoe.__file__).parent.parent
ROOMS = ("configuration", "modeling", "planning", "serving")
PROMPT, TOKEN = torch.arange(1, 10)[None], torch.tensor([[7]])


def counted(action: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    """What of the library an action calls, and its result."""
    functions: set[tuple[str, int]] = set()
    counts = {"calls": 0, "changes of room": 0}
    rooms: list[str] = [""]

    def notice(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        # Comprehensions and the like belong to the function that has them.
        if event not in ("call", "return") or frame.f_code.co_name[0] == "<" or not path.is_relative_to(ROOT):
            return
        inside = path.relative_to(ROOT)
        if inside.parts[0] not in ROOMS:
            return
        if event == "return":
            if len(rooms) > 1:
                rooms.pop()
            return
        functions.add((str(inside), frame.f_code.co_firstlineno))
        counts["calls"] += 1
        counts["changes of room"] += rooms[-1] != str(inside.parent)
        rooms.append(str(inside.parent))

    sys.setprofile(notice)
    try:
        result = action()
    finally:
        sys.setprofile(None)
    files = {file for file, _ in functions}
    return {"functions": len(functions), "files": len(files), **counts}, result


def step(model: Any) -> Callable[[], Any]:
    """One step of decoding behind a prompt."""
    with torch.no_grad():
        cache = model(PROMPT, use_cache=True).past_key_values

    @torch.no_grad()
    def decode() -> None:
        model(TOKEN, past_key_values=cache)

    decode()
    return decode


def adapt(model: Any) -> Any:
    """The model with LoRA on attention and experts."""
    return get_peft_model(model, llamoe.lora_config(model, r=4))


def train(model: Any) -> None:
    """One step of training, without the optimizer."""
    model(PROMPT, labels=PROMPT).loss.backward()


def main() -> None:
    """Print a table."""
    config = MixtralConfig(
        vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        MixtralForCausalLM(config).bfloat16().save_pretrained(folder)
        llamoe.adopt("mixtral")
        ways = {
            "16 bit": {},
            "experts on disk": {"device_map": {"experts": "disk"}},
            "int4": {"quantization_config": llamoe.QuantizationConfig("int4", group_size=32)},
        }
        for name, options in ways.items():
            rows[f"{name}: load"], model = counted(
                lambda o=options: AutoModelForCausalLM.from_pretrained(folder, **o)
            )
            rows[f"{name}: a token"], _ = counted(step(model.eval()))
        rows["16 bit: get_peft_model"], adapted = counted(
            lambda: adapt(AutoModelForCausalLM.from_pretrained(folder))
        )
        train(adapted.train())
        rows["16 bit: a step of LoRA"], _ = counted(lambda: train(adapted))
    print(f"{'':26}" + "".join(f"{name:>17}" for name in next(iter(rows.values()))))
    for name, counts in rows.items():
        print(f"{name:26}" + "".join(f"{count:17}" for count in counts.values()))


if __name__ == "__main__":
    main()
