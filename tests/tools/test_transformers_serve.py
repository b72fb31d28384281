"""Test `transformers serve` with our folders by the `openai` client: answers must be those of `generate`."""

import functools
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from support import programs
from support.documents import read
from support.paths import EXAMPLES, ROOT, TINY
from support.served import Server, asked, data_url, environment, python_arguments
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import llamoe

pytestmark = pytest.mark.slow

# Imported here, since importing it takes a second of each process that collects tests.
if find_spec("openai") is None or find_spec("fastapi") is None:
    pytest.skip("needs the extra serve: pip install -e '.[vision,serve]'", allow_module_level=True)

MODEL = "examples/llamoe-tiny"
WITH_FLAG = ["transformers", "serve", MODEL, "--trust-remote-code"]
WITH_IMPORT = "import llamoe; from transformers.cli.transformers import main; main()"
WITH_ADOPTION = "import llamoe; llamoe.adopt(); from transformers.cli.transformers import main; main()"
# By default its cache takes most of the machine's memory, and half a minute to allocate.
BATCHING = [
    "--continuous-batching", "--cb-num-blocks", "64", "--cb-block-size", "32", "--cb-max-batch-tokens", "256",
]  # fmt: skip
TWO_SHAPES = (EXAMPLES / "pictures/two_shapes.png").read_bytes()
PICTURES = {name: EXAMPLES / f"pictures/{name}.png" for name in ("two_shapes", "three_shapes")}
# Each question has its own picture.
QUESTIONS = [
    ("What is in the picture?", "two_shapes"),
    ("What is in the picture?", "three_shapes"),
    ("How many shapes are there?", "two_shapes"),
    ("How many shapes are there?", "three_shapes"),
    ("What colour is the circle?", "two_shapes"),
    ("Is there a star?", "three_shapes"),
    ("Where is the square?", "two_shapes"),
    ("Hello", None),
]
# No token ends an answer, so that its length is known.
ENDLESS = {"logit_bias": {"1": -100.0, "4": -100.0, "5": -100.0}}


class Client:
    """Asks a server's model with the `openai` client, without retries."""

    def __init__(self, server, model=MODEL):
        import openai

        self.model = model
        self.client = openai.OpenAI(
            base_url=server.address,
            api_key="none",
            max_retries=0,
            timeout=120,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def create(self, question, picture=None, **options):
        messages = asked(question, picture)
        return self.client.chat.completions.create(model=self.model, messages=messages, **options)

    def answer(self, question, picture=None, **options):
        return self.create(question, picture, **options).choices[0].message.content

    def pieces(self, question, picture=None, **options):
        stream = self.create(question, picture, stream=True, **options)
        return [piece for chunk in stream if (piece := chunk.choices[0].delta.content)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    server.start(WITH_FLAG)
    yield server
    server.stop()


@pytest.fixture
def client(server):
    return Client(server)


@pytest.fixture
def another_server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def by_itself():
    """Return the answer of `generate` in this process."""
    model = AutoModelForImageTextToText.from_pretrained(TINY)
    processor = AutoProcessor.from_pretrained(TINY)

    @functools.cache
    def answer(question, picture=None):
        pictures = [{"type": "image", "image": llamoe.read_picture(PICTURES[picture])}] if picture else []
        chat = [{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}]
        inputs = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
        return processor.decode(tokens, skip_special_tokens=True)

    return answer


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Save the language model of llamoe-tiny in its own folder."""
    folder = tmp_path_factory.mktemp("text")
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory):
    """Save llamoe-tiny in transformers' layout."""
    folder = tmp_path_factory.mktemp("stock")
    AutoModelForImageTextToText.from_pretrained(TINY).save_pretrained(folder, layout="stock")
    AutoProcessor.from_pretrained(TINY).save_pretrained(folder)
    return folder


def url_of(name):
    return data_url(PICTURES[name].read_bytes()) if name else None


def ask_all(client, questions, **options):
    """Return the answers of a server to clients that all ask at once."""
    with ThreadPoolExecutor(len(questions)) as threads:
        waiting = [
            threads.submit(client.answer, text, url_of(picture), **options) for text, picture in questions
        ]
        return [answer.result() for answer in waiting]


def test_answers_are_those_of_generate(client, by_itself):
    completion = client.create("What is in the picture?", data_url(TWO_SHAPES))
    assert completion.choices[0].message.content == "a red circle on the left and a blue square on the right."
    assert completion.choices[0].message.content == by_itself("What is in the picture?", "two_shapes")
    assert completion.choices[0].finish_reason == "stop"
    assert client.answer("Hello") == by_itself("Hello")
    cut = client.create("Hello", max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)


def test_a_stream_joins_to_the_same_answer(client, by_itself):
    for question, picture in QUESTIONS[0], QUESTIONS[-1]:
        pieces = client.pieces(question, url_of(picture))
        assert len(pieces) > 3
        assert "".join(pieces) == by_itself(question, picture)


def test_eight_clients_at_once_get_what_each_gets_alone(client, by_itself):
    alone = [by_itself(*question) for question in QUESTIONS]
    assert len(set(alone)) > 5
    assert ask_all(client, QUESTIONS) == alone


def test_hanging_up_frees_the_server(client, by_itself):
    """The next client gets its answer, which is that of `generate`."""
    # transformers ends generation when Python closes the stream's generator. If the client hangs up while a piece is
    # being sent, that may take minutes, so the number of tokens is limited.
    stream = client.create("Hello", stream=True, max_tokens=4_000, **ENDLESS)
    pieces = (chunk.choices[0].delta.content for chunk in stream)
    assert [next(pieces) for _ in range(20)]
    stream.close()
    assert client.answer("What is in the picture?", data_url(TWO_SHAPES)) == by_itself(*QUESTIONS[0])


def test_the_server_survives_an_unreadable_picture(client, server):
    from openai import APIError

    for options in ({}, {"stream": True}):
        with pytest.raises(APIError):
            client.create("What is in the picture?", data_url(b"I am a picture."), **options)
    assert "is not a picture, or of another format; expected a JPEG, PNG" in server.log.read_text()
    assert "red circle" in client.answer("What is in the picture?", data_url(TWO_SHAPES))


def test_untrusted_start_says_what_the_page_quotes(tmp_path):
    ended = programs.run(python_arguments(["transformers", "serve", MODEL]), ROOT, environment(tmp_path))
    assert ended.returncode == 1
    said = " ".join(ended.stderr.split())
    page = " ".join(line.lstrip("> ") for line in read("docs/serving.md").splitlines())
    for sentence in (
        f"ValueError: The repository {MODEL} contains custom code which must be executed to correctly load the model.",
        "Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
    ):
        assert sentence in said
        assert sentence in page


def test_llamoe_imported_first_needs_no_flag(another_server, by_itself, text_folder):
    another_server.start(["python", "-c", WITH_IMPORT, "serve", MODEL])
    client = Client(another_server)
    assert [client.answer(text, url_of(picture)) for text, picture in QUESTIONS] == [
        by_itself(*question) for question in QUESTIONS
    ]
    another_server.start(["python", "-c", WITH_IMPORT, "serve", str(text_folder)])
    assert Client(another_server, str(text_folder)).answer("Hello") == by_itself("Hello")


def test_continuous_batching_serves_pictures_one_by_one(another_server, by_itself):
    another_server.start([*WITH_FLAG, *BATCHING])
    assert ask_all(Client(another_server), QUESTIONS) == [by_itself(*question) for question in QUESTIONS]
    assert (
        "LlamoeForConditionalGeneration does not support continuous batching"
        in another_server.log.read_text()
    )


def test_adoption_serves_stock_folders_with_pictures_by_our_classes(another_server, stock_folder, by_itself):
    another_server.start(["python", "-c", WITH_ADOPTION, "serve", str(stock_folder), *BATCHING])
    client = Client(another_server, str(stock_folder))
    assert client.answer("What is in the picture?", data_url(TWO_SHAPES)) == by_itself(*QUESTIONS[0])
    # The server names the model's class nowhere else.
    assert "LlamoeForConditionalGeneration does not support" in another_server.log.read_text()


def test_adoption_does_not_reach_the_servers_text_models(text_folder, tmp_path):
    """The server takes their class from `transformers` by its name in config.json; docs/limits.md says so."""
    from transformers.cli.serving.model_manager import ModelManager

    AutoModelForCausalLM.from_pretrained(text_folder).save_pretrained(tmp_path, layout="stock")
    AutoTokenizer.from_pretrained(text_folder).save_pretrained(tmp_path)
    classes = {}
    with llamoe.adopt():
        for folder in (text_folder, tmp_path):
            manager = ModelManager(force_model=str(folder))
            (loaded,) = manager.loaded_models.values()
            classes[folder] = type(loaded.model).__name__
            manager.shutdown()
    assert classes == {text_folder: "LlamoeForCausalLM", tmp_path: "Llama4ForCausalLM"}
