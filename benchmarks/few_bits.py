"""Cases of our models in 32 and 16 bit, int8 and int4 on a CPU: a token, a prefill, and how long quantizing takes.

Beside llama.cpp they stand in `beside_llama_cpp`.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from . import OURS
from .beside_llama_cpp import PRECISIONS, QUANTIZED, decode_case, ours
from .decoders import Lazily
from .harness import IN_BFLOAT16, Case, Cases, Contestant
from .saved_models import FLOAT32, SavedModel, load_ours

SIXTEEN_BITS = f"{OURS}, bfloat16"
WITHOUT_SEARCH = f"{OURS}, int4 without search"


def few_bits(models: tuple[SavedModel, ...], tokens: int) -> Cases:
    """Decode and prefill with each model, then quantize the last one.

    Args:
        models: models to measure.
        tokens: tokens of the prefill.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = {model.name: Path(name) / model.name for model in models}
        for model in models:
            model.save(folders[model.name])
        for model in models:
            yield decode_case(
                f"{model.name}, a token",
                ours(model, folders[model.name], PRECISIONS),
                model.layers,
                reference=SIXTEEN_BITS,
                phase="decode",
                model=model.name,
            )
        for model in models:
            yield _prefill(model, folders[model.name], tokens)
        yield _quantizing(model, folders[model.name])


def _prefill(model: SavedModel, folder: Path, tokens: int) -> Case:
    ids = FLOAT32.tokens(1, tokens, model.config().vocab_size)

    def prefill(precision: str) -> Callable[[], torch.Tensor]:
        loaded = Lazily(partial(load_ours, model, folder, precision))
        return torch.no_grad()(lambda: loaded.get()(ids, use_cache=False).logits)

    runs = {f"{OURS}, {precision}": prefill(precision) for precision in PRECISIONS}
    return _case(f"{model.name}, prefill, T = {tokens}", runs, "prefill", model, tokens=tokens)


def _quantizing(model: SavedModel, folder: Path) -> Case:
    runs = {f"{OURS}, {precision}": partial(load_ours, model, folder, precision) for precision in QUANTIZED}
    runs[WITHOUT_SEARCH] = partial(load_ours, model, folder, "int4", search=False)
    weights = sum(parameter.numel() for parameter in model.on_meta().model.layers.parameters())
    return _case(f"{model.name}, `from_pretrained`", runs, "quantizing", model, weights=weights)


def _case(name: str, runs: dict[str, Callable[[], object]], phase: str, model: SavedModel, **facts) -> Case:
    """A case whose contestants compute different functions, so that no outputs are compared."""
    is_loading = phase == "quantizing"
    return Case(
        name=name,
        contestants={
            who: Contestant(run, outputs=None, warm_up=0 if is_loading else 1, has_own_pool=is_loading)
            for who, run in runs.items()
        },
        work=None,
        tolerance=IN_BFLOAT16,
        facts={"phase": phase, "model": model.name, **facts},
        reference=SIXTEEN_BITS,
    )
