"""The plan of each layer of a decoder, and the configuration of dense decoders.

`LlamoeDenseConfig` describes LLaMA 1 and 2, Mistral and other decoders of their shape; those with experts are next.
Field names and defaults are those of transformers' `LlamaConfig`, so a stock `config.json` is valid input; fields of
ours default to stock's behaviour. The decoder reads a `LayerPlan` for each layer and never asks for the family.

Sources: LLaMA (Touvron et al., 2023, arXiv:2302.13971), Llama 2 (arXiv:2307.09288), Mistral 7B (Jiang et al., 2023,
arXiv:2310.06825).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from .base import KEYS_TO_IGNORE_AT_INFERENCE, LlamoeBaseConfig
from .checks import (
    LAYER_TYPES,
    check_heads,
    check_layer_types,
    check_local_size,
    check_not_negative,
    check_positive,
    check_probability,
    derive_head_dim,
    fail,
)
from .parallel import DECODER_FSDP, DECODER_PP, DENSE_TP


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


class DecoderConfig(LlamoeBaseConfig):
    """Checks that all decoders share; the subclasses declare the fields."""

    keys_to_ignore_at_inference = KEYS_TO_IGNORE_AT_INFERENCE
    base_model_pp_plan = DECODER_PP
    base_model_fsdp_plan = DECODER_FSDP
    moe_layers: ClassVar[Any] = ()

    def attention_types(self) -> list[str]:
        """The kind of attention of each layer, as the fields say now."""
        return self.layer_types or []

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
        if self.skip_logits not in (False, True, "always"):
            problem = "no such choice of passes that compute the loss alone"
            fail(self, "skip_logits", self.skip_logits, problem, '"always", True (in training), or False')

    def validate_layer_type(self) -> None:
        """Leave out what lists say of layers past the last, as stock does; the number may have been made smaller."""
        for name in ("layer_types", "no_rope_layers"):
            if entries := getattr(self, name, None):
                setattr(self, name, entries[: self.num_hidden_layers])

    def _rotary_multiple(self) -> int:
        return 2


class WindowedConfig(DecoderConfig):
    """A decoder with full attention, or with a window in all or some layers."""

    def __post_init__(self, **kwargs):
        """Fill the fields that follow from others."""
        check_positive(self, "num_hidden_layers")
        count = self.num_hidden_layers
        if (
            self.sliding_window is not None
            and (self.layer_types or [])[:count] == ["sliding_attention"] * count
        ):
            # As Mistral has it: then the window alone says what layers do, and more layers have it, too.
            self.layer_types = None
        if self.layer_types is None:
            check_positive(self, "sliding_window")
        super().__post_init__(**kwargs)

    @classmethod
    def _override(cls, data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        """Apply overrides; another window, or none, is that of all layers if no list says otherwise."""
        data = super()._override(data, overrides)
        if "sliding_window" in overrides and len(set(data.get("layer_types") or ())) < 2:
            data["layer_types"] = overrides.get("layer_types")
        return data

    def validate_layer_type(self) -> None:
        """Check the kinds of attention."""
        super().validate_layer_type()
        if self.layer_types is not None:
            check_layer_types(self, "sliding_attention")
            check_local_size(self, "sliding_attention", "sliding_window")

    def attention_types(self) -> list[str]:
        """The kind of attention of each layer, as the fields say now: without a list, a window is every layer's."""
        if self.layer_types is not None:
            return self.layer_types
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [kind] * self.num_hidden_layers

    def layer_plan(self, layer_idx: int) -> LayerPlan:
        """The plan of layer `layer_idx`."""
        self._check_layer_idx(layer_idx)
        return LayerPlan(
            layer_idx=layer_idx,
            attention_type=self.attention_types()[layer_idx],
            use_rope=True,
            use_qk_norm=False,
            use_temperature_tuning=False,
            is_moe=layer_idx in self.moe_layers,
            intermediate_size=self.intermediate_size,
        )


class LlamoeDenseConfig(WindowedConfig):
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
            Entries past the last layer are cut.

    Fields of ours:
        rope_interleave: Whether rotation pairs neighbouring channels (Meta's order) or channel i with i +
            head_dim / 2 (the order of Hugging Face LLaMA files, whose q and k rows are permuted for it).
        skip_logits: Which passes with labels compute the loss alone, by pieces of the tokens, and return no logits:
            those in training (True), those in evaluation too ("always"), or none. A pass's own argument wins.
        read_from: "mistral" or "ministral" if the configuration was read from transformers' one of that model type. It
            is written as that again by `layout="stock"`; None: as what the layers need.
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
    skip_logits: bool | str = False
    read_from: str | None = None

    @classmethod
    def _from_stock(cls, data):
        return data | ({"read_from": data["model_type"]} if data["model_type"] in cls.stock_relatives else {})

    def validate_architecture(self) -> None:
        """Check sizes and heads, and what was read."""
        super().validate_architecture()
        if self.read_from not in (None, *self.stock_relatives):
            fail(self, "read_from", self.read_from, "no such model type", "'mistral', 'ministral' or None")

    def stock_type(self) -> str:
        """llama; with a window mistral, or ministral where only some layers have it; or what was read, if wider."""
        kinds = set(self.attention_types())
        # Stock's Ministral makes a mask of the window even if no layer has one.
        if len(kinds) > 1 or (self.read_from == "ministral" and self.sliding_window is not None):
            return "ministral"
        return "mistral" if "sliding_attention" in kinds or self.read_from == "mistral" else "llama"
