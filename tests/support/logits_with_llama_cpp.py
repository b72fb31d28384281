"""Computes logits with llama.cpp, in a process of its own: it ends its process where it finds something wrong.

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
        # One pass. A cache in float32, as the weights are.
        n_batch=len(ids),
        n_ubatch=min(len(ids), 512),
        n_threads=2,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        # Where it stops, what it printed says why.
        verbose=True,
    )
    context.eval(ids)
    np.save(logits, context.scores[: len(ids)])
