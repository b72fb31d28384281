"""Test lm-eval with our folders; its command line runs in `test_pages.py`.

Its numbers must equal those of the model's own logits and of `generate`, and those of transformers' class with the same
weights. The tasks are written here, so nothing is downloaded.
"""

import importlib.util
import json
import math
import os
import random
import sys

import pytest
import torch
from support.models import draw, stock_dense_config, stock_mixtral_config, stock_text_config
from support.paths import EXAMPLES, TINY
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import llamoe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install lm-eval"
    ),
]

# Number of tokens of the small model's tokenizer.
VOCABULARY = 784
MODELS = {
    "dense": (llamoe.LlamoeDenseForCausalLM, stock_dense_config(vocab_size=VOCABULARY)),
    "mixtral": (llamoe.LlamoeMixtralForCausalLM, stock_mixtral_config(vocab_size=VOCABULARY)),
    "llama4": (llamoe.LlamoeForCausalLM, stock_text_config(vocab_size=VOCABULARY)),
}
NEW_TOKENS = 6
SENTENCE = "a red circle on the left and a blue square on the right. "
# The last text is longer than the 256 positions of these models, so that lm-eval scores it in two windows.
TEXTS = ["there are three shapes.", SENTENCE, SENTENCE * 22]
QUESTIONS = [
    ("what is in the picture? a", ["red circle", "blue square on the left", "star"]),
    ("the circle is", ["green", "not red"]),
    ("how many", ["shapes are there?", "stars do you see"]),
    ("there is", ["one", "nothing to the left of the star"]),
]
MARK = "<|image|>"


def write_task(folder, name, output_type, rows, **fields):
    """Write an lm-eval task as a YAML file (JSON is valid YAML), and its data."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    kwargs = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({**task, "output_type": output_type, **fields}))


def metrics(*names):
    return [{"metric": name} for name in names]


def write_text_tasks(folder, answers):
    """Write tasks of choices, of whole texts, and of questions with the right `answers`."""
    folder.mkdir()
    rows = [
        {"question": question, "choices": choices, "label": len(choices) - 1}
        for question, choices in QUESTIONS
    ]
    write_task(
        folder,
        "choice",
        "multiple_choice",
        rows,
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{label}}",
        metric_list=metrics("acc"),
    )
    for name, texts in (("text", TEXTS[:1]), ("long_text", TEXTS[1:])):
        write_task(
            folder,
            name,
            "loglikelihood_rolling",
            [{"text": text} for text in texts],
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=metrics("bits_per_byte"),
        )
    write_task(
        folder,
        "answer",
        "generate_until",
        [{"question": row[0], "answer": answer} for row, answer in zip(QUESTIONS, answers, strict=True)],
        doc_to_text="{{question}}",
        # Passed unchanged, since a chat template would strip it.
        doc_to_target="answer",
        generation_kwargs={"until": ["<|eot|>"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
        metric_list=metrics("exact_match"),
    )


def evaluate(folder, tasks, model="hf", batch_size=3, options=None, **kwargs):
    """Return lm-eval's results for tasks, and the model's outputs for each document."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = sorted(path.stem for path in tasks.glob("*.yaml"))
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(folder), "dtype": "float32", "device": "cpu", **(options or {})},
        tasks=names,
        # Without lm-eval's own tasks, which are thousands of files to read.
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
        **kwargs,
    )
    given = {
        name: [document["filtered_resps"] for document in sorted(documents, key=lambda it: it["doc_id"])]
        for name, documents in found["samples"].items()
    }
    return found["results"], given


@torch.no_grad()
def log_probabilities(model, ids):
    """Return each token's log-probability after the tokens before it, `[T - 1]`."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def score_choices(model, tokenizer):
    """Return the log-likelihood of each choice after its question."""
    scores = []
    for question, choices in QUESTIONS:
        start = len(tokenizer(question)["input_ids"])
        whole = [tokenizer(f"{question} {choice}")["input_ids"] for choice in choices]
        scores.append([log_probabilities(model, ids)[start - 1 :].sum().item() for ids in whole])
    return scores


@torch.no_grad()
def answer(model, tokenizer, question):
    ids = tokenizer(question, return_tensors="pt")["input_ids"]
    given = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return tokenizer.decode(given[: given.index(end)] if end in given else given, skip_special_tokens=True)


def make_model(name):
    model_class, config = MODELS[name]
    return draw(model_class, llamoe.from_stock(config))


def write_answered_tasks(folder, model, tokenizer):
    """Write the tasks so that every other answer of the model is right; return the model's answers."""
    answers = [answer(model, tokenizer, question) for question, _ in QUESTIONS]
    write_text_tasks(folder, [given if i % 2 else "no." for i, given in enumerate(answers)])
    return answers


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module", params=list(MODELS))
def text_model(request, tokenizer, tmp_path_factory):
    """Save a small random model in both layouts, with tasks of which it answers every other question rightly."""
    place = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    for layout in ("llamoe", "stock"):
        model.save_pretrained(place / layout, layout=layout)
        tokenizer.save_pretrained(place / layout)
    return model, place, write_answered_tasks(place / "tasks", model, tokenizer)


def check_text_results(results, model, tokenizer):
    """Compare each number of `results` with the one computed here."""
    scores = score_choices(model, tokenizer)
    best = [max(range(len(row)), key=row.__getitem__) for row in scores]
    right = [number == len(row) - 1 for number, row in zip(best, scores, strict=True)]
    assert results["choice"]["acc,none"] == sum(right) / len(right)
    # A text of one window; how the longer ones are cut is lm-eval's, and the same as for stock's class.
    ids = [tokenizer.bos_token_id, *tokenizer(TEXTS[0])["input_ids"]]
    per_byte = -log_probabilities(model, ids).sum().item() / len(TEXTS[0].encode()) / math.log(2)
    assert results["text"]["bits_per_byte,none"] == pytest.approx(per_byte, rel=1e-5)
    assert results["answer"]["exact_match,none"] == 0.5


def test_text_scores_are_the_models_and_stocks(text_model, tokenizer):
    model, place, answers = text_model
    results, given = evaluate(place / "llamoe", place / "tasks")
    check_text_results(results, model, tokenizer)
    for row, expected in zip(given["choice"], score_choices(model, tokenizer), strict=True):
        # lm-eval computes batches of three, this test single rows, so that sums have other orders. Measured: 3e-6.
        assert [score for score, _ in row] == pytest.approx(expected, abs=5e-5)
    assert [row[0] for row in given["answer"]] == answers

    stock_class = type(AutoModelForCausalLM.from_pretrained(place / "stock"))
    assert stock_class.__module__.startswith("transformers.")
    stock_results, stock_given = evaluate(place / "stock", place / "tasks")
    assert stock_given["answer"] == given["answer"]
    tasks = ("choice", "text", "long_text")
    for mine, its in zip(
        *(sum((side[task] for task in tasks), []) for side in (given, stock_given)), strict=True
    ):
        scores = [each[0] if isinstance(each, tuple) else each for each in mine]
        its_scores = [each[0] if isinstance(each, tuple) else each for each in its]
        assert scores == pytest.approx(its_scores, rel=1e-6, abs=5e-5)
    assert stock_results["choice"]["acc,none"] == results["choice"]["acc,none"]
    with llamoe.adopt():
        assert evaluate(place / "stock", place / "tasks")[1] == given


def write_picture_task(folder, count):
    """Write questions about drawn pictures, with their right answers, to a parquet file."""
    from datasets import Dataset, Image

    sys.path.insert(0, str(EXAMPLES / "tiny"))
    try:
        import questions
        import shapes
    finally:
        sys.path.pop(0)
    folder.mkdir()
    rows, rng = [], random.Random(5)
    kinds = ("colour", "count", "caption", "exists")
    for number in range(count):
        scene = shapes.draw_scene(rng, count=2)
        question, answer, _ = questions.ask(rng, scene, (kinds[number % len(kinds)],))
        path = folder / f"{number}.png"
        scene.picture.save(path)
        rows.append({"picture": str(path), "question": question, "answer": answer})
    # Whatever the model says, one answer is wrong.
    rows[-1]["answer"] = "i am red."
    Dataset.from_list(rows).cast_column("picture", Image()).to_parquet(folder / "pictures.parquet")
    task = {
        "task": "pictures",
        "dataset_path": "parquet",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "pictures.parquet")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_image": ["picture"],
        "doc_to_text": "<image>{{question}}",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["<|eot|>"], "max_gen_toks": 40, "do_sample": False},
        "metric_list": metrics("exact_match"),
    }
    (folder / "pictures.yaml").write_text(json.dumps(task))
    return rows


def ask_directly(model, processor, rows, template=True):
    """Return the model's answers without lm-eval; without `template` the question is the whole prompt."""
    answers = []
    for row in rows:
        picture = llamoe.read_picture(row["picture"])
        prompt = f"{MARK}{row['question']}"
        if template:
            content = [{"type": "image"}, {"type": "text", "text": row["question"]}]
            prompt = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        inputs = processor(text=[prompt], images=[[picture]], return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            given = model.generate(**inputs, do_sample=False)
        given = given[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(given).split("<|eot|>")[0])
    return answers


@pytest.fixture(scope="module")
def tiny():
    model = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    return model, AutoProcessor.from_pretrained(TINY)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Return a folder with the task of pictures, and its rows."""
    folder = tmp_path_factory.mktemp("task") / "pictures"
    return folder, write_picture_task(folder, 5)


def test_answers_about_pictures_are_the_models_and_stocks(tiny, pictures, tmp_path):
    model, processor = tiny
    tasks, rows = pictures
    expected = ask_directly(model, processor, rows)
    right = [given == row["answer"] for given, row in zip(expected, rows, strict=True)]
    # The model answers most of these rightly, so a picture in the wrong row would show.
    assert sum(right) >= 3 and not right[-1]
    model.save_pretrained(tmp_path / "stock", layout="stock")
    processor.save_pretrained(tmp_path / "stock")
    for folder in (TINY, tmp_path / "stock"):
        results, given = evaluate(folder, tasks, "hf-multimodal", 2, apply_chat_template=True)
        assert [row[0] for row in given["pictures"]] == expected
        assert results["pictures"]["exact_match,none"] == sum(right) / len(right)


def test_prompts_without_template_need_a_marker(tiny, pictures):
    model, processor = tiny
    tasks, rows = pictures
    _, given = evaluate(TINY, tasks, "hf-multimodal", 2, {"image_string": MARK})
    assert [row[0] for row in given["pictures"]] == ask_directly(model, processor, rows, template=False)
    with pytest.raises(ValueError, match=r"\[0, 0\] image markers"):
        evaluate(TINY, tasks, "hf-multimodal", 2)


def test_adapters_and_packed_weights_are_evaluated(tiny, tokenizer, tmp_path):
    from peft import PeftModel, get_peft_model

    model, processor = tiny
    write_text_tasks(tmp_path / "tasks", ["no."] * len(QUESTIONS))
    for name in ("text", "long_text", "answer"):
        os.remove(tmp_path / f"tasks/{name}.yaml")
    plain = score_choices(model, tokenizer)

    base = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    adapted = get_peft_model(base, llamoe.lora_config(base, r=4))
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    expected = score_choices(PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval(), tokenizer)
    options = {"peft": str(tmp_path / "adapter")}
    _, given = evaluate(TINY, tmp_path / "tasks", "hf-multimodal", 3, options)
    check_scores(given["choice"], expected, plain)

    packed = AutoModelForImageTextToText.from_pretrained(
        TINY, dtype=torch.float32, quantization_config=llamoe.QuantizationConfig("int8")
    )
    packed.save_pretrained(tmp_path / "packed")
    processor.save_pretrained(tmp_path / "packed")
    expected = score_choices(packed, tokenizer)
    # lm-eval's `hf` loads only the text model of the folder.
    _, given = evaluate(tmp_path / "packed", tmp_path / "tasks")
    # lm-eval computes log-probabilities in the model's dtype, here bfloat16. Measured: 0.6 % of a score.
    for row, scores in zip(given["choice"], expected, strict=True):
        assert [score for score, _ in row] == pytest.approx(scores, rel=0.03)


def check_scores(given, expected, other):
    """Check that scores are the expected ones, and not those of the unquantized weights."""
    for row, scores, plain in zip(given, expected, other, strict=True):
        assert [score for score, _ in row] == pytest.approx(scores, abs=5e-5)
        assert [score for score, _ in row] != pytest.approx(plain, abs=1e-2)
