"""Builds the parts of `examples/llamoe-tiny` anew: tokenizer, processor and model, with random weights.

The folder gets every file that a published Llama 4 folder has.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Llama4ImageProcessor, PreTrainedTokenizerFast

from llamoe import (
    LlamoeConfig,
    LlamoeForConditionalGeneration,
    LlamoeProcessor,
    LlamoeTextConfig,
    LlamoeVisionConfig,
)
from llamoe.conversion.tokenizers.chat_templates import llama_4

PICTURE_SIZE, PATCH_SIZE, PIXEL_SHUFFLE_RATIO = 112, 14, 0.5
TILE = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eom|>",
    "<|eot|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|finetune_right_pad|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
)
# Words and line breaks are split, so that text cut after a header's "\n\n" has the same tokens as within the whole.
WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer(vocab_size: int, corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer for lower-cased text, trained on a corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot|>",
        pad_token="<|finetune_right_pad|>",
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlamoeProcessor:
    """Llama 4's own processor, with one tile of 112 x 112 pixels (16 tokens) for a picture of any size."""
    return LlamoeProcessor(
        image_processor=Llama4ImageProcessor(size=TILE, max_patches=1),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        pixel_shuffle_ratio=PIXEL_SHUFFLE_RATIO,
        # It has seen no calls of tools.
        chat_template=llama_4(images=True, calls=False),
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamoeForConditionalGeneration:
    """A model with every part of Llama 4: tower, alternating dense and mixture layers, shared expert, a NoPE layer."""
    vocabulary = tokenizer.get_vocab()
    ids = {
        "bos_token_id": vocabulary["<|begin_of_text|>"],
        "eos_token_id": [vocabulary[name] for name in ("<|end_of_text|>", "<|eom|>", "<|eot|>")],
        "pad_token_id": vocabulary["<|finetune_right_pad|>"],
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 176,
        "intermediate_size_mlp": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 512,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "router_aux_loss_coef": 0.02,
        "use_qk_norm": True,
        "initializer_range": 0.06,
        **ids,
    }
    vision = {
        "hidden_size": 160,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "image_size": PICTURE_SIZE,
        "patch_size": PATCH_SIZE,
        "pixel_shuffle_ratio": PIXEL_SHUFFLE_RATIO,
        "projector_input_dim": 128,
        "projector_output_dim": 128,
        "vision_output_dim": 128,
        "initializer_range": 0.06,
    }
    config = LlamoeConfig(
        text_config=LlamoeTextConfig(**text),
        vision_config=LlamoeVisionConfig(**vision),
        boi_token_index=vocabulary["<|image_start|>"],
        eoi_token_index=vocabulary["<|image_end|>"],
        image_token_index=vocabulary["<|patch|>"],
        tie_word_embeddings=False,
        **ids,
    )
    model = LlamoeForConditionalGeneration(config)
    # Longer than any answer. Without a length transformers warns, and stops after 20 tokens.
    model.generation_config = GenerationConfig(max_new_tokens=64, do_sample=False, **ids)
    return model
