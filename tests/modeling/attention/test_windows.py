"""Sliding windows: Mistral, one window for all layers, and Ministral, a window in some, against transformers' own."""

import functools

import pytest
import torch
import transformers
from support.models import DENSE, max_abs, run, stock_model
from support.tables import in_turn

import llamoe

LENGTH = 37
PADDING = (6, 0, 11)
FAMILIES = ["Mistral", "Ministral"]
# One token, two, odd, more than a block of queries at its smallest, and more than a row has.
WINDOWS = [1, 2, 5, 18, 64]
# Sums in another order, of logits with a deviation of about one.
TOLERANCE = 1e-5
IMPLEMENTATIONS = ["sdpa", "flex_attention", "flash_attention_2"]


@functools.cache
def stock_pair(family, window, head=""):
    """transformers' model and ours with its weights, which tests only read."""
    head = head or "ForCausalLM"
    fields = {name: value for name, value in DENSE.items() if name not in ("mlp_bias", "attention_bias")}
    fields |= {"sliding_window": window, "num_hidden_layers": 2}
    if family == "Ministral":
        fields["layer_types"] = ["sliding_attention", "full_attention"]
    config = getattr(transformers, f"{family}Config")(**fields)
    stock = stock_model(getattr(transformers, f"{family}{head}"), config)
    ours = getattr(llamoe, f"LlamoeDense{head}")(llamoe.from_stock(config)).eval()
    names = {
        name: name.replace("model.", "transformer.") if "QuestionAns" in head else name
        for name in stock.state_dict()
    }
    ours.load_state_dict({names[name]: weight for name, weight in stock.state_dict().items()})
    return stock, ours


def set_attention(implementation, *models):
    for model in models:
        model.set_attn_implementation(implementation)


def row(seed=0, rows=3, length=LENGTH):
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding_mask():
    return (torch.arange(LENGTH)[None] >= torch.tensor(PADDING)[:, None]).long()


@pytest.mark.parametrize(
    ("window", "family", "implementation"),
    in_turn(WINDOWS, FAMILIES, IMPLEMENTATIONS),
    indirect=["implementation"],
)
def test_logits_equal_stocks(family, window, implementation, record_parity):
    stock, ours = stock_pair(family, window)
    set_attention("eager", stock)
    set_attention(implementation, ours)
    ids, mask = row(), padding_mask()
    plain = max_abs(run(ours, input_ids=ids), run(stock, input_ids=ids))
    given, expected = (run(model, input_ids=ids, attention_mask=mask) for model in (ours, stock))
    padded = max_abs(given[mask > 0], expected[mask > 0])
    assert max(plain, padded) < TOLERANCE
    record_parity(f"{family}, W = {window}, {implementation}", "transformers", "float32", max(plain, padded))


def test_mistrals_answering_head_is_only_read(tmp_path):
    stock, ours = stock_pair("Mistral", 5, "ForQuestionAnswering")
    stock.save_pretrained(tmp_path / "stock")
    read = llamoe.LlamoeDenseForQuestionAnswering.from_pretrained(tmp_path / "stock")
    assert max_abs(read(input_ids=row()).end_logits, stock(input_ids=row()).end_logits) < TOLERANCE
    with pytest.raises(ValueError, match="layout"):
        read.save_pretrained(tmp_path / "back", layout="stock")
    assert not (tmp_path / "back").exists()


def test_a_file_of_mistrals_may_leave_out_its_defaults():
    config = llamoe.LlamoeDenseConfig.from_dict({"model_type": "mistral"})
    assert (config.sliding_window, config.num_key_value_heads, config.intermediate_size) == (4096, 8, 14336)
    other = llamoe.LlamoeDenseConfig.from_dict(config.to_dict(), num_hidden_layers=3, sliding_window=7)
    assert other.layer_types is None and other.attention_types() == ["sliding_attention"] * 3
    without = llamoe.LlamoeDenseConfig.from_dict(config.to_dict(), sliding_window=None)
    assert without.layer_types is None and without.attention_types() == ["full_attention"] * 32
    config = llamoe.LlamoeDenseConfig.from_dict({"model_type": "mistral", "sliding_window": None})
    assert config.layer_types is None and config.attention_types() == ["full_attention"] * 32
