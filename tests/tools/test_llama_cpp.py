"""Test that our folders in stock's layout, converted by llama.cpp's converter, give the same logits in llama.cpp."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import DENSE, MIXTRAL, TEXT, VISION, draw, scaled_rope
from support.paths import EXAMPLES
from transformers import AutoModelForCausalLM, AutoTokenizer

import llamoe
import llamoe.conversion
from llamoe.modeling.registration import model_class

ROOT = Path(__file__).parents[2]
CONVERTER = os.environ.get("LLAMA_CPP_CONVERTER", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None or not Path(CONVERTER).is_file(),
        reason="needs llama-cpp-python, which pip builds with cmake, and in LLAMA_CPP_CONVERTER the path of its "
        "convert_hf_to_gguf.py, in vendor/llama.cpp of the archive that `pip download --no-deps --no-binary :all: "
        "llama-cpp-python` gives",
    ),
    pytest.mark.slow,
]

# The tokenizer has 784 tokens. llama.cpp needs a tokenizer, although no text is tokenized here.
COMMON = dict(vocab_size=811, bos_token_id=0, eos_token_id=1)
LENGTH = 53
# llama.cpp and our models compute in float32, and sum in other orders. Measured: at most 4e-6 for logits with a
# deviation of about 1, 2e-5 for the larger logits of a tied head, 4e-5 after thousands of tokens.
TOLERANCE = 2e-4


def dense(**fields):
    return llamoe.LlamoeDenseConfig(**{**DENSE, "hidden_size": 84, **COMMON, **fields})


def mixtral(**fields):
    return llamoe.LlamoeMixtralConfig(**{**MIXTRAL, "sliding_window": None, **COMMON, **fields})


def text(**fields):
    fixed = dict(attention_chunk_size=8192, floor_scale=8192, num_experts_per_tok=2)
    return llamoe.LlamoeTextConfig(**{**TEXT, **fixed, **COMMON, **fields})


def multimodal(**fields):
    special = dict(image_token_index=99, boi_token_index=97, eoi_token_index=98)
    return llamoe.LlamoeConfig(text_config=text(**fields), vision_config=VISION, **special)


YARN = scaled_rope("yarn")["rope_parameters"] | {"beta_fast": 32.0}


def yarn(**fields):
    return {"rope_parameters": {**YARN, **fields}}


def rope(**fields):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **fields}}


SAME = {
    "dense": dense(),
    "tied": dense(tie_word_embeddings=True),
    "biases": dense(attention_bias=True, mlp_bias=True),
    "linear": dense(**scaled_rope("linear")),
    "llama3": dense(**scaled_rope("llama3")),
    "yarn": dense(**yarn()),
    "window": dense(sliding_window=256),
    "mixtral": mixtral(),
    "mixtral, tied, one expert each": mixtral(num_experts_per_tok=1, tie_word_embeddings=True),
    "text": text(),
    "text, tied, one expert each": text(num_experts_per_tok=1, tie_word_embeddings=True),
    "text, llama3, all mixtures": text(**scaled_rope("llama3"), interleave_moe_layer_step=1),
    "text, yarn": text(**yarn()),
    "text, 128 experts": text(num_local_experts=128, use_qk_norm=False),
    "text, dense layers alone": text(num_local_experts=1, num_experts_per_tok=1, interleave_moe_layer_step=0),
    "multimodal": multimodal(),
}


def save(model, folder, **options):
    model.save_pretrained(folder, layout="stock", **options)
    AutoTokenizer.from_pretrained(EXAMPLES / "llamoe-tiny").save_pretrained(folder)


def convert(folder, *options, file=None):
    """Convert a folder with llama.cpp's converter; return the float32 GGUF file and the finished process."""
    file = file or folder.with_suffix(".gguf")
    script = ROOT / "benchmarks/gguf_converter.py"
    words = [script, CONVERTER, folder, "--outfile", file, "--outtype", "f32", *options]
    return file, subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def run_llama_cpp(file, ids):
    """Return llama.cpp's logits `[tokens, vocabulary]`, or None if it fails, and its messages."""
    tokens, logits = file.with_suffix(".ids.npy"), file.with_suffix(".npy")
    np.save(tokens, ids.numpy())
    script = ROOT / "tests/support/logits_with_llama_cpp.py"
    done = subprocess.run(
        [sys.executable, script, file, tokens, logits], capture_output=True, text=True, check=False
    )
    return torch.from_numpy(np.load(logits)) if done.returncode == 0 else None, done.stderr


def in_llama_cpp(model, folder, ids, **options):
    """Return the logits of a model's GGUF file."""
    save(model, folder, **options)
    file, done = convert(folder)
    assert done.returncode == 0, done.stderr
    logits, told = run_llama_cpp(file, ids)
    assert logits is not None, told
    return logits


@torch.no_grad()
def ours(model, ids):
    return model(input_ids=ids[None], use_cache=False).logits[0]


def draw_ids(length=LENGTH):
    # No image tokens.
    return torch.randint(100, 780, (length,))


def as_read(model, **fields):
    """Return a model with the same weights and other fields."""
    config = type(model.config)(**model.config.to_dict() | fields)
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def differences(a, b):
    """Return the largest difference of logits at each position."""
    return (a - b).abs().amax(-1)


@pytest.mark.parametrize("name", SAME)
def test_llama_cpp_computes_what_we_compute(name, tmp_path, record_parity):
    config = SAME[name]
    model = draw(model_class(config), config)
    ids = draw_ids()
    error = differences(ours(model, ids), in_llama_cpp(model, tmp_path / "model", ids)).max()
    record_parity(type(model).__name__, "llama.cpp", "float32", error.item(), f"GGUF, {name}")
    assert error < TOLERANCE


def test_base_models_embedding_reads_their_states(tmp_path):
    """llama.cpp uses the embedding as the missing head."""
    model = draw(llamoe.LlamoeDenseModel, dense())
    ids = draw_ids()
    logits = in_llama_cpp(model, tmp_path / "model", ids)
    with torch.no_grad():
        states = model(input_ids=ids[None]).last_hidden_state[0]
    expected = states @ model.embed_tokens.weight.T
    assert differences(expected, logits).max() < TOLERANCE * expected.std()


def test_llama_cpp_makes_other_features_of_pictures(tmp_path):
    """llama.cpp's features of pictures are wrong; if they become right, docs/serving.md must change."""
    folder = tmp_path / "model"
    llamoe.conversion.convert(EXAMPLES / "llamoe-tiny", folder, layout="stock")
    file, _ = convert(folder)
    tower, done = convert(folder, "--mmproj", file=tmp_path / "tower.gguf")
    assert done.returncode == 0, done.stderr
    # All pixels differ, so that swapped rows and columns show.
    pixels = torch.randint(0, 256, (112, 112, 3), dtype=torch.uint8)
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    script = ROOT / "tests/support/features_with_llama_cpp.py"
    words = [script, file, tower, tmp_path / "pixels.npy", tmp_path / "features.npy"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "known to have degraded quality" in done.stderr
    features = torch.from_numpy(np.load(tmp_path / "features.npy"))
    model = llamoe.LlamoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        pixel_values = pixels.permute(2, 0, 1)[None] / 127.5 - 1
        expected = model.get_image_features(pixel_values=pixel_values).pooler_output.reshape(16, -1)
    assert features.shape == expected.shape
    likeness = torch.cosine_similarity(features, expected)
    assert likeness.max() < 0.9


def test_chunks_and_temperature_of_long_contexts_are_the_same(tmp_path, record_parity):
    """Seventy tokens reach the second chunk, where temperature tuning changes the logits, too."""
    config = text(
        max_position_embeddings=16384,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        attn_scale=0.1,
    )
    model = draw(llamoe.LlamoeForCausalLM, config)
    ids = draw_ids(8192 + 70)
    logits = in_llama_cpp(model, tmp_path / "model", ids)
    error = differences(ours(model, ids), logits)
    record_parity("LlamoeForCausalLM", "llama.cpp", "float32", error.max().item(), "GGUF, two chunks")
    assert error.max() < TOLERANCE
    # Without these features the last logits would differ.
    for fields in ({"attention_chunk_size": 16384}, {"attn_temperature_tuning": False}):
        error = differences(ours(as_read(model, **fields), ids), logits)
        assert error[:8191].max() < TOLERANCE
        assert error[8192:].max() > 10 * TOLERANCE


# Rows of 256 numbers fit blocks of the K types; for others the quantizer chooses another type.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 24}
QUANTIZED = {
    "dense": dense(**WIDE, tie_word_embeddings=True),
    "mixtral": mixtral(**WIDE),
    "text": text(**WIDE, intermediate_size_mlp=768),
    "multimodal": multimodal(**WIDE, intermediate_size_mlp=768),
}


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_files_of_its_quantizer_become_folders_that_compute_the_same(name, kind, tmp_path, record_parity):
    """The difference is that llama.cpp rounds inputs of packed matrices to 8 bits."""
    import llama_cpp

    config = QUANTIZED[name]
    torch.manual_seed(len(name))
    save(draw(model_class(config), config), tmp_path / "model")
    whole, done = convert(tmp_path / "model")
    assert done.returncode == 0, done.stderr
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    file = tmp_path / "packed.gguf"
    assert llama_cpp.llama_model_quantize(bytes(whole), bytes(file), options) == 0
    ids = draw_ids()
    logits, told = run_llama_cpp(file, ids)
    assert logits is not None, told
    for target, command in {
        "plain": llamoe.conversion.convert,
        "packed": partial(llamoe.conversion.quantize, to="int4"),
    }.items():
        report = command(file, tmp_path / target)
        assert report.kind == "gguf"
        model = AutoModelForCausalLM.from_pretrained(tmp_path / target, dtype=torch.bfloat16)
        # Of the median token, since a token that is sent to another expert has other logits.
        error = ((ours(model, ids).float() - logits).norm(dim=-1) / logits.norm(dim=-1)).median()
        record_parity(type(model).__name__, "llama.cpp", target, error.item(), f"{kind}, {name}")
        # Only 4-bit codes in groups of 32 are kept; others are quantized again.
        assert error < (0.05 if target == "plain" or kind == "Q4_0" else 0.3)
    made, theirs = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("plain", "model"))
    words = {"text": "a red circle on the left", "add_special_tokens": False}
    assert made(**words).input_ids == theirs(**words).input_ids
