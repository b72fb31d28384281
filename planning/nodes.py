"""Plans for several machines: how their accelerators share a model, and the bytes that each holds."""

import math
from dataclasses import dataclass
from typing import Any

from ..configuration import LlamoeConfig, LlamoeVisionConfig, cache_bytes
from ..configuration.sizes import GB
from ..modeling.registration import empty_model
from .shares import card_bytes, layers_of_stages
from .units import Sizes

# Bytes per trained parameter: weight, gradient and AdamW's two averages, in float32.
_TRAINED_BYTES = 16


@dataclass(frozen=True)
class NodesPlan:
    """How a model is shared by the accelerators of one or more nodes. Sizes are bytes.

    Attributes:
        nodes, gpus: nodes, and accelerators of each.
        is_training: whether it is for training (FSDP2), else for inference.
        sizes: for `DistributedConfig`: tp_size, ep_size and pp_size, or fsdp_size and dp_replicate_size.
        copies: of the model. For inference each generates by itself; in training they are `dp_replicate_size` replicas.
        room: of an accelerator: its memory without headroom.
        weights: on the accelerator that has most; in training with gradients and AdamW's averages.
        cache: of keys and values there; in training, where activations take the headroom, the largest gathered modules.
        notes: what else to know, in sentences.
    """

    nodes: int
    gpus: int
    is_training: bool
    sizes: dict[str, int]
    copies: int
    room: int
    weights: int
    cache: int
    notes: list[str]

    @property
    def remaining(self) -> int:
        """Return the unused bytes of an accelerator."""
        return self.room - self.weights - self.cache

    def distributed_config(self) -> dict[str, int]:
        """Return the arguments of transformers' `DistributedConfig`."""
        return {name: size for name, size in self.sizes.items() if size > 1}

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        lines = [
            f"{self.nodes} nodes x {self.gpus} accelerators: {shares}, {self.copies} copies",
            f"an accelerator: {self.weights / GB:.2f} GB of weights and what belongs to them, {self.cache / GB:.2f} GB "
            f"of {'gathered weights' if self.is_training else 'cache'}, {self.remaining / GB:.2f} GB of "
            f"{self.room / GB:.2f} left",
        ]
        return "\n".join([*lines, *self.notes])


def plan_nodes(
    model: Any,
    sizes: Sizes,
    nodes: int,
    gpus: int,
    room: int,
    training: bool,
    cache: tuple[int | None, int, int | None],
) -> NodesPlan:
    """Plan how the equal accelerators of several nodes share a model: the first split that fits.

    Args:
        model: without weights.
        sizes: of its parts.
        nodes, gpus: nodes, and accelerators of each.
        room: bytes of each accelerator.
        training: whether it is for training.
        cache: tokens of context, rows, and tokens of the prompt in one pass.

    Raises:
        ValueError: a tower; quantized weights, which no processes share; or too little memory, with the sizes.
    """
    config = model.config
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError("A vision tower alone is planned for one machine: leave nodes and training out.")
    if sizes.form not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"{sizes.form}: quantized weights cannot be shared by processes: give bits=16, or no nodes."
        )
    cards, tried = nodes * gpus, []
    if training:
        splits = (_fsdp(model, sizes, cards, shards) for shards in (gpus, cards))
    else:
        splits = (
            _split(config, sizes, cards, stages, tp, cache)
            for stages in _divisors(nodes)
            for tp in reversed(_divisors(gpus))
            if stages <= config.get_text_config().num_hidden_layers and _divides(config, tp)
        )
    for split in splits:
        plan = NodesPlan(nodes, gpus, training, room=room, **split)
        if plan.remaining >= 0:
            return plan
        tried.append(plan)
    least = min(tried, key=lambda plan: plan.weights + plan.cache)
    raise ValueError(
        f"each of {cards} accelerators would hold at least {least.weights / GB:.1f} GB of weights and what belongs to "
        f"them and {least.cache / GB:.1f} GB of {'gathered weights' if training else 'cache'}, and has room for "
        f"{room / GB:.1f}: take more or larger ones"
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _divides(config: Any, tp: int) -> bool:
    parts = (config, *(getattr(config, name) for name in config.sub_configs))
    heads = ("num_attention_heads", "num_key_value_heads")
    return not any(getattr(part, name, tp) % tp for part in parts for name in heads)


def _fsdp(model: Any, sizes: Sizes, cards: int, shards: int) -> dict[str, Any]:
    """Plan FSDP2 over so many of the accelerators, which fields of a `NodesPlan` say."""
    # A module is gathered in 16 bits while the one before it is still there.
    gathered = sorted(2 * (unit.weights + unit.experts) // sizes.element_size for unit in sizes.units)[-2:]
    # The first axis is sharded: with fewer experts than accelerators, some get one and the rest none.
    numbers = sum(-(-len(weight) // shards) * math.prod(weight.shape[1:]) for weight in model.parameters())
    return {
        "sizes": {"fsdp_size": shards, "dp_replicate_size": cards // shards},
        "copies": cards // shards,
        "weights": _TRAINED_BYTES * numbers,
        "cache": sum(gathered),
        "notes": ["Activations beyond the headroom are not in this plan."],
    }


def _split(
    config: Any, sizes: Sizes, cards: int, stages: int, tp: int, cache: tuple[int | None, int, int | None]
) -> dict[str, Any]:
    """Plan stages of layers, each of `tp` accelerators that share heads, widths and, in one stage, experts."""
    (context, batch, prefill), notes = cache, []
    if stages > 1 and isinstance(config, LlamoeConfig):
        config = config.text_config
        notes.append("Stages are for text: LlamoeForCausalLM loads the text model of this folder.")
    text = config.get_text_config()
    experts = text.num_local_experts if getattr(text, "moe_layers", None) else 0
    ep = tp if stages == 1 and experts and experts % tp == 0 else 1
    model: Any = empty_model(config)
    model.keep_uneven_experts(tp)
    weights = card_bytes(model, tp, ep, stages, sizes.element_size)
    per_layer = cache_bytes(config, context, batch, sizes.element_size, prefill)
    held = [sum(per_layer[a:b]) // tp for a, b in layers_of_stages(text.num_hidden_layers, stages)]
    most = max(range(stages), key=lambda stage: weights[stage] + held[stage])
    if stages > 1 and experts:
        notes.append(
            "Stages are not joined with expert parallelism in transformers: each expert's width is shared."
        )
    elif stages > 1:
        notes.append("Stages wait for each other: they are for memory, not for speed.")
    elif experts and ep < tp:
        notes.append(f"{experts} experts are not divided by {tp}: each expert's width is shared.")
    return {
        "sizes": {"tp_size": tp, "ep_size": ep, "pp_size": stages},
        "copies": cards // (tp * stages),
        "weights": weights[most],
        "cache": held[most],
        "notes": notes,
    }
