"""Entry point of vLLM's plugins: folders that llamoe saved are served by vLLM's native model classes.

vLLM calls `register` in each of its processes. It names our architectures in vLLM's registry of models, and for each a
hook in the table of what vLLM adjusts in a model's configuration. The hook replaces our configuration by the stock one
that the native class expects, before anything is built from it, or refuses it. `--model-impl transformers` passes over
both: our own classes run then, with the differences that `configuration/servers.py` tells.

What the native classes ignore or always compute one way is checked here, beside what stock cannot express at all:
the activation (silu), the place of mixture layers, biases of Llama 4's projections, which layers have chunks, several
experts of which each scales its input, kinds of rotary scaling. Fields that are no field of the stock class are left
out, since vLLM reads some that nobody else knows (`logit_scale`, `qkv_bias`, `mrope_section`).

Source: vLLM 0.33.0, `plugins/__init__.py`, `config/model.py` (`_try_verify_and_update_model_config`),
`model_executor/models/registry.py`, `config.py`, `llama.py`, `mistral.py`, `mixtral.py`, `llama4.py`, `mllama4.py` and
`model_executor/layers/rotary_embedding/`. 0.32.0 has the same model files.
"""

import logging
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...configuration import LlamoeConfig, LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.checks import enumerate_words, fail
from ...configuration.hub import AUTO_CLASSES
from ...configuration.quantization import METHOD
from ...configuration.stock import to_stock

logger = logging.getLogger("llamoe")

# Our classes with a native one, and the configuration that each is saved with.
NATIVE = {
    "LlamoeDenseForCausalLM": ("LlamaForCausalLM", LlamoeDenseConfig),
    "LlamoeMixtralForCausalLM": ("MixtralForCausalLM", LlamoeMixtralConfig),
    "LlamoeForCausalLM": ("Llama4ForCausalLM", LlamoeTextConfig),
    "LlamoeForConditionalGeneration": ("Llama4ForConditionalGeneration", LlamoeConfig),
}
# All our classes: vLLM takes the base model or a classifier of a registered architecture for that architecture.
OURS = sorted({name for served in AUTO_CLASSES.values() for name in served.values()})

# Of rotary parameters those which a kind has; vLLM's "dynamic" scales nothing, its "longrope" never changes within a
# run and ignores the attention factor, its "proportional" ignores the factor.
_ROPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_OTHERWISE = "Serve it with --model-impl transformers, which runs llamoe's own class."
# Ministral has no class of its own there; Mistral's reads the kinds of its layers.
_OTHER_NAMES = {"MinistralForCausalLM": "MistralForCausalLM"}

# Whether the warning was given in this process.
_warned: set[str] = set()


def register() -> None:
    """Register our architectures with vLLM; called by vLLM, any number of times.

    Where this vLLM lacks what is needed, a warning says so, and its folders are served as without the plugin.
    """
    try:
        from vllm import ModelRegistry
        from vllm.config import ModelConfig
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    except ImportError as error:
        _warn(f"its module cannot be imported ({error})")
        return
    missing = [
        name
        for owner, name in (
            (ModelRegistry, "models"),
            (ModelRegistry, "register_model"),
            (VerifyAndUpdateConfig, "verify_and_update_model_config"),
            (ModelConfig, "_try_verify_and_update_model_config"),
            (ModelConfig, "get_model_arch_config"),
        )
        if not hasattr(owner, name)
    ]
    if missing:
        _warn(f"it has no {enumerate_words(missing, 'and no')}")
        return
    for name in OURS:
        native, _ = NATIVE.get(name, ("", None))
        known = ModelRegistry.models.get(native)
        if name in NATIVE and not hasattr(known, "module_name"):
            _warn(f"it has no {native}")
            continue
        if known is not None:
            # By its name, so that nothing is imported before it is needed.
            ModelRegistry.register_model(name, f"{known.module_name}:{known.class_name}")
        MODELS_CONFIG_MAP[name] = HandsOver


class HandsOver:
    """Entry of vLLM's `MODELS_CONFIG_MAP` for each of our architectures."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Give a `ModelConfig` of vLLM's the stock configuration in place of ours.

        Raises:
            ValueError: the native class would compute something else, or has no counterpart to ours.
        """
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        config = model_config.hf_config
        stock = native_config(config, model_config.architecture, model_config.max_model_len)
        text = stock.get_text_config()
        model_config.hf_config, model_config.hf_text_config = stock, text
        model_config.attention_chunk_size = getattr(text, "attention_chunk_size", None)
        model_config.model_arch_config = model_config.get_model_arch_config()
        found = model_config.registry.inspect_model_cls(stock.architectures, model_config)
        model_config._model_info, model_config._architecture = found
        if isinstance(config.get_text_config(), LlamoeTextConfig):
            # The native class reads this from generation settings, and without them goes by the longest context.
            tuned = bool(text.attn_temperature_tuning)
            model_config.override_generation_config.setdefault("attn_temperature_tuning", tuned)
        its_own = MODELS_CONFIG_MAP.get(model_config.architecture)
        if its_own is not None:
            its_own.verify_and_update_model_config(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Nothing is left to do: this is asked of the native architecture."""


def native_config(
    config: PreTrainedConfig, architecture: str, max_model_len: int | None = None
) -> PreTrainedConfig:
    """The stock configuration with which vLLM's native class computes what ours does.

    Args:
        config: ours, as read from a folder.
        architecture: name of our class in its config.json.
        max_model_len: longest context that is served; None: `max_position_embeddings`.

    Returns:
        an object of transformers' class, its `architectures` as vLLM names them.

    Raises:
        ValueError: the native class cannot compute it; the sentence names the field.
    """
    try:
        native, config_class = NATIVE.get(architecture, (None, LlamoeBaseConfig))
        if native is None:
            raise ValueError(f"it has none for {architecture}")
        if not isinstance(config, config_class):
            raise ValueError(f"{architecture} needs a {config_class.__name__}, not a {type(config).__name__}")
        return _converted(config, native, max_model_len)
    except ValueError as error:
        raise ValueError(
            f"vLLM's native class cannot serve this model: {str(error).rstrip('.')}. {_OTHERWISE}"
        ) from None


def _converted(config: LlamoeBaseConfig, native: str, max_model_len: int | None) -> PreTrainedConfig:
    text = config.get_text_config()
    _check_quantization(config, text)
    if text.hidden_act not in ("silu", "swish"):
        fail(text, "hidden_act", text.hidden_act, "vLLM computes silu", '"silu"')
    data = to_stock(config)
    data["architectures"] = [native]
    stock_text = data.get("text_config", data)
    stock_text["hidden_act"] = "silu"
    if isinstance(text, LlamoeTextConfig):
        _check_llama4(text)
        stock_text["interleave_moe_layer_step"] = _moe_step(text)
        stock_text["attention_chunk_size"] = _chunk_size(text)
    if not isinstance(text, LlamoeTextConfig) or any(text.no_rope_layers):
        stock_text["rope_parameters"] = _rope(text, max_model_len)
    if isinstance(config, LlamoeConfig):
        # Ours ties by the text's field, vLLM by the whole's.
        data["tie_word_embeddings"] = text.tie_word_embeddings
    elif isinstance(config, LlamoeDenseConfig) and data["model_type"] != "llama":
        data["architectures"] = ["MistralForCausalLM"]
    stock = _declared(data)
    stock._name_or_path = config._name_or_path
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        stock.quantization_config = quantization
    return stock


def _declared(data: dict[str, Any]) -> PreTrainedConfig:
    """A stock configuration of the fields that its class declares, without others that a file may hold."""
    config_class = CONFIG_MAPPING[data["model_type"]]
    names = {*config_class.__dataclass_fields__, *config_class.attribute_map}
    fields = {name: value for name, value in data.items() if name in names}
    for name in config_class.sub_configs:
        fields[name] = _declared(data[name])
    return config_class(**fields)


def _check_quantization(config: LlamoeBaseConfig, text: LlamoeBaseConfig) -> None:
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method")
    if method == METHOD:
        problem = "vLLM does not read llamoe's formats"
        valid = 'none: save_pretrained(folder, layout="stock") of the loaded model writes plain weights'
        fail(config, "quantization_config['quant_method']", method, problem, valid)
    if getattr(text, "moe_layers", ()):
        problem = "vLLM expects quantized experts in a layout of its own"
        fail(config, "quantization_config['quant_method']", method, problem, "none: the model in 16 bit")


def _check_llama4(text: LlamoeTextConfig) -> None:
    if text.attention_bias:
        fail(text, "attention_bias", True, "vLLM's Llama 4 has no biases", "False")
    if text.moe_layers and text.num_experts_per_tok > 1:
        problem = "vLLM's kernels scale an expert's input, as Llama 4 does, for one expert a token"
        fail(text, "num_experts_per_tok", text.num_experts_per_tok, problem, "1")


def _moe_step(text: LlamoeTextConfig) -> int:
    """The distance between mixture layers, by which alone vLLM knows them."""
    count, wanted = text.num_hidden_layers, sorted(text.moe_layers)
    if not wanted:
        return 0
    step = wanted[0] + 1
    if wanted != list(range(step - 1, count, step)):
        problem = "vLLM knows mixture layers by interleave_moe_layer_step"
        fail(text, "moe_layers", text.moe_layers, problem, "every n-th layer, ending with one before n more")
    return step


def _chunk_size(text: LlamoeTextConfig) -> int | None:
    """The size of chunks, which in vLLM all layers that rotate have, or none."""
    kinds = [kind == "chunked_attention" for kind in text.layer_types]
    if not any(kinds):
        return None
    if kinds != [bool(rotates) for rotates in text.no_rope_layers]:
        problem = "in vLLM the layers with chunks are those that rotate (no_rope_layers has 1 for them)"
        fail(text, "layer_types", text.layer_types, problem, "chunked_attention for those, or for none")
    return text.attention_chunk_size


def _rope(text: LlamoeBaseConfig, max_model_len: int | None) -> dict[str, Any]:
    """Rotary parameters with the keys that their kind has, in the types that vLLM takes."""
    given = text.rope_parameters
    kind = given["rope_type"]
    if kind not in _ROPES:
        problem = "vLLM computes another scaling under this name"
        fail(text, "rope_parameters['rope_type']", kind, problem, enumerate_words(map(repr, _ROPES)))
    found = {name: given[name] for name in _ROPES[kind] if given.get(name) is not None}
    if kind == "yarn":
        longest, trained = text.max_position_embeddings, found["original_max_position_embeddings"]
        found.setdefault("factor", longest / trained)
        # The length of vLLM's table of angles.
        reached, wanted = int(trained * found["factor"]), max_model_len or longest
        if reached < wanted:
            problem = f"vLLM has angles for {reached} positions, and shall serve {wanted}"
            fail(text, "rope_parameters['factor']", found["factor"], problem, f"--max-model-len {reached}")
    if "factor" in found:
        found["factor"] = float(found["factor"])
    return {"rope_type": kind, "rope_theta": given["rope_theta"], **found}


def _warn(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        logger.warning(
            "llamoe's plugin is made for vLLM 0.32 and 0.33, and leaves this vLLM as it is: %s. Folders of llamoe are "
            "served with --trust-remote-code by its transformers backend.",
            reason,
        )
