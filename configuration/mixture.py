"""Configurations of decoders with mixtures of experts: Llama 4's and Mixtral's.

Both have the fields of `MixtureConfig`, which describe how the router chooses and weighs experts. Names and defaults of
the fields are those of transformers' `Llama4TextConfig` and `MixtralConfig`, so their `config.json` is valid input.
Fields that only llamoe has default to what transformers computes.

Sources: Meta's reference implementation of Llama 4, Mixtral of Experts (Jiang et al., 2024, arXiv:2401.04088), Switch
Transformer (Fedus et al., 2021, arXiv:2101.03961) for the load-balancing loss and the capacity factor, ST-MoE (Zoph et
al., 2022, arXiv:2202.08906) for the z-loss, Wang et al. (2024, arXiv:2408.15664) for the balancing bias.
"""

from dataclasses import replace
from typing import ClassVar

from .checks import fail
from .decoder import DecoderConfig, LayerPlan, WindowedConfig
from .fields import field
from .parallel import MIXTRAL_EP, MIXTRAL_SHARED_TP, MIXTRAL_TP, TEXT_EP, TEXT_TP


class MixtureConfig(DecoderConfig):
    """A decoder of which some or all layers are mixtures of experts; the subclasses set the defaults.

    Fields of transformers' `Llama4TextConfig` and `MixtralConfig`:
        num_local_experts: Number of routed experts in a mixture (also readable as `num_experts`). It may be 0 if no
            layer is a mixture, as in Llama Guard 4.
        num_experts_per_tok: Number of routed experts that compute a token.
        output_router_logits: Whether outputs contain the router logits, and the loss the load-balancing loss.
        router_aux_loss_coef: Weight of the load-balancing loss.
        router_jitter_noise: In training the router's input is multiplied by uniform noise from 1 minus this number to 1
            plus this number. In Mixtral the experts' input is multiplied by the same noise.

    Fields that only llamoe has, for the routing rule, with names from transformers, Megatron-core and vLLM:
        router_score_function: "sigmoid" or "softmax", the function that maps logits to scores, in float32.
        router_pre_softmax: Whether the softmax is over the logits of all experts, before the best are chosen, or over
            the logits of the chosen experts.
        norm_topk_prob: Whether the scores of the chosen experts are divided by their sum.
        apply_router_weight_on_input: Whether a score multiplies the expert's input or its output.
        use_shared_expert: Whether a shared expert, of the size of a routed one, computes every token.

    Fields that only llamoe has, for training:
        router_z_loss_coef: Weight of the mean squared log-sum-exp of the router logits; 0 is off.
        router_dropout: Probability of dropping a router logit.
        expert_capacity_factor: An expert computes at most this many times its equal share of the tokens; None means no
            limit.
        router_balancing: "bias" adds a bias to the router logits when experts are chosen, but not to their scores.
            `llamoe.watch_routers` changes the bias in training until all experts get equally many tokens.
        output_expert_load: Whether outputs contain the number of tokens that chose each expert.
    """

    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    router_name: ClassVar[str]
    experts_are_output_first: ClassVar[bool]
    router_jitter_reaches_experts: ClassVar[bool]
    pools_router_losses: ClassVar[bool]

    num_experts_per_tok: int = field(1, "structure", part="experts", least=0)
    num_local_experts: int = field(16, "structure", part="experts", least=0)
    output_router_logits: bool = field(False, "training")
    router_aux_loss_coef: float = field(0.001, "training", least=0)
    router_jitter_noise: float = field(0.0, "training", least=0, below=1)

    router_score_function: str = field("softmax", "structure", part="router", choices=("sigmoid", "softmax"))
    router_pre_softmax: bool = field(False, "structure", part="router")
    norm_topk_prob: bool = field(False, "structure", part="router")
    apply_router_weight_on_input: bool = field(False, "structure", part="router")
    use_shared_expert: bool = field(False, "structure", part="router")
    router_z_loss_coef: float = field(0.0, "training", least=0)
    router_dropout: float = field(0.0, "training", least=0, below=1)
    expert_capacity_factor: float | None = field(None, "training", least=1e-6)
    router_balancing: str | None = field(None, "structure", part="router", choices=("bias", None))
    output_expert_load: bool = field(False, "training")

    def validate_architecture(self) -> None:
        """Check heads and the mixture."""
        super().validate_architecture()
        chosen, experts = self.num_experts_per_tok, self.num_local_experts
        if self.moe_layers and not 1 <= chosen <= experts:
            problem = f"there are num_local_experts = {experts}"
            fail(self, "num_experts_per_tok", chosen, problem, f"1 to {experts}")
        if self.router_pre_softmax and self.router_score_function != "softmax":
            problem = f"router_score_function = {self.router_score_function!r} has no softmax"
            fail(self, "router_pre_softmax", True, problem, 'False, or router_score_function="softmax"')


class LlamoeTextConfig(MixtureConfig):
    """The decoder of Llama 4: dense and mixture layers, layers with and without rotation, chunked attention.

    Fields of transformers' `Llama4TextConfig`, same names and defaults; for other fields see `LlamoeDenseConfig` and
    `MixtureConfig`:
        intermediate_size: Inner width of each expert and of the shared expert.
        intermediate_size_mlp: Inner width of a dense layer's feed-forward.
        head_dim: Width of a head, by default 128 for any hidden size; None means `hidden_size / num_attention_heads`.
        moe_layers: Indices of the mixture layers. None means one in every `interleave_moe_layer_step`; [] means none.
        interleave_moe_layer_step: Distance between mixture layers; 0 means that there are none.
        use_qk_norm: Whether layers with rotation normalise queries and keys.
        no_rope_layers: For each layer, 1 if it has rotary embeddings and 0 if not (the opposite of the name, as in
            transformers). None or [] means one layer without rotation in every `no_rope_layer_interval`.
        no_rope_layer_interval: Distance between layers without rotation; None or 0 means that there are none.
        attention_chunk_size: Number of tokens in an attention chunk. With None or 0 all layers have full attention,
            whatever `layer_types` says.
        layer_types: "full_attention" or "chunked_attention" for each layer. None means chunks in layers with rotation.
            Entries of this and the other lists for layers that do not exist are cut.
        attn_temperature_tuning: Whether layers without rotation scale queries with their position. An integer, which
            files of the first release have, means True unless it is 0.
        floor_scale: Number of tokens after which this scaling begins.
        attn_scale: Strength of this scaling.

    Fields that only llamoe has, besides those of `MixtureConfig`:
        rope_interleave: As in `LlamoeDenseConfig`; by default True, the order of channels in Llama 4's files.
        mlp_bias: Whether dense feed-forwards and shared experts have biases; routed experts never have.
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

    local_attention = ("chunked_attention", "attention_chunk_size")

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = field(8192, "structure", part="experts", least=1)
    intermediate_size_mlp: int = field(16384, "structure", part="dense layers", least=1)
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    moe_layers: list[int] | None = field(None, "structure")
    interleave_moe_layer_step: int = field(1, "none", least=0)
    use_qk_norm: bool = field(True, "function", part="rotation")
    no_rope_layers: list[int] | None = field(None, "function")
    no_rope_layer_interval: int | None = field(4, "none", least=0)
    attention_chunk_size: int | None = field(8192, "function", part="chunks", least=0)
    layer_types: list[str] | None = field(None, "function")
    attn_temperature_tuning: bool | int = field(True, "function", part="layers without rotation")
    floor_scale: int = field(8192, "function", part="temperature tuning", least=1)
    attn_scale: float = field(0.1, "function", part="temperature tuning", least=0)
    attention_bias: bool = field(False, "structure")

    rope_interleave: bool = True
    mlp_bias: bool = field(False, "structure")
    router_score_function: str = "sigmoid"
    apply_router_weight_on_input: bool = True
    use_shared_expert: bool = True

    def __post_init__(self, **kwargs):
        """Set the fields that follow from others, such as the lists with an entry for each layer."""
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
        """Return the plan of layer `layer_idx`."""
        plan, use_rope = super().layer_plan(layer_idx), bool(self.no_rope_layers[layer_idx])
        return replace(
            plan,
            intermediate_size=plan.intermediate_size if plan.is_moe else self.intermediate_size_mlp,
            use_rope=use_rope,
            use_qk_norm=self.use_qk_norm and use_rope,
            use_temperature_tuning=bool(self.attn_temperature_tuning) and not use_rope,
        )

    def validate_layer_type(self) -> None:
        """Check the lists with entries for layers."""
        super().validate_layer_type()
        self._check_entries("no_rope_layers")
        count = self.num_hidden_layers
        self.moe_layers = [idx for idx in self.moe_layers or () if idx < count]
        if len(set(self.moe_layers)) < len(self.moe_layers) or min(self.moe_layers, default=0) < 0:
            problem = "a layer is negative or occurs twice"
            fail(self, "moe_layers", self.moe_layers, problem, f"layers from 0 to {count - 1}, each once")

    def _rotary_multiple(self) -> int:
        return 2 if any(self.no_rope_layers) else 0


class LlamoeMixtralConfig(MixtureConfig, WindowedConfig):
    """The decoder of Mixtral: every layer is a mixture, and the softmax scores of the chosen experts are normalised.

    Names and defaults are those of transformers' `MixtralConfig`; for other fields see `LlamoeDenseConfig` and
    `MixtureConfig`:
        intermediate_size: Inner width of each expert, and of the shared expert if there is one.
    """

    model_type = "llamoe_mixtral"
    stock_model_type: ClassVar[str] = "mixtral"
    feed_forward_name: ClassVar[str] = "mlp"
    base_model_ep_plan = MIXTRAL_EP
    default_theta = 1000000.0
    router_name = "gate"
    experts_are_output_first = True
    router_jitter_reaches_experts = True
    pools_router_losses = True
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 2
    num_local_experts: int = 8

    router_pre_softmax: bool = True
    norm_topk_prob: bool = True

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the tensor-parallel plan, with entries for the shared expert if the model has one."""
        return MIXTRAL_TP | (MIXTRAL_SHARED_TP if self.use_shared_expert else {})

    @property
    def moe_layers(self) -> list[int]:
        """Return the indices of the mixture layers, which are all layers."""
        return list(range(self.num_hidden_layers))
