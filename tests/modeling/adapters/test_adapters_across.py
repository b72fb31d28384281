"""Adapters of stock models load on ours and the other way round, by `PeftModel` and by `load_adapter`."""

import copy
from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from support.models import (
    SHALLOW,
    SHALLOW_MODELS,
    draw,
    main_output,
    max_abs,
    run,
    stock_text_config,
)
from support.tables import in_turn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import llamoe
from llamoe.modeling.adapters.expert_layout import exchange_factors

HEADS = [case for case in SHALLOW_MODELS if case.is_head]
DENSE, MIXTRAL, TEXT, MULTIMODAL = HEADS
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The feed-forward of the tower, its embedding of patches, and the projector.
TOWER = ["fc1", "fc2", "linear", "linear_1"]
ADAPTERS = {
    "all": dict(target_modules=LINEAR + TOWER),
    "dora": dict(target_modules=["q_proj", "up_proj"], use_dora=True),
    "saved": dict(target_modules=["v_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "tokens": dict(target_modules=["v_proj"], trainable_token_indices=[3, 5, 7]),
    "embeddings": dict(target_modules=["v_proj", "lm_head", "embed_tokens"]),
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@cache
def pair(case, **text):
    """Return our model and stock's with the same weights; tests share them and adapt copies."""
    ours = case.make(**text)
    stock_class = getattr(transformers, case.stock_name)
    stock = draw(stock_class, stock_class.config_class(**llamoe.to_stock(ours.config)))
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def inputs_of(case):
    # Without padding: stock Llama 4 gives tokens behind padding other positions.
    return case.inputs(padding=(0, 0, 0), length=37)


def adapted(model, seed=3, **options):
    """Return a copy of a model with random factors, since those of a new adapter change nothing."""
    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name and "magnitude" not in name:
                scale = 0.6 * parameter.shape[-1] ** -0.5 * torch.linspace(0.7, 1.3, parameter.shape[-1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            # These are magnitudes, copies of whole modules, and tokens.
            elif parameter.requires_grad:
                parameter.mul_(1.1).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def load(model, folder, how):
    """Load an adapter into a copy of a model: by `PeftModel`, by `load_adapter`, or by the latter from "memory"."""
    model = copy.deepcopy(model)
    if how == "PeftModel":
        return PeftModel.from_pretrained(model, folder)
    if how == "memory":
        tensors = load_file(folder / "adapter_model.safetensors")
        info = model.load_adapter(peft_config=LoraConfig.from_pretrained(folder), adapter_state_dict=tensors)
    else:
        info = model.load_adapter(folder)
    assert not info.missing_keys and not info.unexpected_keys and not info.mismatched_keys, info
    return model


def check_loads(trained, target, folder, how, inputs, tolerance=2e-5):
    """Check that an adapter changes logits by more than 0.05, and that it gives `target` the logits of `trained`."""
    trained.save_pretrained(folder)
    expected = run(trained, **inputs)
    assert max_abs(expected, run(target, **inputs)) > 0.05
    loaded = load(target, folder, how)
    assert max_abs(run(loaded, **inputs), expected) < tolerance, how
    return loaded


WAYS = ["PeftModel", "load_adapter"]
both_ways = pytest.mark.parametrize("how", WAYS)


@pytest.mark.parametrize(
    ("kind", "case"),
    [*in_turn(ADAPTERS, HEADS), ("all", MULTIMODAL)],
    ids=lambda value: getattr(value, "name", value),
)
def test_adapters_of_stock_give_the_same_logits_on_ours_and_back(case, kind, tmp_path):
    """The measured difference is 0 for the dense family and at most 9.3e-6 for mixtures (6e-6 without an adapter).

    Logits have a deviation of 1, and the adapters change them by more than 1.
    """
    ours, stock = pair(case)
    # Load on stock by peft alone: stock's `load_adapter` drops DoRA's vectors and, before
    # transformers 5.23, trained embeddings and every adapter of a multimodal model.
    for name, source, target, ways in (("stock", stock, ours, WAYS), ("ours", ours, stock, WAYS[:1])):
        trained = adapted(source, **ADAPTERS[kind])
        for how in ways:
            check_loads(trained, target, tmp_path / name, how, inputs_of(case))
    files = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("stock", "ours"))
    assert set(next(files)) == set(next(files))


# The experts' stacked tensors


def expert_pair(targets, case=TEXT, **sizes):
    """Return our model, stock's, and a copy of stock's with an adapter of its experts."""
    ours, stock = pair(case, **sizes)
    options = dict(target_modules=["v_proj"], target_parameters=targets, rank_pattern={"v_proj": 3})
    return ours, stock, adapted(stock, **options)


# peft takes a stack of one expert for a linear layer's weight.
ONE = dict(num_local_experts=1, num_experts_per_tok=1)


@pytest.mark.parametrize(
    ("targets", "sizes", "how"),
    [
        (EXPERTS, {}, "load_adapter"),
        (EXPERTS[:1], {}, "PeftModel"),
        (EXPERTS[1:], {}, "memory"),
        (EXPERTS, {"case": MULTIMODAL}, "PeftModel"),
        (EXPERTS, {"case": MULTIMODAL}, "memory"),
        (EXPERTS, ONE, "load_adapter"),
        (EXPERTS[:1], {**ONE, "intermediate_size": 72}, "load_adapter"),
        (EXPERTS[1:], {**ONE, "intermediate_size": 36}, "PeftModel"),
        (EXPERTS, {**ONE, "intermediate_size": 72}, "PeftModel"),
        (EXPERTS, {**ONE, "intermediate_size": 36}, "load_adapter"),
    ],
    # A case's `str` contains an address, which differs between test processes.
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_experts_trained_on_stock_are_turned_round(targets, sizes, how, tmp_path):
    ours, _, trained = expert_pair(targets, **sizes)
    inputs = inputs_of(sizes.get("case", TEXT))
    loaded = check_loads(trained, ours, tmp_path, how, inputs)
    # Saved from our model, the adapter has our layout.
    loaded.save_pretrained(tmp_path / "again")
    assert max_abs(run(load(ours, tmp_path / "again", how), **inputs), run(trained, **inputs)) < 2e-5


@both_ways
@pytest.mark.parametrize(("targets", "intermediate_size"), [(EXPERTS[1:], 72), (EXPERTS[:1], 36)], ids=str)
def test_square_experts_alone_are_refused(targets, intermediate_size, how, tmp_path):
    """If experts have as many inputs as outputs, shapes do not show the layout, and the wrong one would load."""
    ours, stock, trained = expert_pair(targets, intermediate_size=intermediate_size)
    trained.save_pretrained(tmp_path / "square")
    with pytest.raises(ValueError, match="as many inputs as outputs"):
        load(ours, tmp_path / "square", how)
    with pytest.raises(ValueError, match="adapt both stacks, gate_up_proj and down_proj"):
        adapted(ours, target_parameters=targets)
    # Of two adapted stacks one is not square, and shows the layout of both.
    both = adapted(stock, target_modules=["v_proj"], target_parameters=EXPERTS)
    check_loads(both, ours, tmp_path / "both", how, inputs_of(TEXT))


@pytest.mark.parametrize("rank", [4, 3, 5])
def test_adapters_of_experts_swap_for_the_same_layout_and_rank(rank, tmp_path):
    """peft's own function refuses stock's layout; transformers' `hotswap=True` converts it first."""
    ours, stock = pair(TEXT)
    # No `rank_pattern`: peft's function gives layers of all ranks one scale, on stock models, too.
    options = dict(target_modules=["v_proj"], target_parameters=EXPERTS[1:])
    first, second = adapted(ours, **options), adapted(ours, seed=5, r=rank, **options)
    of_stock = adapted(stock, seed=7, **options)
    for name, model in (("first", first), ("second", second), ("stock", of_stock)):
        model.save_pretrained(tmp_path / name)
    swapped, loaded = (load(ours, tmp_path / "first", how) for how in WAYS)
    swap = partial(hotswap_adapter, swapped, adapter_name="default", torch_device="cpu")
    inputs = inputs_of(TEXT)
    with pytest.raises(ValueError, match=r"hotswap: .*the same rank and layout"):
        swap(tmp_path / "stock")
    loaded.load_adapter(tmp_path / "stock", "default", hotswap=True)
    assert max_abs(run(loaded, **inputs), run(of_stock, **inputs)) < 1e-5
    if rank == 4:
        swap(tmp_path / "second")
        loaded.load_adapter(tmp_path / "second", "default", hotswap=True)
        assert max_abs(run(loaded, **inputs), run(second, **inputs)) < 1e-5
    else:
        with pytest.raises(ValueError, match=r"hotswap: .*the same rank and layout"):
            swap(tmp_path / "second")
    assert max_abs(run(swapped, **inputs), run(second if rank == 4 else first, **inputs)) < 1e-5


def test_adapter_for_a_model_on_disk_is_refused(tmp_path):
    ours, _ = pair(TEXT)
    ours.save_pretrained(tmp_path / "model")
    adapted(ours, target_modules=["v_proj"]).save_pretrained(tmp_path / "adapter")
    model = type(ours).from_pretrained(tmp_path / "model", device_map={"": "cpu", "model.layers.1": "disk"})
    with pytest.raises(ValueError, match="on disk"):
        model.load_adapter(tmp_path / "adapter")


# Parts and wholes


@pytest.mark.parametrize(("targets", "how"), [(LINEAR, "PeftModel"), (["v_proj"], "load_adapter")], ids=str)
def test_multimodal_adapter_on_the_text_model(targets, how, tmp_path, caplog):
    """The text model's tensors are loaded; those of the tower are ignored, and a warning says so."""
    _, stock = pair(MULTIMODAL)
    stock.save_pretrained(tmp_path / "base")
    text = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path / "base")
    trained, inputs = adapted(stock, target_modules=targets), {"input_ids": torch.randint(3, 90, (2, 33))}
    check_loads(trained, text, tmp_path / "adapter", how, inputs)
    assert "vision_model" in caplog.text and "are ignored" in caplog.text


@pytest.mark.parametrize(
    ("case", "how"),
    [(DENSE, "PeftModel"), (TEXT, "load_adapter"), (MULTIMODAL, "PeftModel")],
    ids=lambda value: getattr(value, "name", value),
)
def test_adapter_of_a_head_on_the_base_model_and_back(case, how, tmp_path):
    ours = case.make()
    inputs = inputs_of(case)
    # For CAUSAL_LM, peft has no base models.
    trained = adapted(ours, task_type=None, target_modules=LINEAR)
    trained.save_pretrained(tmp_path / "head")
    with torch.no_grad():
        base = copy.deepcopy(ours).model
        states = main_output(load(base, tmp_path / "head", how)(**inputs))
        assert max_abs(ours.get_output_embeddings()(states), run(trained, **inputs)) < 1e-5
    trained = adapted(base, task_type=None, target_modules=LINEAR)
    trained.save_pretrained(tmp_path / "base")
    expected = ours.get_output_embeddings()(run(trained, **inputs))
    assert max_abs(run(load(ours, tmp_path / "base", how), **inputs), expected) < 1e-5


# What is around an adapter


@pytest.mark.parametrize("case", [MIXTRAL, MULTIMODAL], ids=lambda case: case.name)
def test_auto_classes_follow_an_adapter_to_its_base(case, tmp_path):
    ours = case.make()
    ours.save_pretrained(tmp_path / "base")
    trained = adapted(case.model_class.from_pretrained(tmp_path / "base"), target_modules=LINEAR)
    trained.save_pretrained(tmp_path / "adapter")
    inputs = inputs_of(case)
    expected = run(trained, **inputs)
    auto_class = AutoModelForImageTextToText if case.has_images else AutoModelForCausalLM
    for loader in (auto_class, case.model_class):
        loaded = loader.from_pretrained(tmp_path / "adapter")
        assert type(loaded) is case.model_class
        assert torch.equal(run(loaded, **inputs), expected)


@both_ways
def test_several_adapters_of_stock_and_ours(how, tmp_path):
    ours, stock = pair(TEXT)
    inputs = inputs_of(TEXT)
    base = run(ours, **inputs)
    first = adapted(stock, target_modules=["q_proj"], target_parameters=EXPERTS)
    second = adapted(ours, seed=4, target_modules=LINEAR, target_parameters=EXPERTS)
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    model = load(ours, tmp_path / "first", how)
    model.load_adapter(tmp_path / "second", adapter_name="second")
    for name, trained in (("default", first), ("second", second), ("default", first)):
        model.set_adapter(name)
        assert max_abs(run(model, **inputs), run(trained, **inputs)) < 1e-5
    with model.disable_adapter() if how == "PeftModel" else nullcontext(model.disable_adapters()):
        assert torch.equal(run(model, **inputs), base)


# Adapters that do not belong to the model


def adapter_of(tmp_path, make, **options):
    adapted(make, **{"target_modules": LINEAR, **options}).save_pretrained(tmp_path / "other")
    return tmp_path / "other"


WRONG = {
    "narrower": (dict(hidden_size=66), r"\[66, 4\] .*\[72, 4\], and 13 more"),
    "longer": (dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1]), r"layers\.2"),
    "shorter": (dict(num_hidden_layers=1, moe_layers=[], no_rope_layers=[1]), r"layers\.1"),
    "fewer experts": (dict(num_local_experts=4), r"experts.*\[16, 52\] .*\[20, 52\]"),
}


@pytest.mark.parametrize(("kind", "how"), [*in_turn(WRONG, WAYS), ("longer", "load_adapter")])
def test_adapter_of_another_base_is_refused(kind, how, tmp_path):
    overrides, message = WRONG[kind]
    options = {"target_parameters": EXPERTS[1:]} if "experts" in kind else {}
    config = stock_text_config(**{"num_experts_per_tok": 2, **SHALLOW, **overrides})
    other = draw(transformers.Llama4ForCausalLM, config)
    # Of experts in our layout the shapes are compared as they are.
    if "experts" in kind:
        other = TEXT.make(**overrides)
    folder = adapter_of(tmp_path, other, **options)
    model, inputs = TEXT.make(), inputs_of(TEXT)
    before = run(model, **inputs)
    loader = model.load_adapter if how == "load_adapter" else partial(PeftModel.from_pretrained, model)
    with pytest.raises(ValueError, match=message):
        loader(folder)
    assert torch.equal(run(model, **inputs), before)


@both_ways
def test_a_file_that_lacks_a_tensor_is_refused(how, tmp_path):
    """peft would keep the random initialization of that tensor."""
    ours, _ = pair(DENSE)
    file = adapter_of(tmp_path, ours) / "adapter_model.safetensors"
    _, *others = load_file(file).items()
    save_file(dict(others), file)
    with pytest.raises(ValueError, match="the adapter has no "):
        load(ours, tmp_path / "other", how)


METHODS = dict.fromkeys(("IA3Config", "LoHaConfig", "LoKrConfig", "RandLoraConfig", "VeraConfig"), {}) | {
    "BOFTConfig": {"boft_block_size": 4},
    "LNTuningConfig": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "LoraConfig": {"bias": "all"},
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_of_stock_give_the_same_logits(method, tmp_path):
    ours, stock = pair(MULTIMODAL)
    trained = get_peft_model(copy.deepcopy(stock), getattr(peft, method)(**METHODS[method]))
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    check_loads(trained.eval(), ours, tmp_path, "PeftModel", inputs_of(MULTIMODAL))
    if method in ("VeraConfig", "RandLoraConfig"):
        with pytest.raises(ValueError, match="get_peft_model|belongs to nothing"):
            load(ours, tmp_path, "load_adapter")
    else:
        check_loads(trained, ours, tmp_path, "load_adapter", inputs_of(MULTIMODAL))


def test_all_linear_of_ours_on_stock(tmp_path):
    """Stock cannot train such an adapter: peft wraps its router, a linear layer that returns a pair."""
    ours, stock = pair(MULTIMODAL)
    trained = adapted(ours, target_modules="all-linear")
    check_loads(trained, stock, tmp_path, "PeftModel", inputs_of(MULTIMODAL))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "w1", "w2", "w3"], ["gate", "v_proj"]], ids=str)
def test_names_of_mixtrals_layers_mean_what_peft_makes_of_them_on_stock(targets, tmp_path):
    """The names of experts and routers in transformers 4 choose the same layers as on stock's model."""
    ours, stock = pair(MIXTRAL)
    shapes = []
    for name, source, target in (("stock", stock, ours), ("ours", ours, stock)):
        trained = adapted(source, target_modules=targets)
        check_loads(trained, target, tmp_path / name, "PeftModel", inputs_of(MIXTRAL))
        weights = load_file(tmp_path / name / "adapter_model.safetensors")
        shapes.append({key: value.shape for key, value in weights.items()})
    assert shapes[0] == shapes[1]


@both_ways
def test_layers_to_transform_on_stock_and_ours(how, tmp_path):
    """On stock, peft adapts the stacks of all layers, so that the file has more than its config says; ours does not."""
    ours, stock = pair(MIXTRAL)
    options = dict(target_modules=["v_proj"], target_parameters=EXPERTS, layers_to_transform=[1])
    adapted(stock, **options).save_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts.* belongs to nothing"):
        load(ours, tmp_path / "stock", how)
    for model, way in ((ours, how), (stock, "PeftModel")):
        check_loads(adapted(ours, **options), model, tmp_path / "ours", way, inputs_of(MIXTRAL))


TARGETS = dict(target_modules="all-linear", target_parameters=EXPERTS)


@pytest.mark.parametrize(
    ("trained_on", "loaded_on", "how"),
    [
        ("LlamoeForConditionalGeneration", "LlamoeForCausalLM", "PeftModel"),
        ("LlamoeForConditionalGeneration", "LlamoeModel", "load_adapter"),
        ("LlamoeForCausalLM", "LlamoeTextModel", "PeftModel"),
        ("LlamoeForCausalLM", "LlamoeForConditionalGeneration", "load_adapter"),
        ("LlamoeForCausalLM", "LlamoeForConditionalGeneration", "PeftModel"),
    ],
)
def test_an_adapter_of_a_whole_is_not_loaded_on_a_part_nor_the_other_way_round(
    trained_on, loaded_on, how, tmp_path
):
    """Adapters of "all-linear" change layers that the other class lacks, or has under other names."""
    whole = MULTIMODAL.make() if "LlamoeForConditionalGeneration" in (trained_on, loaded_on) else TEXT.make()
    whole.save_pretrained(tmp_path / "model")
    trained, other = (
        getattr(llamoe, name).from_pretrained(tmp_path / "model") for name in (trained_on, loaded_on)
    )
    adapted(trained, **TARGETS, task_type=None).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="does not fit this |Target modules .* not found"):
        load(other, tmp_path / "adapter", how)


def test_adapters_of_single_experts_that_transformers_4_trained(tmp_path):
    ours, stock = pair(MIXTRAL)
    config = ours.config
    targets = ["q_proj", "w1", "w2", "w3"]
    LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM").save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    hidden, inner = config.hidden_size, config.intermediate_size
    layers = {"self_attn.q_proj": (hidden, config.num_attention_heads * config.head_dim)}
    for expert in range(config.num_local_experts):
        for name, sizes in (("w1", (hidden, inner)), ("w3", (hidden, inner)), ("w2", (inner, hidden))):
            layers[f"block_sparse_moe.experts.{expert}.{name}"] = sizes
    weights = {}
    for layer, (name, (size_in, size_out)) in product(range(config.num_hidden_layers), layers.items()):
        place = f"base_model.model.model.layers.{layer}.{name}"
        weights[f"{place}.lora_A.weight"] = 0.2 * torch.randn(3, size_in, generator=generator)
        weights[f"{place}.lora_B.weight"] = 0.2 * torch.randn(size_out, 3, generator=generator)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    inputs = inputs_of(MIXTRAL)
    expected = run(load(stock, tmp_path, "PeftModel"), **inputs)
    assert max_abs(expected, run(ours, **inputs)) > 0.3
    for how in WAYS:
        assert max_abs(run(load(ours, tmp_path, how), **inputs), expected) < 2e-5


def test_an_adapter_of_the_other_layout_is_refused(tmp_path):
    """The factors of the file are exchanged, as if the experts were stored input-first."""
    ours, _ = pair(MIXTRAL)
    adapted(ours, target_modules=["v_proj"], target_parameters=EXPERTS).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    for key in [key for key in weights if "experts" in key and "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        weights[key], weights[other] = exchange_factors(weights[key], weights[other], 5)
    weights = {key: value.contiguous() for key, value in weights.items()}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    for how in WAYS:
        with pytest.raises((ValueError, RuntimeError), match="shape"):
            load(ours, tmp_path, how)
