"""Load a model from a folder, and generate answers in conversations as a stream of text."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import llamoe
from llamoe import CheckpointError

from .expert_record import ExpertRecord, make_record

# Most seconds between two yields. The page can stop the answer at each of them.
_PATIENCE = 0.2
# Least seconds between two yields of a text: the page takes longer to show it than a small model to compute a token.
_PAUSE = 0.1
# These replace the folder's generation settings: streaming and expert records need one forward pass for each token.
_ONE_PASS_A_TOKEN = {
    "num_beams": 1, "use_cache": True, "return_dict_in_generate": False, "prompt_lookup_num_tokens": None,
    "guidance_scale": None,
}  # fmt: skip


# Compared by identity, like its record.
@dataclass(frozen=True, eq=False)
class Outcome:
    """The chosen experts and the timing of an answer; `str` returns a sentence about its speed.

    Attributes:
        record: the experts of each token; None if the model is not a mixture.
        times: clock times in seconds, of the question and of each generated token.
        hits: how often a chosen offloaded expert was in memory.
        misses: how often it had to be read.
    """

    record: ExpertRecord | None
    times: list[float]
    hits: int = 0
    misses: int = 0

    def __str__(self) -> str:
        count = len(self.times) - 1
        if count < 1:
            return ""
        parts = [
            f"{count} token{'s' if count > 1 else ''}",
            f"the first after {self.times[1] - self.times[0]:.1f} s",
        ]
        if count > 1:
            rate = (count - 1) / max(self.times[-1] - self.times[1], 1e-9)
            parts.append(f"then {rate:.3g} a second")
        if asked := self.hits + self.misses:
            parts.append(f"{self.hits / asked:.0%} of the chosen experts were in memory")
        return ", ".join(parts)


class ChatModel:
    """A model with its tokenizer or processor, which answers one question at a time.

    Attributes:
        name: name of the folder.
        sees_pictures: whether prompts may contain pictures.
        knows_conversations: whether it has a chat template. Without one the model continues the last message.
        has_experts: whether the model is a mixture, whose answers have an expert record.
        adapter: name of the adapter's folder; "" without an adapter.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str = "auto",
        device_map: str | dict[str, Any] = "auto",
        experts_memory: str | int | None = None,
        adapter: Path | None = None,
    ):
        """Load a model with llamoe's classes, also from folders of transformers' models, and an adapter for it.

        Args:
            folder: folder of the model and its tokenizer or processor.
            dtype, device_map, experts_memory: arguments of `from_pretrained`.
            adapter: folder of a peft adapter, or None.

        Raises:
            CheckpointError: the folder lacks weights.
            OSError, ValueError: from `from_pretrained`.
        """
        self.name = folder.resolve().name
        with llamoe.adopt():
            config = AutoConfig.from_pretrained(folder)
            self.sees_pictures = getattr(config, "vision_config", None) is not None
            reader, loader = (
                (AutoProcessor, AutoModelForImageTextToText)
                if self.sees_pictures
                else (AutoTokenizer, AutoModelForCausalLM)
            )
            self.processor: Any = reader.from_pretrained(folder)
            self.knows_conversations = bool(self.processor.chat_template)
            where: dict[str, Any] = {"device_map": device_map}
            if experts_memory is not None:
                where["experts_memory"] = experts_memory
                if device_map == "auto":
                    # Without a map, all weights but experts go to the default device.
                    del where["device_map"]
            self.model: Any
            self.model, loading = loader.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **where
            )
        if missing := sorted(loading["missing_keys"]):
            raise CheckpointError(
                f"{folder} has no weights for {', '.join(missing[:3])}: choose the folder of a causal language model."
            )
        self.adapter = adapter.resolve().name if adapter else ""
        if adapter:
            self.model.load_adapter(str(adapter))
        self.tokenizer: Any = self.processor.tokenizer if self.sees_pictures else self.processor
        self.has_experts = bool(getattr(self.model.config.get_text_config(), "moe_layers", None))
        # One answer at a time: the expert trace of an answer records every call of the model.
        self._lock = threading.Lock()

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens that prompt and answer may have together."""
        return self.model.config.get_text_config().max_position_embeddings

    def answer(
        self,
        messages: list[dict[str, Any]],
        max_new_tokens: int,
        temperature: float,
        *,
        is_adapted: bool = True,
    ) -> Iterator[tuple[str, Outcome | None]]:
        """Generate the answer to the last message of a conversation as a stream.

        Closing the iterator stops the model after the current token.

        Args:
            messages: the conversation in transformers' form; pictures are `PIL.Image.Image`.
            max_new_tokens: most tokens of the answer; it also ends at the model's last position.
            temperature: temperature of sampling; 0 takes the most probable token.
            is_adapted: whether to use the adapter, if there is one.

        Yields:
            the text so far and None, several times a second; at the end the whole text and its `Outcome`.

        Raises:
            ValueError: the conversation is longer than the model's number of positions.
        """
        streamer = TextIteratorStreamer(
            self.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=_PATIENCE
        )
        stopped = threading.Event()
        outcome: list[Outcome | BaseException] = []
        times = [time.perf_counter()]

        def is_stopped(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.full((len(input_ids),), stopped.is_set(), device=input_ids.device)

        def work() -> None:
            try:
                # An earlier answer may still compute its last token after the page has closed the stream.
                with self._lock:
                    if stopped.is_set():
                        return
                    if self.adapter:
                        self.model.enable_adapters() if is_adapted else self.model.disable_adapters()
                    self.model.experts_statistics(reset=True)
                    record = self._generate(
                        self._inputs(messages),
                        max_new_tokens,
                        do_sample=temperature > 0,
                        temperature=temperature if temperature > 0 else None,
                        streamer=streamer,
                        stopping_criteria=StoppingCriteriaList([is_stopped]),
                    )
                    layers = self.model.experts_statistics().values()
                    hits, misses = (sum(layer[name] for layer in layers) for name in ("hits", "misses"))
                    outcome.append(Outcome(record, times, hits, misses))
            # Any error is raised again below, in the thread that reads the stream.
            except BaseException as error:
                outcome.append(error)
                streamer.on_finalized_text("", stream_end=True)

        worker = threading.Thread(target=work, name="answer", daemon=True)
        worker.start()
        text, shown = "", 0.0
        try:
            while True:
                # The streamer raises `Empty` when no text came in time, as while the model reads the prompt.
                with suppress(queue.Empty):
                    if (piece := next(streamer, None)) is None:
                        break
                    text += piece
                if time.perf_counter() - shown >= _PAUSE:
                    yield text, None
                    shown = time.perf_counter()
        finally:
            stopped.set()
        worker.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        yield text, outcome[0]

    def _generate(self, inputs: Any, max_new_tokens: int, **options: Any) -> ExpertRecord | None:
        length = inputs["input_ids"].shape[1]
        if length >= self.max_tokens:
            raise ValueError(
                f"The conversation has {length:,} tokens, and the model has {self.max_tokens:,} positions. Begin a "
                "new conversation, or ask something shorter."
            )
        max_new_tokens = min(max_new_tokens, self.max_tokens - length)
        with llamoe.trace_experts(self.model) if self.has_experts else nullcontext() as trace:
            output = self.model.generate(
                **inputs, max_new_tokens=max_new_tokens, **_ONE_PASS_A_TOKEN, **options
            )
        tokens = output[0].tolist()
        # Some generation settings make several forward passes for a token, so the trace would not fit the tokens.
        if trace is None or trace.experts().shape[1] != len(tokens) - 1:
            return None
        if tokens[-1] in self.tokenizer.all_special_ids:
            tokens = tokens[:-1]
        return make_record(trace, self.model.config, self.processor, inputs, self._texts(tokens, length))

    def _texts(self, tokens: list[int], first: int) -> list[str]:
        """Return the text of each token from index `first` on.

        Each token is decoded after the one before it, since a token that is decoded alone may lose its leading space.
        """
        decode = self.tokenizer.decode
        return [
            decode(tokens[index - 1 : index + 1]).removeprefix(decode(tokens[index - 1 : index]))
            for index in range(first, len(tokens))
        ]

    def _inputs(self, messages: list[dict[str, Any]]) -> Any:
        if self.knows_conversations:
            inputs = self.processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
        else:
            inputs = self.tokenizer(messages[-1]["content"], return_tensors="pt")
        inputs = inputs.to(self.model.device)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return inputs
