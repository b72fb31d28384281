"""What peft may do beside quantized weights: add to their products, and train what it adds.

Their codes are integers, which peft takes for numbers: some of its methods compute from them without an error. So what
reads or changes a weight is refused before anything changes; `model.dequantize()` makes weights that allow it.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from ..quantization import QuantizedLinear

# peft's methods that compute from a layer's inputs and outputs alone.
_ADDING_METHODS = {
    *("ADALORA", "BEFT", "BOFT", "C3A", "FOURIERFT", "GRALORA", "IA3", "LILY", "LORA"),
    *("MISS", "OFT", "PVERA", "RANDLORA", "ROAD", "VBLORA", "VERA", "WAVEFT"),
}
_INITIALISATIONS = (None, True, False, "gaussian", "eva")
# Fields of a LoraConfig that ask for a variant with the weight's numbers.
_VARIANTS = ("use_dora", "kasa_config", "velora_config")


def refuse_for_packed(config: Any, model: nn.Module, parameters: Collection[str]) -> None:
    """Refuse what reads or changes packed weights: methods, beginnings, variants, copies of modules (`ValueError`)."""
    packed = dict(_packed(model))
    for saved in getattr(config, "modules_to_save", None) or ():
        for name, module in packed.items():
            parts = name.split(".")
            if any(".".join(parts[:end]).endswith(saved) for end in range(1, len(parts) + 1)):
                raise ValueError(
                    f"modules_to_save names {saved!r}, but {name} is {module.storage}, which does not "
                    f"train: adapt it with LoRA, or {_numbers_of(module)} first."
                )
    for name, module in packed.items():
        by_parameter = any(key.rpartition(".")[0] == name for key in parameters)
        if not by_parameter and not _is_target(config, name):
            continue
        if asked := _what_needs_numbers(config, name, module, by_parameter):
            raise ValueError(
                f"{asked} needs the numbers of {name}, which is {module.storage}: choose LoRA with "
                f'init_lora_weights=True or "gaussian", or {_numbers_of(module)} first.'
            )


def _numbers_of(module: Any) -> str:
    """What makes of a module one with numbers in memory."""
    is_offloaded = getattr(module, "is_offloaded", False)
    return "load the model into memory" if is_offloaded else "call model.dequantize()"


def _packed(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each packed module, by its name without those of adapters around it."""
    for name, module in model.named_modules():
        if getattr(module, "storage", None) is not None:
            yield name.replace(".base_layer", ""), module


def _is_target(config: Any, name: str) -> bool:
    from peft.tuners.tuners_utils import check_target_module_exists

    return bool(getattr(config, "target_modules", None) and check_target_module_exists(config, name))


def _what_needs_numbers(config: Any, name: str, module: Any, by_parameter: bool) -> str | None:
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method not in _ADDING_METHODS:
        return method
    if isinstance(module, QuantizedLinear) and by_parameter:
        return f"target_parameters, unlike target_modules={[name.rpartition('.')[2]]},"
    if (begin := getattr(config, "init_lora_weights", None)) not in _INITIALISATIONS:
        return f"init_lora_weights={begin!r}"
    # Of MiSS the one form that multiplies the weight.
    if getattr(config, "init_weights", None) == "bat":
        return 'init_weights="bat"'
    variant = next((field for field in _VARIANTS if getattr(config, field, None)), None)
    return None if variant is None else f"{variant}={getattr(config, variant)!r}"


def refuse_merging(module: nn.Module) -> None:
    """Refuse to merge adapters of a model, or one of peft's layers, into packed weights (`ValueError`)."""
    adapted = (
        (name, layer.get_base_layer())
        for name, layer in module.named_modules()
        if hasattr(layer, "get_base_layer")
    )
    found = [(name, base) for name, base in adapted if getattr(base, "storage", None) is not None]
    # What is offloaded cannot be dequantized either.
    for name, base in sorted(found, key=lambda each: not getattr(each[1], "is_offloaded", False)):
        how = "the 16-bit model in memory, which get_base_model().dequantize() makes of a quantized one"
        if getattr(base, "is_offloaded", False):
            how = "a model that from_pretrained loads into memory, without device_map and experts_memory"
        raise ValueError(
            f"{name or type(base).__name__} is {base.storage}, into which no adapter can be merged: merge into {how}, "
            "or save the adapter alone."
        )
