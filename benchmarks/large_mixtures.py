"""Mixtures that are written to folders part by part, since they may be larger than memory; and what is asked of them.

Weights are random. Routing then says nothing of trained models, so it is drawn: evenly, or by Zipf's law.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import llamoe
from llamoe.modeling.moe import Router
from llamoe.modeling.offload.matrix_cache import MatrixCache

Expert = tuple[int, int]
"""A mixture layer and an expert."""


@dataclass(frozen=True)
class LargeMixture:
    """A Llama-4-style text model with a mixture in every layer, top-1, in bfloat16.

    Attributes:
        hidden: hidden size.
        expert: inner size of an expert, also of the shared one.
        layers: number of layers.
        experts: experts of a layer.
        vocabulary: rows of embedding and head.
    """

    hidden: int
    expert: int
    layers: int
    experts: int
    vocabulary: int = 4096

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return 3 * self.hidden * self.expert * 2

    @property
    def all_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.layers * self.experts * self.expert_bytes

    def config(self) -> llamoe.LlamoeTextConfig:
        """Its configuration."""
        return llamoe.LlamoeTextConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.expert,
            intermediate_size_mlp=2 * self.expert,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=max(1, self.hidden // 256),
            head_dim=64,
            num_local_experts=self.experts,
            num_experts_per_tok=1,
            moe_layers=list(range(self.layers)),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dtype="bfloat16",
            architectures=["LlamoeForCausalLM"],
        )

    def save(self, folder: Path, seed: int = 0) -> None:
        """Write a checkpoint with a shard for each layer; no more than a layer is in memory."""
        config = self.config()
        config.save_pretrained(folder)
        with torch.device("meta"):
            shapes = {
                name: tensor.shape for name, tensor in llamoe.LlamoeForCausalLM(config).state_dict().items()
            }
        shards: dict[str, list[str]] = {}
        for name in shapes:
            shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
        generator = torch.Generator().manual_seed(seed)
        files = {}
        for number, names in enumerate(shards.values(), start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {}
            for name in names:
                tensor = torch.ones(shapes[name], dtype=torch.bfloat16)
                if "norm" not in name:
                    tensor.normal_(0, 0.5 if "router" in name else 0.03, generator=generator)
                tensors[name] = tensor
            save_file(tensors, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(names, file)
        total = sum(2 * shape.numel() for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def draw_routing(model: nn.Module, law: str, seed: int = 1) -> None:
    """Let a drawn expert compute each token in place of the router's choice.

    Args:
        model: a mixture, top-1.
        law: "even"; "zipf", of which the exponent is 1.2 and each layer has an order of its own; or "in turn", where
            tokens go to the experts one after the other.
        seed: of all draws.
    """
    generator = torch.Generator().manual_seed(seed)
    for router in model.modules():
        if isinstance(router, Router):
            ranks = torch.arange(1, router.num_experts + 1).float()
            weights = ranks ** -(1.2 if law == "zipf" else 0.0)
            weights = weights[torch.randperm(router.num_experts, generator=generator)]

            def forward(x, weights=weights, plain=router.forward):
                logits, _, _ = plain(x)
                if law == "in turn":
                    chosen = torch.arange(len(x)) % len(weights)
                else:
                    chosen = torch.multinomial(weights, len(x), replacement=True, generator=generator)
                return (
                    logits,
                    logits.gather(1, chosen[:, None]).float().sigmoid().to(logits.dtype),
                    chosen[:, None],
                )

            router.forward = forward


def counted(model: Any, name: str) -> int:
    """Sum one of the counts of `experts_statistics` over all layers."""
    return sum(layer[name] for layer in model.experts_statistics().values())


class _Arrived:
    """What stands for a matrix that is there (`Entry.arrival`)."""

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return False


def ask(cache: MatrixCache, expert: Expert) -> tuple[int, bool]:
    """Ask a table of slots for an expert, which comes at once; its slot, and whether it was there."""
    entry: Any = cache.get(expert)
    if entry is not None:
        return entry.slot, True
    entry = cache.put(expert)
    entry.arrival = _Arrived()
    return entry.slot, False


def simulate(passes: Iterable[Collection[Expert]], slots: int) -> list[tuple[int, int]]:
    """Hits and misses of each pass, by the store's own table of slots, without matrices.

    Args:
        passes: what each asks for, in its order.
        slots: number of experts that have room.
    """
    cache, counts = MatrixCache(slots), []
    for experts in passes:
        hits = sum(ask(cache, expert)[1] for expert in experts)
        counts.append((hits, len(experts) - hits))
    return counts


def passes_of(experts_LTK: torch.Tensor) -> list[list[Expert]]:
    """What tokens, each in a pass of its own, ask of a store: layer by layer, their experts in ascending order.

    Args:
        experts_LTK: as `ExpertTrace.experts` gives them.
    """
    return [
        [(layer, expert) for layer, chosen in enumerate(its_LK.tolist()) for expert in sorted(set(chosen))]
        for its_LK in experts_LTK.unbind(1)
    ]
