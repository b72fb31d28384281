"""Cases of our models in 32 and 16 bit, int8 and int4 on a CPU: a token, also with adapters, a prefill, quantizing.

Beside llama.cpp, which has the same random weights, they decode and prefill in turns with its types of the same sizes.
Each decoder begins with the same token and yields as many as it is asked for, one pass of one token each.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, PreTrainedModel

import llamoe

from . import OURS, REFERENCE
from .bars import PEERS_IN_LLAMA_CPP
from .clocks import Clock, WallClock
from .gguf_files import find_converter, make_files, silence
from .harness import IN_BFLOAT16, SURE_ROUNDS, Case, Cases, Contestant, tolerance_of
from .held import is_held
from .saved_models import FLOAT32, SavedModel, load_ours, load_packed, nbytes

LLAMA_CPP = "llama.cpp"
FIRST = 20
"""The first token."""
NEW = 24
"""Tokens of a run."""
CACHED = 2000
"""Tokens of a long context, beside which a token is decoded."""
CONTEXT = 2048
"""Tokens for which llama.cpp has room."""
PREFILLS = (128, 512)
"""Tokens of a prefill beside llama.cpp."""
TRAINED = 256
"""Tokens of a step of training."""
KEPT = "LLAMOE_BENCH_FILES"
"""Names the folder where models and llama.cpp's files stay; without it they are made each time."""
PROBE = list(range(FIRST, FIRST + 8))
"""Tokens of the pass whose logits are compared in float32."""
PRECISIONS = tuple(PEERS_IN_LLAMA_CPP)
QUANTIZED = ("int8", "int4")
ADAPTED = ("bfloat16", "int4")
"""Of which a token is decoded with and without adapters."""
LAYERS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers with adapters."""
SIXTEEN_BITS = f"{OURS}, bfloat16"
THREADS = 2
MOST_OTHER_LOAD = 0.3
"""Other processes that run on average, beyond the processors that are left, while two threads are measured."""


class Generate:
    """A model of transformers' or ours, decoding with `generate`."""

    def __init__(self, model: PreTrainedModel, threads: int = 1):
        self.model, self.threads = model, threads
        self.nbytes = nbytes(model)
        self._cache: DynamicCache | None = None

    def decode(self, new: int) -> list[int]:
        """So many tokens after `FIRST`."""
        options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
        with on_threads(self.threads), torch.inference_mode():
            return self.model.generate(torch.tensor([[FIRST]]), **options)[0, 1:].tolist()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of one pass over some tokens."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    @torch.no_grad()
    def go_on(self, ids: list[int], new: int) -> None:
        """`FIRST` so many times, behind tokens that are read when they are first given."""
        if self._cache is None:
            self._cache = DynamicCache(config=self.model.config)
            self.model(torch.tensor([ids]), past_key_values=self._cache, logits_to_keep=1)
        for _ in range(new):
            self.model(torch.tensor([[FIRST]]), past_key_values=self._cache)
        self._cache.crop(-new)


class LlamaCpp:
    """A GGUF file in llama.cpp, as `Generate`. Its threads belong to this process.

    All runs in one thread of its own: llama.cpp sets the registers of AMX up once a thread, and oneDNN releases them.
    """

    def __init__(self, path: Path, threads: int = 1):
        import llama_cpp

        silence(llama_cpp)
        # A float32 model keeps its cache in float32, as ours does; others keep llama.cpp's float16.
        kind = llama_cpp.GGML_TYPE_F32 if path.stem.endswith("f32") else llama_cpp.GGML_TYPE_F16
        options = dict(
            n_ctx=CONTEXT,
            n_batch=max(PREFILLS),
            n_threads=threads,
            n_threads_batch=threads,
            type_k=kind,
            type_v=kind,
        )
        self.model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options)
        self.nbytes = path.stat().st_size
        self._thread = ThreadPoolExecutor(1)

    def decode(self, new: int) -> list[int]:
        """So many tokens after `FIRST`."""
        return self._thread.submit(self._decode, new).result()

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of one pass over some tokens."""
        return self._thread.submit(self._logits, ids).result()

    def go_on(self, ids: list[int], new: int) -> None:
        """As `Generate.go_on`."""
        self._thread.submit(self._go_on, ids, new).result()

    def _go_on(self, ids: list[int], new: int) -> None:
        if self.model.n_tokens < len(ids):
            self.model.reset()
            for begin in range(0, len(ids), max(PREFILLS)):
                self.model.eval(ids[begin : begin + max(PREFILLS)])
        # What was computed behind them is forgotten.
        self.model.n_tokens = len(ids)
        for _ in range(new):
            self.model.eval([FIRST])

    def _decode(self, new: int) -> list[int]:
        self.model.reset()
        tokens = [FIRST]
        for _ in range(new):
            self.model.eval(tokens[-1:])
            tokens.append(int(self.model.scores[self.model.n_tokens - 1].argmax()))
        return tokens[1:]

    def _logits(self, ids: list[int]) -> torch.Tensor:
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


def case_of(
    name: str,
    makers: Mapping[str, Callable[[], Any]],
    layers: int,
    run: Callable[[str, Any], Any],
    compared: list[int],
    **options: Any,
) -> Case:
    """A case of decoders, which are made when they are first used: one that fails is a contestant that fails.

    Args:
        name: of the case.
        makers: make the decoders.
        layers: of the model.
        run: takes a contestant's name and its decoder.
        compared: tokens of the pass whose logits are compared in float32.
        options: of the case.
    """

    def contestant(who: str, make: Callable[[], Any]) -> Contestant:
        decoder = cache(make)
        is_compared = who.endswith((REFERENCE, "float32", "f32"))
        outputs = (lambda _: [decoder().logits(compared)]) if is_compared else None
        # torch's counter does not see llama.cpp.
        return Contestant(lambda: run(who, decoder()), outputs, 1, has_own_pool=who.startswith(LLAMA_CPP))

    contestants = {who: contestant(who, make) for who, make in makers.items()}
    tolerance = tolerance_of(FLOAT32.dtype, layers)
    return Case(name, contestants, None, tolerance, least=SURE_ROUNDS, **options)


def decode_case(
    name: str,
    makers: Mapping[str, Callable[[], Any]],
    layers: int,
    clock: Clock | None = None,
    reference: str = REFERENCE,
    **facts,
) -> Case:
    """A case of decoders that begin with the same token; times are of one token.

    The facts tell how many first tokens are those of the contestant that ran first, and the bytes of the weights (of
    llama.cpp, of the file); both are filled while the case runs.
    """
    first_tokens: dict[str, int] = {}
    nbytes_of: dict[str, int] = {}
    expected: list[int] = []

    def run(who: str, decoder: Any) -> None:
        tokens = decoder.decode(NEW)
        nbytes_of[who] = decoder.nbytes
        expected.extend([] if expected else tokens)
        pairs = enumerate(zip(tokens, expected, strict=True))
        first_tokens[who] = next((i for i, (one, other) in pairs if one != other), len(tokens))

    facts = {"tokens": 1, "first_tokens": first_tokens, "nbytes_of": nbytes_of, "new": NEW, **facts}
    return case_of(name, makers, layers, run, PROBE, facts=facts, parts=NEW, clock=clock, reference=reference)


def ours(model: SavedModel, folder: Path, precision: str, threads: int = 1) -> Callable[[], Generate]:
    """What makes one of our decoders."""
    return lambda: Generate(load_packed(model, folder, precision), threads)


@contextmanager
def saved(models: tuple[SavedModel, ...]) -> Iterator[list[Path]]:
    """The models' folders, in the folder that stays or in a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(os.environ.get(KEPT) or temporary) / model.name for model in models]
        for model, folder in zip(models, folders, strict=True):
            # Written last.
            if not (folder / "tokenizer_config.json").exists():
                model.save(folder)
        yield folders


def few_bits(models: tuple[SavedModel, ...], tokens: int) -> Cases:
    """Decode, also with adapters, and prefill with each model, then quantize the last one, and train adapters of it.

    Args:
        models: models to measure.
        tokens: tokens of the prefill.
    """
    with saved(models) as folders:
        for model, folder in zip(models, folders, strict=True):
            makers = {f"{OURS}, {precision}": ours(model, folder, precision) for precision in PRECISIONS}
            facts = dict(phase="decode", model=model.name)
            yield decode_case(f"{model.name}, a token", makers, model.layers, reference=SIXTEEN_BITS, **facts)
        for model, folder in zip(models, folders, strict=True):
            yield _adapted(model, folder)
        for model, folder in zip(models, folders, strict=True):
            yield _prefill(model, folder, tokens)
        yield _quantizing(models[-1], folders[-1])
        yield _training(models[-1], folders[-1])


def _adapted(model: SavedModel, folder: Path) -> Case:
    """A token with adapters on all layers and experts that are not merged, and without."""

    def adapted(make: Callable[[], Generate]) -> Generate:
        loaded = make().model
        stacks = (
            ["experts.gate_up_proj", "experts.down_proj"] if "num_local_experts" in model.fields else None
        )
        config = LoraConfig(target_modules=[f"{each}_proj" for each in LAYERS], target_parameters=stacks)
        return Generate(get_peft_model(loaded, config).eval())

    makers: dict[str, Callable[[], Generate]] = {}
    for precision in ADAPTED:
        name = f"{OURS}, {precision}"
        makers[name] = ours(model, folder, precision)
        makers[f"{name}, adapters"] = partial(adapted, makers[name])
    if not is_held():
        makers[f"{REFERENCE}, bfloat16, adapters"] = partial(
            adapted, partial(_stock, model, folder, "bfloat16")
        )
    facts = dict(phase="adapters", model=model.name)
    name = f"{model.name}, a token with adapters"
    return decode_case(name, makers, model.layers, reference=SIXTEEN_BITS, **facts)


def _prefill(model: SavedModel, folder: Path, tokens: int) -> Case:
    ids = FLOAT32.tokens(1, tokens, model.config().vocab_size)

    def prefill(precision: str) -> Callable[[], torch.Tensor]:
        loaded = cache(partial(load_packed, model, folder, precision))
        return torch.no_grad()(lambda: loaded()(ids, use_cache=False).logits)

    runs = {f"{OURS}, {precision}": prefill(precision) for precision in PRECISIONS}
    return _case(f"{model.name}, prefill, T = {tokens}", runs, "prefill", model, tokens=tokens)


def _training(model: SavedModel, folder: Path) -> Case:
    """A step of adapters on attention and experts, beside weights of each precision."""
    ids = FLOAT32.tokens(1, TRAINED, model.config().vocab_size)

    def step(precision: str) -> Callable[[], None]:
        def make() -> Any:
            loaded = load_ours(model, folder, precision)
            return get_peft_model(loaded, llamoe.lora_config(loaded)).train()

        adapted = cache(make)
        return lambda: adapted()(input_ids=ids, labels=ids).loss.backward()

    runs = {f"{OURS}, {precision}": step(precision) for precision in PRECISIONS}
    return _case(f"{model.name}, a step of adapters, T = {TRAINED}", runs, "training", model, tokens=TRAINED)


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


def beside_llama_cpp(models: tuple[SavedModel, ...], phase: str) -> Cases:
    """Decode, from the first token or in a long context, or prefill on one thread, or decode on two, beside llama.cpp.

    Raises:
        LeftOut: llama-cpp-python or llama.cpp's converter is missing.
    """
    converter = find_converter()
    with saved(models) as folders:
        files = [make_files(converter, folder) for folder in folders]
        for model, folder, its in zip(models, folders, files, strict=True):
            if phase == "threads":
                yield two_threads(model, folder, its)
                continue
            makers: dict[str, Callable[[], Any]] = {
                name: partial(_stock, model, folder, dtype)
                for name, dtype in ((REFERENCE, "float32"), (f"{REFERENCE}, bfloat16", "bfloat16"))
                # Torch's products of 16 bits in scalar loops take minutes.
                if dtype == "float32" or (phase != "prefill" and not is_held())
            }
            makers |= {f"{OURS}, {precision}": ours(model, folder, precision) for precision in PRECISIONS}
            makers |= {f"{LLAMA_CPP}, {kind}": partial(LlamaCpp, path) for kind, path in its.items()}
            if phase == "context":
                ids = FLOAT32.tokens(1, CACHED, model.config().vocab_size)[0].tolist()
                yield case_of(
                    f"{model.name}, a token behind {CACHED}",
                    makers,
                    model.layers,
                    lambda who, decoder, ids=ids: decoder.go_on(ids, NEW),
                    PROBE,
                    facts=dict(phase=phase, model=model.name, tokens=1, cached=CACHED),
                    parts=NEW,
                )
                continue
            if phase == "decode":
                yield decode_case(model.name, makers, model.layers, phase=phase, model=model.name)
                continue
            for tokens in PREFILLS:
                ids = FLOAT32.tokens(1, tokens, model.config().vocab_size)[0].tolist()
                facts = dict(phase=phase, model=model.name, tokens=tokens)
                name = f"{model.name}, prefill, T = {tokens}"
                yield case_of(
                    name,
                    makers,
                    model.layers,
                    lambda who, decoder, ids=ids: decoder.logits(ids),
                    ids,
                    facts=facts,
                )


def _stock(model: SavedModel, folder: Path, dtype: str) -> Generate:
    return Generate(model.stock.from_pretrained(folder, dtype=dtype).eval())


def two_threads(model: SavedModel, folder: Path, files: Mapping[str, Path]) -> Case:
    """A token on one thread and on two, in few bits."""
    makers: dict[str, Callable[[], Any]] = {}
    for precision in QUANTIZED:
        for threads, on in ((1, ""), (THREADS, f", {THREADS} threads")):
            makers[f"{OURS}, {precision}{on}"] = ours(model, folder, precision, threads)
            makers[f"{LLAMA_CPP}, {PEERS_IN_LLAMA_CPP[precision]}{on}"] = partial(
                LlamaCpp, files[PEERS_IN_LLAMA_CPP[precision]], threads
            )
    facts = dict(phase="threads", model=model.name)
    case = decode_case(f"{model.name}, wall time", makers, model.layers, clock=WallClock(), **facts)
    if reason := _why_not_two_threads():
        case.skipped.update({who: reason for who in makers if who.endswith("threads")})
    return case


def _why_not_two_threads() -> str | None:
    """Two threads that wait for each other measure other load, if there is any, and not the model."""
    processors = os.cpu_count() or 1
    if processors < THREADS:
        return "the machine has one processor"
    load = processors * (1 - psutil.cpu_times_percent(interval=1.0).idle / 100)
    if load > processors - THREADS + MOST_OTHER_LOAD:
        return f"other load: {load:.1f} on {processors} processors"
    return None
