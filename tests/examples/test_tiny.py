"""Test the small model in `examples/llamoe-tiny`: its folder, its answers about pictures, its demo and its training."""

import hashlib
import random
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageDraw
from support.paths import EXAMPLES

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
    """Load the committed model in its dtype, bfloat16, and its processor, with the Auto classes."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import llamoe

    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype="auto").eval()
    assert isinstance(model, llamoe.LlamoeForConditionalGeneration)
    return model, AutoProcessor.from_pretrained(FOLDER)


def draw(shape: str, colour: str, box: tuple[int, int, int, int], picture: Image.Image) -> None:
    """Draw a shape with PIL, and without the code that draws training pictures."""
    left, top, right, bottom = box
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=CSS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=CSS[colour])
    else:
        pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=CSS[colour])


def test_the_folder_is_small_and_complete():
    """The folder has under 8 MB, weights in bfloat16, and every file that the Auto classes read."""
    from safetensors import safe_open

    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "processor_config.json"}
    assert needed | {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(files)
    assert sum(files.values()) < 8_000_000
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}


def test_its_template_is_the_one_that_its_generator_writes(tiny):
    """The template refuses tools, tool calls and videos, and writes all other chats as Llama 4's template does."""
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
    """The model has dense and mixture layers, layers with and without rotary embedding, and Llama 4's stop tokens."""
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
def test_it_answers_about_pictures_it_has_not_seen(tiny):
    """Most answers about new pictures are exact; with the pictures of other questions most are wrong."""
    import examine

    examples = examine.draw_examples(280, seed="test")
    assert examine.accuracy(*tiny, examples)["all"] >= 0.93
    # Leave out kinds of questions whose answers can be guessed: small numbers, yes and no.
    examples = [example for example in examples if example[3] in ("caption", "colour", "shape", "which")]
    pictures = [example[0] for example in examples[1:] + examples[:1]]
    swapped = [(picture, *example[1:]) for picture, example in zip(pictures, examples, strict=True)]
    assert examine.accuracy(*tiny, swapped)["all"] < 0.3


@torch.no_grad()
def test_no_part_of_a_mixture_is_idle(tiny):
    """Every expert of every mixture layer computes between 5 and 50 % of the prompts' tokens."""
    import train

    model, processor = tiny
    scenes = train.draw_scenes(random.Random("experts"), 24)
    batch = processor.apply_chat_template(
        [train.write_chat(random.Random(number), scene, 1)[:1] for number, scene in enumerate(scenes)],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    ).to(model.dtype)
    load = model(**batch, output_expert_load=True).expert_load.float()
    shares = (load / load.sum(-1, keepdim=True)).tolist()
    assert len(shares) == len(model.config.text_config.moe_layers)
    assert all(0.05 < share < 0.5 for layer in shares for share in layer), shares


def test_it_answers_about_pictures_drawn_by_other_code(tiny):
    """The model knows pure CSS colours on white, in several sizes, drawn without `shapes.py`."""
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
    """If two shapes change places, so do their names in the caption."""
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


def test_only_answers_of_a_chat_are_learnt(tiny):
    """In chats with and without a picture, the labels are the answers with their end tokens."""
    import train

    scene = train.draw_scenes(random.Random(0), 1)[0]
    chats = [train.write_chat(random.Random(seed), scene, 2) for seed in range(60)]
    # A chat of one line has no picture.
    pictures = sum(len(chat) == 4 for chat in chats)
    assert 50 <= pictures < 60
    batch = train.collate(tiny[1], chats)
    assert batch["pixel_values"].shape[0] == pictures
    for row, chat in zip(batch["labels"], chats, strict=True):
        expected = "".join(message["content"][0]["text"] + "<|eot|>" for message in chat[1::2])
        assert tiny[1].decode(row[row != -100]) == expected


def test_parts_of_a_picture_are_named():
    """A red circle in the upper left of a wide picture is named in the first of the 16 parts alone."""
    import shapes
    import train

    item = shapes.Item("circle", "red", "on the left", 50, 50, 40)
    labels = train.label_parts(shapes.Scene(Image.new("RGB", (400, 200)), (item,)))
    here = [
        1 + names.index(word)
        for names, word in zip(train.NAMES, ("red", "circle", "on the left"), strict=True)
    ]
    assert labels[0] == here
    # The circle reaches other parts only with its edge.
    assert [number for number, label in enumerate(labels) if any(label)] == [0]


@pytest.mark.slow
def test_training_runs_from_nothing(tmp_path, monkeypatch, capsys):
    """Three steps of small batches in each stage write a complete folder."""
    import examine
    import train

    for name in ("SEEING", "ANSWERING"):
        monkeypatch.setattr(train, name, replace(getattr(train, name), steps=3, batch_size=3))
    monkeypatch.setattr(train, "OUT", tmp_path / "tiny")
    monkeypatch.setattr(examine, "COUNT", 7)
    train.main()
    printed = capsys.readouterr().out
    assert all(f"{stage} step     3  loss" in printed for stage in ("seeing", "answering"))
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {path.name for path in FOLDER.iterdir()}


def test_the_model_is_what_its_log_says():
    """The last line of the log has the hash of the committed weights."""
    log = (FOLDER / "training.log").read_text()
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
