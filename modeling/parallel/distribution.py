"""A model over several devices: the methods that transformers calls to load and save shards.

`configuration.parallel` has the plans, as data; here they are applied to a model, and undone when it is saved.
"""

from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer, apply_pipeline_parallelism

from .gathering import is_sharded, joined, size_of


class Distributed(PreTrainedModel):
    """Base class for tensor, expert, pipeline and FSDP2 parallelism; name it before `PreTrainedModel`."""

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh):
        """Distribute the empty model over the devices; `from_pretrained` calls this before it reads a weight.

        Raises:
            ValueError: the model is quantized: shards would split groups of weights with one scale, the plans lack the
                scales, and pipeline stages send activations in the dtype of the first parameter.
        """
        if mesh is not None:
            if any(getattr(module, "is_packed", False) for module in model.modules()):
                raise ValueError(
                    f"distributed_config: this {cls.__name__} is quantized, and cannot be shared by processes. Leave "
                    "distributed_config out, which gives each process the whole model, or load the 16-bit checkpoint."
                )
            model.keep_uneven_experts(size_of(distributed_config, "tp"))
            if size_of(distributed_config, "ep") > 1:
                # Remove tensor parallel rules that the expert plan replaces: transformers skips them, peft does not.
                for rule in model._ep_plan:
                    model._tp_plan.pop(rule, None)
            if size_of(distributed_config, "pp") > 1:
                # Cut the model first: transformers would apply rules to modules that its later cut has removed.
                apply_pipeline_parallelism(model, mesh.get_mesh("pp"))
                for name, module in model.named_modules():
                    if isinstance(module, PipelineIdentityLayer):
                        model._tp_plan.pop(name, None)
        return super().maybe_distribute_model(model, distributed_config, mesh)

    def keep_uneven_experts(self, tp_size: int) -> None:
        """Keep experts whole if their width is no multiple of `tp_size`: torch 2.14 cannot split it."""
        if self.config.get_text_config().intermediate_size % tp_size:
            self._tp_plan = {rule: style for rule, style in self._tp_plan.items() if ".experts" not in rule}

    def gather_sharded_state_dict_for_save(self, model_to_save, state_dict, distributed_config, **kwargs):
        """Gather the shards; `save_pretrained` calls this in every process."""
        # transformers gathers only models that it has sharded, and may take their weights instead of `state_dict`.
        if distributed_config is None or not is_sharded(state_dict.values()):
            whole = joined(state_dict)
            return whole if kwargs.get("save_on_this_rank", True) else {}
        gather = super().gather_sharded_state_dict_for_save
        return gather(model_to_save, state_dict, distributed_config, **kwargs)
