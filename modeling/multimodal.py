"""Llama 4 as a whole: vision tower, projector and decoder.

The features of images replace the embeddings of the `<|patch|>` tokens (early fusion); attention over them is causal,
as over text. A tile of 336 x 336 pixels has 144 such tokens, which transformers' `Llama4Processor` puts into the text.

Stock's class has the whole language model, with its head, as the child `language_model`, and no base model. llamoe's
modules have the same names. transformers' tools look for a base model as `model`: here this is a property, which
returns a `LlamoeModel` made of the same modules.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling, MoeModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults

from ..configuration import LlamoeConfig
from ._compat import takes_cache
from .base import LlamoePreTrainedModel
from .decoder import LlamoeCausalLMOutputWithPast, LlamoeForCausalLM, LlamoeTextModel
from .generation import Generation
from .input_checks import embed
from .kernels import is_tracing
from .layers import Linear
from .vision import LlamoeVisionModel


class MultiModalProjector(nn.Module):
    """One linear layer, from the width of the tower's output to the decoder's."""

    def __init__(self, config: LlamoeConfig):
        super().__init__()
        width = config.vision_config.vision_output_dim
        self.linear_1 = Linear(width, config.text_config.hidden_size, bias=False)

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        """Map `[..., vision_output_dim]` to the decoder's `[..., hidden_size]`."""
        return self.linear_1(image_features)


@dataclass
class LlamoeModelOutputWithPast(MoeModelOutputWithPast):
    """Output of `LlamoeModel`.

    Attributes:
        image_hidden_states: the tower's output, `[tiles, tokens_per_tile, vision_output_dim]`.
    """

    image_hidden_states: torch.FloatTensor | None = None


@dataclass
class LlamoeConditionalGenerationOutputWithPast(LlamoeCausalLMOutputWithPast):
    """Output of `LlamoeForConditionalGeneration`: that of the language model head, and the tower's.

    Attributes:
        image_hidden_states: the tower's output, `[tiles, tokens_per_tile, vision_output_dim]`.
    """

    image_hidden_states: torch.FloatTensor | None = None


class MultimodalModel(LlamoePreTrainedModel):
    """A text model with tower and projector, whose features replace the embeddings of image tokens."""

    config: LlamoeConfig
    input_modalities = ("image", "text")
    _no_split_modules = ["DecoderLayer", "VisionEncoderLayer"]
    _has_experts = True
    _text_class: ClassVar[type[LlamoePreTrainedModel]]
    _output_class: ClassVar[type]

    def __init__(self, config: PreTrainedConfig):
        config = self.resolve_config(config)
        config.check_multimodal()
        super().__init__(config)
        self.vision_model = LlamoeVisionModel(config.vision_config)
        self.multi_modal_projector = MultiModalProjector(config)
        self.language_model = self._text_class(config.text_config)
        self.vocab_size = config.text_config.vocab_size
        self.post_init()

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.FloatTensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """Encode and project tiles.

        Args:
            pixel_values: `[tiles, C, image_size, image_size]`.
            **kwargs: `output_hidden_states`, `output_attentions` of the tower.

        Returns:
            the tower's output; its `pooler_output` is replaced by the projected features,
            `[tiles, tokens_per_tile, hidden_size]`.
        """
        output = self.vision_model(pixel_values, **{**kwargs, "return_dict": True})
        output.pooler_output = self.multi_modal_projector(output.last_hidden_state)
        return output

    @takes_cache
    @can_return_tuple
    @merge_with_config_defaults
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Any:
        """Run tower and text model on B texts of T tokens with images.

        Args:
            input_ids: `[B, T]`, with one image token for each feature of each tile. Give either these or
                `inputs_embeds`.
            pixel_values: `[tiles, C, image_size, image_size]`, the tiles of all images of all rows, in the order of
                the text; None if no row has an image.
            attention_mask: `[B, cached tokens + T]`, zeros on padding.
            position_ids: `[B or 1, T]`, as in `DecoderModel.forward`.
            past_key_values: KV cache of earlier tokens.
            inputs_embeds: `[B, T, hidden_size]`. Features replace the vectors that equal the image token's embedding.
            use_cache: make a cache if none is given; by default as the config says.
            mm_encoder_outputs: `{"image": get_image_features(...)}` in place of `pixel_values`.
            **kwargs: arguments of the text model, such as `output_router_logits`.

        Returns:
            the text model's output, and the tower's output as `image_hidden_states`.

        Raises:
            ValueError: there are more image tokens than features, or fewer; or `pixel_values` have a wrong shape.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds.")
        images = (mm_encoder_outputs or {}).get("image")
        if images is None and pixel_values is None and "paged_cache" not in kwargs:
            self._check_no_image_tokens(input_ids, past_key_values)
        inputs_embeds, image_hidden_states = self._merge(input_ids, inputs_embeds, pixel_values, images)
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **self._with_config_defaults(kwargs),
        )
        return self._output_class(**outputs, image_hidden_states=image_hidden_states)

    def _merge(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pixel_values: torch.Tensor | None,
        images: BaseModelOutputWithPooling | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the embeddings with features in place of image tokens, and the tower's output; None without images."""
        if inputs_embeds is None:
            inputs_embeds = embed(self.language_model.get_input_embeddings(), input_ids)
        if images is not None and pixel_values is not None:
            raise ValueError("Give pixel_values or mm_encoder_outputs['image'], not both.")
        if pixel_values is not None:
            self.vision_model.check_pixel_values(pixel_values)
            images = self.get_image_features(pixel_values, return_dict=True)
        if images is None:
            return inputs_embeds, None
        # Stacked [tiles, tokens, hidden], or a list of [tokens, hidden].
        features = images.pooler_output
        features = features.flatten(0, 1) if isinstance(features, torch.Tensor) else torch.cat(list(features))
        if features.shape[-1] != inputs_embeds.shape[-1]:
            raise ValueError(
                f"mm_encoder_outputs['image'] has features of size {features.shape[-1]}, but hidden_size = "
                f"{inputs_embeds.shape[-1]}. Compute them by this model's get_image_features, or give pixel_values."
            )
        is_image = self._image_places(input_ids, inputs_embeds)
        if not is_tracing(is_image) and (num_tokens := int(is_image.sum())) != len(features):
            raise ValueError(self._mismatch(num_tokens, len(features)))
        features = features.to(inputs_embeds.device, inputs_embeds.dtype)
        is_image = is_image[..., None].to(inputs_embeds.device)
        return inputs_embeds.masked_scatter(is_image, features), images.last_hidden_state

    def _image_places(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a bool mask `[B, T]`, true on image tokens."""
        token_id = self.config.image_token_index
        if input_ids is not None:
            return input_ids == token_id
        token = torch.full((), token_id, dtype=torch.long, device=inputs_embeds.device)
        return (
            inputs_embeds == self.language_model.get_input_embeddings()(token).to(inputs_embeds.device)
        ).all(-1)

    def _check_no_image_tokens(self, input_ids: torch.Tensor | None, past_key_values: Cache | None) -> None:
        """Raise a `ValueError` if texts have the image tokens of whole tiles, but no pictures were given."""
        # A static cache's length is on the device: the CPU would wait for a GPU to read it.
        is_static = getattr(past_key_values, "is_compileable", False)
        is_first = past_key_values is None or not (is_static or past_key_values.get_seq_length())
        if input_ids is None or not is_first or is_tracing(input_ids):
            return
        # A single image token in a text does not mean that a picture was forgotten.
        num_tokens = int((input_ids == self.config.image_token_index).sum())
        tokens_per_tile = self.config.vision_config.tokens_per_tile
        if num_tokens and tokens_per_tile > 1 and num_tokens % tokens_per_tile == 0:
            raise ValueError(self._mismatch(num_tokens, 0))

    def _mismatch(self, num_tokens: int, num_features: int) -> str:
        return (
            f"Image features and image tokens do not match: {num_tokens} image tokens (id "
            f"{self.config.image_token_index}) in the text, {num_features} image features. Each tile has "
            f"{self.config.vision_config.tokens_per_tile}: make input_ids and pixel_values by one call of the "
            "processor, and do not truncate inside an image."
        )

    def _with_config_defaults(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        # Tower and text model read their own configs. What the multimodal config says is passed on to the text model.
        for name in (
            "output_hidden_states",
            "output_attentions",
            "output_router_logits",
            "output_expert_load",
        ):
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
                if getattr(self.config, name, False):
                    kwargs[name] = True
        return kwargs


class LlamoeModel(MultimodalModel):
    """Llama 4 without a head: tower, projector and decoder."""

    _text_class = LlamoeTextModel
    _output_class = LlamoeModelOutputWithPast
    _checkpoint_prefixes = {r"language_model\.model\.": "language_model."}
    _keys_passed_over = [r"^language_model\.lm_head\."]
    _has_stock_layout = False

    @classmethod
    def over(
        cls, config: LlamoeConfig, tower: nn.Module, projector: nn.Module, text_model: nn.Module
    ) -> "LlamoeModel":
        """Return a `LlamoeModel` made of another model's modules, which are neither copied nor initialized."""
        view = cls.__new__(cls)
        nn.Module.__init__(view)
        view.config = config
        view.name_or_path = config.name_or_path
        view.vocab_size = config.text_config.vocab_size
        view.vision_model, view.multi_modal_projector, view.language_model = tower, projector, text_model
        return view


class LlamoeForConditionalGeneration(MultimodalModel, Generation, GenerationMixin):
    """Llama 4 with its language model head, which continues texts with images.

    Reads folders of transformers' `Llama4ForConditionalGeneration`.
    """

    _text_class = LlamoeForCausalLM
    _output_class = LlamoeConditionalGenerationOutputWithPast
    # Renames the keys of folders that `LlamoeModel` has saved. The pattern is not registered: servers, which run a
    # `LlamoeModel`, apply the registered patterns of both classes, and this one would undo `LlamoeModel`'s renaming.
    _checkpoint_prefixes = {r"language_model\.(?!model\.|lm_head\.)": "language_model.model."}
    _registers_prefixes = False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a checkpoint, also a `LlamoeModel`'s, as `LlamoePreTrainedModel.from_pretrained` does."""
        renamed = {f"^{old}": new for old, new in cls._checkpoint_prefixes.items()}
        kwargs["key_mapping"] = renamed | (kwargs.get("key_mapping") or {})
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    @property
    def model(self) -> LlamoeModel:
        """The model without its head: a `LlamoeModel` of this model's modules, made anew if one of them is replaced."""
        parts = (self.vision_model, self.multi_modal_projector, self.language_model.model)
        view = self.__dict__.get("_model_view")
        if view is None or any(mine is not its for mine, its in zip(parts, view.children(), strict=True)):
            view = LlamoeModel.over(self.config, *parts)
            # `nn.Module.__setattr__` would register it as a child.
            self.__dict__["_model_view"] = view
        view.training = self.training
        return view

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new `model` replaces tower, projector and decoder instead of becoming a child."""
        if name != "model":
            super().__setattr__(name, value)
            return
        if not isinstance(value, LlamoeModel):
            raise ValueError(
                f"{type(self).__name__}.model takes a LlamoeModel, not a {type(value).__name__}."
            )
        self.vision_model, self.multi_modal_projector = value.vision_model, value.multi_modal_projector
        self.language_model.model = value.language_model

    def get_decoder(self) -> nn.Module:
        """Return the text model without its head."""
        return self.language_model.get_decoder()

    def set_decoder(self, decoder: nn.Module) -> None:
        """Replace the text model."""
        self.language_model.set_decoder(decoder)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the language model head."""
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the language model head."""
        self.language_model.set_output_embeddings(value)

    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LlamoeConditionalGenerationOutputWithPast:
        """Predict the next token of every position of texts with images.

        The arguments are those of `MultimodalModel.forward`; `labels`, `logits_to_keep` and, among `kwargs`,
        `skip_logits` are as in `CausalLM.forward`.
        """
        return super().forward(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            labels=labels,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
