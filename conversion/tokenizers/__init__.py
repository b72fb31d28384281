"""Convert tokenizers, and write chat templates and processor files.

Reading order: chat_templates, processors, source_tokenizer, sentencepiece_models, tiktoken_tables, tekken,
folder_files, vocabulary.
"""

from .folder_files import check_tokenizer, hf_files_from_meta
from .processors import processor_files, processor_of_layout
from .sentencepiece_models import model_of_pieces
from .source_tokenizer import begin_with
from .tiktoken_tables import WORD_PATTERNS, looks_like_table
from .vocabulary import (
    MULTIMODAL_TOKENS,
    Vocabulary,
    extend_tokenizer,
    extend_vocabulary,
    meta_tokenizer_file,
)
