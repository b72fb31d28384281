"""GGUF files, llama.cpp's format, of LLaMA, Mistral, Mixtral and the text part of Llama 4, quantized or not.

Reading order: blocks (types of matrices), header, configuration, tokenizer, model.
"""

from .model import open_gguf
