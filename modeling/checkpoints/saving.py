"""`save_pretrained` that never leaves a mixture of two models in a folder.

transformers writes file by file into the folder. Cut off half-way, it leaves shards of the older and the newer model,
which load together in silence. Here everything is written to a hidden folder inside the target, so on the same file
system. Then the older config.json and index are removed, and the new files are moved to their place, index and
config.json last. A failure while files are written leaves the older model unchanged; a kill between the moves leaves a
folder that does not load. An adapter's weight file is treated like config.json: a model may be in the same folder.
"""

import copy
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...configuration.hub import MODULE_NAME, is_our_module
from .._private_api import registered_conversions
from ..parallel import is_shared, joined, sharded_adapter, size_of
from .whole_folders import sync

# If shards of a job's processes exist, transformers reads no other weights.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors|sharded|consolidated")

# The save in progress.
_current: ContextVar["_Save | None"] = ContextVar("llamoe_save", default=None)


class _Save:
    """One save: files are written to a hidden folder, then moved to the target."""

    def __init__(self, target: str | os.PathLike, variant: str | None):
        self.target = Path(target)
        self._is_new_folder = not self.target.exists()
        infix = re.escape(f".{variant}") if variant else ""
        self._weights = re.compile(
            rf"model{infix}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{infix}\.json"
        )
        self.target.mkdir(parents=True, exist_ok=True)
        here = f".llamoe-saving-{socket.gethostname()}-"
        for left in self.target.glob(f"{here}*"):
            if not _is_running(left.name.removeprefix(here).partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
        self.new = self.target / f"{here}{os.getpid()}-{secrets.token_hex(4)}"
        self.new.mkdir()
        self.published: set[str] | None = None

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Enter with an empty folder; at exit move its files to the target, or none of them after an error."""
        try:
            yield self.new
            self.publish()
        finally:
            shutil.rmtree(self.new, ignore_errors=True)
            if self._is_new_folder and self.published is None:
                with suppress(OSError):
                    self.target.rmdir()

    def publish(self) -> None:
        """Replace the older files by the new ones; a second call does nothing."""
        if self.published is not None:
            return
        names = sorted(os.listdir(self.new), key=_rank)
        for place, _, files in os.walk(self.new):
            for name in files:
                sync(Path(place, name))
        for name in sorted(self._outdated(names), key=_rank, reverse=True):
            path = self.target / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in names:
            (self.new / name).replace(self.target / name)
        sync(self.target)
        self.published = set(names)

    def _outdated(self, names: list[str]) -> set[str]:
        """Return the names in the target that would be read together with, or instead of, the new files."""
        there = set(os.listdir(self.target))
        outdated: set[str] = set()
        if "adapter_config.json" in names:
            outdated |= {"adapter_model.safetensors", "adapter_model.bin"}
        # A model replaces all weights in the folder; an adapter, which has no config.json, replaces none.
        if "config.json" in names:
            weights = self._weights.fullmatch
            outdated |= {name for name in there if weights(name) or _DISTRIBUTED.fullmatch(name)}
            outdated.add("config.json")
            if is_our_module(self.target / f"{MODULE_NAME}.py"):
                outdated.add(f"{MODULE_NAME}.py")
        return outdated & there


def _rank(name: str) -> tuple[bool, ...]:
    """Sort key of a file: it says how late the file comes into a folder, and how early it leaves."""
    return name == "config.json", name.startswith("adapter_model."), ".index." in name


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:
        # The process belongs to another user, so it exists.
        return True
    return True


def _without_wrappers(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the weights under the model's own names if peft's wrappers remain around layers; else None.

    Deleting an adapter leaves its wrappers in the model.
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
        unfuses: bool = False,
        **kwargs,
    ):
        """Save as `PreTrainedModel.save_pretrained` does; no folder ever holds a part of each of two models.

        With `unfuses` files have the layout that is registered for the model type, whatever layout was loaded. Else
        they have the tensors of `state_dict()`: loading rules also rename tensors of other classes' folders, and must
        not be reversed. `save_original_format` has no effect.

        All processes that share the weights call this together, or the first one alone with a `state_dict` of whole
        tensors, as Trainer does under accelerate's FSDP2. A model that transformers has sharded is saved by all.

        Raises:
            ValueError: a model in pipeline stages, of which no process has all weights, or one inside of a
                `PeftModel`, whose weights have other names.
        """
        if (stages := size_of(self.config, "pp")) > 1:
            raise ValueError(
                f"save_pretrained: this {type(self).__name__} is in {stages} pipeline stages, and no process has all "
                "of its weights. Load it without pp_size to save it."
            )
        if state_dict is None:
            adapted = self._hf_peft_config_loaded
            state_dict = sharded_adapter(self) if adapted else _without_wrappers(self)
        # If each process writes its own shards, transformers takes them from the model.
        has_to_wait = is_shared(self, None if distributed_checkpoint else state_dict)
        if state_dict is not None:
            # transformers gathers a model's shards, but not those of a given state dict. While it writes, it removes
            # tensors from the state dict, so the caller's is copied.
            state_dict = joined(state_dict)
        # An adapter is read from one file.
        if self._hf_peft_config_loaded:
            max_shard_size = sys.maxsize
        if push_to_hub:
            kwargs.setdefault("repo_id", os.fspath(save_directory).split(os.path.sep)[-1])
        save = _Save(save_directory, variant) if self.should_save_on_this_rank(is_main_process) else None
        saving = _current.set(save)
        try:
            place = nullcontext(save_directory) if save is None else save.files()
            with place as folder, registered_conversions(self):
                # Each of the processes writes a part.
                if distributed_checkpoint and has_to_wait:
                    folders = [folder]
                    dist.broadcast_object_list(folders, src=0)
                    (folder,) = folders
                super().save_pretrained(
                    folder,
                    is_main_process=is_main_process,
                    state_dict=state_dict,
                    push_to_hub=push_to_hub,
                    max_shard_size=max_shard_size,
                    variant=variant,
                    token=token,
                    save_peft_format=save_peft_format,
                    save_original_format=unfuses,
                    distributed_checkpoint=distributed_checkpoint,
                    **kwargs,
                )
        finally:
            _current.reset(saving)
        # transformers waits for the writing process too, but before the files are in their place.
        if has_to_wait:
            dist.barrier()

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, **kwargs):
        # A failed upload does not undo the save.
        if (save := _current.get()) is not None:
            save.publish()
            working_dir = save.target
            others = set(os.listdir(working_dir)) - save.published
            files_timestamps = {name: os.path.getmtime(working_dir / name) for name in others}
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)
