"""What llama.cpp's converter or loader would misread, pass over or refuse in a folder of stock's layout.

A GGUF file has fewer fields than a config.json. The rest is fixed by the architecture's code in llama.cpp, so that
another model converts without an error and then computes something else. Each rule here is read from that source, at
commit 0c1e57098, which llama-cpp-python 0.3.36 carries: `conversion/base.py`, `llama.py` and `llama4.py` write the
file, `src/models/llama.cpp` and `llama4.cpp` read it and compute.

It computes no Llama 4's vision tower as transformers does, and says "known to have degraded quality". The converter
writes the norm before the feed-forward under a name that is read as another norm, and `tools/mtmd/models/llama4.cpp`
hands the tokens of a picture on with rows and columns swapped.

Only contexts up to `max_position_embeddings` count. A window or a chunk that is no shorter changes nothing.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

from ..configuration.base import LlamoeBaseConfig
from ..configuration.checks import enumerate_words
from ..configuration.errors import ConfigurationError
from ..configuration.mixture import LlamoeTextConfig
from ..configuration.stock import to_stock
from ..configuration.vision import LlamoeVisionConfig

# Classes of transformers' that the converter knows, of those that our models are saved as.
_CONVERTED = (
    "LlamaForCausalLM",
    "LlamaModel",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
)
# Values of `quant_method` that it unpacks.
_UNPACKED = ("bitnet", "compressed-tensors", "fp8", "gptq", "modelopt")
_MOST_LAYERS = 512
_MOST_EXPERTS = 1024

# What `src/models/llama4.cpp` sets for every Llama 4, whatever the file says.
_CHUNK = 8192
_FLOOR_SCALE = 8192
_ATTN_SCALE = 0.1
_PERIOD = 4
_EXPERTS_WITHOUT_QK_NORM = 128

_INSTEAD = "Serve this model with transformers."


def gguf_problems(config: LlamoeBaseConfig, architecture: str | None = None) -> list[str]:
    """Sentences on what llama.cpp would not compute as this model does; none if it computes the same.

    Args:
        config: of any model of ours. Of a multimodal one the decoder is meant: the tower, for which the converter
            writes a file of its own, is computed otherwise in any case (see the module's text).
        architecture: name of the class that the model is saved from; by default what the configuration says, if it
            says anything.
    """
    if isinstance(config, LlamoeVisionConfig):
        return ["llama.cpp reads a vision tower only beside its decoder. Save the multimodal model."]
    if architecture is not None:
        config = copy.deepcopy(config)
        config.architectures = [architecture]
    text: Any = config.get_text_config()
    problems = []
    try:
        problems += _of_folder(to_stock(config))
    except ConfigurationError as error:
        problems.append(f"{error}. llama.cpp's converter reads stock's layout alone. {_INSTEAD}")
    problems += _of_decoder(text)
    problems += _of_rope(text.rope_parameters)
    problems += _of_llama4(text) if isinstance(text, LlamoeTextConfig) else _of_windows(text)
    return problems


def check_for_gguf(config: LlamoeBaseConfig, architecture: str | None = None) -> None:
    """Refuse a model that llama.cpp would not compute as it is; arguments are those of `gguf_problems`.

    Raises:
        ConfigurationError: every problem, one a line.
    """
    if problems := gguf_problems(config, architecture):
        lines = "".join(f"\n- {problem}" for problem in problems)
        raise ConfigurationError(
            f"for_gguf=True: a GGUF file of this model would compute something else, or not load:{lines}\n"
            "Without for_gguf the folder is written all the same."
        )


def _of_folder(stock: dict[str, Any]) -> Iterator[str]:
    """What the converter refuses by the first lines of config.json."""
    # It asks the decoder's part first.
    for part in (stock.get("text_config") or {}, stock):
        if names := part.get("architectures"):
            if names[0] not in _CONVERTED:
                todo = "Save the causal language model."
                if names[0] == "MinistralForCausalLM":
                    todo = (
                        "For contexts up to sliding_window set max_position_embeddings to it, layer_types and "
                        "sliding_window to None."
                    )
                yield (
                    f"architectures = {names[0]!r}: llama.cpp's converter knows {enumerate_words(_CONVERTED)} and "
                    f"stops at others. {todo}"
                )
            break
    method = (stock.get("quantization_config") or {}).get("quant_method")
    # A member of transformers' enumeration, or the text in a config.json.
    method = getattr(method, "value", method)
    if method is not None and method not in _UNPACKED:
        yield (
            f"quant_method = {method!r}: llama.cpp's converter unpacks {enumerate_words(_UNPACKED)} and stops at "
            "others. Save the unquantized model, and let llama.cpp quantize the GGUF file."
        )


def _of_decoder(config: Any) -> Iterator[str]:
    """What holds for llama.cpp's `llama` and `llama4` alike."""
    # "swish" is another name of the same function.
    if config.hidden_act not in ("silu", "swish"):
        yield (
            f"hidden_act = {config.hidden_act!r}: llama.cpp computes these models with silu, whatever config.json "
            f"says. {_INSTEAD}"
        )
    experts = getattr(config, "num_local_experts", 0)
    for name, value, most in (
        ("num_hidden_layers", config.num_hidden_layers, _MOST_LAYERS),
        ("num_local_experts", experts, _MOST_EXPERTS),
    ):
        if value > most:
            yield f"{name} = {value}: llama.cpp ends its process above {most}. {_INSTEAD}"


def _of_rope(parameters: dict[str, Any]) -> Iterator[str]:
    """Scaled rotary embeddings: default, linear and llama3 are the same, yarn in part."""
    kind = parameters.get("rope_type", "default")
    if kind == "dynamic":
        yield (
            "rope_type = 'dynamic': llama.cpp's converter passes over it, so that contexts beyond "
            "max_position_embeddings are rotated without scaling. Shorter ones need none: set rope_type = 'default'."
        )
    elif kind in ("longrope", "proportional"):
        yield (
            f"rope_type = {kind!r}: llama.cpp's converter writes none of its factors for these models, so that all "
            f"positions are rotated as with 'default'. {_INSTEAD}"
        )
    elif kind == "yarn":
        yield from _of_yarn(parameters)


def _of_yarn(parameters: dict[str, Any]) -> Iterator[str]:
    factor = parameters["factor"]
    given = parameters.get("attention_factor")
    first, second = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if given is None:
        given = _magnitude(factor, first) / _magnitude(factor, second) if first and second else None
    computed = _magnitude(factor, 1)
    if given is not None and not math.isclose(given, computed, rel_tol=1e-6):
        yield (
            f"rope_type = 'yarn' with an attention factor of {given:g}: llama.cpp takes 0.1 ln(factor) + 1 = "
            f"{computed:g}, whatever attention_factor, mscale and mscale_all_dim say. {_INSTEAD}"
        )
    for name, fixed in (("beta_fast", 32), ("beta_slow", 1)):
        if (value := parameters.get(name) or fixed) != fixed:
            yield f"{name} = {value:g} of rope_type 'yarn': llama.cpp computes these models with {fixed}. {_INSTEAD}"
    if parameters.get("truncate") is False:
        yield (
            "truncate = False of rope_type 'yarn': llama.cpp rounds the first and the last channel that it blends. "
            f"{_INSTEAD}"
        )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _of_windows(config: Any) -> Iterator[str]:
    """LLaMA, Mistral and Mixtral are one architecture there, without a window."""
    window = config.sliding_window
    if "sliding_attention" in config.attention_types() and window < config.max_position_embeddings:
        yield (
            f"sliding_window = {window}: llama.cpp knows no window in this architecture, so that logits differ from "
            f"position {window} on. Contexts up to {window} tokens are computed alike: set max_position_embeddings = "
            f"{window}."
        )


def _of_llama4(config: LlamoeTextConfig) -> Iterator[str]:
    """Llama 4's decoder, most of which llama.cpp fixes."""
    layers = range(config.num_hidden_layers)
    rotated = [int((idx + 1) % _PERIOD != 0) for idx in layers]
    if set(config.layer_types or ()) == {"full_attention"}:
        shorter = f" and max_position_embeddings to at most {_CHUNK}"
        todo = shorter if config.max_position_embeddings > _CHUNK else ""
        yield (
            "layer_types are all 'full_attention' (as attention_chunk_size = None makes them): llama.cpp rotates all "
            f"layers but the last then, and ends its process at the first token. Set attention_chunk_size = {_CHUNK}, "
            f"layer_types to None{todo}."
        )
    else:
        yield from _of_chunks(config, rotated)
    if [int(bool(rotates)) for rotates in config.no_rope_layers or ()] != rotated:
        yield (
            f"no_rope_layers = {config.no_rope_layers}: llama.cpp rotates all layers but every fourth, whatever "
            f"config.json says. {_INSTEAD}"
        )
    yield from _of_temperature(config, 0 in rotated)
    has_norm = config.num_local_experts != _EXPERTS_WITHOUT_QK_NORM
    if config.use_qk_norm != has_norm:
        yield (
            f"use_qk_norm = {config.use_qk_norm} with num_local_experts = {config.num_local_experts}: llama.cpp "
            f"normalises queries and keys unless there are {_EXPERTS_WITHOUT_QK_NORM} experts. {_INSTEAD}"
        )
    step = config.interleave_moe_layer_step
    mixtures = list(range(step - 1, len(layers), step)) if step else []
    if sorted(config.moe_layers or ()) != mixtures:
        yield (
            f"moe_layers = {config.moe_layers}: llama.cpp expects a mixture in every interleave_moe_layer_step-th "
            f"layer, {mixtures} here, and stops at a file with others. Change interleave_moe_layer_step if one says "
            "the same, or serve this model with transformers."
        )
    if not config.num_local_experts or not config.num_experts_per_tok:
        yield (
            f"num_local_experts = {config.num_local_experts}, num_experts_per_tok = {config.num_experts_per_tok}: "
            "llama.cpp loads no Llama 4 without experts. Set both to 1: no layer of this model uses them."
        )
    if config.attention_bias:
        yield (
            "attention_bias = True: llama.cpp knows no bias of Llama 4's output projection and stops at a file with "
            f"one. {_INSTEAD}"
        )


def _of_chunks(config: LlamoeTextConfig, rotated: list[int]) -> Iterator[str]:
    limit = config.max_position_embeddings
    size = config.attention_chunk_size or limit
    chunked = [kind == "chunked_attention" for kind in config.layer_types or ()]
    theirs = [bool(rotates) and limit > _CHUNK for rotates in rotated]
    ours = [is_chunked and limit > size for is_chunked in chunked]
    if ours == theirs and (size == _CHUNK or not any(ours)):
        return
    same = min(size, _CHUNK) if any(ours) else _CHUNK
    yield (
        f"attention_chunk_size = {config.attention_chunk_size} in {sum(chunked)} of {len(chunked)} layers: llama.cpp "
        f"has chunks of {_CHUNK} tokens in all layers but every fourth, so that logits differ from position {same} "
        f"on. Contexts up to {same} tokens are computed alike: set max_position_embeddings = {same}."
    )


def _of_temperature(config: LlamoeTextConfig, has_positions_free: bool) -> Iterator[str]:
    limit = config.max_position_embeddings
    scale = config.attn_scale if config.attn_temperature_tuning else 0.0
    ours, theirs = scale != 0 and limit >= config.floor_scale, limit >= _FLOOR_SCALE
    is_same = config.floor_scale == _FLOOR_SCALE and math.isclose(scale, _ATTN_SCALE, rel_tol=1e-6)
    if not has_positions_free or not (ours or theirs) or is_same:
        return
    same = min(config.floor_scale if ours else _FLOOR_SCALE, _FLOOR_SCALE) - 1
    todo = f"Contexts up to {same} tokens are computed alike: set max_position_embeddings = {same}."
    yield (
        f"attn_temperature_tuning = {bool(config.attn_temperature_tuning)}, floor_scale = {config.floor_scale}, "
        f"attn_scale = {config.attn_scale:g}: llama.cpp computes every Llama 4 with True, {_FLOOR_SCALE} and "
        f"{_ATTN_SCALE}, so that logits differ from position {same} on. {todo if same else _INSTEAD}"
    )
