"""Mixtral against transformers' Mixtral: a stock folder, loaded by path, gives stock's logits, losses and gradients."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import (
    check_bfloat16_errors,
    deviation_in_range,
    gradient_differences,
    load_whole,
    max_abs,
    stock_mixtral_config,
    stock_model,
)
from transformers import MixtralForCausalLM

import llamoe
from llamoe import LlamoeMixtralForCausalLM

NAME, STOCK = "LlamoeMixtralForCausalLM", "MixtralForCausalLM"
LENGTH = 50
ARCHITECTURES = {
    "window": dict(),
    "whole": dict(sliding_window=None),
    "top1": dict(num_experts_per_tok=1),
    "every expert": dict(num_experts_per_tok=5),
    "mha-tied": dict(num_key_value_heads=6, tie_word_embeddings=True),
    "gelu-aligned": dict(hidden_act="gelu", intermediate_size=56, head_dim=None),
}
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


def ids(length=LENGTH, rows=2):
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def padded():
    mask = torch.ones_like(ids())
    mask[0, :9] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def pair(folder, attention="sdpa", stock_class=MixtralForCausalLM, **overrides):
    config = stock_mixtral_config(attn_implementation=attention, **overrides)
    stock = stock_model(stock_class, config)
    stock.save_pretrained(folder)
    name = f"LlamoeMixtral{stock_class.__name__.removeprefix('Mixtral')}"
    return stock, load_whole(getattr(llamoe, name), folder, attn_implementation=attention)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_and_routing(kind, attention, tmp_path, record_parity):
    stock, ours = pair(tmp_path, attention, **ARCHITECTURES[kind])
    wanted = dict(output_hidden_states=True, output_router_logits=True)
    expected, given = stock(**padded(), **wanted), ours(**padded(), **wanted)
    assert deviation_in_range(expected.logits)
    real = padded()["attention_mask"].bool()
    difference = max_abs(given.logits[real], expected.logits[real])
    record_parity(NAME, STOCK, "float32", difference, "logits")
    assert difference <= 1e-4
    assert len(given.hidden_states) == len(expected.hidden_states) == 4
    assert len(given.router_logits) == len(expected.router_logits) == 3
    for mine, its in zip(given.router_logits, expected.router_logits, strict=True):
        assert max_abs(mine[real.flatten()], its[real.flatten()]) <= 1e-4
    assert given.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)


@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["window", "top1", "every expert", "mha-tied"])
def test_loss_and_gradients(kind, jitter, tmp_path, record_parity):
    options = dict(router_aux_loss_coef=0.3, output_router_logits=True, router_jitter_noise=jitter)
    stock, ours = pair(tmp_path, **options, **ARCHITECTURES[kind])
    labels = ids().clone()
    labels[0, :20] = -100
    losses = []
    for model in (stock, ours):
        torch.manual_seed(3)
        output = model.train()(ids(), labels=labels)
        losses.append((output.loss.item(), output.aux_loss.item()))
        output.loss.backward()
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    differences = gradient_differences(ours, stock)
    absolute, relative = (max(values) for values in zip(*differences.values(), strict=True))
    record_parity(NAME, STOCK, "float32", absolute, "gradients")
    record_parity(NAME, STOCK, "float32", relative, "gradients, relative to each parameter's largest")
    assert relative <= 5e-5, max(differences.items(), key=lambda item: item[1][1])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["window", "top1", "every expert"])
def test_bfloat16(kind, tmp_path, record_parity):
    config = stock_mixtral_config(**ARCHITECTURES[kind])
    reference_model = stock_model(MixtralForCausalLM, config, exact_in_bfloat16=True)
    reference_model.save_pretrained(tmp_path)
    ours = load_whole(LlamoeMixtralForCausalLM, tmp_path, dtype=torch.bfloat16)
    # Its grouped product takes no rows of 52.
    options = dict(dtype=torch.bfloat16, experts_implementation="eager")
    stock = load_whole(MixtralForCausalLM, tmp_path, **options)
    # A few tokens go to other experts than in float32, by chance more of ours or of stock's in few rows.
    many = ids(rows=12)
    reference = reference_model(many).logits
    assert deviation_in_range(reference)
    check_bfloat16_errors(ours(many).logits, stock(many).logits, reference, (NAME, STOCK), record_parity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_and_near_ties_go_stocks_way(dtype):
    """Experts that share a weight tie exactly, and in 16 bits most others nearly do."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    from llamoe.modeling.moe import Router

    config = stock_mixtral_config(num_local_experts=7, num_experts_per_tok=3)
    stock, ours = MixtralTopKRouter(config), Router(llamoe.from_stock(config))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 72, generator=generator)
    weight[4], weight[2] = weight[1], weight[0] * (1 + 2e-7)
    x = 0.1 * torch.randn(4096, 72, generator=generator)
    for router in (stock, ours):
        router.weight.data.copy_(weight)
        router.to(dtype)
    for mine, its in zip(ours(x.to(dtype)), stock(x.to(dtype)), strict=True):
        assert mine.dtype == its.dtype and torch.equal(mine, its)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["window", "whole"])
def test_greedy_generation(kind, cache, tmp_path):
    stock, ours = pair(tmp_path, **ARCHITECTURES[kind])
    options = dict(max_new_tokens=30, do_sample=False, eos_token_id=-1, cache_implementation=cache)
    assert torch.equal(ours.generate(**padded(), **options), stock.generate(**padded(), **options))


@pytest.mark.parametrize("head", HEADS)
def test_heads(head, tmp_path, record_parity):
    stock_class = getattr(transformers, f"MixtralFor{head}")
    stock, ours = pair(tmp_path, stock_class=stock_class, num_labels=3)
    expected, given = stock(**padded()), ours(**padded())
    real = padded()["attention_mask"].bool()
    for name in [name for name in expected if "logits" in name]:
        kept = (...,) if head == "SequenceClassification" else (real,)
        difference = max_abs(given[name][kept], expected[name][kept])
        record_parity(f"LlamoeMixtralFor{head}", f"MixtralFor{head}", "float32", difference)
        assert difference <= 1e-4
    ours.save_pretrained(tmp_path / "ours", layout="stock")
    again = load_whole(stock_class, tmp_path / "ours")
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, stock.state_dict()[name]), name


@pytest.mark.parametrize("layout", ["stock", "llamoe"])
def test_folders_go_both_ways_bit_for_bit(layout, tmp_path):
    stock, ours = pair(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours", layout=layout)
    given, written = (load_file(tmp_path / name / "model.safetensors") for name in ("stock", "ours"))
    assert "model.layers.0.block_sparse_moe.experts.4.w2.weight" in written
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], written[name]) for name in given)
    reader = MixtralForCausalLM if layout == "stock" else LlamoeMixtralForCausalLM
    again = load_whole(reader, tmp_path / "ours")
    assert torch.equal(again(ids()).logits, (stock if layout == "stock" else ours)(ids()).logits)


EXPERT = "model.layers.1.block_sparse_moe.experts"
BROKEN = {
    "an expert's matrix is missing": (
        lambda weights: weights.pop(f"{EXPERT}.3.w3.weight"),
        r"experts\.3\.w3\.weight is missing \(1 such\).*num_local_experts in config.json is 5",
    ),
    "stacked as well": (
        lambda weights: weights.update({"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(5, 104, 72)}),
        r"experts\.0\.w1\.weight is there a second time: .*mlp\.experts\.gate_up_proj has it, too",
    ),
    "one expert more": (
        lambda weights: weights.update({f"{EXPERT}.5.w1.weight": torch.zeros(52, 72)}),
        r"is of expert 5, but num_local_experts in config.json is 5",
    ),
    "another shape": (
        lambda weights: weights.update({f"{EXPERT}.2.w2.weight": torch.zeros(52, 72)}),
        r"experts\.2\.w2\.weight has shape \[52, 72\], but the model that config.json describes has \[72, 52\]",
    ),
    "another matrix": (
        lambda weights: weights.update({f"{EXPERT}.2.w4.weight": torch.zeros(52, 72)}),
        r"known are experts\.N\.w1\.weight, w2 and w3",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_folders_say_what_is_wrong(fault, tmp_path):
    stock_model(MixtralForCausalLM, stock_mixtral_config()).save_pretrained(tmp_path)
    change, message = BROKEN[fault]
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(llamoe.CheckpointError, match=message):
        LlamoeMixtralForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_layer_on_disk(tmp_path):
    """transformers stacks its experts there anew, hence the folder."""
    stock, _ = pair(tmp_path / "stock")
    places = {"": "cpu", "model.layers.1": "disk"}
    placed = LlamoeMixtralForCausalLM.from_pretrained(
        tmp_path / "stock", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert placed.model.layers[1].mlp.experts.down_proj.device.type == "meta"
    assert max_abs(placed(ids()).logits, stock(ids()).logits) <= 1e-4


def test_lora_on_a_single_square_expert_merges_as_it_adapts(tmp_path):
    """peft takes a stack of one expert for a linear layer's weight, which output-first it is."""
    from peft import LoraConfig, get_peft_model

    _, ours = pair(tmp_path, num_local_experts=1, num_experts_per_tok=1, intermediate_size=72)
    config = LoraConfig(
        target_modules=["q_proj"], target_parameters=["experts.down_proj"], init_lora_weights=False
    )
    adapted = get_peft_model(ours, config).eval()
    for implementation in ("llamoe", "eager"):
        adapted.get_base_model().set_experts_implementation(implementation)
        with torch.no_grad():
            if implementation == "llamoe":
                expected = adapted(ids()).logits
            assert max_abs(adapted(ids()).logits, expected) <= 1e-4
    with torch.no_grad():
        assert max_abs(adapted.merge_and_unload()(ids()).logits, expected) <= 1e-4


def test_positions_leave_a_compiled_graph_open_to_all_lengths(tmp_path):
    _, ours = pair(tmp_path)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (7, 9, 12, 20):
            positions = torch.arange(length)[None]
            compiled(ids(length), position_ids=positions, use_cache=False)
    torch._dynamo.reset()
    # One for all of them, and one more where a window first ends within the row.
    assert len(graphs) <= 2
