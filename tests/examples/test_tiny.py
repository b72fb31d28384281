"""The demo checkpoint in `examples/llamoe-tiny` sees what it says, and the example scripts do as they promise."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from support import programs
from support.paths import EXAMPLES

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


@pytest.fixture(scope="module", autouse=True)
def _example_scripts_importable():
    """Scripts import their neighbours by plain name, as they do when run."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def tiny():
    """The committed model and its processor, through the Auto classes, as saved (bfloat16)."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import llamoe

    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype="auto").eval()
    assert isinstance(model, llamoe.LlamoeForConditionalGeneration)
    return model, AutoProcessor.from_pretrained(FOLDER)


def run(script: str, *arguments) -> subprocess.CompletedProcess:
    """Runs an example script in a process of its own."""
    return programs.run([EXAMPLES / script, *arguments])


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


@pytest.mark.parametrize(("phrasings", "least"), [("TRAINED", 0.95), ("HELD_OUT", 0.90)])
def test_it_answers_about_pictures_it_has_not_seen(tiny, phrasings, least):
    """Exact answers on fresh scenes, asked in trained words and in words kept from training."""
    import evaluate_tiny
    import questions

    cases = evaluate_tiny.held_out_cases(120, getattr(questions, phrasings), seed=f"test {phrasings}")
    measured = evaluate_tiny.accuracy(*tiny, cases)
    assert measured["all"] >= least, measured


def test_without_its_picture_it_cannot_know(tiny):
    """The score comes from the pixels: with the pictures handed to the wrong questions it falls apart."""
    import evaluate_tiny
    import questions

    cases = evaluate_tiny.held_out_cases(80, questions.TRAINED, seed="shuffled")
    cases = [case for case in cases if case.kind not in ("count", "exists", "where")]  # these can be guessed
    pictures = [case.picture for case in cases[1:] + cases[:1]]
    answers = evaluate_tiny.answer(*tiny, pictures, [case.question for case in cases])
    assert sum(answer == case.answer for answer, case in zip(answers, cases, strict=True)) < 0.3 * len(cases)


def test_it_answers_about_pictures_drawn_by_other_code(tiny):
    """Pure CSS colours on white, on canvases of several sizes, drawn without `shapes.py`."""
    import evaluate_tiny

    rng = random.Random("plain")
    pictures, questions, expected = [], [], []
    for number in range(84):
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
    answers = evaluate_tiny.answer(*tiny, pictures, questions)
    wrong = [row for row in zip(questions, expected, answers, strict=True) if row[1] != row[2]]
    assert len(wrong) <= 0.05 * len(answers), wrong


def test_it_tells_left_from_right(tiny):
    """The same two shapes, swapped, swap the caption."""
    import evaluate_tiny

    captions = []
    for first, second in (("red circle", "blue square"), ("blue square", "red circle")):
        picture = Image.new("RGB", (300, 200), "white")
        for name, left in ((first, 30), (second, 190)):
            draw(*reversed(name.split()), (left, 60, left + 80, 140), picture)
        captions += evaluate_tiny.answer(*tiny, [picture], ["Describe the picture."])
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


def test_held_out_phrasings_are_held_out():
    """Every kind has both lists, and even without case and marks they share no phrasing."""
    import questions

    for kind in questions.KINDS:
        trained, held_out = (
            {re.sub(r"[^a-z{} ]", "", phrasing.lower()) for phrasing in phrasings[kind]}
            for phrasings in (questions.TRAINED, questions.HELD_OUT)
        )
        assert trained and held_out and not trained & held_out


def test_training_sees_what_the_processor_makes():
    """Pixels and tokens of a training batch equal those of the processor, also behind an answer's prompt."""
    import train_tiny

    tokenizer = train_tiny.build_tokenizer(600, seed=3)
    processor = train_tiny.build_processor(tokenizer)
    batch = train_tiny.draw_batch(train_tiny.Job(train_tiny.TALKING, seed=3, first=0))
    pixels = train_tiny.normalise(processor.image_processor, batch.resized)
    scenes = [train_tiny.draw_scene(3, number) for number in range(len(batch.dialogues))]
    direct = processor.image_processor([scene.picture for scene in scenes], return_tensors="pt")[
        "pixel_values"
    ]
    assert torch.equal(pixels, direct.to(pixels.dtype))

    question, answer = batch.dialogues[0][0]
    picture_text = train_tiny.picture_text(processor)
    rows = train_tiny.write_rows(processor, picture_text, [[(question, answer)]], random.Random(0))
    content = [{"type": "image", "image": scenes[0].picture}, {"type": "text", "text": question}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )["input_ids"]
    assert torch.equal(rows["input_ids"][:, : prompt.shape[1]], prompt)
    learnt = rows["labels"][0][rows["labels"][0] != -100]
    assert tokenizer.decode(learnt) == f"{answer}<|eot|>"
    assert (rows["labels"][:, : prompt.shape[1]] == -100).all()


def test_training_runs_from_nothing(tmp_path):
    """Four steps pass through every stage and write a complete folder; loss and accuracies are printed."""
    result = run("train_tiny.py", "--steps", 4, "--evaluate", 2, "--out", tmp_path / "tiny")
    assert result.returncode == 0, result.stderr
    assert all(stage in result.stderr for stage in ("seeing", "talking", "answering", "loss="))
    assert "new phrasings" in result.stdout
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {path.name for path in FOLDER.iterdir()}


def test_the_demo_prints_the_answer_that_the_readme_shows():
    """`make demo` in one line: a picture, a question, a streamed answer and nothing else."""
    result = run(
        "describe_image.py", "--model", FOLDER, "--image", PICTURE, "--prompt", "What is in the picture?"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "a red circle on the left and a blue square on the right."


def test_options_of_the_demo(monkeypatch, capsys):
    """A marker says where the picture stands; the answer's length and the weights' type can be chosen."""
    import describe_image

    command = ["describe_image.py", "--model", str(FOLDER), "--image", str(PICTURE), "--device-map", "cpu"]
    command += ["--dtype", "float32", "--prompt", "What is on the left?<|image|>", "--max-new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", command)
    describe_image.main()
    assert capsys.readouterr().out.strip() == "a red circle"


def _truncated(folder: Path) -> Path:
    path = folder / "truncated.png"
    path.write_bytes(PICTURE.read_bytes()[: PICTURE.stat().st_size // 2])
    return path


def _text_model(folder: Path) -> Path:
    from transformers import LlamaConfig

    LlamaConfig().save_pretrained(folder / "text")
    return folder / "text"


def _no_config(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tmp: {"image": tmp / "none.png"}, "no such image"),
        (lambda tmp: {"image": _truncated(tmp)}, "cannot read the image"),
        (lambda tmp: {"image": __file__}, "cannot read the image"),
        (lambda tmp: {"model": tmp / "none"}, "no such model folder"),
        (lambda tmp: {"model": _no_config(tmp)}, "no config.json"),
        (lambda tmp: {"model": _text_model(tmp)}, "without a vision tower"),
        (lambda tmp: {"prompt": "<|image|> or <|image|>?"}, "2 <|image|> markers, the pictures given are 1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, change, message):
    """Found before the weights are read, without a traceback."""
    import describe_image

    def read_weights(*arguments, **options):
        raise AssertionError("the weights were read before the input was checked")

    monkeypatch.setattr(describe_image.AutoModelForImageTextToText, "from_pretrained", read_weights)
    arguments = {"model": FOLDER, "image": PICTURE, "prompt": "What is this?"} | change(tmp_path)
    command = [part for key, value in arguments.items() for part in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", ["describe_image.py", *command])
    with pytest.raises(SystemExit) as ending:
        describe_image.main()
    printed = capsys.readouterr()
    assert ending.value.code == 2
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1 and not printed.out


def test_a_missing_picture_ends_the_program_without_a_traceback():
    """The same, as a user meets it."""
    result = run("describe_image.py", "--model", FOLDER, "--image", "none.png")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "describe_image: no such image: none.png\n"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such model folder: {}"),
        (lambda path: path.write_text("hello"), "no such model folder: {}"),
        (
            lambda path: path.mkdir(),
            "{} has no config.json, so it is not a model folder; `llamoe convert` makes one",
        ),
    ],
    ids=["nothing", "file", "empty folder"],
)
def test_chat_tells_nothing_from_no_model(make, says, tmp_path, monkeypatch, capsys):
    import chat

    make(tmp_path / "nowhere")
    monkeypatch.setattr(sys, "argv", ["chat.py", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="2"):
        chat.main()
    assert capsys.readouterr().err == f"chat: {says.format(tmp_path / 'nowhere')}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--count", "0"], "argument --count: must be at least 1, not 0\n"),
        (["--model", "{}/none"], "evaluate_tiny: {}/none: no such folder, nor such a model in reach\n"),
        (["--model", "{}"], "evaluate_tiny: {}: .*\n"),
    ],
)
def test_what_cannot_be_evaluated_is_told_in_a_sentence(arguments, says, tmp_path, monkeypatch, capsys):
    import evaluate_tiny

    command = ["evaluate_tiny.py", *(argument.format(tmp_path) for argument in arguments)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        evaluate_tiny.main()
    printed = capsys.readouterr()
    assert re.search(says.format(tmp_path) + "$", printed.err) and not printed.out


def test_one_question_is_a_row_and_a_sum(monkeypatch, capsys):
    """Kinds that were not asked have no accuracy."""
    import evaluate_tiny

    monkeypatch.setattr(sys, "argv", ["evaluate_tiny.py", "--model", str(FOLDER), "--count", "1"])
    evaluate_tiny.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert "1 each" in head and len(rows) == 2
    assert rows[1].split()[0] == "all" and rows[0].split()[1:] == rows[1].split()[1:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], None),
        (["--steps", "0"], "--steps: must be at least 1, not 0"),
        (["--evaluate", "0"], "--evaluate: must be at least 1, not 0"),
        (["--start", "{}"], "--start: no such file: {}/tokenizer.json"),
    ],
)
def test_training_leaves_the_shipped_model_alone(arguments, says, tmp_path, monkeypatch, capsys):
    """Without `--out` it writes to a folder of its own; wrong arguments end it before an hour of training."""
    import train_tiny

    written = []
    monkeypatch.setattr(train_tiny, "train", lambda *_: None)
    monkeypatch.setattr(train_tiny.evaluate_tiny, "report", lambda folder, _: written.append(Path(folder)))
    monkeypatch.setattr(
        sys, "argv", ["train_tiny.py", *(argument.format(tmp_path) for argument in arguments)]
    )
    monkeypatch.chdir(tmp_path)
    if says is None:
        train_tiny.main()
        (folder,) = written
        assert FOLDER.name != folder.name and (tmp_path / folder / "config.json").is_file()
        return
    with pytest.raises(SystemExit, match="2"):
        train_tiny.main()
    assert says.format(tmp_path) in capsys.readouterr().err and not written


def test_the_answer_is_all_that_a_first_script_prints(tiny, recwarn, caplog):
    """The README's first snippet: nothing warns of lengths or of how pictures are read."""
    import logging

    model, processor = tiny
    transformers = logging.getLogger("transformers")
    transformers.addHandler(caplog.handler)
    content = [{"type": "image", "path": str(PICTURE)}, {"type": "text", "text": "What is in the picture?"}]
    try:
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        answer = model.generate(**inputs.to(dtype=model.dtype))[0, inputs["input_ids"].shape[1] :]
    finally:
        transformers.removeHandler(caplog.handler)
    assert processor.decode(answer).endswith("on the right.<|eot|>")
    assert not recwarn.list and not [record for record in caplog.records if record.levelno >= logging.WARNING]
