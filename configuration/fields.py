"""Declare fields of configurations with their effect and valid range, beside type and default.

A subclass that only sets another default keeps effect and range:

    hidden_size: int = field(4096, "structure", least=1)
    hidden_size: int = 5120

Several things follow from these declarations: the checks of numbers, which fields `to_stock` writes, what `verify`
compares, and what a `params.json` must say. If transformers' class has a field, ours has its name and default. Fields
that only llamoe has default to what transformers computes.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

from .checks import enumerate_words, fail

Effect = Literal["structure", "function", "training", "none"]

# Far above any published size, and small enough that a loop over layers or experts takes only seconds.
_MOST_OF_STRUCTURE, _MOST = 1 << 20, 1 << 40


class Meaning(NamedTuple):
    """Effect and valid range of a field.

    Attributes:
        effect: what changes if the field changes, in evaluation with the same weights and token ids. "function": the
            predictions. "structure": the predictions, too, but a model with other weights may give the old ones (sizes,
            heads, experts, the order of channels). "training": only training, or outputs beside the predictions.
            "none": nothing.
        part: the part of the model that uses the field, one of `parts()` of its configuration; None if all models do.
        stock: what transformers' class does with a field of this name. "read": it uses the value, if it has the field.
            "ignored": it uses the default, whatever the value. "model type": other values are other model types.
        least, most: the smallest and the largest valid number.
        below: the smallest number that is too large; None to use `most`.
        choices: all valid values; empty if `choices` does not limit them.
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
        """Return True if the field changes what a model computes in evaluation."""
        return self.effect in ("structure", "function")

    def check(self, owner: Any, name: str, value: Any) -> None:
        """Raise a `ConfigurationError` if the value is not one of the choices, or is a number out of range."""
        if self.choices and value not in self.choices:
            fail(owner, name, value, "no such choice", enumerate_words(map(repr, self.choices)))
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
