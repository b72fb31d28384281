"""The vision tower in float64: Llama 4's encoder and, by its switches, MetaCLIP's.

Weights have their names in stock's `Llama4VisionModel`. N tiles, G patches a side, D hidden size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from .reference import ACTIVATIONS, no_blur

SWITCHES = {
    "hidden_act": "gelu",
    "norm_eps": 1e-5,
    "use_rope": True,
    "use_pre_layernorm": True,
    "use_post_layernorm": True,
    "vision_feature_layer": -1,
    "projection_dim": None,
    "use_adapter": True,
    "projector_final_act": True,
    "attention_bias": True,
    "multi_modal_projector_bias": False,
    "vision_feature_select_strategy": "default",
}


class Tower:
    """A tower with given weights (float64) and fields; missing fields default to stock's function."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]):
        self.weights, self.config = weights, SWITCHES | dict(config)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        result = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config["norm_eps"])

    def __call__(
        self, tiles: torch.Tensor, blur: Callable = no_blur
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """The tower's output, its class token, and the states before and after each layer."""
        config, size = self.config, self.config["patch_size"]
        count, channels, side, _ = tiles.shape
        grid = side // size
        patches = tiles.reshape(count, channels, grid, size, grid, size)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(count, grid * grid, -1)
        x = blur(self.linear("patch_embedding.linear", blur(patches)))
        x = torch.cat([x, self.weights["class_embedding"].expand(count, 1, -1)], 1)
        x = blur(x + self.weights["positional_embedding_vlm"])
        if config["use_pre_layernorm"]:
            x = blur(self.norm("layernorm_pre", x))
        states = [x]
        for idx in range(config["num_hidden_layers"]):
            name = f"model.layers.{idx}"
            x = blur(
                x
                + self._attend(f"{name}.self_attn", blur(self.norm(f"{name}.input_layernorm", x)), grid, blur)
            )
            inner = blur(
                self.linear(f"{name}.mlp.fc1", blur(self.norm(f"{name}.post_attention_layernorm", x)))
            )
            inner = blur(ACTIVATIONS[config["hidden_act"]](inner))
            x = blur(x + blur(self.linear(f"{name}.mlp.fc2", inner)))
            states.append(x)
        x = states[config["vision_feature_layer"]]
        if config["use_post_layernorm"]:
            x = blur(self.norm("layernorm_post", x))
        token = x[:, -1]
        pooled = None if config["use_adapter"] else token
        if config["projection_dim"] is not None:
            pooled = blur(token @ self.weights["visual_projection.weight"].T)
        if not config["use_adapter"]:
            return (x if config["vision_feature_select_strategy"] == "full" else x[:, :-1]), pooled, states
        return self._adapt(x[:, :-1], grid, blur), pooled, states

    def _attend(self, name: str, x: torch.Tensor, grid: int, blur: Callable) -> torch.Tensor:
        heads = self.config["num_attention_heads"]
        q, k, v = (
            blur(self.linear(f"{name}.{part}_proj", x)).unflatten(-1, (heads, -1)) for part in ("q", "k", "v")
        )
        dim = q.shape[-1]
        if self.config["use_rope"]:
            theta = self.config["rope_parameters"]["rope_theta"]
            steps = theta ** (-2 * torch.arange(dim // 4, dtype=torch.float64) / (dim // 2))
            place = torch.arange(grid * grid)
            # The column rotates the first half of the pairs, the row the rest. The class token (last) is not rotated.
            angles = torch.cat([(place[:, None] % grid + 1) * steps, (place[:, None] // grid + 1) * steps], 1)
            angles = blur(torch.cat([angles, torch.zeros(1, dim // 2, dtype=torch.float64)]), 2.0**-22)
            turns = torch.polar(torch.ones_like(angles), angles)[:, None]
            q, k = (
                blur(
                    torch.view_as_real(
                        torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turns
                    ).flatten(-2)
                )
                for y in (q, k)
            )
        scores = blur(torch.einsum("nqhd,nkhd->nhqk", q, k) * dim**-0.5)
        attended = blur(torch.einsum("nhqk,nkhd->nqhd", blur(scores.softmax(-1)), v))
        return blur(self.linear(f"{name}.o_proj", attended.flatten(2)))

    def _adapt(self, x: torch.Tensor, grid: int, blur: Callable) -> torch.Tensor:
        block = round(1 / self.config["pixel_shuffle_ratio"])
        x = x.unflatten(1, (grid, grid))
        # Joins the channels of each square of patches, ordered by row, column, channel.
        x = torch.cat(
            [x[:, row::block, column::block] for row in range(block) for column in range(block)], -1
        )
        inner = blur(F.gelu(blur(self.linear("vision_adapter.mlp.fc1", x.flatten(1, 2)))))
        x = blur(self.linear("vision_adapter.mlp.fc2", inner))
        return blur(F.gelu(x)) if self.config["projector_final_act"] else x
