"""Run llama.cpp's converter with a tokenizer that it does not recognise; run as a script.

python benchmarks/gguf_converter.py LLAMA.CPP/convert_hf_to_gguf.py MODEL --outfile FILE --outtype f32

The converter tokenizes one text, and looks up the hash of the tokens in a table of published models, to learn how the
tokenizer splits text. It stops if the hash is not there. Benchmarks read no text, so any entry will do.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    converter, *words = sys.argv[1:]
    folder = Path(converter).parent
    # Put llama.cpp's `conversion` and `gguf` before all other packages.
    sys.path[:1] = [str(folder), str(folder / "gguf-py")]
    from conversion import base  # pyright: ignore[reportMissingImports]

    def name_of_split(self, tokenizer) -> str:
        """Return llama.cpp's name of a pre-tokenizer of this architecture."""
        return "llama4" if self.model_arch == base.gguf.MODEL_ARCH.LLAMA4 else "llama-bpe"

    base.TextModel.get_vocab_base_pre = name_of_split
    sys.argv = [converter, *words]
    runpy.run_path(converter, run_name="__main__")
