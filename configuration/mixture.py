"""Configurations of decoders with mixtures of experts: Llama 4's and Mixtral's.

Both have a `MixtureConfig`'s fields, which say how a router chooses and weighs. Field names and defaults are those of
transformers' `Llama4TextConfig` and `MixtralConfig`, so a stock `config.json` is valid input; fields of ours default to
stock's behaviour.

Sources: Meta's reference implementation of Llama 4, Mixtral of Experts (Jiang et al., 2024, arXiv:2401.04088), Switch
Transformer (Fedus et al., 2021, arXiv:2101.03961) for the load-balancing loss and the capacity factor, ST-MoE (Zoph et
al., 2022, arXiv:2202.08906) for the z-loss, Wang et al. (2024, arXiv:2408.15664) for the bias that balances.
"""

import math
from typing import ClassVar

from .checks import (
    check_layer_lists,
    check_layer_types,
    check_local_size,
    check_not_negative,
    check_positive,
    check_probability,
    fail,
)
from .decoder import DecoderConfig, LayerPlan, WindowedConfig
from .parallel import MIXTRAL_EP, MIXTRAL_TP, TEXT_EP, TEXT_TP


class MixtureConfig(DecoderConfig):
    """A decoder of which some or all layers are mixtures of experts; the subclasses set the defaults.

    Fields of transformers' `Llama4TextConfig` and `MixtralConfig`:
        num_local_experts: Experts in a mixture (also readable as `num_experts`). Where no layer is a mixture,
            both may be 0, as Llama Guard 4 has them.
        num_experts_per_tok: Experts that a token is sent to, besides a shared one.
        output_router_logits: Whether the outputs hold router logits, and the loss the load-balancing term.
        router_aux_loss_coef: Weight of the load-balancing loss.
        router_jitter_noise: Half-width of the uniform noise that in training multiplies the router's input, and where
            `router_jitter_reaches_experts` the experts' too.

    Fields of ours, the routing rule, by the names that transformers, Megatron-core and vLLM have for them:
        router_score_function: "sigmoid" or "softmax": what makes a score of a logit, in float32.
        router_pre_softmax: Whether the softmax is taken over all experts, before the best are chosen by it, or over the
            chosen ones.
        norm_topk_prob: Whether the scores of the chosen experts are divided by their sum.
        apply_router_weight_on_input: Whether a score multiplies an expert's input, or its output.
        use_shared_expert: Whether one more expert of the same size sees every token.

    Fields of ours for training:
        router_z_loss_coef: Weight of the mean squared log-sum-exp of the router logits; 0 is off.
        router_dropout: Probability of dropping a router logit in training.
        expert_capacity_factor: In training an expert takes at most this times its fair share of the tokens; None: no
            limit.
        router_balancing: "bias" adds a bias to the router's logits where experts are chosen, and only there; training
            moves it until the experts share the tokens (`llamoe.watch_routers`). None: no bias.
        output_expert_load: Whether the outputs count the tokens that chose each expert.
        skip_logits: As in `LlamoeDenseConfig`.
    """

    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    router_name: ClassVar[str]
    experts_are_output_first: ClassVar[bool]
    router_jitter_reaches_experts: ClassVar[bool]
    pools_router_losses: ClassVar[bool]

    num_experts_per_tok: int = 1
    num_local_experts: int = 16
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0

    router_score_function: str = "softmax"
    router_pre_softmax: bool = False
    norm_topk_prob: bool = False
    apply_router_weight_on_input: bool = False
    use_shared_expert: bool = False
    router_z_loss_coef: float = 0.0
    router_dropout: float = 0.0
    expert_capacity_factor: float | None = None
    router_balancing: str | None = None
    output_expert_load: bool = False
    skip_logits: bool | str = False

    def validate_architecture(self) -> None:
        """Check sizes, heads and the mixture."""
        super().validate_architecture()
        check_experts = check_positive if self.moe_layers else check_not_negative
        check_experts(self, "num_local_experts", "num_experts_per_tok")
        if self.moe_layers and self.num_experts_per_tok > self.num_local_experts:
            problem = f"more than num_local_experts = {self.num_local_experts}"
            valid = f"1 to {self.num_local_experts}"
            fail(self, "num_experts_per_tok", self.num_experts_per_tok, problem, valid)
        check_probability(self, "router_dropout", "router_jitter_noise")
        check_not_negative(self, "router_aux_loss_coef", "router_z_loss_coef")
        if self.router_score_function not in ("sigmoid", "softmax"):
            problem = "no such function of a router's logits"
            fail(self, "router_score_function", self.router_score_function, problem, '"sigmoid" or "softmax"')
        if self.router_pre_softmax and self.router_score_function != "softmax":
            problem = f"there is no softmax where router_score_function is {self.router_score_function!r}"
            fail(self, "router_pre_softmax", True, problem, 'False, or router_score_function="softmax"')
        if self.router_balancing not in (None, "bias"):
            problem = "no such way to balance without a loss"
            fail(self, "router_balancing", self.router_balancing, problem, '"bias" or None')
        factor = self.expert_capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            valid = "a number above 0, or None for no limit"
            fail(self, "expert_capacity_factor", factor, "must be positive and finite", valid)


class LlamoeTextConfig(MixtureConfig):
    """The decoder of Llama 4: dense and mixture layers, rotary and position-free layers, chunked attention.

    Fields of transformers' `Llama4TextConfig`, same names and defaults; those not named here are as in
    `LlamoeDenseConfig` and `MixtureConfig`:
        intermediate_size: Inner width of each expert and of the shared expert.
        intermediate_size_mlp: Inner width of a dense layer's feed-forward.
        head_dim: Width of a head, 128 whatever the hidden size; None means `hidden_size /
            num_attention_heads`.
        moe_layers: Indices of the mixture layers; None means every `interleave_moe_layer_step`-th, [] means
            none.
        interleave_moe_layer_step: Distance between mixture layers; 0 means none, where `moe_layers` names none.
        use_qk_norm: Whether the rotary layers normalise queries and keys.
        no_rope_layers: For each layer 1 if it rotates, 0 if not (the opposite of the name, as in stock). None or
            empty: one layer without rotation every `no_rope_layer_interval`.
        no_rope_layer_interval: Distance between position-free layers; None or 0 means that every layer rotates.
        attention_chunk_size: Tokens in an attention chunk; None (or 0) switches chunks off, even if `layer_types`
            asks for them.
        layer_types: "full_attention" or "chunked_attention" for each layer; None means chunked in layers that rotate.
            Of this and the other lists what they say of layers past the last is left out.
        attn_temperature_tuning: Whether position-free layers scale queries with their position. The first release
            wrote an integer here, which counts as a truth value.
        floor_scale, attn_scale: Tokens until that scaling begins, and its strength.

    Fields of ours, besides those of `MixtureConfig`:
        rope_interleave: As in `LlamoeDenseConfig`; Llama 4 keeps Meta's order.
        mlp_bias: Whether dense feed-forwards and shared experts have biases; routed experts never do.
    """

    model_type = "llamoe_text"
    stock_model_type: ClassVar[str] = "llama4_text"
    base_config_key: ClassVar[str] = "text_config"
    feed_forward_name: ClassVar[str] = "feed_forward"
    base_model_tp_plan = TEXT_TP
    base_model_ep_plan = TEXT_EP
    router_name = "router"
    experts_are_output_first = False
    router_jitter_reaches_experts = False
    pools_router_losses = False
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
    router_score_function: str = "sigmoid"
    router_pre_softmax: bool = False
    norm_topk_prob: bool = False
    apply_router_weight_on_input: bool = True
    use_shared_expert: bool = True

    def __post_init__(self, **kwargs):
        """Fill the fields that follow from others, those of each layer included."""
        check_positive(self, "num_hidden_layers")
        check_not_negative(
            self, "interleave_moe_layer_step", "no_rope_layer_interval", "attention_chunk_size"
        )
        count, step = self.num_hidden_layers, self.interleave_moe_layer_step
        if not self.no_rope_layers:
            interval = self.no_rope_layer_interval
            self.no_rope_layers = [int(not interval or (idx + 1) % interval != 0) for idx in range(count)]
        if self.moe_layers is None:
            self.moe_layers = list(range(step - 1, count, step)) if step else []
        if self.layer_types is None:
            self.layer_types = [
                "chunked_attention" if rope else "full_attention" for rope in self.no_rope_layers
            ]
        self.attention_chunk_size = self.attention_chunk_size or None
        if self.attention_chunk_size is None:
            self.layer_types = [
                "full_attention" if kind == "chunked_attention" else kind for kind in self.layer_types
            ]
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
        check_not_negative(self, "attn_scale")

    def validate_layer_type(self) -> None:
        """Check the lists that say something of layers."""
        super().validate_layer_type()
        self.moe_layers = [idx for idx in self.moe_layers or () if idx < self.num_hidden_layers]
        check_layer_lists(self)
        check_layer_types(self, "chunked_attention")
        check_local_size(self, "chunked_attention", "attention_chunk_size")

    def _rotary_multiple(self) -> int:
        return 2 if any(self.no_rope_layers) else 0


class LlamoeMixtralConfig(MixtureConfig, WindowedConfig):
    """The decoder of Mixtral: every layer a mixture, softmax over the experts, the chosen scores normalised.

    Fields of transformers' `MixtralConfig`, same names and defaults; those not named here are as in
    `LlamoeDenseConfig` and `MixtureConfig`:
        intermediate_size: Inner width of each expert, and of a shared one.
        sliding_window: The tokens that a token sees, itself and those before it; None: all.

    Fields of ours, besides those of `MixtureConfig`:
        layer_types: As in `LlamoeDenseConfig`.
        rope_interleave: As in `LlamoeDenseConfig`.
    """

    model_type = "llamoe_mixtral"
    stock_model_type: ClassVar[str] = "mixtral"
    feed_forward_name: ClassVar[str] = "mlp"
    base_model_tp_plan = MIXTRAL_TP
    base_model_ep_plan = MIXTRAL_EP
    default_theta = 1000000.0
    router_name = "gate"
    experts_are_output_first = True
    router_jitter_reaches_experts = True
    pools_router_losses = True
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    attention_dropout: float = 0.0
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    rope_parameters: dict | None = None

    layer_types: list[str] | None = None
    rope_interleave: bool = False
    router_score_function: str = "softmax"
    router_pre_softmax: bool = True
    norm_topk_prob: bool = True

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the mixture layers: all."""
        return list(range(self.num_hidden_layers))
