"""Checks of saving a model that processes share; worker.py runs them."""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig
from support.models import max_abs
from support.process_checks import (
    FOLDER,
    check,
    load,
    own,
    saved_difference,
    tensor_parallel,
    weight_difference,
    whole,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from llamoe.modeling._private_api import gather


def fully_sharded(model):
    """FSDP2 as torch applies it, of which transformers knows nothing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def load_sharded(name, kind):
    if kind == "fsdp":
        return load(name, distributed_config=DistributedConfig(fsdp_size=2))
    if kind == "tensor":
        return load(name, distributed_config=tensor_parallel())
    return fully_sharded(own(name))


@check("fsdp", "tensor", "torch")
def saves(kind):
    """One save after the other into the same folder, with and without a state dict, sharded or not."""
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
            dist.barrier()  # nobody reads while the next save exchanges the files
    return {"weights": worst, "left": sorted(path.name for path in folder.glob(".*"))}


@check("fsdp", "tensor", "torch")
def given(kind):
    """A whole state dict that is given is what is written, not what the model holds."""
    model, other = load_sharded("text", kind), own("text")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    folder = FOLDER / f"given-{kind}"
    model.save_pretrained(folder, state_dict=other.state_dict())
    dist.barrier()
    return {"weights": saved_difference(folder, other)}


@check("fsdp", "tensor", "torch")
def adapters(kind):
    """An adapter on shards, saved and loaded into a model that is whole."""
    model = own("dense") if kind == "torch" else load_sharded("dense", kind)
    torch.manual_seed(5)
    try:
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    except ValueError as error:
        return {"message": str(error)}
    if kind == "torch":
        model = fully_sharded(model)
    folder = FOLDER / f"adapter-{kind}"
    model.save_pretrained(folder)
    again = own("dense")
    again.load_adapter(str(folder))
    expected = {name: gather(p.detach()) for name, p in model.named_parameters() if "lora_" in name}
    given = {name: p for name, p in again.named_parameters() if "lora_" in name}
    assert given.keys() == expected.keys() and given
    return {
        "weights": max(max_abs(given[name], expected[name]) for name in given),
        "files": sorted(path.name for path in folder.iterdir()),
    }


@contextmanager
def fsdp2_of_accelerate():
    """FSDP2 through accelerate, which offers it on GPUs only: it is told that these processes have one each."""
    environment = dict(os.environ)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    try:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.is_fsdp2
        yield accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environment)


@check("weights", "adapter")
def gathered(what):
    """What accelerate has gathered, saved by the first process alone and by both, the second with nothing."""
    folder, model = FOLDER / f"gathered-{what}", own("dense")
    if what == "adapter":
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    with fsdp2_of_accelerate() as accelerator:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        state = accelerator.get_state_dict(model)
        inner, is_first = accelerator.unwrap_model(model), accelerator.is_main_process
        if is_first:
            inner.save_pretrained(folder / "alone", state_dict=state)
        dist.barrier()
        inner.save_pretrained(folder / "both", is_main_process=is_first, state_dict=state)
        dist.barrier()
    differences = []
    for saved in (folder / "alone", folder / "both"):
        again = own("dense") if what == "adapter" else type(whole("dense")).from_pretrained(saved)
        if what == "adapter":
            again.load_adapter(str(saved))
        expected = {name: p for name, p in again.named_parameters() if what == "weights" or "lora_" in name}
        given = {name: gather(p.detach()) for name, p in model.named_parameters() if name in expected}
        assert given.keys() == expected.keys() and given
        differences.append(max(max_abs(given[name], expected[name]) for name in given))
    return {"weights": max(differences), "given": len(state)}


@check("text")
def trainer(name):
    """Trainer under accelerate's FSDP2 saves in the first process alone."""
    folder, model = FOLDER / f"trainer-{name}", own(name)
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
    with fsdp2_of_accelerate():
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
    """No process has all weights of a model in pipeline stages."""
    model = load(name, distributed_config=DistributedConfig(pp_size=2))
    try:
        model.save_pretrained(FOLDER / "stages")
    except ValueError as error:
        return {"message": str(error), "left": (FOLDER / "stages").exists()}


@check("over whole", "over shards")
def exchanged(name):
    """Shards of a job over a whole checkpoint and the other way round: nothing of the older one is read."""
    folder = FOLDER / f"exchanged-{name}"
    config = DistributedConfig(fsdp_size=2)
    model, expected = load("dense", distributed_config=config), own("dense")
    model.save_pretrained(folder, distributed_checkpoint=name == "over shards")
    with torch.no_grad():
        for parameter in (*model.parameters(), *expected.parameters()):
            parameter.mul_(1.5)
    model.save_pretrained(folder, distributed_checkpoint=name == "over whole")
    again = type(expected).from_pretrained(folder, distributed_config=config)
    return {"weights": weight_difference(again, expected), "left": [p.name for p in folder.glob(".*")]}
