"""Whatever a command writes, `from_pretrained` reads: every form of target, and the logits of its source."""

from functools import cache
from itertools import product

import pytest
import torch
from safetensors import safe_open
from support.conversions import META_LLAMA_2, META_LLAMA_3, META_MAVERICK, META_SCOUT
from support.models import (
    SHALLOW_MODELS,
    deviation_in_range,
    draw,
    load_whole,
    max_abs,
    run,
    stock_dense_config,
)
from support.towers import open_clip_config, open_clip_tower, randomize, visual_state, write_open_clip
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import llamoe
from llamoe.conversion import assemble, convert, merge_kv_heads, upcycle

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


@pytest.mark.parametrize("form", FORMS[::3], ids=words)
def test_upcycled(form, tmp_path):
    dense = draw(LlamaForCausalLM, stock_dense_config())
    dense.save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, interleave=2, noise=0.0)
    convert(tmp_path / "moe", tmp_path / "target", **form)
    expected = run(dense, input_ids=some_ids())
    assert deviation_in_range(expected)
    for folder in ("moe", "target"):
        loaded = load_whole(llamoe.LlamoeForCausalLM, tmp_path / folder, dtype=torch.float32)
        assert max_abs(run(loaded, input_ids=some_ids()), expected) < TOLERANCE


@pytest.mark.parametrize(("name", "form"), zip(CASES, FORMS, strict=True), ids=words)
def test_merged_heads(name, form, source_of, tmp_path):
    """Merging equal heads changes nothing."""
    case, (_, expected) = CASES[name], source_of(name, torch.float32)
    large, state = case.make(num_key_value_heads=6), case.make().state_dict()
    for key, tensor in state.items():
        if (".k_proj." in key or ".v_proj." in key) and "vision_model" not in key:
            state[key] = tensor.unflatten(0, (2, -1)).repeat_interleave(3, 0).flatten(0, 1)
    large.load_state_dict(state)
    large.save_pretrained(tmp_path / "source")
    merge_kv_heads(tmp_path / "source", tmp_path / "merged", kv_heads=2)
    convert(tmp_path / "merged", tmp_path / "target", **form)
    for folder in ("merged", "target"):
        loaded = load_whole(case.model_class, tmp_path / folder)
        assert max_abs(run(loaded, **case.inputs()), expected) < TOLERANCE


def test_assembled(tmp_path):
    decoder = TEXT.make()
    decoder.save_pretrained(tmp_path / "decoder", layout="stock")
    save_tokenizer(tmp_path / "decoder")
    tower = randomize(open_clip_tower(image_size=56, patch_size=14))
    config = open_clip_config(image_size=56, patch_size=14)
    write_open_clip(tmp_path / "tower", visual_state(tower), config)
    assemble(tmp_path / "decoder", tmp_path / "tower", tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "target", experts="split")
    whole, target = (
        load_whole(llamoe.LlamoeForConditionalGeneration, tmp_path / name, dtype=torch.float32)
        for name in ("whole", "target")
    )
    expected = run(decoder, input_ids=some_ids())
    given = run(target, input_ids=some_ids())
    assert max_abs(given[..., : expected.shape[-1]], expected) < TOLERANCE
    ids = some_ids()
    ids[:, 4 : 4 + target.config.vision_config.tokens_per_tile] = target.config.image_token_index
    pictures = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(5))
    assert torch.equal(
        run(target, input_ids=ids, pixel_values=pictures), run(whole, input_ids=ids, pixel_values=pictures)
    )


def save_tokenizer(folder, size=83):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"word{index}": index for index in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def test_the_tower_of_a_model_whose_experts_are_split(tmp_path):
    pictures = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(5))
    model = CASES["LlamoeForConditionalGeneration"].make()
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "split", experts="split")
    loaded = llamoe.LlamoeVisionModel.from_pretrained(tmp_path / "split")
    with torch.no_grad():
        given, expected = (part(pictures).last_hidden_state for part in (loaded, model.vision_model))
    assert torch.equal(given, expected)


# Forms other than that of tests/conversion/meta.
META_FORMS = [("Llama-3", FORMS[1]), ("Llama-4-Scout", FORMS[2]), ("Llama-4-Maverick", FORMS[3])]


@pytest.mark.parametrize(("name", "form"), META_FORMS, ids=words)
def test_through_metas_format_and_back(name, form, tmp_path):
    case = META_CASES[name]
    weights, (tokens, tiles) = case.weights(), case.inputs()
    source, expected = case.write(tmp_path / "meta", weights, 1), case.logits(weights, tokens, tiles)
    convert(source, tmp_path / "hf", **form)
    convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=case.counts[-1])
    convert(tmp_path / "back", tmp_path / "again", **form)
    if not case.is_llama4:
        model_class = llamoe.LlamoeDenseForCausalLM
    else:
        model_class = llamoe.LlamoeForConditionalGeneration if case.has_images else llamoe.LlamoeForCausalLM
    inputs = {"input_ids": tokens} | ({} if tiles is None else {"pixel_values": tiles})
    assert deviation_in_range(expected)
    for folder in ("hf", "again"):
        assert has_split_experts(tmp_path / folder) == (case.is_llama4 and form["experts"] == "split")
        loaded = load_whole(model_class, tmp_path / folder, dtype=torch.float32)
        assert max_abs(run(loaded, **inputs).double(), expected) < TOLERANCE
