"""Merged key/value heads are means, and a model whose merged heads were equal computes the same."""

import copy

import pytest
import torch
from support.models import draw, max_abs, stock_dense_config, stock_multimodal_config, stock_text_config
from transformers import (
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4VisionModel,
    LlamaForCausalLM,
)

from llamoe.conversion.merge_kv_heads import merge_kv_heads
from llamoe.conversion.open import open_checkpoint

BUILD = {
    "dense": (LlamaForCausalLM, stock_dense_config),
    "text": (Llama4ForCausalLM, stock_text_config),
    "multimodal": (Llama4ForConditionalGeneration, lambda **text: stock_multimodal_config(text)),
}


def is_key_or_value(name):
    return "vision_model" not in name and any(f".self_attn.{part}_proj." in name for part in "kv")


def stock(kind, **text):
    model_class, make_config = BUILD[kind]
    return draw(model_class, make_config(attention_bias=True, **text))


def repeated(model, times):
    """Return the same model with each key/value head repeated `times` times."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_key_value_heads *= times
    larger = type(model)(config).eval()
    state = model.state_dict()
    for name, tensor in state.items():
        if is_key_or_value(name):
            heads = tensor.unflatten(0, (-1, text.head_dim))
            state[name] = heads.repeat_interleave(times, 0).flatten(0, 1)
    larger.load_state_dict(state)
    return larger


@torch.no_grad()
def logits(model):
    ids = torch.randint(3, 90, (2, 33), generator=torch.Generator().manual_seed(5))
    return model(input_ids=ids).logits


@pytest.mark.parametrize("kind", BUILD)
def test_equal_heads_merge_into_the_model_they_were_repeated_from(tmp_path, kind, record_parity):
    small = stock(kind)
    large = repeated(small, 3)
    large.save_pretrained(tmp_path / "mha")
    report = merge_kv_heads(tmp_path / "mha", tmp_path / "gqa", kv_heads=2)
    assert any("6 key/value heads a layer became 2" in note for note in report.notes)

    merged = type(small).from_pretrained(tmp_path / "gqa", dtype=torch.float32).eval()
    expected = small.state_dict()
    assert merged.state_dict().keys() == expected.keys()
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(logits(merged), logits(small))
    error = max_abs(logits(merged), logits(large))
    record_parity(f"merged heads, {kind}", "the model before", "float32", error)
    assert error < 1e-5


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_every_head_is_the_mean_of_its_group(tmp_path, kv_heads):
    model = stock("dense", num_key_value_heads=6).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "mha")
    merge_kv_heads(tmp_path / "mha", tmp_path / "gqa", kv_heads=kv_heads)
    result = open_checkpoint(tmp_path / "gqa")
    assert result.config.num_key_value_heads == kv_heads
    assert result.config.num_attention_heads == 6
    size = 6 // kv_heads
    for name, tensor in model.state_dict().items():
        if is_key_or_value(name):
            heads = tensor.float().split(20)
            groups = [heads[start : start + size] for start in range(0, 6, size)]
            tensor = torch.cat([torch.stack(group).mean(0) for group in groups]).bfloat16()
        assert torch.equal(result.tensors[name].read(), tensor), name


def test_heads_that_do_not_divide_and_towers_are_refused(tmp_path):
    stock("dense", num_key_value_heads=6).save_pretrained(tmp_path / "mha")
    Llama4VisionModel(stock_multimodal_config().vision_config).save_pretrained(tmp_path / "tower")
    refused = [
        ("mha", heads, "do not merge into" if heads > 1 else f"kv_heads={heads}")
        for heads in (4, 12, 0, -1, True)
    ]
    for source, kv_heads, named in [*refused, ("tower", 1, "/tower is")]:
        with pytest.raises(ValueError, match=named):
            merge_kv_heads(tmp_path / source, tmp_path / "gqa", kv_heads=kv_heads)
        assert not (tmp_path / "gqa").exists()
