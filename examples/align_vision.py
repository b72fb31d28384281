"""Train a decoder to see through a new vision tower: LLaMA and MetaCLIP, joined by `llamoe assemble`.

    llamoe assemble my_llama my_metaclip joined
    python examples/align_vision.py

Training has two stages, as LLaVA's (Liu et al. 2023, arXiv 2304.08485). The first trains only the tower's adapter and
the projector, which connect tower and decoder. The second also trains LoRA on the decoder. The result is a whole
checkpoint, with LoRA merged. If training was stopped, the same command continues it.
"""

from pathlib import Path

from finetune_lora import load, train
from peft import get_peft_model
from question_folder import count_right, read
from transformers import set_seed

import llamoe

MODEL = "joined"
# A folder as `finetune_lora.py` reads it. `python examples/tiny/lessons.py captions` writes this one.
DATA = Path("captions")
OUT = Path("aligned")
RANK = 8
# The modules between tower and decoder.
BETWEEN = ["vision_adapter", "multi_modal_projector"]


def main() -> None:
    """Train both stages; print right answers before and after."""
    set_seed(0)
    learnt, held_out = read(DATA)
    model, processor = load(MODEL)
    print("held-out answers right before:", count_right(model, processor, held_out))
    for name, weight in model.named_parameters():
        weight.requires_grad_(any(part in name for part in BETWEEN))
    train(model, processor, learnt, OUT / "stage1")
    print("after stage 1:", count_right(model, processor, held_out))

    model = get_peft_model(model, llamoe.lora_config(model, r=RANK, modules_to_save=BETWEEN))
    train(model, processor, learnt, OUT / "stage2")
    model = model.merge_and_unload()
    print("after stage 2:", count_right(model, processor, held_out))
    model.save_pretrained(OUT / "model")
    processor.save_pretrained(OUT / "model")


if __name__ == "__main__":
    main()
