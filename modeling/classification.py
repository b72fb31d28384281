"""Classification and question answering: transformers' generic heads over our decoders.

Weights and results are those of stock's LLaMA and Mixtral heads; stock has no such heads for Llama 4. The class of a
sequence is read at its rightmost token that is not `pad_token_id`, on whichever side the padding is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from ..configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig
from ._compat import takes_cache
from .attention import mask_of_new_tokens
from .base import LlamoePreTrainedModel
from .decoder import LlamoeTextModel
from .input_checks import check_classes, check_labels
from .moe import RouterLossMixin


class Head:
    """A mixin that accepts stock configs, too; name it before transformers' generic head."""

    input_modalities = ("text",)

    def __init__(self: Any, config: PreTrainedConfig):
        super().__init__(self.resolve_config(config))
        # Give all one dtype: the generic head makes the decoder in `config.dtype`, its own layer in torch's default.
        for parameter in self.parameters():
            parameter.data = parameter.data.to(torch.get_default_dtype())


@dataclass
class LlamoeSequenceClassifierOutputWithPast(SequenceClassifierOutputWithPast):
    """Output of a head for sequences.

    Attributes:
        aux_loss: scalar, the load-balancing loss before its coefficient, with `output_router_logits`.
        router_logits: `[B * T, E]` of each mixture layer (B batch, T tokens, E experts), with `output_router_logits`.
    """

    aux_loss: torch.FloatTensor | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None


class SequenceClassifier(RouterLossMixin, Head, GenericForSequenceClassification, LlamoePreTrainedModel):
    """One class, number or set of labels for a whole sequence; base of the families' classes.

    Adds router losses, as the language model head does. The generic head's `forward` drops router logits, so it is
    written out here.
    """

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LlamoeSequenceClassifierOutputWithPast:
        """Score each sequence.

        Args:
            input_ids: this and all arguments that are not described here are as in `DecoderModel.forward`.
            inputs_embeds: `[B, T, hidden_size]` in place of `input_ids`. Padding cannot be found in them, so each
                sequence is scored at its last position.
            labels: `[B]` integers for one class of `num_labels`, `[B]` floating if `num_labels` is 1, or
                `[B, num_labels]` floating for several labels at once (`config.problem_type` decides).
            output_router_logits: return `router_logits` and `aux_loss`, and add
                `router_aux_loss_coef * aux_loss` to the loss.

        Returns:
            `logits` `[B, num_labels]`, and the requested outputs.

        Raises:
            ValueError: there are several sequences, but no `config.pad_token_id`; or router losses under reentrant
                gradient checkpointing, where they would train nothing.
        """
        balance = self._has_experts and self._option("output_router_logits", output_router_logits)
        if self._has_experts:
            has_z_loss = labels is not None and self.config.router_z_loss_coef
            kwargs["output_router_logits"] = bool(self._is_observed() or balance or has_z_loss)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if self.config.pad_token_id is None and len(hidden_states) != 1:
            raise ValueError(
                "Cannot handle batch sizes > 1 if no padding token is defined: set model.config.pad_token_id."
            )
        last = torch.tensor(-1)
        if input_ids is not None and self.config.pad_token_id is not None:
            is_token = (input_ids != self.config.pad_token_id).int()
            last = (torch.arange(input_ids.shape[1], device=input_ids.device) * is_token).argmax(-1)
        rows = torch.arange(len(hidden_states), device=hidden_states.device)
        logits = self.score(hidden_states)[rows, last.to(hidden_states.device)]

        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        if router_logits := outputs.get("router_logits"):
            token_mask = mask_of_new_tokens(attention_mask, hidden_states.shape[1])
            loss, aux_loss = self._with_router_losses(loss, router_logits, token_mask, balance)
        return LlamoeSequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_loss=aux_loss,
            router_logits=router_logits if balance else None,
        )


class LlamoeDenseForSequenceClassification(SequenceClassifier):
    """LLaMA 1 or 2 with a head for sequences; reads folders of `LlamaForSequenceClassification`."""

    config: LlamoeDenseConfig
    _checkpoint_prefixes = {r"transformer\.": "model."}


class LlamoeMixtralForSequenceClassification(SequenceClassifier):
    """Mixtral with a head for sequences; reads folders of `MixtralForSequenceClassification`."""

    config: LlamoeMixtralConfig
    # The loss is a mean over rows: False lets Trainer divide it by the number of accumulation steps.
    accepts_loss_kwargs = False
    _has_experts = True


class OfMultimodalFolders(LlamoePreTrainedModel):
    """Mixin for heads over Llama 4's decoder: they read text and multimodal folders. Stock has no such heads."""

    config: LlamoeTextConfig
    _has_experts = True
    _has_stock_layout = False
    _checkpoint_prefixes = {r"language_model\.": ""}
    _keys_passed_over = LlamoeTextModel._keys_passed_over


class LlamoeForSequenceClassification(OfMultimodalFolders, SequenceClassifier):
    """Llama 4's decoder with a head for sequences; reads text and multimodal folders, stock's and ours."""

    accepts_loss_kwargs = False


class TokenClassifier(Head, GenericForTokenClassification, LlamoePreTrainedModel):
    """A class for each token; base of the families' classes."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, inputs_embeds=None, **kwargs):
        """Score each token.

        Args:
            input_ids: this and all arguments that are not described here are as in `DecoderModel.forward`.
            labels: `[B, T]`, classes from 0 to `num_labels - 1`, or -100 for tokens without a loss.

        Returns:
            `logits` `[B, T, num_labels]`, and the requested outputs.

        Raises:
            ValueError: labels have a wrong shape, or are out of range.
        """
        if labels is not None:
            check_labels(labels, input_ids if inputs_embeds is None else inputs_embeds)
            check_classes(labels, self.num_labels)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class LlamoeDenseForTokenClassification(TokenClassifier):
    """LLaMA 1 or 2 with a head for each token; reads folders of `LlamaForTokenClassification`."""

    config: LlamoeDenseConfig
    _checkpoint_prefixes = {r"transformer\.": "model."}


class LlamoeMixtralForTokenClassification(TokenClassifier):
    """Mixtral with a head for each token; reads folders of `MixtralForTokenClassification`."""

    config: LlamoeMixtralConfig
    _has_experts = True


class LlamoeForTokenClassification(OfMultimodalFolders, TokenClassifier):
    """Llama 4's decoder with a head for each token; reads text and multimodal folders, stock's and ours."""


class LlamoeDenseForQuestionAnswering(Head, GenericForQuestionAnswering, LlamoePreTrainedModel):
    """LLaMA 1 or 2 with a head that finds an answer's first and last token.

    Reads folders of `LlamaForQuestionAnswering`, and of LLaMA's other classes, in which stock's question answering
    finds no weights. Its base model has the name `transformer`, as in stock's class.
    """

    config: LlamoeDenseConfig
    base_model_prefix = "transformer"
    _checkpoint_prefixes = {r"model\.": "transformer."}

    @property
    def _has_stock_layout(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Stock's class for Mistral names its base model `model`: it would find no weights in our files.
        return self.config.stock_type() != "mistral"
