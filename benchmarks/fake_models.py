"""Models of published sizes on a card that is not there (`fake_cards`): few layers, all formats, also with LoRA."""

import itertools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.initialization import no_init_weights

import llamoe

from .fake_cards import Counts, Recorder, on_host

FAMILIES = {
    "dense": ("llama-2-70b", 2),
    "mixtral": ("mixtral-8x7b", 2),
    # Three layers with chunks and one without positions.
    "llama4": ("llama-4-scout", 4),
    "llama4-pictures": ("llama-4-scout", 4),
}
"""By name the preset and the number of layers."""
FORMATS = ("bf16", "int4", "int8", "nf4")
RANK = 8


def config_of(family: str, attention: str) -> PreTrainedConfig:
    """The configuration of a family, with few layers."""
    name, layers = FAMILIES[family]
    text = {"num_hidden_layers": layers}
    if family == "llama4-pictures":
        vision = {"num_hidden_layers": 2}
        return llamoe.preset(name, text_config=text, vision_config=vision, attn_implementation=attention)
    if family == "llama4":
        config = llamoe.preset(name, text_config=text).text_config
        return type(config)(**config.to_dict(), attn_implementation=attention)
    return llamoe.preset(name, **text, attn_implementation=attention)


def build(
    family: str,
    weights: str = "bf16",
    attention: str = "sdpa",
    lora: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """A model on the fake card, in inference."""
    config = config_of(family, attention)
    classes = {
        "dense": llamoe.LlamoeDenseForCausalLM,
        "mixtral": llamoe.LlamoeMixtralForCausalLM,
        "llama4": llamoe.LlamoeForCausalLM,
        "llama4-pictures": llamoe.LlamoeForConditionalGeneration,
    }
    before = torch.get_default_dtype()
    try:
        # Fakes cannot be cast in place.
        torch.set_default_dtype(dtype)
        with on_host(), no_init_weights(), torch.device("meta"):
            model: Any = classes[family](config)
            if weights != "bf16":
                _pack(model, weights, dtype)
            if lora:
                from peft import get_peft_model

                model = get_peft_model(model, llamoe.lora_config(model, r=RANK))
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        _place(module, lora)
    return model.eval()


def _pack(model: nn.Module, weights: str, dtype: torch.dtype) -> None:
    if weights == "nf4":
        from transformers import BitsAndBytesConfig

        from llamoe.modeling.quantization.bnb_quantizers import BitsAndBytes4BitQuantizer

        fields: Any = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        quantizer: Any = BitsAndBytes4BitQuantizer(BitsAndBytesConfig(**fields), pre_quantized=False)
        # By which peft chooses its layers.
        model.is_loaded_in_4bit = True  # pyright: ignore[reportAttributeAccessIssue]
    else:
        from llamoe.modeling.quantization import LlamoeQuantizer

        quantizer = LlamoeQuantizer(llamoe.QuantizationConfig(weights=weights), pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)


def _place(module: nn.Module, lora: bool) -> None:
    """Give a module's own tensors places on the card."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter).__name__ == "Params4bit":
            setattr(module, name, _packed_by_bitsandbytes(module))
        else:
            setattr(
                module, name, nn.Parameter(placed(parameter), requires_grad=parameter.requires_grad and lora)
            )
    for name, buffer in module.named_buffers(recurse=False):
        persistent = name not in module._non_persistent_buffers_set
        module.register_buffer(name, placed(buffer), persistent=persistent)


def _packed_by_bitsandbytes(linear: Any) -> Any:
    from bitsandbytes.functional import QuantState

    size = linear.in_features * linear.out_features
    state = QuantState(
        absmax=torch.empty(size // 64, device="cuda"),
        shape=torch.Size((linear.out_features, linear.in_features)),
        code=torch.empty(16, device="cuda"),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    weight: Any = nn.Parameter(
        torch.empty(size // 2, 1, dtype=torch.uint8, device="cuda"), requires_grad=False
    )
    # Its own class of parameters cannot hold a fake one.
    weight.quant_state, weight.bnb_quantized, linear.quant_state = state, True, state
    return weight


def text_config(model: Any) -> Any:
    """The configuration of a model's decoder."""
    return model.config.get_text_config(decoder=True)


def takes_pictures(model: Any) -> bool:
    """Whether a model has a tower for pictures."""
    return hasattr(model.config, "vision_config")


def prompt(model: Any, length: int, pictures: bool = False) -> dict[str, torch.Tensor]:
    """Inputs of one row, with one picture if asked; values are small numbers in turn."""
    ids = torch.arange(length, device="cuda")[None] % 100 + 3
    inputs = {"input_ids": ids}
    if pictures:
        config = model.config
        vision = config.vision_config
        tokens = model.vision_model.tokens_per_tile if hasattr(model.vision_model, "tokens_per_tile") else 144
        image = torch.full((1, tokens), config.image_token_index, device="cuda")
        inputs["input_ids"] = torch.cat([ids[:, :2], image, ids[:, 2:]], 1)
        size = vision.image_size
        dtype = model.get_input_embeddings().weight.dtype
        inputs["pixel_values"] = torch.empty(1, 3, size, size, dtype=dtype, device="cuda")
    return inputs


def cache_for(model: Any, kind: str, length: int) -> Any:
    """An empty cache, which grows ("dynamic") or has a fixed length ("static")."""
    config = text_config(model)
    return (
        DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=length)
    )


def plain_fakes() -> FakeTensorMode:
    """Fake tensors that count nothing, as a compiler takes them."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers."""
    return [module for module in model.modules() if type(module).__name__ == "DecoderLayer"]


@torch.no_grad()
def decode_step(
    recorder: Recorder, model: Any, kind: str = "dynamic", length: int = 40, **inputs: Any
) -> dict[str, Any]:
    """Counts of one token behind a prompt: of the whole step, and launches in each layer.

    Args:
        recorder: of the card.
        model: on it.
        kind: of the cache.
        length: of the prompt.
        **inputs: more of the step's inputs.

    Returns:
        `counts` of the step, and of its layers `launches_a_layer` and `bytes_a_weight` (of those that are multiplied).
    """
    given = prompt(model, length, takes_pictures(model))
    cache = cache_for(model, kind, given["input_ids"].shape[1] + 24)
    model(**given, past_key_values=cache, logits_to_keep=1)
    layers, inside, begun = layers_of(model), [0.0, 0.0], [0.0, 0.0]

    def enter(*_: Any) -> None:
        begun[:] = recorder.counts.launches, recorder.counts.moved

    def leave(*_: Any) -> None:
        now = recorder.counts.launches, recorder.counts.moved
        inside[:] = [sum_ + new - old for sum_, new, old in zip(inside, now, begun, strict=True)]

    step = given["input_ids"][:, -1:]
    if not inputs:
        # What is kept from step to step is made in the first.
        model(step, past_key_values=cache)
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    with recorder.counting() as counts:
        model(step, past_key_values=cache, **inputs)
    for hook in hooks:
        hook.remove()
    return {
        "counts": counts,
        "launches_a_layer": inside[0] / len(layers),
        "bytes_a_weight": inside[1] / active_weights(model),
    }


@torch.no_grad()
def prefill(recorder: Recorder, model: Any, length: int, behind: int = 0) -> Counts:
    """Counts of a prompt, behind some cached tokens; each with a picture where the model takes pictures."""
    cache, pictures = cache_for(model, "dynamic", 0), takes_pictures(model)
    if behind:
        model(**prompt(model, behind, pictures), past_key_values=cache, logits_to_keep=1)
    with recorder.counting() as counts:
        model(**prompt(model, length, pictures), past_key_values=cache, logits_to_keep=1)
    return counts


def active_weights(model: Any) -> int:
    """Numbers of the matrices that one token multiplies in the layers, packed or not."""
    config, total = text_config(model), 0
    for path, module in itertools.chain.from_iterable(layer.named_modules() for layer in layers_of(model)):
        name = type(module).__name__
        if ".lora_" in path:
            continue
        if hasattr(module, "takes_llamoe_paths"):
            hit = getattr(config, "num_experts_per_tok", 1)
            total += hit * sum(_product(module.sizes_of(stack)) for stack in ("gate_up_proj", "down_proj"))
        elif name == "Router":
            total += module.weight.numel()
        elif hasattr(module, "in_features") and not hasattr(module, "base_layer"):
            total += module.in_features * module.out_features
    return total


def _product(sizes: Any) -> int:
    return sizes[0] * sizes[1]
