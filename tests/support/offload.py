"""Small mixtures, loaded with experts in memory and offloaded, and a simulated cache of experts to compare with."""

from collections.abc import Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import BitsAndBytesConfig

import llamoe
from llamoe.configuration.base import ARCHITECTURES
from llamoe.modeling.kernels import cpp_kernels
from llamoe.modeling.offload import OffloadedExperts
from llamoe.modeling.offload.matrix_cache import MatrixCache

TEXT = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 7,
    "num_experts_per_tok": 1, "moe_layers": [1, 2], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTRAL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip


def text_model(**changes) -> llamoe.LlamoeForCausalLM:
    """Build a small Llama 4 decoder, with weights large enough that the choice of experts changes its logits."""
    torch.manual_seed(0)
    return llamoe.LlamoeForCausalLM(llamoe.LlamoeTextConfig(**{**TEXT, "initializer_range": 0.2, **changes}))


def mixtral(**changes) -> llamoe.LlamoeMixtralForCausalLM:
    """Build a small Mixtral."""
    torch.manual_seed(1)
    config = llamoe.LlamoeMixtralConfig(**{**MIXTRAL, "initializer_range": 0.2, **changes})
    return llamoe.LlamoeMixtralForCausalLM(config)


def without_kernels(monkeypatch) -> None:
    """Disable the compiled CPU kernels, for tests in which the CPU acts as an accelerator."""
    monkeypatch.setattr(cpp_kernels, "_library", None)


KINDS = (
    "text", "text of 16 bits", "two experts a token", "mixtral", "int4", "int8", "mixtral in nf4",
    "8 bits of bitsandbytes",
)  # fmt: skip
"""Models and formats that `save_kind` writes; the first four are not quantized."""


def save_kind(kind: str, folder: Path, plain: Path) -> None:
    """Save the mixture of an entry of `KINDS`; `plain` is an empty folder for the weights before quantization."""
    if kind == "text":
        text_model().save_pretrained(folder)
    elif kind == "text of 16 bits":
        text_model(num_local_experts=11).to(torch.bfloat16).save_pretrained(folder)
    elif kind == "two experts a token":
        text_model(num_experts_per_tok=2, intermediate_size=80).save_pretrained(folder)
    elif kind == "mixtral":
        mixtral().to(torch.bfloat16).save_pretrained(folder)
    else:
        is_ours = kind in ("int4", "int8")
        # With sizes 72 and 52, the last block of bitsandbytes is half full.
        hidden_size, intermediate_size = (128, 96) if is_ours else (72, 52)
        make = mixtral if kind.startswith("mixtral") else text_model
        model = make(hidden_size=hidden_size, intermediate_size=intermediate_size)
        model.to(torch.bfloat16).save_pretrained(plain)
        config: Any = llamoe.QuantizationConfig(kind) if is_ours else BitsAndBytesConfig(load_in_8bit=True)
        if "nf4" in kind:
            # Nested quantization stores the scales as codes too; the files store codes as bytes of bfloat16.
            config = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
            )  # fmt: skip
        packed = llamoe_class(plain).from_pretrained(plain, dtype="auto", quantization_config=config)
        packed.save_pretrained(folder)


def expert_bytes(model) -> int:
    """Return the bytes of one expert."""
    experts = next(module for name, module in model.named_modules() if name.endswith(".experts"))
    return sum(tensor[0].nbytes for tensor in [*experts.parameters(), *experts.buffers()])


def counts(model) -> SimpleNamespace:
    """Return hits, misses and bytes read, summed over all layers."""
    layers = model.experts_statistics().values()
    return SimpleNamespace(
        **{name: sum(layer[name] for layer in layers) for name in ("hits", "misses", "bytes_read")}
    )


def load_both(folder, experts: int = 3, cls=None, **kwargs):
    """Load a folder twice: with all experts in memory, and with memory for `experts` of the experts on disk."""
    cls, kwargs = cls or llamoe_class(folder), {"dtype": "auto", **kwargs}
    resident = cls.from_pretrained(folder, **kwargs).eval()
    memory = experts * expert_bytes(resident)
    offloaded = cls.from_pretrained(folder, experts_memory=memory, **kwargs).eval()
    assert any(isinstance(module, OffloadedExperts) for module in offloaded.modules())
    return resident, offloaded


@torch.no_grad()
def check_equal(resident, offloaded, ids) -> None:
    """Check that both models return equal bits of logits, for the whole of `ids` and for few tokens."""
    for part in (ids, ids[:1, :1], ids[:, :1], ids[:1, :3]):
        assert torch.equal(resident(part).logits, offloaded(part).logits)
    assert not offloaded._stores() or counts(offloaded).misses > 0


def freeze_experts(model) -> None:
    """Set `requires_grad` for all weights but those of experts."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)


def llamoe_class(folder):
    """Return our class for a folder's `architectures`."""
    import json

    name = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
    return getattr(llamoe, ARCHITECTURES.get(name, name))


def put_in_store(model, place: str, memory, is_remote: bool) -> None:
    """Replace a model's store of experts by another at `place`; if `is_remote`, the CPU acts as an accelerator."""
    from llamoe.modeling.offload.store import Store

    (old,) = model._stores()
    new = Store(old.layers, old.stored, place, torch.device("cpu"), memory)
    new.is_remote = is_remote
    for module in model.modules():
        if isinstance(module, OffloadedExperts):
            module.store, module.place = new, place
    old.close()


def train(model, ids, steps: int = 3, config=None, **more):
    """Train a new adapter for some steps; return the adapted model, its losses and the trained weights."""
    import peft

    torch.manual_seed(3)
    adapted = peft.get_peft_model(
        model, config or llamoe.lora_config(model, **{"r": 3, "dropout": 0.1, **more})
    )
    trained = {name: p for name, p in adapted.train().named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert steps == 1 or losses[-1] < losses[0]
    return adapted, losses, {name: p.detach().clone() for name, p in trained.items()}


def asked_in(trace: llamoe.ExpertTrace) -> list[list[tuple[int, int]]]:
    """Return for each forward the (layer, expert) pairs that it needs, in their order."""
    return [
        [
            (layer, expert)
            for layer in range(trace.num_layers)
            for expert in recorded[layer][1].unique().tolist()
        ]
        for recorded in trace.complete()
    ]


def simulate(passes: Iterable[Collection[tuple[int, int]]], slots: int) -> list[tuple[int, int]]:
    """Return hits and misses of each forward, by the store's own cache policy but without matrices."""
    cache, counts = MatrixCache(slots), []
    arrival = SimpleNamespace(done=lambda: True, failed=lambda: False)
    for experts in passes:
        hits = 0
        for expert in experts:
            if cache.get(expert) is not None:
                hits += 1
            else:
                cache.put(expert).arrival = arrival
        counts.append((hits, len(experts) - hits))
    return counts


def simulate_lru(keys: Iterable[tuple[int, int]], slots: int) -> tuple[int, int]:
    """Return hits and misses of a cache that evicts the least recently used expert, shared by all layers."""
    held, hits, total = [], 0, 0
    for key in keys:
        total += 1
        if key in held:
            held.remove(key)
            hits += 1
        held = [*held, key][-slots:]
    return hits, total - hits
