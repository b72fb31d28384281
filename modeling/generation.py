"""`generate` for all model classes, with what chunked layers, pictures and quantized caches need."""

import copy
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, ProcessorMixin

from ._compat import CACHE_ARGUMENT
from .attention import rules_of
from .moe import check_kernels


class Generation(GenerationMixin):
    """Base of classes that generate; name it before `GenerationMixin`, which transformers requires as a direct base."""

    config: Any

    def generate(self, inputs=None, *args, **kwargs):
        """Generate tokens; arguments as in `GenerationMixin.generate`.

        Raises:
            ValueError: a prompt is padded on the right, and does not fit into a chunk together with the new tokens.
        """
        check_kernels(self)  # pyright: ignore[reportArgumentType]
        if "past_key_values" in kwargs:
            # transformers has renamed this argument, and warns of the former name.
            kwargs["cache"] = kwargs.pop("past_key_values")
        if "pixel_values" in kwargs and kwargs["pixel_values"] is None:
            # transformers would encode None as if it were a picture.
            del kwargs["pixel_values"]
        # `transformers serve` passes a processor as `tokenizer`, but stop strings need methods of a tokenizer.
        if isinstance(kwargs.get("tokenizer"), ProcessorMixin):
            kwargs["tokenizer"] = kwargs["tokenizer"].tokenizer
        return super().generate(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    # transformers reads from this signature that the model accepts `inputs_embeds`.
    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, **kwargs):
        """Return the inputs of one step of `generate`, with the cache under the name that peft looks for."""
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if "cache" in inputs:
            inputs[CACHE_ARGUMENT] = inputs.pop("cache")
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, mode, batch_size, max_cache_length
    ):
        mask, chunk_size = model_kwargs.get("attention_mask"), _chunk_size(self.config)
        has_several_chunks = chunk_size is not None and max_cache_length > chunk_size
        if has_several_chunks and isinstance(mask, torch.Tensor) and mask.ndim == 2:
            rows = ((mask[:, -1:] == 0) & (mask != 0).any(1, keepdim=True)).nonzero()
            if len(rows):
                # Positions count tokens without padding, and decide where chunks begin: new tokens' would be wrong.
                raise ValueError(
                    f"the last token of row {int(rows[0, 0])} counts as padding, by attention_mask or by pad_token_id: "
                    f"chunks (attention_chunk_size = {chunk_size}) would be wrong for new tokens. Pad prompts on the "
                    'left: tokenizer.padding_side = "left"; if the token is no padding, give an attention_mask.'
                )
        if generation_config.cache_implementation == "quantized":
            # This cache keeps all tokens, and refuses layers with windows or chunks, which our masks apply anyway.
            text_config = copy.copy(self.config.get_text_config(decoder=True))
            text_config.layer_types = ["full_attention"] * text_config.num_hidden_layers
            options = generation_config.cache_config or {}
            generation_config.cache_config = {"config": text_config, **options}
        prepare = super()._prepare_cache_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(generation_config, model_kwargs, mode, batch_size, max_cache_length)

    def init_continuous_batching(self, *args, **kwargs):
        """Return the manager of continuous batching, which `generate_batch` uses; arguments as in transformers.

        Raises:
            ValueError: the model has chunked layers, which transformers' paged cache does not support.
        """
        if (chunk_size := _chunk_size(self.config)) is not None:
            raise ValueError(
                f"Continuous batching does not support attention_chunk_size = {chunk_size}: use generate()."
            )
        return super().init_continuous_batching(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def _chunk_size(config: PreTrainedConfig) -> int | None:
    """Return the chunk size of the model's chunked layers; None if it has none."""
    rules = rules_of(config.get_text_config(decoder=True)).values()
    return next((rule.chunk_size for rule in rules if rule.chunk_size), None)
