"""`save_pretrained` that never leaves a mixture of two models in a folder.

transformers writes file by file into the folder. If it is interrupted, shards of the older and the newer model stay
there, and load together in silence. Here all files are written to a hidden folder inside the target, which is on the
same file system. Then the older files are removed, config.json first, and the new ones moved to the target, config.json
last. An error while files are written leaves the older model unchanged. A kill between two moves leaves a folder that
does not load, since it lacks config.json. An adapter may be saved beside its model's config.json, so an adapter's
weights are removed first and moved last.
"""

import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from transformers import PreTrainedModel

from ...configuration.hub import MODULE_NAME, is_our_module
from .._private_api import registered_conversions
from ..parallel import is_shared, joined, sharded_adapter, size_of
from .whole_folders import sync

# Files and folders in which each process has saved its shards. transformers reads them before other weights.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors|sharded|consolidated")

# The save that is running.
_current: ContextVar["_Save | None"] = ContextVar("llamoe_save", default=None)


class _Save:
    """One save: makes a hidden folder, in which files are written, and moves them to the target."""

    def __init__(self, target: str | os.PathLike, variant: str | None):
        self.target = Path(target)
        self._is_new_folder = not self.target.exists()
        infix = re.escape(f".{variant}") if variant else ""
        self._weights = re.compile(
            rf"model{infix}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{infix}\.json"
        )
        self.target.mkdir(parents=True, exist_ok=True)
        prefix = f".llamoe-saving-{socket.gethostname()}-"
        # Remove the hidden folders of processes that were killed.
        for folder in self.target.glob(f"{prefix}*"):
            # Names of other hosts may begin with this one's: skip what is no number of a process and random letters.
            process = re.fullmatch(r"(\d+)-\w+", folder.name.removeprefix(prefix))
            if process and not psutil.pid_exists(int(process[1])):
                shutil.rmtree(folder, ignore_errors=True)
        self.new = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=self.target))
        self.published: set[str] | None = None

    @contextmanager
    def files(self) -> Iterator[Path]:
        """Yield an empty folder; at exit move its files to the target, unless there was an error."""
        try:
            yield self.new
            self.publish()
        finally:
            shutil.rmtree(self.new, ignore_errors=True)
            if self._is_new_folder and self.published is None:
                with suppress(OSError):
                    self.target.rmdir()

    def publish(self) -> None:
        """Replace the older files in the target by the new ones; a second call does nothing."""
        if self.published is not None:
            return
        names = sorted(os.listdir(self.new), key=_rank)
        for folder, _, files in os.walk(self.new):
            for name in files:
                sync(Path(folder, name))
        for name in sorted(self._outdated(names), key=_rank, reverse=True):
            path = self.target / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in names:
            (self.new / name).replace(self.target / name)
        sync(self.target)
        self.published = set(names)

    def _outdated(self, names: list[str]) -> set[str]:
        """Return the names in the target that loaders would read together with the new files, or instead of them."""
        there = set(os.listdir(self.target))
        outdated: set[str] = set()
        if "adapter_config.json" in names:
            outdated |= {"adapter_model.safetensors", "adapter_model.bin"}
        # A model replaces all weights of an older one; an adapter, which has no config.json, replaces no model.
        if "config.json" in names:
            weights = self._weights.fullmatch
            outdated |= {name for name in there if weights(name) or _DISTRIBUTED.fullmatch(name)}
            outdated.add("config.json")
            if is_our_module(self.target / f"{MODULE_NAME}.py"):
                outdated.add(f"{MODULE_NAME}.py")
        return outdated & there


def _rank(name: str) -> tuple[bool, ...]:
    """Return a sort key: the larger it is, the later a file is moved to the target, and the earlier it is removed."""
    return name == "config.json", name.startswith("adapter_model."), ".index." in name


def _remove_wrappers(model: PreTrainedModel) -> None:
    """Remove peft's wrappers of layers, which give weights other names, and stay when adapters are deleted.

    Raises:
        ValueError: the model still has adapters.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            layer = child
            while wrapped := getattr(layer, "original_module", None) or getattr(layer, "base_layer", None):
                layer = wrapped
            if layer is child:
                continue
            if getattr(model, "peft_config", None):
                raise ValueError(
                    f"This {type(model).__name__} is inside of a PeftModel, which has renamed its weights. To save the "
                    "adapter, call save_pretrained of the PeftModel; to save the whole model, call it of the model "
                    "that merge_and_unload() returns."
                )
            setattr(parent, name, layer)


class AtomicSaveMixin(PreTrainedModel):
    """A mixin whose `save_pretrained` replaces a folder's model as a whole; name it before `PreTrainedModel`."""

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
        """Save as `PreTrainedModel.save_pretrained` does, but replace the folder's older model as a whole.

        All processes that share the weights call this together; or the first calls it alone, with a `state_dict` of
        whole tensors, as Trainer does under accelerate's FSDP2.

        Args:
            unfuses: write tensors in the layout of transformers' class for this model type, with Mixtral's experts one
                by one; otherwise write the tensors of `state_dict()`.
            save_original_format: without effect. transformers would reverse the rules that loading has used, which
                may have renamed the tensors of another class's folder.

        Raises:
            ValueError: the model is in pipeline stages, or inside of a `PeftModel`.
        """
        if (stages := size_of(self.config, "pp")) > 1:
            raise ValueError(
                f"save_pretrained: this {type(self).__name__} is in {stages} pipeline stages, so no process has all "
                "weights. Load it without pp_size to save it."
            )
        if state_dict is None and self._hf_peft_config_loaded:
            state_dict = sharded_adapter(self)
        elif state_dict is None:
            _remove_wrappers(self)
        # With `distributed_checkpoint` each process writes its shards of the model itself.
        has_to_wait = is_shared(self, None if distributed_checkpoint else state_dict)
        if state_dict is not None:
            # transformers gathers the shards of a model, but not of a state dict. And it removes tensors from the
            # state dict that it has written, so it gets a copy.
            state_dict = joined(state_dict)
        # transformers and peft read an adapter from one file.
        if self._hf_peft_config_loaded:
            max_shard_size = sys.maxsize
        if push_to_hub:
            kwargs.setdefault("repo_id", os.fspath(save_directory).split(os.path.sep)[-1])
        save = _Save(save_directory, variant) if self.should_save_on_this_rank(is_main_process) else None
        saving = _current.set(save)
        try:
            files = nullcontext(save_directory) if save is None else save.files()
            with files as folder, registered_conversions(self):
                # All processes write to the folder that the first one has made.
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
        # transformers' own wait for the writing process ends before the files are moved to the target.
        if has_to_wait:
            dist.barrier()

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, **kwargs):
        # Move the files to the target before the upload, which may fail.
        if (save := _current.get()) is not None:
            save.publish()
            working_dir = save.target
            # Upload only the new files: transformers skips those listed with their present time.
            older = set(os.listdir(working_dir)) - save.published
            files_timestamps = {name: os.path.getmtime(working_dir / name) for name in older}
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)
