"""Plans that divide each model among several devices, as data for transformers.

A plan maps names of modules or parameters (`*` stands for a layer's number) to the style in which transformers divides
them. Configurations have the plans of the base model. Models with a head add the plans below for the head.
transformers warns of entries for parts that a model lacks, such as the dense layers of a Llama 4 with mixtures only.

* Tensor parallelism: `colwise` splits the outputs of a linear layer, `rowwise` its inputs. A `colwise` layer followed
  by a `rowwise` one needs a single sum over devices. For Llama 4's stacked experts `[E, in, out]`, which are transposed
  weights of linear layers, `rowwise` splits the outputs. "Packed" styles split gate and up separately.
* Expert parallelism: each device has whole experts. transformers' dispatch suits Llama 4's routing, too: rows are
  scaled by the router's scores before dispatch, and their weights are 1.
* Pipeline parallelism: the child modules in the order in which they run, with the names of their inputs and outputs.
* FSDP2: the modules whose weights are gathered separately, and freed after their forward. The last modules keep their
  weights, because the backward pass needs them first.
"""

ATTENTION_TP = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}


def _feed_forward_tp(name: str) -> dict[str, str]:
    return {f"{name}.gate_proj": "colwise", f"{name}.up_proj": "colwise", f"{name}.down_proj": "rowwise"}


DENSE_TP = {**ATTENTION_TP, **_feed_forward_tp("layers.*.mlp")}


def _experts_ep(name: str) -> dict[str, str]:
    return {
        f"{name}.gate_up_proj": "grouped_gemm",
        f"{name}.down_proj": "grouped_gemm",
        name: "ep_dispatch_experts",
    }


TEXT_TP = {
    **ATTENTION_TP,
    **_feed_forward_tp("layers.*.feed_forward"),
    **_feed_forward_tp("layers.*.feed_forward.shared_expert"),
    "layers.*.feed_forward.experts.gate_up_proj": "packed_rowwise",
    "layers.*.feed_forward.experts.down_proj": "colwise",
    "layers.*.feed_forward.experts": "moe_tp_experts",
}
TEXT_EP = _experts_ep("layers.*.feed_forward.experts")

MIXTRAL_TP = {
    **ATTENTION_TP,
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
MIXTRAL_SHARED_TP = _feed_forward_tp("layers.*.mlp.shared_expert")
MIXTRAL_EP = _experts_ep("layers.*.mlp.experts")

DECODER_PP = {
    "embed_tokens": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}

DECODER_FSDP = {
    "embed_tokens": "free_full_weight",
    "layers.*": "free_full_weight",
    "norm": "keep_full_weight",
}

VISION_TP = {
    **{f"model.{name}": style for name, style in ATTENTION_TP.items()},
    "model.layers.*.mlp.fc1": "colwise",
    "model.layers.*.mlp.fc2": "rowwise",
    "vision_adapter.mlp.fc1": "colwise",
    "vision_adapter.mlp.fc2": "rowwise",
}

VISION_FSDP = {"model.layers.*": "free_full_weight"}


# Plans of the output head.
HEAD_TP = {"lm_head": "colwise_gather_output"}
HEAD_PP = {"lm_head": (["hidden_states"], ["logits"])}
HEAD_FSDP = {"lm_head": "keep_full_weight"}
