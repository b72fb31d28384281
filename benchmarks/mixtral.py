"""A token of Mixtral 8x7B's layers in int4, beside a plain read of as many bytes: few bits at a published size.

Four of its layers, with embedding and head, are 4.1 GB. Codes and scales are drawn, since quantizing would take
minutes: no number is compared here. Each token meets other experts than the one before, as drawn routers choose them.
"""

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

import llamoe
from llamoe.configuration import preset

from . import OURS
from .few_bits import Generate
from .harness import IN_BFLOAT16, Case, Cases, Contestant
from .shapes import Setting

READ = "a plain read"
NEW = 16
"""Tokens of a run."""
BUFFER = 2**29
"""Bytes of the buffer that is read: more than caches hold."""


def drawn(config: llamoe.LlamoeMixtralConfig, weights: str, setting: Setting) -> PreTrainedModel:
    """A model whose packed weights, and all others, are random."""
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = llamoe.LlamoeMixtralForCausalLM(config).to(torch.bfloat16)
    quantizer = AutoHfQuantizer.from_config(llamoe.QuantizationConfig(weights), pre_quantized=True)
    quantizer.preprocess_model(model=model)
    model.to_empty(device="cpu")
    # Its buffers are computed, not stored.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    generator = setting.generator()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                tensor.random_(generator=generator)
            elif name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0, 0.005, generator=generator)
    return model.eval()


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
    model = drawn(config, "int4", setting)
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
