"""The decoder of all families: LLaMA 1 and 2 and Mistral (`LlamoeDense…`), Mixtral, and Llama 4 (`Llamoe…`).

All are built of one `DecoderLayer`; what differs between families and between layers is data (`config.layer_plan`).
LLaMA 2, for example, is Llama 4 without mixture layers, position-free layers, q/k norm and chunks. Parameters have
stock's names, so the feed-forward is called `mlp` or `feed_forward`, as in the family's stock class.

Shapes: B batch, T tokens, E experts, H hidden_size.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig
from ..configuration.decoder import DecoderConfig
from ..configuration.parallel import HEAD_FSDP, HEAD_PP, HEAD_TP
from ._compat import takes_cache
from .attention import (
    Attention,
    MaskInputs,
    attention_masks,
    check_cache,
    mask_of_new_tokens,
)
from .base import LlamoePreTrainedModel
from .generation import Generation
from .input_checks import check_classes, check_labels, check_mask, embed
from .layers import FeedForward, Linear, RMSNorm, RotaryEmbedding
from .loss import loss_without_logits, must_skip_logits
from .moe import MixtureOfExperts, Router, RouterLossMixin, expert_load


class DecoderLayer(GradientCheckpointingLayer):
    """Pre-norm residual layer: attention, then a dense feed-forward or a mixture of experts."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        plan = config.layer_plan(layer_idx)
        self.feed_forward_name = config.feed_forward_name
        self.self_attn = Attention(config, layer_idx)
        feed_forward = (
            MixtureOfExperts(config)
            if plan.is_moe
            else FeedForward(
                config.hidden_size, plan.intermediate_size, config.hidden_act, bias=config.mlp_bias
            )
        )
        self.add_module(self.feed_forward_name, feed_forward)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, ...],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Return the layer's output, `[B, T, H]` as its input; the other arguments are those of `Attention.forward`."""
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = getattr(self, self.feed_forward_name)(hidden_states)
        return residual + hidden_states


class DecoderModel(LlamoePreTrainedModel):
    """Embedding, layers and final norm; base of the families' decoders."""

    config: DecoderConfig
    input_modalities = ("text",)
    _no_split_modules = ["DecoderLayer"]

    def __init__(self, config: PreTrainedConfig):
        config = self.resolve_config(config)
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DecoderLayer(config, idx) for idx in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        """Return the hidden states of all tokens.

        Args:
            input_ids: `[B, T]` integers. Give either these or `inputs_embeds`.
            attention_mask: `[B, cached tokens + T]`, zeros on padding, which may be left or right; or a 4-D mask; or a
                dict of masks by attention type.
            position_ids: `[B or 1, T]`. They decide rotation, temperature and chunk borders. By default each row is
                numbered from its first token that is not padding. A row in which the numbers restart holds several
                packed sequences. Padding may have any numbers. If the cache contains padding, chunked layers need
                numbers that count the row's tokens without padding.
            past_key_values: KV cache of earlier tokens; new tokens are appended.
            inputs_embeds: `[B, T, H]` in place of `input_ids`.
            use_cache: make a cache if none is given; by default as the config says.
            **kwargs: `output_hidden_states`, `output_attentions` (under the implementation `eager` alone),
                `output_router_logits`, and arguments of the attention implementation.

        Returns:
            `last_hidden_state` `[B, T, H]`, and the requested outputs; `router_logits` holds `[B * T, E]` of each
            mixture layer.

        Raises:
            ValueError: both or none of `input_ids` and `inputs_embeds`; a mask of a wrong shape; a cache of another
                model, or one that has tokens under gradient checkpointing.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = embed(self.embed_tokens, input_ids)
        check_cache(self, inputs_embeds.shape[1], past_key_values)
        check_mask(attention_mask, *inputs_embeds.shape[:2], past_key_values)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        inputs = MaskInputs(
            self.config,
            inputs_embeds,
            attention_mask,
            past_key_values,
            position_ids,
            kwargs.get("cu_seq_lens_q"),
        )
        mask_mapping = attention_masks(inputs)
        position_ids = inputs.positions
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        # `generate(assistant_early_exit=...)` lowers the number in the config while it drafts with the first layers.
        layers = self.layers[: self.config.num_hidden_layers]
        for layer, attention_type in zip(layers, self.config.attention_types()[: len(layers)], strict=True):
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=mask_mapping[attention_type],
                position_ids=position_ids,
                # transformers finds the cache by the name `cache`, and removes it under gradient checkpointing.
                cache=past_key_values,
                # Attention implementations that take no mask read the window here.
                sliding_window=inputs.rules[attention_type].window,
                **kwargs,
            )
        return MoeModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), cache=past_key_values if use_cache else None
        )


class LlamoeDenseModel(DecoderModel):
    """LLaMA 1 or 2, or Mistral, without a head."""

    config: LlamoeDenseConfig
    # Stock's class for question answering names its base model `transformer`.
    _checkpoint_prefixes = {r"transformer\.": ""}
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": Attention}


class MixtureModel(DecoderModel):
    """A decoder with mixtures of experts, which can return router logits; base of the mixtures' decoders."""

    _has_experts = True
    _can_record_outputs = {
        "hidden_states": DecoderLayer,
        "attentions": Attention,
        "router_logits": OutputRecorder(Router, index=0),
    }


class LlamoeMixtralModel(MixtureModel):
    """Mixtral without a head."""

    config: LlamoeMixtralConfig


class LlamoeTextModel(MixtureModel):
    """Llama 4's decoder without a head."""

    config: LlamoeTextConfig
    _checkpoint_prefixes = {r"language_model\.model\.": ""}
    _keys_passed_over = [
        r"^vision_model\.",
        r"^multi_modal_projector\.",
        r"^language_model\.lm_head\.",
    ]


@dataclass
class LlamoeCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """Output of a language model head.

    Attributes:
        loss: scalar, if `labels` were given; includes the router losses that the config asks for. With
            `num_items_in_batch` each router loss counts by the share of the batch's labels that this forward has.
        aux_loss: scalar, the load-balancing loss without its coefficient, with `output_router_logits`.
        logits: `[B, T, vocab_size]`, or those of the tokens in `logits_to_keep`; None if only the loss was computed
            (`skip_logits`, as an argument or in the config).
        router_logits: `[B * T, E]` of each mixture layer, with `output_router_logits`.
        expert_load: `[mixture layers, E]` int64, the number of tokens that chose each expert, with
            `output_expert_load`.
    """

    expert_load: torch.LongTensor | None = None


class CausalLM(RouterLossMixin, LlamoePreTrainedModel):
    """A decoder with a language model head; base of the families' classes."""

    config: DecoderConfig
    input_modalities = ("text",)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = HEAD_TP
    _pp_plan = HEAD_PP
    _fsdp_plan = HEAD_FSDP
    _model_class: ClassVar[type[DecoderModel]]

    def __init__(self, config: PreTrainedConfig):
        config = self.resolve_config(config)
        super().__init__(config)
        self.model = self._model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        output_expert_load: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LlamoeCausalLMOutputWithPast:
        """Predict the next token of every position.

        Args:
            input_ids: this and all arguments that are not described here are as in `DecoderModel.forward`.
            labels: `[B, T]`, the input tokens, which are shifted here; -100 for tokens without a loss. With
                `logits_to_keep`, one label for each token that is kept.
            output_router_logits: return `router_logits` and `aux_loss`, and add
                `router_aux_loss_coef * aux_loss` to the loss.
            output_expert_load: return `expert_load`.
            logits_to_keep: compute the logits of this many last tokens (0: all); or of the tokens at these indices,
                `[n]` for all rows or `[B, n]`; or of the tokens where a bool mask `[B, T]` is true, as
                `[kept tokens, vocab_size]`.
            skip_logits: compute only the loss, for some tokens at a time, so that the logits of all tokens are never in
                memory; `logits` of the output is None. By default `config.skip_logits` decides, if labels are given and
                the model has transformers' usual loss.

        Raises:
            ValueError: inputs or labels have a wrong shape; a label is not in the vocabulary (checked on the CPU);
                router losses under reentrant gradient checkpointing, where they would train nothing; or `skip_logits`
                with another `loss_function`.
        """
        if labels is not None:
            if isinstance(logits_to_keep, int) and logits_to_keep == 0:
                # With `logits_to_keep` the loss itself checks that there is a label for each kept token.
                check_labels(labels, input_ids if inputs_embeds is None else inputs_embeds)
            # A loss of the user's may accept other labels. A row's first label is not used: no token predicts it.
            if self.loss_function is ForCausalLMLoss and kwargs.get("shift_labels") is None:
                check_classes(labels[..., 1:], self.config.vocab_size, kwargs.get("ignore_index", -100))
        no_logits = must_skip_logits(
            skip_logits, self.config.skip_logits, self.training, labels, self.loss_function, logits_to_keep
        )
        balance = self._has_experts and self._option("output_router_logits", output_router_logits)
        count = self._has_experts and self._option("output_expert_load", output_expert_load)
        if self._has_experts:
            has_z_loss = labels is not None and self.config.router_z_loss_coef
            kwargs["output_router_logits"] = bool(self._is_observed() or balance or count or has_z_loss)
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
        # Resizing a multimodal model's embeddings sets the new size only in the config.
        vocab_size = self.config.vocab_size
        logits = loss = aux_loss = load = None
        if no_logits:
            loss = loss_without_logits(self.lm_head, hidden_states, labels, vocab_size, **kwargs)
        else:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        if labels is None and "num_items_in_batch" in kwargs and self._has_router_losses(balance):
            warnings.warn(
                "The loss is computed outside of the model, as by Trainer with label_smoothing_factor or "
                "compute_loss_func: router_aux_loss_coef and router_z_loss_coef have no effect.",
                stacklevel=2,
            )
        if router_logits := outputs.get("router_logits"):
            token_mask = mask_of_new_tokens(attention_mask, hidden_states.shape[1])
            share = 1.0 if loss is None else _share_of_batch(labels, loss.device, **kwargs)
            loss, aux_loss = self._with_router_losses(loss, router_logits, token_mask, balance, share)
            if count:
                load = expert_load(router_logits, self.routers(), token_mask)
        return LlamoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=router_logits if balance else None,
            expert_load=load,
        )


def _share_of_batch(
    labels: torch.Tensor,
    device: torch.device,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    **_,
) -> torch.Tensor | float:
    """Return the fraction of the whole batch's labels that this micro-batch has, by which router losses are weighted.

    With gradient accumulation, the language modelling loss of a micro-batch is divided by the number of labels in the
    whole batch. A router loss is a mean over a micro-batch: without a weight, their sum would grow with their number.
    """
    if num_items_in_batch is None:
        return 1.0
    counted = labels[..., 1:] if shift_labels is None else shift_labels
    num_items = (counted != -100).sum().to(device)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(device)
    return num_items / num_items_in_batch


class LlamoeDenseForCausalLM(CausalLM, Generation, GenerationMixin):
    """LLaMA 1 or 2, or Mistral, with its head; reads folders of `LlamaForCausalLM` and `MistralForCausalLM`."""

    config: LlamoeDenseConfig
    _model_class = LlamoeDenseModel
    _checkpoint_prefixes = {r"transformer\.": "model."}


class LlamoeMixtralForCausalLM(CausalLM, Generation, GenerationMixin):
    """Mixtral with its language model head; reads folders of transformers' `MixtralForCausalLM`."""

    config: LlamoeMixtralConfig
    _model_class = LlamoeMixtralModel
    _has_experts = True


class LlamoeForCausalLM(CausalLM, Generation, GenerationMixin):
    """Llama 4's decoder with its language model head.

    Reads folders of transformers' `Llama4ForCausalLM`; of multimodal folders, such as those of Scout and Maverick, it
    reads all but tower and projector.
    """

    config: LlamoeTextConfig
    _model_class = LlamoeTextModel
    _has_experts = True
    _checkpoint_prefixes = {r"language_model\.": ""}
    _keys_passed_over = [r"^vision_model\.", r"^multi_modal_projector\."]
