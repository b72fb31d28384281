"""What each of several processes holds of a model: in tensor, expert and pipeline parallel, and in FSDP2."""

import math
from bisect import bisect
from types import SimpleNamespace
from typing import Any

from transformers.distributed.pipeline_parallel import PipelineStage

from ..configuration.parallel import wildcard


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
