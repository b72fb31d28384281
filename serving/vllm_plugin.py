"""Let vLLM serve llamoe's folders with its native model classes.

vLLM calls `register`, an entry point of its plugins, in each of its processes. `register` maps llamoe's classes to
vLLM's native classes, and adds a hook. The hook replaces llamoe's configuration by transformers', or raises an error if
the native class would compute something else. vLLM ignores both with `--model-impl transformers`.

Source: vLLM 0.33.0, `config/model.py` (`_try_verify_and_update_model_config`), `model_executor/models/registry.py`,
`config.py`, `llama4.py`, `mllama4.py` and `model_executor/layers/rotary_embedding/`; 0.32.0 has the same.
"""

import logging
from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..configuration import LlamoeConfig, LlamoeTextConfig
from ..configuration.base import LlamoeBaseConfig
from ..configuration.hub import AUTO_CLASSES
from ..configuration.quantization import METHOD
from ..configuration.stock import to_stock

NATIVE = {
    "LlamoeDenseForCausalLM": "LlamaForCausalLM",
    "LlamoeMixtralForCausalLM": "MixtralForCausalLM",
    "LlamoeForCausalLM": "Llama4ForCausalLM",
    "LlamoeForConditionalGeneration": "Llama4ForConditionalGeneration",
}
"""llamoe's model classes that have a native class, by name."""
OURS = sorted({name for served in AUTO_CLASSES.values() for name in served.values()})
"""All of llamoe's model classes. They need the hook, because vLLM serves a base model or a classifier as the
registered model class of the same architecture."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types that vLLM computes as transformers does. Its "dynamic" and "longrope" do not depend on the length of a row, and
its "proportional" ignores the factor."""


def register() -> None:
    """Register llamoe's model classes with vLLM; only log a warning if this version of vLLM lacks the needed hooks."""
    try:
        from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.models import config  # pyright: ignore[reportMissingImports]

        base, hooks = config.VerifyAndUpdateConfig, config.MODELS_CONFIG_MAP
        # Raises an AttributeError if vLLM has no such hook: then its native classes would read llamoe's configuration.
        _ = base.verify_and_update_model_config
        natives = {name: ModelRegistry.models[native] for name, native in NATIVE.items()}
    except (ImportError, AttributeError, KeyError) as error:
        logging.getLogger("llamoe").warning(
            "llamoe's plugin is made for vLLM 0.32 and 0.33, and does nothing with this version (%s: %s). "
            "`transformers serve` runs llamoe's own classes.",
            type(error).__name__,
            error,
        )
        return

    class StockConfigHook(base):
        verify_and_update_model_config = staticmethod(replace_config)

    for name, native in natives.items():
        # By name, so that vLLM imports the class only when it is used.
        ModelRegistry.register_model(name, f"{native.module_name}:{native.class_name}")
    hooks.update(dict.fromkeys(OURS, StockConfigHook))


def replace_config(model_config: Any) -> None:
    """Put transformers' configuration into vLLM's `ModelConfig` in place of llamoe's.

    Raises:
        ValueError: there is no native class, or it would compute something else.
    """
    stock = native_config(model_config.hf_config, model_config.architecture)
    text = stock.get_text_config()
    model_config.hf_config, model_config.hf_text_config = stock, text
    model_config.attention_chunk_size = getattr(text, "attention_chunk_size", None)
    model_config.model_arch_config = model_config.get_model_arch_config()
    if hasattr(text, "attn_temperature_tuning"):
        # Otherwise the native class turns the tuning on or off by the length of the context.
        tuned = text.attn_temperature_tuning
        model_config.override_generation_config.setdefault("attn_temperature_tuning", tuned)


def native_config(config: LlamoeBaseConfig, architecture: str) -> PreTrainedConfig:
    """Return transformers' configuration with which vLLM's native class computes what llamoe's class computes.

    Args:
        config: llamoe's configuration.
        architecture: name of llamoe's model class in config.json.

    Raises:
        ValueError: there is no native class, or it would compute something else; the message names the field.
    """
    try:
        if architecture not in NATIVE:
            raise ValueError(f"there is none for {architecture}")
        if problem := next(_problems(config), None):
            raise ValueError(problem)
        data = to_stock(config)
    except ValueError as error:
        raise ValueError(
            f"vLLM's native class cannot serve this model: {str(error).rstrip('.')}. `transformers serve` "
            "runs llamoe's own class."
        ) from None
    text = config.get_text_config()
    rope = {name: value for name, value in text.rope_parameters.items() if value is not None}
    if "factor" in rope:
        # vLLM would read an integer factor as a list.
        rope["factor"] = float(rope["factor"])
    fields = data.get("text_config", data)
    fields.update(hidden_act="silu", rope_parameters=rope)
    if isinstance(text, LlamoeTextConfig):
        # From these two fields vLLM derives which layers are mixtures, and which have chunks.
        is_chunked = "chunked_attention" in text.layer_types
        fields["interleave_moe_layer_step"] = _step(text)
        fields["attention_chunk_size"] = text.attention_chunk_size if is_chunked else None
    if isinstance(config, LlamoeConfig):
        # llamoe's model reads this field of `text_config`; vLLM reads that of the multimodal configuration.
        data["tie_word_embeddings"] = text.tie_word_embeddings
    # vLLM has no class for Ministral, but its class for Mistral reads `layer_types`.
    is_windowed = data["model_type"] in ("mistral", "ministral")
    data["architectures"] = ["MistralForCausalLM" if is_windowed else NATIVE[architecture]]
    return CONFIG_MAPPING[data["model_type"]](**data)


def _step(text: Any) -> int:
    return min(text.moe_layers) + 1 if text.moe_layers else 0


def _problems(config: LlamoeBaseConfig) -> Iterator[str]:
    """Yield what transformers' class computes with this configuration and vLLM's native class does not."""
    text: Any = config.get_text_config()
    method = (config.to_dict().get("quantization_config") or {}).get("quant_method")
    if method == METHOD:
        yield f"quant_method = {method!r}: vLLM does not read llamoe's formats; layout='stock' saves plain weights"
    elif method is not None and getattr(text, "moe_layers", ()):
        yield f"quant_method = {method!r}: vLLM reads quantized experts only in another layout"
    if text.hidden_act not in ("silu", "swish"):
        yield f"hidden_act = {text.hidden_act!r}: vLLM computes silu"
    rope = text.rope_parameters
    if rope["rope_type"] not in _ROPE_TYPES:
        yield f"rope_type = {rope['rope_type']!r}: vLLM computes another scaling for this type"
    elif rope["rope_type"] == "yarn":
        reached = int(rope["original_max_position_embeddings"] * rope["factor"])
        if reached < (limit := text.max_position_embeddings):
            yield f"max_position_embeddings = {limit}: vLLM computes angles for only {reached} positions"
    if not isinstance(text, LlamoeTextConfig):
        return
    if text.attention_bias:
        yield "attention_bias = True: vLLM's Llama 4 has no biases"
    if text.moe_layers and text.num_experts_per_tok > 1:
        yield f"num_experts_per_tok = {text.num_experts_per_tok}: vLLM scales the input of only one expert for a token"
    if (step := _step(text)) and sorted(text.moe_layers) != list(
        range(step - 1, text.num_hidden_layers, step)
    ):
        yield f"moe_layers = {text.moe_layers}: vLLM derives mixture layers from interleave_moe_layer_step"
    chunked = [kind == "chunked_attention" for kind in text.layer_types or ()]
    if any(chunked) and chunked != [bool(rotates) for rotates in text.no_rope_layers or ()]:
        yield f"layer_types = {text.layer_types}: in vLLM the layers with rotation have chunks, and no others"
