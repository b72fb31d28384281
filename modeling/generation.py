"""`generate` and continuous batching: what transformers does not do by itself for chunked layers and for images.

Two caches keep every token of every layer and refuse a config with chunked layers: the quantized one and the paged
one of continuous batching. A quantized cache can serve chunked layers, since our masks apply the chunks; it is given
a config in which every layer is a full attention layer. A paged cache builds its own masks. They equal ours while a
request fits into one chunk; longer requests are refused.
"""

import copy
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, ProcessorMixin

from ..serving import told_to_clients
from ._compat import CACHE, CACHE_OF_A_PASS
from .attention import rules_of
from .moe import check_kernels, forget_factors


class Generation(GenerationMixin):
    """`generate` for all families. Name it before `GenerationMixin`, which transformers requires as a direct base."""

    config: Any

    def generate(self, inputs=None, *args, **kwargs):
        """Generate tokens; arguments as in `GenerationMixin.generate`."""
        check_kernels(self)  # pyright: ignore[reportArgumentType]
        forget_factors(self)  # pyright: ignore[reportArgumentType]
        return super().generate(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    # transformers reads the names of arguments off this method.
    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, **kwargs):
        """Return the inputs of one step of `generate`, the cache by the name that peft looks for."""
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if CACHE in inputs:
            inputs[CACHE_OF_A_PASS] = inputs.pop(CACHE)
        return inputs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        # Refuses layers without a size, which transformers could not make a cache for.
        rules_of(self.config.get_text_config(decoder=True))
        if generation_config.cache_implementation == "quantized":
            options = generation_config.cache_config or {}
            generation_config.cache_config = {"config": _fully_attending(self.config), **options}
        prepare = super()._prepare_cache_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(generation_config, model_kwargs, *args, **kwargs)


class ChunkedGeneration(Generation):
    """`generate` and continuous batching for decoders with chunked layers."""

    def generate(self, inputs=None, *args, **kwargs):
        """Generate tokens; arguments as in `GenerationMixin.generate`.

        Raises:
            ValueError: prompts padded on the right before chunked layers.
        """
        if "pixel_values" in kwargs and kwargs["pixel_values"] is None:
            # A prompt without pictures; newer releases would encode None.
            del kwargs["pixel_values"]
        # `transformers serve` passes a processor here, but the search for stop strings calls methods of a tokenizer.
        if isinstance(kwargs.get("tokenizer"), ProcessorMixin):
            kwargs["tokenizer"] = kwargs["tokenizer"].tokenizer
        return super().generate(inputs, *args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        mask = model_kwargs.get("attention_mask")
        if _chunk_size(self.config) is not None and isinstance(mask, torch.Tensor) and mask.ndim == 2:
            rows = ((mask[:, -1:] == 0) & (mask != 0).any(1, keepdim=True)).nonzero()
            if len(rows):
                # Chunk borders lie where a row's real tokens say, of which the last one would be another.
                raise ValueError(
                    f"attention_mask hides the last token of row {int(rows[0, 0])}: prompts are padded on the right, "
                    'where the new tokens go. Pad them on the left: tokenizer.padding_side = "left".'
                )
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """Make a manager for continuous batching; arguments as in transformers.

        With chunked layers its `add_request` raises a ValueError for requests longer than one chunk.
        """
        if getattr(self, "_cached_continuous_batching_manager", None) is not None:
            return super().init_continuous_batching(*args, **kwargs)
        model: Any = self if _chunk_size(self.config) is None else _WithinOneChunk(self)
        manager = GenerationMixin.init_continuous_batching(model, *args, **kwargs)
        add_request = manager.add_request

        def checked_add_request(input_ids, request_id=None, max_new_tokens=None, *args, **kwargs):
            if max_new_tokens is None:
                max_new_tokens = manager.generation_config.max_new_tokens
            with told_to_clients():
                self._check_request(input_ids, max_new_tokens, request_id)
            return add_request(input_ids, request_id, max_new_tokens, *args, **kwargs)

        manager.add_request = checked_add_request
        return manager

    def generate_batch(self, inputs, generation_config=None, *args, **kwargs):
        """Generate for prompts of any lengths by continuous batching; arguments as in transformers.

        Raises:
            ValueError: the model has chunked layers, and a request's prompt and new tokens together exceed
                `attention_chunk_size`; or a prompt has image tokens.
        """
        # Checked before the first prompt runs: transformers only logs what a manager raises.
        config = self.generation_config if generation_config is None else generation_config
        max_new_tokens = kwargs.get("max_new_tokens")
        max_new_tokens = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        for index, input_ids in enumerate(inputs):
            self._check_request(input_ids, max_new_tokens, index)
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def _check_request(self, input_ids: Any, max_new_tokens: int | None, name: Any) -> None:
        if getattr(self.config, "image_token_index", None) in input_ids:
            raise ValueError(f"Continuous batching takes texts only; request {name} has image tokens.")
        chunk_size = _chunk_size(self.config)
        if chunk_size is not None and (
            max_new_tokens is None or len(input_ids) + max_new_tokens > chunk_size
        ):
            raise ValueError(
                f"request {name} has {len(input_ids)} prompt tokens and max_new_tokens = {max_new_tokens}. Continuous "
                "batching knows no chunk borders, so prompt and new tokens must fit into one chunk "
                f"(attention_chunk_size = {chunk_size}): lower max_new_tokens, or use generate()."
            )


class MultimodalGeneration(ChunkedGeneration):
    """`generate` with images, which transformers encodes before the first step."""

    def prepare_inputs_for_generation(
        self, input_ids, *args, inputs_embeds=None, is_first_iteration=False, **kwargs
    ):
        """Return the inputs of one step of `generate`; later steps with a cache get no images."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and kwargs.get("use_cache", True):
            for name in ("pixel_values", "mm_encoder_outputs"):
                inputs.pop(name, None)
        return inputs


class _WithinOneChunk:
    """A model as continuous batching sees it: its config has full attention layers only."""

    def __init__(self, model: Any):
        object.__setattr__(self, "_model", model)

    @property
    def config(self) -> PreTrainedConfig:
        return _fully_attending(self._model.config)

    def eval(self) -> "_WithinOneChunk":
        self._model.eval()
        return self

    def __call__(self, *args, **kwargs):
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)


def _chunk_size(config: PreTrainedConfig) -> int | None:
    rules = rules_of(config.get_text_config(decoder=True)).values()
    return next((rule.chunk_size for rule in rules if rule.chunk_size), None)


def _fully_attending(config: PreTrainedConfig) -> PreTrainedConfig:
    text_config = copy.copy(config.get_text_config(decoder=True))
    text_config.layer_types = ["full_attention"] * text_config.num_hidden_layers
    return text_config
