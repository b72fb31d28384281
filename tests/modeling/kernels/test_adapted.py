"""Tokens of models with LoRA: peft's layers around ours, whose products are the kernels'."""

import pytest
import torch
from peft import PeftModel
from support.decoding import STOCK, adapt, by_modules, dense, ids, steps
from support.few_bits import load, save
from support.models import max_abs

import llamoe
from llamoe.modeling.kernels import SHORTCUTS_ARE_ON, cpp_kernels

pytestmark = pytest.mark.skipif(
    cpp_kernels.library() is None or not SHORTCUTS_ARE_ON,
    reason="needs a C++ compiler, a CPU with AVX2, AVX-512 or NEON, and shortcuts",
)
for_families = pytest.mark.parametrize("make", STOCK, ids=lambda make: make.__name__)


@for_families
def test_tokens_are_those_of_stock_and_peft(make, tmp_path):
    ours, fields = make(), dict(r=5, lora_alpha=9)
    if make is dense:
        # peft has none for stacks.
        fields.update(r=16, use_rslora=True, lora_dropout=0.2)
    stock = STOCK[make](STOCK[make].config_class(**llamoe.to_stock(ours.config))).eval()
    stock.load_state_dict(ours.state_dict())
    before, trained = steps(ours), adapt(stock, **fields)
    trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(ours, tmp_path)
    found = steps(loaded)
    # Sums in another order.
    assert max_abs(found, steps(trained)) < 5e-5 and max_abs(found, before) > 0.1


@for_families
@pytest.mark.parametrize("weights", [torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["float32 factors", "bfloat16 factors"])
def test_sixteen_and_fewer_bits(make, weights, autocast, monkeypatch):
    if weights == torch.bfloat16:
        model = make().bfloat16()
    else:
        # Heads whose outputs are whole blocks of codes.
        model = load(
            save(make(num_attention_heads=8, num_key_value_heads=4, head_dim=32).bfloat16()), weights
        )
    model = adapt(model, r=8, autocast_adapter_dtype=autocast)
    found = steps(model)
    # Roundings in another order, which may send a token to another expert: the median token.
    expected = by_modules(model, monkeypatch)
    errors = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert errors.median() < 0.03


@for_families
def test_several_rows_and_all_ranks(make, monkeypatch):
    for rank in (1, 3, 4, 33):
        model, tokens = adapt(make(), r=rank), ids(40).view(4, 10)
        with torch.no_grad():
            found = model(tokens[:, :2]).logits
            monkeypatch.setattr(cpp_kernels, "_library", None)
            assert max_abs(found, model(tokens[:, :2]).logits) < 5e-5
            monkeypatch.undo()


def test_rows_of_a_batch_keep_their_adapters():
    model = adapt(dense(), r=4)
    adapt(model, "other", seed=1, r=3)
    options = dict(max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = []
    for name in ("default", "other"):
        model.set_adapter(name)
        expected.append(model.generate(input_ids=ids(9), **options))
    found = model.generate(
        input_ids=ids(9).repeat(3, 1), adapter_names=["default", "other", "__base__"], **options
    )
    with model.disable_adapter():
        expected.append(model.generate(input_ids=ids(9), **options))
    assert torch.equal(found, torch.cat(expected)) and not torch.equal(found[0], found[1])
