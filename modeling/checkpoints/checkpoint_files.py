"""Whether a checkpoint is whole and fits the model, checked on file headers before a tensor is read."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ...configuration.json_files import LARGE, FileStamp, check_regular, read_json, reading, stamp_of
from .safetensors_files import TensorHeader, read_safetensors
from .torch_files import read_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORMATS = ("safetensors", "bin")
_STEMS = {"safetensors": "model", "bin": "pytorch_model"}


@dataclass
class _Loading:
    """What is known while a model is loaded."""

    headers: dict[FileStamp, dict[str, TensorHeader]] = field(default_factory=dict)
    # Which experts are not to be loaded (`offload.OffloadRequest`).
    offload: Any = None
    # What a folder of packed weights is to do to rows; None for what its config says.
    activations: str | None = None
    # How another program has packed the weights (`formats.packed.Layout`).
    layout: Any = None


_current: ContextVar[_Loading | None] = ContextVar("llamoe_loading", default=None)


@contextmanager
def loading() -> Iterator[_Loading]:
    """Context that reads each file's header once."""
    state = _Loading()
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)


def current_loading() -> _Loading:
    """What is known in this context of `loading`, or nothing outside of one."""
    return _current.get() or _Loading()


def read_header(path: str | os.PathLike, kind: str | None = None) -> dict[str, TensorHeader]:
    """Checked header of a file of weights: tensor name to header, not to be changed inside `loading`.

    `kind` is "safetensors" or "bin" (torch.save); None goes by the name, as transformers does.

    Raises:
        CheckpointError: the file is missing, cut short, or contradicts itself or its size; or it is a pickle that
            holds something else than a dictionary of tensors, or wants to run code.
    """
    # A name with a zero byte is a ValueError.
    with reading(path, ValueError):
        try:
            stamp = stamp_of(check_regular(path))
            known = current_loading().headers
            if stamp not in known:
                known[stamp] = _read_header(path, kind)
            return known[stamp]
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file, though the checkpoint's index names it.") from error
        except IsADirectoryError as error:
            raise CheckpointError(f"{path}: is a folder, where the checkpoint should have a file.") from error


def _read_header(path: str | os.PathLike, kind: str | None) -> dict[str, TensorHeader]:
    if kind == "safetensors" or kind is None and str(path).endswith(".safetensors"):
        return read_safetensors(path)
    content = read_torch(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dictionary of tensors.")
    tensors = {name: value for name, value in content.items() if isinstance(value, TensorHeader)}
    if odd := [name for name in content if not isinstance(name, str)]:
        raise CheckpointError(f"{path}: a key is {odd[0]!r}, where names of tensors were expected.")
    if not tensors:
        found = ", ".join(content)[:99] or "nothing"
        raise CheckpointError(
            f"{path}: has no tensor at its top, where transformers looks, but {found}. If the weights are inside of "
            "that, save it by itself, or convert the folder with `llamoe convert`."
        )
    return tensors


class WeightFiles(NamedTuple):
    """The files of weights in a folder.

    Attributes:
        files: sorted by name.
        index: the file that says which tensor is in which file; None for a single file.
        weight_map: its content, tensor to file name.
        metadata: its other content; None if missing.
    """

    files: list[Path]
    index: Path | None = None
    weight_map: Mapping[str, str] = {}
    metadata: Mapping[str, object] | None = None


def find_weights(
    folder: str | os.PathLike, variant: str | None = None, formats: Iterable[str] = _FORMATS
) -> WeightFiles | None:
    """Files of weights that transformers reads in a folder: one or many, safetensors before .bin.

    The result is None if the folder has neither a file nor an index under the expected names, of which `variant` is a
    part, as in `from_pretrained`.

    Raises:
        CheckpointError: the index cannot be read, names a file outside of the folder or of another format, or there
            are both a single file and an index with its files, of which either may be the older one.
    """
    infix = f".{variant}" if variant else ""
    for suffix in formats:
        single = Path(folder, f"{_STEMS[suffix]}{infix}.{suffix}")
        index = Path(folder, f"{_STEMS[suffix]}.{suffix}.index{infix}.json")
        if single.is_file():
            # A single file saved over shards leaves their index, but not their files.
            if index.is_file() and all(path.exists() for path in _read_index(index, suffix).files):
                raise CheckpointError(
                    f"{folder}: holds both {single.name} and {index.name} with its files, and nothing says which are "
                    "the weights. Remove one of the two."
                )
            return WeightFiles([single])
        if index.is_file():
            return _read_index(index, suffix)
    return None


def _read_index(index: Path, suffix: str) -> WeightFiles:
    content = read_json(index, LARGE)
    weight_map = content.get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
        or not isinstance(content.get("metadata", {}), dict)
    ):
        raise CheckpointError(
            f"{index}: not an index of shards: weight_map should say in which file each tensor is, and metadata be an "
            "object."
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if not _is_inside(name):
            raise CheckpointError(f"{index}: names {name[:200]!r}, which lies outside of the folder.")
        if name.endswith(".safetensors") != (suffix == "safetensors"):
            raise CheckpointError(f"{index}: names {name[:200]!r}, which is no .{suffix} file.")
    files = [index.parent / name for name in names]
    return WeightFiles(files, index, weight_map, content.get("metadata"))


def _is_inside(name: str) -> bool:
    """Whether a name can be of a file in its folder. Links there may lead out of it, as in the Hub's cache."""
    parts = re.split(r"[/\\]", name)
    is_name = "\0" not in name and all(len(part.encode(errors="replace")) <= 255 for part in parts)
    return is_name and ".." not in parts and bool(parts[0]) and ":" not in parts[0]


def check_shards(found: WeightFiles, held: Mapping[str, Path]) -> None:
    """Compare an index with the content of its files: `held` maps each tensor to the file that holds it.

    Raises:
        CheckpointError: a tensor is not in the file that the index names, or the index does not name it.
    """
    if found.index is None:
        return
    named = {shard: found.index.parent / shard for shard in set(found.weight_map.values())}
    for name, shard in found.weight_map.items():
        if held.get(name) != named[shard]:
            raise CheckpointError(f"{found.index}: says that {name!r} is in {shard}, which does not hold it.")
    for name, path in held.items():
        if name not in found.weight_map:
            raise CheckpointError(f"{found.index}: does not name {name!r}, which {path} holds.")


def check_files(
    files: Iterable[str | os.PathLike], folder: str | os.PathLike | None = None
) -> dict[str, Path]:
    """Check the headers of all files of a checkpoint, and return which tensor is in which file.

    The files must be in `folder`, if that is a local one.

    Raises:
        CheckpointError: a file is missing or damaged, or lies outside of the folder; or a tensor is in two of them, of
            which readers may take either.
    """
    held: dict[str, Path] = {}
    is_local = folder is not None and os.path.isdir(folder)
    for file in map(Path, files):
        if is_local and (not file.is_relative_to(folder) or ".." in file.relative_to(folder).parts):
            raise CheckpointError(f"{file}: is named in {folder}, but lies outside of it.")
        for name in read_header(file):
            if name in held:
                raise CheckpointError(f"{file}: {name!r} is in {held[name]} too.")
            held[name] = file
    return held


def wrapper_prefix(names: Iterable[str]) -> str:
    """What torch.compile and data parallelism have put before every name of a state dict; empty if they have not."""
    match = re.match(r"((_orig_mod|module)\.)*", os.path.commonprefix(list(names)))
    return match[0] if match else ""


def check_names(names: Collection[str], rename: Callable[[str], list[str]], place: Any) -> None:
    """Refuse a checkpoint in which a wrapper's name stands before all names, so that none is found in the model.

    `rename` gives the names that the loader makes of one, such as by a `key_mapping`.

    Raises:
        CheckpointError: it does.
    """
    if wrapper_prefix(names) and (prefix := wrapper_prefix(rename(name)[0] for name in names)):
        pattern = "^" + re.escape(prefix)
        raise CheckpointError(
            f"{place or 'state_dict'}: all names of weights begin with {prefix!r}, which torch.compile or data "
            f"parallelism puts there. Give key_mapping={{{pattern!r}: ''}} to from_pretrained; `llamoe convert` writes "
            "a folder without it."
        )


def check_folder(
    folder: str | os.PathLike,
    subfolder: str = "",
    variant: str | None = None,
    use_safetensors: bool | None = None,
    quantized: bool = False,
) -> None:
    """Check the weights of a local checkpoint, and the small files that are read with them.

    The arguments are those of `from_pretrained`. If the model is `quantized`, pickles are skipped: they may hold
    objects of a quantizer that is not imported yet.

    Raises:
        CheckpointError: a file is missing or damaged, the index cannot be read, leaves the
            folder or contradicts the files, or a tensor is in two files.
    """
    place = Path(folder, subfolder)
    for name in ("generation_config.json", "adapter_config.json"):
        if (place / name).is_file():
            read_json(place / name)
    if any(place.glob("shard-*-model-*.safetensors")):
        # Saved by the processes of a distributed run: each file has shards of the tensors, and all files are read.
        for path in place.glob("*.safetensors"):
            read_header(path)
        return
    formats = [suffix for suffix in _FORMATS if use_safetensors in (None, suffix == "safetensors")]
    found = find_weights(place, variant, formats)
    if found is None or quantized and found.files[0].suffix != ".safetensors":
        return
    if found.index is not None and found.metadata is None:
        raise CheckpointError(f"{found.index}: not an index that transformers reads: it has no metadata.")
    held = check_files(found.files)
    check_shards(found, held)


def check_found(model: "PreTrainedModel", loading_info: Any, place: Any) -> None:
    """Check that a checkpoint had all parts of the packed weights, in their shapes; nothing else could fill them.

    Args:
        model: as transformers has loaded it, before it fills what was missing.
        loading_info: transformers' record of what was missing, and of what had another shape.
        place: of the checkpoint, for the message.

    Raises:
        CheckpointError: a part was missing, or has another shape.
    """
    absent = {*loading_info.missing_keys, *(key for key, *_ in loading_info.mismatched_keys)}
    lost = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        # What packed modules alone have.
        if hasattr(module, "part_shapes")
        for name in module.state_dict()
        if f"{path}.{name}" in absent
    ]
    if lost:
        raise CheckpointError(
            f"{place}: {listed(lost, 5)} cannot be filled from the checkpoint, and packed weights do not begin anew. "
            "Download or copy it again, or load it with the configuration that it was saved with."
        )


def check_complete(model: "PreTrainedModel", missing: Iterable[str], load_config: Any) -> None:
    """Check that a checkpoint of the model's own class had all of its weights.

    A class may load a checkpoint of another class, as a classifier loads a language model's. Weights that such a
    checkpoint cannot have start fresh, and transformers reports them.

    `missing` names the weights that the checkpoint lacks and that are not tied to others; `load_config` is
    transformers' record of the loading.

    Raises:
        CheckpointError: config.json names the model's class, and weights of it are missing.
    """
    place = load_config.pretrained_model_name_or_path
    lost = [name for name in sorted(missing) if _is_plain_weight(model, name, load_config.hf_quantizer)]
    # A state dict has no config.json.
    if not lost or place is None:
        return
    architectures = model.config.architectures
    # The checkpoint's own config.json; the model may have been given another configuration.
    with suppress(OSError):
        content, _ = model.config.get_config_dict(place, **(load_config.download_kwargs or {}))
        architectures = content.get("architectures")
    # FSDP2 derives classes of its own.
    name = type(model).__name__.removeprefix("FSDP")
    if name in (architectures or ()):
        shown = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
        raise CheckpointError(
            f"{place}: config.json says that this is a {name}, but {len(lost)} of its weights are missing: "
            f"{shown}. Download or copy the checkpoint again, or load it with the configuration that it was "
            f"saved with. To begin with fresh weights, build {name}(config) and load the others with "
            "load_state_dict(..., strict=False)."
        )


def _is_plain_weight(model: "PreTrainedModel", name: str, quantizer: Any) -> bool:
    """Whether a name is a parameter's, and not one that a quantizer made or left out."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    is_plain = type(module).__module__.startswith(("torch.nn.", "llamoe."))
    return own_name in module._parameters and (quantizer is None or is_plain)
