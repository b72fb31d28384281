"""Check that outputs, training and adapters of a model shared by processes equal those in one process."""

import json
import sys
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import llamoe
from llamoe.modeling import loss as pieces

from .models import IMAGE_TOKEN, MULTIMODAL, TOKENS_PER_TILE, VISION, Case, max_abs
from .paths import EXAMPLES
from .process_models import (
    CLASSES,
    FOLDER,
    check,
    gradient_difference,
    half,
    is_split,
    load,
    load_sharded,
    saved_difference,
    weight_difference,
    whole,
)

BACKENDS = ("llamoe", "eager", "grouped_mm", "batched_mm")
LEARNING_RATE = 0.5
# With `skip_logits` the loss is computed piece by piece. Make pieces so small that two rows are several pieces.
pieces.PIECE_LOGITS = 2 * 101 * 9


def padded_rows(name):
    """Return inputs of three left-padded rows; with pictures the second has two tiles and the third one."""
    case = MULTIMODAL if name == "multimodal" else Case(CLASSES[name], None, None, None)
    return case.inputs(padding=(5, 0, 9), length=29)


def even_rows(name):
    """Return inputs of four rows without padding, with a tile each, so that each process gets half of everything."""
    generator = torch.Generator().manual_seed(2)
    inputs = {"input_ids": torch.randint(3, 90, (4, 23), generator=generator)}
    if name == "multimodal":
        inputs["input_ids"][:, 3 : 3 + TOKENS_PER_TILE] = IMAGE_TOKEN
        size = VISION["image_size"]
        inputs["pixel_values"] = torch.randn(4, 3, size, size, generator=generator)
    return inputs


def starved_rows(name):
    """Return inputs of two rows of two tokens, which choose only experts of the first process in every layer."""
    model = whole(name)
    ids = torch.randint(3, 90, (400, 2), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    chosen = torch.stack([layer.argmax(-1).view(ids.shape) for layer in logits])
    fits = (chosen < model.config.num_local_experts // 2).all(-1).all(0)
    rows = ids[fits][:2]
    assert len(rows) == 2
    return {"input_ids": rows}


def loss_of(model, inputs, **options):
    """Return the loss of predicting each row's next tokens."""
    return model(**inputs, labels=inputs["input_ids"], **options).loss


def step(model, inputs, **options):
    """Train a model for one step; return the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loss = loss_of(model.train(), inputs, **options)
    loss.backward()
    optimizer.step()
    return loss.detach()


def outputs(model, inputs):
    """Return logits `[B, T, V]`, and the rows with four generated tokens."""
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None)
        return model(**inputs).logits, tokens


@cache
def outputs_of_one(name):
    """Return the outputs of the undistributed model for the padded rows, which many checks compare with."""
    return outputs(whole(name), padded_rows(name))


def compare_outputs(model, name):
    """Compare logits and generated tokens of the padded rows with those of one process."""
    inputs = padded_rows(name)
    (given, tokens), (expected, expected_tokens) = outputs(model, inputs), outputs_of_one(name)
    assert tokens.shape[1] == inputs["input_ids"].shape[1] + 4
    return {
        "deviation": expected.std().item(),
        "logits": max_abs(given, expected),
        "other tokens": int((tokens != expected_tokens).sum()),
    }


def share(text):
    """Compare the outputs for `text`, as "dense tp_size=2 pp_size=2", and count this process's bytes of weights."""
    name, *sizes = text.split()
    sizes = {size: int(count) for size, _, count in (word.partition("=") for word in sizes)}
    model = load(name, distributed_config=DistributedConfig(**sizes))
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return compare_outputs(model, name) | {"bytes": sum(part.nbytes for part in parts)}


def router_losses(name):
    """Return options of `from_pretrained` that add both router losses to a mixture's loss."""
    if name in ("dense", "tied"):
        return {}
    text = dict(output_router_logits=True, router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
    return {"text_config": text} if name == "multimodal" else text


@cache
def trained_by_one(name, rows, with_router=False):
    """Train one step in one process; return the loss, and the model with its gradients."""
    model = load(name, **(router_losses(name) if with_router else {}))
    return step(model, rows(name)), model


def compare(name, kind, layout="llamoe", **kwargs):
    """Compare a distributed model with one process: outputs, a training step, and the weights saved after it."""
    model = load_sharded(name, kind, **router_losses(name), **kwargs)
    figures = compare_outputs(model, name)
    parameters = list(model.parameters())
    figures["sharded"] = sum(p.numel() for p in parameters if is_split(p)) / sum(
        p.numel() for p in parameters
    )

    loss, reference = trained_by_one(name, padded_rows, with_router=True)
    figures["loss"] = abs(step(model, padded_rows(name)) - loss).item()
    figures["gradients"] = gradient_difference(model, reference)
    folder = FOLDER / f"saved-{name}-{layout}-{kind}"
    model.save_pretrained(folder, layout=layout, max_shard_size="250KB")
    saved_type, config = json.loads((folder / "config.json").read_text())["model_type"], reference.config
    assert saved_type == (config.stock_model_type if layout == "stock" else config.model_type)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return figures | {"trained and reloaded": saved_difference(folder, reference)}


@check("dense", "tied", "text", "top1", "mixtral", "multimodal")
def tensor(name):
    """Compare tensor parallelism with one process; two of the models are saved in stock's layout."""
    return compare(name, "tensor", layout="stock" if name in ("mixtral", "multimodal") else "llamoe")


@check(*BACKENDS, "mixtral", "multimodal")
def expert(name):
    """Compare expert parallelism with one process; `name` is a model's, or an experts backend's for model "text"."""
    if name in BACKENDS:
        return compare("text", "expert", experts_implementation=name)
    return compare(name, "expert")


@check("dense", "tied", "text", "mixtral", "text-split")
def pipeline(name):
    """Compare the outputs of pipeline parallelism with one process."""
    return compare_outputs(load_sharded(name, "pipeline"), name.removesuffix("-split"))


def train(name, kind, rows):
    """Train one step on the rows of both processes, and compare with one process that has all rows."""
    expected_loss, reference = trained_by_one(name, rows)
    model, inputs = load_sharded(name, kind), rows(name)
    # The loss of logits in one process is compared with the loss by pieces, each of which gathers the head's weights.
    options = {} if kind in ("accelerate", "expert") else {"skip_logits": True}
    loss = step(model, inputs if kind == "expert" else half(inputs), **options)
    dist.all_reduce(loss)
    figures = {
        "loss": abs(loss / 2 - expected_loss).item(),
        "gradients": gradient_difference(model, reference),
        "trained": weight_difference(model, reference),
    }
    if kind.startswith("fsdp"):
        folder = FOLDER / f"saved-{kind}-{name}"
        model.save_pretrained(folder)
        figures["trained and reloaded"] = saved_difference(folder, reference)
    return figures


KINDS = ["ddp", "fsdp", "accelerate", "fsdp+expert"]
PAIRS = [f"{name} {kind}" for name, kind in product(("dense", "text", "mixtral", "multimodal"), KINDS)]


# A dense model has no experts to share.
@check(*[pair for pair in PAIRS if pair != "dense fsdp+expert"])
def training(pair):
    """Train on rows with equal work for both processes."""
    return train(*pair.split(), even_rows)


@check(*KINDS, "expert")
def starved(kind):
    """Train on rows for which no expert of the second process has a token."""
    return train("top1", kind, starved_rows)


@check("rows", "experts", "idle")
def balancing(shared):
    """Compare the routers' biases after two steps with those of a model that sees all rows in each process.

    The processes share rows or experts; in "idle" the first has all rows, and the second has none.
    """
    biases = []
    for is_shared in (True, False):
        kind = "expert" if is_shared and shared == "experts" else None
        options = dict(router_balancing="bias")
        model = (load_sharded("text", kind, **options) if kind else load("text", **options)).train()
        watch = llamoe.RouterWatch(model)
        inputs = even_rows("text")
        for _ in range(2):
            if not (is_shared and shared == "idle" and dist.get_rank() == 1):
                model(**half(inputs) if is_shared and shared == "rows" else inputs)
            watch.step()
        biases.append(torch.stack([router.balancing_bias for router in model.routers()]))
    return {"largest": biases[1].abs().max().item(), "difference": max_abs(*biases)}


@check("text ddp", "text accelerate", "mixtral accelerate", "multimodal accelerate")
def adapters(pair):
    """Compare a step of LoRA on everything, with half of the rows in each process, with one process."""
    name, kind = pair.split()

    def adapted(model):
        torch.manual_seed(0)
        return get_peft_model(model, llamoe.lora_config(model, r=3, init_lora_weights=False))

    model, reference = load_sharded(name, kind, adapted), adapted(load(name))
    assert any("experts" in n for n, p in reference.named_parameters() if p.requires_grad)
    inputs = even_rows(name)
    losses = [loss_of(model.train(), half(inputs)), loss_of(reference.train(), inputs)]
    for loss in losses:
        loss.backward()
    mean = losses[0].detach()
    dist.all_reduce(mean)
    return {"loss": abs(mean / 2 - losses[1]).item(), "gradients": gradient_difference(model, reference)}


@check("text", "top1", "mixtral", "multimodal")
def expert_adapters(name):
    """Compare LoRA on experts under expert parallelism with one process: a step, the saved file, merged weights."""
    folder, begun = (FOLDER / f"expert-adapters-{name}{end}" for end in ("", "-begun"))
    options = {"r": 3, "init_lora_weights": False}
    # Under tensor parallelism peft fails on row-wise layers and merges no layer, in transformers' models too.
    others = ["q_proj", "k_proj", "v_proj"] if name == "text" else []
    torch.manual_seed(0)
    alone, shared = load(name), load_sharded(name, "expert")
    alone = get_peft_model(alone, llamoe.lora_config(alone, target_modules=others, **options))
    if others:
        if dist.get_rank() == 0:
            alone.save_pretrained(begun)
        dist.barrier()
        shared = PeftModel.from_pretrained(shared, begun, is_trainable=True)
    else:
        # The processes draw different factors; both must begin with the factors of the first process.
        torch.manual_seed(dist.get_rank())
        shared = get_peft_model(shared, llamoe.lora_config(shared, target_modules=others, **options))
    losses = []
    for model in (shared, alone):
        loss = loss_of(model.train(), padded_rows(name))
        loss.backward()
        losses.append(loss.detach())
        model.eval()
    figures = {
        "loss": abs(losses[0] - losses[1]).item(),
        "gradients": gradient_difference(shared, alone),
        "adapters": weight_difference(shared, alone, "lora_"),
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
    """Run the training loop of examples/train_parallel.py; return its losses."""
    sys.path.insert(0, str(EXAMPLES))
    from train_parallel import train as train_example

    return {"losses": train_example(str(FOLDER / "text"), parallel, steps=2)}
