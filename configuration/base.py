"""The base class of llamoe's configurations, which check their fields and read transformers' configurations, too.

Here and below, "stock" means transformers' own. In three points these configurations differ from transformers':

* Types are checked on each assignment. An error is a `ValueError` that names the field, the value and what is valid.
  `huggingface_hub`'s decorator `strict`, which makes the checks, raises other exceptions. Subclasses need no decorator.
* A class refuses a dictionary of a model type that it does not read. transformers only warns, and sets that
  `model_type` on the instance.
* Overrides given to `from_dict` and `from_pretrained` are checked, and applied before fields that depend on them are
  computed. transformers sets them afterwards, without checks.

Annotations in these modules must not be strings, because `strict` skips strings.
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

# Model type, llamoe's or transformers', to llamoe's class that reads it. Each class adds itself.
READERS: dict[str, type["LlamoeBaseConfig"]] = {}

# Name of each stock model class to that of llamoe's. transformers has only one multimodal class with a head.
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

# Names never warned of: fields of all classes, since multimodal configurations and parts are given each other's.
# transformers 4 wrote `tie_encoder_decoder`.
_KNOWN_NAMES = {"tie_encoder_decoder", "num_labels"}


def as_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """Return any configuration as keyword arguments, with the attention and experts backends that `to_dict` omits."""
    data = config.to_dict()
    for name in ("attn_implementation", "experts_implementation"):
        if (value := getattr(config, f"_{name}", None)) is not None:
            data[name] = value
    # For a stock model without grouped experts transformers sets "eager" by itself. In llamoe's configurations "eager"
    # would be a choice of the user, which replaces llamoe's implementation.
    if data.get("experts_implementation") == "eager" and not isinstance(config, LlamoeBaseConfig):
        del data["experts_implementation"]
    # Mistral has no layer_types. AutoConfig would read a file with a window and layer_types as Ministral.
    if data.get("model_type") == "mistral":
        data.pop("layer_types", None)
    return data


class LlamoeBaseConfig(PreTrainedConfig):
    """The base class of llamoe's configurations, which has no fields of its own.

    Class attributes:
        model_type: llamoe's model type, which `config.json` gets.
        stock_model_type: transformers' model type of the same architecture, which is read, too.
        stock_relatives: Further model types of transformers that are read.
        feed_forward_name: Name of the feed-forward in a decoder's layers.
        meanings: Name of each field that this package declares to its `Meaning`.
    """

    stock_model_type: ClassVar[str] = ""
    stock_relatives: ClassVar[tuple[str, ...]] = ()
    feed_forward_name: ClassVar[str] = ""
    meanings: ClassVar[dict[str, Meaning]] = {}
    # Outputs that are not predictions. `Trainer` gathers all other outputs over a whole evaluation. If only logits are
    # left, it returns them without a tuple.
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
        # A subclass inherits meanings as dataclasses inherit fields.
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
        """Return the model types that this class reads, llamoe's first."""
        return [name for name in (cls.model_type, cls.stock_model_type, *cls.stock_relatives) if name]

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read a `config.json` of llamoe or transformers; return it as llamoe's fields, and the unused arguments."""
        subfolder = kwargs.get("subfolder") or ""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        folder = Path(pretrained_model_name_or_path, subfolder)
        if not config_dict and folder.is_dir() and not (folder / "adapter_config.json").is_file():
            # Without this error transformers would use the default configuration.
            raise CheckpointError(
                f"{folder}: no file named config.json in this folder. Convert a folder of Meta's release first: "
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
        """Build a configuration from a dictionary of llamoe's or transformers' fields.

        Args:
            config_dict: The content of a `config.json`; it is not changed.
            **kwargs: Fields that replace those of the dictionary, and transformers' own arguments.

        Returns:
            The configuration; with `return_unused_kwargs=True` the configuration and the arguments that are no fields.
        """
        data = cls._read(config_dict)
        cls._warn_of_misspelt(kwargs)
        names = {field.name for field in fields(cls)} - {"dtype"}
        by_field = {cls.attribute_map.get(name, name): name for name in kwargs}
        overrides = {field: kwargs.pop(name) for field, name in by_field.items() if field in names}
        with unreadable_as_value_error(cls):
            return super().from_dict(cls._override(data, overrides), **kwargs)

    @classmethod
    def _override(cls, data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with overrides applied; a dictionary for a nested configuration overrides its fields."""
        data = dict(data)
        for name, value in overrides.items():
            if name in cls.sub_configs and isinstance(value, dict):
                part = data.get(name) or {}
                part = as_dict(part) if isinstance(part, PreTrainedConfig) else part
                # Convert to llamoe's fields first: an override may be a field that only llamoe has.
                value = cls.sub_configs[name]._override(cls.sub_configs[name]._read(part), value)
            data[name] = value
        return data

    @classmethod
    def _read(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Convert keyword arguments of llamoe's or the stock class to llamoe's fields, without a model type."""
        if cls.base_config_key and isinstance(content.get(cls.base_config_key), (dict, PreTrainedConfig)):
            content = cls._part_of(content)
        cls._warn_of_misspelt(content)
        model_type = content.get("model_type")
        cls._check_model_type(model_type)
        if model_type == "mistral" and "layer_types" in content:
            # AutoConfig reads such a file as Ministral, too.
            model_type = "ministral"
            content = {**content, "model_type": model_type}
        if model_type not in (None, cls.model_type):
            content = cls._from_stock(cls._of_stock_class(CONFIG_MAPPING[model_type], content))
        data = {
            cls.attribute_map.get(name, name): copy.deepcopy(value)
            if isinstance(value, (dict, list))
            else value
            for name, value in content.items()
            # transformers writes the class attribute `_auto_class` into the dictionary of an instance, too.
            if name not in ("_auto_class", "model_type")
        }
        if data.get("per_layer_config"):
            problem = "layers with fields of their own are not supported"
            fail(cls, "per_layer_config", data["per_layer_config"], problem, "leave it out")
        if isinstance(architectures := data.get("architectures"), list):
            data["architectures"] = [ARCHITECTURES.get(str(name), name) for name in architectures]
        return data

    @classmethod
    def _warn_of_misspelt(cls, names: Iterable[str]) -> None:
        """Warn once of each name that resembles a field's; unknown names become attributes, as in transformers."""
        known = [*(field.name for field in fields(cls)), *cls.attribute_map, "num_labels"]
        # A search takes milliseconds, so names of existing fields are skipped.
        for name in set(names) - _KNOWN_NAMES:
            if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                logger.warning_once(
                    f"{cls.__name__} has no field {name!r}, so its value has no effect. Did you mean {near[0]!r}?"
                )

    @classmethod
    def _part_of(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return this class's part of a multimodal configuration, with dtype and quantization of the whole."""
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
    def _of_stock_class(cls, stock: type[PreTrainedConfig], content: dict[str, Any]) -> dict[str, Any]:
        """Return entries for a stock class with its defaults, and without those that only llamoe's class would use.

        transformers ignores these. Entries that neither class uses are kept, as transformers keeps them.
        """
        reader = READERS[stock.model_type]
        ours, theirs = ({field.name: field.default for field in fields(config)} for config in (reader, stock))
        stock_names = theirs.keys() | stock.attribute_map.keys()

        def is_only_ours(name: str) -> bool:
            is_ours = name in reader.attribute_map or hasattr(reader, name)
            is_stocks = hasattr(stock, name) and not callable(getattr(reader, name, None))
            return is_ours and not (is_stocks or name in stock_names)

        left_out = set(filter(is_only_ours, content))
        for name in left_out:
            if content[name] not in (None, ours.get(name)):
                logger.warning_once(
                    f"{name} = {content[name]!r} of this {stock.model_type} configuration is left out: "
                    f"transformers' {stock.__name__} has no such field and computes without it."
                )
        defaults = {name: value for name, value in theirs.items() if value != ours.get(name, value)}
        return defaults | {
            name: value for name, value in _without_partial_rotary(content).items() if name not in left_out
        }

    @classmethod
    def _from_stock(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Reset the fields that the stock class ignores to the defaults that it uses instead."""
        for name, meaning in cls.meanings.items():
            computed = cls.__dataclass_fields__[name].default
            if meaning.stock == "ignored" and data.get(name, computed) != computed:
                logger.warning(
                    f"{name} = {data[name]!r} of this {data['model_type']} configuration is set to {computed!r}, with "
                    "which transformers computes whatever the field says."
                )
                data[name] = computed
        return data

    @classmethod
    def _check_model_type(cls, model_type: Any) -> None:
        """Raise an error that names the right class if this class does not read the model type."""
        if model_type is None or model_type in cls._model_types():
            return
        reader = READERS.get(model_type) if isinstance(model_type, str) else None
        hint = f" ({reader.__name__} reads {model_type!r})" if reader else ""
        valid = enumerate_words(map(repr, cls._model_types())) + hint
        fail(cls, "model_type", model_type, f"{cls.__name__} does not read this model type", valid)

    def stock_type(self) -> str:
        """Return the model type under which transformers computes the same outputs."""
        return self.stock_model_type

    def parts(self) -> set[str]:
        """Return the parts that the model has, by their names in `Meaning.part`."""
        return set()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, without llamoe's entries in `auto_map`.

        Each save writes these entries anew. The attribute `auto_map` keeps them, because it is read by tools that load
        models with `trust_remote_code=True`.
        """
        data = super().to_dict()
        if others := entries_of_others(data.pop("auto_map", None)):
            data["auto_map"] = others
        return data

    def to_json_file(self, json_file_path, use_diff: bool = True):
        """Write the configuration as JSON.

        A file named config.json gets an `auto_map`, and the file llamoe_hub.py beside it, so that transformers can load
        the folder in programs that do not import llamoe (see `hub.py`).
        """
        path = Path(json_file_path)
        if path.name != CONFIG_NAME:
            super().to_json_file(path, use_diff=use_diff)
            return
        write_config(self, path, json.loads(self.to_json_string(use_diff=use_diff)))

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Register a user's subclass; do nothing for llamoe's own classes.

        If these were registered, transformers would copy llamoe's source code into each saved folder.
        """
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)

    def _rotary_multiple(self) -> int:
        """Return the number that must divide the width of a rotated head; 0 if no layer has rotary embeddings."""
        return 0

    def validate_rope(self) -> None:
        """Check what transformers does not check of the rotary embedding, then make transformers' checks."""
        rope, multiple = getattr(self, "rope_parameters", None), self._rotary_multiple()
        if not rope or not multiple:
            return
        theta, factor = rope.get("rope_theta"), rope.get("partial_rotary_factor")
        if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
            fail(self, "rope_parameters['rope_theta']", theta, "must be positive", "a number such as 10000.0")
        if self.head_dim % multiple:
            problem = f"rotary embeddings need groups of {multiple} channels"
            fail(self, "head_dim", self.head_dim, problem, f"a multiple of {multiple}")
        if rope.get("rope_type") != "proportional" and factor not in (None, 1):
            valid = "1.0, or rope_type 'proportional'"
            fail(self, "rope_parameters['partial_rotary_factor']", factor, "all channels are rotated", valid)
        # Scout has equal factors, of which transformers would warn each time. They are right: no frequency lies between
        # the scaled frequencies and the unscaled ones.
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if rope.get("rope_type") != "llama3" or low is None or low != high:
            super().validate_rope()

    def _equals(self, other: Any) -> bool:
        """Compare class and fields, without the folder that the configuration was read from."""
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = self.to_dict(), other.to_dict()
        for data in (mine, theirs):
            for name in ("_name_or_path", "auto_map"):
                data.pop(name, None)
        return mine == theirs


def _without_partial_rotary(content: dict[str, Any]) -> dict[str, Any]:
    """Return a stock configuration without `partial_rotary_factor`, if transformers ignores it.

    Without scaling transformers rotates all channels, whatever the entry says.
    """
    name = "partial_rotary_factor"
    ropes = {
        key: content[key] for key in ("rope_scaling", "rope_parameters") if isinstance(content.get(key), dict)
    }
    rope = next(filter(None, ropes.values()), {})
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return content
    content = content | {
        key: {k: value for k, value in rope.items() if k != name} for key, rope in ropes.items()
    }
    content.pop(name, None)
    return content


@contextmanager
def unreadable_as_value_error(config_class: type) -> Iterator[None]:
    """Enter a context that turns any error of transformers about wrong fields into a `ConfigurationError`."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError) as error:
        raise ConfigurationError(
            f"{config_class.__name__} cannot be made of these fields ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _report_as_value_errors(cls: Any) -> None:
    """Wrap the methods that `strict` has made for a class, so that they read stock's fields and raise `ValueError`s."""
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
        # Checked once: this method also calls those of the base classes.
        if type(self) is cls and name in cls.meanings:
            cls.meanings[name].check(self, name, value)
        try:
            strict_setattr(self, name, value)
        except StrictDataclassFieldValidationError:
            expected = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            fail(self, name, value, f"wrong type {type(value).__name__}", expected.replace("typing.", ""))

    def validate(self):
        """Check the fields against each other; raise a `ConfigurationError` for the first contradiction."""
        try:
            strict_validate(self)
        except (StrictDataclassClassValidationError, KeyError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, ConfigurationError):
                raise cause from None
            raise ConfigurationError(f"{type(self).__name__}: {cause}") from None

    # `strict` decorates a subclass only if it believes that it has made the `validate` of the base class.
    validate.__is_defined_by_strict_decorator__ = True
    cls.__init__, cls.__setattr__, cls.validate = __init__, __setattr__, validate
    cls.__eq__ = LlamoeBaseConfig._equals


def _coerce(value: Any, annotation: Any) -> Any:
    """Convert an integer to a float, or a tuple or range to a list, if the field has that type."""
    accepted = get_args(annotation) if get_origin(annotation) is not list else ()
    accepted = accepted or (annotation,)
    if float in accepted and int not in accepted and type(value) is int and abs(value) < 1 << 1000:
        return float(value)
    origins = {get_origin(kind) or kind for kind in accepted}
    if list in origins and tuple not in origins and isinstance(value, (tuple, range)):
        return list(value)
    return value
