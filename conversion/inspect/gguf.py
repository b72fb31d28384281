"""Whether llama.cpp computes a checkpoint as it is, and what its converter to GGUF needs before."""

from __future__ import annotations

import copy
from typing import Any

from ...configuration import LlamoeConfig
from ...configuration.quantization import METHOD
from ...modeling.registration import model_class
from ...serving import gguf_problems
from ..checkpoint import Checkpoint
from ..io import read_json

_PICTURES = (
    "This is the decoder's answer. llama.cpp makes other features of pictures than Llama 4's tower: ask about pictures "
    "with transformers."
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")


def answer_for_gguf(found: Checkpoint) -> tuple[list[str], list[str]]:
    """Sentences on what llama.cpp would compute otherwise, and on what to know and to do before the conversion.

    A preset or a config.json alone has nothing to convert, so nothing to do is named for it.
    """
    config = found.config
    if config is None:
        return ["There is no configuration, by which llama.cpp's converter chooses an architecture."], []
    notes = [_PICTURES] if isinstance(config, LlamoeConfig) else []
    if not found.sources:
        return gguf_problems(config), notes
    path = found.path / "config.json"
    raw: dict[str, Any] = read_json(path) if path.is_file() else {}
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method is not None and method != METHOD:
        config = copy.deepcopy(config)
        config.quantization_config = raw["quantization_config"]
    is_stock = raw.get("model_type") not in (None, config.model_type)
    # `llamoe convert` writes a causal language model.
    problems = gguf_problems(config, None if is_stock else model_class(config).__name__)
    are_split = any(".feed_forward.experts.0." in tensor.origin for tensor in found.tensors.values())
    if not is_stock or are_split:
        notes.append(
            "llama.cpp's converter reads stock's layout alone: run `llamoe convert PATH FOLDER --layout stock` and "
            "give it that folder."
        )
    if raw and not found.companions.keys() & set(_TOKENIZERS):
        notes.append(
            "llama.cpp's converter needs the tokenizer's files in the folder: save the tokenizer there, too."
        )
    return problems, notes
