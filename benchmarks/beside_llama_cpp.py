"""Cases of decoding one row on a CPU beside llama.cpp: the same random weights, in turns.

Contestants: transformers in float32; our model in 32 and 16 bit, int8 and int4; llama.cpp's types of the same sizes;
and our compiled step where it is asked for.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from . import OURS, REFERENCE
from .clocks import Clock, WallClock
from .decoders import FIRST, CompiledStep, Decoder, Generate, Lazily, LlamaCpp
from .gguf_files import TYPES, find_converter, make_files
from .harness import SURE_ROUNDS, Case, Cases, Contestant, tolerance_of
from .saved_models import FLOAT32, SavedModel, load_ours

LLAMA_CPP = "llama.cpp"
NEW = 64
"""Tokens of a run."""
PROBE = list(range(FIRST, FIRST + 8))
"""Tokens of the pass whose logits are compared in float32."""
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
PEERS = dict(zip(PRECISIONS, TYPES, strict=True))
"""llama.cpp's type beside ours."""
QUANTIZED = ("int8", "int4")
THREADS = 2
MOST_OTHER_LOAD = 0.7
"""Other processes that run on average, beyond the processors that are left, while two threads are measured."""


@dataclass
class Notes:
    """What decoders show besides their time, by the contestant's name.

    Attributes:
        first_tokens: how many first tokens are those of the contestant that ran first.
        nbytes: bytes of the weights; of llama.cpp, of the file.
    """

    first_tokens: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    expected: list[int] = field(default_factory=list)

    def take(self, name: str, decoder: Decoder, tokens: list[int]) -> None:
        """Note what a run showed."""
        self.nbytes[name] = decoder.nbytes
        self.expected = self.expected or tokens
        pairs = enumerate(zip(tokens, self.expected, strict=True))
        self.first_tokens[name] = next((i for i, (one, other) in pairs if one != other), len(tokens))


def contestant(name: str, make: Callable[[], Decoder], notes: Notes) -> Contestant:
    """A decoder as a contestant; those in float32 are compared."""
    decoder = Lazily(make)

    def run() -> None:
        notes.take(name, decoder.get(), decoder.get().decode(NEW))

    is_compared = name.endswith((REFERENCE, "float32", "f32"))
    return Contestant(
        run,
        outputs=(lambda _: [decoder.get().logits(PROBE)]) if is_compared else None,
        warm_up=1,
        # torch's counter sees neither llama.cpp nor compiled code.
        has_own_pool=name.startswith(LLAMA_CPP) or "compiled" in name,
    )


def decode_case(
    name: str,
    makers: Mapping[str, Callable[[], Decoder]],
    layers: int,
    clock: Clock | None = None,
    reference: str = REFERENCE,
    **facts,
) -> Case:
    """A case of decoders that begin with the same token; times are of one token."""
    notes = Notes()
    return Case(
        name=name,
        contestants={who: contestant(who, make, notes) for who, make in makers.items()},
        work=None,
        tolerance=tolerance_of(FLOAT32.dtype, layers),
        # Both are filled while the case runs.
        facts={
            "tokens": 1,
            "first_tokens": notes.first_tokens,
            "nbytes_of": notes.nbytes,
            "new": NEW,
            **facts,
        },
        least=SURE_ROUNDS,
        parts=NEW,
        clock=clock,
        reference=reference,
    )


def ours(model: SavedModel, folder: Path, precisions: Iterable[str]) -> dict[str, Callable[[], Decoder]]:
    """Our contestants."""
    return {
        f"{OURS}, {precision}": lambda precision=precision: Generate(load_ours(model, folder, precision))
        for precision in precisions
    }


def decoding(models: tuple[SavedModel, ...], is_compiled: bool = False) -> Cases:
    """Decode with each model on one thread, then on two in few bits.

    Args:
        models: models to decode with.
        is_compiled: whether our step is compiled; then on one thread alone.

    Raises:
        LeftOut: llama-cpp-python or llama.cpp's converter is missing.
    """
    converter = find_converter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {}
        for model in models:
            model.save(folder / model.name)
            files[model.name] = make_files(converter, folder / model.name, folder)
        for model in models:
            # Graphs of earlier models of the same classes would count towards torch's limit.
            torch.compiler.reset()
            yield _one_thread(model, folder / model.name, files[model.name], is_compiled)
        # After all others: idle threads wait actively for a moment, which counts as processor time.
        for model in () if is_compiled else models:
            yield _two_threads(model, folder / model.name, files[model.name])


def _one_thread(model: SavedModel, folder: Path, files: Mapping[str, Path], is_compiled: bool) -> Case:
    makers: dict[str, Callable[[], Decoder]] = {
        REFERENCE: lambda: Generate(model.stock.from_pretrained(folder, dtype="float32").eval()),
        **ours(model, folder, PRECISIONS),
    }
    if is_compiled:
        for precision in PRECISIONS:
            makers[f"{OURS}, {precision} compiled"] = lambda precision=precision: CompiledStep(
                load_ours(model, folder, precision)
            )
    for kind, path in files.items():
        makers[f"{LLAMA_CPP}, {kind}"] = partial(LlamaCpp, path)
    return decode_case(model.name, makers, model.layers, phase="decode", model=model.name)


def _two_threads(model: SavedModel, folder: Path, files: Mapping[str, Path]) -> Case:
    makers: dict[str, Callable[[], Decoder]] = {}
    for precision in QUANTIZED:
        for threads in (1, THREADS):
            makers[f"{OURS}, {precision}{on(threads)}"] = lambda precision=precision, threads=threads: (
                Generate(load_ours(model, folder, precision), threads)
            )
            kind = PEERS[precision]
            makers[f"{LLAMA_CPP}, {kind}{on(threads)}"] = partial(LlamaCpp, files[kind], threads)
    case = decode_case(
        f"{model.name}, wall time",
        makers,
        model.layers,
        clock=WallClock(),
        phase="threads",
        model=model.name,
    )
    if reason := _why_not_two_threads():
        case.skipped.update({who: reason for who in makers if on(THREADS) in who})
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


def on(threads: int) -> str:
    """What a contestant's name says of its threads."""
    return f", {threads} threads" if threads > 1 else ""
