"""One of the processes that run a model together and compare with one process; test_two_processes.py starts it.

Every check compares with the same model loaded without any sharding in this process, and yields figures: largest
differences, or whether something holds. What both processes measured is written to results.json by the first.
"""

import copy
import json
import os
import sys
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from support.models import IMAGE_TOKEN, MULTIMODAL, TOKENS_PER_TILE, VISION, Case, max_abs
from support.paths import EXAMPLES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import llamoe
from llamoe.modeling import loss as pieces

FOLDER = Path(sys.argv[1])
CLASSES = {
    "dense": "LlamoeDenseForCausalLM",
    "tied": "LlamoeDenseForCausalLM",
    "text": "LlamoeForCausalLM",
    "top1": "LlamoeForCausalLM",
    "mixtral": "LlamoeMixtralForCausalLM",
    "multimodal": "LlamoeForConditionalGeneration",
    "lone": "LlamoeForCausalLM",
}
CHECKS = {}


def gather(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(*names):
    """Register a check, once for each of the models."""

    def register(function):
        for name in names:
            CHECKS[f"{function.__name__}-{name}"] = lambda name=name: function(name)
        return function

    return register


def load(name, **kwargs):
    model_class = getattr(llamoe, CLASSES[name.removesuffix("-split")])
    return model_class.from_pretrained(FOLDER / name, dtype=torch.float32, **kwargs)


@cache
def whole(name):
    """The model that this process has for itself, only to be read."""
    return load(name)


def own(name):
    """A copy of that model, to be changed."""
    return copy.deepcopy(whole(name))


def tensor_parallel(**kwargs):
    return DistributedConfig(tp_size=2, tp_plan="auto", **kwargs)


def expert_parallel():
    return DistributedConfig(tp_size=2, ep_size=2)


def saved_difference(folder, reference):
    """How far the weights in a folder are from a whole model's; what one process reads, the others need not read again.

    The last process reads, as the first has written.
    """
    if dist.get_rank() != dist.get_world_size() - 1:
        return 0.0
    return weight_difference(type(reference).from_pretrained(folder), reference)


def weight_difference(model, reference):
    """How far this process's part of a model's weights is from a whole model's."""
    expected = dict(reference.named_parameters())
    given = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    assert given.keys() == expected.keys()
    return max(difference(given[name], expected[name].detach()) for name in expected)


def difference(given, expected):
    """How far this process's part of a tensor is from the same part of a whole one.

    Each process compares its own, since gathering takes longer than all that is compared.
    """
    if isinstance(given, DTensor) and all(type(part) in (Shard, Replicate) for part in given.placements):
        expected = distribute_tensor(expected, given.device_mesh, given.placements, src_data_rank=None)
        given, expected = given.to_local(), expected.to_local()
        assert given.shape == expected.shape
    # Packed columns, of which each half is split by itself.
    given = gather(given)
    return max_abs(given, expected) if given.numel() else 0.0


BACKENDS = ("llamoe", "eager", "grouped_mm", "batched_mm")
LEARNING_RATE = 0.5
# Several pieces for the loss that has no logits, of two rows of these vocabularies.
pieces.PIECE_LOGITS = 2 * 101 * 9


def padded_rows(name):
    """Three rows, left-padded, the second with two tiles and the third with one where there are images."""
    case = MULTIMODAL if name == "multimodal" else Case(CLASSES[name], None, None, None)
    return case.inputs(padding=(5, 0, 9), length=29)


def even_rows(name):
    """Four rows without padding and with a tile each, so that each of two processes gets half of all."""
    generator = torch.Generator().manual_seed(2)
    inputs = {"input_ids": torch.randint(3, 90, (4, 23), generator=generator)}
    if name == "multimodal":
        inputs["input_ids"][:, 3 : 3 + TOKENS_PER_TILE] = IMAGE_TOKEN
        size = VISION["image_size"]
        inputs["pixel_values"] = torch.randn(4, 3, size, size, generator=generator)
    return inputs


def half(inputs):
    """The rows of this process."""
    return {name: value.chunk(2)[dist.get_rank()] for name, value in inputs.items()}


def relative_gradient_difference(model, reference):
    """The largest difference of a parameter's gradient, relative to its largest entry."""
    worst = 0.0
    expected = {name: p.grad for name, p in reference.named_parameters()}
    scales = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    floor = max(scales.values()) / 100
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        worst = max(worst, difference(parameter.grad, expected[name]) / max(scales[name], floor))
    return worst


def adapter_difference(given, expected):
    """The largest difference of an adapter's gradients, relative to the largest entry of each."""
    assert given.keys() == expected.keys() and len(given) > 3
    return max(difference(given[n].grad, p.grad) / p.grad.abs().max().item() for n, p in expected.items())


def adapter_weights(model):
    return {n: p for n, p in unwrapped(model).named_parameters() if p.requires_grad}


def loss_of(model, inputs, **options):
    return model(**inputs, labels=inputs["input_ids"], **options).loss


def step(model, inputs, **options):
    """One step of training; the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loss = loss_of(model.train(), inputs, **options)
    loss.backward()
    optimizer.step()
    return loss.detach()


def generate(model, inputs):
    return model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None)


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits, generate(model, inputs)


@cache
def outputs_of_one(name):
    """What one process yields for the padded rows; many checks ask for it."""
    return outputs(whole(name), padded_rows(name))


def compare_outputs(model, name):
    inputs = padded_rows(name)
    (given, tokens), (expected, expected_tokens) = outputs(model, inputs), outputs_of_one(name)
    assert tokens.shape[1] == inputs["input_ids"].shape[1] + 4
    return {
        "deviation": expected.std().item(),
        "logits": max_abs(given, expected),
        "other tokens": int((tokens != expected_tokens).sum()),
    }


def share(what):
    """The bytes of this process's part of a model, and what it computes; `what` is "text tp_size=2 pp_size=2"."""
    name, *sizes = what.split()
    sizes = {size: int(count) for size, _, count in (each.partition("=") for each in sizes)}
    model = load(name, distributed_config=DistributedConfig(**sizes))
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return compare_outputs(model, name) | {"bytes": sum(part.nbytes for part in parts)}


def router_losses(name):
    """Options with which a model learns by its router's losses as well."""
    if name == "dense" or name == "tied":
        return {}
    text = dict(output_router_logits=True, router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    return {"text_config": text} if name == "multimodal" else text


@cache
def trained_by_one(name, rows, with_router=False):
    """Train one step in one process; return the loss, and the model with its gradients."""
    model = load(name, **(router_losses(name) if with_router else {}))
    return step(model, rows(name)), model


def compare(name, distributed_config, layout="llamoe", **kwargs):
    """Compare a distributed model with one process: forward, generation, a training step, saving and loading."""
    model = load(name, distributed_config=distributed_config, **router_losses(name), **kwargs)
    figures = compare_outputs(model, name)
    sharded = [p for p in model.parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    figures["sharded"] = sum(p.numel() for p in sharded) / sum(p.numel() for p in model.parameters())

    loss, reference = trained_by_one(name, padded_rows, with_router=True)
    figures["loss"] = abs(step(model, padded_rows(name)) - loss).item()
    figures["gradients"] = relative_gradient_difference(model, reference)
    folder = FOLDER / f"saved-{name}-{layout}-{distributed_config.enable_expert_parallel}"
    model.save_pretrained(folder, layout=layout, max_shard_size="250KB")
    saved_type, config = json.loads((folder / "config.json").read_text())["model_type"], reference.config
    assert saved_type == (config.stock_model_type if layout == "stock" else config.model_type)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return figures | {"trained and reloaded": saved_difference(folder, reference)}


@check("dense", "tied", "text", "top1", "mixtral", "multimodal")
def tensor(name):
    is_stock = name in ("mixtral", "multimodal")
    return compare(name, tensor_parallel(), layout="stock" if is_stock else "llamoe")


@check(*BACKENDS, "mixtral", "multimodal")
def expert(name):
    if name in BACKENDS:
        return compare("text", expert_parallel(), experts_implementation=name)
    return compare(name, expert_parallel())


@check("multimodal")
def text_of(name):
    """The text model of a multimodal folder, whose keys are renamed, straight into shards."""
    folder = FOLDER / name
    reference = llamoe.LlamoeForCausalLM.from_pretrained(folder)
    model = llamoe.LlamoeForCausalLM.from_pretrained(folder, distributed_config=tensor_parallel())
    return {"weights": weight_difference(model, reference)}


def starved_rows(name):
    """Two rows of two tokens; all choose, in each layer, among the first half of the experts."""
    model = whole(name)
    ids = torch.randint(3, 90, (400, 2), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    chosen = torch.stack([layer.argmax(-1).view(ids.shape) for layer in logits])
    fits = (chosen < model.config.num_local_experts // 2).all(-1).all(0)
    rows = ids[fits][:2]
    assert len(rows) == 2
    # In the first mixture the two rows use at most four of the six experts, all on the first process.
    return {"input_ids": rows}


@contextmanager
def fsdp2_of_accelerate(**options):
    """FSDP2 through accelerate, which offers it on GPUs only: it is told that these processes have one each."""
    environment = dict(os.environ)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        **options,
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


def shard_with_accelerate(name, changed=lambda model: model):
    """What `Accelerator.prepare` makes of a model that one process reads, as the files in examples/accelerate ask."""
    with fsdp2_of_accelerate(cpu_ram_efficient_loading=True) as accelerator:
        model = changed(load(name))
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    units = {type(unit).__name__ for unit in model.modules() if isinstance(unit, FSDPModule)}
    assert {f"FSDP{layer}" for layer in model._no_split_modules} < units
    return model


def train(name, kind, rows):
    """One step on the rows of both processes; what is left is compared with one process that has all rows."""
    expected_loss, reference = trained_by_one(name, rows)
    inputs = rows(name)
    mine = half(inputs)
    # The loss by pieces of tokens, of which each gathers the head: one process has it of all logits.
    by_pieces = {"skip_logits": True}
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(own(name))
        loss = step(model, mine, **by_pieces)
    elif kind == "accelerate":
        model = shard_with_accelerate(name)
        loss = step(model, mine)
    elif kind == "expert":
        model, mine = load(name, distributed_config=expert_parallel()), inputs
        loss = step(model, mine)
    else:
        extra = {"ep_size": 2} if kind == "fsdp+expert" else {}
        model = load(name, distributed_config=DistributedConfig(fsdp_size=2, **extra))
        loss = step(model, mine, **by_pieces)
    dist.all_reduce(loss)
    figures = {
        "loss": abs(loss / 2 - expected_loss).item(),
        "gradients": relative_gradient_difference(unwrapped(model), reference),
    }
    figures["trained"] = weight_difference(model, reference)
    if kind.startswith("fsdp"):
        folder = FOLDER / f"saved-{kind}-{name}"
        model.save_pretrained(folder)
        figures["trained and reloaded"] = saved_difference(folder, reference)
    return figures


def unwrapped(model):
    return getattr(model, "module", model)


KINDS = ["ddp", "fsdp", "accelerate", "fsdp+expert"]


@check(
    *[
        f"{name} {kind}"
        for name in ("dense", "text", "mixtral", "multimodal")
        for kind in KINDS
        if (name, kind) != ("dense", "fsdp+expert")
    ]
)
def training(name):
    name, kind = name.split()
    return train(name, kind, even_rows)


@check(*KINDS, "expert")
def starved(kind):
    return train("top1", kind, starved_rows)


@check("dense", "tied", "text", "mixtral", "text-split")
def pipeline(name):
    model = load(name, distributed_config=DistributedConfig(pp_size=2))
    return compare_outputs(model, name.removesuffix("-split"))


SPLIT = {
    "tensor": tensor_parallel,
    "expert": expert_parallel,
    "fsdp": lambda: DistributedConfig(fsdp_size=2),
    "fsdp+expert": lambda: DistributedConfig(fsdp_size=2, ep_size=2),
}


@check(
    *[
        f"{name} {kind}"
        for name in ("text", "top1", "mixtral", "multimodal", "lone")
        for kind in (*SPLIT, "accelerate")
        # A single expert is shared by no two devices.
        if name != "lone" or "expert" not in kind
    ]
)
def split(what):
    """A checkpoint with one linear layer an expert, straight into shards, and saved from them."""
    name, kind = what.split()
    if kind == "accelerate":
        model = shard_with_accelerate(f"{name}-split")
    else:
        model = load(f"{name}-split", distributed_config=SPLIT[kind]())
    figures = {"weights": weight_difference(model, whole(name))}
    stacks = [p for key, p in model.named_parameters() if ".experts." in key]
    figures["sharded"] = all(isinstance(p, DTensor) and p.to_local().shape != p.shape for p in stacks)
    if kind != "accelerate":
        folder = FOLDER / f"saved-split-{what}"
        model.save_pretrained(folder)
        figures["saved"] = saved_difference(folder, whole(name))
        with safe_open(folder / "model.safetensors", "pt") as file:
            figures["stacked"] = set(file.keys()) == {key for key, _ in whole(name).named_parameters()}
    return figures


@check("dense", "multimodal")
def shards(name):
    """A checkpoint in which each process writes its own shards, joined by the one process that reads it."""
    model = load(name, distributed_config=DistributedConfig(fsdp_size=2))
    folder = FOLDER / f"shards-{name}"
    model.save_pretrained(folder, distributed_checkpoint=True)
    again = type(model).from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    return {
        "files": len(list(folder.rglob("*.safetensors"))),
        "weights": weight_difference(again, whole(name)),
    }


@check("rows", "experts", "idle")
def balancing(shared):
    """Routers' biases after two steps, against those where each process sees all rows and holds all experts.

    Where the second process is idle, it sees none; the first sees them all.
    """
    options = {"distributed_config": expert_parallel()} if shared == "experts" else {}
    biases = []
    for inputs, kwargs in ((half if shared == "rows" else dict, options), (dict, {})):
        model = load("text", router_balancing="bias", **kwargs).train()
        watch = llamoe.RouterWatch(model)
        for _ in range(2):
            is_idle = shared == "idle" and not biases and dist.get_rank() == 1
            if not is_idle:
                model(**inputs(even_rows("text")))
            watch.step()
        biases.append(torch.stack([router.balancing_bias for router in model.routers()]))
    return {"largest": biases[1].abs().max().item(), "difference": max_abs(*biases)}


@check("text ddp", "text accelerate", "mixtral accelerate", "multimodal accelerate")
def adapters(name):
    """A step of LoRA on everything, experts included, on half of the rows; against one process that has them all."""
    name, kind = name.split()

    def adapted(model):
        torch.manual_seed(0)
        return get_peft_model(model, llamoe.lora_config(model, r=3, init_lora_weights=False))

    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(adapted(load(name)))
    else:
        model = shard_with_accelerate(name, adapted)
    reference, inputs = adapted(load(name)), even_rows(name)
    losses = [loss_of(model.train(), half(inputs)), loss_of(reference.train(), inputs)]
    for loss in losses:
        loss.backward()
    mean = losses[0].detach()
    dist.all_reduce(mean)
    given, expected = adapter_weights(model), adapter_weights(reference)
    assert any("experts" in n for n in given)
    return {
        "loss": abs(mean / 2 - losses[1]).item(),
        "gradients": adapter_difference(given, expected),
    }


@check("text", "top1", "mixtral", "multimodal")
def expert_adapters(name):
    """LoRA on experts that processes share: a step, the file, and what is merged, against one process."""
    folder, begun = (FOLDER / f"expert-adapters-{name}{end}" for end in ("", "-begun"))
    options = {"r": 3, "init_lora_weights": False}
    # peft fails on row-wise layers under tensor parallelism and merges none, in transformers' models too.
    others = ["q_proj", "k_proj", "v_proj"] if name == "text" else []
    torch.manual_seed(0)
    alone, shared = load(name), load(name, distributed_config=expert_parallel())
    alone = get_peft_model(alone, llamoe.lora_config(alone, target_modules=others, **options))
    if others:
        if dist.get_rank() == 0:
            alone.save_pretrained(begun)
        dist.barrier()
        shared = PeftModel.from_pretrained(shared, begun, is_trainable=True)
    else:
        # Both processes draw other numbers, and begin with the first one's.
        torch.manual_seed(dist.get_rank())
        shared = get_peft_model(shared, llamoe.lora_config(shared, target_modules=others, **options))
    models, losses = (shared, alone), []
    for model in models:
        loss = loss_of(model.train(), padded_rows(name))
        loss.backward()
        losses.append(loss.detach())
        model.eval()
    given, expected = map(adapter_weights, models)
    figures = {
        "loss": abs(losses[0] - losses[1]).item(),
        "gradients": adapter_difference(given, expected),
        "adapters": max(difference(given[n].detach(), expected[n].detach()) for n in expected),
    }
    shared.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    inputs = padded_rows(name)
    again = PeftModel.from_pretrained(load(name), folder).eval()
    with torch.no_grad():
        logits = alone(**inputs).logits
        figures["effect"] = max_abs(logits, whole(name)(**inputs).logits)
        figures["logits"] = max_abs(shared(**inputs).logits, logits)
        figures["read again"] = max_abs(again(**inputs).logits, logits)
        if not others:
            figures["merged"] = max_abs(shared.merge_and_unload()(**inputs).logits, logits)
    return figures


@check("ddp", "fsdp", "tp", "ep")
def example(parallel):
    sys.path.insert(0, str(EXAMPLES))
    from train_parallel import train as train_example

    losses = train_example(str(FOLDER / "text"), parallel, steps=2)
    return {"losses": losses}


# Saves


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


def add_adapter(model):
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


@check("fsdp", "tensor", "torch")
def saved_adapters(kind):
    """Save an adapter of a sharded model, load it into a whole model, and compare."""
    model = own("dense") if kind == "torch" else load_sharded("dense", kind)
    add_adapter(model)
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


@check("weights", "adapter")
def gathered(what):
    """What accelerate has gathered, saved by the first process alone and by both, the second with nothing."""
    folder, model = FOLDER / f"gathered-{what}", own("dense")
    if what == "adapter":
        add_adapter(model)
    with fsdp2_of_accelerate(cpu_ram_efficient_loading=False) as accelerator:
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


def main():
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{FOLDER / 'rendezvous'}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=90),
    )
    results = {}
    for key in sys.argv[2:] or CHECKS:
        torch.manual_seed(0)
        try:
            is_share = key.startswith("share ")
            figures = share(key.removeprefix("share ")) if is_share else CHECKS[key]()
        except Exception:
            figures = {"error": traceback.format_exc()}
            print(key, figures["error"], flush=True)
        both = [None] * dist.get_world_size()
        dist.all_gather_object(both, figures)
        results[key] = both
    if dist.get_rank() == 0:
        (FOLDER / "results.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
