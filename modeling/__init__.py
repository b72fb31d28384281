"""What a model computes.

Reading order: normalization, rotary, rotary_2d, masks, attention, feed_forward, moe, losses, inputs, weights,
adapters, base, decoder, vision, multimodal, peft_targets, registration. A file imports only files that stand before
it; `_compat` holds every branch on a library's version. Nothing is imported here, so that `llamoe.modeling.moe`
costs only what it needs.
"""
