"""Fields of a `LoraConfig` that choose layers and modules also choose experts, whichever function takes it."""

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from support.models import SHALLOW_MODELS
from support.tables import in_turn

import llamoe

_, MIXTRAL, TEXT, MULTIMODAL = [case for case in SHALLOW_MODELS if case.is_head]
STACKS = ["experts.down_proj", "experts.gate_up_proj"]


def make(case):
    """Return a model of two layers, both with experts if the class has them."""
    return case.make(**({"moe_layers": [0, 1]} if case.is_llama4 else {}))


def adapted_parts(model):
    """Return the layer and the last two parts of the name of each adapted module and stack."""
    parts = set()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            *_, parent, child = name.replace(".base_layer", "").split(".")
            layer = name.split("layers.")[1][0] if "layers." in name else None
            stack = getattr(module, "parameter_name", None)
            parts.add((layer, f"{parent}.{child}" if stack is None else f"{child}.{stack}"))
    return parts


@pytest.mark.parametrize(
    "case", [case for case in SHALLOW_MODELS if case.is_text], ids=lambda case: case.name
)
def test_layers_of_a_config_by_parts(case):
    case_model = make(case)
    model = get_peft_model(make(case), llamoe.lora_config(case_model, layers_to_transform=[1], r=2))
    whole = get_peft_model(make(case), llamoe.lora_config(case_model, r=2))
    assert adapted_parts(model) == {(layer, part) for layer, part in adapted_parts(whole) if layer == "1"}
    assert not case.has_experts or {("1", stack) for stack in STACKS} <= adapted_parts(model)
    assert not any("vision_model" in name for name in model.base_model.targeted_module_names)


def attention_and_experts(layer):
    return {(layer, "self_attn.k_proj"), *((layer, stack) for stack in STACKS)}


ATTENTION = {("0", "self_attn.k_proj"), ("1", "self_attn.k_proj")}


FIELDS = {
    "layers": ({"layers_to_transform": [1]}, attention_and_experts("1")),
    "pattern": ({"layers_to_transform": 0, "layers_pattern": "layers"}, attention_and_experts("0")),
    "regex": ({"exclude_modules": r".*layers\.0.*"}, attention_and_experts("1")),
    "excluded": ({"exclude_modules": ["experts"]}, ATTENTION),
    "saved": ({"modules_to_save": ["experts"]}, ATTENTION),
    "stack": (
        {"exclude_modules": ["gate_up_proj"]},
        ATTENTION | {(layer, "experts.down_proj") for layer in "01"},
    ),
}
FUNCTIONS = [
    (MIXTRAL, "get_peft_model"),
    (TEXT, "get_peft_model"),
    (MULTIMODAL, "add_adapter"),
    (MIXTRAL, "add_adapter"),
    (MIXTRAL, "PeftModel.add_adapter"),
]


@pytest.mark.parametrize(
    ("field", "function"),
    in_turn(FIELDS, FUNCTIONS, times=3),
    ids=lambda it: it if isinstance(it, str) else it[1],
)
def test_a_config_by_hand(field, function, tmp_path):
    (options, expected), (case, function) = FIELDS[field], function
    model = make(case)
    # The tower has layers named `k_proj`, too.
    names = [name for name, _ in model.named_modules() if name.endswith("k_proj") and "vision" not in name]
    by_layer = (
        {"target_modules": ["k_proj"]} if "layers_to_transform" in options else {"target_modules": names}
    )
    if case.has_images and "layers_to_transform" in options:
        model.vision_model.model.layers = model.vision_model.model.layers[:0]
    config = LoraConfig(target_parameters=STACKS, r=2, **by_layer, **options)
    if function == "get_peft_model":
        model = get_peft_model(model, config)
    elif function == "add_adapter":
        model.add_adapter(config)
    else:
        model = get_peft_model(model, LoraConfig(target_modules=["o_proj"]))
        model.add_adapter("other", config)
        expected = expected | {part for part in adapted_parts(model) if part[1] == "self_attn.o_proj"}
    assert adapted_parts(model) == expected
    chosen = {
        (name.split("layers.")[1][0], ".".join(name.split(".")[-2:])) for name in config.target_parameters
    }
    assert chosen == {part for part in expected if part[1] in STACKS}
    if function == "get_peft_model":
        model.save_pretrained(tmp_path)
        assert adapted_parts(PeftModel.from_pretrained(make(case), tmp_path)) == expected


def test_ranks_of_stacks_and_layers():
    patterns = {"rank_pattern": {"experts.gate_up_proj": 3, r"layers\.0\.mlp\.experts\.down_proj": 5}}
    patterns["alpha_pattern"] = {"down_proj": 7}
    config = llamoe.lora_config(MIXTRAL.make(), r=2, exclude_modules=["o_proj"], **patterns)
    model = get_peft_model(MIXTRAL.make(), config)
    found = [
        (module.parameter_name, module.r["default"], module.lora_alpha["default"])
        for module in model.modules()
        if hasattr(module, "parameter_name")
    ]
    assert found == [("down_proj", 5, 7), ("gate_up_proj", 3, 4), ("down_proj", 2, 7), ("gate_up_proj", 3, 4)]


def test_all_adapters_change_the_same_stacks():
    model = get_peft_model(MIXTRAL.make(), llamoe.lora_config(MIXTRAL.make(), layers_to_transform=[1]))
    before = adapted_parts(model)
    # A config with other words may choose the same stacks.
    same = LoraConfig(target_modules=["q_proj"], target_parameters=STACKS, layers_to_transform=[1])
    model.add_adapter("other", same)
    assert adapted_parts(model) == before
    for other in ({"layers_to_transform": [0]}, {"exclude_modules": ["gate_up_proj"]}):
        with pytest.raises(ValueError, match="must target the same set"):
            model.add_adapter("third", llamoe.lora_config(model.get_base_model(), **other))
    assert adapted_parts(model) == before and set(model.peft_config) == {"default", "other"}
