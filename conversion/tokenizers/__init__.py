"""Tokenizer, chat template and processor files of a folder.

Reading order: chat_templates, processors, source_tokenizer, sentencepiece_models, tiktoken_tables, tekken,
check_tokenizer, tokenizer_json, folder_files, vocabulary.
"""

from .check_tokenizer import check_tokenizer
from .folder_files import hf_files_from_meta, meta_tokenizer_file
from .processors import processor_files, processor_of_layout
from .sentencepiece_models import model_of_pieces
from .source_tokenizer import begin_with
from .tiktoken_tables import WORD_PATTERNS, looks_like_table
from .tokenizer_json import MULTIMODAL_TOKENS, check_companions, extend_tokenizer
from .vocabulary import Vocabulary, extend_vocabulary
