"""Which weights are quantized, and how: llamoe's own formats, made for the CPU's kernels."""

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .errors import ConfigurationError

METHOD = "llamoe"
"""The `quant_method` in a folder's config.json."""
FORMAT_VERSION = 1
"""Version of the layout of packed tensors in files. A newer one is refused."""
WEIGHTS = ("int4", "int8")
ACTIVATIONS = ("int8", "float")
GROUP_SIZES = (32, 64, 128, 256)
"""Numbers of inputs that may share a scale."""


class QuantizationConfig(QuantizationConfigMixin):
    """Routed experts and linear layers of the decoder in 4 or 8 bits, for `from_pretrained(quantization_config=…)`.

    Embeddings, output head, norms, routers, vision tower and projector stay in 16 bit. Products are computed in
    bfloat16, to which a model of another dtype is cast.

    For a folder that is quantized already it chooses `activations` alone; transformers warns that all else is ignored.

    Attributes:
        weights: "int4" (a scale and a zero point for each group of inputs; the default) or "int8" (a scale for each
            output).
        group_size: for int4: inputs that share a scale; 32, 64, 128 or 256. None for int8.
        experts: whether routed experts are quantized.
        linears: whether linear layers are quantized.
        search: whether scales are chosen that minimise the squared error; without, they span the largest weights. Only
            quantizing knows it, not a stored folder.
        activations: what llamoe's kernels for CPUs do to rows: "int8" (the default) quantizes them to 8 bits, with a
            scale for each 32 inputs, which is up to twice as fast; "float" leaves them as they are, as training does.
        modules_to_not_convert: a name, or names, of more modules that stay in 16 bit, with or without what stands
            before `layers`, or the ends of their names; or None.
        format_version: version of the layout in files.
    """

    # No field of the dict: names of what was given, since defaults ask for nothing of a folder.
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
        # transformers' own methods are an enumeration, others are texts.
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
        # `quant_method` is what transformers writes beside our fields.
        if kwargs.pop("quant_method", METHOD) != METHOD:
            raise ConfigurationError(f"QuantizationConfig is for quant_method={METHOD!r} alone.")
        self._check(kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, without a default `activations`, which earlier versions cannot read."""
        fields = super().to_dict()
        if fields.get("activations") == ACTIVATIONS[0]:
            del fields["activations"]
        return fields

    def _check(self, unknown: dict[str, Any]) -> None:
        version, size, names = self.format_version, self.group_size, self.modules_to_not_convert
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise ConfigurationError(
                f"quantization_config has format_version={version!r}, but this llamoe reads up to {FORMAT_VERSION}: "
                "update llamoe, or load the unquantized checkpoint."
            )
        if unknown:
            raise ConfigurationError(f"QuantizationConfig has no {', '.join(sorted(unknown))}.")
        is_group = type(size) is int and size in GROUP_SIZES
        are_names = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
        valid = {
            "weights": (self.weights in WEIGHTS, " or ".join(map(repr, WEIGHTS))),
            "activations": (self.activations in ACTIVATIONS, " or ".join(map(repr, ACTIVATIONS))),
            "group_size": (
                is_group if self.weights == "int4" else size is None,
                f"{', '.join(map(str, GROUP_SIZES))} for int4; None for int8",
            ),
            "linears": (isinstance(self.linears, bool), "True or False"),
            "search": (isinstance(self.search, bool), "True or False"),
            "experts": (
                isinstance(self.experts, bool) and (self.experts or self.linears),
                "True, or False where linears are quantized",
            ),
            "modules_to_not_convert": (names is None or are_names, "a list of modules' names"),
        }
        for name, (is_valid, what) in valid.items():
            if not is_valid:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: choose {what}.")


def as_quantization(given: "QuantizationConfig | str | None") -> QuantizationConfig | None:
    """Convert a text to a `QuantizationConfig`: "int8", "int4", or "int4:128" with the size of its groups.

    Raises:
        ConfigurationError: no such format.
    """
    if given is None or isinstance(given, QuantizationConfig):
        return given
    weights, _, size = str(given).partition(":")
    if weights not in WEIGHTS or not isinstance(given, str) or (size and not size.isdecimal()):
        raise ConfigurationError(
            f'quantization={given!r}: give a QuantizationConfig, or "int8", "int4" or "int4:128", whose groups have '
            "128 inputs."
        )
    return QuantizationConfig(weights, int(size) if size else None)
