"""`save_pretrained(layout="stock", for_gguf=True)` writes a folder that llama.cpp computes as it is, or none."""

import pytest
from support.models import dense_config, draw, mixtral_config, multimodal_config, text_config

import llamoe
from llamoe.configuration import ConfigurationError

FIXED = dict(attention_chunk_size=8192, floor_scale=8192)
TAKEN = {
    "LlamoeDenseForCausalLM": lambda: dense_config(hidden_size=84),
    "LlamoeDenseModel": lambda: dense_config(hidden_size=84),
    "LlamoeMixtralForCausalLM": lambda: mixtral_config(sliding_window=None),
    "LlamoeForCausalLM": lambda: text_config(**FIXED),
    "LlamoeForConditionalGeneration": lambda: multimodal_config(**FIXED),
}
REFUSED = {
    "window": ("LlamoeMixtralForCausalLM", mixtral_config, "sliding_window = 16"),
    "decoder": ("LlamoeForCausalLM", text_config, "attention_chunk_size = 16"),
    "decoder of a multimodal model": ("LlamoeForConditionalGeneration", multimodal_config, "floor_scale = 8"),
    "head": ("LlamoeDenseForTokenClassification", TAKEN["LlamoeDenseModel"], "'LlamaForTokenClassification'"),
    "no head": ("LlamoeTextModel", TAKEN["LlamoeForCausalLM"], "'Llama4TextModel'"),
    "tower": ("LlamoeVisionModel", lambda: multimodal_config().vision_config, "only beside its decoder"),
}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", TAKEN)
def test_a_folder_that_llama_cpp_reads_is_that_of_layout_stock(name, tmp_path):
    model = draw(getattr(llamoe, name), TAKEN[name]())
    model.save_pretrained(tmp_path / "stock", layout="stock")
    model.save_pretrained(tmp_path / "for gguf", layout="stock", for_gguf=True)
    assert contents(tmp_path / "for gguf") == contents(tmp_path / "stock")


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_misread_is_refused_before_anything_is_written(name, tmp_path):
    class_name, config, told = REFUSED[name]
    model = draw(getattr(llamoe, class_name), config())
    with pytest.raises(ConfigurationError, match="for_gguf=True") as error:
        model.save_pretrained(tmp_path / "folder", layout="stock", for_gguf=True)
    assert told in str(error.value)
    assert not (tmp_path / "folder").exists()


def test_a_class_of_ones_own_is_refused(tmp_path):
    class Changed(llamoe.LlamoeDenseForCausalLM):
        pass

    with pytest.raises(ValueError, match="architectures = 'Changed'"):
        draw(Changed, TAKEN["LlamoeDenseModel"]()).save_pretrained(tmp_path, layout="stock", for_gguf=True)


def test_our_layout_is_for_no_converter(tmp_path):
    model = draw(llamoe.LlamoeDenseForCausalLM, TAKEN["LlamoeDenseModel"]())
    with pytest.raises(ValueError, match="for_gguf=True, layout='llamoe'"):
        model.save_pretrained(tmp_path / "folder", for_gguf=True)
    assert not (tmp_path / "folder").exists()
