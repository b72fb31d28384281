"""Count a model's parameters from its configuration's fields.

The count is of the model in a checkpoint: a decoder with its output head, a vision tower with its adapter or CLIP head,
or a multimodal model of both and a projector. Norms of queries and keys and rotary embeddings have no parameters.
"""

from dataclasses import dataclass

from .base import LlamoeBaseConfig
from .decoder import DecoderConfig
from .multimodal import LlamoeConfig
from .vision import LlamoeVisionConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of a model's parameters.

    Attributes:
        total: All parameters; those of a tied output head count once.
        active: Parameters that one token uses: `total` without the experts that were not chosen. In a multimodal model
            they include tower and projector. Llama 4's published "17B active" does not: the decoder alone has 17.2
            billion in Scout and in Maverick.
    """

    total: int
    active: int

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.total + other.total, self.active + other.active)


def count_parameters(config: LlamoeBaseConfig) -> ParameterCount:
    """Count the parameters of a configuration's model: the total, and those active for one token."""
    if isinstance(config, LlamoeConfig):
        text, vision = config.text_config, config.vision_config
        projector = vision.vision_output_dim * text.hidden_size
        return _decoder(text) + _tower(vision) + ParameterCount(projector, projector)
    if isinstance(config, LlamoeVisionConfig):
        return _tower(config)
    return _decoder(config)


def _decoder(config: DecoderConfig) -> ParameterCount:
    hidden, bias = config.hidden_size, config.attention_bias
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = (
        _linear(hidden, queries, bias) + 2 * _linear(hidden, keys, bias) + _linear(queries, hidden, bias)
    )
    shared = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    total = active = shared + config.num_hidden_layers * (attention + 2 * hidden)
    for layer_idx in range(config.num_hidden_layers):
        plan = config.layer_plan(layer_idx)
        inner, always = plan.intermediate_size, 0
        if plan.is_moe:
            expert = 3 * hidden * inner
            always = hidden * config.num_local_experts
            total += expert * config.num_local_experts
            active += expert * config.num_experts_per_tok
        if not plan.is_moe or config.use_shared_expert:
            always += 2 * _linear(hidden, inner, config.mlp_bias) + _linear(inner, hidden, config.mlp_bias)
        total, active = total + always, active + always
    return ParameterCount(total, active)


def _tower(config: LlamoeVisionConfig) -> ParameterCount:
    width, inner = config.hidden_size, config.intermediate_size
    norm = 2 * width
    layer = 4 * _linear(width, width, config.attention_bias) + 2 * norm
    layer += _linear(width, inner, True) + _linear(inner, width, True)
    total = config.num_channels * config.patch_size**2 * width + (config.num_patches + 2) * width
    total += config.num_hidden_layers * layer + norm * (config.use_pre_layernorm + config.use_post_layernorm)
    if config.projection_dim is not None:
        total += width * config.projection_dim
    if config.use_adapter:
        bias = config.multi_modal_projector_bias
        total += _linear(config.adapter_input_dim, config.projector_input_dim, bias)
        total += _linear(config.projector_input_dim, config.projector_output_dim, bias)
    return ParameterCount(total, total)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)
