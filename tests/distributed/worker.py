"""One of two processes that run a model together and compare with one process; test_two_processes.py starts it.

Every check compares with the same model loaded without any sharding in this process, and yields figures: largest
differences, or whether something holds. What both processes measured is written to results.json by the first.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support import MULTIMODAL, Case, max_abs
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import llamoe
from llamoe.modeling._compat import gather

FOLDER = Path(sys.argv[1])
CLASSES = {
    "dense": "LlamoeDenseForCausalLM",
    "tied": "LlamoeDenseForCausalLM",
    "text": "LlamoeForCausalLM",
    "top1": "LlamoeForCausalLM",
    "multimodal": "LlamoeForConditionalGeneration",
}
BACKENDS = ("eager", "grouped_mm", "batched_mm")
LEARNING_RATE = 0.5
CHECKS = {}


def check(*names):
    """Register a check, once for each of the models."""

    def register(function):
        for name in names:
            CHECKS[f"{function.__name__}-{name}"] = lambda name=name: function(name)
        return function

    return register


def load(name, **kwargs):
    return getattr(llamoe, CLASSES[name]).from_pretrained(FOLDER / name, dtype=torch.float32, **kwargs)


def tensor_parallel(**kwargs):
    return DistributedConfig(tp_size=2, tp_plan="auto", **kwargs)


def expert_parallel():
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        return DistributedConfig(tp_size=2, ep_size=2)
    return DistributedConfig(tp_size=2, tp_plan="auto", enable_expert_parallel=True)


def inputs_of(name):
    """Four rows without padding, so that two processes with two rows each share the tokens evenly."""
    case = MULTIMODAL if name == "multimodal" else Case(CLASSES[name], None, None, None)
    inputs = case.inputs(padding=(0, 0, 0, 0), length=23)
    if name == "multimodal":
        # The same number of tiles in every row: one.
        ids = inputs["input_ids"]
        ids[ids == llamoe_image_token()] = 5
        ids[:, 3:7] = llamoe_image_token()
        size = inputs["pixel_values"].shape[-1]
        generator = torch.Generator().manual_seed(7)
        inputs["pixel_values"] = torch.randn(4, 3, size, size, generator=generator)
    return inputs


def llamoe_image_token():
    from support import IMAGE_TOKEN

    return IMAGE_TOKEN


def part(inputs):
    """The rows of this process."""
    return {name: value.chunk(2)[dist.get_rank()] for name, value in inputs.items()}


def relative_gradient_difference(model, reference):
    """The largest difference of a parameter's gradient, relative to its largest entry."""
    worst = 0.0
    expected = dict(reference.named_parameters())
    floor = max(p.grad.abs().max().item() for p in expected.values()) / 100
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        scale = max(expected[name].grad.abs().max().item(), floor)
        worst = max(worst, max_abs(gather(parameter.grad), expected[name].grad) / scale)
    return worst


def weight_difference(model, reference):
    expected = dict(reference.named_parameters())
    given = {name.removeprefix("module."): gather(p.detach()) for name, p in model.named_parameters()}
    assert given.keys() == expected.keys()
    return max(max_abs(given[name], expected[name]) for name in expected)


def loss_of(model, inputs):
    return model(**inputs, labels=inputs["input_ids"]).loss


def step(model, inputs, optimizer=None):
    """One step of training; the loss."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loss = loss_of(model.train(), inputs)
    loss.backward()
    optimizer.step()
    return loss.detach()


def compare(name, distributed_config, **kwargs):
    """Forward, generation, a step of training, saved and loaded again: against one process."""
    reference = load(name, **kwargs)
    model = load(name, distributed_config=distributed_config, **kwargs)
    inputs = inputs_of(name)
    with torch.no_grad():
        expected, given = reference(**inputs).logits, model(**inputs).logits
    figures = {"deviation": expected.std().item(), "logits": max_abs(given, expected)}
    sharded = [p for p in model.parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    figures["sharded"] = sum(p.numel() for p in sharded) / sum(p.numel() for p in model.parameters())

    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    tokens = [each.generate(**inputs, **options) for each in (model, reference)]
    figures["generated"] = tokens[0].shape[1] - inputs["input_ids"].shape[1]
    figures["other tokens"] = int((tokens[0] != tokens[1]).sum())

    figures["loss"] = abs(step(model, inputs) - step(reference, inputs)).item()
    figures["gradients"] = relative_gradient_difference(model, reference)
    folder = FOLDER / f"saved-{name}-{len(kwargs)}-{distributed_config.enable_expert_parallel}"
    model.save_pretrained(folder)
    again = type(reference).from_pretrained(folder)
    assert again.config == reference.config
    return figures | {"trained and reloaded": weight_difference(again, reference)}


@check("dense", "tied", "text", "multimodal")
def tensor(name):
    return compare(name, tensor_parallel())


@check(*BACKENDS, "multimodal")
def expert(name):
    if name in BACKENDS:
        return compare("text", expert_parallel(), experts_implementation=name)
    return compare(name, expert_parallel())


def starved_rows():
    """Two rows of two tokens; all choose, in each layer, among the first half of the experts."""
    model = load("top1")
    ids = torch.randint(3, 90, (400, 2), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    chosen = torch.stack([layer.argmax(-1).view(ids.shape) for layer in logits])
    fits = (chosen < model.config.num_local_experts // 2).all(-1).all(0)
    rows = ids[fits][:2]
    assert len(rows) == 2
    # In the first mixture the two rows use at most four of the six experts, all on the first process.
    return {"input_ids": rows}


def train(name, kind, inputs):
    """One step on the rows of both processes; what is left is compared with one process that has all rows."""
    reference = load(name)
    expected_loss = step(reference, inputs)
    mine = part(inputs)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(load(name))
        loss = step(model, mine)
    elif kind == "accelerate":
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin

        classes = ["DecoderLayer", "VisionEncoderLayer"][: 1 + (name == "multimodal")]
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=classes,
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = load(name)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        loss = step(model, mine, optimizer)
    elif kind == "expert":
        model, mine = load(name, distributed_config=expert_parallel()), inputs
        loss = step(model, mine)
    else:
        extra = {"ep_size": 2} if kind == "fsdp+expert" else {}
        model = load(name, distributed_config=DistributedConfig(fsdp_size=2, **extra))
        loss = step(model, mine)
    dist.all_reduce(loss)
    figures = {"loss": abs(loss / 2 - expected_loss).item(), "gradients": relative_gradient_difference(unwrapped(model), reference)}
    figures["trained"] = weight_difference(model, reference)
    if kind.startswith("fsdp"):
        folder = FOLDER / f"saved-{kind}-{name}"
        model.save_pretrained(folder)
        figures["trained and reloaded"] = weight_difference(type(reference).from_pretrained(folder), reference)
    return figures


def unwrapped(model):
    return getattr(model, "module", model)


KINDS = ["ddp", "fsdp", "accelerate"]
if "ep_size" in DistributedConfig.__dataclass_fields__:
    KINDS.append("fsdp+expert")


@check(*[f"{name} {kind}" for name in ("dense", "text", "multimodal") for kind in KINDS if (name, kind) != ("dense", "fsdp+expert")])
def training(name):
    name, kind = name.split()
    return train(name, kind, inputs_of(name))


@check(*KINDS, "expert")
def starved(kind):
    return train("top1", kind, starved_rows())


@check("dense", "tied", "text")
def pipeline(name):
    reference, model = load(name), load(name, distributed_config=DistributedConfig(pp_size=2))
    inputs = inputs_of(name)
    with torch.no_grad():
        figures = {"logits": max_abs(model(**inputs).logits, reference(**inputs).logits)}
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    tokens = [each.generate(**inputs, **options) for each in (model, reference)]
    figures["generated"] = tokens[0].shape[1] - inputs["input_ids"].shape[1]
    figures["other tokens"] = int((tokens[0] != tokens[1]).sum())
    return figures


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {}
    wanted = sys.argv[2:] or list(CHECKS)
    for key in wanted:
        torch.manual_seed(0)
        try:
            figures = CHECKS[key]()
        except Exception:
            figures = {"error": traceback.format_exc()}
            print(key, figures["error"], file=sys.stderr, flush=True)
        both = [None, None]
        dist.all_gather_object(both, figures)
        results[key] = both
        if dist.get_rank() == 0:
            (FOLDER / "results.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
