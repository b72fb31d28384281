"""Base of the configurations: strict fields, and stock transformers configurations as valid input.

transformers makes every configuration a dataclass. Three of its habits are changed here:

* `huggingface_hub`'s `strict` checks types on each assignment but raises an exception that is no `ValueError`; ours
  are `ValueError`s that name field, value and what is valid. Every subclass is strict without a decorator.
* A dictionary of another model type only draws a warning there, and its `model_type` then hides the class's own. Here
  each class names the types that it reads; others are errors, and an instance's type never changes.
* Overrides given to `from_dict` and `from_pretrained` are set unchecked there, after derived fields were computed.
  Here they are applied before, and checked.

Annotations in these modules must not be strings, because `strict` skips those.
"""

import copy
import difflib
import functools
import inspect
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import CONFIG_NAME, logging

from .checks import enumerate_words, fail
from .errors import CheckpointError, ConfigurationError
from .fields import Meaning
from .hub import AUTO_CLASSES, entries_of_others, is_ours, write_config
from .json_files import read_json

logger = logging.get_logger(__name__)

# Model type, ours or stock, to the configuration of ours that reads it; each class enters itself.
READERS: dict[str, type["LlamoeBaseConfig"]] = {}

# Stock model classes and ours. Heads over a multimodal trunk have only one class in stock.
ARCHITECTURES = {
    **{
        name.replace(ours, family): name
        for family, ours, model_type in (
            ("Ministral", "LlamoeDense", "llamoe_dense"),
            ("Mistral", "LlamoeDense", "llamoe_dense"),
            ("Llama", "LlamoeDense", "llamoe_dense"),
            ("Mixtral", "LlamoeMixtral", "llamoe_mixtral"),
        )
        for name in AUTO_CLASSES[model_type].values()
    },
    "Llama4TextModel": "LlamoeTextModel",
    "Llama4ForCausalLM": "LlamoeForCausalLM",
    "Llama4VisionModel": "LlamoeVisionModel",
    "Llama4ForConditionalGeneration": "LlamoeForConditionalGeneration",
}

# Names of the fields of all configurations: a field of the whole may stand in a part, and the reverse. transformers 4
# wrote the first.
_KNOWN_NAMES = {"tie_encoder_decoder", "num_labels"}


def as_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """Return any configuration as keyword arguments, with the backends that `to_dict` leaves out."""
    data = config.to_dict()
    for name in ("attn_implementation", "experts_implementation"):
        if (value := getattr(config, f"_{name}", None)) is not None:
            data[name] = value
    # For a stock model without grouped experts transformers writes "eager" by itself. In our configurations "eager"
    # would be the user's choice, and replace our own implementation.
    if data.get("experts_implementation") == "eager" and not isinstance(config, LlamoeBaseConfig):
        del data["experts_implementation"]
    # AutoConfig would read a file with window and layer_types as Ministral; Mistral has no layer_types.
    if data.get("model_type") == "mistral":
        data.pop("layer_types", None)
    return data


class LlamoeBaseConfig(PreTrainedConfig):
    """Base of our configurations; see the module's text. It has no fields of its own.

    Class attributes:
        model_type: Ours, written to every `config.json`.
        stock_model_type: transformers' model type of the same architecture, accepted as input.
        stock_relatives: Further model types of transformers' that are read.
        feed_forward_name: Name of the feed-forward in a decoder's layers.
        meanings: Name to meaning of each field that is declared in this package.
    """

    stock_model_type: ClassVar[str] = ""
    stock_relatives: ClassVar[tuple[str, ...]] = ()
    feed_forward_name: ClassVar[str] = ""
    meanings: ClassVar[dict[str, Meaning]] = {}
    # Outputs that are not predictions. `Trainer` gathers the others over a whole evaluation, and returns the logits
    # alone if nothing else is left.
    keys_to_ignore_at_inference = [
        "cache",
        "past_key_values",
        "aux_loss",
        "router_logits",
        "expert_load",
        "image_hidden_states",
    ]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        strict(cls)
        # As dataclasses inherit fields.
        inherited: dict[str, Meaning] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited |= getattr(base, "meanings", {})
        cls.meanings = inherited | {
            field.name: field.metadata.get("meaning", inherited.get(field.name, Meaning()))
            for field in fields(cls)
            if field.name in inspect.get_annotations(cls)
        }
        _KNOWN_NAMES.update(cls.__dataclass_fields__, cls.attribute_map)
        _report_as_value_errors(cls)
        if is_ours(cls):
            READERS.update(dict.fromkeys(cls._model_types(), cls))

    @classmethod
    def _model_types(cls) -> list[str]:
        """List the model types that this class reads, ours first."""
        return [name for name in (cls.model_type, cls.stock_model_type, *cls.stock_relatives) if name]

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read a `config.json`, ours or stock; return its content in our terms and the unused arguments."""
        subfolder = kwargs.get("subfolder") or ""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        folder = Path(pretrained_model_name_or_path, subfolder)
        if not config_dict and folder.is_dir() and not (folder / "adapter_config.json").is_file():
            # transformers would use the default configuration.
            raise CheckpointError(
                f"{folder}: no file named config.json in this folder. A folder of Meta's is converted once: "
                f"`llamoe convert {folder} OUT`."
            )
        if config_dict:
            config_dict = cls._read(config_dict) | {"model_type": cls.model_type}
        return config_dict, kwargs

    @classmethod
    def _dict_from_json_file(cls, json_file):
        return read_json(json_file)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Build a configuration from a dictionary, ours or stock; fields among `kwargs` win.

        Args:
            config_dict: The content of a `config.json`; not changed.
            **kwargs: Fields to override, and transformers' own arguments.

        Returns:
            The configuration; with `return_unused_kwargs=True` a pair of it and the arguments that are not fields.
        """
        data = cls._read(config_dict)
        cls._warn_of_misspelt(kwargs)
        names = {field.name for field in fields(cls)} - {"dtype"}
        given = {cls.attribute_map.get(name, name): name for name in kwargs}
        overrides = {field: kwargs.pop(name) for field, name in given.items() if field in names}
        with unreadable_as_value_error(cls):
            return super().from_dict(cls._override(data, overrides), **kwargs)

    @classmethod
    def _override(cls, data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        """Apply overrides; a dictionary for a nested configuration overrides fields inside it."""
        data = dict(data)
        for name, value in overrides.items():
            if name in cls.sub_configs and isinstance(value, dict):
                part = data.get(name) or {}
                part = as_dict(part) if isinstance(part, PreTrainedConfig) else part
                # As ours: an override may be a field that only ours has.
                value = cls.sub_configs[name]._override(cls.sub_configs[name]._read(part), value)
            data[name] = value
        return data

    @classmethod
    def _read(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Convert keyword arguments, ours or of the stock class, to our fields, without a model type."""
        if cls.base_config_key and isinstance(given.get(cls.base_config_key), (dict, PreTrainedConfig)):
            given = cls._part_of(given)
        cls._warn_of_misspelt(given)
        model_type = given.get("model_type")
        cls._check_model_type(model_type)
        if model_type == "mistral" and "layer_types" in given:
            # AutoConfig reads it in the same way.
            model_type = "ministral"
            given = {**given, "model_type": model_type}
        if model_type not in (None, cls.model_type):
            given = cls._from_stock(cls._of_stock_class(CONFIG_MAPPING[model_type], given))
        data = {
            cls.attribute_map.get(name, name): copy.deepcopy(value)
            if isinstance(value, (dict, list))
            else value
            for name, value in given.items()
            # An attribute of classes, of which transformers copies the code when it saves; a file says nothing of it.
            if name not in ("_auto_class", "model_type")
        }
        if data.get("per_layer_config"):
            problem = "layers with fields of their own are not supported"
            fail(cls, "per_layer_config", data["per_layer_config"], problem, "leave it out")
        if isinstance(architectures := data.get("architectures"), list):
            data["architectures"] = [ARCHITECTURES.get(str(name), name) for name in architectures]
        return data

    @classmethod
    def _warn_of_misspelt(cls, given: Iterable[str]) -> None:
        """Warn once of each name that nearly spells a field; unknown ones are kept, as stock keeps them."""
        names = [*(field.name for field in fields(cls)), *cls.attribute_map, "num_labels"]
        # The search takes milliseconds, and usual names are known.
        for name in set(given) - _KNOWN_NAMES:
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.85):
                logger.warning_once(
                    f"{cls.__name__} has no field {name!r}, which changes nothing. Did you mean {near[0]!r}?"
                )

    @classmethod
    def _part_of(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return this class's part of a multimodal configuration, with the fields that the whole sets for all parts."""
        whole = data.get("model_type")
        if whole not in (None, "llama4", "llamoe"):
            cls._check_model_type(whole)
        part = data[cls.base_config_key]
        part = as_dict(part) if isinstance(part, PreTrainedConfig) else dict(part)
        if whole == "llama4":
            part.setdefault("model_type", cls.stock_model_type)
        for name in ("dtype", "torch_dtype", "quantization_config"):
            if data.get(name) is not None and part.get(name) is None:
                part[name] = data[name]
        return part

    @classmethod
    def _of_stock_class(cls, stock: type[PreTrainedConfig], given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that a stock class reads: with its own defaults, and without fields that only we have.

        Other names that only our class has are left out too, and names of methods: kept as attributes they would hide
        the class's own. Names that neither has are kept, as stock keeps them.
        """
        reader = READERS[stock.model_type]
        ours, theirs = ({field.name: field.default for field in fields(config)} for config in (reader, stock))
        stock_names = theirs.keys() | stock.attribute_map.keys()

        def is_foreign(name: str) -> bool:
            is_ours = name in reader.attribute_map or hasattr(reader, name)
            is_stocks = hasattr(stock, name) and not callable(getattr(reader, name, None))
            return is_ours and not (is_stocks or name in stock_names)

        foreign = set(filter(is_foreign, given))
        for name in foreign:
            if given[name] not in (None, ours.get(name)):
                logger.warning_once(
                    f"{name} = {given[name]!r} of this {stock.model_type} configuration is left out: "
                    f"transformers' {stock.__name__} has no such field and computes without it."
                )
        defaults = {name: value for name, value in theirs.items() if value != ours.get(name, value)}
        return defaults | {
            name: value for name, value in _rotating_whole_heads(given).items() if name not in foreign
        }

    @classmethod
    def _from_stock(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Set fields that the stock class ignores to the values that it computes with."""
        for name, meaning in cls.meanings.items():
            computed = cls.__dataclass_fields__[name].default
            if meaning.stock == "ignored" and data.get(name, computed) != computed:
                logger.warning(
                    f"{name} = {data[name]!r} of this {data['model_type']} configuration is set to {computed!r}: "
                    f"transformers ignores the field, so that is what its weights were run with."
                )
                data[name] = computed
        return data

    @classmethod
    def _check_model_type(cls, model_type: Any) -> None:
        """Refuse a model type that this class does not read, and name what does; None passes."""
        if model_type is None or model_type in cls._model_types():
            return
        reader = READERS.get(model_type) if isinstance(model_type, str) else None
        hint = f" ({reader.__name__} reads {model_type!r})" if reader else ""
        valid = enumerate_words(map(repr, cls._model_types())) + hint
        fail(cls, "model_type", model_type, f"{cls.__name__} does not read this model type", valid)

    def stock_type(self) -> str:
        """Return transformers' model type with the same outputs."""
        return self.stock_model_type

    def parts(self) -> set[str]:
        """Return the names of the model's parts, as `Meaning.part` spells them."""
        return set()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, without our own entries of `auto_map`.

        Our entries belong to the folder that was read, and each save writes new ones. The attribute keeps them, since
        tools that load models by trusted code read it.
        """
        data = super().to_dict()
        if others := entries_of_others(data.pop("auto_map", None)):
            data["auto_map"] = others
        return data

    def to_json_file(self, json_file_path, use_diff: bool = True):
        """Write the configuration as JSON; as `save_pretrained`'s config.json in a form that loads without llamoe.

        That form is `auto_map` in config.json and the file llamoe_hub.py, which imports the installed llamoe.
        """
        path = Path(json_file_path)
        if path.name != CONFIG_NAME:
            super().to_json_file(path, use_diff=use_diff)
            return
        write_config(self, path, json.loads(self.to_json_string(use_diff=use_diff)))

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Do nothing for llamoe's own classes: their folders name how they are loaded already.

        transformers would copy our sources into each saved folder. A user's subclass is registered as usual.
        """
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)

    def _rotary_multiple(self) -> int:
        """Return the number that must divide the width of a rotated head; 0 if no layer is rotated."""
        return 0

    def validate_rope(self) -> None:
        """Check the rotary embedding beyond transformers' own checks, then run those."""
        rope, multiple = getattr(self, "rope_parameters", None), self._rotary_multiple()
        if not rope or not multiple:
            return
        theta, factor = rope.get("rope_theta"), rope.get("partial_rotary_factor")
        if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
            fail(self, "rope_parameters['rope_theta']", theta, "must be positive", "a number such as 10000.0")
        if self.head_dim % multiple:
            problem = (
                "rotary embedding rotates pairs of channels, for pictures once by row and once by column"
            )
            fail(self, "head_dim", self.head_dim, problem, f"a multiple of {multiple}")
        if rope.get("rope_type") != "proportional" and factor not in (None, 1):
            valid = "1.0, or rope_type 'proportional'"
            fail(self, "rope_parameters['partial_rotary_factor']", factor, "the whole head is rotated", valid)
        # Scout is published with equal factors, of which transformers warns each time: no frequency lies between those
        # that are scaled and the others.
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if rope.get("rope_type") != "llama3" or low is None or low != high:
            super().validate_rope()

    def _equals(self, other: Any) -> bool:
        """Compare class and content, ignoring a configuration's source and the release that wrote it."""
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = self.to_dict(), other.to_dict()
        for data in (mine, theirs):
            for name in ("_name_or_path", "auto_map"):
                data.pop(name, None)
        return mine == theirs


def _rotating_whole_heads(given: dict[str, Any]) -> dict[str, Any]:
    """Leave out `partial_rotary_factor` of a stock configuration without scaling, where stock does not read it."""
    name = "partial_rotary_factor"
    ropes = {
        key: given[key] for key in ("rope_scaling", "rope_parameters") if isinstance(given.get(key), dict)
    }
    rope = next(filter(None, ropes.values()), {})
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return given
    given = given | {key: {k: value for k, value in rope.items() if k != name} for key, rope in ropes.items()}
    given.pop(name, None)
    return given


@contextmanager
def unreadable_as_value_error(config_class: type) -> Iterator[None]:
    """Enter a context that turns any error of transformers about a file's content into a `ValueError`."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError) as error:
        raise ConfigurationError(
            f"{config_class.__name__} cannot be made of these fields ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _report_as_value_errors(cls: Any) -> None:
    """Wrap the methods that `strict` made for a class in our reading of arguments and our error messages."""
    strict_init, strict_setattr, strict_validate = cls.__init__, cls.__setattr__, cls.validate

    @functools.wraps(strict_init)
    def __init__(self, *args, **kwargs):
        strict_init(self, *args, **cls._read(kwargs))

    def __setattr__(self, name, value):
        name = type(self).attribute_map.get(name, name)
        if name == "model_type":
            cls._check_model_type(value)
            return
        field = cls.__dataclass_fields__.get(name)
        if field is not None:
            value = _coerce(value, field.type)
        # Not again for the base classes, whose wrappers are called in turn.
        if type(self) is cls and name in cls.meanings:
            cls.meanings[name].check(self, name, value)
        try:
            strict_setattr(self, name, value)
        except StrictDataclassFieldValidationError:
            expected = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            fail(self, name, value, f"wrong type {type(value).__name__}", expected.replace("typing.", ""))

    def validate(self):
        """Check the fields against each other; `ValueError` for the first contradiction."""
        try:
            strict_validate(self)
        except (StrictDataclassClassValidationError, KeyError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, ConfigurationError):
                raise cause from None
            raise ConfigurationError(f"{type(self).__name__}: {cause}") from None

    # `strict` refuses to decorate a subclass if a base class's `validate` is not its own.
    validate.__is_defined_by_strict_decorator__ = True
    cls.__init__, cls.__setattr__, cls.validate = __init__, __setattr__, validate
    cls.__eq__ = LlamoeBaseConfig._equals


def _coerce(value: Any, annotation: Any) -> Any:
    """Convert a value to its field's type: integers to floats, tuples and ranges to lists."""
    accepted = get_args(annotation) if get_origin(annotation) is not list else ()
    accepted = accepted or (annotation,)
    if float in accepted and int not in accepted and type(value) is int and abs(value) < 1 << 1000:
        return float(value)
    origins = {get_origin(kind) or kind for kind in accepted}
    if list in origins and tuple not in origins and isinstance(value, (tuple, range)):
        return list(value)
    return value
