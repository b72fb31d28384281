"""Plans of how each model is distributed over several devices, in transformers' terms, as data.

A plan maps a module or parameter of the base model (`*` stands for a layer's number) to transformers' style for it. A
configuration has the plans of its base model, each head those of its additions, and `post_init` joins them.
transformers warns of rules for parts that a model lacks, such as the dense layers of a Llama 4 of mixtures alone.

* Tensor parallel: `colwise` splits a linear layer's outputs, `rowwise` its inputs, so that the pair needs one sum at
  its end. Llama 4's stacked experts are `[E, in, out]`, transposed against a linear layer's weight: the style that
  splits their outputs is called rowwise. "Packed" means that gate and up are each split by themselves.
* Expert parallel: whole experts on each device. Rows arrive scaled by their router score, with weights of one, so
  transformers' dispatch also suits routing that scales the input.
* Pipeline parallel: the children in the order in which they run, with the names of their inputs and outputs.
* FSDP2: modules that are gathered and freed by themselves; the last modules keep their weights, as they come first in
  backward.
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


# Plans of the language model head.
HEAD_TP = {"lm_head": "colwise_gather_output"}
HEAD_PP = {"lm_head": (["hidden_states"], ["logits"])}
HEAD_FSDP = {"lm_head": "keep_full_weight"}
