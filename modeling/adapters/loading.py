"""`load_adapter` of our models: what does not fit is an error."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils.loading_report import LoadStateDictInfo

from .files import tensor_names
from .fitting import fit_state_dict
from .stack_targets import adapter_being_read, reading


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

        keys: Any = adapter_state_dict
        if keys is None and peft_model_id is not None:
            download = dict(getattr(kwargs.get("load_config"), "download_kwargs", None) or {})
            download |= {**kwargs, **(kwargs.get("adapter_kwargs") or {})}
            if "revision" in download:
                # The revision may be an object that also carries the commit in the base model's repository.
                download["revision"] = str(download["revision"])
            keys = tensor_names(peft_model_id, **download)
        with reading(keys or (), adapter_name or "default"):
            return super().load_adapter(
                peft_model_id,
                adapter_name=adapter_name,
                peft_config=get_peft_config(peft_config) if isinstance(peft_config, dict) else peft_config,
                adapter_state_dict=adapter_state_dict,
                **kwargs,
            )

    def _load_adapter_tensors(
        self, tensors: Mapping[str, torch.Tensor] | None, files: Iterable[str], ignore_mismatched_sizes: bool
    ) -> LoadStateDictInfo:
        """Load tensors of an adapter whose layers peft has made, as peft's own classes do."""
        from peft import set_peft_model_state_dict

        if tensors is None:
            tensors = {key: tensor for file in files for key, tensor in load_state_dict(file).items()}
        tensors = {key.removeprefix("base_model.model."): tensor for key, tensor in tensors.items()}
        name = adapter_being_read() or "default"
        if self.peft_config[name].peft_type == "RANDLORA":
            # It draws the tensors that its layers share anew, from a seed in its config.
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("base_model.")}
        result = set_peft_model_state_dict(self, tensors, name, ignore_mismatched_sizes)
        return LoadStateDictInfo(
            missing_keys={key for key in result.missing_keys if f".{name}" in key},
            unexpected_keys=set(result.unexpected_keys),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # peft's own classes load an adapter's weights through this method.
        if self.__dict__.get("peft_config"):
            fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
