"""Read Meta's or Mistral AI's tokenizer, compare it with the model, and make a Hugging Face folder's files from it.

Files are dictionaries from names to bytes; nothing is written to disk. They include the original tokenizer, so that a
conversion back to Meta's format gets it byte by byte.

tokenizer_config.json names transformers' general tokenizer class, which uses tokenizer.json as it is. `LlamaTokenizer`
would build normalizer and pre-tokenizer anew when it loads, and give other ids.
"""

from typing import Any

from ...configuration import LlamoeConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from . import chat_templates, sentencepiece_models, tekken, tiktoken_tables
from .processors import processor_files
from .source_tokenizer import SourceTokenizer
from .tiktoken_tables import SPECIAL_TOKENS

# The context length of LLaMA 1. Only this tells it from Llama 2; it has no models that were tuned for chats.
_LLAMA_1_CONTEXT = 2048


def check_tokenizer(
    content: bytes, config: Any = None, *, family: str | None = None, origin: str = "tokenizer.model"
) -> SourceTokenizer:
    """Read a tokenizer: a SentencePiece model, a tiktoken table of ranks, or a tekken.json.

    Args:
        content: the file's content.
        config: a configuration of llamoe, with whose `vocab_size` the number of tokens is compared; None for no
            comparison.
        family: of a SentencePiece model: "llama-1", "llama-2" or "mistral". None tells LLaMA 1 from Llama 2 by
            `max_position_embeddings`. Other kinds of files show their family themselves.
        origin: the file's name, for errors.

    Raises:
        CheckpointError: the file is damaged, or its number of tokens is not `config.vocab_size`.
    """
    text = getattr(config, "text_config", config)
    kind = kind_of(content, origin)
    if kind == "tiktoken":
        ranks = tiktoken_tables.read(content, origin)
        return tiktoken_tables.of_family(ranks, _family_of_table(len(ranks), text, origin), content)
    if kind == "tekken":
        tokenizer, file = tekken.read(content, origin), "tekken.json"
        specials = len(tokenizer.special_ids)
        sizes = f"has {specials} special tokens and {tokenizer.size - specials} others"
    else:
        if family is None:
            context = getattr(text, "max_position_embeddings", None)
            family = "llama-1" if context is not None and context <= _LLAMA_1_CONTEXT else "llama-2"
        tokenizer, file = sentencepiece_models.read(content, origin, family), "tokenizer.model"
        sizes = f"a SentencePiece model of {tokenizer.size} pieces"
    if text is not None and tokenizer.size != text.vocab_size:
        wanted = " (Llama 4 has a tiktoken table of ranks)" if text.model_type == "llamoe_text" else ""
        raise CheckpointError(
            f"{origin}: {sizes}, and {_rows(text)}. Take the {file} of this model's release{wanted}."
        )
    return tokenizer


def _rows(text: Any) -> str:
    return f"{type(text).__name__}.vocab_size is {text.vocab_size}"


def kind_of(content: bytes, origin: str) -> str:
    """Return the kind of a tokenizer file by its content: "sentencepiece", "tiktoken" or "tekken"."""
    if tiktoken_tables.looks_like_table(content):
        return "tiktoken"
    if content.startswith(b"{") and b'"token_bytes"' in content:
        return "tekken"
    # The first byte of a SentencePiece model in protobuf: the tag of its first piece.
    if content[:1] == b"\x0a":
        return "sentencepiece"
    what = "is empty" if not content else f"begins with {content[:20]!r}"
    raise CheckpointError(
        f"{origin}: {what}, which is neither a SentencePiece model (LLaMA 1 and 2, Mistral) nor a tiktoken table of "
        "ranks (Llama 3 and 4) nor a tekken.json (Mistral). Take the file of this model's release."
    )


def _family_of_table(ranks: int, text: Any, origin: str) -> str:
    """Tell Llama 3 from Llama 4 by the number of special tokens: embedding rows beyond the ranks."""
    if text is None:
        # The releases have 128000 and 200000 ranks.
        return "llama-3" if ranks < 160_000 else "llama-4"
    totals = {name: ranks + len(special) for name, special in SPECIAL_TOKENS.items()}
    for name, total in totals.items():
        if total == text.vocab_size:
            return name
    sizes = " or ".join(f"{total} ({name})" for name, total in totals.items())
    raise CheckpointError(
        f"{origin}: a tiktoken table of {ranks} ranks, with special tokens {sizes} tokens, and {_rows(text)}. Take the "
        "tokenizer.model of this model's release."
    )


def hf_files_from_meta(
    content: bytes,
    config: Any,
    *,
    instruct: bool | None = None,
    family: str | None = None,
    origin: str = "tokenizer.model",
) -> dict[str, bytes]:
    """Make a Hugging Face folder's files, without weights and config.json, from Meta's or Mistral AI's tokenizer.

    The tokenizer gives the ids of Meta's `encode(text, bos=True, eos=False)`, with one difference if there is a chat
    template: text that spells a special token (`</s>`, `<|eot|>`) becomes that token, since templates write special
    tokens as text. To encode such text as Meta does, pass `split_special_tokens=True` to the tokenizer. Without a
    template (LLaMA 1; Llama 2 and Mistral with `instruct=False`) this is the default.

    Args:
        content: the tokenizer's file: a SentencePiece model, a tiktoken table or a tekken.json.
        config: any configuration but a tower's; for a `LlamoeConfig` a processor is made, too.
        instruct: whether the model was tuned for chats. True writes the chat template, the tokens that end an answer,
            and the sampling settings of Meta's examples (temperature 0.6, top_p 0.9). None, unknown, omits the sampling
            settings. False, a base model, ends only at the end of text and, for Llama 2 and Mistral, has no template.
        family, origin: as in `check_tokenizer`.

    Raises:
        CheckpointError: for the reasons of `check_tokenizer`, or image tokens differ from the configuration's.
    """
    tokenizer = check_tokenizer(content, config, family=family, origin=origin)
    text = getattr(config, "text_config", config)
    template = _template(tokenizer, instruct, images=isinstance(config, LlamoeConfig))
    settings = {**tokenizer.settings(), "model_max_length": text.max_position_embeddings}
    if template is None and tokenizer.kind != "tiktoken":
        settings["split_special_tokens"] = True
    files = {
        "tekken.json" if tokenizer.kind == "tekken" else "tokenizer.model": tokenizer.content,
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": to_json(settings),
        "generation_config.json": _generation_config(tokenizer, instruct),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    if isinstance(config, LlamoeConfig):
        files.update(processor_files(config, files))
    return files


def _template(tokenizer: SourceTokenizer, instruct: bool | None, *, images: bool) -> str | None:
    if tokenizer.family == "llama-4":
        return chat_templates.llama_4(images=images)
    if tokenizer.family == "llama-3":
        return chat_templates.llama_3()
    if instruct is False or tokenizer.family == "llama-1":
        return None
    if tokenizer.family == "llama-2":
        return chat_templates.llama_2()
    is_written = tokenizer.version <= chat_templates.LAST_OF_MISTRAL
    return chat_templates.mistral(tokenizer.version) if is_written else None


def _generation_config(tokenizer: SourceTokenizer, instruct: bool | None) -> bytes:
    """Make generation_config.json; with `instruct` the model samples as in Meta's examples."""
    roles, ids = tokenizer.roles, tokenizer.special_ids
    eos = ids[roles["eos_token"]]
    if tokenizer.stops and instruct is not False:
        eos = [eos, *(ids[token] for token in tokenizer.stops)]
    content = {
        "bos_token_id": ids[roles["bos_token"]],
        "eos_token_id": eos,
        "pad_token_id": ids[roles["pad_token"]],
    }
    if instruct is True and tokenizer.family not in ("llama-1", "mistral"):
        content.update(do_sample=True, temperature=0.6, top_p=0.9)
    return to_json(content)
