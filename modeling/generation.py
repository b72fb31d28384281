"""`generate`, extended for chunked layers and images."""

import copy
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, ProcessorMixin

from ._compat import CACHE_OF_A_PASS
from .attention import rules_of
from .moe import check_kernels


class Generation(GenerationMixin):
    """`generate` for all families. Name it before `GenerationMixin`, which transformers requires as a direct base."""

    config: Any

    def generate(self, inputs=None, *args, **kwargs):
        """Generate tokens; arguments as in `GenerationMixin.generate`.

        Raises:
            ValueError: prompts padded on the right that do not fit into a chunk together with the new tokens.
        """
        check_kernels(self)  # pyright: ignore[reportArgumentType]
        if "past_key_values" in kwargs:
            # transformers 5.24 renamed this argument, and would warn of the former name.
            kwargs["cache"] = kwargs.pop("past_key_values")
        if "pixel_values" in kwargs and kwargs["pixel_values"] is None:
            # Remove None for a prompt without pictures: newer releases would try to encode it.
            del kwargs["pixel_values"]
        # `transformers serve` passes a processor here, but the search for stop strings calls methods of a tokenizer.
        if isinstance(kwargs.get("tokenizer"), ProcessorMixin):
            kwargs["tokenizer"] = kwargs["tokenizer"].tokenizer
        return super().generate(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    # transformers reads the names of arguments off this method.
    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, **kwargs):
        """Return the inputs of one step of `generate`, with the cache as `past_key_values`, as peft expects."""
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if "cache" in inputs:
            inputs[CACHE_OF_A_PASS] = inputs.pop("cache")
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, mode, batch_size, max_cache_length
    ):
        mask, chunk_size = model_kwargs.get("attention_mask"), _chunk_size(self.config)
        # Within one chunk, padding does not matter.
        has_borders = chunk_size is not None and max_cache_length > chunk_size
        if has_borders and isinstance(mask, torch.Tensor) and mask.ndim == 2:
            rows = ((mask[:, -1:] == 0) & (mask != 0).any(1, keepdim=True)).nonzero()
            if len(rows):
                # Chunk borders follow the count of real tokens, which is wrong if the last one counts as padding.
                raise ValueError(
                    f"the last token of row {int(rows[0, 0])} counts as padding, by attention_mask or, where none is "
                    "given, as pad_token_id. New tokens cannot follow it over the border of a chunk "
                    f"(attention_chunk_size = {chunk_size}). Pad prompts on the left: "
                    'tokenizer.padding_side = "left"; where the token belongs to the text, give an attention_mask.'
                )
        if generation_config.cache_implementation == "quantized":
            # This cache keeps every token and refuses other layers. Our masks apply windows and chunks.
            text_config = copy.copy(self.config.get_text_config(decoder=True))
            text_config.layer_types = ["full_attention"] * text_config.num_hidden_layers
            options = generation_config.cache_config or {}
            generation_config.cache_config = {"config": text_config, **options}
        prepare = super()._prepare_cache_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(generation_config, model_kwargs, mode, batch_size, max_cache_length)

    def init_continuous_batching(self, *args, **kwargs):
        """Make a manager for continuous batching, also for `generate_batch`; arguments as in transformers.

        Raises:
            ValueError: the model has chunked layers, whose borders transformers' paged cache does not know.
        """
        chunk_size = _chunk_size(self.config)
        if chunk_size is not None:
            raise ValueError(
                f"Continuous batching knows no chunk borders (attention_chunk_size = {chunk_size}): use generate()."
            )
        return super().init_continuous_batching(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def _chunk_size(config: PreTrainedConfig) -> int | None:
    rules = rules_of(config.get_text_config(decoder=True)).values()
    return next((rule.chunk_size for rule in rules if rule.chunk_size), None)
