"""Errors and warnings about wrong configs, damaged folders and odd weights of quantized models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.few_bits import folder, load, logits, make, packed, save
from support.tables import in_turn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import llamoe
from llamoe.configuration import CheckpointError, ConfigurationError

LINEAR = "model.layers.1.self_attn.k_proj.weight"
STACK = "model.layers.1.mlp.experts.down_proj"
STOCK = dict(
    vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=3,
)  # fmt: skip


# Configs


@pytest.mark.parametrize(
    "fields",
    [
        dict(weights="int3"), dict(weights=4), dict(group_size=48), dict(group_size=64.0),
        dict(group_size="64"), dict(group_size=32, weights="int8"),
        dict(experts=False, linears=False), dict(modules_to_not_convert=3), dict(modules_to_not_convert=[""]),
        dict(bits=4), dict(quant_method="gptq"), dict(format_version=2), dict(format_version=True),
    ],
    ids=str,
)  # fmt: skip
def test_configs(fields):
    with pytest.raises(ConfigurationError, match=next(iter(fields))):
        llamoe.QuantizationConfig(**fields)


def test_a_config_is_a_dict_as_well():
    given = {"quant_method": "llamoe", "weights": "int8"}
    model = AutoModelForCausalLM.from_pretrained(folder("mixtral"), quantization_config=given)
    assert torch.equal(logits(model), logits(packed("mixtral", "int8")))
    with pytest.raises(ConfigurationError, match="weights"):
        AutoModelForCausalLM.from_pretrained(
            folder("mixtral"), quantization_config=given | {"weights": "int2"}
        )


def test_a_number_of_outputs_that_int4_does_not_support():
    """The message names the layer to list in `modules_to_not_convert`."""
    with pytest.raises(ConfigurationError, match=r"k_proj.*24 outputs.*modules_to_not_convert"):
        load(save(make("mixtral", head_dim=12)), "int4")


def test_a_class_of_transformers(tmp_path):
    MixtralForCausalLM(MixtralConfig(**STOCK)).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"MixtralForCausalLM.*adopt\(\)"):
        MixtralForCausalLM.from_pretrained(tmp_path, quantization_config=llamoe.QuantizationConfig("int8"))


# Folders


def spoilt(folder, config=None, tensors=None):
    """Change config.json and tensors of a packed folder by these functions, in place; return the folder."""
    if config is not None:
        path = folder / "config.json"
        content = json.loads(path.read_text())
        config(content)
        path.write_text(json.dumps(content))
    if tensors is not None:
        path = folder / "model.safetensors"
        content = {name: tensor.clone() for name, tensor in load_file(path).items()}
        tensors(content)
        save_file({name: t.contiguous() for name, t in content.items()}, path, {"format": "pt"})
    return folder


def changed(**fields):
    return lambda content: content["quantization_config"].update(fields)


def packed_as(weights):
    """Return a change of config.json which says that plain weights are packed."""
    return lambda content: content.update(quantization_config=llamoe.QuantizationConfig(weights).to_dict())


@pytest.mark.parametrize(
    ("weights", "change", "named"),
    [
        ("int4", changed(group_size=64), r"_proj\S*_scale has shape \[.*, 128, 2\]"),
        ("int4", changed(group_size=256), r"_proj\S*_scale has shape"),
        ("int8", changed(weights="int4"), "config.json"),
        ("int4", lambda content: content["quantization_config"].pop("quant_method"), "has no `quant_method`"),
        ("int4", changed(format_version=2), "format_version"),
        ("int4", changed(linears=False), "config.json"),
        ("int8", changed(modules_to_not_convert=["o_proj"]), "o_proj.weight has dtype I8"),
        ("int8", lambda content: content.pop("quantization_config"), "has dtype I8, .*quantization_config"),
        (None, packed_as("int4"), "config.json"),
        (None, packed_as("int8"), "config.json"),
    ],
)
def test_weights_and_configs_that_do_not_belong_together(weights, change, named):
    model = packed("mixtral", weights) if weights else make("mixtral").bfloat16()
    with pytest.raises(ValueError, match=named):
        AutoModelForCausalLM.from_pretrained(spoilt(save(model), config=change))


@pytest.mark.parametrize(
    ("weights", "asked"),
    [("int4", dict(weights="int8")), ("int4", dict(group_size=64)), ("int8", dict(experts=False))],
)
def test_packed_folders_are_not_packed_again(weights, asked):
    """If the requested config differs from the folder's, transformers warns that it ignores the request."""
    path = save(packed("dense", weights))
    config = llamoe.QuantizationConfig(**asked)
    with pytest.warns(UserWarning, match="`quantization_config` from the model will be used"):
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    assert torch.equal(logits(model), logits(packed("dense", weights)))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_request_for_activations_overrides_the_folder(weights, recwarn):
    """A config that gives `activations` alone asks for nothing else, so no warning says that it is ignored."""
    fields = dict(group_size=64) if weights == "int4" else {}
    models = {
        chosen: load(folder("mixtral"), weights, activations=chosen, **fields) for chosen in ("int8", "float")
    }
    recwarn.clear()
    for stored, packed_model in models.items():
        path = save(packed_model)
        # Without a request the folder's own `activations` count.
        for asked, chosen in (
            (dict(activations="float"), "float"),
            (dict(activations="int8"), "int8"),
            ({}, stored),
        ):
            config = llamoe.QuantizationConfig(**asked)
            model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
            assert torch.equal(logits(model), logits(models[chosen])), (stored, asked)
            assert model.config.quantization_config.activations == chosen
    assert not [each for each in recwarn if "quantization_config" in str(each.message)]


@pytest.mark.parametrize(
    ("weights", "part", "function", "wrong"),
    [
        ("int4", f"{STACK}_scale", lambda scale: scale[..., :-1], " has shape"),
        ("int8", f"{LINEAR}_scale", lambda scale: scale.view(torch.int16), " has dtype I16"),
        ("int8", STACK, lambda codes: codes.bfloat16(), " has dtype BF16"),
        ("int4", LINEAR, lambda codes: codes.view(torch.int8), " has dtype"),
        ("int8", STACK, lambda codes: codes[:, :-16], " has shape"),
        ("int4", f"{STACK}_scale", None, ""),
        ("int8", LINEAR, None, ""),
    ],
)
def test_damaged_and_missing_parts(weights, part, function, wrong):
    """The error also comes with `ignore_mismatched_sizes`, and for a class with a new head, which may lack weights."""

    def change(tensors):
        tensor = tensors.pop(part)
        if function is not None:
            tensors[part] = function(tensor)

    path = spoilt(save(packed("mixtral", weights)), tensors=change)
    for loaded, ignores in (
        (llamoe.LlamoeMixtralForCausalLM, False),
        (llamoe.LlamoeMixtralForCausalLM, True),
        (llamoe.LlamoeMixtralForTokenClassification, True),
    ):
        with pytest.raises(CheckpointError, match=f"{part}{wrong}"):
            loaded.from_pretrained(path, ignore_mismatched_sizes=ignores)


def test_missing_weights_are_not_quantized(weights):
    path = spoilt(save(make("dense").bfloat16()), tensors=lambda tensors: tensors.pop(LINEAR))
    config = llamoe.QuantizationConfig(weights)
    with pytest.raises(CheckpointError, match=LINEAR):
        llamoe.LlamoeDenseForTokenClassification.from_pretrained(path, quantization_config=config)


# Weights


def loaded_with(key, change, weights):
    """Quantize a model with a changed weight; return the model, its dequantized weight and the changed weight."""
    model = make("mixtral" if key == STACK else "dense")
    weight = model.get_parameter(key)
    with torch.no_grad():
        change(weight)
    found = load(save(model), weights)
    path, _, name = key.rpartition(".")
    return found, found.get_submodule(path).dequantized_weight(name, torch.float32), weight.detach().float()


def rows(weight):
    return weight.view(-1, weight.shape[-1])


@pytest.mark.parametrize(
    ("weights", "key", "value"), [("int4", LINEAR, float("nan")), ("int8", STACK, float("inf"))]
)
def test_weights_that_are_nan_or_infinite_are_refused(weights, key, value):
    """Quantization must not turn them into numbers, and attention can hide NaN in keys."""
    with pytest.raises(CheckpointError, match=rf"^{key}_scale has scales that are NaN"):
        loaded_with(key, lambda weight: rows(weight)[3, 5].fill_(value), weights)


ODD = [
    (lambda weight: rows(weight)[3].fill_(0.37), 0.01),
    (lambda weight: rows(weight)[3].zero_(), 0.0),
    (lambda weight: weight.add_(100), 0.01),
    (lambda weight: rows(weight)[3].mul_(1e30), 0.15),
    (lambda weight: rows(weight)[3].mul_(1e-41), 0.15),
]


@pytest.mark.parametrize(("odd", "stored"), in_turn(range(len(ODD)), [("int4", STACK), ("int8", LINEAR)]))
def test_odd_weights(odd, stored):
    """`error` limits the error of the odd row, which follows from 16 levels and from the 8 bits of bfloat16 scales."""
    (change, error), (weights, key) = ODD[odd], stored
    model, found, expected = loaded_with(key, change, weights)
    sizes = rows(expected.double()).norm(dim=1)
    errors = rows((found - expected).double()).norm(dim=1)
    # Of numbers below 1e-38 bfloat16 has fewer bits.
    assert errors[3] <= error * sizes[3] + 1e-36
    assert (errors <= 0.15 * sizes + 1e-36).all()
    assert not logits(model).isnan().any()
