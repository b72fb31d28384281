"""Ways to decode one row greedily: transformers' `generate`, our compiled step, and llama.cpp.

Each begins with the same token and yields as many tokens as it is asked for, one pass of one token each. Their models
are made when they are first used, so that one that fails is a contestant that fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedModel, StaticCache

from .saved_models import nbytes

Made = TypeVar("Made")

FIRST = 20
"""The first token."""
CONTEXT = 256
"""Tokens for which llama.cpp and static caches have room."""


class Decoder(Protocol):
    """A model that decodes one row."""

    nbytes: int

    def decode(self, new: int) -> list[int]:
        """So many tokens after `FIRST`."""
        ...

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of one pass over some tokens."""
        ...


class Generate:
    """A model of transformers' or ours, decoding with `generate`."""

    def __init__(self, model: PreTrainedModel, threads: int = 1):
        self.model, self.threads = model, threads
        self.nbytes = nbytes(model)

    def decode(self, new: int) -> list[int]:
        """See `Decoder`."""
        with on_threads(self.threads), torch.inference_mode():
            ids = self.model.generate(
                torch.tensor([[FIRST]]), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return ids[0, 1:].tolist()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """See `Decoder`."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]


class CompiledStep(Generate):
    """A model whose step of one token, with a static cache, is one compiled graph."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.cache = StaticCache(config=model.config, max_cache_len=CONTEXT)
        with torch.no_grad():
            # Allocates the cache outside of the graph.
            model(torch.tensor([[FIRST]]), past_key_values=self.cache)
        self.step = torch.compile(model, fullgraph=True)

    @torch.no_grad()
    def decode(self, new: int) -> list[int]:
        """See `Decoder`."""
        self.cache.reset()
        ids = [torch.tensor([[FIRST]])]
        for _ in range(new):
            logits = self.step(ids[-1], past_key_values=self.cache).logits
            ids.append(logits[:, -1].argmax(-1, keepdim=True))
        return torch.cat(ids[1:], 1)[0].tolist()


class LlamaCpp:
    """A GGUF file in llama.cpp. Its threads belong to this process."""

    def __init__(self, path: Path, threads: int = 1):
        import llama_cpp

        silence(llama_cpp)
        # A float32 model keeps its cache in float32, as ours does; others keep llama.cpp's float16.
        cache = llama_cpp.GGML_TYPE_F32 if path.stem.endswith("f32") else llama_cpp.GGML_TYPE_F16
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=CONTEXT,
            n_batch=64,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            type_k=cache,
            type_v=cache,
            verbose=False,
        )
        self.nbytes = path.stat().st_size

    def decode(self, new: int) -> list[int]:
        """See `Decoder`."""
        self.model.reset()
        tokens = [FIRST]
        for _ in range(new):
            self.model.eval(tokens[-1:])
            tokens.append(int(self.model.scores[self.model.n_tokens - 1].argmax()))
        return tokens[1:]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """See `Decoder`."""
        self.model.reset()
        self.model.eval(ids)
        return torch.tensor(self.model.scores[: len(ids)])


def silence(llama_cpp) -> None:
    """Make llama.cpp's C code print nothing."""
    llama_cpp.llama_log_set(_say_nothing(llama_cpp), None)


_callbacks: list = []


def _say_nothing(llama_cpp):
    # C keeps no reference of the function.
    if not _callbacks:
        _callbacks.append(llama_cpp.llama_log_callback(lambda level, text, data: None))
    return _callbacks[0]


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Lazily(Generic[Made]):
    """A decoder or model that is made when it is first used."""

    def __init__(self, make: Callable[[], Made]):
        self._make = make
        self._made: Made | None = None

    def get(self) -> Made:
        """What was made."""
        if self._made is None:
            self._made = self._make()
        return self._made
