"""Meta's or Mistral AI's tokenizer to the files of a Hugging Face folder (tokenizer, chat, generation), and back.

Functions map file names to bytes and write nothing to disk. The original file stays in the folder, so that
the way back gives the same bytes.

The files name transformers' general tokenizer class, which uses tokenizer.json as it is. `LlamaTokenizer` rebuilds the
steps when it loads and gives other ids.
"""

from collections.abc import Mapping
from typing import Any

from ...configuration import LlamoeConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from . import chat_templates
from .check_tokenizer import check_tokenizer
from .processors import processor_files
from .source_tokenizer import SourceTokenizer
from .tiktoken_tables import SPECIAL_TOKENS
from .tokenizer_json import token_ids


def hf_files_from_meta(
    content: bytes,
    config: Any,
    *,
    instruct: bool | None = None,
    family: str | None = None,
    origin: str = "tokenizer.model",
) -> dict[str, bytes]:
    """Make a Hugging Face folder's files, without weights and config.json, from Meta's or Mistral AI's tokenizer.

    Ids are those of Meta's `encode(text, bos=True, eos=False)`, with one difference where a chat template exists: text
    that spells a special token (`</s>`, `<|eot|>`) becomes that token, since templates write them as text. Pass
    `split_special_tokens=True` to the tokenizer to encode such text as Meta does. Without a template (LLaMA 1, and
    Llama 2 with `instruct=False`) that is the default.

    Args:
        content: of a file: a SentencePiece model, a tiktoken table or a tekken.json.
        config: any but a tower's; a `LlamoeConfig` also gets a processor.
        instruct: whether the model was trained to chat. True writes the chat template, the tokens that end an answer,
            and the sampling settings of Meta's examples (temperature 0.6, top_p 0.9). None, unknown, omits the sampling
            settings. False, a base model, stops only at the end of text and, for Llama 2 and Mistral, has no template.
        family, origin: as in `check_tokenizer`.

    Raises:
        CheckpointError: as for `check_tokenizer`; or configuration and tokenizer have different image tokens.
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


def meta_tokenizer_file(companions: Mapping[str, bytes], config: Any) -> dict[str, bytes]:
    """Return Meta's tokenizer.model, by name, for the tokenizer of a Hugging Face folder; empty where it has none.

    It is the folder's own, byte by byte.

    Raises:
        CheckpointError: there is a tokenizer.json alone, or one with a token in the embedding that a tokenizer.model
            does not have.
    """
    original = companions.get("tokenizer.model")
    if original is None:
        if "tokenizer.json" not in companions:
            return {}
        raise CheckpointError(
            "tokenizer.json: no tokenizer.model is made of it. Add the original tokenizer.model of the model's release "
            "to the source's folder."
        )
    tokenizer, rows = check_tokenizer(original), config.get_text_config().vocab_size
    size = tokenizer.size
    if tokenizer.kind == "tiktoken":
        size += max(map(len, SPECIAL_TOKENS.values())) - len(tokenizer.special_ids)
    if "tokenizer.json" in companions:
        for token, index in token_ids(companions).items():
            if size <= index < rows:
                raise CheckpointError(
                    f"tokenizer.json: gives {token!r} the id {index}, which is not in the tokenizer.model beside it."
                )
    check_tokenizer(original, config)
    return {"tokenizer.model": original}


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
    """Make generation_config.json; a model that is known to be tuned samples as in Meta's examples."""
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
