"""An assembled model computes texts and pictures as decoder and tower did, answers prompts, and trains."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from open_clip.transformer import QuickGELU
from PIL import Image
from support.models import (
    draw,
    make_asymmetric,
    max_abs,
    stock_dense_config,
    stock_multimodal_config,
    stock_text_config,
)
from support.towers import open_clip_config, open_clip_tower, randomize, visual_state, write_open_clip
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from llamoe import LlamoeForConditionalGeneration
from llamoe.conversion.assemble import assemble
from llamoe.conversion.convert import convert
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.open import open_checkpoint
from llamoe.conversion.tokenizers import MULTIMODAL_TOKENS
from llamoe.conversion.upcycle import upcycle

TOLERANCE = 1e-5
WORDS = 83  # fewer tokens than the 101 rows of the embedding
PIXELS = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
PICTURE = Image.fromarray(np.random.default_rng(3).integers(0, 255, (70, 95, 3), dtype=np.uint8))


def save_tokenizer(folder, size=WORDS, **special):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"word{index}": index for index in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **special
    ).save_pretrained(folder)


def save_decoder(folder, family="dense", dtype=torch.float32, **config):
    """Save a decoder of transformers with a tokenizer, and return the decoder."""
    if family == "dense":
        model = LlamaForCausalLM(stock_dense_config(**config))
    else:
        model = Llama4ForCausalLM(stock_text_config(**config))
    model = make_asymmetric(model).to(dtype)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tower(path, image=48, act=torch.nn.GELU):
    """Write a folder of open_clip, and return its tower of 8 by 8 patches."""
    tower = randomize(open_clip_tower(act, image_size=image))
    write_open_clip(path, visual_state(tower), open_clip_config(act is QuickGELU, PIXELS, image_size=image))
    return tower


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Write a decoder and a tower of open_clip, in folders that no test changes; return folders and models."""
    root = tmp_path_factory.mktemp("parts")
    decoder, visual = save_decoder(root / "decoder"), save_tower(root / "tower")
    return SimpleNamespace(
        decoder=root / "decoder", tower=root / "tower", decoder_model=decoder, tower_model=visual
    )


def load(folder):
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval(), AutoProcessor.from_pretrained(folder)


def some_ids(size, rows=2, length=31):
    return torch.randint(3, size, (rows, length), generator=torch.Generator().manual_seed(5))


def prompt(processor, **options):
    question = [{"type": "text", "text": "word7 word8"}, {"type": "image", "image": PICTURE}]
    chat = [{"role": "user", "content": question}]
    return processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **options
    )


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids).logits


@pytest.mark.parametrize("family", ["dense", "text", "upcycled", "tied"])
def test_texts_give_the_decoders_logits_for_its_whole_vocabulary(parts, tmp_path, family, record_parity):
    source, decoder = parts.decoder, parts.decoder_model
    if family == "text":
        decoder = save_decoder(source := tmp_path / "decoder", "text")
    if family == "tied":  # logits of deviation about 1
        decoder = save_decoder(source := tmp_path / "decoder", tie_word_embeddings=True)
        with torch.no_grad():
            decoder.model.embed_tokens.weight.mul_(decoder.config.hidden_size**-0.5)
        decoder.save_pretrained(source)
    if family == "upcycled":
        upcycle(parts.decoder, source := tmp_path / "moe", experts=3, interleave=2)
    assemble(source, parts.tower, tmp_path / "out")

    model, _ = load(tmp_path / "out")
    assert type(model) is LlamoeForConditionalGeneration
    ids = some_ids(101)  # also rows without a token
    ours = logits(model, ids)
    assert ours.shape[-1] == 101 + len(MULTIMODAL_TOKENS)
    error = max_abs(ours[..., :101], logits(decoder, ids))
    record_parity(f"assembled, {family} decoder", type(decoder).__name__, "float32", error)
    assert error < TOLERANCE


def test_the_adapter_reads_what_open_clips_tower_gives(parts, tmp_path, record_parity):
    visual = save_tower(tmp_path / "tower", act=QuickGELU)
    report = assemble(parts.decoder, tmp_path / "tower", tmp_path / "out")
    assert any("visual_projection" in key for key in report.dropped)

    model, processor = load(tmp_path / "out")
    seen = []
    model.vision_model.layernorm_post.register_forward_hook(lambda *call: seen.append(call[2]))
    mean, std = (torch.tensor(values)[:, None, None] for values in PIXELS.values())
    raw = torch.rand(2, 3, 48, 48)
    settings = processor.image_processor
    our_mean, our_std = (
        torch.tensor(values)[:, None, None] for values in (settings.image_mean, settings.image_std)
    )
    assert torch.allclose(our_mean, mean)
    with torch.no_grad():
        model.get_image_features((raw - our_mean) / our_std)
        _, expected = visual((raw - mean) / std)
    error = max_abs(seen[0][:, :-1], expected)
    record_parity("assembled, MetaCLIP tower", "open_clip VisionTransformer", "float32", error)
    assert error < 2e-5


def test_three_commands_lead_to_a_model_that_answers_and_trains(tmp_path):
    decoder = save_decoder(tmp_path / "llama", pad_token_id=None)
    save_tower(tmp_path / "clip", act=QuickGELU)
    convert_vision(tmp_path / "clip", tmp_path / "tower")
    upcycle(tmp_path / "llama", tmp_path / "moe", experts=3)
    report = assemble(tmp_path / "moe", tmp_path / "tower", tmp_path / "out", max_tiles=4)
    fresh = next(note for note in report.notes if note.startswith("fresh"))
    assert "multi_modal_projector.linear_1.weight" in fresh and "vision_adapter.mlp.fc1.weight" in fresh

    model, processor = load(tmp_path / "out")
    inputs = prompt(processor)
    config = model.config
    ids = inputs["input_ids"][0]
    tiles = inputs["pixel_values"].shape[0]
    assert 1 < tiles <= 5 and inputs["pixel_values"].shape[1:] == (3, 48, 48)
    assert (ids == config.image_token_id).sum() == tiles * config.vision_config.tokens_per_tile == tiles * 16
    assert (ids == config.boi_token_id).sum() == (ids == config.eoi_token_id).sum() == 1
    assert ids.max() < config.text_config.vocab_size
    assert config.text_config.vocab_size == len(processor.tokenizer)
    answer = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert 1 <= answer.shape[1] - len(ids) <= 5

    # Texts without pictures, padded to a batch.
    old = AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert processor.tokenizer("word3 word9 other")["input_ids"] == old("word3 word9 other")["input_ids"]
    batch = processor.tokenizer(["word3", "word4 word5"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0, 0] == config.text_config.pad_token_id == processor.tokenizer.pad_token_id
    assert decoder.config.vocab_size <= config.text_config.pad_token_id
    assert model.generation_config.pad_token_id == processor.tokenizer.pad_token_id
    assert set(model.generation_config.eos_token_id) == {
        2, *processor.tokenizer.convert_tokens_to_ids(["<|eot|>", "<|eom|>"])
    }  # fmt: skip

    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == config.image_token_id, -100)
    model.train()(**inputs, labels=labels).loss.backward()
    for part in ("vision_adapter", "multi_modal_projector", "vision_model.model", "patch_embedding"):
        grads = [parameter.grad for name, parameter in model.named_parameters() if part in name]
        assert grads and all(grad.abs().max() > 0 for grad in grads), part


def test_rows_of_new_tokens_are_the_mean_of_the_old_ones(parts, tmp_path):
    decoder = save_decoder(tmp_path / "decoder", dtype=torch.bfloat16)
    assemble(tmp_path / "decoder", parts.tower, tmp_path / "out")
    result = open_checkpoint(tmp_path / "out")
    assert {tensor.dtype for tensor in result.tensors.values()} == {torch.bfloat16}  # the decoder's
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        old, new = decoder.state_dict()[key], result.tensors[f"language_model.{key}"].read()
        assert torch.equal(new[:101], old)
        mean = old[:WORDS].float().mean(0).bfloat16()
        assert len(new) > 101 and torch.equal(new[101:], mean.expand(len(new) - 101, -1))
    assert torch.equal(
        result.tensors["language_model.model.layers.1.feed_forward.up_proj.weight"].read(),
        decoder.model.layers[1].mlp.up_proj.weight,
    )


def test_what_is_fresh_follows_from_the_seed(parts, tmp_path):
    save_decoder(tmp_path / "decoder", initializer_range=0.05)
    drawn = []
    for seed in (0, 1):
        assemble(tmp_path / "decoder", parts.tower, tmp_path / str(seed), seed=seed)
        tensors = open_checkpoint(tmp_path / str(seed)).tensors
        keys = [f"vision_model.vision_adapter.mlp.fc{number}.weight" for number in (1, 2)]
        drawn.append([tensors[key].read() for key in [*keys, "multi_modal_projector.linear_1.weight"]])
    assert [tuple(tensor.shape) for tensor in drawn[0]] == [(72, 416), (72, 72), (72, 72)]
    for first, second, std in zip(*drawn, (0.02, 0.02, 0.05), strict=True):
        assert not torch.equal(first, second) and first.std().item() == pytest.approx(std, rel=0.05)


def test_an_odd_grid_asks_for_another_size_of_pictures(parts, tmp_path):
    save_tower(tmp_path / "tower", image=54)
    with pytest.raises(ValueError, match=r"image_size = 54.* picture has 9 by 9.*a multiple of 12"):
        assemble(parts.decoder, tmp_path / "tower", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assemble(parts.decoder, tmp_path / "tower", tmp_path / "out", image_size=48)
    model, processor = load(tmp_path / "out")
    inputs = prompt(processor)
    count = (inputs["input_ids"] == model.config.image_token_id).sum()
    assert count == 16 * len(inputs["pixel_values"])
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


def test_parts_of_a_multimodal_model_serve_as_decoder_and_as_tower(parts, tmp_path):
    whole = draw(Llama4ForConditionalGeneration, stock_multimodal_config({"head_dim": 12}))
    whole.save_pretrained(tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "meta", to="meta")
    save_tokenizer(tmp_path / "whole")
    report = assemble(tmp_path / "whole", parts.tower, tmp_path / "out")
    assert "multi_modal_projector.linear_1.weight" in report.dropped
    model, _ = load(tmp_path / "out")
    ids = some_ids(97)
    assert max_abs(logits(model, ids)[..., :101], logits(whole, ids)) < TOLERANCE

    # Llama 4's tower has an adapter, which is kept, and transformers can load the result.
    pixels = torch.randn(2, 3, 56, 56)
    for source in ("whole", "meta"):
        report = assemble(parts.decoder, tmp_path / source, tmp_path / f"of-{source}")
        assert sum("not part of the tower" in reason for reason in report.dropped.values()) > 20
        for model_class in (LlamoeForConditionalGeneration, Llama4ForConditionalGeneration):
            model = model_class.from_pretrained(tmp_path / f"of-{source}", dtype=torch.float32).eval()
            with torch.no_grad():
                features, expected = (part.vision_model(pixels).last_hidden_state for part in (model, whole))
            assert max_abs(features, expected) < TOLERANCE


def test_a_decoders_chat_template_and_settings_are_not_lost_silently(parts, tmp_path):
    shutil.copytree(parts.decoder, tmp_path / "decoder")
    save_tokenizer(tmp_path / "decoder", size=101, pad_token="word5")
    (tmp_path / "decoder/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    generation = {"bos_token_id": 1, "eos_token_id": [2, 9], "temperature": 0.7, "do_sample": True}
    (tmp_path / "decoder/generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "decoder/LICENSE").write_text("of the decoder")
    shutil.copytree(parts.tower, tmp_path / "tower")
    (tmp_path / "tower/LICENSE").write_text("of the tower")
    report = assemble(tmp_path / "decoder", tmp_path / "tower", tmp_path / "out")
    assert any("chat template" in note for note in report.notes)
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written["temperature"] == 0.7 and written["eos_token_id"][:2] == [2, 9]
    assert len(written["eos_token_id"]) == 4 and written["pad_token_id"] == 5
    text = open_checkpoint(tmp_path / "out").config.text_config
    assert (text.pad_token_id, text.vocab_size) == (5, 101 + len(MULTIMODAL_TOKENS))
    assert (tmp_path / "out/LICENSE").read_text() == "of the decoder"
    assert (tmp_path / "out/vision_LICENSE").read_text() == "of the tower"


@pytest.fixture(scope="module")
def others(parts, tmp_path_factory):
    """Write folders that are no decoder with a tokenizer, or no tower."""
    root = tmp_path_factory.mktemp("others")
    for kind in ("mistral", "ministral", "mixtral"):
        config = stock_dense_config(num_hidden_layers=2).to_dict() | {"model_type": kind, "sliding_window": 9}
        if kind == "ministral":
            config["layer_types"] = ["sliding_attention", "full_attention"]
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config)).save_pretrained(root / kind)
    convert_vision(parts.tower, root / "converted")
    shutil.copytree(parts.decoder, root / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    for name in ("decoder", "tower"):
        (root / name).symlink_to(getattr(parts, name))
    return root


@pytest.mark.parametrize(
    ("text", "vision", "options", "named"),
    [
        ("mistral", "tower", {}, "/mistral is a mistral"),
        ("ministral", "tower", {}, "/ministral is a ministral"),
        ("mixtral", "tower", {}, "/mixtral is a mixtral"),
        ("converted", "decoder", {}, "/converted is a vision tower"),
        ("decoder", "decoder", {}, "/decoder: is no vision tower but LLaMA"),
        ("decoder", "nothing", {}, "nothing: no such file"),
        ("bare", "tower", {}, r"tokenizer\.json: there is none, nor a tokenizer\.model"),
        ("decoder", "tower", dict(seed=-1), "seed=-1"),
        ("decoder", "tower", dict(max_tiles=0), "max_tiles=0"),
        ("decoder", "tower", dict(image_size=54), "image_size = 54"),
        ("decoder", "tower", dict(layout="stock"), "cannot compute with it"),
    ],
    ids=str,
)
def test_what_cannot_be_joined_is_refused(others, tmp_path, text, vision, options, named):
    with pytest.raises(ValueError, match=named):
        assemble(others / text, others / vision, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
