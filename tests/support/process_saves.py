"""Check how models that processes share are loaded from checkpoints, and saved to them."""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors import safe_open
from transformers import Trainer, TrainingArguments

import llamoe

from .process_models import (
    FOLDER,
    check,
    copy_of,
    distributed,
    fsdp2_of_accelerate,
    is_split,
    load_sharded,
    saved_difference,
    weight_difference,
    whole,
)

KINDS = ("tensor", "expert", "fsdp", "fsdp+expert", "accelerate")
NAMES = ("text", "top1", "mixtral", "multimodal")
# The model "lone" has one expert, which expert parallelism cannot distribute.
LONE = [f"lone {kind}" for kind in KINDS if "expert" not in kind]


def scale_weights(*models):
    """Multiply all weights by 1.5, so that they differ from those of the checkpoint."""
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.mul_(1.5)


def add_adapter(model):
    """Add an adapter with the same random weights in each process; return the model."""
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return model


@check(*[f"{name} {kind}" for name in NAMES for kind in KINDS], *LONE)
def split(pair):
    """Load a checkpoint with one tensor an expert into shards, and save it from them."""
    name, kind = pair.split()
    model = load_sharded(f"{name}-split", kind)
    figures = {"weights": weight_difference(model, whole(name))}
    figures["sharded"] = all(is_split(p) for key, p in model.named_parameters() if ".experts." in key)
    if kind != "accelerate":
        folder = FOLDER / f"saved-split-{pair}"
        model.save_pretrained(folder)
        figures["saved"] = saved_difference(folder, whole(name))
        with safe_open(folder / "model.safetensors", "pt") as file:
            figures["stacked"] = set(file.keys()) == {key for key, _ in whole(name).named_parameters()}
    return figures


@check("multimodal")
def text_of(name):
    """Load the decoder of a multimodal folder, whose keys are renamed, into shards."""
    model_class = llamoe.LlamoeForCausalLM
    reference = model_class.from_pretrained(FOLDER / name)
    model = model_class.from_pretrained(FOLDER / name, distributed_config=distributed("tensor"))
    return {"weights": weight_difference(model, reference)}


@check("fsdp", "tensor", "torch")
def saves(kind):
    """Save a model to one folder several times, with and without a state dict, in one file or several.

    Finally save a state dict of whole tensors that differ from the model's.
    """
    model, reference = load_sharded("text", kind), whole("text")
    folder = FOLDER / f"saves-{kind}"
    worst, count = 0.0, int(os.environ.get("LLAMOE_SAVES", 4))
    for number in range(count):
        options = {"max_shard_size": "250KB"} if number % 2 else {}
        if number % 4 > 1:
            options["state_dict"] = model.state_dict()
        model.save_pretrained(folder, **options)
        if number >= count - 4:
            worst = max(worst, saved_difference(folder, reference))
            # Wait until the files are read, before the next save replaces them.
            dist.barrier()
    other = copy_of("text")
    scale_weights(other)
    model.save_pretrained(folder, state_dict=other.state_dict())
    dist.barrier()
    given = saved_difference(folder, other)
    return {"weights": worst, "given": given, "left": sorted(path.name for path in folder.glob(".*"))}


@check("fsdp", "tensor", "torch")
def saved_adapters(kind):
    """Save an adapter of a sharded model, and load it into a whole model."""
    model, folder = load_sharded("dense", kind, add_adapter), FOLDER / f"adapter-{kind}"
    model.save_pretrained(folder)
    again = copy_of("dense")
    again.load_adapter(str(folder))
    return {
        "weights": weight_difference(model, again, "lora_"),
        "files": sorted(path.name for path in folder.iterdir()),
    }


@check("weights", "adapter")
def gathered(kind):
    """Save weights that accelerate has gathered in the first process; once that process alone saves, once both do."""
    folder, model = FOLDER / f"gathered-{kind}", copy_of("dense")
    if kind == "adapter":
        add_adapter(model)
    with fsdp2_of_accelerate(cpu_ram_efficient_loading=False) as accelerator:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        scale_weights(model)
        state = accelerator.get_state_dict(model)
        inner, is_first = accelerator.unwrap_model(model), accelerator.is_main_process
        if is_first:
            inner.save_pretrained(folder / "alone", state_dict=state)
        dist.barrier()
        inner.save_pretrained(folder / "both", is_main_process=is_first, state_dict=state)
        dist.barrier()
    differences = []
    for saved in (folder / "alone", folder / "both"):
        if kind == "adapter":
            again = copy_of("dense")
            again.load_adapter(str(saved))
        else:
            again = type(whole("dense")).from_pretrained(saved)
        differences.append(weight_difference(model, again, "lora_" if kind == "adapter" else ""))
    return {"weights": max(differences), "given": len(state)}


@check("text")
def trainer(name):
    """Train with the Trainer under accelerate's FSDP2, where the first process alone saves."""
    folder, model = FOLDER / f"trainer-{name}", copy_of(name)
    model_class = type(model)
    rows = torch.randint(3, 90, (8, 9), generator=torch.Generator().manual_seed(6))
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        save_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with fsdp2_of_accelerate(cpu_ram_efficient_loading=False):
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        assert trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2
        trainer.train()
        trainer.save_model(str(folder / "model"))
        dist.barrier()
        again = model_class.from_pretrained(folder / "model")
        middle = model_class.from_pretrained(folder / "checkpoint-1")
        return {
            "weights": weight_difference(trainer.model, again),
            "learned": weight_difference(again, whole(name)),
            "in between": weight_difference(middle, again),
        }


@check("dense")
def stages(name):
    """Save a model in pipeline stages, which must be refused, as no process has all weights."""
    try:
        load_sharded(name, "pipeline").save_pretrained(FOLDER / "stages")
    except ValueError as error:
        return {"message": str(error), "left": (FOLDER / "stages").exists()}


@check("dense over whole", "dense over shards", "multimodal over whole")
def exchanged(key):
    """Save shards of each process over a whole checkpoint, or the other way round; nothing old may be loaded."""
    name, _, order = key.partition(" ")
    folder, model, expected = FOLDER / f"exchanged-{key}", load_sharded(name, "fsdp"), copy_of(name)
    model.save_pretrained(folder, distributed_checkpoint=order == "over shards")
    scale_weights(model, expected)
    model.save_pretrained(folder, distributed_checkpoint=order == "over whole")
    again = type(expected).from_pretrained(folder, distributed_config=distributed("fsdp"))
    return {
        "weights": weight_difference(again, expected),
        "left": [path.name for path in folder.glob(".*")],
        "files": len(list(folder.rglob("*.safetensors"))),
    }
