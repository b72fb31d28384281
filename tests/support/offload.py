"""Small mixtures of sizes that never coincide, the models that they are loaded into, and a cache to compare with."""

from pathlib import Path

import torch

import llamoe
from llamoe.modeling.moe import Experts
from llamoe.modeling.offload import ExpertsStatistics, OffloadedExperts

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
    """A Llama-4-style mixture with random weights that tell experts apart."""
    torch.manual_seed(0)
    return llamoe.LlamoeForCausalLM(llamoe.LlamoeTextConfig(**{**TEXT, "initializer_range": 0.2, **changes}))


def mixtral(**changes) -> llamoe.LlamoeMixtralForCausalLM:
    """A small Mixtral, which is saved with one linear layer an expert."""
    torch.manual_seed(1)
    config = llamoe.LlamoeMixtralConfig(**{**MIXTRAL, "initializer_range": 0.2, **changes})
    return llamoe.LlamoeMixtralForCausalLM(config)


def without_kernels(monkeypatch) -> None:
    """Compute experts as accelerators do, for which the CPU may stand in: they have none of its kernels."""
    for name in ("for_kernel", "products_by_kernel"):
        monkeypatch.setattr(Experts, name, lambda *_: None)


def expert_bytes(model) -> int:
    """Bytes of one expert."""
    experts = next(module for name, module in model.named_modules() if name.endswith(".experts"))
    return sum(tensor[0].nbytes for tensor in [*experts.parameters(), *experts.buffers()])


def counts(model) -> ExpertsStatistics:
    """What all layers together counted."""
    return sum(model.experts_statistics().values(), ExpertsStatistics())


def load_both(folder, experts: int = 3, cls=None, **kwargs):
    """The model of a folder in memory, and with room for so many experts, which are on disk."""
    cls, kwargs = cls or llamoe_class(folder), {"dtype": "auto", **kwargs}
    resident = cls.from_pretrained(folder, **kwargs).eval()
    offloaded = cls.from_pretrained(folder, experts_memory=experts * expert_bytes(resident), **kwargs).eval()
    assert any(isinstance(module, OffloadedExperts) for module in offloaded.modules())
    return resident, offloaded


@torch.no_grad()
def check_equal(resident, offloaded, ids) -> None:
    """Check that logits are equal bit for bit: of a prompt, a token, a token in each row, and a few."""
    for each in (ids, ids[:1, :1], ids[:, :1], ids[:1, :3]):
        assert torch.equal(resident(each).logits, offloaded(each).logits)
    assert not offloaded._stores() or counts(offloaded).misses > 0


def freeze_experts(model) -> None:
    """Let everything but experts be trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)


def llamoe_class(folder):
    """The class that a folder was saved from."""
    import json

    return getattr(llamoe, json.loads(Path(folder, "config.json").read_text())["architectures"][0])


def put_in_store(model, place: str, memory, is_remote: bool) -> None:
    """Give a model's experts a store of another kind; the CPU stands in for an accelerator if `is_remote`."""
    from llamoe.modeling.offload.store import Store

    (old,) = model._stores()
    new = Store(old.layers, old.stored, place, torch.device("cpu"), memory, is_remote)
    for module in model.modules():
        if isinstance(module, OffloadedExperts):
            module.store, module.place = new, place
    old.close()


def simulate_lru(trace: llamoe.ExpertTrace, slots: int) -> tuple[int, int]:
    """Hits and misses of a cache that all layers share, in the order in which passes ask for their experts."""
    held: dict[tuple[int, int], None] = {}
    hits = misses = 0
    for recorded in trace._complete():
        for layer in range(trace.num_layers):
            for expert in recorded[layer][1].unique().tolist():
                key = layer, expert
                if key in held:
                    del held[key]
                    hits += 1
                else:
                    misses += 1
                    if len(held) == slots:
                        del held[next(iter(held))]
                held[key] = None
    return hits, misses
