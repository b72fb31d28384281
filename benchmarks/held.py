r"""What this process is held to: one machine shows two kinds, by `make bench CPU=avx2` and `make test CPU=avx2`.

torch, oneDNN and MKL read what they may use from the environment when they start. Our kernels follow torch, and are
compiled without AVX-VNNI besides, as for processors that have AVX2 alone. What llama.cpp uses is decided when it is
built. A library for AVX2 is made from the sources of llama-cpp-python's version:

    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF \
        -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DCMAKE_INSTALL_RPATH='$ORIGIN' \
        -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON
    cmake --build build --target ggml-cpu
    cp -r .venv/lib/python3*/site-packages/llama_cpp/lib held && cp build/bin/libggml-cpu.so* held
    LLAMA_CPP_LIB_PATH=held make bench CPU=avx2 ARGS="--cases llama.cpp"

A llama.cpp that GCC 12 built for AMX ends with an illegal instruction in the first prefill of q8_0 or q4_0: the
compiler drops stores before `_tile_loadconfig` in ggml-cpu/amx/mmq.cpp. `asm volatile("" : : "r"(&tc) : "memory");`
keeps them.
"""

import os

VARIABLES = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}
_TOO_MUCH = {"avx2": ("AVX512", "AVX_VNNI", "AMX_INT8")}


def is_held() -> str | None:
    """Return the kind of processor that this process is held to, or None."""
    return next(
        (kind for kind, its in VARIABLES.items() if all(os.environ.get(name) == its[name] for name in its)),
        None,
    )


def beyond(system_info: str) -> list[str]:
    """What llama.cpp, by its own words, was built for beyond what this process is held to."""
    kind = is_held()
    return [word for word in _TOO_MUCH[kind] if f"{word} = 1" in system_info] if kind else []
