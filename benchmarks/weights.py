"""Build pairs of mixture blocks, transformers' and ours with the same parameters, and their inputs."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Llama4TextConfig, MixtralConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import llamoe

STEP = 8.0
"""Distance by which `routed_rows` moves an input towards an expert's row of the router, in standard deviations of the
input: far enough that every contestant chooses this expert in every dtype."""


@dataclass(frozen=True)
class Setting:
    """The device, dtype and random seed of weights and activations."""

    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    def generator(self, offset: int = 0) -> torch.Generator:
        """Return a random generator for `seed` + `offset`."""
        return torch.Generator(self.device).manual_seed(self.seed + offset)

    def randn(self, *shape: int, offset: int = 1) -> torch.Tensor:
        """Draw normal random numbers in the setting's dtype, on its device."""
        return torch.randn(*shape, generator=self.generator(offset), device=self.device).to(self.dtype)

    def tokens(self, batch: int, length: int, vocabulary: int, offset: int = 1) -> torch.Tensor:
        """Draw token ids `[batch, length]`."""
        generator = self.generator(offset)
        return torch.randint(0, vocabulary, (batch, length), generator=generator, device=self.device)


def llama4_blocks(setting: Setting, experts: int) -> tuple[nn.Module, nn.Module]:
    """Return transformers' Llama 4 block, and ours with the same parameters; a token chooses one expert."""
    config = Llama4TextConfig(
        hidden_size=512, intermediate_size=1024, intermediate_size_mlp=2048, head_dim=64, num_hidden_layers=1,
        interleave_moe_layer_step=1, num_local_experts=experts, num_experts_per_tok=1, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=2048, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with made_in(setting):
        stock = Llama4TextMoe(config)
    draw_weights(stock, setting)
    with torch.device("meta"):
        ours = llamoe.LlamoeForCausalLM(llamoe.from_stock(config)).model.layers[0].feed_forward
    ours.load_state_dict(dict(stock.named_parameters()), assign=True)
    return stock.eval(), ours.eval()


def mixtral_blocks(setting: Setting, experts: int = 8) -> tuple[nn.Module, nn.Module]:
    """Return transformers' Mixtral block (`grouped_mm`), and ours; a token chooses two experts."""
    config = MixtralConfig(
        hidden_size=512, intermediate_size=1024, num_local_experts=experts, num_hidden_layers=1, vocab_size=2048,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, experts_implementation="grouped_mm",
    )  # fmt: skip
    with made_in(setting):
        stock = MixtralSparseMoeBlock(config)
    draw_weights(stock, setting)
    with torch.device("meta"):
        ours = llamoe.LlamoeMixtralModel(llamoe.from_stock(config)).layers[0].mlp
    ours.load_state_dict(dict(stock.named_parameters()), assign=True)
    return stock.eval(), ours.eval()


def routed_rows(setting: Setting, router: torch.Tensor, rows: int) -> torch.Tensor:
    """Draw inputs `[1, rows, hidden]` for which a router with weight `[experts, hidden]` chooses random experts."""
    chosen = torch.randint(len(router), (rows,), generator=setting.generator(rows), device=setting.device)
    x = setting.randn(rows, router.shape[1], offset=rows + 1)
    directions = nn.functional.normalize(router.detach().float(), dim=-1)
    return (x.float() + STEP * directions[chosen]).to(x.dtype)[None]


@torch.no_grad()
def draw_weights(module: nn.Module, setting: Setting) -> None:
    """Draw all parameters so that activations keep a standard deviation of about one."""
    generator = setting.generator()
    for name, parameter in module.named_parameters():
        if name.endswith(("router.weight", "gate.weight")):
            # With rows of norm 0.25, the experts chosen by `routed_rows` have logits of about 2.
            rows = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(0.25 * nn.functional.normalize(rows, dim=-1))
        elif parameter.ndim < 2:
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
        else:
            fan_in = parameter.shape[-2] if ".experts." in f".{name}" else parameter.shape[-1]
            parameter.normal_(std=1.0 if "embed_tokens" in name else fan_in**-0.5, generator=generator)


@contextmanager
def made_in(setting: Setting):
    """Let a `with` block build modules on the setting's device, in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with torch.device(setting.device):
            yield
    finally:
        torch.set_default_dtype(before)
