"""Upcycled mixtures of Llama 4's or Mixtral's kind compute what the dense model computes, for any router."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.lazy_tensors import InMemory
from support.models import DENSE, load_whole, max_abs, mixtures, scaled_rope, stock_model, stock_text_config
from transformers import (
    Llama4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralForCausalLM,
)

from llamoe import LlamoeForCausalLM, LlamoeMixtralForCausalLM, LlamoeTextConfig
from llamoe.conversion.io.lazy_tensor import blocks
from llamoe.conversion.open import open_checkpoint
from llamoe.conversion.upcycle import Mixture, as_mixtral, as_text_model, upcycle

# For logits of standard deviation about 1. In Llama 4, rotated channels are summed in another order. In Mixtral, the
# scores of the chosen experts sum to 1 only within a few 1e-7 in each of three layers. A window that is off by one, or
# scores that do not sum to 1, change logits by 1e-2 and more.
TOLERANCE = 1e-5
# A sliding window that is much shorter than the texts.
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
CLASSES = {
    "llama4": (LlamoeForCausalLM, Llama4ForCausalLM),
    "mixtral": (LlamoeMixtralForCausalLM, MixtralForCausalLM),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return a function that gives a folder that transformers has saved, and its model; no test changes them."""
    saved = {}

    def get(kind="llama", dtype=torch.float32, **fields):
        key = (kind, dtype, repr(fields))
        if key not in saved:
            model_class, config_class, more = KINDS[kind]
            model = stock_model(model_class, config_class(**{**DENSE, **more, **fields})).to(dtype)
            model.generation_config.max_new_tokens = 7
            model.save_pretrained(folder := tmp_path_factory.mktemp("dense"))
            saved[key] = folder, model
        return saved[key]

    return get


def some_ids(rows=2, length=37):
    return torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


def set_routers(model, scale):
    """Draw routers of a deviation; at 30 all scores of Llama 4 are near 0 or 1, and one of Mixtral's is near 1."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith((".router.weight", ".gate.weight")):
                weight.normal_(0, scale)


@pytest.mark.parametrize(
    ("family", "experts", "interleave", "top_k"),
    [
        ("llama4", 5, 1, 1),
        ("llama4", 5, 2, 2),
        ("llama4", 3, 1, 3),
        ("llama4", 1, 3, 1),
        ("mixtral", 5, 1, 2),
        ("mixtral", 3, 1, 3),
        ("mixtral", 4, 1, 1),
    ],  # fmt: skip
)
def test_the_mixture_computes_the_dense_function_for_any_router(
    dense, tmp_path, record_parity, family, experts, interleave, top_k
):
    source, model = dense("llama" if family == "llama4" else "mistral")
    report = upcycle(source, tmp_path / "moe", experts=experts, interleave=interleave, top_k=top_k)
    # With one expert a token, Mixtral's score is always 1, so that the router gets no gradient from the loss.
    is_noted = any("its score is always 1" in note for note in report.notes)
    assert is_noted == (family == "mixtral" and top_k == 1)
    ids, greedy = some_ids(), dict(do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)
    expected, tokens = logits(model, ids), model.generate(ids, **greedy)
    for model_class in CLASSES[family]:  # transformers loads it, too, if it can express it
        mixture = load_whole(model_class, tmp_path / "moe", dtype=torch.float32).eval()
        if family == "llama4":
            assert list(mixtures(mixture)) == list(range(interleave - 1, 3, interleave))
        for scale in (None, 0.3, 30.0):
            if scale is not None:
                set_routers(mixture, scale)
            error = max_abs(logits(mixture, ids), expected)
            assert error < TOLERANCE
            record_parity(f"upcycled, {model_class.__name__}", type(model).__name__, "float32", error)
        if family == "mixtral":
            assert mixture.config.sliding_window == WINDOW
            assert torch.equal(mixture.generate(ids, **greedy), tokens)
    if family == "mixtral":
        assert max_abs(logits(dense("mistral without a window")[1], ids), expected) > 0.1


@pytest.mark.parametrize(
    ("family", "kind", "rope"),
    [("llama4", "llama", rope) for rope in ("linear", "yarn", "llama3", "proportional")]
    + [("mixtral", kind, "yarn") for kind in ("llama", "mistral", "mistral without a window")],
)
def test_scaled_rotary_biases_activation_and_a_tied_head_survive(dense, tmp_path, family, kind, rope):
    fields = dict(hidden_act="gelu", tie_word_embeddings=True, **scaled_rope(rope))
    source, model = dense(kind, **fields, **({"attention_bias": True} if family == "llama4" else {}))
    upcycle(source, tmp_path / "moe", family=family, experts=3, interleave=2 if family == "llama4" else 1)
    ids = some_ids(length=90)
    for model_class in CLASSES[family]:
        mixture = load_whole(model_class, tmp_path / "moe", dtype=torch.float32).eval()
        assert mixture.get_output_embeddings().weight is mixture.get_input_embeddings().weight
        assert getattr(mixture.config, "sliding_window", None) == (WINDOW if kind == "mistral" else None)
        assert max_abs(logits(mixture, ids), logits(model, ids)) < TOLERANCE


def test_routers_follow_from_the_seed_and_their_names(dense, tmp_path):
    source, _ = dense()
    runs = {"a": dict(seed=7), "b": dict(seed=7, interleave=3), "c": dict(seed=8)}
    for name, options in runs.items():
        upcycle(source, tmp_path / name, experts=3, **options)
    tensors = {name: open_checkpoint(tmp_path / name).tensors for name in runs}
    key = "model.layers.2.feed_forward.router.weight"
    a, b, c = (tensors[name][key].read() for name in runs)
    assert torch.equal(a, b) and not torch.equal(a, c)
    routers = [tensors["a"][f"model.layers.{index}.feed_forward.router.weight"].read() for index in range(3)]
    assert not torch.equal(routers[0], routers[1])
    assert torch.cat(routers).std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("family", CLASSES)
def test_an_expert_is_made_of_its_dense_matrices_alone(dense, family):
    source, reads = open_checkpoint(dense()[0]), []

    source.tensors = {key: InMemory(tensor.read(), key, reads) for key, tensor in source.tensors.items()}
    if family == "llama4":
        result = as_text_model(source, Mixture(experts=6, interleave=2, top_k=1, seed=0))
    else:
        result = as_mixtral(source, Mixture(experts=6, interleave=1, top_k=2, seed=0))
    stacked = {key: tensor for key, tensor in result.tensors.items() if tensor.ndim == 3}
    shapes = {"llama4": {(6, 72, 184), (6, 92, 72)}, "mixtral": {(6, 184, 72), (6, 72, 92)}}
    assert {tensor.shape for tensor in stacked.values()} == shapes[family]
    assert not reads
    for key, tensor in stacked.items():
        assert blocks(tensor) == [(row, row + 1) for row in range(6)]
        parts = ["gate_proj", "up_proj"] if "gate_up" in key else ["down_proj"] * (family == "mixtral")
        reads.clear()
        rows = [tensor.read(*row) for row in blocks(tensor)]
        assert len(reads) == len(parts) * 6
        reads.clear()
        assert torch.equal(tensor.read(4, 5), rows[4])
        if family == "llama4":
            assert [key for key, *_ in reads] == [f"model.layers.1.mlp.{part}.weight" for part in parts]


def test_what_belongs_to_the_source_comes_along(dense, tmp_path):
    source, _ = dense(dtype=torch.bfloat16, max_position_embeddings=300, eos_token_id=[2, 50])
    report = upcycle(source, tmp_path / "moe", experts=3)
    model = LlamoeForCausalLM.from_pretrained(tmp_path / "moe", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert report.bytes == sum(2 * parameter.numel() for parameter in model.parameters())
    config = model.config
    assert isinstance(config, LlamoeTextConfig)
    assert (config.max_position_embeddings, config.eos_token_id) == (300, [2, 50])
    assert not (config.use_qk_norm or config.attn_temperature_tuning) and all(config.no_rope_layers)
    assert model.generation_config.max_new_tokens == 7


def test_a_folder_has_stocks_names_and_every_expert_the_dense_bits(dense, tmp_path):
    source, model = dense("mistral", dtype=torch.bfloat16, eos_token_id=[2, 50])
    report = upcycle(source, tmp_path / "moe", experts=4)
    assert any("4 experts, 2 a token, in 3 of 3 layers" in note for note in report.notes)
    assert any("copies of the dense feed-forward" in note for note in report.notes)
    config = json.loads((tmp_path / "moe/config.json").read_text())
    expected = DENSE | dict(
        model_type="mixtral", architectures=["MixtralForCausalLM"], dtype="bfloat16", sliding_window=WINDOW,
        num_local_experts=4, num_experts_per_tok=2, eos_token_id=[2, 50], rope_parameters=model.config.rope_parameters,
    )  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    files, state = load_file(tmp_path / "moe/model.safetensors"), model.state_dict()
    for layer in range(3):
        moe = f"model.layers.{layer}.block_sparse_moe"
        for part, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            matrix = state.pop(f"model.layers.{layer}.mlp.{name}.weight")
            for expert in range(4):
                assert torch.equal(files.pop(f"{moe}.experts.{expert}.{part}.weight"), matrix)
        assert files.pop(f"{moe}.gate.weight").shape == (4, 72)
    assert files.keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in files.items())


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("llama", dict(experts=0), "experts=0"),
        ("llama", dict(experts=2.0), "experts=2.0"),
        ("llama", dict(top_k=5), "num_experts_per_tok = 5.* num_local_experts = 4"),
        ("llama", dict(top_k=0), "top_k=0"),
        ("llama", dict(interleave=0), "interleave=0"),
        ("llama", dict(interleave=4), "interleave = 4.* 3 layers"),
        ("llama", dict(seed=-1), "seed=-1"),
        ("mistral", dict(family="mixtrall"), "family = 'mixtrall'"),
        ("mistral", dict(family="llama4"), "sliding_window = 9"),
        ("mistral", dict(interleave=2), "interleave = 2"),
        ("mistral", dict(experts=1), "num_experts_per_tok = 2.* num_local_experts = 1"),
        ("llama with biases", dict(family="mixtral"), "has no model.layers.0.self_attn.q_proj.bias"),
    ],
    ids=str,
)
def test_what_makes_no_mixture_is_refused(dense, tmp_path, kind, options, named):
    fields = dict(attention_bias=True, mlp_bias=True) if kind == "llama with biases" else {}
    with pytest.raises(ValueError, match=named):
        upcycle(dense(kind.split()[0], **fields)[0], tmp_path / "moe", **{"experts": 4, **options})
    assert not (tmp_path / "moe").exists()


def test_a_mixture_is_refused(tmp_path):
    Llama4ForCausalLM(stock_text_config()).save_pretrained(tmp_path / "mixture")
    with pytest.raises(ValueError, match=r"is no dense LLaMA but Llama 4 text"):
        upcycle(tmp_path / "mixture", tmp_path / "moe", experts=2)
