"""Checks of configurations, and the form of their errors.

Every error is a `ValueError` of one form, `Class.field = value: what is wrong; valid: what would be accepted`: a
person can act on it without reading this source, and a program can match it.
"""

import difflib
import math
import re
import reprlib
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

from .errors import ConfigurationError

# Kinds of layers, for which transformers has keys in other models' rope_parameters.
LAYER_TYPES = ("full_attention", "chunked_attention", "sliding_attention")

_LONGEST_VALUE = 120
# Which unknown names are compared with the fields: how alike (1 is the same), how long, and how many.
_NEARLY = 0.85
_LONGEST_NAME = 64
_MOST_NAMES = 100

# Upper limits of sizes. Each is far above anything published, and small enough that what a configuration creates
# (lists with an entry a layer, empty modules, counts) takes seconds.
_LIMITS = {
    4096: ("num_hidden_layers",),
    1 << 16: (
        "num_attention_heads", "num_key_value_heads", "head_dim", "num_local_experts", "image_size", "patch_size",
        "num_channels",
    ),
    1 << 20: (
        "hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim", "projection_dim",
        "num_labels",
    ),
    1 << 24: ("intermediate_size", "intermediate_size_mlp"),
    1 << 26: ("vocab_size",),
    1 << 40: (
        "max_position_embeddings", "attention_chunk_size", "sliding_window", "floor_scale", "interleave_moe_layer_step",
        "no_rope_layer_interval",
    ),
}  # fmt: skip
MOST = {name: limit for limit, names in _LIMITS.items() for name in names}
# Limit of lists and dictionaries, whose entries belong to layers, tokens or labels.
_MOST_ENTRIES = 1 << 20


def fail(config: Any, field: str, value: Any, problem: str, valid: str) -> NoReturn:
    """Raise the error for one field of a configuration or its class: what is wrong, and what would be accepted.

    The field's name has an index or key in brackets if the fault lies inside it.
    """
    owner = config.__name__ if isinstance(config, type) else type(config).__name__
    try:
        is_long = isinstance(value, (str, list, tuple, dict)) and len(value) > 10 * _LONGEST_VALUE
        shown = reprlib.repr(value) if is_long else repr(value)
    # Endless nesting, or integers of thousands of digits.
    except (RecursionError, ValueError):
        shown = f"a {type(value).__name__}"
    if len(shown) > _LONGEST_VALUE:
        shown = f"{shown[:_LONGEST_VALUE]}…"
    raise ConfigurationError(f"{owner}.{field} = {shown}: {problem}; valid: {valid}")


def enumerate_words(words: Iterable[Any]) -> str:
    """The words joined as in a sentence: `1, 2, 3 or 6`."""
    words = [str(word) for word in words]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def listed(names: Iterable[Any], limit: int = 5) -> str:
    """The first names, and how many more there are: `a, b, c, d, e and 7 more`."""
    names = [str(name) for name in names]
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def find_misspelt(given: Iterable[str], known: Container[str], fields: Sequence[str]) -> dict[str, str]:
    """Names that nearly spell a field, each with that field; those in `known` mean something as they are.

    Of a file with names without end the first ones are looked into.
    """
    unknown = (name for name in given if name not in known and len(name) <= _LONGEST_NAME)
    found = {}
    for name in islice(unknown, _MOST_NAMES):
        if near := difflib.get_close_matches(name.lower(), fields, n=1, cutoff=_NEARLY):
            found[name] = near[0]
    return found


def check_size(config: Any, name: str, value: Any) -> None:
    """Refuse an unreasonably large size for a field, before anything is created from it."""
    if type(value) is int:
        most = MOST.get(name)
        if most is not None and value > most:
            fail(config, name, value, "is beyond reason", f"at most {most}")
    elif isinstance(value, (list, tuple, Mapping)) and len(value) > _MOST_ENTRIES:
        problem = f"{len(value)} entries are beyond reason"
        fail(config, name, value, problem, f"at most {_MOST_ENTRIES}")


def check_positive(config: Any, *names: str) -> None:
    """Demand that every named field that is set is at least 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            fail(config, name, value, "must be positive", "an integer of at least 1")


def check_not_negative(config: Any, *names: str) -> None:
    """Demand that every named field that is set is at least 0, and a number: neither NaN nor infinite."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            problem = "must be finite" if value == math.inf else "must not be negative"
            fail(config, name, value, problem, "a finite number of at least 0")


def check_probability(config: Any, *names: str) -> None:
    """Demand that every named field that is set lies in [0, 1): a dropout of 1 would leave nothing."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            fail(config, name, value, "out of range", "a number from 0 up to, not including, 1")


def check_heads(config: Any) -> None:
    """Demand that every key/value head serves the same number of query heads."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        problem = f"must divide num_attention_heads = {heads}"
        fail(config, "num_key_value_heads", kv_heads, problem, enumerate_words(divisors))


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` next to a value, in words."""
    below = value // step * step
    return enumerate_words([multiple for multiple in (below, below + step) if multiple > 0])


def derive_head_dim(config: Any) -> int:
    """Width of a head if the configuration names none: the hidden size split evenly.

    It runs before the checks of the single fields, and so checks the divisor itself.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    check_positive(config, "hidden_size", "num_attention_heads")
    if hidden % heads:
        problem = f"must be a multiple of num_attention_heads = {heads} when head_dim is not given"
        valid = f"{nearest_multiples(hidden, heads)}, or any size with head_dim set"
        fail(config, "hidden_size", hidden, problem, valid)
    return hidden // heads


def check_rope_parameters(config: Any, rotary_multiple: int) -> None:
    """Demand a rotary embedding that transformers knows and that fits the head.

    The head's width must be a multiple of `rotary_multiple`: 2 in a decoder (pairs of channels), 4 for patches (pairs,
    half of them for each axis).
    """
    parameters = config.rope_parameters
    for name, value in parameters.items():
        numbers = (
            value if isinstance(value, (list, tuple)) else [] if name in ("rope_type", "type") else [value]
        )
        if not all(map(_is_number, numbers)):
            valid = "a finite number, or a list of them"
            problem = "must be finite" if value in (math.inf, -math.inf) else "is not a number"
            fail(config, f"rope_parameters[{name!r}]", value, problem, valid)
    rope_type = parameters.get("rope_type")
    # "axial" is for models that rotate by several coordinates at once.
    if rope_type == "axial" or not hasattr(config, f"_validate_{rope_type}_rope_parameters"):
        names = (re.fullmatch(r"_validate_(\w+)_rope_parameters", name) for name in dir(config))
        known = sorted({match[1] for match in names if match} - {"axial"})
        problem = "unknown kind of rotary scaling"
        fail(config, "rope_parameters['rope_type']", rope_type, problem, enumerate_words(known))
    theta = parameters.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        valid = "a number above 0, such as 10000.0"
        problem = "must be finite" if theta == math.inf else "must be positive"
        fail(config, "rope_parameters['rope_theta']", theta, problem, valid)
    if config.head_dim % rotary_multiple:
        problem = "rotary embedding turns channels in pairs"
        if rotary_multiple == 4:
            problem += ", as many for the rows as for the columns"
        fail(config, "head_dim", config.head_dim, problem, f"a multiple of {rotary_multiple}")
    factor = parameters.get("partial_rotary_factor")
    if rope_type != "proportional" and factor not in (None, 1, 1.0):
        problem = "these models rotate the whole head"
        valid = "1.0, or rope_type 'proportional'"
        fail(config, "rope_parameters['partial_rotary_factor']", factor, problem, valid)


def _is_number(value: Any) -> bool:
    """Whether a rotary parameter is a usable number; None and truth values mean "not used"."""
    return value is None or isinstance(value, (int, float)) and abs(value) < 1e100


def check_layer_types(config: Any, local: str) -> None:
    """Demand a list with a kind of attention for each layer: full, or `local`."""
    _check_entries(config, "layer_types")
    known = ("full_attention", local)
    for idx, kind in enumerate(config.layer_types):
        if kind not in known:
            valid = enumerate_words(map(repr, known))
            fail(config, f"layer_types[{idx}]", kind, "unknown kind of attention", valid)


def check_local_size(config: Any, local: str, size: str) -> None:
    """Demand the number of tokens that layers of the kind `local` see, if there are any."""
    if local in config.layer_types and (getattr(config, size) or 0) < 1:
        problem = f"layer_types asks for {local}"
        valid = "a number of tokens; or make all layer_types full_attention"
        fail(config, size, getattr(config, size), problem, valid)


def _check_entries(config: Any, name: str) -> None:
    value, count = getattr(config, name), config.num_hidden_layers
    if len(value) != count:
        problem = f"has {len(value)} entries for num_hidden_layers = {count}"
        fail(config, name, value, problem, f"a list of {count}, or None to derive it")


def check_layer_lists(config: Any) -> None:
    """Demand that the lists of layers without rotation and of mixtures fit the number of layers."""
    _check_entries(config, "no_rope_layers")
    count = config.num_hidden_layers
    named: set[int] = set()
    for position, idx in enumerate(config.moe_layers):
        name = f"moe_layers[{position}]"
        if idx < 0:
            fail(config, name, idx, "layers are counted from 0", f"0 to {count - 1}")
        if idx in named:
            fail(config, name, idx, "named twice", "each layer once")
        named.add(idx)
