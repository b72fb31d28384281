"""What a model computes.

Reading order, from the parts to the whole: kernels, formats, layers, attention, moe (folders: the formulas, their
faster forms, and what the numbers of a matrix are); input_checks; parallel, checkpoints, quantization, offload,
adapters (folders: several devices, files in and out, quantized weights, experts on disk or in RAM, LoRA);
generation, base, loss, decoder, classification, vision, multimodal (the model classes and what they share);
processing, registration (folders: text and pictures in, and our classes in transformers' tables). A file or folder
imports only what stands before it. All may import `_compat`, which holds every branch on a library's version, and
`_private_api`, every use of what libraries keep to themselves. Nothing is imported here, so `llamoe.modeling.moe` loads
only what it needs.
"""
