"""What several processes send each other: for a forward pass of tokens, and for a step of training.

Sizes are those of the tensors that transformers calls collectives with, which tests count in real runs. What a card
sends for them is what it sends in a ring.
"""

import math
from bisect import bisect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers.distributed.pipeline_parallel import PipelineStage

from ..configuration.parallel import wildcard


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a pass or step.

    Attributes:
        name: "all_reduce", "all_gather", "reduce_scatter", "send" or "broadcast".
        what: it is for.
        size: bytes of the whole tensor: summed, gathered, before it is scattered, or sent.
        calls: how often; of a model in stages in all of them together.
        group: processes that take part.
        link: "inside" a node or "between" nodes.
        streams: groups that do the same at once over a node's links to others.
    """

    name: str
    what: str
    size: int
    calls: int
    group: int
    link: str = "inside"
    streams: int = 1

    @property
    def sent(self) -> float:
        """Bytes that go over one link for all calls: what a card sends, or a model's stages in turn."""
        share = (self.group - 1) / self.group
        factor = {
            "all_reduce": 2 * share,
            "all_gather": share,
            "reduce_scatter": share,
            "send": 1.0,
            "broadcast": self.group - 1.0,
        }
        return self.calls * self.size * factor[self.name]


def forward_traffic(
    model: Any,
    tokens: int,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    element_size: int = 2,
) -> list[Collective]:
    """Collectives of a forward pass of text: tensor, expert and pipeline parallel.

    Args:
        model: without weights, with its plans.
        tokens: of all rows together.
        tp: processes that share heads and widths.
        ep: processes that share experts; 1, or the same as `tp`, whose processes see the same rows.
        pp: stages; the stages of a model stand on different nodes.
        element_size: bytes of an activation.
    """
    config = model.config.get_text_config()
    hidden, wide = config.hidden_size * element_size, config.vocab_size
    found: list[Collective] = []
    if tp > 1:
        plans = [config.layer_plan(layer) for layer in range(config.num_hidden_layers)]
        mixtures = sum(plan.is_moe for plan in plans)
        shares_experts = ep > 1 or any(".experts." in f"{rule}." for rule in model.tp_plan)
        # Where the router scales what goes into experts, they give one row for each choice.
        rows = config.num_experts_per_tok if mixtures and config.apply_router_weight_on_input else 1
        sums = {
            "embedding": (1, any(rule.endswith("embed_tokens") for rule in model.tp_plan)),
            "attention": (1, len(plans)),
            "dense feed-forwards": (1, len(plans) - mixtures),
            "shared experts": (1, mixtures * getattr(config, "use_shared_expert", False)),
            "routed experts": (rows, mixtures * shares_experts),
        }
        for what, (rows, calls) in sums.items():
            if calls:
                found.append(Collective("all_reduce", what, tokens * rows * hidden, int(calls), tp))
        padded = -(-wide // tp) * tp * element_size
        found.append(Collective("all_gather", "logits", tokens * padded, 1, tp))
    if pp > 1:
        # Each process of a stage sends what its neighbour in the next stage needs.
        link = {"group": pp, "link": "between", "streams": tp}
        found.append(Collective("send", "hidden states", tokens * hidden, pp - 1, **link))
        # The shape, three numbers of eight bytes, and the logits.
        found.append(Collective("broadcast", "shape of the logits", 24, 1, **link))
        found.append(Collective("broadcast", "logits", tokens * wide * element_size, 1, **link))
    return found


def step_traffic(
    model: Any, shards: int, replicas: int = 1, element_size: int = 2, shard_link: str = "inside"
) -> list[Collective]:
    """Collectives of a step of training with FSDP2, in which every module runs once.

    Args:
        model: without weights, with its plans.
        shards: processes that share each weight.
        replicas: groups of such processes, among which gradients are summed.
        element_size: bytes of a weight when it is gathered, and of a gradient.
        shard_link: the link between the processes that share weights.
    """
    groups = groups_of_fsdp(model)
    found = []
    for what, names, is_kept in groups:
        size = sum(padded_numbers(shape, shards) for shape in names) * element_size
        if shards > 1:
            # What is freed after the forward pass is gathered again for the backward.
            found.append(Collective("all_gather", what, size, 1 if is_kept else 2, shards, shard_link))
            found.append(Collective("reduce_scatter", what, size, 1, shards, shard_link))
        if replicas > 1:
            found.append(Collective("all_reduce", what, size // shards, 1, replicas, "between", shards))
    return found


def groups_of_fsdp(model: Any) -> list[tuple[str, list[tuple[int, ...]], bool]]:
    """What FSDP2 gathers at once: a name, the shapes of its weights, and whether they stay until the backward pass."""
    plan = dict(model.fsdp_plan)
    is_tied = model.config.get_text_config().tie_word_embeddings
    # Those that stay are gathered together; what no rule names, by the model itself.
    kept: dict[str, list[tuple[int, ...]]] = {"norm and head": [], "everything else": []}
    freed: dict[str, list[tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        owner = name
        while owner and wildcard(owner) not in plan:
            owner = owner.rpartition(".")[0]
        shape = tuple(parameter.shape)
        if not owner:
            kept["everything else"].append(shape)
        elif is_tied and owner.endswith("embed_tokens"):
            # It is gathered for itself and for the head.
            kept["embedding"] = [shape]
            kept["norm and head"].append(shape)
        elif plan[wildcard(owner)] == "keep_full_weight":
            kept["norm and head"].append(shape)
        else:
            freed.setdefault(owner, []).append(shape)
    found = [(name, shapes, False) for name, shapes in freed.items()]
    return found + [(name, shapes, True) for name, shapes in kept.items() if shapes]


def padded_numbers(shape: tuple[int, ...], shards: int) -> int:
    """Numbers of a weight whose first axis is filled up to a multiple of the shards."""
    return -(-shape[0] // shards) * shards * math.prod(shape[1:]) if shape else shards


def layers_of_stages(layers: int, stages: int) -> list[tuple[int, int]]:
    """First layer of each stage, and of the next one, as the installed transformers divides them."""
    sizes: Any = SimpleNamespace(pp_size=stages)
    return [PipelineStage.layer_range_for_rank(sizes, stage, layers) for stage in range(stages)]


def card_bytes(model: Any, tp: int, ep: int, pp: int, element_size: int) -> list[int]:
    """Bytes of weights on the first card of each stage, which has the largest share."""
    ends = [end for _, end in layers_of_stages(model.config.get_text_config().num_hidden_layers, pp)]
    ep_plan = model._ep_plan if ep > 1 else {}
    is_tied = model.config.get_text_config().tie_word_embeddings
    found = [0] * pp
    for name, parameter in model.named_parameters():
        size = math.prod(_share(name, tuple(parameter.shape), model.tp_plan, ep_plan, tp, ep)) * element_size
        pieces = name.split(".")
        if "layers" in pieces and not name.startswith("vision_model."):
            stages = [bisect(ends, int(pieces[pieces.index("layers") + 1]))]
        elif name.endswith("embed_tokens.weight"):
            stages = [0, pp - 1] if is_tied else [0]
        else:
            stages = [0] if name.startswith(("vision_model.", "multi_modal_projector")) else [pp - 1]
        for stage in set(stages):
            found[stage] += size
    return found


def _share(
    name: str, shape: tuple[int, ...], tp_plan: dict, ep_plan: dict, tp: int, ep: int
) -> tuple[int, ...]:
    """Shape of the first process's part of a weight."""
    rule = wildcard(name)
    if rule in ep_plan:
        return -(-shape[0] // ep), *shape[1:]
    style = tp_plan.get(rule) or tp_plan.get(rule.rpartition(".")[0], "")
    if ".experts." in name and ep_plan:
        style = ""
    axis = {"embedding_rowwise": 0}.get(style)
    if "colwise" in style:
        axis = max(0, len(shape) - 2)
    elif style in ("rowwise", "packed_rowwise") and len(shape) > 1:
        axis = len(shape) - 1
    if axis is None:
        return shape
    pieces = 2 if style.startswith("packed") else 1
    own = pieces * -(-(shape[axis] // pieces) // tp)
    return *shape[:axis], own, *shape[axis + 1 :]
