"""Compute the features of one picture with llama.cpp's library for pictures, as a program of its own.

python tests/support/features_with_llama_cpp.py DECODER.gguf TOWER.gguf PIXELS.npy FEATURES.npy

reads pixels `[height, width, 3]` in uint8, of the tower's size, and writes features `[tokens, hidden]`.
"""

import ctypes
import sys

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp

if __name__ == "__main__":
    decoder, tower, pixels, features = sys.argv[1:]
    picture = np.load(pixels)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(decoder.encode(), llama_cpp.llama_model_default_params())
    options = mtmd_cpp.mtmd_context_params_default()
    options.use_gpu = options.warmup = False
    context = mtmd_cpp.mtmd_init_from_file(tower.encode(), model, options)
    height, width, _ = picture.shape
    data = (ctypes.c_uint8 * picture.size).from_buffer_copy(picture.tobytes())
    bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(mtmd_cpp.mtmd_bitmap_init(width, height, data))
    marker = mtmd_cpp.mtmd_default_marker()
    text = mtmd_cpp.mtmd_input_text(marker, len(marker), False, True)
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    assert mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1) == 0
    count = mtmd_cpp.mtmd_input_chunks_size(chunks)
    pieces = [mtmd_cpp.mtmd_input_chunks_get(chunks, index) for index in range(count)]
    # Take the picture's chunk: the tokens before and after the picture are chunks of text.
    image = mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE
    (chunk,) = (piece for piece in pieces if mtmd_cpp.mtmd_input_chunk_get_type(piece) == image)
    assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
    shape = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk), llama_cpp.llama_model_n_embd(model)
    output = mtmd_cpp.mtmd_get_output_embd(context)
    np.save(features, np.ctypeslib.as_array(output, (shape[0] * shape[1],)).reshape(shape))
