"""Tokenizer, chat template and processor files of a folder.

Reading order: chat_templates, processors, sentencepiece_models, tiktoken_tables, folder_files.
"""

from .folder_files import (
    MULTIMODAL_TOKENS,
    check_companions,
    check_tokenizer,
    extend_tokenizer,
    hf_files_from_meta,
    meta_tokenizer_model,
    multimodal_chat_template,
    token_ids,
)
from .processors import processor_files, processor_of_layout

__all__ = [
    "MULTIMODAL_TOKENS",
    "check_companions",
    "check_tokenizer",
    "extend_tokenizer",
    "hf_files_from_meta",
    "meta_tokenizer_model",
    "multimodal_chat_template",
    "processor_files",
    "processor_of_layout",
    "token_ids",
]
