"""Compute the memory of a LoRA training step beyond the weights, on one machine.

Counted is a step of `llamoe.lora_config` under a Trainer: adapters, their gradients and AdamW's averages in float32,
frozen weights as they are stored, activations in 16 bits. What autograd keeps of a layer follows from the formulas of
the layers: inputs of adapted matrices (in float32, as the factors are), of norms and of activations, and what attention
keeps, which is float32 on a processor without bfloat16 products. Tests count the same in real models.

Shapes: H hidden, I inner size, K experts of a token, E experts, r rank, A and G channels of queries and of keys.
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

# Bytes of a number of adapters and norms, and of an activation.
_FLOAT, _HALF = 4, 2
# Four float32 tensors of a logit's size are held at once.
_LOSS_BYTES = 4 * _FLOAT
DEFAULT_TOKENS = 1024
"""Tokens of a row in training, where none are named."""


@dataclass(frozen=True)
class TrainingPlan:
    """A training step of adapters, in bytes.

    Attributes:
        rank: of the adapters.
        experts: whether routed experts have adapters.
        tokens, batch: of a row, and rows of a step.
        trained: numbers that are trained.
        adapters, gradients: of these numbers, in float32.
        optimizer: AdamW's averages, in float32; bitsandbytes' `AdamW8bit` takes a quarter.
        activations: kept for the backward pass with gradient checkpointing: each layer's input, and one layer's own.
        activations_without_checkpointing: all layers' own.
        loss: with `skip_logits`.
        unpacked: one matrix of packed weights in 16 bits, while it is multiplied.
        expert_bytes: bytes of routed experts that are read from the drive or from RAM in a step.
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
        """Bytes beside weights and the memory for experts: with checkpointing, AdamW in float32, and without logits."""
        held = self.adapters + self.gradients + self.optimizer + self.unpacked
        # The maximum, since the loss is freed before checkpointing recomputes a layer's activations.
        return held + max(self.activations, self.loss)


def training_sizes(
    model: Any, sizes: Sizes, rank: int, experts: bool, tokens: int, batch: int, on_cpu: bool
) -> TrainingPlan:
    """Compute the bytes that a training step holds.

    Args:
        model: without weights; it is not changed.
        sizes: of the model's parts.
        rank: of the adapters.
        experts: whether routed experts have adapters.
        tokens, batch: of a row, and rows.
        on_cpu: whether this machine's processor computes.

    Raises:
        ValueError: a rank below 1, or a model without a head.
    """
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no language model head: adapters are planned for models with one."
        )
    from peft import inject_adapter_in_model

    adapted = empty_model(model.config)
    inject_adapter_in_model(lora_config(adapted, experts=experts, r=rank), adapted, low_cpu_mem_usage=True)
    trained = sum(tensor.numel() for name, tensor in adapted.named_parameters() if "lora_" in name)
    config, count = model.config.get_text_config(), tokens * batch
    layers = [
        _kept_by_layer(config, index, (batch, tokens), rank, experts, on_cpu)
        for index in range(config.num_hidden_layers)
    ]
    border = count * config.hidden_size * _HALF
    # The last norm keeps its input in float32, and the head's is kept beside.
    last = count * config.hidden_size * (_FLOAT + _HALF)
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
        # Gradients of a layer are as large as half of what it keeps.
        activations=len(layers) * border + last + max(layers) * 3 // 2,
        activations_without_checkpointing=sum(layers) + last + max(layers) // 2,
        loss=_LOSS_BYTES * min(logits, PIECE_LOGITS) + len(layers) * border + last,
        unpacked=_HALF * _largest_matrix(config) if is_packed else 0,
    )


def _kept_by_layer(
    config: Any, index: int, shape: tuple[int, int], rank: int, experts: bool, on_cpu: bool
) -> int:
    """Return the bytes that autograd keeps of a layer of this index for tokens of this shape, `[B, T]`."""
    batch, tokens = shape
    count = batch * tokens
    plan, hidden = config.layer_plan(index), config.hidden_size
    inner = plan.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    norms = 2 * _FLOAT * hidden
    attends_in_float32 = on_cpu and needs_float32(torch.empty(0, dtype=torch.bfloat16))
    window = config.sliding_window if plan.attention_type == "sliding_attention" else None
    if window is not None and window < tokens:
        # Each block of queries keeps the keys that it sees, repeated for each query head.
        block = window_block(window)
        keys = queries * (1 + (window - 1) / block * (1 - block / tokens))
    attention = _FLOAT * (3 * hidden + queries)
    attention += (_FLOAT if attends_in_float32 else _HALF) * 2 * (queries + keys)
    dense = 2 * _FLOAT * hidden + (3 * _HALF + _FLOAT) * inner
    if not plan.is_moe:
        return round(count * (norms + attention + dense))
    a_row = 3 * _HALF * inner + _HALF * hidden + (_FLOAT * (hidden + inner) if experts else 0)
    shared = dense if getattr(config, "use_shared_expert", False) else 0
    factors = _FLOAT * config.num_local_experts * rank * (2 * inner + hidden) if experts else 0
    return round(count * (norms + attention + shared + config.num_experts_per_tok * a_row)) + factors


def _largest_matrix(config: Any) -> int:
    """Count the numbers of the largest matrix that is unpacked whole: an expert's gate and up, or a projection."""
    inner = max(
        (2 if plan.is_moe else 1) * plan.intermediate_size
        for plan in map(config.layer_plan, range(config.num_hidden_layers))
    )
    return config.hidden_size * max(inner, config.num_attention_heads * config.head_dim)
