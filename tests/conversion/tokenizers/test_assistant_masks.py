"""Which tokens of a chat the model wrote itself, by the marks in the templates that are written into folders."""

import pytest
from support.tokenizer_files import sentencepiece_model, write_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import llamoe
from llamoe.conversion import tokenizers as conversion
from llamoe.conversion.tokenizers.chat_templates import llama_2, llama_3, llama_4, mistral

LLAMA_3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
LLAMA_4 = ["<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|image|>"]
FAMILIES = {
    "llama-2": (llama_2(), ["<s>", "</s>"]),
    "llama-3": (llama_3(), LLAMA_3),
    "llama-4": (llama_4(images=False), LLAMA_4),
    "llama-4 with pictures": (llama_4(images=True), LLAMA_4),
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 3}}}
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 'assistant'?"},
    {"role": "assistant", "content": "A role, in short."},
    {"role": "user", "content": "And twice?\n\nA role, in short."},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "Two of"}, {"type": "text", "text": " them; ä 図."}],
    },
]
TOOLS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": {"rain": True}},
    {"role": "assistant", "content": "It rains."},
]


def tokenizer_of(family):
    """One token a byte, besides the family's special tokens."""
    template, special = FAMILIES[family]
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1] if family == "llama-2" else special[3],
        extra_special_tokens=special,
        chat_template=template,
    )


def written(tokenizer, messages, **options):
    """The texts that the mask marks, one for each unbroken run of tokens."""
    given = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    runs, previous = [], 0
    for token, mark in zip(given["input_ids"], given["assistant_masks"], strict=True):
        if mark and not previous:
            runs.append([])
        if mark:
            runs[-1].append(token)
        previous = mark
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_the_tokens_that_end_them(family):
    tokenizer = tokenizer_of(family)
    end = tokenizer.eos_token
    answers = ["A role, in short.", "Two of them; ä 図."]
    around = " {} " if family == "llama-2" else "{}"
    assert written(tokenizer, TURNS) == [around.format(answer) + end for answer in answers]
    assert written(tokenizer, TURNS[:2]) == []
    if family != "llama-2":
        # The header that asks for an answer is not the model's.
        assert written(tokenizer, TURNS, add_generation_prompt=True) == [answer + end for answer in answers]


@pytest.mark.parametrize("family", ["llama-3", "llama-4", "llama-4 with pictures"])
def test_calls_of_tools_are_answers_and_results_are_not(family):
    tokenizer = tokenizer_of(family)
    end, more = FAMILIES[family][1][3:5]
    call = '{"type": "function", "name": "weather", "parameters": {"place": "Z\\u00fcrich", "days": 3}}'
    assert written(tokenizer, TOOLS) == [call + more, "It rains." + end]


PARTS = {"Hello world": ["Hello ", "world"], "  a\n\nb  ": ["  a\n", "\nb  "], " ": [" ", ""], "one": ["one"]}


@pytest.mark.parametrize("whole", PARTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_in_parts_is_the_text_in_one(family, whole):
    tokenizer = tokenizer_of(family)
    parts = [{"type": "text", "text": text} for text in PARTS[whole]]
    given, expected = (
        tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        for content in (parts, whole)
    )
    assert given == expected and whole.strip() in given


@pytest.mark.parametrize("template", [llama_2(), mistral(1), mistral(7), llama_4(images=True, calls=False)])
def test_calls_are_refused_where_they_are_not_written(template):
    tokenizer = tokenizer_of("llama-2")
    for messages in (TOOLS[:2], TOOLS[:1] + TOOLS[2:3]):
        with pytest.raises(Exception, match="message 2 "):
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


def test_llama_2_with_its_own_tokens(tmp_path):
    """SentencePiece joins the blank before an answer to its first word: both are what the model has to write."""
    spm = pytest.importorskip("sentencepiece", reason="SentencePiece models need the extra 'tokenizers'")
    lines = ["What is this? [INST] question [/INST] It is an answer of some words, and more."] * 40
    model = sentencepiece_model(lines, 320, hard_vocab_limit=False)
    pieces = spm.SentencePieceProcessor(model_proto=model)
    config = llamoe.LlamoeDenseConfig(
        vocab_size=pieces.vocab_size(), hidden_size=48, num_hidden_layers=1, num_attention_heads=6
    )
    files = conversion.hf_files_from_meta(model, config, family="llama-2", instruct=True)
    write_files(tmp_path, files, config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": "It is an answer."},
    ]
    given = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [token for token, mark in zip(given["input_ids"], given["assistant_masks"], strict=True) if mark]
    # As Meta's code encodes question and answer together: what follows the question's tokens.
    question = pieces.encode("[INST] What is this? [/INST]")
    whole = pieces.encode("[INST] What is this? [/INST] It is an answer. ")
    assert whole[: len(question)] == question
    assert marked == [*whole[len(question) :], pieces.eos_id()]
    assert given["input_ids"] == [pieces.bos_id(), *whole, pieces.eos_id()]
