"""The decoder of all families.

They are LLaMA 1 and 2 and Mistral (`LlamoeDense…`), Mixtral (`LlamoeMixtral…`) and Llama 4 (`Llamoe…`). LLaMA 2 is a
special case of Llama 4's configuration: no mixture layers, no position-free layers, no q/k norm, no chunks. One
`DecoderLayer` serves all; the differences are data (`config.layer_plan`). Keys are stock keys, so the feed-forward has
the family's stock name, `mlp` or `feed_forward`.

Shapes: B batch, T tokens, E experts.
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
        """Map `[B, T, hidden_size]` to the same shape; arguments as in `Attention`."""
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
        """Run the decoder.

        Args:
            input_ids: `[B, T]` integers; either these or `inputs_embeds`.
            attention_mask: `[B, past + T]`, zeros on padding (left or right); or a ready 4-D mask, or a dict of masks
                by attention type.
            position_ids: `[B or 1, T]`. They decide rotation, temperature and chunk borders. By default each row is
                numbered from its first real token; rows in which they restart are packed sequences. Tokens that
                `attention_mask` hides may have any. Chunked layers behind padded cached tokens need the numbers of a
                row's real tokens.
            past_key_values: KV cache of earlier tokens; new ones are appended.
            inputs_embeds: `[B, T, hidden_size]` instead of `input_ids`.
            use_cache: whether to make a cache if none is given.
            **kwargs: `output_hidden_states`, `output_attentions` (none but under `eager`), `output_router_logits`,
                and arguments of the attention implementation.

        Returns:
            `last_hidden_state` `[B, T, hidden_size]`, and the requested outputs; `router_logits` is one `[B * T, E]`
            a mixture layer.

        Raises:
            ValueError: both or none of `input_ids` and `inputs_embeds`, a mask of another shape, a cache of another
                model, or one with tokens under gradient checkpointing.
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
        # Use the config's current number of layers: `generate(assistant_early_exit=...)` drafts with fewer.
        layers = self.layers[: self.config.num_hidden_layers]
        for layer, attention_type in zip(layers, self.config.attention_types()[: len(layers)], strict=True):
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=mask_mapping[attention_type],
                position_ids=position_ids,
                # transformers removes the argument of this name under gradient checkpointing.
                cache=past_key_values,
                # Implementations without masks read the positions.
                sliding_window=inputs.rules[attention_type].window,
                **kwargs,
            )
        return MoeModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), cache=past_key_values if use_cache else None
        )


class LlamoeDenseModel(DecoderModel):
    """LLaMA 1 or 2 without a head."""

    config: LlamoeDenseConfig
    # Stock's question answering head names its base model `transformer`.
    _checkpoint_prefixes = {r"transformer\.": ""}
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": Attention}


class MixtureModel(DecoderModel):
    """A decoder with mixtures of experts, whose router logits are an output; base of two families' decoders."""

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
            `num_items_in_batch` each of them is weighted by this forward's fraction of the batch's labels.
        aux_loss: scalar, the load-balancing loss before its coefficient, with `output_router_logits`.
        logits: `[B, T, vocab_size]`, or of some tokens only (`logits_to_keep`); None where the loss alone was
            computed (`skip_logits`, as an argument or in the config).
        router_logits: one `[B * T, E]` a mixture layer, with `output_router_logits`.
        expert_load: `[mixture layers, E]` int64, tokens that chose each expert, with `output_expert_load`.
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
            input_ids: as in `DecoderModel.forward`, like all arguments without a description here.
            labels: `[B, T]`, -100 for no loss; shifted inside. With `logits_to_keep` one for each token that is kept.
            output_router_logits: return `router_logits` and `aux_loss`, and add
                `router_aux_loss_coef * aux_loss` to the loss.
            output_expert_load: return `expert_load`.
            logits_to_keep: compute logits of this many last tokens (0: all), of the tokens at these indices, `[n]` for
                all rows or `[B, n]`, or of those where a mask `[B, T]` of bool is true: `[N, vocab_size]` of all rows.
            skip_logits: compute the loss alone, by pieces of the tokens, so that the logits of all of them never take
                memory; `logits` of the output is None. By default as `config.skip_logits` says, which applies where
                labels are given and transformers' usual loss is computed.

        Raises:
            ValueError: inputs or labels of a wrong shape, a label that is not a token (on the CPU), router losses
                under reentrant gradient checkpointing, where they would train nothing, or `skip_logits` with another
                `loss_function`.
        """
        if labels is not None:
            if isinstance(logits_to_keep, int) and logits_to_keep == 0:
                # Otherwise there must be a label for each kept logit, which the loss checks.
                check_labels(labels, input_ids if inputs_embeds is None else inputs_embeds)
            # Another loss may give other labels a meaning. The first label of a row is not used: no token precedes it.
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
        # Read from the config: resizing a multimodal model's embeddings updates no attribute of this class.
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
                "A loss is computed from the logits alone, as Trainer does with label_smoothing_factor or "
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
    """Return the fraction of the batch's labels in this micro-batch.

    With gradient accumulation, the language modelling loss of each micro-batch is divided by the number of labels in
    all of them. The router losses are means over a micro-batch, and would otherwise count once for each.
    """
    if num_items_in_batch is None:
        return 1.0
    counted = labels[..., 1:] if shift_labels is None else shift_labels
    num_items = (counted != -100).sum().to(device)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(device)
    return num_items / num_items_in_batch


class LlamoeDenseForCausalLM(CausalLM, Generation, GenerationMixin):
    """LLaMA 1 or 2 with its language model head; reads folders of transformers' `LlamaForCausalLM`."""

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

    Reads folders of transformers' `Llama4ForCausalLM`, and multimodal folders (as Scout and Maverick are published)
    without their tower and projector.
    """

    config: LlamoeTextConfig
    _model_class = LlamoeTextModel
    _has_experts = True
    _checkpoint_prefixes = {r"language_model\.": ""}
    _keys_passed_over = [r"^vision_model\.", r"^multi_modal_projector\."]
