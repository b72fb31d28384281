"""Modules and models of transformers and ours that share the same parameters, without copies."""

from contextlib import contextmanager

import torch
from torch import nn
from transformers import (
    Llama4TextConfig,
    Llama4VisionConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import llamoe

from .routing import set_router, steer
from .shapes import Setting, Shape


def _sizes(shape: Shape) -> dict:
    """Fields of vocabulary and attention; no special tokens."""
    return dict(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        bos_token_id=None,
        eos_token_id=None,
    )


def text_config(shape: Shape, layers: int = 1, **changes) -> Llama4TextConfig:
    """Configuration of Llama 4's text model in which every layer is a mixture."""
    fields = dict(
        intermediate_size=shape.expert,
        intermediate_size_mlp=2 * shape.expert,
        num_hidden_layers=layers,
        interleave_moe_layer_step=1,
        num_local_experts=shape.experts,
        num_experts_per_tok=1,
        pad_token_id=None,
    )
    return Llama4TextConfig(**{**_sizes(shape), **fields, **changes})


def dense_config(shape: Shape, layers: int) -> LlamaConfig:
    """Configuration of LLaMA with the attention of a shape and a feed-forward of 8/3 of its width."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=-(-shape.hidden * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        bos_token_id=None,
        eos_token_id=None,
    )


def mistral_config(shape: Shape, **changes) -> MistralConfig:
    """Configuration of one layer of Mistral with the attention of a shape and a small feed-forward."""
    return MistralConfig(**_sizes(shape), intermediate_size=shape.hidden, num_hidden_layers=1, **changes)


def vision_config(hidden: int, layers: int, heads: int, output: int) -> Llama4VisionConfig:
    """Configuration of Llama 4's tower over tiles of 336 pixels."""
    return Llama4VisionConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        projector_input_dim=output,
        projector_output_dim=output,
        vision_output_dim=output,
    )


def block_pair(
    setting: Setting, shape: Shape, implementations: tuple[str, ...]
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A mixture block of transformers, and ours with the same parameters.

    Args:
        setting: device and dtype.
        shape: sizes.
        implementations: experts implementations that ours is built with besides its default.

    Returns:
        transformers' block, and ours by the name of its implementation, "llamoe" for the default.
    """
    config = text_config(shape)
    with made_in(setting):
        stock = Llama4TextMoe(config)
    draw_weights(stock, setting)
    parameters = dict(stock.named_parameters())
    ours = {}
    for name in ("llamoe", *implementations):
        with torch.device("meta"):
            model = llamoe.LlamoeForCausalLM(llamoe.from_stock(config))
        if name != "llamoe":
            model.set_experts_implementation(name)
        block = model.model.layers[0].feed_forward
        block.load_state_dict(parameters, assign=True)
        ours[name] = block.eval()
    return stock.eval(), ours


def mixtral_blocks(setting: Setting, shape: Shape) -> dict[str, nn.Module]:
    """Mixtral's block, two experts chosen: stock's in its models' default and other implementations, and ours."""
    fields = dict(hidden_size=shape.hidden, intermediate_size=shape.expert, num_local_experts=shape.experts)
    config = MixtralConfig(**{**_sizes(shape), **fields, "num_experts_per_tok": 2, "num_hidden_layers": 1})
    with made_in(setting):
        first = MixtralSparseMoeBlock(config)
    draw_weights(first, setting)
    found: dict[str, nn.Module] = {}
    with torch.device("meta"):
        for name, way in {"": "grouped_mm", ", eager": "eager", ", batched_mm": "batched_mm"}.items():
            its = MixtralConfig(**config.to_dict(), experts_implementation=way)
            found[f"stock{name}"] = MixtralSparseMoeBlock(its)
        found["llamoe"] = llamoe.LlamoeMixtralModel(llamoe.from_stock(config)).layers[0].mlp
    for module in found.values():
        module.load_state_dict(dict(first.named_parameters()), assign=True)
        module.eval()
    return found


def model_pair(
    setting: Setting,
    stock_class: type[PreTrainedModel],
    our_class: type[PreTrainedModel],
    config: PreTrainedConfig,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of transformers, and ours with the same parameters.

    All routers of a model are equal, and each vocabulary token's embedding points to one expert in every layer.
    Otherwise bfloat16 would send some tokens to other experts on either side.
    """
    with made_in(setting):
        stock = stock_class(config)
    draw_weights(stock, setting)
    routers = [module.router.weight for module in stock.modules() if hasattr(module, "router")]
    if routers:
        embedding = stock.get_input_embeddings().weight
        wanted = torch.arange(len(embedding), device=setting.device) % len(routers[0])
        with torch.no_grad():
            for router in routers[1:]:
                router.copy_(routers[0])
            # Large compared with what the layers add to it.
            embedding.copy_(4 * steer(embedding, routers[0], wanted))
    with torch.device("meta"):
        ours = our_class(llamoe.from_stock(config))
    ours.load_state_dict(dict(stock.named_parameters()), assign=True)
    return stock.eval(), ours.eval()


@torch.no_grad()
def draw_weights(module: nn.Module, setting: Setting) -> None:
    """Draw all parameters so that activations keep a standard deviation of about one."""
    generator = setting.generator()
    for name, parameter in module.named_parameters():
        if name.endswith(("router.weight", "gate.weight")):
            set_router(parameter, generator)
        elif parameter.ndim < 2:
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
        else:
            fan_in = parameter.shape[-2] if ".experts." in f".{name}" else parameter.shape[-1]
            deviation = 1.0 if "embed_tokens" in name else fan_in**-0.5
            parameter.normal_(std=deviation, generator=generator)


@contextmanager
def made_in(setting: Setting):
    """Make modules on the setting's device, in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with torch.device(setting.device):
            yield
    finally:
        torch.set_default_dtype(before)
