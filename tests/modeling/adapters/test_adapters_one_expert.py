"""LoRA on the stacks of a model with a single expert, which peft takes for a linear layer's weight."""

from functools import cache

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from support.models import SHALLOW_MODELS, copied, deviation_in_range, draw, max_abs, run
from support.tables import in_turn

import llamoe

TEXT = next(case for case in SHALLOW_MODELS if case.name == "LlamoeForCausalLM")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
# Stacks of 72 x 104 and 52 x 72; square down_proj; square gate_up_proj, where a wrong way round raises nothing.
SIZES = (52, 72, 36)
for_sizes = pytest.mark.parametrize("intermediate_size", SIZES)
BOTH_AND_EACH = [STACKS, STACKS[:1], STACKS[1:]]
HOW = ["PeftModel", "load_adapter"]
INPUTS = TEXT.inputs(padding=(0, 0, 0), length=37)
# Stock multiplies in another order; logits of deviation 1 differ by up to 5e-6 without an adapter, too.
TOLERANCE = 2e-5


@cache
def pair(intermediate_size):
    """Ours and stock's model with one expert and the same weights, which several tests share."""
    sizes = dict(num_local_experts=1, num_experts_per_tok=1, intermediate_size=intermediate_size)
    ours = TEXT.make(**sizes)
    config = transformers.Llama4TextConfig(**llamoe.to_stock(ours.config))
    stock = draw(transformers.Llama4ForCausalLM, config)
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def adapted(model, stacks, **options):
    """A copy of a model with an adapter whose factors are all random, drawn from left to right."""
    options = dict(r=4, lora_alpha=6, target_modules=["v_proj"], target_parameters=stacks) | options
    model = get_peft_model(copied(model), LoraConfig(**options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                scale = 0.6 * parameter.shape[-1] ** -0.5 * torch.linspace(0.7, 1.3, parameter.shape[-1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def written_out(model, base):
    """A plain copy of `base` whose weights are W + (alpha / r) (B A), turned for the stacks, in float64."""
    factors = {name: p.detach().double() for name, p in model.named_parameters() if ".lora_" in name}
    plain = copied(base).double()
    weights = dict(plain.named_parameters())
    changed = set()
    for name, a in factors.items():
        if ".lora_A." not in name:
            continue
        update = (factors[name.replace(".lora_A.", ".lora_B.")] @ a) * 6 / 4
        module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
        if "experts" not in module:
            key = f"{module}.weight"
        else:
            stack = model.get_submodule(name.partition(".lora_A.")[0]).parameter_name
            key = f"{module.replace('.base_layer', '')}.{stack}"
            update = update.T[None]
        assert key not in changed
        changed.add(key)
        with torch.no_grad():
            weights[key] += update
    return plain.float(), changed


def load(model, folder, how):
    model = copied(model)
    if how == "PeftModel":
        return PeftModel.from_pretrained(model, folder)
    model.load_adapter(folder)
    return model


@pytest.mark.parametrize(
    ("intermediate_size", "stacks"),
    [(52, STACKS), (72, STACKS), (52, STACKS[:1]), (52, STACKS[1:]), (36, STACKS)],
)
def test_an_adapter_is_the_formula_also_merged_and_taken_off(intermediate_size, stacks):
    ours, _ = pair(intermediate_size)
    model = adapted(ours, stacks)
    plain, changed = written_out(model, ours)
    assert len([name for name in changed if ".experts." in name]) == len(stacks)
    expected, before = run(plain, **INPUTS), run(ours, **INPUTS)
    assert deviation_in_range(expected) and max_abs(expected, before) > 0.5
    assert max_abs(run(model, **INPUTS), expected) < 1e-5
    with model.disable_adapter():
        assert max_abs(run(model, **INPUTS), before) < 1e-5
    model.merge_adapter()
    assert max_abs(run(model, **INPUTS), expected) < 1e-5
    model.unmerge_adapter()
    assert max_abs(run(model, **INPUTS), expected) < 1e-5
    merged = model.merge_and_unload(safe_merge=True)
    assert type(merged) is type(ours)
    assert {name: p.shape for name, p in merged.named_parameters()} == {
        name: p.shape for name, p in ours.named_parameters()
    }
    assert max_abs(run(merged, **INPUTS), expected) < 1e-5


@pytest.mark.parametrize(("intermediate_size", "how"), in_turn(SIZES, HOW))
def test_it_is_trained_saved_and_loaded(intermediate_size, how, tmp_path):
    ours, _ = pair(intermediate_size)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["v_proj"], target_parameters=STACKS)
    model = get_peft_model(copied(ours), config).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=3.0)
    losses = []
    for _ in range(4):
        loss = model(**INPUTS, labels=INPUTS["input_ids"]).loss
        loss.backward()
        losses.append(loss.item())
        # In the first step the factors B are zeros, behind which A has no gradient.
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or (".lora_A." in name and len(losses) > 1):
                assert parameter.grad.abs().max() > 0, name
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.01
    expected = run(model.eval(), **INPUTS)
    assert max_abs(expected, run(written_out(model, ours)[0], **INPUTS)) < 1e-5
    model.save_pretrained(tmp_path / "adapter")
    assert max_abs(run(load(ours, tmp_path / "adapter", how), **INPUTS), expected) < 1e-6


@pytest.mark.parametrize(
    ("intermediate_size", "stacks", "how"),
    [
        (size, stacks, HOW[(i + j) % 2])
        for i, size in enumerate(SIZES)
        for j, stacks in enumerate(BOTH_AND_EACH)
        # A square stack alone does not tell its layout.
        if (size, stacks) not in ((72, STACKS[1:]), (36, STACKS[:1]))
    ],
    ids=str,
)
def test_an_adapter_of_stock_gives_stocks_logits(intermediate_size, stacks, how, tmp_path):
    ours, stock = pair(intermediate_size)
    trained = adapted(stock, stacks)
    trained.save_pretrained(tmp_path)
    expected = run(trained, **INPUTS)
    assert max_abs(expected, run(stock, **INPUTS)) > 0.5
    loaded = load(ours, tmp_path, how)
    assert max_abs(run(loaded, **INPUTS), expected) < TOLERANCE
    loaded.save_pretrained(tmp_path / "again")
    assert max_abs(run(load(ours, tmp_path / "again", how), **INPUTS), expected) < TOLERANCE


@for_sizes
def test_merged_weights_are_stocks(intermediate_size, tmp_path):
    ours, _ = pair(intermediate_size)
    model = adapted(ours, STACKS)
    expected = run(model, **INPUTS)
    model.merge_and_unload().save_pretrained(tmp_path, layout="stock")
    stock = transformers.Llama4ForCausalLM.from_pretrained(tmp_path)
    assert max_abs(run(stock, **INPUTS), expected) < TOLERANCE


def test_two_adapters_add_up():
    ours, _ = pair(72)
    model = adapted(ours, STACKS)
    model.add_adapter(
        "second", LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"], target_parameters=STACKS)
    )
    first = run(model, **INPUTS)
    model.base_model.set_adapter(["default", "second"])  # the second one's B is zeros
    assert max_abs(run(model, **INPUTS), first) < 1e-6
    model.set_adapter("second")
    assert max_abs(run(model, **INPUTS), run(ours, **INPUTS)) < 1e-6
