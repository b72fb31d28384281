"""Run a checkpoint's model from its lazy tensors, one matrix at a time.

The model is built on the meta device, without weights. Hooks read a module's weights just before it computes, and free
them right after. Of stacked experts, only those to which a token was sent are read, one by one. So the forward is the
model's own, and a model of any size needs little more memory than its largest matrix in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...modeling.moe import Experts
from ...modeling.registration import empty_model
from ..checkpoint import tied_head
from ..io import LazyTensor


class Weights:
    """Reads a model's parameters in float32.

    Attributes:
        config: the model's configuration.
        tensors: the parameters by name.
    """

    def __init__(self, config: LlamoeBaseConfig, tensors: Mapping[str, LazyTensor]):
        # A tied head is the embedding, unless it is stored nevertheless: then `from_pretrained` uses what is stored.
        aliases = {head: tensors[key] for head, key in tied_head(config).items() if key in tensors}
        self.config, self.tensors = config, {**aliases, **tensors}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows of a weight in float32."""
        return self.tensors[name].read(start, stop).float()


class ExpertsOnDemand(nn.Module):
    """Replaces `Experts`: reads one expert at a time, and only those to which a token was sent.

    Each expert computes in an `Experts` of one expert.
    """

    def __init__(self, experts: Experts, name: str, weights: Weights):
        super().__init__()
        self.name, self.weights = name, weights
        one = copy.copy(experts.config)
        one.num_local_experts = 1
        with torch.device("meta"):
            self.one = type(experts)(one)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts' weighted outputs `[N, H]` of N rows `[N, H]`, each with k experts, indices `[N, k]`."""
        result = torch.zeros_like(hidden_states)
        empty = dict(self.one._parameters)
        for expert in top_k_index.unique().tolist():
            rows, column = (top_k_index == expert).nonzero(as_tuple=True)
            try:
                for part in empty:
                    value = self.weights.read(f"{self.name}.{part}", expert, expert + 1)
                    self.one._parameters[part] = nn.Parameter(value, requires_grad=False)
                    del value
                first = torch.zeros_like(rows)[:, None]
                output = self.one.loop_over_experts(
                    hidden_states[rows], first, top_k_weights[rows, column][:, None]
                )
            finally:
                self.one._parameters.update(empty)
            result.index_add_(0, rows, output)
        return result


def run(weights: Weights, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a model once.

    Args:
        weights: the model's configuration and parameters.
        inputs: arguments of the model's `forward`.

    Returns:
        name to output in float32: `logits` `[B, T, vocab_size]` for B rows of T tokens; for a tower
        `last_hidden_state` and, if it has one, `pooler_output`.
    """
    is_tower = isinstance(weights.config, LlamoeVisionConfig)
    model = empty_model(weights.config).float().eval()
    _stream(model, weights)
    more = {} if is_tower else {"use_cache": False}
    with torch.no_grad():
        output = model(**inputs, **more)
    names = ("last_hidden_state", "pooler_output") if is_tower else ("logits",)
    return {name: output[name].float() for name in names if output.get(name) is not None}


def _stream(model: nn.Module, weights: Weights) -> None:
    """Add hooks to a model without weights: they read each module's weights before it computes, and free them after."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            model.set_submodule(name, ExpertsOnDemand(module, name, weights))
    for name, module in model.named_modules():
        empty = {key: value for key, value in module._parameters.items() if value is not None}
        if not empty or isinstance(module, Experts):
            continue
        module.register_forward_pre_hook(
            lambda module, inputs, prefix=name: _load(module, prefix, weights), prepend=True
        )
        module.register_forward_hook(
            lambda module, inputs, output, empty=empty: module._parameters.update(empty), always_call=True
        )


def _load(module: nn.Module, prefix: str, weights: Weights) -> None:
    """Load a module's own parameters, not those of its children."""
    for key, value in module._parameters.items():
        if value is not None:
            read = weights.read(f"{prefix}.{key}" if prefix else key)
            module._parameters[key] = nn.Parameter(read, requires_grad=False)


def _takes_pictures(config: LlamoeBaseConfig) -> bool:
    return not isinstance(config, LlamoeConfig) or config.image_token_index < config.text_config.vocab_size


def random_inputs(
    configs: tuple[LlamoeBaseConfig, LlamoeBaseConfig], tokens: int, rows: int, seed: int
) -> list[dict[str, Any]]:
    """Draw the same inputs for two towers, two multimodal models or two decoders.

    Args:
        configs: the configurations of both models.
        tokens: number of tokens in a row, besides those of its picture.
        rows: number of rows in the batch.
        seed: random seed.

    Returns:
        keyword arguments of `forward` for each model. Token ids are in both vocabularies, and none is an image token.
        In multimodal models every row has a picture of one tile after its first token, if both models have a token for
        pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs: list[dict[str, Any]] = [{}, {}]
    visions = [getattr(config, "vision_config", config) for config in configs]
    with_pictures = isinstance(visions[0], LlamoeVisionConfig) and all(map(_takes_pictures, configs))
    if with_pictures:
        shape = (rows, visions[0].num_channels, visions[0].image_size, visions[0].image_size)
        inputs[0]["pixel_values"] = inputs[1]["pixel_values"] = torch.randn(shape, generator=generator)
    if isinstance(configs[0], LlamoeVisionConfig):
        return inputs
    image_tokens = {getattr(config, "image_token_index", -1) for config in configs}
    common = min(config.get_text_config().vocab_size for config in configs)
    allowed = torch.tensor([token for token in range(common) if token not in image_tokens])
    ids = allowed[torch.randint(len(allowed), (rows, tokens), generator=generator)]
    for arguments, config in zip(inputs, configs, strict=True):
        arguments["input_ids"] = ids
        if with_pictures and isinstance(config, LlamoeConfig):
            picture = torch.full(
                (rows, config.vision_config.tokens_per_tile), config.image_token_index, dtype=torch.long
            )
            arguments["input_ids"] = torch.cat([ids[:, :1], picture, ids[:, 1:]], dim=1)
    return inputs
