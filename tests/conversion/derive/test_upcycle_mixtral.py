"""Dense LLaMA or Mistral to Mixtral: copies of the feed-forward that compute the same function, windows included."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.models import load_whole, max_abs, scaled_rope, stock_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralForCausalLM,
)

from llamoe import LlamoeMixtralConfig, LlamoeMixtralForCausalLM
from llamoe.conversion.derive.upcycle import Mixture, as_mixtral, upcycle
from llamoe.conversion.io.lazy_tensor import LazyTensor, blocks
from llamoe.conversion.open import open_checkpoint
from llamoe_command.cli import main

# Logits of deviation about 1. The scores of the chosen experts sum to 1 within an ulp or two, and scaled copies are
# summed to the dense output within as many: a few 1e-7 of it in each of three layers. Windows that are off by one, or
# scores that do not sum to 1, change logits by 1e-2 and more.
TOLERANCE = 1e-5
# Sizes never coincide; three query heads share a key/value head; a window is much shorter than the texts.
SIZES = dict(
    vocab_size=101,
    hidden_size=72,
    intermediate_size=92,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
    max_position_embeddings=256,
    pad_token_id=0,
)
WINDOW = 9
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=WINDOW)),
    "mistral without a window": (MistralForCausalLM, MistralConfig, dict(sliding_window=None)),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig,
        dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
}
CLASSES = (LlamoeMixtralForCausalLM, MixtralForCausalLM)


def save_dense(folder, kind="mistral", dtype=torch.float32, **fields):
    """A dense model that transformers wrote."""
    model_class, config_class, more = KINDS[kind]
    model = stock_model(model_class, config_class(**{**SIZES, **more, **fields})).to(dtype)
    model.save_pretrained(folder)
    return model


def some_ids(rows=2, length=37):
    return torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


def greedy(model, ids):
    return model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)


def set_routers(model, scale):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(0, scale)


@pytest.mark.parametrize(("experts", "top_k"), [(5, 2), (3, 3), (4, 1)], ids=str)
def test_the_mixture_computes_the_dense_function_for_any_router(tmp_path, record_parity, experts, top_k):
    dense = save_dense(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=experts, top_k=top_k)

    ids = some_ids()
    expected, tokens = logits(dense, ids), greedy(dense, ids)
    for model_class in CLASSES:
        model = load_whole(model_class, tmp_path / "moe", dtype=torch.float32).eval()
        assert model.config.sliding_window == WINDOW
        # At 30 the best expert has almost the whole weight.
        for scale in (None, 0.3, 30.0):
            if scale is not None:
                set_routers(model, scale)
            error = max_abs(logits(model, ids), expected)
            assert error < TOLERANCE
            record_parity(f"upcycled, {model_class.__name__}", "MistralForCausalLM", "float32", error)
            assert torch.equal(greedy(model, ids), tokens)
    unwindowed = save_dense(tmp_path / "unwindowed", sliding_window=None)
    assert max_abs(logits(unwindowed, ids), expected) > 0.1


@pytest.mark.parametrize("kind", ["llama", "mistral", "mistral without a window"])
def test_scaled_rotary_activation_and_a_tied_head_survive(tmp_path, kind):
    fields = dict(hidden_act="gelu", tie_word_embeddings=True, **scaled_rope("yarn"))
    dense = save_dense(tmp_path / "dense", kind, **fields)
    upcycle(tmp_path / "dense", tmp_path / "moe", family="mixtral", experts=3)

    ids = some_ids(length=90)
    for model_class in CLASSES:
        model = load_whole(model_class, tmp_path / "moe", dtype=torch.float32).eval()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model.config.sliding_window == (WINDOW if kind == "mistral" else None)
        assert max_abs(logits(model, ids), logits(dense, ids)) < TOLERANCE


def test_a_source_that_pairs_neighbours_gets_stocks_order(tmp_path):
    save_dense(tmp_path / "dense", "llama")
    config = json.loads((tmp_path / "dense/config.json").read_text())
    config |= {"model_type": "llamoe_dense", "rope_interleave": True, "architectures": None}
    (tmp_path / "dense/config.json").write_text(json.dumps(config))
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    upcycle(tmp_path / "dense", tmp_path / "moe", family="mixtral", experts=3, layout="stock")
    model = load_whole(MixtralForCausalLM, tmp_path / "moe", dtype=torch.float32).eval()
    assert max_abs(logits(model, some_ids()), logits(dense, some_ids())) < TOLERANCE


def test_layers_with_and_without_a_window_need_the_layout_llamoe(tmp_path):
    dense = save_dense(tmp_path / "dense", "ministral")
    with pytest.raises(ValueError, match="layer_types.*transformers' mixtral has one kind of attention"):
        upcycle(tmp_path / "dense", tmp_path / "stock", experts=3, layout="stock")
    assert not (tmp_path / "stock").exists()

    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    assert type(model) is LlamoeMixtralForCausalLM
    assert model.config.layer_types == dense.config.layer_types
    assert max_abs(logits(model, some_ids()), logits(dense, some_ids())) < TOLERANCE


def test_a_folder_has_stocks_names_and_every_expert_the_dense_bits(tmp_path):
    dense = save_dense(tmp_path / "dense", dtype=torch.bfloat16, eos_token_id=[2, 50])
    report = upcycle(tmp_path / "dense", tmp_path / "moe", experts=4)
    assert any("4 experts, 2 a token, in 3 of 3 layers" in note for note in report.notes)
    assert any("copies of the dense feed-forward" in note for note in report.notes)
    config = json.loads((tmp_path / "moe/config.json").read_text())
    expected = dict(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        eos_token_id=[2, 50],
    )
    assert {name: config[name] for name in expected} == expected
    assert config["rope_parameters"] == dense.config.rope_parameters
    for name in SIZES:
        assert config[name] == SIZES[name]

    files, state = load_file(tmp_path / "moe/model.safetensors"), dense.state_dict()
    for layer in range(3):
        moe = f"model.layers.{layer}.block_sparse_moe"
        for part, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            matrix = state.pop(f"model.layers.{layer}.mlp.{name}.weight")
            for expert in range(4):
                assert torch.equal(files.pop(f"{moe}.experts.{expert}.{part}.weight"), matrix)
        assert files.pop(f"{moe}.gate.weight").shape == (4, 72)
    assert files.keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in files.items())


def test_experts_differ_after_a_step_and_routers_learn_from_the_second(tmp_path):
    """Equal experts make every choice equally good: until they differ, a router's gradient is rounding alone."""
    save_dense(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3)
    ids = some_ids(rows=4)
    for model_class in CLASSES:
        model = model_class.from_pretrained(tmp_path / "moe", dtype=torch.float32).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, routers = [], []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            block = model.model.layers[1].mlp
            routers.append(block.gate.weight.grad.abs().amax().item())
            for stacked in (block.experts.gate_up_proj, block.experts.down_proj):
                for one, other in ((0, 1), (0, 2), (1, 2)):
                    assert max_abs(stacked[one].detach(), stacked[other].detach()) > 1e-4
        assert routers[0] < 1e-4 * routers[1]
        assert routers[1] > 1e-4
        assert losses[2] < losses[1] < losses[0]


def test_noise_is_that_of_a_deviation_on_every_matrix(tmp_path):
    dense = save_dense(tmp_path / "dense")
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        upcycle(tmp_path / "dense", tmp_path / name, experts=2 + (name == "b"), noise=0.1, seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    state = dense.state_dict()
    for part, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        weight = state[f"model.layers.2.mlp.{name}.weight"]
        keys = [f"model.layers.2.block_sparse_moe.experts.{expert}.{part}.weight" for expert in range(2)]
        noise = [a[key] - weight for key in keys]
        for key, drawn in zip(keys, noise, strict=True):
            assert drawn.std().item() == pytest.approx(
                0.1 * weight.std().item(), rel=0.05
            )  # 6,624 numbers: 1 %
            assert torch.equal(a[key], b[key])
            assert not torch.equal(a[key], c[key])
        assert abs(torch.corrcoef(torch.stack(noise).flatten(1))[0, 1]) < 0.06

    model = LlamoeMixtralForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    assert 1e-3 < max_abs(logits(model, some_ids()), logits(dense, some_ids())) < 1


def test_matrices_are_read_expert_by_expert(tmp_path):
    save_dense(tmp_path / "dense")
    source = open_checkpoint(tmp_path / "dense")
    reads = []

    class Counted(LazyTensor):
        def __init__(self, key, tensor):
            super().__init__(tensor.shape, tensor.dtype, tensor.origin)
            self.key, self.tensor = key, tensor

        def _read(self, start, stop):
            reads.append(self.key)
            return self.tensor.read(start, stop)

    source.tensors = {key: Counted(key, tensor) for key, tensor in source.tensors.items()}
    result = as_mixtral(source, Mixture(experts=6, interleave=1, top_k=2, noise=0.0, seed=0))
    stacked = {key: tensor for key, tensor in result.tensors.items() if tensor.ndim == 3}
    assert {tensor.shape for tensor in stacked.values()} == {(6, 184, 72), (6, 72, 92)}
    assert not reads
    for key, tensor in stacked.items():
        assert blocks(tensor) == [(row, row + 1) for row in range(6)]
        reads.clear()
        for start, stop in blocks(tensor):
            tensor.read(start, stop)
        # An expert is kept for those that follow.
        assert len(reads) == (2 if "gate_up" in key else 1)


def test_an_interrupted_run_goes_on_with_the_same_family_only(tmp_path):
    class Killed(Exception):
        pass

    class KillsLater:
        def start(self, total):
            self.left = 25

        def advance(self, nbytes, file):
            self.left -= 1
            if not self.left:
                raise Killed

    save_dense(tmp_path / "dense", "llama")
    options = dict(experts=3, top_k=2, shard_size="100KB")
    with pytest.raises(Killed):
        upcycle(tmp_path / "dense", tmp_path / "moe", family="mixtral", progress=KillsLater(), **options)
    with pytest.raises(ValueError, match="with other options"):
        upcycle(tmp_path / "dense", tmp_path / "moe", resume=True, **options)
    upcycle(tmp_path / "dense", tmp_path / "moe", family="mixtral", resume=True, **options)
    upcycle(tmp_path / "dense", tmp_path / "whole", family="mixtral", **options)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "moe" / path.name).read_bytes()


def test_the_command_takes_the_family(tmp_path, capsys):
    save_dense(tmp_path / "dense", "llama")
    words = [
        "upcycle",
        str(tmp_path / "dense"),
        str(tmp_path / "moe"),
        "--experts",
        "3",
        "--family",
        "mixtral",
    ]
    # One expert a token has the whole weight, so that no gradient of the loss reaches the router.
    with pytest.raises(SystemExit) as end:
        main([*words, "--top-k", "1"])
    assert not end.value.code
    assert "its score is always 1" in capsys.readouterr().out
    assert isinstance(open_checkpoint(tmp_path / "moe").config, LlamoeMixtralConfig)


@pytest.mark.parametrize(
    ("kind", "fields", "options", "message"),
    [
        ("mistral", {}, dict(family="mixtrall"), r"family = 'mixtrall': valid are 'llama4' and 'mixtral'"),
        (
            "mistral",
            {},
            dict(family="llama4"),
            r"sliding_window = 9, .* no window; choose the family mixtral",
        ),
        ("mistral", {}, dict(interleave=2), r"interleave = 2, but every layer of Mixtral's .* choose 1"),
        ("mistral", {}, dict(experts=1), r"top_k = 2 is more than experts = 1"),
        ("mistral", {}, dict(top_k=4), r"top_k = 4 is more than experts = 3"),
        (
            "llama",
            dict(attention_bias=True, mlp_bias=True),
            dict(family="mixtral"),
            r"attention_bias and mlp_bias, .* have no biases; choose the family llama4",
        ),
    ],
    ids=str,
)
def test_what_no_mixtral_has_is_refused(tmp_path, kind, fields, options, message):
    save_dense(tmp_path / "dense", kind, **fields)
    with pytest.raises(ValueError, match=message):
        upcycle(tmp_path / "dense", tmp_path / "moe", **{"experts": 3, **options})
    assert not (tmp_path / "moe").exists()
