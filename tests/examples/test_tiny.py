"""The demo checkpoint in `examples/llamoe-tiny` sees what it says, and the example scripts do as they promise."""

import hashlib
import random
import re
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageDraw
from support.paths import EXAMPLES
from transformers.modeling_outputs import BaseModelOutputWithPooling

from llamoe.conversion.tokenizers.chat_templates import llama_4

FOLDER = EXAMPLES / "llamoe-tiny"
PICTURE = EXAMPLES / "pictures" / "two_shapes.png"
CSS = {
    "red": (255, 0, 0),
    "green": (0, 128, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "orange": (255, 165, 0),
    "purple": (128, 0, 128),
    "black": (0, 0, 0),
}


@pytest.fixture(scope="module")
def tiny():
    """The committed model and its processor, through the Auto classes, as saved (bfloat16)."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import llamoe

    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype="auto").eval()
    assert isinstance(model, llamoe.LlamoeForConditionalGeneration)
    return model, AutoProcessor.from_pretrained(FOLDER)


def draw(shape: str, colour: str, box: tuple[int, int, int, int], picture: Image.Image) -> None:
    """Plain PIL, nothing shared with the code that drew the training pictures."""
    left, top, right, bottom = box
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=CSS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=CSS[colour])
    else:
        pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=CSS[colour])


def test_the_folder_is_small_and_complete():
    """Under 8 MB, weights in bfloat16, and every file that the Auto classes read."""
    from safetensors import safe_open

    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "processor_config.json"}
    assert needed | {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(files)
    assert sum(files.values()) < 8_000_000
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}


def test_its_template_is_the_one_that_its_generator_writes(tiny):
    """It refuses tools, calls of tools and films, and writes the rest as Llama 4's does."""
    template = tiny[1].chat_template
    assert template == llama_4(images=True, calls=False)
    turn = {"role": "user", "content": "hello"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    film = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what?"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for messages, options, message in (
        ([turn], {"tools": tools}, "of tools"),
        ([turn, call], {}, "message 2"),
        ([turn, {"role": "tool", "content": "5"}], {}, "message 2"),
        ([film], {}, "type video"),
    ):
        with pytest.raises(Exception, match=message):
            tiny[1].apply_chat_template(messages, **options)
    chat = [{"role": "system", "content": "be short"}, turn, {"role": "assistant", "content": " hi "}]
    whole = llama_4(images=True)
    assert tiny[1].apply_chat_template(chat) == tiny[1].apply_chat_template(chat, chat_template=whole)


def test_it_is_a_mixture_of_the_llama_4_kind(tiny):
    """Dense and mixture layers in turn, a layer without rotary positions, a tower, Llama 4's stop tokens."""
    model, processor = tiny
    text = model.config.text_config
    assert text.num_local_experts > 1 and 0 < len(text.moe_layers) < text.num_hidden_layers
    assert 0 in text.no_rope_layers and 1 in text.no_rope_layers
    stops = [
        processor.tokenizer.convert_ids_to_tokens(token) for token in model.generation_config.eos_token_id
    ]
    assert set(stops) == {"<|end_of_text|>", "<|eom|>", "<|eot|>"}
    patch = processor.tokenizer.convert_tokens_to_ids("<|patch|>")
    assert patch == model.config.image_token_id


@pytest.mark.slow
@pytest.mark.parametrize(("wording", "least"), [("trained", 0.93), ("near", 0.93), ("far", 0.92)])
def test_it_answers_about_pictures_it_has_not_seen(tiny, wording, least):
    """Exact answers on fresh scenes, in trained wordings and in those of other people."""
    import examine

    measured = examine.accuracy(*tiny, examine.draw_cases(100, wording, seed=f"test {wording}"))
    assert measured["all"] >= least, measured


@pytest.mark.slow
def test_without_its_picture_it_cannot_know(tiny):
    """The score comes from the pixels: with the pictures handed to the wrong questions it falls apart."""
    import examine

    cases = examine.draw_cases(90, "trained", seed="shuffled")
    # What asks for no yes or no, and for no small number, cannot be guessed.
    guessed = ("count", "count_of", "exists", "confirm", "relation", "beside", "where")
    cases = [
        case for case in cases if case.kind not in guessed and not case.answer.startswith("i do not see")
    ]
    pictures = [case.picture for case in cases[1:] + cases[:1]]
    answers = examine.answer(*tiny, pictures, [case.question for case in cases])
    assert sum(answer == case.answer for answer, case in zip(answers, cases, strict=True)) < 0.3 * len(cases)


def test_no_part_of_a_mixture_is_idle(tiny):
    """Every expert of every mixture layer gets a part of the tokens that is worth its weights."""
    import examine

    shares = examine.expert_shares(*tiny, examine.draw_cases(24, "near", seed="experts"))
    assert len(shares) == len(tiny[0].config.text_config.moe_layers)
    assert all(0.1 < share < 0.5 for layer in shares for share in layer), shares


def test_it_answers_about_pictures_drawn_by_other_code(tiny):
    """Pure CSS colours on white, on canvases of several sizes, drawn without `shapes.py`."""
    import examine

    rng = random.Random("plain")
    pictures, questions, expected = [], [], []
    for number in range(42):
        shape, colour = ("circle", "square", "triangle")[number % 3], list(CSS)[number % len(CSS)]
        size = rng.choice([(224, 224), (300, 200), (128, 128), (200, 240), (400, 400)])
        side = round(min(size) * rng.uniform(0.3, 0.7))
        left, top = rng.randrange(size[0] - side), rng.randrange(size[1] - side)
        pictures.append(Image.new("RGB", size, "white"))
        draw(shape, colour, (left, top, left + side, top + side), pictures[-1])
        question, answer = (
            (f"What colour is the {shape}?", f"the {shape} is {colour}."),
            (f"Which shape is {colour}?", f"the {shape} is {colour}."),
            ("How many shapes are there?", "there is one shape."),
            (
                f"Is there a {colour} {shape}?",
                f"yes, there is a {colour} {shape}.".replace("a orange", "an orange"),
            ),
        )[number % 4]
        questions.append(question)
        expected.append(answer)
    answers = examine.answer(*tiny, pictures, questions)
    wrong = [row for row in zip(questions, expected, answers, strict=True) if row[1] != row[2]]
    assert len(wrong) <= 0.05 * len(answers), wrong


def test_it_tells_left_from_right(tiny):
    """The same two shapes, swapped, swap the caption."""
    import examine

    captions = []
    for first, second in (("red circle", "blue square"), ("blue square", "red circle")):
        picture = Image.new("RGB", (300, 200), "white")
        for name, left in ((first, 30), (second, 190)):
            draw(*reversed(name.split()), (left, 60, left + 80, 140), picture)
        captions += examine.answer(*tiny, [picture], ["Describe the picture."])
    assert captions == [
        "a red circle on the left and a blue square on the right.",
        "a blue square on the left and a red circle on the right.",
    ]


def test_upper_case_changes_nothing(tiny):
    """The tokenizer lower-cases, so a shouted question has the same tokens."""
    tokenizer = tiny[1].tokenizer
    assert (
        tokenizer("WHAT Colour IS THE CIRCLE?")["input_ids"]
        == tokenizer("what colour is the circle?")["input_ids"]
    )
    assert (
        tokenizer.decode(tokenizer("naïve 图 \t😀", add_special_tokens=False)["input_ids"]) == "naïve 图 \t😀"
    )


def test_training_sees_what_the_processor_makes(tiny):
    """Pixels of a training batch equal those of the processor."""
    import dialogues
    import train

    _, processor = tiny
    batch = dialogues.draw_batch(dialogues.Job(replace(train.ANSWERING, batch_size=5), seed=3, first=0))
    pixels = train.normalise(processor.image_processor, batch.resized)
    pictures = [dialogues.draw_scene(3, number).picture for number in range(5)]
    direct = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels, direct.to(pixels.dtype))


@torch.no_grad()
def test_packed_chats_are_learnt_as_alone():
    """The loss of packed rows is that of every chat by itself, as the processor writes it with its picture."""
    import dialogues
    import train

    processor = train.build_processor(train.build_tokenizer(400, train.write_corpus(3, scenes=20)))
    model = train.build_model(processor.tokenizer).double().eval()
    stage = replace(train.ANSWERING, batch_size=3, chats=(1, 2, 1, 3, 1))
    batch = dialogues.draw_batch(dialogues.Job(stage, seed=3, first=0))
    features = model.get_image_features(
        train.normalise(processor.image_processor, batch.resized).double()
    ).pooler_output
    rng = random.Random(4)
    rows, shown = dialogues.write_rows(processor, dialogues.picture_text(processor), batch.chats, rng)
    # Both ways of placing a picture occur.
    assert 3 < len(shown) < 3 * (1 + len(stage.chats))
    seen = BaseModelOutputWithPooling(pooler_output=features[shown])
    loss = model(**rows, mm_encoder_outputs={"image": seen}, use_cache=False).loss

    rng, losses, answers = random.Random(4), [], []
    for picture, chat in ((picture, chat) for picture, about in enumerate(batch.chats) for chat in about):
        comes_first = rng.random() < 6 / 7
        messages = []
        for turn, (question, answer) in enumerate(chat):
            content = [{"type": "text", "text": question}]
            if turn == 0:
                content.insert(0 if comes_first else 1, {"type": "image", "image": Image.new("RGB", (9, 9))})
            messages += [{"role": "user", "content": content}]
            messages += [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        learnt = inputs["assistant_masks"].bool()
        answers += processor.tokenizer.batch_decode(inputs["input_ids"][learnt].split(1))
        seen = BaseModelOutputWithPooling(pooler_output=features[picture : picture + 1])
        logits = model(inputs["input_ids"], mm_encoder_outputs={"image": seen}, use_cache=False).logits
        losses.append(
            torch.nn.functional.cross_entropy(logits[0, :-1], inputs["input_ids"][0, 1:], reduction="none")[
                learnt[0, 1:]
            ]
        )
    labels = rows["labels"][rows["labels"] != -100]
    assert processor.tokenizer.batch_decode(labels.split(1)) == answers
    # The model's own loss is in float32.
    assert abs(loss - torch.cat(losses).mean()) < 2e-6


@pytest.mark.slow
def test_training_runs_from_nothing(tmp_path, monkeypatch, capsys):
    """Six steps of small batches pass through every stage and write a complete folder; loss and accuracies are told."""
    import train

    for name in ("SEEING", "ANSWERING"):
        monkeypatch.setattr(train, name, replace(getattr(train, name), batch_size=3))
    corpus = train.write_corpus(0, scenes=20)
    monkeypatch.setattr(train, "write_corpus", lambda seed: corpus)
    for name, value in {"OUT": tmp_path / "tiny", "STEPS": 6, "EXAMINED": 2}.items():
        monkeypatch.setattr(train, name, value)
    train.main()
    printed = capsys.readouterr()
    assert all(stage in printed.err for stage in ("seeing", "answering", "loss="))
    assert "unusual ones" in printed.out
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {path.name for path in FOLDER.iterdir()}


def test_the_model_is_what_its_log_says(tiny):
    """The log's last lines name the weights; the whole training took no longer than is promised."""
    import train

    log = (FOLDER / "training.log").read_text()
    steps, seed, minutes = map(int, re.match(r"(\d+) steps from seed (\d+), (\d+) minutes\n", log).groups())
    assert (steps, seed) == (train.STEPS, train.SEED) and minutes <= 90
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert log.endswith(f"\nsha256 of model.safetensors: {digest}\n")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "a red circle on the left and a blue square on the right."),
        ([FOLDER, PICTURE, "What is on the left?"], "a red circle."),
    ],
)
def test_the_demo_prints_the_answer_and_nothing_else(words, answer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["describe_image.py", *map(str, words)])
    runpy.run_path(str(EXAMPLES / "describe_image.py"))
    assert capsys.readouterr().out.strip() == answer
