"""Which fields of a configuration change what a model computes in evaluation."""

import inspect
from typing import Any, ClassVar, get_origin

from ..configuration.base import LlamoeBaseConfig
from ..configuration.decoder import WindowedConfig
from ..configuration.mixture import LlamoeTextConfig
from ..configuration.vision import LlamoeVisionConfig

NO_EFFECT = frozenset(
    "max_position_embeddings initializer_range use_cache pad_token_id bos_token_id eos_token_id pretraining_tp "
    "attention_dropout projector_dropout no_rope_layer_interval interleave_moe_layer_step output_router_logits "
    "router_aux_loss_coef router_jitter_noise router_z_loss_coef router_dropout expert_capacity_factor "
    "output_expert_load skip_logits boi_token_index eoi_token_index image_token_index tie_word_embeddings "
    "read_from".split()
)
"""Fields that do not change a forward pass, given the other fields, the weights and the token ids."""


def declared_fields(config_class: type) -> list[str]:
    """Names of the fields that a configuration class declares, and of its parts."""
    own = [part for part in reversed(config_class.__mro__) if LlamoeBaseConfig in part.__mro__[1:]]
    kinds = {name: kind for part in own for name, kind in inspect.get_annotations(part).items()}
    names = [name for name, kind in kinds.items() if ClassVar not in (kind, get_origin(kind))]
    return names + [name for name in getattr(config_class, "sub_configs", {}) if name not in names]


def fields_without_effect(config: Any) -> set[str]:
    """Fields that no layer of a decoder or tower uses."""
    if isinstance(config, LlamoeVisionConfig):
        adapter = {
            "vision_output_dim", "projector_input_dim", "projector_output_dim", "pixel_shuffle_ratio",
            "projector_final_act",
        }  # fmt: skip
        return set() if config.use_adapter else adapter
    if isinstance(config, WindowedConfig):
        has_window = "sliding_attention" in config.attention_types()
        return set() if has_window else {"sliding_window", "layer_types"}
    if not isinstance(config, LlamoeTextConfig):
        return set()
    plans = [config.layer_plan(idx) for idx in range(config.num_hidden_layers)]
    fields = set()
    if not any(plan.is_moe for plan in plans):
        fields |= {
            "intermediate_size", "num_local_experts", "num_experts_per_tok", "router_score_function",
            "router_pre_softmax", "norm_topk_prob", "apply_router_weight_on_input", "use_shared_expert",
            "router_balancing",
        }  # fmt: skip
    if all(plan.is_moe for plan in plans):
        fields.add("intermediate_size_mlp")
    if "chunked_attention" not in (config.layer_types or ()):
        fields.add("attention_chunk_size")
    if not any(plan.use_rope for plan in plans):
        fields |= {"use_qk_norm", "rope_parameters", "rope_interleave"}
    if all(plan.use_rope for plan in plans):
        fields |= {"attn_temperature_tuning"}
    if not any(plan.use_temperature_tuning for plan in plans):
        fields |= {"floor_scale", "attn_scale"}
    return fields
