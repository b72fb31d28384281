"""GGUF files, which llama.cpp reads: LLaMA, Mistral, Mixtral and the text part of Llama 4, quantized or not.

Reading order: blocks (tensors whose numbers lie in blocks of a type), header, configuration,
tokenizer, model.
"""

from .model import open_gguf
