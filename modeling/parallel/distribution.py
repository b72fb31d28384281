"""A model over several devices: the methods that transformers calls to load and save shards.

The plans are data (`configuration.parallel`). Here they are joined for a model, checked against the number of
devices, and undone when a checkpoint is written.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...configuration.parallel import check_parallel
from .._compat import splits_packed_columns_unevenly
from .gathering import is_sharded, joined, size_of


def parallel_sizes(distributed_config: Any) -> tuple[int, int]:
    """Return the number of devices for tensor parallelism and for expert parallelism; 1 if unused."""
    tp_size = 1 if distributed_config.tp_plan == {} else size_of(distributed_config, "tp")
    return tp_size, size_of(distributed_config, "ep")


def refuse_shares_of_packed(model: nn.Module, distributed_config: Any) -> None:
    """Refuse to share quantized layers between processes.

    A share would cut through groups of weights, and scales have no plan. transformers' stages of a pipeline exchange
    activations in the dtype of their first parameter, which may be that of codes.

    Raises:
        ValueError: any of these ways to share, and a packed layer.
    """
    packed = next(
        (name for name, module in model.named_modules() if getattr(module, "is_packed", False)), None
    )
    names = ("tp", "ep", "fsdp", "dp_replicate", "pp")
    sizes = [f"{name}_size = {size}" for name in names if (size := size_of(distributed_config, name)) > 1]
    if packed is not None and sizes:
        raise ValueError(
            f"{', '.join(sizes)}: {packed} is quantized, and such a model cannot be shared by processes: "
            "leave distributed_config out, which gives each process the whole model, or load the 16-bit checkpoint."
        )


class Distributed(PreTrainedModel):
    """Tensor, expert, pipeline and FSDP2 parallelism; a base class to name before `PreTrainedModel`."""

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        """Distribute the empty model over the devices; `from_pretrained` calls this before it reads a weight.

        Raises:
            ValueError: the number of devices does not divide the attention heads or the experts; pipeline stages of
                a model whose layers are not one sequence; shares of quantized weights.
        """
        if mesh is not None:
            refuse_shares_of_packed(model, distributed_config)
            stages = size_of(distributed_config, "pp")
            if stages > 1 and not hasattr(model.base_model, "layers"):
                raise ValueError(
                    f"pp_size = {stages}: a {type(model).__name__} has no pipeline stages, which are for text models. "
                    "LlamoeForCausalLM loads the text model of a multimodal folder; tp_size and fsdp_size are for all."
                )
            check_parallel(model.config, *parallel_sizes(distributed_config))
            model.keep_uneven_experts(size_of(distributed_config, "tp"))
            if parallel_sizes(distributed_config)[1] > 1:
                # Remove tensor parallel rules that the expert plan replaces: transformers skips them, peft does not.
                for rule in model._ep_plan:
                    model._tp_plan.pop(rule, None)
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def _expand_parallel_plan(self, plan: dict[str, str]) -> dict[str, str]:
        # transformers cuts the model into stages after this, and would report other stages' weights as missing.
        expanded = super()._expand_parallel_plan(plan)
        if size_of(self.config.distributed_config, "pp") == 1:
            return expanded
        from transformers.distributed.pipeline_parallel import PipelineStage

        stage = PipelineStage(self._mesh_manager.get_mesh("pp"))
        prefix, layers = self.base_model_prefix, len(self.base_model.layers)
        is_tied = self.config.tie_word_embeddings and stage.pp_is_last_stage

        def is_here(name: str) -> bool:
            own = stage.find_rank_for_key(f"{name}.", layers, prefix)
            return own in (None, stage.pp_rank) or (is_tied and name.startswith(f"{prefix}.embed_tokens"))

        return {name: style for name, style in expanded.items() if is_here(name)}

    def keep_uneven_experts(self, tp_size: int) -> None:
        """Keep experts whole on each device if this release of torch cannot split them."""
        if splits_packed_columns_unevenly() or not self.config.get_text_config().intermediate_size % tp_size:
            return
        for rule in [rule for rule in self._tp_plan or {} if ".experts" in rule]:
            del self._tp_plan[rule]

    def gather_sharded_state_dict_for_save(self, model_to_save, state_dict, distributed_config, **kwargs):
        """Gather the shards; `save_pretrained` calls this in every process."""
        # Nothing is sharded, or the shards have been gathered already.
        if not is_sharded(state_dict.values()):
            return state_dict if kwargs.get("save_on_this_rank", True) else {}
        tp_size, *others = (size_of(distributed_config, name) for name in ("tp", "fsdp", "dp_replicate"))
        # Tensor or expert parallelism alone.
        if distributed_config is None or (tp_size > 1 and others == [1, 1]):
            state_dict = joined(state_dict)
        return super().gather_sharded_state_dict_for_save(
            model_to_save, state_dict, distributed_config, **kwargs
        )
