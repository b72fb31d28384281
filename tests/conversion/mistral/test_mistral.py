"""Folders of Mistral AI converted to Hugging Face's compute what mistral-inference's formulas give."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.conversions import META_LLAMA_1, META_LLAMA_3, META_MAVERICK, META_SCOUT, sums
from support.mistral_folders import CASES, DENSE, MIXTRAL, WINDOW, WINDOW_IN_SOME, MistralCase
from support.models import deviation_in_range, load_whole, max_abs

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert, open_checkpoint

# Against float64, in logits of deviation 1: 1e-6 was measured.
TOLERANCE = 1e-5


@torch.no_grad()
def logits(model_class, folder, ids):
    model = load_whole(model_class, folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    return model(ids).logits.double()


def classes_of(case):
    """Return transformers' class for a case, LLaMA's for a Mistral without a window, and ours."""
    if case.is_mixture:
        return transformers.MixtralForCausalLM, llamoe.LlamoeMixtralForCausalLM
    name = {0: "Llama", 1: "Ministral", 2: "Mistral"}[sum(window is not None for window in case.windows)]
    return getattr(transformers, f"{name}ForCausalLM"), llamoe.LlamoeDenseForCausalLM


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_converted_folders_compute_what_mistral_inference_does(case, tmp_path, record_parity):
    weights, ids = case.weights(), case.ids()
    source = case.write(tmp_path / "mistral", weights)
    before = sums(source)
    assert open_checkpoint(source).config.max_position_embeddings == case.params.get("max_seq_len", 32768)
    convert(source, tmp_path / "hf", shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1

    expected = case.logits(weights)
    assert deviation_in_range(expected)
    # The comparison below would show a wrong rotary base or window.
    assert max_abs(case.logits(weights, theta=7 * case.theta), expected) > 100 * TOLERANCE
    windows = (
        tuple(window and window + 1 for window in case.windows[::-1]) if any(case.windows) else (5, None)
    )
    assert max_abs(case.logits(weights, windows=windows), expected) > 100 * TOLERANCE
    for model_class in classes_of(case):
        difference = max_abs(logits(model_class, tmp_path / "hf", ids), expected)
        record_parity(
            f"{case.name} through convert, {model_class.__name__}",
            "mistral-inference's maths in float64",
            "float32",
            difference,
        )
        assert difference < TOLERANCE
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) is classes_of(case)[0]
    assert sums(source) == before


def test_a_rotary_base_that_params_json_lacks_is_noted(tmp_path):
    report = convert(WINDOW.write(tmp_path / "window"), tmp_path / "one")
    assert any("no rope_theta: 10000, since it has sliding_window" in note for note in report.notes)
    report = convert(DENSE.write(tmp_path / "dense"), tmp_path / "two")
    assert any("no rope_theta: 1e+06, since it has no sliding_window" in note for note in report.notes)
    report = convert(WINDOW_IN_SOME.write(tmp_path / "some"), tmp_path / "three")
    assert not any("rope_theta" in note for note in report.notes)


@pytest.mark.parametrize("stores_head", [True, False])
def test_a_head_that_is_the_embedding_need_not_be_stored(stores_head, tmp_path):
    case = MistralCase("tied", {"tied_embeddings": True})
    weights = case.weights()
    weights["output.weight"] = weights["tok_embeddings.weight"].clone()
    stored = {name: tensor for name, tensor in weights.items() if stores_head or name != "output.weight"}
    convert(case.write(tmp_path / "mistral", stored), tmp_path / "hf")
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    ours = logits(llamoe.LlamoeDenseForCausalLM, tmp_path / "hf", case.ids())
    # Logits are larger, since the drawn embedding is not scaled down as heads are.
    assert max_abs(ours, case.logits(weights)) < 10 * TOLERANCE


# Mistral AI's folders and Meta's


@pytest.mark.parametrize(
    "case", [META_LLAMA_1, META_LLAMA_3, META_SCOUT, META_MAVERICK], ids=lambda case: case.name
)
def test_metas_folders_stay_metas(case, tmp_path):
    source = case.write(tmp_path / "meta", case.weights(), 1)
    assert open_checkpoint(source, companions=False).kind.startswith("meta-llama")
    # A file with a name of Mistral AI's does not change that.
    (source / "consolidated.safetensors").write_bytes(b"")
    assert open_checkpoint(source, companions=False).kind.startswith("meta-llama")


def test_a_params_json_without_keys_of_either_format_leaves_the_format_to_the_weights(tmp_path):
    """Such a params.json of LLaMA 1 is enough for Meta's format, where tensors show the size of feed-forwards."""
    case = META_LLAMA_1
    source = case.write(tmp_path / "meta", case.weights(), 1)
    params = {name: case.params[name] for name in ("dim", "n_layers", "n_heads", "norm_eps")}
    (source / "params.json").write_text(json.dumps(params))
    assert open_checkpoint(source, companions=False).kind == "meta-llama"
    (source / "consolidated.00.pth").rename(source / "consolidated.00.pt")
    with pytest.raises(CheckpointError, match="hidden_dim is missing"):
        open_checkpoint(source, companions=False)


def test_of_a_repository_in_both_formats_hugging_faces_files_are_read(tmp_path):
    source = MIXTRAL.write(tmp_path / "mistral")
    convert(source, tmp_path / "hf")
    for path in source.iterdir():
        path.rename(tmp_path / "hf" / path.name)
    assert open_checkpoint(tmp_path / "hf").kind == "hf"
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert open_checkpoint(tmp_path / "hf").kind == "mistral"


def test_keys_that_are_off_change_nothing(tmp_path):
    entries = {
        "lora": None,
        "quantization": {},
        "use_biases": False,
        "causal": True,
        "yarn": {},
        "attn_logit_softcap": 0.0,
        "max_batch_size": 8,
        "model_type": "transformer",
    }
    source = replace(DENSE, params=entries).write(tmp_path / "mistral", DENSE.weights())
    report = convert(source, tmp_path / "hf")
    assert set(report.dropped) == {"params.json: max_batch_size"}


def test_a_mixtral_has_no_place_in_metas_format(tmp_path):
    source = MIXTRAL.write(tmp_path / "mistral")
    for to, words in {"meta": "Meta's code does not compute", "mistral": "'hf' and 'meta'"}.items():
        with pytest.raises(ValueError, match=words):
            convert(source, tmp_path / "to", to=to)
        assert not (tmp_path / "to").exists()
