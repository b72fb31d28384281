"""Entry point of vLLM's plugins: folders that llamoe saved are served by vLLM's native model classes.

vLLM calls `register` in each of its processes. It names our architectures in vLLM's registry of models, and for each a
hook in the table of what vLLM adjusts in a model's configuration. The hook replaces our configuration by the stock one
that the native class reads, before anything is built from it, or refuses it. `--model-impl transformers` passes over
both: then vLLM's transformers backend is given our own class.

`to_stock` refuses what no stock class computes. Refused here is what stock computes and vLLM's native class does not:
it ignores the field, or always computes one way.

Source: vLLM 0.33.0, `config/model.py` (`_try_verify_and_update_model_config`), `model_executor/models/registry.py`,
`config.py`, `llama.py`, `mistral.py`, `mixtral.py`, `llama4.py`, `mllama4.py`, and
`model_executor/layers/rotary_embedding/`. 0.32.0 has the same model files.
"""

import logging
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..configuration import LlamoeConfig, LlamoeTextConfig
from ..configuration.base import LlamoeBaseConfig
from ..configuration.checks import enumerate_words, fail
from ..configuration.hub import AUTO_CLASSES
from ..configuration.quantization import METHOD
from ..configuration.stock import to_stock

logger = logging.getLogger("llamoe")

# Our classes with a native one.
NATIVE = {
    "LlamoeDenseForCausalLM": "LlamaForCausalLM",
    "LlamoeMixtralForCausalLM": "MixtralForCausalLM",
    "LlamoeForCausalLM": "Llama4ForCausalLM",
    "LlamoeForConditionalGeneration": "Llama4ForConditionalGeneration",
}
# All our classes: vLLM takes the base model or a classifier of a registered architecture for that architecture.
OURS = sorted({name for served in AUTO_CLASSES.values() for name in served.values()})
# vLLM's "dynamic" and "longrope" never look at a row's length, and its "proportional" ignores the factor.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def register() -> None:
    """Register our architectures with vLLM, which calls this.

    Where this vLLM lacks what is needed, a warning says so, and its folders are served as without the plugin.
    """
    try:
        from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.models import config  # pyright: ignore[reportMissingImports]

        # Without this hook the native classes would read our configurations.
        base, hooks = config.VerifyAndUpdateConfig, config.MODELS_CONFIG_MAP
        _ = base.verify_and_update_model_config
        known = {name: ModelRegistry.models[native] for name, native in NATIVE.items()}
    except (ImportError, AttributeError, KeyError) as error:
        logger.warning(
            "llamoe's plugin is made for vLLM 0.32 and 0.33, and leaves this vLLM as it is (%s: %s). "
            "`transformers serve` runs llamoe's own classes.",
            type(error).__name__,
            error,
        )
        return

    class HandsOver(base):
        verify_and_update_model_config = staticmethod(hand_over)

    for name, native in known.items():
        # By its name, so that nothing is imported before it is needed.
        ModelRegistry.register_model(name, f"{native.module_name}:{native.class_name}")
    hooks.update(dict.fromkeys(OURS, HandsOver))


def hand_over(model_config: Any) -> None:
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
        # The native class reads this from generation settings, and without them goes by the longest context.
        tuned = text.attn_temperature_tuning
        model_config.override_generation_config.setdefault("attn_temperature_tuning", tuned)


def native_config(config: LlamoeBaseConfig, architecture: str) -> PreTrainedConfig:
    """The stock configuration with which vLLM's native class computes what ours does.

    Args:
        config: ours, as read from a folder.
        architecture: name of our class in its config.json.

    Returns:
        an object of transformers' class, its `architectures` as vLLM names them.

    Raises:
        ValueError: the native class cannot compute it; the sentence names the field.
    """
    try:
        if architecture not in NATIVE:
            raise ValueError(f"there is none for {architecture}")
        data = _stock_fields(config)
    except ValueError as error:
        raise ValueError(
            f"vLLM's native class cannot serve this model: {str(error).rstrip('.')}. `transformers serve` "
            "runs llamoe's own class."
        ) from None
    # Ministral has no class of its own there; Mistral's reads the kinds of its layers.
    is_windowed = data["model_type"] in ("mistral", "ministral")
    data["architectures"] = ["MistralForCausalLM" if is_windowed else NATIVE[architecture]]
    return CONFIG_MAPPING[data["model_type"]](**data)


def _stock_fields(config: LlamoeBaseConfig) -> dict[str, Any]:
    text = config.get_text_config()
    _check_quantization(config)
    if text.hidden_act not in ("silu", "swish"):
        fail(text, "hidden_act", text.hidden_act, "vLLM computes silu", '"silu"')
    data = to_stock(config)
    fields = data.get("text_config", data)
    fields.update(hidden_act="silu", rope_parameters=_rope(text))
    if isinstance(text, LlamoeTextConfig):
        fields.update(_llama4_fields(text))
    if isinstance(config, LlamoeConfig):
        # Ours ties by the text's field, vLLM by the whole's.
        data["tie_word_embeddings"] = text.tie_word_embeddings
    return data


def _check_quantization(config: LlamoeBaseConfig) -> None:
    method = (config.to_dict().get("quantization_config") or {}).get("quant_method")
    if method == METHOD:
        problem = "vLLM does not read llamoe's formats"
        valid = 'none: save_pretrained(folder, layout="stock") of the loaded model writes plain weights'
        fail(config, "quantization_config['quant_method']", method, problem, valid)
    if method is not None and getattr(config.get_text_config(), "moe_layers", ()):
        problem = "vLLM expects quantized experts in a layout of its own"
        fail(config, "quantization_config['quant_method']", method, problem, "none: the model in 16 bit")


def _llama4_fields(text: Any) -> dict[str, Any]:
    """The fields from which vLLM derives which layers are mixtures and which have chunks."""
    if text.attention_bias:
        fail(text, "attention_bias", True, "vLLM's Llama 4 has no biases", "False")
    if text.moe_layers and text.num_experts_per_tok > 1:
        problem = "vLLM's kernels scale an expert's input, as Llama 4 does, for one expert a token"
        fail(text, "num_experts_per_tok", text.num_experts_per_tok, problem, "1")
    wanted = sorted(text.moe_layers)
    step = wanted[0] + 1 if wanted else 0
    if wanted and wanted != list(range(step - 1, text.num_hidden_layers, step)):
        problem = "vLLM knows mixture layers by interleave_moe_layer_step"
        fail(text, "moe_layers", text.moe_layers, problem, "[n - 1, 2n - 1, …] for one n, or []")
    chunked = [kind == "chunked_attention" for kind in text.layer_types]
    if any(chunked) and chunked != [bool(rotates) for rotates in text.no_rope_layers]:
        problem = "in vLLM the layers with chunks are those that rotate (no_rope_layers has 1 for them)"
        fail(text, "layer_types", text.layer_types, problem, "chunked_attention for those, or for none")
    chunk_size = text.attention_chunk_size if any(chunked) else None
    return {"interleave_moe_layer_step": step, "attention_chunk_size": chunk_size}


def _rope(text: LlamoeBaseConfig) -> dict[str, Any]:
    """Rotary parameters without those that say nothing, factors as vLLM takes them."""
    rope = {name: value for name, value in text.rope_parameters.items() if value is not None}
    if rope["rope_type"] not in _ROPE_TYPES:
        problem = "vLLM computes another scaling under this name"
        valid = enumerate_words(map(repr, _ROPE_TYPES))
        fail(text, "rope_parameters['rope_type']", rope["rope_type"], problem, valid)
    if "factor" in rope:
        rope["factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        reached = int(rope["original_max_position_embeddings"] * rope["factor"])
        if reached < text.max_position_embeddings:
            problem = f"vLLM has angles for original_max_position_embeddings * factor = {reached} positions"
            fail(text, "max_position_embeddings", text.max_position_embeddings, problem, f"up to {reached}")
    return rope
