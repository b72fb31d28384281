"""LoRA layers for llamoe's stacks of experts and linear layers, derived from peft's.

In every forward, peft's own wrapper of a parameter computes W + BA for all experts: 4 GB a layer for Scout. Here each
row is multiplied by its expert's factors (`moe/low_rank.py`). Everything else is peft's: parameters, their names and
shapes in files, merging, and the choice among several adapters.

This file imports peft, so it is imported only when peft has been (`peft_registration.py`).

Shapes: E experts, r rank, I inputs, O outputs, N rows (each token once for each of its experts), H hidden_size.
"""

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.tuners.lora import layer
from torch import nn

from ..layers import Linear
from ..moe import NO_LORA, ExpertsLora, LowRank
from ..quantization import QuantizedLinear
from .expert_layout import by_expert
from .unsupported import unsupported

# Supported initialisations of factors.
_INITIALISATIONS = (True, False, "gaussian")
# Fields of `LoraConfig` that are refused for packed layers, since they compute from the weight's values.
_READING_WEIGHTS = ("use_dora", "kasa_config", "velora_config")
# Fields for other kinds of LoRA, such as DoRA; stacks refuse them.
_VARIANTS = [field.name for field in dataclasses.fields(LoraConfig) if field.metadata.get("is_lora_variant")]


class ParamWrapper(layer.ParamWrapper):
    """A LoRA layer for one stack of `Experts`.

    Its name is that of peft's class: by it peft recognises a wrapped stack that gets another adapter.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        parameter_name: str | None = None,
        *,
        config: LoraConfig,
        target_name: str = "",
        **kwargs: Any,
    ):
        if parameter_name is None:
            raise unsupported("target_modules", f"target_modules names {target_name}")
        super().__init__(base_layer, adapter_name, parameter_name, config=_without_dropout(config), **kwargs)
        self._set_dropout(adapter_name, config)

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
    ) -> None:
        """Add an adapter, as peft does, but also with dropout."""
        _refuse_fields(config, _INITIALISATIONS, (*_VARIANTS, "lora_bias"), self.parameter_name)
        super().update_layer(adapter_name, r, lora_alpha, config=_without_dropout(config), **kwargs)
        self._set_dropout(adapter_name, config)
        if (mesh := self.expert_mesh()) is not None:
            # Each process has the whole adapter: all must begin with the same values, the first process's.
            for factor in (self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight):
                if factor.device.type != "meta":
                    dist.broadcast(factor.data, group=mesh.get_group(), group_src=0)

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        experts: Any = self.get_base_layer()
        if not experts.is_offloaded:
            super()._move_adapter_to_device_of_base_layer(adapter_name, device)
            return
        # Not to the weights' device: offloaded weights are not where products are computed.
        dtype = None if experts.is_packed else experts.dtype
        for factors in (self.lora_A, self.lora_B):
            # Leave weights on meta, which are yet to be loaded from a file.
            if adapter_name in factors and not factors[adapter_name].weight.is_meta:
                factors[adapter_name].to(device=device or experts.device, dtype=dtype)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int] | tuple[None, None]:
        experts: Any = self.get_base_layer()
        if experts.storage is None:
            return super()._get_in_out_features(module)
        # peft takes the sizes from the shape of the parameter, but packed parameters have the shape of their codes.
        self.num_experts, *sizes = experts.stack_shape(self.parameter_name)
        self._param_ndim = 3
        return sizes[0], sizes[1]

    def _set_dropout(self, adapter_name: str, config: LoraConfig) -> None:
        self.lora_dropout[adapter_name] = (
            nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        )

    def forward(
        self, x: torch.Tensor, *args: Any, lora: ExpertsLora = NO_LORA, **kwargs: Any
    ) -> torch.Tensor:
        """Return what `Experts.forward` returns; `lora` has the other stack's factors, from the wrapper around this."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        lora = self.active_lora(lora)
        if not lora.updates():
            return self.base_layer(x, *args, **kwargs)
        if isinstance(self.base_layer, ParamWrapper) or self.expert_mesh() is None:
            return self.base_layer(x, *args, lora=lora, **kwargs)
        # Not as an argument: transformers' hook that exchanges tokens between processes takes no `lora`.
        experts: Any = self.get_base_layer()
        experts.lora = lora
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            experts.lora = NO_LORA

    def active_lora(self, lora: ExpertsLora = NO_LORA) -> ExpertsLora:
        """Return `lora` with the active adapters' factors for this stack; `lora` itself if they are off or merged."""
        if self.disable_adapters or self.merged:
            return lora
        updates = [self.update_of(name) for name in self.active_adapters if name in self.lora_A]
        return lora.with_stack(self.parameter_name, updates)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the stack; raise a `ValueError` if the stack is packed or offloaded."""
        _refuse_merging(self)
        super().merge(safe_merge, adapter_names)

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what merging adds to this process's part of the stack."""
        from torch.distributed.tensor import distribute_tensor

        delta, mesh = super().get_delta_weight(adapter_name, *args, **kwargs), self.expert_mesh()
        if delta.ndim == 2:
            # For a stack of one expert peft returns the matrix of a linear layer.
            delta = (delta.T if self.get_base_layer().is_transposed else delta)[None]
        if mesh is None:
            return delta
        return distribute_tensor(delta, mesh, self.get_param().placements, src_data_rank=None)

    def expert_mesh(self) -> Any:
        """Return the device mesh over which the experts are distributed; None if this process holds all of them."""
        mesh = getattr(self.get_param(), "device_mesh", None)
        return mesh if mesh is not None and mesh.mesh_dim_names == ("ep",) else None

    def _of_local_experts(self, factor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the slice, along the axis `dim`, of a factor for this process's experts.

        Each process keeps the whole factor; backward gathers its gradient from all processes.
        """
        mesh = self.expert_mesh()
        if mesh is None:
            return factor
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(factor, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(dim)]).to_local()

    def update_of(self, name: str) -> LowRank:
        """Return an adapter's factors, `[E, I, r]` and `[O, r, E]`; peft holds `[E * r, I]` and `[O, r * E]`."""
        a_ErI = self._of_local_experts(by_expert(self.lora_A[name].weight, 0, self.num_experts), 0)
        b_OrE = self._of_local_experts(by_expert(self.lora_B[name].weight, 1, self.num_experts), 2)
        return LowRank(a_ErI.transpose(1, 2), b_OrE, self.scaling[name], self.lora_dropout[name])


class LoraLinear(layer.Linear):
    """A LoRA layer for a plain or packed linear layer of llamoe.

    Its factors are llamoe's linear layers, too: on a processor without instructions for bfloat16, torch's products are
    many times slower under autocast.
    """

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
    ) -> None:
        """Add an adapter, as peft does."""
        if _storage_of(self) is not None:
            # "eva" computes from activations that the user collects, not from the weight.
            _refuse_fields(config, (*_INITIALISATIONS, "eva"), _READING_WEIGHTS, "a packed layer")
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)
        for factor in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            if type(factor) is nn.Linear:
                factor.__class__ = Linear

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the weight; raise a `ValueError` if it is packed: peft would add to its codes."""
        _refuse_merging(self)
        super().merge(safe_merge, adapter_names)


def lora_linear(
    target: nn.Module, adapter_name: str, config: LoraConfig, parameter_name: str | None = None, **kwargs: Any
) -> LoraLinear | None:
    """Return the LoRA layer for a linear layer; None for plain parameters and `fan_in_fan_out`, left to peft."""
    is_packed = isinstance(target, QuantizedLinear)
    if is_packed and parameter_name is not None:
        raise unsupported("target_parameters", f"target_parameters names {kwargs.get('target_name')}")
    if not is_packed and (parameter_name is not None or config.fan_in_fan_out):
        return None
    return LoraLinear(target, adapter_name, config=config, **kwargs)


def _without_dropout(config: LoraConfig) -> LoraConfig:
    """Return a copy of a `LoraConfig` without dropout, which peft refuses for stacks."""
    config = copy.copy(config)
    config.lora_dropout = 0.0
    return config


def _refuse_fields(
    config: LoraConfig, initialisations: tuple[Any, ...], refused: tuple[str, ...], where: str
) -> None:
    """Raise a `ValueError` for an initialisation not in `initialisations`, or a `refused` field that is set."""
    if (initialisation := config.init_lora_weights) not in initialisations:
        raise unsupported(
            "init_lora_weights", f"LoraConfig(init_lora_weights={initialisation!r}) for {where}"
        )
    for name in refused:
        if value := getattr(config, name):
            raise unsupported("variant", f"LoraConfig({name}={value!r}) for {where}")


def _storage_of(module: Any) -> str | None:
    """Return how the weight under a LoRA layer is packed or offloaded; None if it is plain and in memory."""
    return getattr(module.get_base_layer(), "storage", None)


def _refuse_merging(module: Any) -> None:
    if (storage := _storage_of(module)) is not None:
        raise unsupported("merge", f"{type(module.get_base_layer()).__name__} is {storage}")
