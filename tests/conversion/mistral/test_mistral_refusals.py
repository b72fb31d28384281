"""What is wrong with a folder of Mistral AI's, or cannot become one, is named before anything is written."""

import json
from dataclasses import replace

import pytest
import torch
from support.mistral_folders import DENSE, FIRST_MIXTRAL, MIXTRAL, MOE, MistralCase, first_release

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert

EXPERT = "layers.1.feed_forward.experts.2.{}.weight"


def refused(source, target, error=CheckpointError, **options):
    """The message of a refused conversion, of which no file is left."""
    with pytest.raises(error) as caught:
        convert(source, target, **options)
    assert not target.exists()
    return str(caught.value)


def drop(name):
    return lambda weights: weights.pop(name)


def put(name, *shape):
    return lambda weights: weights.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (DENSE, drop("layers.1.attention.wo.weight"), ["layers.1.attention.wo.weight missing"]),
        (DENSE, put("layers.0.attention.wq.weight", 40, 24), ["attention.wq.weight", "[40, 24]", "[48, 24]"]),
        (DENSE, put("tok_embeddings.weight", 55, 24), ["vocab_size = 53", "55 rows"]),
        (MIXTRAL, drop(EXPERT.format("w3")), [f"{EXPERT.format('w3')} missing", "experts.0.w1.weight"]),
        (
            MIXTRAL,
            lambda weights: [weights.pop(EXPERT.format(part)) for part in ("w1", "w2", "w3")],
            ["layers.1.feed_forward.experts", "[2, 80, 24]", "[3, 80, 24]"],
        ),
        (MIXTRAL, put(EXPERT.format("w2"), 24, 41), [EXPERT.format("w2"), "[24, 41]", "[24, 40]"]),
        (
            FIRST_MIXTRAL,
            lambda weights: [put(f"layers.1.block_sparse_moe.w{i}", 121, 24)(weights) for i in (1, 2, 3)],
            ["layers.1.block_sparse_moe.w1", "[121, 24]", "3 experts"],
        ),
        (
            FIRST_MIXTRAL,
            put("layers.1.block_sparse_moe.w2", 117, 24),
            ["layers.1.block_sparse_moe.w2", "[117, 24]", "[120, 24]"],
        ),
    ],
    ids=lambda value: value.name.replace(" ", "-") if isinstance(value, MistralCase) else None,
)
def test_tensors_that_do_not_fit_params_json_are_named(case, change, words, tmp_path):
    weights = first_release(case.weights(), 3) if case is FIRST_MIXTRAL else case.weights()
    change(weights)
    source = case.write(tmp_path / "mistral", weights)
    message = refused(source, tmp_path / "hf")
    for word in words:
        assert word in message
    assert str(tmp_path / "mistral") in message


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"model_type": "mamba"}, ["model_type = mamba", "'transformer'"]),
        ({"vision_encoder": {"image_size": 1024}}, ["vision_encoder", "decoders of text"]),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, ["quantization ="]),
        ({"moe": MOE | {"num_shared_experts": 1}}, ["moe.num_shared_experts"]),
        ({"moe": MOE | {"norm_topk_prob": False}}, ["moe.norm_topk_prob"]),
        ({"moe": {"num_experts": 3}}, ["moe"]),
        ({"causal": False}, ["causal = False", "True"]),
        ({"qk_norm": True}, ["qk_norm = True"]),
        # Off may mean something, too.
        ({"use_rope": False}, ["use_rope = False", "remove it"]),
        ({"hidden_dim": None}, ["hidden_dim is missing"]),
        ({"dim": 25}, ["dim = 25"]),
        ({"n_heads": "6"}, ["n_heads = '6'", "number above 0"]),
        ({"rope_theta": "1e6"}, ["rope_theta = '1e6'"]),
        ({"hidden_size": 24}, ["hidden_size = 24", "one of hidden_size and dim"]),
        ({"sliding_window": [4, None, 4]}, ["sliding_window = [4, None, 4]", "2 layers"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_another_models_or_a_damaged_params_json_is_refused(entries, words, tmp_path):
    source = replace(DENSE, params=entries).write(tmp_path / "mistral", DENSE.weights())
    # `hidden_dim` alone shows whose it is.
    (source / "params.json").write_text(
        json.dumps({"sliding_window": None, **json.loads((source / "params.json").read_text())})
    )
    message = refused(source, tmp_path / "hf")
    for word in [*words, "params.json"]:
        assert word in message


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


def test_copies_of_a_tensor_in_files_of_a_mixture_must_be_equal(tmp_path):
    source = FIRST_MIXTRAL.write(tmp_path / "mistral")
    last = torch.load(source / "consolidated.03.pt")
    torch.save({**last, "norm.weight": last["norm.weight"] + 1}, source / "consolidated.03.pt")
    assert "norm.weight: differs" in refused(source, tmp_path / "hf")


def test_a_mixtral_has_no_place_in_metas_format(tmp_path):
    source = MIXTRAL.write(tmp_path / "mistral")
    assert "Meta's code does not compute" in refused(source, tmp_path / "to", ValueError, to="meta")
    assert "'hf' and 'meta'" in refused(source, tmp_path / "to", ValueError, to="mistral")
