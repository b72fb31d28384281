"""Converted tokenizers of Mistral AI give mistral-common's ids for texts and conversations, by AutoTokenizer.

The conversations were also compared with mistral-common 1.13 on its own tokenizer files: v1, v2, v3, v7 and tekken
(v3, v7, v11, v13) gave the same ids.
"""

import base64
import json

import pytest
from support.mistral_folders import MIXTRAL, MistralCase
from support.tokenizer_files import sentencepiece_model, some_lines
from transformers import AutoTokenizer

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert

spm = pytest.importorskip("sentencepiece", reason="SentencePiece models need the extra 'tokenizers'")
tiktoken = pytest.importorskip("tiktoken", reason="is compared with")

SIZE = 613
CONTROLS = {
    1: [],
    3: ["[INST]", "[/INST]", "[TOOL_CALLS]"],
    7: ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
}
TEXTS = ["hello", " hello", "  two  spaces ", "", "\n\n x", "Grüße, 世界! 🙂", "12345 67", "a\tb", "tail "]
CONVERSATIONS = [
    [("user", "hello there")],
    [("system", "be brief"), ("user", "hello")],
    [("system", "be\nbrief "), ("user", " the first "), ("assistant", " an answer  "), ("user", "next\n")],
    [("user", "the first"), ("assistant", "answer"), ("user", "next"), ("assistant", "end")],
]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def model_of(version):
    """Train a small model of Mistral AI's kind, with the control pieces of a version."""
    lines = some_lines(400, 900) + TEXTS[:1] * 9
    return sentencepiece_model(lines, SIZE, control_symbols=CONTROLS[version])


def tekken(version="v3", **changes):
    """Make a small tekken.json with two more ranks than the model uses, and special tokens that it does not name."""
    words = [b"th", b"he", b" t", b"the", b" the", b"in", b"an", b"\xc3\xbc", b"  ", b"unused", b"too"]
    tokens = [bytes([byte]) for byte in range(256)] + words
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) - 2 + 30,
            "default_num_special_tokens": 30,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    return {**content, **changes}


def converted(tmp_path, files, size, name="mistral-instruct"):
    """Convert a folder of Mistral AI with these files to a Hugging Face folder."""
    case = MistralCase(name, {"vocab_size": size})
    source = case.write(tmp_path / name)
    for file, content in files.items():
        (source / file).write_bytes(content)
    convert(source, tmp_path / "hf")
    return tmp_path / "hf"


def expected_ids(encode, ids, version, conversation):
    """Return mistral-common's ids: each part is encoded alone; `[INST]` and eos are tokens, in version 1 text."""
    system = next((text for role, text in conversation if role == "system"), None)
    turns = [(role, text) for role, text in conversation if role != "system"]
    users = [index for index, (role, _) in enumerate(turns) if role == "user"]
    result = [ids["<s>"]]
    if system is not None and version >= 7:
        result += [ids["[SYSTEM_PROMPT]"], *encode(system), ids["[/SYSTEM_PROMPT]"]]
    for index, (role, text) in enumerate(turns):
        if role == "assistant":
            result += [*encode(text if version == 1 else text.rstrip(" ")), ids["</s>"]]
            continue
        if system is not None and version < 7 and index == users[0 if version == 1 else -1]:
            text = f"{system}\n\n{text}"
        if version == 1:
            result += encode(f"[INST] {text} [/INST]")
        else:
            result += [ids["[INST]"], *encode(text), ids["[/INST]"]]
    return result


def check_conversations(loaded, encode, version):
    ids = loaded.get_vocab()
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": text} for role, text in conversation]
        ids_of_prompt = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(ids_of_prompt) == expected_ids(encode, ids, version, conversation), conversation
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
        assert list(loaded.apply_chat_template(messages, return_dict=False)) == list(ids_of_prompt)


@pytest.mark.parametrize("version", CONTROLS)
def test_sentencepiece_models_give_the_same_ids_and_conversations(version, tmp_path):
    model = model_of(version)
    name = f"tokenizer.model.v{version}"
    folder = converted(tmp_path, {name: model}, SIZE)
    loaded, reference = AutoTokenizer.from_pretrained(folder), spm.SentencePieceProcessor(model_proto=model)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == [1, *reference.encode(text)], text
    check_conversations(loaded, reference.encode, version)
    assert (loaded.bos_token_id, loaded.eos_token_id, len(loaded)) == (1, 2, SIZE)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "temperature" not in json.loads((folder / "generation_config.json").read_text())
    assert (folder / "tokenizer.model").read_bytes() == model


@pytest.mark.parametrize("version", ["v3", "v7", "v13"])
def test_tekken_gives_tiktokens_ids_behind_the_special_tokens(version, tmp_path):
    content = tekken(version)
    size = content["config"]["default_vocab_size"]
    folder = converted(tmp_path, {"tekken.json": json.dumps(content).encode()}, size)
    loaded = AutoTokenizer.from_pretrained(folder)
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in content["vocab"][: size - 30]}
    reference = tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(text):
        return [30 + rank for rank in reference.encode(text)]

    for text in [*TEXTS, " the then  thin", "unused too"]:
        assert loaded(text)["input_ids"] == [1, *encode(text)], text
        assert loaded.decode(encode(text)) == text
    check_conversations(loaded, encode, int(version[1:]))
    assert loaded.convert_ids_to_tokens([0, 1, 2, 11, 17, 29]) == [
        "<unk>",
        "<s>",
        "</s>",
        "<pad>",
        "[SYSTEM_PROMPT]",
        "<SPECIAL_29>",
    ]
    assert (loaded.pad_token_id, len(loaded)) == (11, size)
    assert json.loads((folder / "tekken.json").read_text()) == content


def test_special_tokens_that_tekken_names_have_their_names(tmp_path):
    named = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "<pad>"]
    content = tekken("v15", special_tokens=[{"rank": i, "token_str": name} for i, name in enumerate(named)])
    size = content["config"]["default_vocab_size"]
    loaded = AutoTokenizer.from_pretrained(
        converted(tmp_path, {"tekken.json": json.dumps(content).encode()}, size)
    )
    assert loaded.convert_tokens_to_ids([*named, "<SPECIAL_7>"]) == list(range(8))
    # Conversations of this version begin with settings, for which there is no template.
    assert loaded.chat_template is None


def test_of_several_tokenizers_the_newest_is_taken(tmp_path):
    models = {version: model_of(version) for version in (1, 3)}
    files = {"tokenizer.model": models[1], "tokenizer.model.v1": models[1], "tokenizer.model.v3": models[3]}
    folder = converted(tmp_path, files, SIZE)
    assert (folder / "tokenizer.model").read_bytes() == models[3]
    assert not (folder / "tokenizer.model.v1").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"config": 3}', "nor a tekken.json"),
        (tekken(config=3), "is not a tekken.json"),
        (tekken(vocab=tekken()["vocab"][:-3]), "not one token for each rank from 0 to 264"),
        (tekken(vocab=tekken()["vocab"][1:]), "not one token for each rank"),
        (tekken(special_tokens=[{"rank": 1, "token_str": "<s>"}]), "lacks one of <s>, </s>"),
        (tekken(), "30 special tokens and 265 others, and LlamoeMixtralConfig.vocab_size is 53"),
    ],
    ids=["another-file", "no-config", "cut", "shifted", "no-end", "another-model"],
)
def test_a_tekken_that_is_damaged_or_another_models_is_refused(content, words, tmp_path):
    source = MIXTRAL.write(tmp_path / "mistral")
    (source / "tekken.json").write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(source, tmp_path / "hf")
    assert str(caught.value).startswith(str(source / "tekken.json"))
    assert not (tmp_path / "hf").exists()
