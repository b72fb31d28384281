"""Plan how the accelerators of several machines share a model, and how many bytes each of them holds."""

import math
from dataclasses import dataclass
from typing import Any

from ..configuration import LlamoeConfig, LlamoeVisionConfig, cache_bytes
from ..configuration.sizes import GB
from ..modeling.registration import empty_model
from .shares import card_bytes, layers_of_stages
from .units import Sizes

# Bytes for each trained parameter: weight, gradient and AdamW's two averages, in float32.
_TRAINED_BYTES = 16


@dataclass(frozen=True)
class NodesPlan:
    """A division of a model among the accelerators of one or more nodes. Memory sizes are bytes.

    Attributes:
        nodes, gpus: number of nodes, and of accelerators in each.
        is_training: whether the plan is for training with FSDP2; else it is for inference.
        sizes: fields of `DistributedConfig`: tp_size, ep_size and pp_size, or fsdp_size and dp_replicate_size.
        copies: number of copies of the model. In inference each copy generates independently; in training they are
            the `dp_replicate_size` replicas.
        room: memory of an accelerator without headroom. Activations use the headroom.
        weights: weights on the fullest accelerator; in training with their gradients and AdamW's averages.
        cache: keys and values on that accelerator; in training the two largest modules, which FSDP2 gathers at once.
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

    def _parts(self) -> str:
        """Return what the fullest accelerator holds, in GB, as text."""
        weights = "weights, gradients and AdamW's averages" if self.is_training else "weights"
        cache = "gathered weights" if self.is_training else "KV cache"
        return f"{self.weights / GB:.2f} GB of {weights}, {self.cache / GB:.2f} GB of {cache}"

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        lines = [
            f"{self.nodes} nodes x {self.gpus} accelerators: {shares}, {self.copies} copies",
            f"the fullest accelerator: {self._parts()}, {self.remaining / GB:.2f} GB of {self.room / GB:.2f} free",
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
        cache: tokens in the KV cache, rows, and tokens of the prompt in one forward pass.

    Raises:
        ValueError: the model is a vision tower; its weights are quantized, and cannot be divided; or it does not fit.
    """
    config = model.config
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError(
            "A vision tower alone can be planned only for one machine: leave nodes and training out."
        )
    if sizes.form not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"{sizes.form} weights cannot be divided among processes: give bits=16, or leave nodes out."
        )
    cards, tried = nodes * gpus, []
    if training:
        splits = (_fsdp(model, sizes, cards, shards) for shards in (gpus, cards))
    else:
        splits = (
            _split(config, sizes, cards, stages, tp, cache)
            for stages in _divisors(nodes)
            for tp in reversed(_divisors(gpus))
            if stages <= config.get_text_config().num_hidden_layers and _divides_heads(config, tp)
        )
    for split in splits:
        plan = NodesPlan(nodes, gpus, training, room=room, **split)
        if plan.remaining >= 0:
            return plan
        tried.append(plan)
    least = min(tried, key=lambda plan: plan.weights + plan.cache)
    raise ValueError(
        f"The model does not fit: the fullest of {cards} accelerators would hold {least._parts()}, and has room for "
        f"{room / GB:.2f} GB. Take more or larger accelerators."
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _divides_heads(config: Any, tp: int) -> bool:
    """Return True if `tp` accelerators can share the attention heads of each part of the model equally."""
    parts = (config, *(getattr(config, name) for name in config.sub_configs))
    heads = ("num_attention_heads", "num_key_value_heads")
    return not any(getattr(part, name, tp) % tp for part in parts for name in heads)


def _fsdp(model: Any, sizes: Sizes, cards: int, shards: int) -> dict[str, Any]:
    """Return fields of a `NodesPlan` for FSDP2 that divides weights among `shards` of `cards` accelerators."""
    # FSDP2 gathers the next module in 16 bits while the current one computes, so two modules are in memory at once.
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

    The accelerators of a stage share attention heads and the inner sizes of feed-forwards. If there is only one stage,
    they also share the experts.
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
    of_stages = [sum(per_layer[a:b]) // tp for a, b in layers_of_stages(text.num_hidden_layers, stages)]
    most = max(range(stages), key=lambda stage: weights[stage] + of_stages[stage])
    if stages > 1 and experts:
        notes.append(
            "transformers does not combine pipeline stages with expert parallelism, so each expert is divided."
        )
    elif stages > 1:
        notes.append("Pipeline stages save memory but no time, because they wait for each other.")
    elif experts and ep < tp:
        notes.append(f"{experts} experts cannot be divided by {tp}, so each expert is divided.")
    return {
        "sizes": {"tp_size": tp, "ep_size": ep, "pp_size": stages},
        "copies": cards // (tp * stages),
        "weights": weights[most],
        "cache": of_stages[most],
        "notes": notes,
    }
