"""Tokens of models with LoRA: peft's layers around ours, whose products are the kernels'."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.few_bits import load, save
from support.models import MODELS, max_abs

from llamoe.modeling.kernels import SHORTCUTS_ARE_ON, cpp_kernels

pytestmark = pytest.mark.skipif(
    cpp_kernels.library() is None or not SHORTCUTS_ARE_ON,
    reason="needs a C++ compiler, a CPU with AVX2, AVX-512 or NEON, and shortcuts",
)
# Layers large enough for the kernels; sizes that differ, and heads of which one has no whole vector.
SIZES = dict(
    hidden_size=192,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=72,
)
CASES = {case.name: case for case in MODELS if case.is_text and case.is_head and not case.has_images}
DENSE = CASES["LlamoeDenseForCausalLM"]
for_families = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def make(case, **fields):
    own = dict(intermediate_size_mlp=336, num_hidden_layers=4) if case.is_llama4 else {}
    return case.make(**{**SIZES, **own, **fields})


def ids(length=15):
    return torch.randint(3, 101, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def steps(model):
    """Logits of single tokens after the first five."""
    cache = model(ids()[:, :5], use_cache=True).past_key_values
    return torch.cat([model(token[:, None], past_key_values=cache).logits for token in ids()[:, 5:].T], 1)


def adapt(model, name="default", seed=0, autocast_adapter_dtype=True, **fields):
    """A model with one more adapter on all of its layers and experts, and numbers that show."""
    has_experts = any(hasattr(module, "num_experts") for module in model.modules())
    config = LoraConfig(target_modules=LAYERS, target_parameters=STACKS if has_experts else None, **fields)
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, name, autocast_adapter_dtype=autocast_adapter_dtype)
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        if "lora_" in path and f".{name}." in path:
            parameter.data.normal_(generator=generator).mul_(0.07)
    return model.eval()


@for_families
def test_tokens_are_those_of_stock_and_peft(case, tmp_path):
    ours, fields = make(case), dict(r=5, lora_alpha=9)
    if case is DENSE:
        # peft has none for stacks.
        fields.update(r=16, use_rslora=True, lora_dropout=0.2)
    before, trained = steps(ours), adapt(case.stock_of(ours), **fields)
    trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(ours, tmp_path)
    found = steps(loaded)
    # Sums in another order.
    assert max_abs(found, steps(trained)) < 5e-5 and max_abs(found, before) > 0.1


@for_families
@pytest.mark.parametrize("weights", [torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["float32 factors", "bfloat16 factors"])
def test_sixteen_and_fewer_bits(case, weights, autocast, monkeypatch):
    if weights == torch.bfloat16:
        model = make(case).bfloat16()
    else:
        # Heads whose outputs are whole blocks of codes.
        heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
        model = load(save(make(case, **heads).bfloat16()), weights)
    model = adapt(model, r=8, autocast_adapter_dtype=autocast)
    found = steps(model)
    # Roundings in another order, which may send a token to another expert: the median token.
    monkeypatch.setattr(cpp_kernels, "_library", None)
    expected = steps(model)
    errors = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert errors.median() < 0.03


@for_families
def test_several_rows_and_all_ranks(case, monkeypatch):
    for rank in (1, 3, 4, 33):
        model, tokens = adapt(make(case), r=rank), ids(40).view(4, 10)
        with torch.no_grad():
            found = model(tokens[:, :2]).logits
            monkeypatch.setattr(cpp_kernels, "_library", None)
            assert max_abs(found, model(tokens[:, :2]).logits) < 5e-5
            monkeypatch.undo()


def test_rows_of_a_batch_keep_their_adapters():
    model = adapt(make(DENSE), r=4)
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
