"""Shares of a model that processes hold: in tensor, expert and pipeline parallelism, and in FSDP2."""

import math
from bisect import bisect
from types import SimpleNamespace
from typing import Any

from transformers.distributed.pipeline_parallel import PipelineStage

from ..configuration.parallel import wildcard


def groups_of_fsdp(model: Any) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the weights that FSDP2 gathers together, one list for each gathered module."""
    plan = dict(model.fsdp_plan)
    is_tied = model.config.get_text_config().tie_word_embeddings
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        owner = name
        while owner and wildcard(owner) not in plan:
            owner = owner.rpartition(".")[0]
        shape = tuple(parameter.shape)
        if owner and is_tied and owner.endswith("embed_tokens"):
            # A tied embedding is gathered twice: for itself, and with the norm for the head.
            groups.setdefault(owner, []).append(shape)
            owner = "norm and head"
        elif owner and plan[wildcard(owner)] == "keep_full_weight":
            owner = "norm and head"
        # Weights that no rule names have the owner "": the whole model gathers them.
        groups.setdefault(owner, []).append(shape)
    return list(groups.values())


def padded_numbers(shape: tuple[int, ...], shards: int) -> int:
    """Count the numbers of a weight whose first axis is padded to a multiple of the shards."""
    return -(-shape[0] // shards) * shards * math.prod(shape[1:]) if shape else shards


def layers_of_stages(layers: int, stages: int) -> list[tuple[int, int]]:
    """Return the first layer of each stage and the layer after its last, as transformers divides layers."""
    sizes: Any = SimpleNamespace(pp_size=stages)
    return [PipelineStage.layer_range_for_rank(sizes, stage, layers) for stage in range(stages)]


def card_bytes(model: Any, tp: int, ep: int, pp: int, element_size: int) -> list[int]:
    """Return the bytes of weights on the first card of each stage, which has the largest share."""
    ends = [end for _, end in layers_of_stages(model.config.get_text_config().num_hidden_layers, pp)]
    ep_plan = model._ep_plan if ep > 1 else {}
    is_tied = model.config.get_text_config().tie_word_embeddings
    sizes = [0] * pp
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
            sizes[stage] += size
    return sizes


def _share(
    name: str, shape: tuple[int, ...], tp_plan: dict, ep_plan: dict, tp: int, ep: int
) -> tuple[int, ...]:
    """Return the shape of the first process's part of a weight."""
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
