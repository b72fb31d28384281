"""Write what a saved folder needs to load in programs that do not import llamoe.

With `trust_remote_code=True` transformers reads the entry `auto_map` of config.json. For each Auto class it names a
file in the folder and a class in that file. llamoe writes one such file, which only imports the installed llamoe.
transformers' own way, `register_for_auto_class`, would copy llamoe's source code into the folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .json_files import write_whole


def _decoder(family: str, base: str = "") -> dict[str, str]:
    """Map Auto classes to the model classes of a family of decoders; `base` is the base model's name if it differs."""
    names = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    heads = {f"AutoModel{head}": f"{family}{head}" for head in names}
    return {"AutoModel": base or f"{family}Model", **heads}


# For each model type, Auto class to the model class that it returns.
AUTO_CLASSES = {
    "llamoe_dense": {
        **_decoder("LlamoeDense"),
        "AutoModelForQuestionAnswering": "LlamoeDenseForQuestionAnswering",
    },
    "llamoe_mixtral": _decoder("LlamoeMixtral"),
    "llamoe_text": _decoder("Llamoe", base="LlamoeTextModel"),
    "llamoe_vision": {"AutoModel": "LlamoeVisionModel"},
    "llamoe": {
        **_decoder("Llamoe"),
        "AutoModelForImageTextToText": "LlamoeForConditionalGeneration",
        "AutoModelForMultimodalLM": "LlamoeForConditionalGeneration",
        "AutoModelForTextEncoding": "LlamoeTextModel",
    },
}

MODULE_NAME = "llamoe_hub"
_FIRST_LINE = '"""Lets transformers load this folder with `trust_remote_code=True`.'
# If llamoe is not installed, transformers names it as the package that this file imports.
MODULE = (
    _FIRST_LINE
    + '''

The model's code is not here: it is the installed package llamoe.
"""

from llamoe import *  # noqa: F403
'''
)

# Function that makes the content of config.json in the current `save_pretrained`; None for llamoe's layout.
_converter: ContextVar[Callable[[Any], dict[str, Any]] | None] = ContextVar("llamoe_converter", default=None)


@contextmanager
def written_by(converter: Callable[[Any], dict[str, Any]] | None) -> Iterator[None]:
    """Enter a context in which configurations are saved as `converter` returns them; None for llamoe's layout."""
    token = _converter.set(converter)
    try:
        yield
    finally:
        _converter.reset(token)


def is_saving_stock() -> bool:
    """Return True during a save in transformers' layout."""
    return _converter.get() is not None


def entries_of_others(auto_map: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries of an `auto_map` that do not name llamoe_hub.py, alone or behind a Hub repository's name."""
    return {name: entry for name, entry in (auto_map or {}).items() if f"{MODULE_NAME}." not in str(entry)}


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a call's arguments that say where a file is read from: cache, revision, subfolder, token."""
    names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def is_ours(some_class: type) -> bool:
    """Return True for llamoe's own classes, False for a user's subclass."""
    return some_class.__module__.partition(".")[0] == "llamoe"


def auto_map(config: Any) -> dict[str, str]:
    """Return the `auto_map` for the folder of a configuration: Auto class to `file.class`.

    The first of `architectures` is the folder's model class. If it is a user's class, its entries are kept.
    """
    served = AUTO_CLASSES[config.model_type]
    architecture = (config.architectures or [None])[0]
    entries = {name: model for name, model in served.items() if model == architecture}
    others = entries_of_others(getattr(config, "auto_map", None))
    entries["AutoModel"] = served["AutoModel"]
    if is_ours(type(config)):
        entries["AutoConfig"] = type(config).__name__
    ours = {name: f"{MODULE_NAME}.{entry}" for name, entry in entries.items()}
    if architecture is None or architecture in served.values():
        return ours
    return ours | others


def write_config(config: Any, path: Path, content: Mapping[str, Any]) -> None:
    """Write config.json, and in llamoe's layout llamoe_hub.py beside it; in transformers' layout remove llamoe_hub.py.

    `content` is that of config.json in llamoe's layout, without `auto_map`.
    """
    converter = _converter.get()
    module = path.with_name(f"{MODULE_NAME}.py")
    if converter is not None:
        write_whole(path, as_json(converter(config)))
        # Another process may have removed the file meanwhile.
        with suppress(FileNotFoundError):
            if is_our_module(module):
                module.unlink()
        return
    for name, text in our_files(config, content).items():
        write_whole(path if name == "config.json" else path.with_name(name), text)


def our_files(config: Any, content: Mapping[str, Any]) -> dict[str, str]:
    """Return name and text of each file that llamoe's layout has; for the arguments see `write_config`."""
    if config.model_type not in AUTO_CLASSES:
        return {"config.json": as_json(content)}
    content = {**content, "auto_map": auto_map(config)}
    return {f"{MODULE_NAME}.py": MODULE, "config.json": as_json(content)}


def is_our_module(path: Path) -> bool:
    """Return True if a file is a llamoe_hub.py that any release of llamoe has written."""
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(_FIRST_LINE)


def as_json(content: Mapping[str, Any]) -> str:
    """Format the content of a config.json as text."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
