"""Whatever a command writes, `from_pretrained` reads: every form of target, and the logits of its source."""

from functools import cache
from itertools import product

import pytest
import torch
from safetensors import safe_open
from support.conversions import META_LLAMA_2, META_LLAMA_3, META_MAVERICK, META_SCOUT
from support.models import (
    SHALLOW_MODELS,
    load_whole,
    run,
)

import llamoe
from llamoe.conversion import convert

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in SHALLOW_MODELS if case.is_head}
TEXT = CASES["LlamoeForCausalLM"]
META_CASES = {
    case.name.replace(" ", "-"): case for case in (META_LLAMA_2, META_LLAMA_3, META_SCOUT, META_MAVERICK)
}
FORMS = [dict(experts=how, layout=kind) for how, kind in product(("fused", "split"), ("stock", "llamoe"))]


def words(value):
    """Ids of parameters among which are forms."""
    return "-".join(value.values()) if isinstance(value, dict) else None


# Without experts, both ways to write them are one.
IN_FORMS = [
    (name, form)
    for name, form in product(CASES, FORMS)
    if CASES[name].has_experts or form != dict(experts="split", layout="stock")
]
CASTS = list(product((None, "bfloat16", "float16"), ("5GB", "60KB")))
# Every class in every form, with casts and sizes of files in turn: a cast goes one way through all of them.
CONVERSIONS = [(name, *CASTS[number % len(CASTS)], form) for number, (name, form) in enumerate(IN_FORMS)]
# Between implementations, and where sums have another order: logits of deviation 1, of which up to 5e-6 was measured.
TOLERANCE = 1e-5


def some_ids(size=90, rows=2, length=31):
    return torch.randint(3, size, (rows, length), generator=torch.Generator().manual_seed(5))


def has_split_experts(folder):
    names = {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}
    return any(".experts.0." in name for name in names)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Gives for the name of a case the folder of its model, which is in float32, and for a dtype its logits."""

    @cache
    def save(name):
        folder = tmp_path_factory.mktemp(name)
        CASES[name].make().save_pretrained(folder)
        return folder

    @cache
    def compute(name, dtype):
        return run(CASES[name].make().to(dtype), **CASES[name].inputs())

    return lambda name, dtype: (save(name), compute(name, dtype))


@pytest.mark.parametrize(("name", "dtype", "shard_size", "form"), CONVERSIONS, ids=words)
def test_converted(name, dtype, shard_size, form, source_of, tmp_path):
    case, torch_dtype = CASES[name], getattr(torch, dtype or "float32")
    source, expected = source_of(name, torch_dtype)
    convert(source, tmp_path / "target", dtype=dtype, shard_size=shard_size, **form)
    # Files of Mixtral always have them so.
    is_split = case.has_experts and (form["experts"] == "split" or case.stock_name.startswith("Mixtral"))
    assert has_split_experts(tmp_path / "target") == is_split
    assert (len(list((tmp_path / "target").glob("*.safetensors"))) > 1) == (shard_size == "60KB")
    loaded = load_whole(case.model_class, tmp_path / "target")
    assert loaded.dtype == torch_dtype
    # The same weights go through the same products.
    assert torch.equal(run(loaded, **case.inputs()), expected)


def test_the_tower_of_a_model_whose_experts_are_split(tmp_path):
    pictures = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(5))
    model = CASES["LlamoeForConditionalGeneration"].make()
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "split", experts="split")
    loaded = llamoe.LlamoeVisionModel.from_pretrained(tmp_path / "split")
    with torch.no_grad():
        given, expected = (part(pictures).last_hidden_state for part in (loaded, model.vision_model))
    assert torch.equal(given, expected)
