"""`load_adapter` of our models: an adapter is compared with the model before anything changes."""

import os
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ...configuration.hub import hub_arguments
from .files import check_files
from .fitting import fit_folder, fit_state_dict, skeleton_with
from .stack_targets import reading


class LoadsAdapters(PreTrainedModel):
    """peft's adapters for a model class; a base class to name before `PreTrainedModel`."""

    def load_adapter(
        self,
        peft_model_id: str | os.PathLike | None = None,
        adapter_name: str | None = None,
        peft_config: Any = None,
        adapter_state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs,
    ):
        """Load one of peft's adapters, as `PreTrainedModel.load_adapter` does.

        It is first compared with the model, so that an adapter of another base is refused before anything changes.
        Adapters of stock Llama and Llama 4 fit; factors of experts that were trained on stock are exchanged.

        Args:
            peft_model_id: a folder, or `owner/name` on the Hub.
            adapter_name: default: "default".
            peft_config: the adapter's config, instead of the folder's.
            adapter_state_dict: its weights, instead of the folder's.
            **kwargs: further arguments of `PreTrainedModel.load_adapter`.

        Raises:
            ValueError: an adapter of another model, or a damaged file.
            OSError: there is no adapter.
        """
        if "disk" in (getattr(self, "hf_device_map", None) or {}).values():
            raise ValueError(
                "load_adapter: a part of the model is on disk, where no adapter can be added to it. Give the layers "
                "that the adapter changes another place in device_map, or merge the adapter into the checkpoint first."
            )
        from peft import get_peft_config
        from peft.utils import load_peft_weights

        config = get_peft_config(peft_config) if isinstance(peft_config, dict) else peft_config
        tensors = adapter_state_dict
        name, strict = adapter_name or "default", not kwargs.get("ignore_mismatched_sizes")
        make_skeleton = None
        if peft_model_id is not None and (config is None or tensors is None):
            download = dict(getattr(kwargs.get("load_config"), "download_kwargs", None) or {})
            download |= {**kwargs, **(kwargs.get("adapter_kwargs") or {})}
            download = hub_arguments(download)
            if "revision" in download:
                # The revision may be an object that also carries the commit in the base model's repository.
                download["revision"] = str(download["revision"])
            config_of_file, headers = check_files(self, peft_model_id, **download)
            config = config_of_file if config is None else config
            if tensors is None and config is not None:
                # Headers reveal a tensor of a wrong shape before it is read.
                make_skeleton = cache(partial(skeleton_with, self, config, name))
                empty = {key: torch.empty(header.shape, device="meta") for key, header in headers.items()}
                if empty:
                    fit_folder(self, config, name, empty, strict, make_skeleton)
                tensors = load_peft_weights(os.fspath(peft_model_id), device="cpu", **download)
        if config is not None and tensors is not None:
            tensors = fit_folder(self, config, name, tensors, strict, make_skeleton)
        with reading(tensors or ()):
            return super().load_adapter(
                peft_model_id,
                adapter_name=adapter_name,
                peft_config=config,
                adapter_state_dict=tensors,
                **kwargs,
            )

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # peft's own classes load an adapter's weights through this method.
        if self.__dict__.get("peft_config"):
            fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
