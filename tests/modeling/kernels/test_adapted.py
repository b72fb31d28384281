"""Tokens of models with LoRA: peft's layers around ours, whose products are the kernels'."""

import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from support.decoding import STOCK, adapt, by_modules, dense, ids, mixtral, steps
from support.few_bits import load, save
from support.models import max_abs
from torch import nn

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


def two(model):
    adapt(model, "other", seed=1, r=3)
    model.base_model.set_adapter(["default", "other"])


def rescale(model):
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] *= -2


def factors(model, change):
    for path, parameter in model.named_parameters():
        if "lora_B" in path:
            change(parameter)


def replaced(parameter):
    parameter.data = parameter.data.neg().clone()


def merged_first(model):
    model.merge_adapter()
    model.unmerge_adapter()
    rescale(model)


def hooked(model):
    for path, module in model.named_modules():
        if path.endswith("lora_A.default"):
            module.register_forward_hook(lambda module, args, output: -output)


class Negated(nn.Module):
    def forward(self, x):
        return -x


def with_other_dropout(model):
    for module in list(model.modules()):
        if isinstance(getattr(module, "lora_dropout", None), nn.ModuleDict):
            module.lora_dropout["default"] = Negated()


class Twice(lora.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def of_another_class(model):
    for module in model.modules():
        if isinstance(module, lora.Linear):
            module.__class__ = Twice


def adapted_twice(model):
    """An adapter around another one, as peft itself does not nest them."""
    for layer in model.get_base_model().model.layers:
        outer = lora.Linear(layer.self_attn.q_proj, "default", LoraConfig(r=3), r=3, lora_alpha=9)
        outer.lora_B["default"].weight.data.fill_(0.05)
        layer.self_attn.q_proj = outer.eval()


def with_scales_of_outputs(model):
    for module in model.modules():
        if isinstance(module, lora.Linear):
            module.scaling["default"] = torch.linspace(-1, 1, module.out_features)


CHANGES = {
    "another adapter": lambda model: (adapt(model, "other", seed=1, r=3), model.set_adapter("other")),
    "two adapters": two,
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: (rescale(model), model.merge_adapter()),
    "merged and unmerged": merged_first,
    "merged and off": lambda model: (model.merge_adapter(), model.base_model.disable_adapter_layers()),
    "scale": rescale,
    "factors in place": lambda model: factors(model, lambda parameter: parameter.data.neg_()),
    "factors": lambda model: factors(model, replaced),
    "deleted": lambda model: (adapt(model, "other", seed=1, r=3), model.delete_adapter("default")),
    "hook": hooked,
    "dropout's class": with_other_dropout,
    "layer's class": of_another_class,
    "another around it": adapted_twice,
    "a scale for each output": with_scales_of_outputs,
    "unloaded": lambda model: model.unload(),
    "base": lambda model: [
        module.weight.data.neg_()
        for path, module in model.named_modules()
        if path.endswith("q_proj.base_layer")
    ],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [dense, mixtral], ids=lambda make: make.__name__)
def test_what_changes_between_two_tokens_is_seen(make, change):
    model, tokens = adapt(make(), r=4), ids(8)
    before = steps(model, tokens)
    changed = CHANGES[change](model)
    model = changed if isinstance(changed, nn.Module) else model
    found = steps(model, tokens)
    with torch.enable_grad():
        expected = model(tokens).logits[:, 5:]
    # Sums in another order; a change that is missed shows.
    assert max_abs(found, expected) < 5e-5 and max_abs(found, before) > 1e-3


@pytest.mark.parametrize("kind", [nn.Linear, nn.Dropout, nn.Identity])
def test_classes_that_are_patched_are_called(kind, monkeypatch):
    model, tokens = adapt(dense(), r=4, lora_dropout=0.0 if kind is nn.Identity else 0.3), ids(8)
    before = steps(model, tokens)
    monkeypatch.setattr(kind, "forward", lambda self, x, forward=kind.forward: 3 * forward(self, x))
    found = steps(model, tokens)
    assert max_abs(found, by_modules(model, monkeypatch, tokens)) < 5e-4 and max_abs(found, before) > 1e-3


def test_strides_at_one_address_are_seen():
    model, tokens = adapt(dense(), r=4), ids(8)
    layers = [module for module in model.modules() if type(module) is lora.Linear]
    both = [torch.arange(8.0 * layer.out_features).sin().view(-1, 8) / 9 for layer in layers]
    for columns in (slice(4), slice(None, None, 2)):
        for layer, numbers in zip(layers, both, strict=True):
            layer.lora_B["default"].weight.data = numbers[:, columns]
        found = steps(model, tokens)
        with torch.enable_grad():
            assert max_abs(found, model(tokens).logits[:, 5:]) < 5e-5


def test_an_adapted_mixture_is_pickled_after_passes():
    model = adapt(mixtral(), r=4)
    expected = steps(model)
    assert torch.equal(steps(pickle.loads(pickle.dumps(model))), expected)


def test_dropout_is_on_in_training():
    model = adapt(dense(), r=4, lora_dropout=0.5)
    before = steps(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not torch.equal(steps(model), steps(model))
    model.eval()
    assert torch.equal(steps(model), before)


@pytest.mark.parametrize("fields", [dict(use_dora=True), dict(lora_bias=True)], ids=str)
def test_other_variants_are_pefts(fields, monkeypatch):
    model = get_peft_model(
        dense(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **fields)
    )
    assert max_abs(steps(model.eval()), by_modules(model, monkeypatch)) < 5e-5


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
