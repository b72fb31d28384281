"""A token of Mixtral 8x7B's layers in int4, beside a plain read of as many bytes: quantization at a published size.

Four of its layers, with embedding and head, are 4.1 GB. Their numbers are drawn (`published_sizes.write`), since
quantizing would take minutes: none is compared here. Each token meets other experts than the one before.
"""

import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

import llamoe
from llamoe.configuration import preset

from . import OURS, published_sizes
from .few_bits import Generate
from .harness import IN_BFLOAT16, Case, Cases, Contestant
from .shapes import Setting

READ = "a plain read"
NEW = 16
"""Tokens of a run."""
BUFFER = 2**29
"""Bytes of the buffer that is read: more than caches hold."""


def bytes_a_token(model: PreTrainedModel) -> int:
    """Bytes of the weights that a token meets: all but the embedding and the experts that it has not chosen."""
    config = model.config
    chosen = config.num_experts_per_tok / config.num_local_experts
    return sum(
        int(tensor.nbytes * (chosen if ".experts." in name else 1))
        for name, tensor in model.state_dict().items()
        if not name.startswith("model.embed_tokens")
    )


def mixtral(setting: Setting, layers: int, **sizes: int) -> Cases:
    """A token of so many of Mixtral 8x7B's layers in int4.

    Args:
        setting: the random seed.
        layers: number of layers.
        sizes: of the configuration, in place of the published ones.
    """
    config = preset("mixtral-8x7b", num_hidden_layers=layers, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        published_sizes.write(config, Path(folder) / "model", "int4", setting.seed)
        model = llamoe.LlamoeMixtralForCausalLM.from_pretrained(Path(folder) / "model").eval()
    decoder, nbytes = Generate(model), bytes_a_token(model)
    # Two streams are read faster than one.
    halves = torch.ones(2, BUFFER // 8)

    def read() -> None:
        left = NEW * nbytes // 4
        while left > 0:
            count = min(left, halves.numel()) // 2
            torch.dot(*halves[:, :count])
            left -= max(2 * count, 1)

    contestants = {
        READ: Contestant(read, None, warm_up=1),
        f"{OURS}, int4": Contestant(lambda: decoder.decode(NEW), None, warm_up=1),
    }
    facts = {"phase": "decode", "tokens": 1, "model": f"Mixtral, {layers} layers", "nbytes": nbytes}
    yield Case(
        f"Mixtral 8x7B, {layers} layers, a token",
        contestants,
        None,
        IN_BFLOAT16,
        facts,
        reference=READ,
        parts=NEW,
    )
