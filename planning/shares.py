"""Compute the bytes of weights that one process holds in tensor, expert and pipeline parallelism."""

import math
from bisect import bisect
from types import SimpleNamespace
from typing import Any

from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.pipeline_parallel import PipelineStage


def layers_of_stages(layers: int, stages: int) -> list[tuple[int, int]]:
    """Return the layers of each pipeline stage as `(first, last + 1)`, divided as transformers divides them."""
    sizes: Any = SimpleNamespace(pp_size=stages)
    return [PipelineStage.layer_range_for_rank(sizes, stage, layers) for stage in range(stages)]


def card_bytes(model: Any, tp: int, ep: int, pp: int, element_size: int) -> list[int]:
    """Return the bytes of weights on the first process of each pipeline stage, which has the largest share.

    Args:
        model: the model without weights.
        tp, ep, pp: sizes of tensor, expert and pipeline parallelism; 1 is off.
        element_size: bytes of a parameter.
    """
    text = model.config.get_text_config()
    ends = [end for _, end in layers_of_stages(text.num_hidden_layers, pp)]
    sizes = [0] * pp
    for name, parameter in model.named_parameters():
        pieces = name.split(".")
        if "layers" in pieces and not name.startswith("vision_model."):
            stages = {bisect(ends, int(pieces[pieces.index("layers") + 1]))}
        elif name.endswith("embed_tokens.weight"):
            stages = {0, pp - 1} if text.tie_word_embeddings else {0}
        else:
            stages = {0} if name.startswith(("vision_model.", "multi_modal_projector")) else {pp - 1}
        for stage in stages:
            sizes[stage] += math.prod(_share(model, name, tuple(parameter.shape), tp, ep)) * element_size
    return sizes


def _share(model: Any, name: str, shape: tuple[int, ...], tp: int, ep: int) -> tuple[int, ...]:
    """Return the shape of the part of a weight that the first process holds."""
    rule = replace_layer_number_by_wildcard(name)
    if ep > 1 and rule in model._ep_plan:
        return -(-shape[0] // ep), *shape[1:]
    style = model.tp_plan.get(rule) or model.tp_plan.get(rule.rpartition(".")[0], "")
    if ep > 1 and ".experts." in name:
        style = ""
    axis = {"embedding_rowwise": 0}.get(style)
    if "colwise" in style:
        axis = max(0, len(shape) - 2)
    elif style in ("rowwise", "packed_rowwise") and len(shape) > 1:
        axis = len(shape) - 1
    if axis is None:
        return shape
    # Gate and up of a packed weight are divided separately.
    pieces = 2 if style.startswith("packed") else 1
    size = pieces * -(-(shape[axis] // pieces) // tp)
    return *shape[:axis], size, *shape[axis + 1 :]
