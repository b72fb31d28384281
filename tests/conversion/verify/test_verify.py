"""`verify` finds out whether two checkpoints compute the same, and says what differs."""

import json
import math
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.lazy_tensors import InMemory
from support.models import (
    dense_config,
    draw,
    mixtral_config,
    multimodal_config,
    text_config,
    vision_config,
)

import llamoe
from llamoe.conversion.hf import open_hf, save_hf
from llamoe.conversion.io import WriteOptions
from llamoe.conversion.meta.folder import save_meta
from llamoe.conversion.open import open_checkpoint
from llamoe.conversion.upcycle import upcycle
from llamoe.conversion.verify import run_streamed
from llamoe.conversion.verify.command import Verification, verify

CLASSES = {
    "dense": ("LlamoeDenseForCausalLM", dense_config),
    "text": ("LlamoeForCausalLM", text_config),
    "mixtral": ("LlamoeMixtralForCausalLM", mixtral_config),
    "tower": ("LlamoeVisionModel", vision_config),
    "multimodal": ("LlamoeForConditionalGeneration", multimodal_config),
}
# For values of deviation about 1: torch may sum the same products in another order at other addresses.
ROUNDING = 1e-5


def build(family, seed=0, **fields):
    """Make a model with random weights of a seed; `fields` change its configuration."""
    name, make = CLASSES[family]
    config = make()
    for field, value in fields.items():
        setattr(config, field, value)
    return draw(getattr(llamoe, name), config, seed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that gives a folder with the model of a family; no test changes it."""
    root = tmp_path_factory.mktemp("saved")

    def folder(family):
        if not (root / family).exists():
            build(family).save_pretrained(root / family)
        return root / family

    return folder


def edited(folder: Path, target: Path, change=None, **fields) -> Path:
    """Copy a folder, apply `change` to its tensors, and set fields of config.json or of a part of it."""
    shutil.copytree(folder, target)
    if change is not None:
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    for field, value in fields.items():
        *part, name = field.split(".")
        (config[part[0]] if part else config)[name] = value
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("family", CLASSES)
def test_a_model_read_one_matrix_at_a_time_computes_what_the_whole_model_does(family):
    # In `text`, chunks have 16 tokens, and temperature tuning begins at 8: 53 tokens pass both.
    model = build(family)
    tensors = {name: InMemory(value) for name, value in model.state_dict().items()}
    weights = run_streamed.Weights(model.config, tensors)
    inputs, _ = run_streamed.random_inputs((model.config, model.config), 53, 2, seed=1)
    outputs = run_streamed.run(weights, inputs)
    with torch.no_grad():
        expected = model(**inputs)
    assert outputs
    for name, value in outputs.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=ROUNDING)


def test_a_stream_holds_one_matrix_at_a_time_and_only_the_experts_that_are_used():
    model = build("text", num_local_experts=5)
    tensors = {name: InMemory(value) for name, value in model.state_dict().items()}
    alive, most, rows = weakref.WeakSet(), [], []

    class Watched(run_streamed.Weights):
        def read(self, name, start=0, stop=None):
            value = super().read(name, start, stop).clone()
            alive.add(value.untyped_storage())
            most.append(sum(storage.nbytes() for storage in alive))
            rows.append((name, start))
            return value

    weights = Watched(model.config, tensors)
    inputs = {"input_ids": torch.tensor([[3]])}
    run_streamed.run(weights, inputs)
    largest = max(tensor.nbytes // (tensor.shape[0] if tensor.ndim > 2 else 1) for tensor in tensors.values())
    experts = [row for row in rows if "experts.gate_up_proj" in row[0]]
    assert len(experts) == 2 * len(model.config.moe_layers)  # one token goes to two of five experts
    # Both matrices of an expert are in memory together.
    assert largest <= max(most) <= 2 * largest
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("family", CLASSES)
def test_a_checkpoint_is_the_same_as_itself(family, saved):
    result = verify(saved(family), saved(family))
    assert result.verdict == "equal" and result.same_weights and result.same_function
    assert not result.differences and not result.function and not result.structure and not result.outputs
    json.dumps(result.as_dict(), allow_nan=False)
    assert [title for title, _ in result.sections()] == ["verdict", "tensors"]


@pytest.mark.parametrize("family", ["dense", "multimodal"])
def test_a_folder_of_meta_is_the_same_as_that_of_hugging_face(family, tmp_path):
    name, make = CLASSES[family]
    config = make(head_dim=12, vocab_size=102)  # Meta's size of heads; rows for two files
    draw(getattr(llamoe, name), config).save_pretrained(tmp_path / "hf")
    save_meta(open_hf(tmp_path / "hf"), tmp_path / "meta", shards=2)
    result = verify(tmp_path / "meta", tmp_path / "hf")
    assert result.same_weights and result.same_function, result.reasons
    assert result.kinds[0].startswith("meta-llama") and result.kinds[1] == "hf"
    # With the wrong rotary pairing, all names, shapes and numbers of weights are still right.
    if family == "dense":
        other = open_checkpoint(tmp_path / "meta")
        other.config.rope_interleave = True
        result = verify(other, tmp_path / "hf")
        assert result.same_weights and result.verdict == "different" and result.outputs


def swap(first, second):
    return lambda tensors: tensors.update({first: tensors[second], second: tensors[first]})


def swap_halves(name):
    """Swap gate and up projection of one expert."""
    return lambda tensors: tensors[name][4].copy_(torch.cat(tensors[name][4].chunk(2, dim=-1)[::-1], dim=-1))


ATTENTION, EXPERTS = "model.layers.1.self_attn", "model.layers.3.feed_forward.experts.gate_up_proj"
SWAPS = {
    "dense": (swap, f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"),
    "text": (swap_halves, EXPERTS),
    "multimodal": (swap, *(f"vision_model.{ATTENTION}.{name}_proj.weight" for name in "qk")),
}


@pytest.mark.parametrize("family", SWAPS)
def test_tensors_that_were_swapped_are_named(family, saved, tmp_path):
    change, *names = SWAPS[family]
    result = verify(saved(family), edited(saved(family), tmp_path / "swapped", change(*names)))
    assert not result.same_weights and result.verdict == "different"
    assert set(result.differences) == set(names) and result.first_difference in names
    assert any(result.first_difference in reason for reason in result.reasons)
    assert {*names} <= {label for _, rows in result.sections() for label, _ in rows}


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "field", "value", "kind"),
    [
        # Fields that change what is computed, although few tokens may not show it.
        ("dense", "rms_norm_eps", 1e-5, "function"),
        ("dense", "hidden_act", "gelu", "function"),
        ("dense", "rope_parameters", LINEAR, "function"),
        ("text", "attention_chunk_size", 200, "function"),
        ("text", "attn_temperature_tuning", False, "function"),
        ("text", "use_qk_norm", False, "function"),
        ("text", "no_rope_layers", [1, 0, 1, 1, 1], "function"),
        ("tower", "hidden_act", "quick_gelu", "function"),
        # Fields with which other weights may compute the same.
        ("dense", "rope_interleave", True, "structure"),
        ("text", "num_experts_per_tok", 1, "structure"),
        ("text", "norm_topk_prob", True, "structure"),
        ("text", "apply_router_weight_on_input", False, "structure"),
        ("text", "router_score_function", "softmax", "structure"),
        ("mixtral", "num_experts_per_tok", 1, "structure"),
        ("mixtral", "rope_interleave", True, "structure"),
        ("mixtral", "norm_topk_prob", False, "structure"),
        ("multimodal", "text_config.num_experts_per_tok", 2, "structure"),
        ("multimodal", "vision_config.num_attention_heads", 2, "structure"),
    ],
)
def test_equal_weights_with_another_configuration_differ_by_the_named_field(
    family, field, value, kind, saved, tmp_path
):
    other = edited(saved(family), tmp_path / "other", **{field: value})
    field = {"no_rope_layers": "layers that rotate"}.get(field, field)
    # For one family, in both orders.
    for pair in ((saved(family), other), (other, saved(family)))[: 1 + (family == "mixtral")]:
        result = verify(*pair, logits=False)
        assert (result.same_weights, result.verdict) == (True, "different") and field in getattr(result, kind)
        assert any("configuration" in reason and field in reason for reason in result.reasons)
    result = verify(saved(family), other, tokens=6, rows=1)
    assert result.verdict == "different" and bool(result.outputs) == (kind == "structure")


@pytest.mark.parametrize(
    ("outputs", "others", "verdict"),
    [
        (0.0, {"structure": {"num_experts_per_tok": (1, 2)}}, "agree"),
        (0.0, {"function": {"sliding_window": (8, 9)}}, "different"),
        (math.inf, {}, "different"),
        (math.nan, {}, "different"),
    ],
)
def test_the_verdict_follows_from_the_outputs(outputs, others, verdict):
    result = Verification("a", "b", ("hf", "hf"), compared=3, outputs={"logits": outputs}, **others)
    assert result.verdict == result.as_dict()["verdict"] == verdict
    assert result.as_dict()["same_function"] is (verdict != "different")


def test_fields_that_come_to_the_same_are_no_difference(saved, tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.0}
    same = edited(saved("dense"), tmp_path / "same", rope_parameters=rope, attention_dropout=0.1)
    result = verify(saved("dense"), same)
    assert result.same_function and not result.function
    # A chunk as long as the context has no effect.
    whole = edited(saved("text"), tmp_path / "whole", attention_chunk_size=256)
    wider = edited(saved("text"), tmp_path / "wider", attention_chunk_size=300)
    assert verify(whole, wider).same_function


def test_a_dense_model_and_the_mixture_that_computes_it_are_the_same_function(saved, tmp_path):
    """The mixture has experts of zeros beside the dense feed-forward, and rows of q and k in another order."""
    upcycle(saved("dense"), tmp_path / "mixture", experts=3)
    result = verify(saved("dense"), tmp_path / "mixture")
    assert result.verdict == "agree" and result.same_function and not result.same_weights
    assert 0 < result.outputs["logits"] <= ROUNDING and not result.function
    assert "outputs agree on 64 tokens" in result.reasons[0]
    assert {"only in a", "only in b"} <= {*result.differences.values()}
    assert result.structure["model_type"] and result.structure["rope_interleave"] == (False, True)
    assert verify(saved("dense"), tmp_path / "mixture", logits=False).verdict == "different"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_weights_are_equal_within_rounding(dtype, saved, tmp_path):
    save_hf(open_hf(saved("dense")), tmp_path / "rounded", WriteOptions(dtype=dtype))
    result = verify(saved("dense"), tmp_path / "rounded")
    assert result.verdict == "rounded" and result.same_function and not result.same_weights
    assert not result.outputs
    # A difference of one step of the narrower dtype is not rounding, whatever the dtypes of both files.
    eps = torch.finfo(getattr(torch, dtype)).eps

    def step(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * (1 + eps)

    for number, folder in enumerate((saved("dense"), tmp_path / "rounded")):
        other = edited(folder, tmp_path / f"step {number}", step)
        assert verify(other, tmp_path / "rounded", logits=False).verdict == "different"
    # Numbers of the narrower dtype are equal to the same numbers in float32.
    save_hf(open_hf(tmp_path / "rounded"), tmp_path / "float32", WriteOptions(dtype="float32"))
    result = verify(tmp_path / "rounded", tmp_path / "float32")
    assert result.verdict == "equal"


def test_a_tied_head_is_the_same_as_its_copy(tmp_path):
    tied = build("dense", tie_word_embeddings=True)
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "tied")
    state = load_file(tmp_path / "tied" / "model.safetensors")
    assert "lm_head.weight" not in state
    edited(
        tmp_path / "tied",
        tmp_path / "untied",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
        tie_word_embeddings=False,
    )
    result = verify(tmp_path / "tied", tmp_path / "untied")
    assert result.verdict == "equal" and not result.structure


def test_appended_tokens_leave_the_common_ones_comparable(saved, tmp_path):
    def append(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], torch.ones(6, 72)])

    longer = edited(saved("dense"), tmp_path / "longer", append, vocab_size=107)
    result = verify(saved("dense"), longer)
    assert result.same_function and not result.same_weights and len(result.differences) == 2
    assert result.differences["lm_head.weight"] == "[101, 72] and [107, 72]"
    assert any("101 and 107" in reason for reason in result.reasons)
    assert verify(longer, saved("dense")).same_function


def test_a_multimodal_model_is_compared_with_its_decoder_and_its_tower(saved, tmp_path):
    whole = llamoe.LlamoeForConditionalGeneration.from_pretrained(saved("multimodal"))
    whole.language_model.save_pretrained(tmp_path / "text")
    whole.vision_model.save_pretrained(tmp_path / "tower")
    for part in ("text", "tower"):
        result = verify(saved("multimodal"), tmp_path / part)
        assert result.same_weights and result.same_function, result.reasons
        assert verify(tmp_path / part, saved("multimodal")).same_function
        assert any("is multimodal" in reason for reason in result.reasons)
    with pytest.raises(ValueError, match="tower cannot be compared with a decoder"):
        verify(tmp_path / "text", tmp_path / "tower")


def test_nan_and_infinity_are_found(saved, tmp_path):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
        tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = torch.inf

    spoiled = edited(saved("dense"), tmp_path / "spoiled", spoil)
    result = verify(saved("dense"), spoiled)
    assert result.verdict == "different"
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2)]
    assert result.differences == dict(zip(names, ["max |a - b| = nan", "max |a - b| = inf"], strict=True))
    json.dumps(result.as_dict(), allow_nan=False)
    assert verify(spoiled, spoiled).verdict == "equal"


def test_bad_arguments_are_refused(saved):
    for options in ({"tokens": 0}, {"rows": True}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            verify(saved("dense"), saved("dense"), **options)
