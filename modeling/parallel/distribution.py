"""A model over several devices: the methods that transformers calls to load and save shards.

The plans are data (`configuration.parallel`). Here they are joined for a model, checked against the number of
devices, and undone when a checkpoint is written.
"""

import torch
from transformers import PreTrainedModel

from ...configuration.parallel import check_parallel, wildcard
from .._compat import (
    adapts_shards,
    has_part,
    is_tensor_parallel_only,
    parallel_sizes,
    register_parallel_style,
    shards_unevenly,
)
from ..moe import Experts
from .expert_parallel import DispatchExperts
from .gathering import is_sharded, joined, sharing_processes

register_parallel_style("ep_dispatch_experts", DispatchExperts())


class Distributed(PreTrainedModel):
    """Tensor, expert, pipeline and FSDP2 parallelism; a base class to name before `PreTrainedModel`."""

    def init_parallel_plans(self) -> None:
        """Join the plans of configuration, heads and parts, without rules for parts that this model lacks."""
        super().init_parallel_plans()
        plans = [plan for plan in (self._tp_plan, self._ep_plan, self._fsdp_plan) if plan]
        # Each rule is followed into the model, mostly to its first layer. Listing all names of a deep model would take
        # as long as reading the headers of its files.
        for rule in set().union(*plans):
            if not has_part(self, rule):
                for plan in plans:
                    plan.pop(rule, None)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        """Distribute the empty model over the devices; `from_pretrained` calls this before it reads a weight.

        Raises:
            ValueError: the number of devices does not divide the attention heads or the experts, or pipeline stages of
                a model whose layers are not one sequence.
        """
        if mesh is not None:
            stages = getattr(distributed_config, "pp_size", None) or 1
            if stages > 1 and not hasattr(model.base_model, "layers"):
                raise ValueError(
                    f"pp_size = {stages}: a {type(model).__name__} has no pipeline stages, which are for text models. "
                    "LlamoeForCausalLM loads the text model of a multimodal folder; tp_size and fsdp_size are for all."
                )
            check_parallel(model.config, *parallel_sizes(distributed_config))
            if not shards_unevenly():
                model._drop_uneven_rules(distributed_config.tp_size or 1)
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def _drop_uneven_rules(self, tp_size: int) -> None:
        """Drop rules for tensors that this release cannot split, such as an odd vocabulary: they stay whole."""
        plan = self._tp_plan or {}
        for name, module in self.named_modules():
            rule = wildcard(name)
            style = plan.get(rule)
            if style is None:
                continue
            if isinstance(module, Experts):
                size = module.down_proj.shape[1]
            elif isinstance(module, torch.nn.Embedding):
                size = module.num_embeddings
            else:
                size = module.in_features if style == "rowwise" else module.out_features
            if size % tp_size:
                for key in [key for key in plan if f"{key}.".startswith(f"{rule}.")]:
                    del plan[key]

    def add_adapter(self, *args, **kwargs):
        """Add a new adapter, as `PreTrainedModel.add_adapter` does.

        Raises:
            ValueError: the model is sharded, which this release of peft does not support.
        """
        self._check_takes_adapter()
        return super().add_adapter(*args, **kwargs)

    def load_adapter(self, *args, **kwargs):
        """Load an adapter, as `PreTrainedModel.load_adapter` does.

        Raises:
            ValueError: the model is sharded, which this release of peft does not support.
        """
        self._check_takes_adapter()
        return super().load_adapter(*args, **kwargs)

    def _check_takes_adapter(self) -> None:
        ranks = sharing_processes(self, None)
        if is_sharded(self.parameters()) and ranks and not adapts_shards():
            raise ValueError(
                f"The weights of this {type(self).__name__.removeprefix('FSDP')} are shared by {len(ranks)} processes, "
                "and this release of peft makes an adapter for the part of one. Install peft>=0.21.1, or add the "
                "adapter first and shard the model with accelerate or fully_shard then."
            )

    def gather_sharded_state_dict_for_save(self, model_to_save, state_dict, distributed_config, **kwargs):
        """Gather the shards; `save_pretrained` calls this in every process."""
        # Nothing is sharded, or the shards have been gathered already.
        if not is_sharded(state_dict.values()):
            return state_dict if kwargs.get("save_on_this_rank", True) else {}
        if distributed_config is None or is_tensor_parallel_only(distributed_config):
            state_dict = joined(state_dict)
        return super().gather_sharded_state_dict_for_save(
            model_to_save, state_dict, distributed_config, **kwargs
        )
