"""The models, their layers and kernels.

Reading order, from the parts to the whole: kernels, formats, layers, attention, moe (folders: fast kernels, weight
formats, and the formulas); input_checks; parallel, checkpoints, quantization, offload, adapters (folders: several
devices, files, quantized weights, experts on disk or in RAM, LoRA); generation, base, loss, decoder, classification,
vision, multimodal (the model classes and their base classes); processing, registration (folders: processor, and entries
in transformers' tables). A file or folder imports only earlier ones. All may import `_compat`, with every branch on a
library's version, and `_private_api`, with every use of libraries' private functions. Nothing is imported here, so
`llamoe.modeling.moe` loads only what it needs.
"""
