"""Read and write `params.json`, and `llamoe.json` for fields that `params.json` lacks.

Meta's code may refuse unknown keys in `params.json`, and has no keys for some fields of our configurations. So a
`params.json` that is to be written is first read back as Meta's code would read it, and compared with the
configuration. A field that differs is refused by name if it changes what the model computes. Otherwise (context length,
token ids, training options) it is written to `llamoe.json`, which only llamoe reads.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ...configuration.base import LlamoeBaseConfig
from ...configuration.checks import fail
from ...configuration.errors import CheckpointError
from ...configuration.fields import fields_without_effect
from ..io import read_json

KEPT = "llamoe.json"
# Fields that `llamoe.json` always has, since without them a reader guesses by the folder's name or the generation.
_ALWAYS_KEPT = frozenset(
    "max_position_embeddings pad_token_id bos_token_id eos_token_id boi_token_index eoi_token_index "
    "image_token_index".split()
)


@dataclass(frozen=True)
class Params:
    """The entries of a `params.json` that are not null; its methods check them and name a wrong entry and its file."""

    entries: Mapping[str, Any]
    origin: str

    @classmethod
    def of(cls, content: Mapping[str, Any], origin: str) -> "Params":
        """Take the content of a file, which some files nest under "model"."""
        nested = content.get("model")
        content = nested if isinstance(nested, Mapping) else content
        return cls(_without_nulls(content), origin)

    def completed(self, **entries: Any) -> "Params":
        """Return a copy in which entries are added or replaced; those that are None are ignored."""
        return replace(self, entries={**self.entries, **_without_nulls(entries)})

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def reject(self, name: str, expected: str) -> NoReturn:
        """Raise a `CheckpointError` for a wrong or missing entry."""
        entry = f"{name} = {self.entries[name]!r}" if name in self else f"{name} is missing"
        raise CheckpointError(f"{self.origin}: {entry}; expected: {expected}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Read a whole number of at least 1."""
        value = self.number(name, default)
        if not value.is_integer():
            self.reject(name, "a whole number")
        return int(value)

    def optional_integer(self, name: str) -> int | None:
        """Read a whole number of at least 1; None if it is absent or 0."""
        return self.integer(name) if self.entries.get(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number above 0."""
        value = self.entries.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.reject(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read a truth value, which some releases write as an integer."""
        return bool(self.entries.get(name, default))

    def part(self, name: str) -> "Params | None":
        """Read a nested object; None if it is absent."""
        value = self.entries.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.reject(name, "an object")
        return Params(_without_nulls(value), f"{self.origin}: {name}")

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.integer("head_dim", self.integer("dim") // self.integer("n_heads") or 1)


def _without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


@contextmanager
def naming(params: Params) -> Iterator[None]:
    """Enter a context in which a configuration's `ValueError` becomes a `CheckpointError` that names `params.json`."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{params.origin}: {error}") from error


def read_decoder(params: Params) -> dict[str, Any]:
    """Read the fields that all decoders have."""
    dim, heads = params.integer("dim"), params.integer("n_heads")
    if "head_dim" not in params and dim % heads:
        params.reject("n_heads", f"a divisor of dim = {dim}")
    return {
        "vocab_size": params.integer("vocab_size"),
        "hidden_size": dim,
        "num_hidden_layers": params.integer("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": params.integer("n_kv_heads", heads),
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": params.number("norm_eps", 1e-5),
        "attention_bias": False,
        "mlp_bias": False,
        **read_dtype(params),
    }


def read_dtype(params: Params) -> dict[str, str]:
    """Return the field `dtype` if `measure` has added it to the parameters, else no field."""
    return {"dtype": params.entries["dtype"]} if "dtype" in params else {}


def kept_fields(config: Any, again: Any) -> dict[str, Any]:
    """Return the fields of `config` that differ in `again`, the configuration read back from `params.json`.

    Raises:
        ValueError: such a field changes what the model computes.
    """
    kept: dict[str, Any] = {}
    free = fields_without_effect(config)
    for name in config.meanings:
        value, read = getattr(config, name), getattr(again, name)
        if isinstance(value, LlamoeBaseConfig):
            if part := kept_fields(value, read):
                kept[name] = part
        elif name in free or (name == "attn_temperature_tuning" and bool(value) == bool(read)):
            if value != read or name in _ALWAYS_KEPT:
                kept[name] = value
        elif name == "rope_parameters":
            mine, its = _rope_content(value), _rope_content(read)
            if mine != its:
                changed = {key: entry for key, entry in mine.items() if its.get(key) != entry}
                fail(config, name, changed, "Meta's code cannot compute it", repr(its))
        elif value != read:
            problem = "Meta's params.json cannot express it, and Meta's code would compute with another value"
            fail(config, name, value, problem, repr(read))
    return kept


def _rope_content(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the rotary parameters on which the rotation depends."""
    parameters = dict(parameters or {})
    names = {"rope_type", "rope_theta"}
    if parameters.get("rope_type") != "default":
        names |= parameters.keys() - {"type"}
    # 1 means that all channels of a head are rotated, as without the entry.
    if parameters.get("partial_rotary_factor") in (None, 1):
        names.discard("partial_rotary_factor")
    return {name: parameters.get(name) for name in names}


def read_kept(config: LlamoeBaseConfig, folder: Path) -> None:
    """Set the fields of a folder's `llamoe.json`, if there is one, in the configuration from `params.json`."""
    if (folder / KEPT).is_file():
        origin = str(folder / KEPT)
        with naming(Params({}, origin)):
            add_kept(config, read_json(folder / KEPT), origin)
            config.validate()


def add_kept(config: LlamoeBaseConfig, kept: Mapping[str, Any], origin: str) -> None:
    """Set the fields of a `llamoe.json`.

    Raises:
        CheckpointError: a field changes what the model computes, which params.json and the tensors alone decide.
    """
    free = fields_without_effect(config)
    for name, part in kept.items():
        if name in getattr(config, "sub_configs", {}) and isinstance(part, Mapping):
            add_kept(getattr(config, name), part, f"{origin}: {name}")
            continue
        same = name == "attn_temperature_tuning" and bool(part) == bool(getattr(config, name, None))
        if name not in config.meanings or not (name in free or same):
            raise CheckpointError(
                f"{origin}: {name} = {part!r} is not a field that this file may hold: params.json and the tensors "
                "decide what the model computes. Remove it."
            )
        setattr(config, name, part)
