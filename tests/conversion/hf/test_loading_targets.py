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
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import llamoe
from llamoe.conversion import assemble, convert, convert_vision, merge_kv_heads, upcycle

CASES = {case.name: case for case in SHALLOW_MODELS if case.is_head}
TEXT = CASES["LlamoeForCausalLM"]
META_CASES = {
    case.name.replace(" ", "-"): case for case in (META_LLAMA_2, META_LLAMA_3, META_SCOUT, META_MAVERICK)
}
FORMS = [dict(experts=how, layout=kind) for how, kind in product(("fused", "split"), ("stock", "llamoe"))]


def words(value):
    """Ids of parameters among which are forms."""
    return "-".join(value.values()) if isinstance(value, dict) else None


for_forms = pytest.mark.parametrize("form", FORMS, ids=words)
# Without experts, both ways to write them are one.
IN_FORMS = [
    (name, form)
    for name, form in product(CASES, FORMS)
    if CASES[name].has_experts or form != dict(experts="split", layout="stock")
]
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


def conversions():
    """Every form in files of either size. A cast goes one way through all of them: those of small files have it."""
    for name, form in IN_FORMS:
        pairs = [(None, "5GB"), (None, "60KB"), ("bfloat16", "60KB")]
        if form == dict(experts="split", layout="llamoe"):
            pairs += [("bfloat16", "5GB"), ("float16", "5GB"), ("float16", "60KB")]
        for dtype, shard_size in pairs:
            yield name, dtype, shard_size, form


@pytest.mark.parametrize(("name", "dtype", "shard_size", "form"), list(conversions()), ids=words)
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


@for_forms
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


@pytest.fixture(scope="module")
def merged_of(tmp_path_factory):
    """Gives for the name of a case a folder of its model; each head stood there three times until they were merged."""

    @cache
    def merge(name):
        folder = tmp_path_factory.mktemp(f"merged {name}")
        large = CASES[name].make(num_key_value_heads=6)
        state = CASES[name].make().state_dict()
        for key, tensor in state.items():
            if ".k_proj." in key or ".v_proj." in key:
                if "vision_model" not in key:
                    state[key] = tensor.unflatten(0, (2, -1)).repeat_interleave(3, 0).flatten(0, 1)
        large.load_state_dict(state)
        large.save_pretrained(folder / "source")
        merge_kv_heads(folder / "source", folder / "merged", kv_heads=2)
        return folder / "merged"

    return merge


@pytest.mark.parametrize(("name", "form"), IN_FORMS, ids=words)
def test_merged_heads(name, form, source_of, merged_of, tmp_path):
    """Merging equal heads changes nothing."""
    case, merged, (_, expected) = CASES[name], merged_of(name), source_of(name, torch.float32)
    convert(merged, tmp_path / "target", **form)
    for folder in (merged, tmp_path / "target"):
        loaded = load_whole(case.model_class, folder)
        assert max_abs(run(loaded, **case.inputs()), expected) < TOLERANCE


@pytest.mark.parametrize("experts", ["fused", "split"])
def test_assembled(experts, tmp_path):
    decoder = TEXT.make()
    decoder.save_pretrained(tmp_path / "decoder", layout="stock")
    save_tokenizer(tmp_path / "decoder")
    tower = randomize(open_clip_tower(image_size=56, patch_size=14))
    config = open_clip_config(image_size=56, patch_size=14)
    write_open_clip(tmp_path / "tower", visual_state(tower), config)
    assemble(tmp_path / "decoder", tmp_path / "tower", tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "target", experts=experts)
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


def test_towers(tmp_path):
    """From open_clip and from transformers, and the tower of a multimodal checkpoint whose experts are split."""
    pictures = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(5))
    tower = randomize(open_clip_tower(image_size=56, patch_size=14))
    write_open_clip(tmp_path / "clip", visual_state(tower), open_clip_config(image_size=56, patch_size=14))
    convert_vision(tmp_path / "clip", tmp_path / "from-open-clip")
    loaded = load_whole(llamoe.LlamoeVisionModel, tmp_path / "from-open-clip")
    with torch.no_grad():
        expected = tower(pictures)[0]
        assert max_abs(loaded(pictures).pooler_output, expected) < TOLERANCE * expected.abs().max()

    stock = randomize(
        CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=56, patch_size=14, num_hidden_layers=2))
    )
    stock.save_pretrained(tmp_path / "stock")
    convert_vision(tmp_path / "stock", tmp_path / "from-clip")
    loaded = load_whole(llamoe.LlamoeVisionModel, tmp_path / "from-clip")
    with torch.no_grad():
        expected = stock(pictures).image_embeds
        assert max_abs(loaded(pictures).pooler_output, expected) < TOLERANCE * expected.abs().max()

    model = CASES["LlamoeForConditionalGeneration"].make()
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "split", experts="split")
    loaded = llamoe.LlamoeVisionModel.from_pretrained(tmp_path / "split")
    with torch.no_grad():
        given, expected = (part(pictures).last_hidden_state for part in (loaded, model.vision_model))
    assert torch.equal(given, expected)


@pytest.fixture(scope="module")
def meta_source_of(tmp_path_factory):
    """Gives for a model of Meta's its folder, and the logits of Meta's maths."""

    @cache
    def make(name):
        case = META_CASES[name]
        weights = case.weights()
        folder = case.write(tmp_path_factory.mktemp(name) / "meta", weights, 1)
        return folder, case.logits(weights, *case.inputs())

    return make


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name, form in product(META_CASES, FORMS)
        if META_CASES[name].is_llama4 or form != dict(experts="split", layout="stock")
    ],
    ids=words,
)
def test_through_metas_format_and_back(name, form, meta_source_of, tmp_path):
    case, (source, expected) = META_CASES[name], meta_source_of(name)
    tokens, tiles = case.inputs()
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
