"""What a model computes.

Reading order: plain, normalization, rotary, rotary_2d, linear, sequences, folding, ring_cache, cached, rows, cutting,
masks, attention, feed_forward, grouped_product, kernels (a folder), expert_paths, moe, expert_parallel, losses,
inputs, safetensors_files, pickles, torch_files, weights, quantized, placement, split_experts, adapter_files,
adapters, gathering, distribution, saving, base, generation, servers, decoder, heads, vision, multimodal, pictures,
processing, peft_targets, registration, adoption. A file imports only files that stand before it; `_compat` holds every
branch on a library's version. Nothing is imported here, so that `llamoe.modeling.moe` costs only what it needs.
"""
