"""Configuration of llamoe's own quantized formats, which its kernels for CPUs and GPUs multiply."""

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .errors import ConfigurationError

METHOD = "llamoe"
"""The `quant_method` in a folder's config.json."""
FORMAT_VERSION = 1
"""Version of the layout of packed tensors in files. Newer versions are refused."""
WEIGHTS = ("int4", "int8")
ACTIVATIONS = ("int8", "float")
GROUP_SIZES = (32, 64, 128, 256)
"""Numbers of inputs that may share a scale."""


class QuantizationConfig(QuantizationConfigMixin):
    """Routed experts and linear layers of the decoder in 4 or 8 bits, for `from_pretrained(quantization_config=…)`.

    Embeddings, output head, norms, routers, vision tower and projector stay in 16 bits. Products are computed in
    bfloat16, to which a model of another dtype is cast.

    For a folder that is quantized already only `activations` counts: transformers warns that it ignores other fields.

    Attributes:
        weights: "int4" (a scale and a zero point for each group of inputs; the default) or "int8" (a scale for each
            output).
        group_size: number of inputs that share a scale in int4: 32 (the default), 64, 128 or 256. None for int8.
        experts: whether routed experts are quantized.
        linears: whether linear layers are quantized.
        search: whether to search the scales with the least squared error. If not, scales follow from the largest
            weights. It has no effect on a folder that is quantized already.
        activations: precision of the inputs of llamoe's kernels for CPUs. "int8" (the default) quantizes inputs to 8
            bits, with a scale for each 32 of them, which is up to twice as fast. "float" does not quantize them;
            training never does.
        modules_to_not_convert: names of further modules that stay in 16 bits, or one name, or None. A name may begin
            at `layers`, and the end of a name is enough.
        format_version: version of the layout in files.
    """

    # Names of the arguments that were not None: only these are compared with a quantized folder. Not part of the dict.
    __slots__ = ("given",)

    def __init__(
        self,
        weights: str | None = None,
        group_size: int | None = None,
        experts: bool = True,
        linears: bool = True,
        search: bool = True,
        modules_to_not_convert: list[str] | str | None = None,
        format_version: int = FORMAT_VERSION,
        activations: str | None = None,
        **kwargs: Any,
    ):
        chosen = dict(weights=weights, group_size=group_size, activations=activations)
        self.given = {name for name, value in chosen.items() if value is not None}
        # transformers' own methods are members of an enumeration, others are texts.
        self.quant_method: Any = METHOD
        self.weights = WEIGHTS[0] if weights is None else weights
        self.group_size = 32 if group_size is None and self.weights == "int4" else group_size
        self.experts = experts
        self.linears = linears
        self.search = search
        names = modules_to_not_convert
        self.modules_to_not_convert = [names] if isinstance(names, str) else names
        self.format_version = format_version
        self.activations = ACTIVATIONS[0] if activations is None else activations
        # transformers adds `quant_method` to the fields when it saves.
        if (method := kwargs.pop("quant_method", METHOD)) != METHOD:
            raise ConfigurationError(f"quant_method={method!r}: QuantizationConfig is only for {METHOD!r}.")
        self._check(kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, without `activations` if it is the default: older versions do not read it."""
        fields = super().to_dict()
        if fields.get("activations") == ACTIVATIONS[0]:
            del fields["activations"]
        return fields

    def _check(self, unknown: dict[str, Any]) -> None:
        version, size, names = self.format_version, self.group_size, self.modules_to_not_convert
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise ConfigurationError(
                f"quantization_config has format_version={version!r}, but this llamoe reads versions up to "
                f"{FORMAT_VERSION}: update llamoe, or load the checkpoint that is not quantized."
            )
        if unknown:
            raise ConfigurationError(f"QuantizationConfig has no field {', '.join(sorted(unknown))}.")
        is_group = type(size) is int and size in GROUP_SIZES
        are_names = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
        valid = {
            "weights": (self.weights in WEIGHTS, " or ".join(map(repr, WEIGHTS))),
            "activations": (self.activations in ACTIVATIONS, " or ".join(map(repr, ACTIVATIONS))),
            "group_size": (
                is_group if self.weights == "int4" else size is None,
                f"{', '.join(map(str, GROUP_SIZES))} for int4; None for int8",
            ),
            "experts": (self.experts or self.linears, "True if linears is False"),
            "modules_to_not_convert": (names is None or are_names, "a list of names of modules"),
        }
        for name, (is_valid, choices) in valid.items():
            if not is_valid:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: choose {choices}.")


def as_quantization(quantization: "QuantizationConfig | str | None") -> QuantizationConfig | None:
    """Convert a text to a `QuantizationConfig`: "int8", "int4", or "int4:128" for groups of 128 inputs.

    Raises:
        ConfigurationError: there is no such format.
    """
    if quantization is None or isinstance(quantization, QuantizationConfig):
        return quantization
    weights, _, size = str(quantization).partition(":")
    if weights not in WEIGHTS or (size and not size.isdecimal()):
        raise ConfigurationError(
            f'quantization={quantization!r}: give a QuantizationConfig, or "int8", "int4" or "int4:128", whose groups '
            "have 128 inputs."
        )
    return QuantizationConfig(weights, int(size) if size else None)
