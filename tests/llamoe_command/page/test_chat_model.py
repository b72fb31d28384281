"""Test the stream of a model's answer, and the record of its experts."""

import json
import re
import threading
import time
from importlib.util import find_spec

import pytest
import torch
from PIL import Image
from support import chat_folders
from support.chat_folders import ABOUT_THREE, ABOUT_TWO, QUESTION, THREE, TWO
from support.paths import TINY
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerFast,
)

import llamoe

# Looked up without importing it, which takes seconds: these tests only need gradio to be installed.
if find_spec("gradio") is None:
    pytest.skip("the page is not installed: pip install 'llamoe[page]'", allow_module_level=True)

from llamoe_command.page import chat_model
from llamoe_command.page.chat_model import ChatModel
from llamoe_command.page.expert_record import layer_names
from llamoe_command.page.expert_view import overlay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny():
    return ChatModel(TINY)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    return ChatModel(chat_folders.write_llama(tmp_path_factory.mktemp("chat") / "llama"))


def ask(text, *pictures):
    content = [{"type": "image", "image": llamoe.read_picture(path)} for path in pictures]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def generated(chat, messages, **options):
    """Return the inputs, the model, and the ids of prompt and answer from `generate`, without the page."""
    processor = AutoProcessor.from_pretrained(TINY)
    model = AutoModelForImageTextToText.from_pretrained(TINY)
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    ).to(dtype=model.dtype)
    return inputs, model, model.generate(**inputs, do_sample=False, max_new_tokens=64)


def test_the_stream_grows_to_the_answer_of_generate(tiny, monkeypatch):
    monkeypatch.setattr(chat_model, "_PAUSE", 0)
    *pieces, (text, outcome) = list(tiny.answer(ask(QUESTION, THREE), 64, 0))
    inputs, _, row = generated(tiny, ask(QUESTION, THREE))
    expected = tiny.tokenizer.decode(row[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == expected
    assert len(pieces) > 3
    assert all(text.startswith(piece) and none is None for piece, none in pieces)
    assert "".join(outcome.record.answer) == expected


def test_the_record_has_the_experts_that_the_routers_chose(tiny):
    """Compare with the router logits of one forward pass over prompt and answer."""
    record = list(tiny.answer(ask(QUESTION, THREE), 64, 0))[-1][1].record
    inputs, model, row = generated(tiny, ask(QUESTION, THREE))
    inputs = {**inputs, "input_ids": row[:, :-1], "attention_mask": torch.ones_like(row[:, :-1])}
    inputs["pixel_values"] = inputs["pixel_values"].float()
    with torch.no_grad():
        logits = torch.stack(model.float()(**inputs, output_router_logits=True).router_logits)
    # The page's model has the folder's bfloat16, in which another expert may be chosen if two logits nearly tie.
    assert (record.experts[..., 0] == logits.argmax(-1)).float().mean() > 0.97
    layers = len(model.config.text_config.moe_layers)
    assert record.layers == [f"layer {index}" for index in model.config.text_config.moe_layers]
    assert record.experts.shape == (layers, row.shape[1] - 1, 1)
    is_image = row[0, :-1] == model.config.image_token_id
    assert torch.equal(record.is_image, is_image)
    for layer in range(layers):
        assert torch.equal(record.patches(layer).flatten(), record.experts[layer, is_image, 0][-16:])


def test_shares_of_each_kind_of_token_add_up_to_one(tiny):
    record = list(tiny.answer(ask(QUESTION, TWO), 64, 0))[-1][1].record
    shares = record.shares()
    assert list(shares) == ["picture", "prompt", "answer"]
    for share in shares.values():
        assert share.shape == (len(record.layers), record.num_experts)
        assert torch.allclose(share.sum(-1), torch.ones(len(record.layers)))
    expected = record.experts[1, record.is_image, 0].bincount(minlength=record.num_experts)
    assert torch.allclose(shares["picture"][1], expected / expected.sum())


def test_of_several_pictures_the_last_is_shown(tiny):
    record = list(tiny.answer(ask(QUESTION, TWO, THREE), 8, 0))[-1][1].record
    alone = list(tiny.answer(ask(QUESTION, THREE), 8, 0))[-1][1].record
    assert record.picture.tobytes() == alone.picture.tobytes()
    assert record.side == 4 and record.is_image.sum() == 2 * alone.is_image.sum()
    assert torch.equal(record.patches(1).flatten(), record.experts[1, record.is_image, 0][-16:])


def test_a_question_without_a_picture_has_a_record_without_one(tiny):
    record = list(tiny.answer(ask("Who are you?"), 16, 0))[-1][1].record
    assert record.picture is None
    assert list(record.shares()) == ["prompt", "answer"]


def test_tokens_of_the_answer_are_named_with_their_experts(tiny):
    record = list(tiny.answer(ask(QUESTION, TWO), 5, 0))[-1][1].record
    answered = record.answered(0)
    assert [token for token, _ in answered] == record.answer and len(answered) == 5
    # The last token was generated, but no forward pass computed it.
    assert [len(experts) for _, experts in answered] == [1, 1, 1, 1, 0]
    expert, score = answered[2][1][0]
    assert (expert, score) == (
        record.experts[0, record.num_prompt + 2, 0],
        record.scores[0, record.num_prompt + 2, 0],
    )


def test_a_mixture_with_two_experts_a_token_is_recorded(tmp_path):
    chat = ChatModel(chat_folders.write_mixtral(tmp_path / "mixtral"))
    assert type(chat.model) is llamoe.LlamoeMixtralForCausalLM
    record = list(chat.answer([{"role": "user", "content": "Hello there"}], 6, 0))[-1][1].record
    assert record.experts.shape[2] == 2
    assert torch.allclose(record.scores.sum(-1), torch.ones(record.scores.shape[:2]), atol=1e-2)


def test_temperature_samples(endless):
    torch.manual_seed(0)
    greedy, again, *sampled = (
        list(endless.answer([{"role": "user", "content": "Hello"}], 12, temperature))[-1]
        for temperature in (0, 0, 1.5, 1.5)
    )
    assert greedy[0] == again[0]
    assert len({greedy[0], *(text for text, _ in sampled)}) == 3
    # The model has no experts.
    assert greedy[1].record is None


def test_an_answer_ends_at_the_chosen_length_or_the_last_position(endless, monkeypatch):
    messages = [{"role": "user", "content": "a " * 200}]
    length = len(endless.processor.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    assert length < endless.max_tokens == 256
    rows, generate = [], endless.model.generate
    monkeypatch.setattr(
        endless.model, "generate", lambda **options: rows.append(generate(**options)) or rows[-1]
    )
    for most in (4096, 3):
        list(endless.answer(messages, most, 0))
    assert [row.shape[1] for row in rows] == [256, length + 3]
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model has 256 positions"):
        list(endless.answer([{"role": "user", "content": "a " * 300}], 4, 0))


def test_of_a_picture_in_tiles_the_whole_is_shown():
    """A wide picture has three tiles of its own image tokens, and after them the whole picture, which is shown."""
    chat = ChatModel(TINY)
    chat.processor.image_processor.max_patches = 4
    wide = Image.new("RGB", (336, 112), "red")
    wide.paste("blue", (224, 0, 336, 112))
    messages = [
        {"role": "user", "content": [{"type": "image", "image": wide}, {"type": "text", "text": QUESTION}]}
    ]
    record = list(chat.answer(messages, 4, 0))[-1][1].record
    assert record.is_image.sum() == 4 * 16
    size = record.picture.width
    blue = [record.picture.getpixel((x, size // 2))[2] > 128 for x in (size // 8, size // 2, size * 7 // 8)]
    assert blue == [False, False, True]
    tokens = record.is_image.nonzero()[-16:, 0]
    assert torch.equal(record.patches(1).flatten(), record.experts[1, tokens, 0])
    image, masks = overlay(record, 1)
    assert image.width == image.height >= 480
    assert sum((mask > 0).sum() for mask, _ in masks) == image.width * image.height


def test_an_outcome_has_speed_and_cache_hits(tmp_path):
    folder = chat_folders.write_mixtral(tmp_path / "mixtral")
    chat = ChatModel(folder, "auto", {"": "cpu", "experts": "disk"}, 1_000_000)
    outcome = list(chat.answer([{"role": "user", "content": "Hello there"}], 6, 0))[-1][1]
    assert outcome.misses > 0
    said = r"6 tokens, the first after [\d.]+ s, then [\d.e+]+ a second, "
    said += f"{outcome.hits / (outcome.hits + outcome.misses):.0%}"
    assert re.match(rf"{said} of the chosen experts were in memory$", str(outcome))
    assert str(chat_model.Outcome(None, [1.0, 1.5])) == "1 token, the first after 0.5 s"
    assert str(chat_model.Outcome(None, [1.0])) == ""


def test_an_adapter_is_switched_on_and_off(tmp_path):
    folder = chat_folders.write_mixtral(tmp_path / "mixtral")
    question = [{"role": "user", "content": "Hello there"}]
    plain = list(ChatModel(folder).answer(question, 9, 0))[-1][0]
    chat = ChatModel(folder, adapter=chat_folders.write_adapter(folder, tmp_path / "adapter"))
    on, off, again = (
        list(chat.answer(question, 9, 0, is_adapted=is_adapted))[-1][0] for is_adapted in (True, False, True)
    )
    assert on == again != off == plain and chat.adapter == "adapter"


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "answer"]


def wait_until_idle():
    """Wait until no thread computes an answer: a stopped model still finishes its current token."""
    for _ in range(100):
        if not workers():
            return
        time.sleep(0.1)
    raise AssertionError(workers())


def test_closing_the_stream_stops_the_model(endless):
    answer = endless.answer([{"role": "user", "content": "Hello"}], 200, 0)
    next(answer)
    assert len(workers()) == 1
    answer.close()
    wait_until_idle()


def test_questions_wait_for_each_other(tiny):
    """Otherwise the record of one answer would contain experts of another."""
    first, second = tiny.answer(ask(QUESTION, THREE), 64, 0), tiny.answer(ask(QUESTION, TWO), 64, 0)
    next(first)
    assert next(second)[0] in ("", "a")
    records = [list(answer)[-1][1].record for answer in (second, first)]
    for record, expected in zip(records, (ABOUT_TWO, ABOUT_THREE), strict=True):
        assert "".join(record.answer) == expected
        assert record.experts.shape[1] == record.num_prompt + len(record.answer)


def test_an_error_of_the_model_is_raised_in_the_reader(endless, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(endless.model, "generate", fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        list(endless.answer([{"role": "user", "content": "Hello"}], 8, 0))
    monkeypatch.undo()
    assert list(endless.answer([{"role": "user", "content": "Hello"}], 8, 0))[-1][0]


def test_a_folder_with_beams_in_its_settings_is_streamed(endless, monkeypatch):
    monkeypatch.setattr(endless.model.generation_config, "num_beams", 3)
    monkeypatch.setattr(chat_model, "_PAUSE", 0)
    assert len(list(endless.answer([{"role": "user", "content": "Hello"}], 8, 0))) > 3


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},
        {"return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 3},
        {"num_beams": 2},
    ],
    ids=str,
)
def test_settings_of_a_folder_change_no_record(tmp_path, settings):
    """With these generation settings `generate` would make several forward passes for a token, or return no ids."""
    folder = chat_folders.write_mixtral(tmp_path / "mixtral")
    question = [{"role": "user", "content": "Hello there"}]
    expected = list(ChatModel(folder).answer(question, 6, 0))[-1]
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    text, outcome = list(ChatModel(folder).answer(question, 6, 0))[-1]
    assert text == expected[0]
    assert torch.equal(outcome.record.experts, expected[1].record.experts)


def test_tokens_keep_the_space_that_a_tokenizer_strips_from_the_first(tmp_path):
    """The tokenizers of LLaMA 1 and 2, Mistral and Mixtral strip the leading space of the first token."""
    folder = chat_folders.write_mixtral(tmp_path / "mixtral")
    words = {word: index for index, word in enumerate(["<unk>", "\u2581the", "\u2581cat", "\u2581sat", "s"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    chat = ChatModel(folder)
    assert chat.tokenizer.decode([1]) == "the"
    assert chat._texts([1, 2, 3, 4], 1) == [" cat", " sat", "s"]


def test_a_folder_without_a_head_is_refused(tmp_path):
    """Its answers would come from random weights."""
    folder = chat_folders.write_mixtral(tmp_path / "mixtral")
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(llamoe.CheckpointError, match="lm_head"):
        ChatModel(folder)


def test_layers_are_named_in_their_order():
    config = llamoe.LlamoeTextConfig(num_hidden_layers=4, moe_layers=[3, 1])
    assert layer_names(config) == ["layer 1", "layer 3"]


def test_a_base_model_continues_the_last_text(tmp_path):
    folder = chat_folders.write_llama(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    chat = ChatModel(folder)
    assert not chat.knows_conversations
    text = list(chat.answer([{"role": "user", "content": "a red circle"}], 5, 0))[-1][0]
    inputs = chat.tokenizer("a red circle", return_tensors="pt")
    row = chat.model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert text == chat.tokenizer.decode(row[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
