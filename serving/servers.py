"""What inference servers compute differently from this library, and how a server's client learns of an error.

The differences are reported when a server builds a model. vLLM and SGLang run transformers models with their own
attention and experts in place of ours. The attention implementation that a server writes into the configuration
beforehand tells which one builds the model. The differences come from their sources: vLLM 0.33.0
`model_executor/models/transformers`, SGLang 0.5.23 `srt/models/transformers.py`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger("llamoe")

# Attention implementation to the server that registers it.
SERVERS = {"vllm": "vLLM", "vllm_mla": "vLLM", "sglang": "SGLang"}


def warn_of_server(config: PreTrainedConfig) -> None:
    """Warn, once each, of the server's differences while it builds a decoder; silent elsewhere."""
    server = SERVERS.get(config._attn_implementation)
    for difference in differences(config, server) if server else ():
        logger.warning_once(f"{server}'s transformers backend, {type(config).__name__}: {difference}")


def differences(config: PreTrainedConfig, server: str) -> list[str]:
    """A sentence for each thing that a server, "vLLM" or "SGLang", computes differently in a decoder."""
    found = []
    chunk_size = getattr(config, "attention_chunk_size", None)
    is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if is_chunked and chunk_size < config.max_position_embeddings:
        limit = {"vLLM": "--max-model-len", "SGLang": "--context-length"}[server]
        found.append(
            f"it knows no chunked attention. Layers with attention_chunk_size = {chunk_size} will see all earlier "
            f"tokens, so that logits are wrong from position {chunk_size} on. Serve with {limit} {chunk_size}."
        )
    if not getattr(config, "moe_layers", None):
        return found
    if config.num_experts_per_tok > 1 and config.apply_router_weight_on_input:
        found.append(
            f"it is told num_experts_per_tok = {config.num_experts_per_tok} experts a row, but is given one: Llama 4 "
            "scales the input of an expert, so that each expert of a token gets a row of its own. Kernels that rely "
            "on that number may give other results. Compare its answers with this library's."
        )
    # "swish" is another name of the same function.
    if config.hidden_act not in ("silu", "swish"):
        found.append(f"it computes experts with silu, whatever hidden_act says ({config.hidden_act!r} here).")
    # Mixtral's files have no stacks.
    if server == "SGLang" and not config.experts_are_output_first:
        found.append(
            "it passes over stacked experts and leaves random ones in their place. Serve a folder of "
            "`llamoe convert MODEL FOLDER --experts split`, whose experts it reads."
        )
    return found


@contextmanager
def told_to_clients() -> Iterator[None]:
    """Context in which a ValueError reaches the client of `transformers serve`, as status 400 with the error's words.

    The server answers an error with a bare 500 and closes the connection. FastAPI, by which it answers, passes on the
    words of its own `HTTPException` alone. Outside of a server's requests the error stays what it is.

    Raises:
        HTTPException: a ValueError, while `transformers serve` answers a request.
    """
    try:
        yield
    except ValueError as error:
        if not _answers_a_client():
            raise
        from fastapi import HTTPException

        raise HTTPException(status_code=400, detail=str(error)) from error


def _answers_a_client() -> bool:
    # Requests are handled on an event loop. Elsewhere in the server's process, a test's say, callers catch ValueError.
    if "transformers.cli.serving.server" not in sys.modules:
        return False
    # Imported here, since `--help` needs no asyncio.
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
