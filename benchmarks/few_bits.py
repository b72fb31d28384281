"""Cases of our models in 32 and 16 bit, int8 and int4 on a CPU: a token, a prefill, and how long quantizing takes.

Beside llama.cpp, which has the same random weights, they decode in turns with its types of the same sizes. Each decoder
begins with the same token and yields as many as it is asked for, one pass of one token each.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from . import OURS, REFERENCE
from .clocks import Clock, WallClock
from .gguf_files import TYPES, find_converter, make_files, silence
from .harness import IN_BFLOAT16, SURE_ROUNDS, Case, Cases, Contestant, tolerance_of
from .saved_models import FLOAT32, SavedModel, load_ours, nbytes

LLAMA_CPP = "llama.cpp"
FIRST = 20
"""The first token."""
NEW = 64
"""Tokens of a run."""
CONTEXT = 256
"""Tokens for which llama.cpp has room."""
PROBE = list(range(FIRST, FIRST + 8))
"""Tokens of the pass whose logits are compared in float32."""
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
PEERS = dict(zip(PRECISIONS, TYPES, strict=True))
"""llama.cpp's type beside ours."""
QUANTIZED = ("int8", "int4")
SIXTEEN_BITS = f"{OURS}, bfloat16"
THREADS = 2
MOST_OTHER_LOAD = 0.7
"""Other processes that run on average, beyond the processors that are left, while two threads are measured."""


class Generate:
    """A model of transformers' or ours, decoding with `generate`."""

    def __init__(self, model: PreTrainedModel, threads: int = 1):
        self.model, self.threads = model, threads
        self.nbytes = nbytes(model)

    def decode(self, new: int) -> list[int]:
        """So many tokens after `FIRST`."""
        options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
        with on_threads(self.threads), torch.inference_mode():
            return self.model.generate(torch.tensor([[FIRST]]), **options)[0, 1:].tolist()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of one pass over some tokens."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]


class LlamaCpp:
    """A GGUF file in llama.cpp, as `Generate`. Its threads belong to this process."""

    def __init__(self, path: Path, threads: int = 1):
        import llama_cpp

        silence(llama_cpp)
        # A float32 model keeps its cache in float32, as ours does; others keep llama.cpp's float16.
        kind = llama_cpp.GGML_TYPE_F32 if path.stem.endswith("f32") else llama_cpp.GGML_TYPE_F16
        options = dict(
            n_ctx=CONTEXT, n_batch=64, n_threads=threads, n_threads_batch=threads, type_k=kind, type_v=kind
        )
        self.model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options)
        self.nbytes = path.stat().st_size

    def decode(self, new: int) -> list[int]:
        """So many tokens after `FIRST`."""
        self.model.reset()
        tokens = [FIRST]
        for _ in range(new):
            self.model.eval(tokens[-1:])
            tokens.append(int(self.model.scores[self.model.n_tokens - 1].argmax()))
        return tokens[1:]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of one pass over some tokens."""
        self.model.reset()
        self.model.eval(ids)
        return torch.tensor(self.model.scores[: len(ids)])


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decode_case(
    name: str,
    makers: Mapping[str, Callable[[], Any]],
    layers: int,
    clock: Clock | None = None,
    reference: str = REFERENCE,
    **facts,
) -> Case:
    """A case of decoders that begin with the same token; times are of one token, outputs in float32 are compared.

    Decoders are made when they are first used, so that one that fails is a contestant that fails. The facts tell how
    many first tokens are those of the contestant that ran first, and the bytes of the weights (of llama.cpp, of the
    file); both are filled while the case runs.
    """
    first_tokens: dict[str, int] = {}
    nbytes_of: dict[str, int] = {}
    expected: list[int] = []

    def contestant(who: str, make: Callable[[], Any]) -> Contestant:
        decoder = cache(make)

        def run() -> None:
            tokens = decoder().decode(NEW)
            nbytes_of[who] = decoder().nbytes
            expected.extend([] if expected else tokens)
            pairs = enumerate(zip(tokens, expected, strict=True))
            first_tokens[who] = next((i for i, (one, other) in pairs if one != other), len(tokens))

        is_compared = who.endswith((REFERENCE, "float32", "f32"))
        outputs = (lambda _: [decoder().logits(PROBE)]) if is_compared else None
        # torch's counter does not see llama.cpp.
        return Contestant(run, outputs, warm_up=1, has_own_pool=who.startswith(LLAMA_CPP))

    return Case(
        name=name,
        contestants={who: contestant(who, make) for who, make in makers.items()},
        work=None,
        tolerance=tolerance_of(FLOAT32.dtype, layers),
        facts={"tokens": 1, "first_tokens": first_tokens, "nbytes_of": nbytes_of, "new": NEW, **facts},
        least=SURE_ROUNDS,
        parts=NEW,
        clock=clock,
        reference=reference,
    )


def ours(model: SavedModel, folder: Path, precision: str, threads: int = 1) -> Callable[[], Generate]:
    """What makes one of our decoders."""
    return lambda: Generate(load_ours(model, folder, precision), threads)


def few_bits(models: tuple[SavedModel, ...], tokens: int) -> Cases:
    """Decode and prefill with each model, then quantize the last one.

    Args:
        models: models to measure.
        tokens: tokens of the prefill.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / model.name for model in models]
        for model, folder in zip(models, folders, strict=True):
            model.save(folder)
            makers = {f"{OURS}, {precision}": ours(model, folder, precision) for precision in PRECISIONS}
            facts = dict(phase="decode", model=model.name)
            yield decode_case(f"{model.name}, a token", makers, model.layers, reference=SIXTEEN_BITS, **facts)
        for model, folder in zip(models, folders, strict=True):
            yield _prefill(model, folder, tokens)
        yield _quantizing(models[-1], folders[-1])


def _prefill(model: SavedModel, folder: Path, tokens: int) -> Case:
    ids = FLOAT32.tokens(1, tokens, model.config().vocab_size)

    def prefill(precision: str) -> Callable[[], torch.Tensor]:
        loaded = cache(partial(load_ours, model, folder, precision))
        return torch.no_grad()(lambda: loaded()(ids, use_cache=False).logits)

    runs = {f"{OURS}, {precision}": prefill(precision) for precision in PRECISIONS}
    return _case(f"{model.name}, prefill, T = {tokens}", runs, "prefill", model, tokens=tokens)


def _quantizing(model: SavedModel, folder: Path) -> Case:
    runs = {f"{OURS}, {precision}": partial(load_ours, model, folder, precision) for precision in QUANTIZED}
    runs[f"{OURS}, int4 without search"] = partial(load_ours, model, folder, "int4", search=False)
    weights = sum(parameter.numel() for parameter in model.on_meta().model.layers.parameters())
    return _case(f"{model.name}, `from_pretrained`", runs, "quantizing", model, weights=weights)


def _case(name: str, runs: dict[str, Callable[[], object]], phase: str, model: SavedModel, **facts) -> Case:
    """A case whose contestants compute different functions, so that no outputs are compared."""
    loads = phase == "quantizing"
    options: dict[str, Any] = dict(outputs=None, warm_up=int(not loads), has_own_pool=loads)
    contestants = {who: Contestant(run, **options) for who, run in runs.items()}
    facts |= {"phase": phase, "model": model.name}
    return Case(name, contestants, None, IN_BFLOAT16, facts, reference=SIXTEEN_BITS)


def beside_llama_cpp(models: tuple[SavedModel, ...]) -> Cases:
    """Decode with each model on one thread, then on two in few bits, beside llama.cpp.

    Raises:
        LeftOut: llama-cpp-python or llama.cpp's converter is missing.
    """
    converter = find_converter()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / model.name for model in models]
        files = []
        for model, folder in zip(models, folders, strict=True):
            model.save(folder)
            files.append(make_files(converter, folder, Path(name)))
        for model, folder, its in zip(models, folders, files, strict=True):
            stock = partial(model.stock.from_pretrained, folder, dtype="float32")
            makers: dict[str, Callable[[], Any]] = {REFERENCE: lambda stock=stock: Generate(stock().eval())}
            makers |= {f"{OURS}, {precision}": ours(model, folder, precision) for precision in PRECISIONS}
            makers |= {f"{LLAMA_CPP}, {kind}": partial(LlamaCpp, path) for kind, path in its.items()}
            yield decode_case(model.name, makers, model.layers, phase="decode", model=model.name)
        # After all others: idle threads wait actively for a moment, which counts as processor time.
        for model, folder, its in zip(models, folders, files, strict=True):
            yield two_threads(model, folder, its)


def two_threads(model: SavedModel, folder: Path, files: Mapping[str, Path]) -> Case:
    """A token on one thread and on two, in few bits."""
    makers: dict[str, Callable[[], Any]] = {}
    for precision in QUANTIZED:
        for threads, on in ((1, ""), (THREADS, f", {THREADS} threads")):
            makers[f"{OURS}, {precision}{on}"] = ours(model, folder, precision, threads)
            makers[f"{LLAMA_CPP}, {PEERS[precision]}{on}"] = partial(
                LlamaCpp, files[PEERS[precision]], threads
            )
    facts = dict(phase="threads", model=model.name)
    case = decode_case(f"{model.name}, wall time", makers, model.layers, clock=WallClock(), **facts)
    if reason := _why_not_two_threads():
        case.skipped.update({who: reason for who in makers if who.endswith("threads")})
    return case


def _why_not_two_threads() -> str | None:
    """Two threads that wait for each other measure other load, if there is any, and not the model."""
    processors, load = os.cpu_count() or 1, os.getloadavg()[0]
    if processors < THREADS:
        return "the machine has one processor"
    # This process is one of the load.
    if load - 1 > processors - THREADS + MOST_OTHER_LOAD:
        return f"other load: {load:.1f} on {processors} processors"
    return None
