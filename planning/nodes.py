"""Plan how the accelerators of several machines share a model, and the bytes on each."""

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
    """A division of a model among the accelerators of one or more nodes. Sizes are bytes.

    Attributes:
        nodes, gpus: number of nodes, and of accelerators in each.
        is_training: whether the plan is for training with FSDP2; else it is for inference.
        sizes: fields of `DistributedConfig`: tp_size, ep_size and pp_size, or fsdp_size and dp_replicate_size.
        copies: number of copies of the model. In inference each copy generates by itself; in training they are the
            `dp_replicate_size` replicas.
        room: memory of an accelerator without headroom.
        weights: bytes on the fullest accelerator; in training with gradients and AdamW's averages.
        cache: bytes of keys and values there; in training those of the largest modules that FSDP2 gathers at once;
            activations use the headroom.
        notes: advice, in sentences.
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
    """Return the first division of a model among equal accelerators that fits, with as few stages as possible.

    Args:
        model: the model without weights.
        sizes: bytes of its parts.
        nodes, gpus: number of nodes, and of accelerators in each.
        room: bytes of each accelerator.
        training: whether to plan training with FSDP2.
        cache: tokens of context, rows, and tokens of the prompt in one forward pass.

    Raises:
        ValueError: a vision tower; quantized weights, which cannot be divided; or too little memory, with the sizes.
    """
    config = model.config
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError(
            "A vision tower alone can only be planned for one machine: leave nodes and training out."
        )
    if sizes.form not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"{sizes.form}: quantized weights cannot be divided among processes: give bits=16, or no nodes."
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
    """Return fields of a `NodesPlan` for FSDP2 that divides weights among `shards` of `cards` accelerators."""
    # FSDP2 gathers the next module in 16 bits while the current one computes, so two are held at once.
    gathered = sorted(2 * (unit.weights + unit.experts) // sizes.element_size for unit in sizes.units)[-2:]
    # FSDP2 divides the first axis. With fewer experts than accelerators, some hold one and the others none.
    numbers = sum(-(-len(weight) // shards) * math.prod(weight.shape[1:]) for weight in model.parameters())
    return {
        "sizes": {"fsdp_size": shards, "dp_replicate_size": cards // shards},
        "copies": cards // shards,
        "weights": _TRAINED_BYTES * numbers,
        "cache": sum(gathered),
        "notes": ["The plan does not count activations: the headroom must hold them."],
    }


def _split(
    config: Any, sizes: Sizes, cards: int, stages: int, tp: int, cache: tuple[int | None, int, int | None]
) -> dict[str, Any]:
    """Return fields of a `NodesPlan` for pipeline stages, each divided among `tp` accelerators.

    These share attention heads and inner sizes; with a single stage they share experts, too.
    """
    (context, batch, prefill), notes = cache, []
    if stages > 1 and isinstance(config, LlamoeConfig):
        config = config.text_config
        notes.append("Pipeline stages need a text model: load this folder with LlamoeForCausalLM.")
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
            "transformers does not combine pipeline stages with expert parallelism: each expert is divided."
        )
    elif stages > 1:
        notes.append("Pipeline stages wait for each other: they save memory, not time.")
    elif experts and ep < tp:
        notes.append(f"{experts} experts cannot be divided by {tp}, so each expert is divided.")
    return {
        "sizes": {"tp_size": tp, "ep_size": ep, "pp_size": stages},
        "copies": cards // (tp * stages),
        "weights": weights[most],
        "cache": held[most],
        "notes": notes,
    }
