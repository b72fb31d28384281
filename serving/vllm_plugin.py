"""Serve folders of ours with vLLM's native model classes: the entry point of vLLM's plugins.

vLLM calls `register` in each of its processes. For each of our classes it names vLLM's native class, and a hook that
replaces our configuration by the stock one, or refuses it where the native class would compute something else.
`--model-impl transformers` bypasses both.

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
"""Our classes with a native one."""
OURS = sorted({name for served in AUTO_CLASSES.values() for name in served.values()})
"""All our classes: vLLM takes the base model or a classifier of a registered architecture for that architecture."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""vLLM's "dynamic" and "longrope" do not look at a row's length, and its "proportional" ignores the factor."""


def register() -> None:
    """Register our architectures with vLLM; only warn if this vLLM lacks the needed hooks."""
    try:
        from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.models import config  # pyright: ignore[reportMissingImports]

        base, hooks = config.VerifyAndUpdateConfig, config.MODELS_CONFIG_MAP
        # Without this hook the native classes would read our configurations.
        _ = base.verify_and_update_model_config
        natives = {name: ModelRegistry.models[native] for name, native in NATIVE.items()}
    except (ImportError, AttributeError, KeyError) as error:
        logging.getLogger("llamoe").warning(
            "llamoe's plugin is made for vLLM 0.32 and 0.33, and leaves this vLLM as it is (%s: %s). "
            "`transformers serve` runs llamoe's own classes.",
            type(error).__name__,
            error,
        )
        return

    class StockConfigHook(base):
        verify_and_update_model_config = staticmethod(replace_config)

    for name, native in natives.items():
        # Registered by name, so that vLLM imports the class only when it is used.
        ModelRegistry.register_model(name, f"{native.module_name}:{native.class_name}")
    hooks.update(dict.fromkeys(OURS, StockConfigHook))


def replace_config(model_config: Any) -> None:
    """Put the stock configuration into vLLM's `ModelConfig` in place of ours.

    Raises:
        ValueError: the native class would compute something else, or has no counterpart to ours.
    """
    stock = native_config(model_config.hf_config, model_config.architecture)
    text = stock.get_text_config()
    model_config.hf_config, model_config.hf_text_config = stock, text
    model_config.attention_chunk_size = getattr(text, "attention_chunk_size", None)
    model_config.model_arch_config = model_config.get_model_arch_config()
    if hasattr(text, "attn_temperature_tuning"):
        # Without generation settings, the native class derives this from the longest context.
        tuned = text.attn_temperature_tuning
        model_config.override_generation_config.setdefault("attn_temperature_tuning", tuned)


def native_config(config: LlamoeBaseConfig, architecture: str) -> PreTrainedConfig:
    """Return the stock configuration with which vLLM's native class computes what our class does.

    Args:
        config: ours, as read from a folder.
        architecture: name of our class in its config.json.

    Raises:
        ValueError: the native class cannot compute it; the sentence names the field.
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
        # vLLM derives from these which layers are mixtures and which have chunks.
        is_chunked = "chunked_attention" in text.layer_types
        fields["interleave_moe_layer_step"] = _step(text)
        fields["attention_chunk_size"] = text.attention_chunk_size if is_chunked else None
    if isinstance(config, LlamoeConfig):
        # Our model reads this field of the text config; vLLM reads the multimodal config's.
        data["tie_word_embeddings"] = text.tie_word_embeddings
    # vLLM has no Ministral class; its Mistral class reads layer_types.
    is_windowed = data["model_type"] in ("mistral", "ministral")
    data["architectures"] = ["MistralForCausalLM" if is_windowed else NATIVE[architecture]]
    return CONFIG_MAPPING[data["model_type"]](**data)


def _step(text: Any) -> int:
    return min(text.moe_layers) + 1 if text.moe_layers else 0


def _problems(config: LlamoeBaseConfig) -> Iterator[str]:
    """Yield each feature of stock's class that vLLM's native class lacks."""
    text: Any = config.get_text_config()
    method = (config.to_dict().get("quantization_config") or {}).get("quant_method")
    if method == METHOD:
        yield f"quant_method = {method!r}: vLLM does not read llamoe's formats; layout='stock' saves plain weights"
    elif method is not None and getattr(text, "moe_layers", ()):
        yield f"quant_method = {method!r}: vLLM expects quantized experts in a layout of its own"
    if text.hidden_act not in ("silu", "swish"):
        yield f"hidden_act = {text.hidden_act!r}: vLLM computes silu"
    rope = text.rope_parameters
    if rope["rope_type"] not in _ROPE_TYPES:
        yield f"rope_type = {rope['rope_type']!r}: vLLM computes another scaling under this name"
    elif rope["rope_type"] == "yarn":
        reached = int(rope["original_max_position_embeddings"] * rope["factor"])
        if reached < (limit := text.max_position_embeddings):
            yield f"max_position_embeddings = {limit}: vLLM has angles for {reached} positions"
    if not isinstance(text, LlamoeTextConfig):
        return
    if text.attention_bias:
        yield "attention_bias = True: vLLM's Llama 4 has no biases"
    if text.moe_layers and text.num_experts_per_tok > 1:
        yield f"num_experts_per_tok = {text.num_experts_per_tok}: vLLM scales an expert's input for one expert a token"
    if (step := _step(text)) and sorted(text.moe_layers) != list(
        range(step - 1, text.num_hidden_layers, step)
    ):
        yield f"moe_layers = {text.moe_layers}: vLLM knows mixture layers by interleave_moe_layer_step"
    chunked = [kind == "chunked_attention" for kind in text.layer_types or ()]
    if any(chunked) and chunked != [bool(rotates) for rotates in text.no_rope_layers or ()]:
        yield f"layer_types = {text.layer_types}: in vLLM the layers with chunks are those that rotate"
