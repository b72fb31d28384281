"""`save_pretrained` that writes a folder whole or not at all: files get their names when all are written.

transformers writes file by file into the folder. Cut off half-way, it leaves shards of the older and the newer model,
which load together in silence. Here everything is written to a hidden folder inside the target, so on the same file
system. Then renamings alone exchange the older files for the new ones:

1. the replaced older files leave; first those that loaders open first: the weights' index or only file, then
   config.json;
2. the new files come in, in the opposite order.

A failure before the exchange leaves the older model as it was, a failure during it is undone, and a kill during it
leaves a folder in which a loader finds no weights. (If only config.json is missing, stock classes use their default
configuration.) The hidden folder's name says how far the save got. The next save removes what a killed one has left,
and first restores the older files if need be.
"""

import copy
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import Timeout
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ...configuration.hub import MODULE_NAME, is_our_module
from ..parallel import (
    broadcast,
    is_sharded,
    joined,
    meet_after_saving,
    meet_before_saving,
    refuse_stages,
    sharded_adapter,
    sharing_processes,
)
from .whole_folders import EXCHANGING, FolderLock, sync

# Prefixes of the hidden folder: while files are written, and after they were exchanged.
_WRITING, _DONE = (f".llamoe-{state}-" for state in ("saving", "replaced"))
# Files that loaders look for by name. A file of a later pattern leaves a folder earlier, and comes back later.
_ENTRIES = [
    re.compile(pattern)
    for pattern in (
        r"adapter_config\.json",
        r"config\.json",
        # Single files, indexes, and the shards that a job's processes have written.
        r"model\.safetensors\.index(\..+)?\.json|(?!.*-\d{5}-of-)model(\..+)?\.safetensors|shard-.*\.safetensors",
        # Read only without safetensors files.
        r"pytorch_model\.bin\.index(\..+)?\.json|(?!.*-\d{5}-of-)pytorch_model(\..+)?\.bin",
    )
]
# If shards of a job's processes exist, transformers reads no other weights.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors|sharded|consolidated")

# The save in progress.
_current: ContextVar["_Save | None"] = ContextVar("llamoe_save", default=None)


def put_back(folder: str | os.PathLike) -> None:
    """Remove what killed saves have left in a folder, and restore the older files."""
    target = Path(folder)
    for hidden in [hidden for state in (_WRITING, EXCHANGING, _DONE) for hidden in target.glob(f"{state}*")]:
        if (lock := _lock(hidden)) is not None:
            if hidden.name.startswith(EXCHANGING):
                _undo(hidden, target)
            shutil.rmtree(hidden, ignore_errors=True)
            lock.release()


class _Save:
    """The files of one save, from writing to their place in the folder."""

    def __init__(self, target: str | os.PathLike, variant: str | None):
        self.target = Path(target)
        self._is_new_folder = not self.target.exists()
        infix = re.escape(f".{variant}") if variant else ""
        self._weights = re.compile(
            rf"model{infix}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{infix}\.json"
        )
        self.target.mkdir(parents=True, exist_ok=True)
        put_back(self.target)
        self._suffix = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._hidden = self.target / f"{_WRITING}{self._suffix}"
        self._hidden.mkdir()
        # Held while this process lives: an unlocked folder tells the next save that its writer is gone.
        self._lock = FolderLock(self._hidden)
        self.new = self._hidden / "new"
        self.new.mkdir()
        self.published: set[str] | None = None

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Context with an empty folder, whose files are in the target afterwards; after an error none is."""
        try:
            yield self.new
            self.publish()
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Exchange the older files for the new ones; a second call does nothing."""
        if self.published is not None:
            return
        names = set(os.listdir(self.new))
        lock = FolderLock(self.target, wait=-1)
        try:
            _plan(self._hidden, self.target, self._outdated(names))
            _flush(self._hidden)
            self._rename(EXCHANGING)
            try:
                for source, destination in _moves(self._hidden, self.target):
                    source.rename(destination)
                sync(self.target)
            except BaseException:
                _undo(self._hidden, self.target)
                self._rename(_WRITING)
                raise
            self._rename(_DONE)
        finally:
            lock.release()
        self.published = names
        self._remove()

    def discard(self) -> None:
        """Remove what was written but not published."""
        self._remove()
        if self._is_new_folder:
            with suppress(OSError):
                self.target.rmdir()

    def _outdated(self, names: set[str]) -> set[str]:
        """Names in the target that would be read together with, or instead of, the new files."""
        # An adapter replaces no weights.
        if "config.json" not in names:
            return set()
        there = os.listdir(self.target)
        outdated = {name for name in there if self._weights.fullmatch(name) or _DISTRIBUTED.fullmatch(name)}
        if is_our_module(self.target / f"{MODULE_NAME}.py"):
            outdated.add(f"{MODULE_NAME}.py")
        return outdated

    def _rename(self, state: str) -> None:
        self._hidden = self._hidden.rename(self.target / f"{state}{self._suffix}")

    def _remove(self) -> None:
        if not self._hidden.name.startswith(EXCHANGING):
            shutil.rmtree(self._hidden, ignore_errors=True)
        self._lock.release()

    def place_in_target(self, folder: str | os.PathLike) -> tuple[Path, dict[str, float]]:
        """Where a folder of new files will be after publishing, and which other files are there.

        Returns:
            the path, and the modification times of its files that are older than this save.
        """
        place = self.target / Path(folder).relative_to(self.new)
        others = set(os.listdir(place)) - self.published if place == self.target else set()
        return place, {name: os.path.getmtime(place / name) for name in others}


@contextmanager
def saving_adapter(target: str | os.PathLike) -> Iterator[Path]:
    """Context with an empty folder, whose files are in `target` afterwards: all of them, or after an error none.

    Raises:
        OSError: a file cannot be written.
    """
    save = _Save(target, None)
    try:
        with save.files() as new:
            yield new
    except BaseException as error:
        # Trainer makes it before, and would take an empty one for its newest checkpoint.
        with suppress(OSError):
            save.target.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise OSError(
                f"{target}: the adapter cannot be written ({error}). What was there is unchanged: make room, and save "
                "it again."
            ) from error
        raise


def _without_wrappers(model: PreTrainedModel) -> dict[str, Any] | None:
    """Weights under the model's own names if wrappers of peft remain around its layers; else None.

    Deleting an adapter leaves its wrappers.
    """
    wrapped = r"\.(base_layer|original_module)(?=\.|$)"
    if not any(re.search(wrapped, name) for name, _ in model.named_modules()):
        return None
    with torch.device("meta"):
        expected = type(model)(copy.deepcopy(model.config)).state_dict()
    weights = {re.sub(wrapped, "", name): tensor for name, tensor in model.state_dict().items()}
    if getattr(model, "peft_config", None) or not expected.keys() <= weights.keys():
        raise ValueError(
            f"This {type(model).__name__} has adapters of a PeftModel in it, so that its weights have other names: "
            "call save_pretrained of the PeftModel, for the adapter alone, or of what merge_and_unload() returns."
        )
    return {name: weights[name] for name in expected}


class AtomicSaveMixin(PreTrainedModel):
    """`save_pretrained` for a model class; a base class to name before `PreTrainedModel`."""

    # Whether transformers undoes the rules of loading. Most of our keys are those of stock's files, and the rules let
    # classes read the folders of others: undone, even in models that were not loaded by them, nothing would fit.
    _has_original_format: ClassVar[bool] = False

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        **kwargs,
    ):
        """Save as `PreTrainedModel.save_pretrained` does, whole or not at all.

        All processes that share the weights call this together, or the first one alone with a `state_dict` of whole
        tensors, as Trainer does under accelerate's FSDP2. A model that transformers has sharded is saved by all.

        Raises:
            ValueError: a model in pipeline stages, of which no process has all weights, or one inside of a
                `PeftModel`, whose weights have other names.
            RuntimeError: a process that shares the weights did not call this within the process group's timeout.
        """
        refuse_stages(self)
        if state_dict is None:
            adapted = self._hf_peft_config_loaded
            state_dict = sharded_adapter(self) if adapted else _without_wrappers(self)
        # If each process writes its own shards, transformers takes them from the model.
        ranks = sharing_processes(self, None if distributed_checkpoint else state_dict)
        meet_before_saving(self, ranks)
        if state_dict is not None:
            # transformers gathers a model's shards, but not those of a given state dict. While it writes, it removes
            # tensors from the state dict, so the caller's is copied.
            state_dict = joined(state_dict) if is_sharded(state_dict.values()) else dict(state_dict)
        # An adapter is read from one file.
        if self._hf_peft_config_loaded:
            max_shard_size = sys.maxsize
        if push_to_hub:
            kwargs.setdefault("repo_id", os.fspath(save_directory).split(os.path.sep)[-1])
        save = _Save(save_directory, variant) if self.should_save_on_this_rank(is_main_process) else None
        saving = _current.set(save)
        try:
            with nullcontext(save_directory) if save is None else save.files() as folder:
                # Each of the processes writes a part.
                if distributed_checkpoint and ranks:
                    folder = broadcast(folder)
                super().save_pretrained(
                    folder,
                    is_main_process=is_main_process,
                    state_dict=state_dict,
                    push_to_hub=push_to_hub,
                    max_shard_size=max_shard_size,
                    variant=variant,
                    token=token,
                    save_peft_format=save_peft_format,
                    save_original_format=save_original_format and self._has_original_format,
                    distributed_checkpoint=distributed_checkpoint,
                    **kwargs,
                )
        finally:
            _current.reset(saving)
        # transformers waits for the writing process too, but before the files are in their place.
        meet_after_saving(ranks)

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, **kwargs):
        # A failed upload does not undo the save.
        if (save := _current.get()) is not None:
            save.publish()
            working_dir, files_timestamps = save.place_in_target(working_dir)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)


def _plan(hidden: Path, target: Path, outdated: set[str]) -> None:
    """Write the order in which files go from the target to `hidden / "old"`, and come from "old" or "new"."""
    present, arriving = set(os.listdir(target)), set(os.listdir(hidden / "new"))
    entries = {name for name in present if _rank(name)}
    leaving = present & (arriving | outdated | entries)
    coming = dict.fromkeys(entries - outdated, "old") | dict.fromkeys(arriving, "new")
    plan = {
        "leaving": sorted(leaving, key=_rank, reverse=True),
        "coming": [(name, coming[name]) for name in sorted(coming, key=_rank)],
    }
    (hidden / "old").mkdir()
    (hidden / "plan.json").write_text(json.dumps(plan), encoding="utf-8")


def _moves(hidden: Path, target: Path) -> list[tuple[Path, Path]]:
    """Renamings of a plan, as pairs of source and destination."""
    plan = json.loads((hidden / "plan.json").read_text(encoding="utf-8"))
    return [(target / name, hidden / "old" / name) for name in plan["leaving"]] + [
        (hidden / part / name, target / name) for name, part in plan["coming"]
    ]


def _undo(hidden: Path, target: Path) -> None:
    """Undo the renamings that were made: all, some or none."""
    for source, destination in reversed(_moves(hidden, target)):
        if os.path.lexists(destination) and not os.path.lexists(source):
            destination.rename(source)


def _rank(name: str) -> int:
    """How early a file leaves a folder, and how late it comes in."""
    return next((rank for rank, pattern in enumerate(_ENTRIES, 1) if pattern.fullmatch(name)), 0)


def _lock(folder: Path) -> FolderLock | None:
    """The lock of a hidden folder; None if another process holds it."""
    try:
        return FolderLock(folder)
    except Timeout:
        return None


def _flush(folder: Path) -> None:
    """Write all files below a folder to disk: a power failure must not leave names without content."""
    for place, _, names in os.walk(folder):
        for name in names:
            sync(Path(place, name))
