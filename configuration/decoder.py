"""The configuration of dense decoders, and the plan of each layer of any decoder.

`LlamoeDenseConfig` describes LLaMA 1 and 2, Mistral and other decoders of their shape; `mixture.py` has those with
experts. Names and defaults of the fields are those of transformers' `LlamaConfig`, so its `config.json` is valid input.
Fields that only llamoe has default to what transformers computes. Models read the `LayerPlan` of each layer.

Sources: LLaMA (Touvron et al., 2023, arXiv:2302.13971), Llama 2 (arXiv:2307.09288), Mistral 7B (Jiang et al., 2023,
arXiv:2310.06825).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from .base import LlamoeBaseConfig
from .checks import enumerate_words, fail
from .fields import field
from .parallel import DECODER_FSDP, DECODER_PP, DENSE_TP


@dataclass(frozen=True)
class LayerPlan:
    """The parts of one decoder layer.

    Attributes:
        layer_idx: Index of the layer, from 0.
        attention_type: "full_attention"; "chunked_attention" if a token sees only tokens of its chunk; or
            "sliding_attention" if it sees only a number of tokens before it.
        is_moe: Whether the feed-forward is a mixture of experts.
        intermediate_size: Inner width of the feed-forward; in a mixture, of each expert and of the shared expert.
        use_rope: Whether queries and keys get rotary embeddings.
        use_qk_norm: Whether queries and keys are divided by their root mean square after rotation.
        use_temperature_tuning: Whether queries are scaled up with their position.
    """

    layer_idx: int
    attention_type: str
    is_moe: bool
    intermediate_size: int
    use_rope: bool = True
    use_qk_norm: bool = False
    use_temperature_tuning: bool = False


class DecoderConfig(LlamoeBaseConfig):
    """The fields and checks of all decoders; `LlamoeDenseConfig` describes the fields."""

    base_model_pp_plan = DECODER_PP
    base_model_fsdp_plan = DECODER_FSDP
    moe_layers: ClassVar[Any] = ()
    # Kind of local attention, and name of the field with its window or chunk size.
    local_attention: ClassVar[tuple[str, str]]

    vocab_size: int = field(32000, "structure", least=1)
    hidden_size: int = field(4096, "structure", least=1)
    intermediate_size: int = field(11008, "structure", least=1)
    num_hidden_layers: int = field(32, "structure", least=1, most=4096)
    num_attention_heads: int = field(32, "structure", least=1)
    num_key_value_heads: int | None = field(None, "structure", least=1)
    head_dim: int | None = field(None, "structure", least=1)
    hidden_act: str = field("silu", "function")
    max_position_embeddings: int = field(2048, "none", least=1)
    initializer_range: float = field(0.02, "none", least=0)
    rms_norm_eps: float = field(1e-6, "function", least=0)
    use_cache: bool = field(True, "none")
    pad_token_id: int | None = field(None, "none")
    bos_token_id: int | None = field(1, "none")
    eos_token_id: int | list[int] | None = field(2, "none")
    tie_word_embeddings: bool = field(False, "none")
    rope_parameters: dict | None = field(None, "function", part="rotation")
    rope_interleave: bool = field(False, "structure", part="rotation")
    attention_dropout: float | None = field(0.0, "training", least=0, below=1)
    skip_logits: bool | str = field(False, "training", choices=(False, True, "always"))

    def attention_types(self) -> list[str]:
        """Return the attention type of each layer; see `LayerPlan`."""
        return self.layer_types or []

    def parts(self) -> set[str]:
        """Return which values of `Meaning.part`, such as "router", apply to some layer."""
        plans = [self.layer_plan(layer_idx) for layer_idx in range(self.num_hidden_layers)]
        has = {
            "dense layers": not all(plan.is_moe for plan in plans),
            "experts": any(plan.is_moe for plan in plans),
            "router": any(plan.is_moe for plan in plans),
            "window": any(plan.attention_type == "sliding_attention" for plan in plans),
            "chunks": any(plan.attention_type == "chunked_attention" for plan in plans),
            "rotation": any(plan.use_rope for plan in plans),
            "layers without rotation": not all(plan.use_rope for plan in plans),
            "temperature tuning": any(plan.use_temperature_tuning for plan in plans),
        }
        return {name for name, has_part in has.items() if has_part}

    def layer_plan(self, layer_idx: int) -> LayerPlan:
        """Return the plan of layer `layer_idx`."""
        is_moe = layer_idx in self.moe_layers
        return LayerPlan(layer_idx, self.attention_types()[layer_idx], is_moe, self.intermediate_size)

    def __post_init__(self, **kwargs):
        """Set the fields that follow from others."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if self.head_dim is None:
            if hidden % heads:
                problem = f"must be a multiple of num_attention_heads = {heads} if head_dim is not given"
                valid = f"a multiple of {heads}, or any size with head_dim"
                fail(self, "hidden_size", hidden, problem, valid)
            self.head_dim = hidden // heads
        if any(key.endswith("_attention") for key in self.rope_parameters or ()):
            problem = "layer types cannot have rotary embeddings of their own"
            fail(self, "rope_parameters", self.rope_parameters, problem, "the same entries for all layers")
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check the fields against each other."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            problem = f"must divide num_attention_heads = {heads}"
            valid = enumerate_words(n for n in range(1, heads + 1) if heads % n == 0)
            fail(self, "num_key_value_heads", kv_heads, problem, valid)

    def validate_layer_type(self) -> None:
        """Check the attention types; cut lists that are longer than `num_hidden_layers`, as transformers does."""
        for name in ("layer_types", "no_rope_layers"):
            if entries := getattr(self, name, None):
                setattr(self, name, entries[: self.num_hidden_layers])
        local, size = self.local_attention
        if local in self.attention_types() and (getattr(self, size) or 0) < 1:
            valid = "a number of tokens, or only full_attention in layer_types"
            fail(self, size, getattr(self, size), f"must be positive if a layer has {local}", valid)
        if self.layer_types is None:
            return
        self._check_entries("layer_types")
        for idx, kind in enumerate(self.layer_types):
            if kind not in ("full_attention", local):
                valid = f"'full_attention' or {local!r}"
                fail(self, f"layer_types[{idx}]", kind, "unknown attention type", valid)

    def _check_entries(self, name: str) -> None:
        """Check that a list has an entry for each layer."""
        value, count = getattr(self, name), self.num_hidden_layers
        if len(value) != count:
            problem = f"has {len(value)} entries for num_hidden_layers = {count}"
            fail(self, name, value, problem, f"a list of {count}, or None to derive it")

    def _rotary_multiple(self) -> int:
        return 2


class WindowedConfig(DecoderConfig):
    """A decoder whose layers have full attention, or a sliding window."""

    local_attention = ("sliding_attention", "sliding_window")

    sliding_window: int | None = field(None, "function", part="window", stock="model type")
    layer_types: list[str] | None = field(None, "function", part="window", stock="model type")

    @classmethod
    def _override(cls, data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with overrides applied; a new window is for all layers unless their types differ."""
        data = super()._override(data, overrides)
        if "sliding_window" in overrides and len(set(data.get("layer_types") or ())) < 2:
            data["layer_types"] = overrides.get("layer_types")
        return data

    def attention_types(self) -> list[str]:
        """Return the attention type of each layer; without `layer_types` a window applies to every layer."""
        if self.layer_types is not None:
            return self.layer_types
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [kind] * self.num_hidden_layers


class LlamoeDenseConfig(WindowedConfig):
    """LLaMA 1, LLaMA 2, Llama 3, Mistral, Ministral and other decoders of their shape, without experts.

    Fields of transformers' `LlamaConfig`, same names and defaults:
        vocab_size: Number of rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Inner width of the feed-forward.
        num_hidden_layers, num_attention_heads: Number of layers, and of query heads in a layer.
        num_key_value_heads: Number of key/value heads. None means one for each query head; 1 is multi-query attention.
        head_dim: Width of a head; None means `hidden_size / num_attention_heads`.
        hidden_act: Activation function of the gate, by transformers' name.
        max_position_embeddings: Longest context in tokens.
        initializer_range: Standard deviation of new weights.
        rms_norm_eps: Number that every norm adds to the mean square.
        use_cache: Whether generation caches keys and values.
        pad_token_id, bos_token_id, eos_token_id: Ids of special tokens.
        pretraining_tp: A field of old files, without effect.
        tie_word_embeddings: Whether the output head shares the embedding's weights.
        rope_parameters: `rope_type`, `rope_theta` and further parameters of that type. Entries `rope_theta` and
            `rope_scaling` of old files are moved into it.
        attention_bias, mlp_bias: Whether the projections of attention, or of feed-forwards, have biases.
        attention_dropout: Probability of dropping an attention weight in training.

    Fields of transformers' `MistralConfig` and `MinistralConfig`:
        sliding_window: Number of tokens that a token sees: itself and those before it. None means all.
        layer_types: "full_attention" or "sliding_attention" for each layer. None means that every layer has the window,
            if there is one. Entries after the last layer are cut.

    Fields that only llamoe has:
        rope_interleave: Whether rotation pairs channels 2i and 2i + 1 (Meta's order), or channels i and i +
            head_dim / 2 (Hugging Face's order for LLaMA, in whose files the rows of q and k are permuted).
        skip_logits: Whether a forward pass with labels returns only the loss and no logits, which saves memory: True in
            training, "always" also in evaluation, False never. An argument of `forward` overrides it.
        read_from: "mistral" or "ministral" if a transformers configuration of that model type was read. Then
            `layout="stock"` writes the same model type; with None it chooses by the layers.
    """

    model_type = "llamoe_dense"
    stock_model_type: ClassVar[str] = "llama"
    stock_relatives: ClassVar[tuple[str, ...]] = ("mistral", "ministral")
    feed_forward_name: ClassVar[str] = "mlp"
    base_model_tp_plan = DENSE_TP

    pretraining_tp: int | None = field(1, "none")
    attention_bias: bool = field(False, "structure")
    mlp_bias: bool = field(False, "structure")
    read_from: str | None = field(None, "none", choices=(None, "mistral", "ministral"))

    @classmethod
    def _from_stock(cls, data):
        return data | ({"read_from": data["model_type"]} if data["model_type"] in cls.stock_relatives else {})

    def stock_type(self) -> str:
        """Return llama, mistral if all layers have a window, or ministral if some have; or `read_from`, if it can."""
        kinds = set(self.attention_types())
        # transformers' Ministral needs a window, even if no layer uses it.
        if len(kinds) > 1 or (self.read_from == "ministral" and self.sliding_window is not None):
            return "ministral"
        return "mistral" if "sliding_attention" in kinds or self.read_from == "mistral" else "llama"
