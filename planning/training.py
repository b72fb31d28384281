"""Compute the memory that a LoRA training step takes beside the weights, on one machine.

The plan is for the adapters of `llamoe.lora_config`, trained by transformers' Trainer: adapters, their gradients and
AdamW's averages are in float32, frozen weights in their stored format, activations in 16 bits. Which tensors autograd
saves follows from a layer's formulas: the inputs of adapted matrices (in float32, like the adapters), of norms and of
activation functions, and the inputs of attention (in float32 on processors without bfloat16 products). Tests compare
the result with real models.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..modeling.adapters import lora_config
from ..modeling.attention import window_block
from ..modeling.kernels import needs_float32
from ..modeling.loss import PIECE_LOGITS
from ..modeling.registration import empty_model
from .units import Sizes

# Bytes of a number in adapters and norms, and in activations.
_FLOAT, _HALF = 4, 2
# The loss holds four float32 tensors of the logits' shape at once.
_LOSS_BYTES = 4 * _FLOAT
DEFAULT_TOKENS = 1024
"""Default number of tokens in a row of a training step."""


@dataclass(frozen=True)
class TrainingPlan:
    """The memory of a training step with adapters, in bytes.

    Attributes:
        rank: rank of the adapters.
        experts: whether routed experts have adapters.
        tokens, batch: tokens of a row, and rows of a step.
        trained: number of trained parameters.
        adapters, gradients: the trained parameters, and their gradients, in float32.
        optimizer: AdamW's two averages in float32; bitsandbytes' `AdamW8bit` takes a quarter.
        activations: tensors saved for the backward pass with gradient checkpointing: the inputs of all layers, and all
            saved tensors of one layer.
        activations_without_checkpointing: all saved tensors of all layers.
        loss: the loss with `skip_logits`, and the activations that are kept while it is computed.
        unpacked: the largest quantized matrix in 16 bits, as which it is multiplied; 0 for plain weights.
        expert_bytes: routed experts that a step reads from disk or RAM.
    """

    rank: int
    experts: bool
    tokens: int
    batch: int
    trained: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    activations_without_checkpointing: int
    loss: int
    unpacked: int
    expert_bytes: int = 0

    @property
    def memory(self) -> int:
        """Return the bytes of a step beside weights and cached experts, with checkpointing and `skip_logits`."""
        whole_step = self.adapters + self.gradients + self.optimizer + self.unpacked
        # The maximum, since the loss is freed before checkpointing recomputes a layer's activations.
        return whole_step + max(self.activations, self.loss)


def training_sizes(
    model: Any, sizes: Sizes, rank: int, experts: bool, tokens: int, batch: int, on_cpu: bool
) -> TrainingPlan:
    """Compute the memory of a training step.

    Args:
        model: the model without weights; it is not changed.
        sizes: bytes of the model's parts.
        rank: rank of the adapters.
        experts: whether routed experts have adapters.
        tokens, batch: tokens of a row, and rows of a step.
        on_cpu: whether the CPU of this machine computes the step.

    Raises:
        ValueError: a rank below 1, or a model without a head.
    """
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no output head: adapters can be planned only for language models."
        )
    from peft import inject_adapter_in_model

    adapted = empty_model(model.config)
    inject_adapter_in_model(lora_config(adapted, experts=experts, r=rank), adapted, low_cpu_mem_usage=True)
    trained = sum(tensor.numel() for name, tensor in adapted.named_parameters() if "lora_" in name)
    config, count = model.config.get_text_config(), tokens * batch
    layers = [
        _saved_in_layer(config, index, (batch, tokens), rank, experts, on_cpu)
        for index in range(config.num_hidden_layers)
    ]
    layer_input = count * config.hidden_size * _HALF
    # The inputs of the last norm, in float32, and of the output head are saved, too.
    head_input = count * config.hidden_size * (_FLOAT + _HALF)
    logits = count * config.vocab_size
    is_packed = sizes.form not in ("float32", "bfloat16", "float16")
    return TrainingPlan(
        rank=rank,
        experts=experts and any(unit.experts for unit in sizes.units),
        tokens=tokens,
        batch=batch,
        trained=trained,
        adapters=_FLOAT * trained,
        gradients=_FLOAT * trained,
        optimizer=2 * _FLOAT * trained,
        # While a layer runs backward, its gradients take half as much as its saved tensors.
        activations=len(layers) * layer_input + head_input + max(layers) * 3 // 2,
        activations_without_checkpointing=sum(layers) + head_input + max(layers) // 2,
        loss=_LOSS_BYTES * min(logits, PIECE_LOGITS) + len(layers) * layer_input + head_input,
        unpacked=_HALF * _largest_matrix(config) if is_packed else 0,
    )


def _saved_in_layer(
    config: Any, index: int, shape: tuple[int, int], rank: int, experts: bool, on_cpu: bool
) -> int:
    """Return the bytes that autograd saves in layer `index` for token ids of `shape`, `[B, T]`."""
    batch, tokens = shape
    count = batch * tokens
    plan, hidden = config.layer_plan(index), config.hidden_size
    inner = plan.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    norms = 2 * _FLOAT * hidden
    attends_in_float32 = on_cpu and needs_float32(torch.empty(0, dtype=torch.bfloat16))
    window = config.sliding_window if plan.attention_type == "sliding_attention" else None
    if window is not None and window < tokens:
        # Each block of queries saves the keys in its window, repeated for each query head.
        block = window_block(window)
        keys = queries * (1 + (window - 1) / block * (1 - block / tokens))
    attention = _FLOAT * (3 * hidden + queries)
    attention += (_FLOAT if attends_in_float32 else _HALF) * 2 * (queries + keys)
    dense = 2 * _FLOAT * hidden + (3 * _HALF + _FLOAT) * inner
    if not plan.is_moe:
        return round(count * (norms + attention + dense))
    routed = 3 * _HALF * inner + _HALF * hidden + (_FLOAT * (hidden + inner) if experts else 0)
    shared = dense if getattr(config, "use_shared_expert", False) else 0
    factors = _FLOAT * config.num_local_experts * rank * (2 * inner + hidden) if experts else 0
    return round(count * (norms + attention + shared + config.num_experts_per_tok * routed)) + factors


def _largest_matrix(config: Any) -> int:
    """Return the number of elements in the largest matrix that is unpacked at once.

    It is an expert's gate and up, one matrix of a dense feed-forward, or a projection of attention.
    """
    inner = max(
        (2 if plan.is_moe else 1) * plan.intermediate_size
        for plan in map(config.layer_plan, range(config.num_hidden_layers))
    )
    return config.hidden_size * max(inner, config.num_attention_heads * config.head_dim)
