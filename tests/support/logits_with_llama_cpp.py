"""Compute the logits of tokens with llama.cpp; a program of its own, as llama.cpp ends its process on errors.

python tests/support/logits_with_llama_cpp.py FILE.gguf TOKENS.npy LOGITS.npy
"""

import sys

import llama_cpp
import numpy as np

if __name__ == "__main__":
    model, tokens, logits = sys.argv[1:]
    ids = np.load(tokens).tolist()
    context = llama_cpp.Llama(
        model,
        n_ctx=len(ids),
        # Compute all tokens in one batch, with a cache in float32 as the weights.
        n_batch=len(ids),
        n_ubatch=min(len(ids), 512),
        n_threads=2,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        # If llama.cpp ends the process, its output says why.
        verbose=True,
    )
    context.eval(ids)
    np.save(logits, context.scores[: len(ids)])
