"""Meta's folders to Hugging Face's and back: the same function by Meta's own maths, and the same bits."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from support.conversions import META_LLAMA_1, META_LLAMA_2, META_LLAMA_3, META_MAVERICK, META_SCOUT, sums
from support.meta_releases import expert_size, hidden_size
from support.models import deviation_in_range, load_whole, max_abs

import llamoe
from llamoe.conversion import convert

pytestmark = pytest.mark.slow

# Against float64, in logits of deviation 1: 1e-6 to 5e-6 were measured; one wrong scaling factor is 2e-4.
TOLERANCE = 1e-5
CLASSES = {
    META_LLAMA_1.name: (transformers.LlamaForCausalLM, llamoe.LlamoeDenseForCausalLM),
    META_LLAMA_2.name: (transformers.LlamaForCausalLM, llamoe.LlamoeDenseForCausalLM),
    META_LLAMA_3.name: (transformers.LlamaForCausalLM, llamoe.LlamoeDenseForCausalLM),
    META_SCOUT.name: (transformers.Llama4ForConditionalGeneration, llamoe.LlamoeForConditionalGeneration),
    META_MAVERICK.name: (transformers.Llama4ForCausalLM, llamoe.LlamoeForCausalLM),
}
# Case, files of the source, how they are written, files on the way back.
WAYS = [
    (META_LLAMA_1, 6, {}, 1),
    (META_LLAMA_2, 2, dict(one_storage=True), 1),
    (META_LLAMA_2, 1, dict(extras=False), 2),
    (META_LLAMA_3, 1, {}, 2),
    (META_SCOUT, 2, {}, 1),
    (META_SCOUT, 1, dict(release=False), 2),
    (META_MAVERICK, 3, dict(one_storage=True), 1),
    (META_MAVERICK, 1, dict(extras=False), 3),
]


def ids(value):
    return value.name.replace(" ", "-") if hasattr(value, "name") else None


@torch.no_grad()
def logits(model_class, folder, tokens, tiles):
    model = load_whole(model_class, folder, dtype=torch.float32).eval()
    return model(tokens, **({} if tiles is None else {"pixel_values": tiles})).logits


@pytest.mark.parametrize(("case", "files", "how", "files_back"), WAYS, ids=ids)
def test_converted_folders_compute_what_metas_maths_does_and_convert_back_to_the_same_bits(
    case, files, how, files_back, tmp_path, record_parity
):
    weights = case.weights()
    source = case.write(tmp_path / "meta", weights, files, **how)
    before = sums(source)
    convert(source, tmp_path / "hf", shard_size="700KB")

    tokens, tiles = case.inputs()
    expected = case.logits(weights, tokens, tiles)
    assert deviation_in_range(expected)
    for model_class in CLASSES[case.name]:
        difference = max_abs(logits(model_class, tmp_path / "hf", tokens, tiles).double(), expected)
        record_parity(
            f"{case.name} through convert, {model_class.__name__}",
            "Meta's maths in float64",
            "float32",
            difference,
        )
        assert difference < TOLERANCE

    convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=files_back)
    assert len(list((tmp_path / "back").glob("consolidated.*.pth"))) == files_back
    back = case.read(tmp_path / "back")
    assert back.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(back[name], weights[name])] == []
    assert sums(source) == before

    # params.json has the same meaning.
    params = json.loads((tmp_path / "back" / "params.json").read_text())
    assert params.get("vocab_size", -1) in (-1, case.vocabulary)
    assert torch.equal(replace(case, params=params).logits(weights, tokens, tiles), expected)
    # Meta's code makes its layers by these rules, and then loads the tensors into them.
    assert hidden_size(params) == hidden_size(case.params) or META_SCOUT is case
    if case.is_llama4:
        assert expert_size(params) == expert_size(case.params)


def test_scaled_rotary_has_metas_own_factors_where_params_json_names_none(tmp_path, record_parity):
    case = META_SCOUT
    weights, (tokens, tiles) = case.weights(), case.inputs(120)
    expected = case.logits(weights, tokens, tiles)
    for other in (dict(use_scaled_rope=False), dict(rope_scaling_factor=8.0, rope_high_freq_factor=4.0)):
        assert max_abs(case.logits(weights, tokens, tiles, **other), expected) > 20 * TOLERANCE
    convert(case.write(tmp_path / "meta", weights, 2), tmp_path / "hf")
    given = logits(llamoe.LlamoeForConditionalGeneration, tmp_path / "hf", tokens, tiles)
    assert max_abs(given.double(), expected) < TOLERANCE
