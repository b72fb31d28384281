"""Declares fields of configurations with their effect and valid range, beside type and default.

A subclass that only sets another default keeps effect and range:

    hidden_size: int = field(4096, "structure", least=1)
    hidden_size: int = 5120

transformers' layout (`to_stock`), what `verify` compares, what `params.json` must say, and the checks of numbers follow
from these declarations. A field has the name and the default of transformers' class, where that has one; a
field of ours defaults to what transformers computes.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

from .checks import enumerate_words, fail

Effect = Literal["structure", "function", "training", "none"]

# Far above anything published, and small enough that what is made for each layer, expert or entry takes seconds.
_MOST_OF_STRUCTURE, _MOST = 1 << 20, 1 << 40


class Meaning(NamedTuple):
    """Effect and valid range of a field.

    Attributes:
        effect: what it changes of a forward pass in evaluation, with the same weights and token ids. "function": the
            result. "structure": the result, too, but other weights may make up for it (sizes, heads, experts, the order
            of channels). "training": training only, or what is returned beside the predictions. "none": nothing.
        part: the part of a model that uses it, one of `parts()` of its configuration; None: every model does.
        stock: what transformers' class does with a field of this name. "read": computes with it, if it has the field;
            "ignored": computes with the default, whatever it says; "model type": its model types differ in it.
        least, below, most: the smallest number that is valid, the first one that is too large, and the largest one.
        choices: the valid values; empty where others than these are.
    """

    effect: Effect = "function"
    part: str | None = None
    stock: Literal["read", "ignored", "model type"] = "read"
    least: float | None = None
    below: float | None = None
    most: float = _MOST
    choices: tuple[Any, ...] = ()

    @property
    def has_effect(self) -> bool:
        """Whether the field changes what a model computes in evaluation."""
        return self.effect in ("structure", "function")

    def check(self, owner: Any, name: str, value: Any) -> None:
        """Raise a `ConfigurationError` for a value that is no choice, or a number or length of a list out of range."""
        if self.choices and value not in self.choices:
            fail(owner, name, value, "no such choice", enumerate_words(map(repr, self.choices)))
        if isinstance(value, (list, tuple, dict)) and len(value) > _MOST_OF_STRUCTURE:
            fail(owner, name, value, "is beyond reason", f"at most {_MOST_OF_STRUCTURE} entries")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        is_above = self.least is None or self.least <= value
        if not (is_above and value <= self.most and (self.below is None or value < self.below)):
            least = "" if self.least is None else f"at least {self.least} and "
            most = f"at most {self.most}" if self.below is None else f"below {self.below}"
            fail(owner, name, value, "out of range", least + most)


def field(default: Any, effect: Effect, **more: Any) -> Any:
    """Declare a field of a configuration; for the arguments see `Meaning`."""
    more.setdefault("most", _MOST_OF_STRUCTURE if effect == "structure" else _MOST)
    return dataclasses.field(default=default, metadata={"meaning": Meaning(effect, **more)})


def fields_without_effect(config: Any) -> set[str]:
    """Return the names of the fields that do not change what this model computes in evaluation."""
    parts = config.parts()
    return {
        name
        for name, meaning in config.meanings.items()
        if not meaning.has_effect or (meaning.part is not None and meaning.part not in parts)
    }
