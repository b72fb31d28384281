"""Configurations of the two decoders, and the plan of each layer.

`LlamoeDenseConfig` describes LLaMA 1 and 2, Mistral and other decoders of their shape; `LlamoeTextConfig` describes the
mixture-of-experts decoder of Llama 4. Field names and defaults are those of transformers' `LlamaConfig` and
`Llama4TextConfig`, so a stock `config.json` is valid input; fields of ours default to stock's behaviour. The decoder
reads a `LayerPlan` for each layer and never asks for the family.

Sources: LLaMA (Touvron et al., 2023, arXiv:2302.13971), Llama 2 (arXiv:2307.09288), Mistral 7B (Jiang et al., 2023,
arXiv:2310.06825), Meta's reference implementation of Llama 4, Switch Transformer (Fedus et al., 2021,
arXiv:2101.03961) for the load-balancing loss and the capacity factor, ST-MoE (Zoph et al., 2022, arXiv:2202.08906)
for the z-loss, Wang et al. (2024, arXiv:2408.15664) for the bias that balances.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import KEYS_TO_IGNORE_AT_INFERENCE, LlamoeBaseConfig
from .checks import (
    LAYER_TYPES,
    check_heads,
    check_layer_lists,
    check_layer_types,
    check_local_size,
    check_not_negative,
    check_positive,
    check_probability,
    derive_head_dim,
    fail,
)
from .parallel import DECODER_FSDP, DECODER_PP, DENSE_TP, TEXT_EP, TEXT_TP


@dataclass(frozen=True)
class LayerPlan:
    """The parts of one decoder layer.

    Attributes:
        layer_idx: Position of the layer, from 0.
        attention_type: "full_attention"; "chunked_attention" if a token sees only its own chunk; "sliding_attention" if
            it sees a number of tokens before it.
        use_rope: Whether queries and keys are rotated.
        use_qk_norm: Whether rotated queries and keys are divided by their root mean square.
        use_temperature_tuning: Whether queries are scaled up with their position.
        is_moe: Whether the feed-forward is a mixture of experts.
        intermediate_size: Inner width of the feed-forward; in a mixture, of each expert and of the shared one.
    """

    layer_idx: int
    attention_type: str
    use_rope: bool
    use_qk_norm: bool
    use_temperature_tuning: bool
    is_moe: bool
    intermediate_size: int


class _DecoderConfig(LlamoeBaseConfig):
    """Checks that both decoders share; the subclasses declare the fields."""

    keys_to_ignore_at_inference = KEYS_TO_IGNORE_AT_INFERENCE
    base_model_pp_plan = DECODER_PP
    base_model_fsdp_plan = DECODER_FSDP

    def _check_layer_idx(self, layer_idx: int) -> None:
        if not 0 <= layer_idx < self.num_hidden_layers:
            problem = f"no such layer among num_hidden_layers = {self.num_hidden_layers}"
            fail(self, "layer_plan(layer_idx)", layer_idx, problem, f"0 to {self.num_hidden_layers - 1}")

    def __post_init__(self, **kwargs):
        """Fill the fields that follow from others."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = derive_head_dim(self)
        kinds = [key for key in self.rope_parameters or () if key in LAYER_TYPES]
        if kinds:
            problem = "one rotary embedding serves all layers"
            valid = f"the keys of {kinds[0]!r} at the top level"
            fail(self, "rope_parameters", self.rope_parameters, problem, valid)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check sizes and heads."""
        check_positive(
            self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        )  # fmt: skip
        check_heads(self)
        check_probability(self, "attention_dropout")
        check_not_negative(self, "initializer_range", "rms_norm_eps")

    @classmethod
    def _override(cls, data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        """Apply overrides; fewer layers also shorten a saved configuration's lists."""
        data = super()._override(data, overrides)
        count = overrides.get("num_hidden_layers")
        if isinstance(count, int):
            for name in {"layer_types", "no_rope_layers"} - overrides.keys():
                if data.get(name):
                    data[name] = data[name][:count]
            if "moe_layers" not in overrides and data.get("moe_layers"):
                data["moe_layers"] = [idx for idx in data["moe_layers"] if idx < count]
        return data

    def _rotary_multiple(self) -> int:
        return 2


class LlamoeDenseConfig(_DecoderConfig):
    """LLaMA 1, LLaMA 2, Llama 3, Mistral, Ministral and other decoders of their shape, without experts.

    Fields of transformers' `LlamaConfig`, same names and defaults:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Inner width of the feed-forward.
        num_hidden_layers, num_attention_heads: Layers; query heads of each.
        num_key_value_heads: Key/value heads; None means one per query head, 1 is multi-query attention.
        head_dim: Width of a head; None means `hidden_size / num_attention_heads`. If it is given, `hidden_size` need
            not be a multiple of the heads, although stock requires that.
        hidden_act: Activation of the gate, by transformers' name.
        max_position_embeddings: Longest context in tokens.
        initializer_range: Standard deviation of fresh weights.
        rms_norm_eps: Added to the mean square in every norm.
        use_cache: Whether generation keeps keys and values.
        pad_token_id, bos_token_id, eos_token_id: Special tokens.
        pretraining_tp: Kept for old files; without effect.
        tie_word_embeddings: Whether the output head is the embedding.
        rope_parameters: `rope_type`, `rope_theta` and further parameters of that type. `rope_theta` and
            `rope_scaling` of old files are read into it.
        attention_bias, mlp_bias: Whether those projections have biases.
        attention_dropout: Probability of dropping an attention weight in training.

    Fields of transformers' `MistralConfig` and `MinistralConfig`:
        sliding_window: The tokens that a token sees, itself and those before it; None: all.
        layer_types: "full_attention" or "sliding_attention" for each layer; None means that a window is every layer's.

    Fields of ours:
        rope_interleave: Whether rotation pairs neighbouring channels (Meta's order) or channel i with i +
            head_dim / 2 (the order of Hugging Face LLaMA files, whose q and k rows are permuted for it).
    """

    model_type = "llamoe_dense"
    stock_model_type: ClassVar[str] = "llama"
    stock_relatives: ClassVar[tuple[str, ...]] = ("mistral", "ministral")
    feed_forward_name: ClassVar[str] = "mlp"
    base_model_tp_plan = DENSE_TP

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    sliding_window: int | None = None
    layer_types: list[str] | None = None
    rope_interleave: bool = False

    def __post_init__(self, **kwargs):
        """Fill the fields that follow from others."""
        check_positive(self, "num_hidden_layers", "sliding_window")
        if self.layer_types is None and self.sliding_window is not None:
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    @classmethod
    def _override(cls, data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        """Apply overrides; another window, or none, is that of all layers if no list says otherwise."""
        data = super()._override(data, overrides)
        if "sliding_window" in overrides and len(set(data.get("layer_types") or ())) < 2:
            data["layer_types"] = overrides.get("layer_types")
        return data

    def stock_type(self) -> str:
        """llama; with a window mistral, or ministral where only some layers have it."""
        windows = {kind == "sliding_attention" for kind in self.layer_types or ()}
        return "ministral" if len(windows) > 1 else "mistral" if True in windows else "llama"

    def validate_layer_type(self) -> None:
        """Check the kinds of attention."""
        if self.layer_types is not None:
            check_layer_types(self, "sliding_attention")
            check_local_size(self, "sliding_attention", "sliding_window")

    def layer_plan(self, layer_idx: int) -> LayerPlan:
        """The plan of layer `layer_idx`."""
        self._check_layer_idx(layer_idx)
        return LayerPlan(
            layer_idx=layer_idx,
            attention_type=self.layer_types[layer_idx] if self.layer_types else "full_attention",
            use_rope=True,
            use_qk_norm=False,
            use_temperature_tuning=False,
            is_moe=False,
            intermediate_size=self.intermediate_size,
        )


class LlamoeTextConfig(_DecoderConfig):
    """The decoder of Llama 4: dense and mixture layers, rotary and position-free layers, chunked attention.

    Fields of transformers' `Llama4TextConfig`, same names and defaults; those not named here are as in
    `LlamoeDenseConfig`:
        intermediate_size: Inner width of each expert and of the shared expert.
        intermediate_size_mlp: Inner width of a dense layer's feed-forward.
        head_dim: Width of a head, 128 whatever the hidden size; None means `hidden_size /
            num_attention_heads`.
        num_experts_per_tok: Experts that a token is sent to, besides the shared one.
        num_local_experts: Experts in a mixture (also readable as `num_experts`). Where no layer is a mixture,
            both may be 0, as Llama Guard 4 has them.
        moe_layers: Indices of the mixture layers; None means every `interleave_moe_layer_step`-th, [] means
            none.
        interleave_moe_layer_step: Distance between mixture layers; 0 means none, where `moe_layers` names none.
        use_qk_norm: Whether the rotary layers normalise queries and keys.
        output_router_logits: Whether the outputs hold router logits, and the loss the load-balancing term.
        router_aux_loss_coef: Weight of the load-balancing loss.
        router_jitter_noise: Half-width of the uniform noise that multiplies the router's input in training.
        no_rope_layers: For each layer 1 if it rotates, 0 if not (the opposite of the name, as in stock). None or
            empty: one layer without rotation every `no_rope_layer_interval`. Entries past the last layer are cut.
        no_rope_layer_interval: Distance between position-free layers; None or 0 means that every layer rotates.
        attention_chunk_size: Tokens in an attention chunk; None (or 0) switches chunks off, even if `layer_types`
            asks for them.
        layer_types: "full_attention" or "chunked_attention" for each layer; None means chunked in layers that rotate.
        attn_temperature_tuning: Whether position-free layers scale queries with their position. The first release
            wrote an integer here, which counts as a truth value.
        floor_scale, attn_scale: Tokens until that scaling begins, and its strength.

    Fields of ours:
        rope_interleave: As in `LlamoeDenseConfig`; Llama 4 keeps Meta's order.
        mlp_bias: Whether dense feed-forwards and shared experts have biases; routed experts never do.
        router_z_loss_coef: Weight of the mean squared log-sum-exp of the router logits; 0 is off.
        router_dropout: Probability of dropping a router logit in training.
        expert_capacity_factor: In training an expert takes at most this times its fair share of the tokens; None: no
            limit.
        router_balancing: "bias" adds a bias to the router's logits where experts are chosen, and only there; training
            moves it until the experts share the tokens (`llamoe.watch_routers`). None: no bias.
        output_expert_load: Whether the outputs count the tokens that chose each expert.
    """

    model_type = "llamoe_text"
    stock_model_type: ClassVar[str] = "llama4_text"
    base_config_key: ClassVar[str] = "text_config"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    feed_forward_name: ClassVar[str] = "feed_forward"
    base_model_tp_plan = TEXT_TP
    base_model_ep_plan = TEXT_EP
    default_theta = 500000.0

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    num_experts_per_tok: int = 1
    num_local_experts: int = 16
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: int = 1
    use_qk_norm: bool = True
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0
    rope_parameters: dict | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int | None = 4
    attention_chunk_size: int | None = 8192
    layer_types: list[str] | None = None
    attn_temperature_tuning: bool | int = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    attention_bias: bool = False

    rope_interleave: bool = True
    mlp_bias: bool = False
    router_z_loss_coef: float = 0.0
    router_dropout: float = 0.0
    expert_capacity_factor: float | None = None
    router_balancing: str | None = None
    output_expert_load: bool = False

    def __post_init__(self, **kwargs):
        """Fill the fields that follow from others, those of each layer included."""
        check_positive(self, "num_hidden_layers")
        check_not_negative(
            self, "interleave_moe_layer_step", "no_rope_layer_interval", "attention_chunk_size"
        )
        count, step = self.num_hidden_layers, self.interleave_moe_layer_step
        if self.no_rope_layers:
            self.no_rope_layers = self.no_rope_layers[:count]
        else:
            interval = self.no_rope_layer_interval
            self.no_rope_layers = [int(not interval or (idx + 1) % interval != 0) for idx in range(count)]
        if self.moe_layers is None:
            self.moe_layers = list(range(step - 1, count, step)) if step else []
        if self.layer_types is None:
            self.layer_types = [
                "chunked_attention" if rope else "full_attention" for rope in self.no_rope_layers
            ]
        check_layer_lists(self)
        check_layer_types(self, "chunked_attention")
        self.attention_chunk_size = self.attention_chunk_size or None
        if self.attention_chunk_size is None:
            self.layer_types = ["full_attention"] * count
        super().__post_init__(**kwargs)

    def layer_plan(self, layer_idx: int) -> LayerPlan:
        """The plan of layer `layer_idx`."""
        self._check_layer_idx(layer_idx)
        use_rope = bool(self.no_rope_layers[layer_idx])
        is_moe = layer_idx in self.moe_layers
        return LayerPlan(
            layer_idx=layer_idx,
            attention_type=self.layer_types[layer_idx],
            use_rope=use_rope,
            use_qk_norm=self.use_qk_norm and use_rope,
            use_temperature_tuning=bool(self.attn_temperature_tuning) and not use_rope,
            is_moe=is_moe,
            intermediate_size=self.intermediate_size if is_moe else self.intermediate_size_mlp,
        )

    def validate_architecture(self) -> None:
        """Check sizes, heads and the mixture."""
        super().validate_architecture()
        check_positive(self, "intermediate_size_mlp", "floor_scale")
        check_experts = check_positive if self.moe_layers else check_not_negative
        check_experts(self, "num_local_experts", "num_experts_per_tok")
        if self.moe_layers and self.num_experts_per_tok > self.num_local_experts:
            problem = f"more than num_local_experts = {self.num_local_experts}"
            valid = f"1 to {self.num_local_experts}"
            fail(self, "num_experts_per_tok", self.num_experts_per_tok, problem, valid)
        check_probability(self, "router_dropout", "router_jitter_noise")
        check_not_negative(self, "router_aux_loss_coef", "router_z_loss_coef", "attn_scale")
        if self.router_balancing not in (None, "bias"):
            problem = "no such way to balance without a loss"
            fail(self, "router_balancing", self.router_balancing, problem, '"bias" or None')
        factor = self.expert_capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            valid = "a number above 0, or None for no limit"
            fail(self, "expert_capacity_factor", factor, "must be positive and finite", valid)

    def validate_layer_type(self) -> None:
        """Check the lists with an entry a layer."""
        check_layer_lists(self)
        check_layer_types(self, "chunked_attention")
        check_local_size(self, "chunked_attention", "attention_chunk_size")

    def _rotary_multiple(self) -> int:
        return 2 if any(self.no_rope_layers) else 0
