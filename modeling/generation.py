"""`generate` and `generate_batch` for chunked layers, which transformers' caches support only in part, and for images.

Two caches keep every token of every layer and refuse a config with chunked layers: the quantized one and the paged
one of continuous batching. A quantized cache can serve chunked layers, since our masks apply the chunks; it is given
a config in which every layer is a full attention layer. A paged cache builds its own masks. They equal ours while a
request fits into one chunk; longer requests are refused.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, GenerationMixin, PreTrainedConfig, ProcessorMixin

from ..configuration.errors import CheckpointError
from ..serving import told_to_clients
from ._compat import CACHE, CACHE_OF_A_PASS
from .adapters import names_of_tiles, repeat_names
from .attention import rules_of
from .input_checks import check_tensors
from .moe import check_kernels


def is_first_pass(past_key_values: Cache | None) -> bool:
    """Whether a cache is empty; a static one is not asked, since that would synchronise with a GPU."""
    if past_key_values is None:
        return True
    return not getattr(past_key_values, "is_compileable", False) and past_key_values.get_seq_length() == 0


def _counted(position_ids: Any) -> Any:
    position_ids.are_counted = True
    return position_ids


def _are_counted(model_kwargs: dict[str, Any]) -> bool:
    return getattr(model_kwargs.get("position_ids"), "are_counted", False)


class CheckedGeneration(GenerationMixin):
    """Refuses what nothing can be generated from before transformers asks it for its shape.

    It also tries kernels, and opens quantized caches to layers with chunks or a window. Name it before
    `GenerationMixin` among a head's bases; transformers requires that one as a direct base too.
    """

    config: Any

    def generate(self, inputs=None, *args, **kwargs):
        """Generate tokens; the arguments are those of `GenerationMixin.generate`.

        Raises:
            ValueError: tokens or embeddings that are not tensors, or a batch without rows.
        """
        if kwargs.get("custom_generate") is None:  # whose inputs are its own business
            given = {"inputs": inputs, **{name: kwargs.get(name) for name in ("input_ids", "inputs_embeds")}}
            check_tensors(**given)
            for name, value in given.items():
                if value is not None and value.ndim and len(value) == 0:
                    raise ValueError(f"{name} is of shape {list(value.shape)}; expected: one row or more.")
        if "past_key_values" in kwargs:
            # The name that transformers had for it before; it would warn of this line.
            kwargs[CACHE] = kwargs.pop("past_key_values")
        check_kernels(self)  # pyright: ignore[reportArgumentType]
        return super().generate(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    # Positions that `generate` counts itself are the tokens' indices, where no mask hides a token. A model that is not
    # told them need not read them, which a GPU's host would wait for in each step.

    def _prepare_position_ids_for_generation(self, *args, **kwargs):
        prepare = super()._prepare_position_ids_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return _counted(prepare(*args, **kwargs))

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        were_counted = _are_counted(model_kwargs)
        update = super()._update_model_kwargs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        model_kwargs = update(outputs, model_kwargs, *args, **kwargs)
        if were_counted:
            _counted(model_kwargs["position_ids"])
        return model_kwargs

    # transformers reads the names of arguments off this method.
    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, **kwargs):
        """Inputs of one step of `generate`."""
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        has_fixed_length = getattr(inputs.get(CACHE), "is_compileable", False)
        if _are_counted(kwargs) and inputs.get("attention_mask") is None and not has_fixed_length:
            given = (
                inputs.get("input_ids") if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            )
            past = 0 if inputs.get(CACHE) is None else inputs[CACHE].get_seq_length()
            # A cache that somebody shortened has fewer tokens than are counted.
            if kwargs["position_ids"].shape[-1] == past + given.shape[1]:
                del inputs["position_ids"]
        if CACHE in inputs:
            inputs[CACHE_OF_A_PASS] = inputs.pop(CACHE)
        return inputs

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args, **kwargs):
        repeat_names(self, expand_size)
        expand = super()._expand_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return expand(expand_size, *args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        # Refuses layers without a size, which transformers could not make a cache for.
        rules_of(self.config.get_text_config(decoder=True))
        if generation_config.cache_implementation == "quantized":
            options = generation_config.cache_config or {}
            generation_config.cache_config = {"config": _fully_attending(self.config), **options}
        prepare = super()._prepare_cache_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(generation_config, model_kwargs, *args, **kwargs)

    def adjust_generation_fn(self, *args, **kwargs):
        """Read generation_config.json for `from_pretrained`; a broken one is a `CheckpointError` that names it."""
        try:
            super().adjust_generation_fn(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"generation_config.json: transformers cannot read it ({error})."
            ) from error


class ChunkedGeneration(CheckedGeneration):
    """Continuous batching for decoders with chunked layers."""

    def generate(self, inputs=None, *args, **kwargs):
        """Generate tokens; arguments as in `GenerationMixin.generate`.

        Raises:
            ValueError: as in `CheckedGeneration.generate`, or prompts padded on the right before chunked layers.
        """
        if "pixel_values" in kwargs and kwargs["pixel_values"] is None:
            # A turn without pictures; newer releases would encode None.
            del kwargs["pixel_values"]
        # `transformers serve` passes a processor here, but the search for stop strings calls methods of a tokenizer.
        for name in ("tokenizer", "assistant_tokenizer"):
            if isinstance(kwargs.get(name), ProcessorMixin):
                kwargs[name] = kwargs[name].tokenizer
        text_config = self.config.get_text_config(decoder=True)
        num_layers = text_config.num_hidden_layers
        try:
            return super().generate(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            # `assistant_early_exit` lowers it, and does not restore it if its draft raises.
            text_config.num_hidden_layers = num_layers

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        # Without a mask, transformers takes every pad token for padding. Behind cached tokens, as in an assistant's
        # second draft, only pad tokens on the left are: the others were generated or written.
        prepare = super()._prepare_attention_mask_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        mask = prepare(inputs_tensor, generation_config, model_kwargs)
        past_key_values = model_kwargs.get(CACHE)
        if isinstance(past_key_values, Cache) and past_key_values.get_seq_length() > 0:
            mask = (mask.cumsum(-1) > 0).to(mask.dtype)
        return mask

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
        prepare = super()._prepare_cache_for_generation
        return prepare(generation_config, model_kwargs, *args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """Make a manager for continuous batching; arguments as in transformers.

        With chunked layers its `add_request` raises a ValueError for requests longer than one chunk.
        """
        if getattr(self, "_cached_continuous_batching_manager", None) is not None:
            return super().init_continuous_batching(*args, **kwargs)
        check_kernels(self)  # pyright: ignore[reportArgumentType]
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
        # Checked here too, before the first prompt runs: transformers only logs what a manager raises.
        config = self.generation_config if generation_config is None else generation_config
        max_new_tokens = kwargs.get("max_new_tokens")
        max_new_tokens = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        for index, input_ids in enumerate(inputs):
            self._check_request(input_ids, max_new_tokens, index)
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def _check_request(self, input_ids: Any, max_new_tokens: int | None, name: Any) -> None:
        image_token = getattr(self.config, "image_token_index", None)
        if image_token is not None and image_token in input_ids:
            raise ValueError(
                f"Continuous batching takes texts only; request {name} has image tokens (id {image_token}). "
                "Use generate() for pictures."
            )
        chunk_size = _chunk_size(self.config)
        if chunk_size is None:
            return
        request = f"request {name} has {len(input_ids)} prompt tokens"
        advice = (
            f"Continuous batching knows no chunk borders, so prompt and new tokens must fit into one chunk "
            f"(attention_chunk_size = {chunk_size}): lower max_new_tokens, or use generate()."
        )
        if max_new_tokens is None:
            raise ValueError(f"{request} and no max_new_tokens. {advice}")
        if len(input_ids) + max_new_tokens > chunk_size:
            raise ValueError(f"{request} and max_new_tokens = {max_new_tokens}. {advice}")


class MultimodalGeneration(ChunkedGeneration):
    """Images in `generate`: with beams, and in the first pass alone."""

    # The model has these.
    _image_places: Callable
    _lengths: Callable
    _tiles_of_rows: Callable

    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                "assistant_early_exit is for text models: for texts use model.language_model.generate(...), for "
                "pictures an assistant_model."
            )
        # transformers does not type this mixin.
        get_candidate_generator = super()._get_candidate_generator  # pyright: ignore[reportAttributeAccessIssue]
        return get_candidate_generator(generation_config, *args, **kwargs)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.LongTensor | None = None,
        **model_kwargs,
    ) -> tuple[torch.LongTensor | None, dict[str, Any]]:
        """Repeat every row for beams and `num_return_sequences`, and the features of its tiles as a group.

        transformers counts a row's tiles by its ids, also where embeddings are given beside them, drops features
        without a place in silence, and repeats inside the caller's object.
        """
        expand = super()._expand_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        encoder_outputs = model_kwargs.get("mm_encoder_outputs") or {}
        images = encoder_outputs.get("image")
        if expand_size == 1 or images is None:
            return expand(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        # If ids are given too, the first pass takes the embeddings.
        embeds, features = model_kwargs.get("inputs_embeds"), images.pooler_output
        is_image = self._image_places(input_ids if embeds is None else None, embeds)
        rows = self._tiles_of_rows(is_image, self._lengths(features))
        order = [tile for row in rows for _ in range(expand_size) for tile in row]
        is_stacked = isinstance(features, torch.Tensor)
        features = features[order] if is_stacked else [features[tile] for tile in order]
        images = type(images)(**{**images, "pooler_output": features})
        del model_kwargs["mm_encoder_outputs"]
        input_ids, model_kwargs = expand(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        return input_ids, {**model_kwargs, "mm_encoder_outputs": {**encoder_outputs, "image": images}}

    def _maybe_prepare_encoder_kwargs_for_generation(self, inputs_tensor, model_kwargs, *args, **kwargs):
        """Encode the images before rows are repeated."""
        prepare = super()._maybe_prepare_encoder_kwargs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        pixel_values = model_kwargs.get("pixel_values")
        if pixel_values is None:
            return prepare(inputs_tensor, model_kwargs, *args, **kwargs)

        def tiles_of_rows() -> list[list[int]]:
            embeds = inputs_tensor if inputs_tensor.is_floating_point() else None
            is_image = self._image_places(inputs_tensor if embeds is None else None, embeds)
            return self._tiles_of_rows(is_image, self._lengths(pixel_values))

        with names_of_tiles(self, tiles_of_rows):
            return prepare(inputs_tensor, model_kwargs, *args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        *args,
        pixel_values: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs,
    ) -> dict[str, Any]:
        """Inputs of one step of `generate`: images and `inputs_embeds` go into the first pass only."""
        inputs = super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            *args,
            pixel_values=pixel_values,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if is_first_iteration:
            return inputs
        if not kwargs.get("use_cache", True):
            if inputs.get("pixel_values") is None and not inputs.get("mm_encoder_outputs"):
                # Image tokens in a text were generated.
                inputs["mm_encoder_outputs"] = {"image": None}
            return inputs
        for name in ("pixel_values", "mm_encoder_outputs"):
            inputs.pop(name, None)
        if is_first_pass(kwargs.get(CACHE)):
            # An assistant's first pass, which transformers counts as a later one. It gets the features of the model
            # that it assists, which it cannot use if their size differs.
            encoder_outputs = kwargs.get("mm_encoder_outputs")
            images = (encoder_outputs or {}).get("image")
            hidden_size = self.config.text_config.hidden_size
            if images is not None and images.pooler_output[0].shape[-1] != hidden_size:
                encoder_outputs = {"image": None}
            inputs |= {"pixel_values": pixel_values, "mm_encoder_outputs": encoder_outputs}
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
