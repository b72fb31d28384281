"""peft's own functions on our models: default targets, "all-linear", experts, merging, prompts, tied heads."""

import copy
import json

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import constants
from support import programs
from support.models import (
    MULTIMODAL,
    SHALLOW,
    SHALLOW_MODELS,
    SHALLOW_VISION,
    for_models,
    generate,
    max_abs,
    run,
)

import llamoe

TYPES = {
    "llamoe_dense": "llama",
    "llamoe_mixtral": "mixtral",
    "llamoe_text": "llama4",
    "llamoe": "llama4",
    "llamoe_vision": "llama4",
}
DENSE, MIXTRAL, TEXT = [case for case in SHALLOW_MODELS if case.is_head][:3]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def randomize(model, seed=3):
    """Draw all factors at random; a new adapter has zeros in one of each pair."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.6 * noise * parameter.shape[-1] ** -0.5)
    return model


def adapted_names(model):
    """Return the names of the modules that an adapter has wrapped."""
    layers = peft.tuners.tuners_utils.BaseTunerLayer
    return {name for name, module in model.named_modules() if isinstance(module, layers)}


# Registration


def test_every_table_of_defaults_knows_every_model_type():
    tables = {
        name: table
        for name, table in vars(constants).items()
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and "llama" in table
    }
    assert len(tables) > 20 and "TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING" in tables
    for name, table in tables.items():
        for ours, stock in TYPES.items():
            expected = table.get(stock, table["llama"])
            if ours == "llamoe_vision":
                assert table[ours] and "gate_proj" not in table[ours], name
            else:
                assert table[ours] == expected, name


@pytest.mark.slow
def test_registration_waits_for_peft():
    """peft knows our model types also if it is imported after a model was built and `find_spec` was called."""
    code = """
import importlib.util, json, sys
import llamoe
from transformers.utils import is_peft_available
config = llamoe.LlamoeTextConfig(vocab_size=9, hidden_size=8, intermediate_size=8, intermediate_size_mlp=8,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_local_experts=2)
model = llamoe.LlamoeForCausalLM(config)
assert is_peft_available() and importlib.util.find_spec("peft") and "peft" not in sys.modules
waiting = lambda: [finder for finder in sys.meta_path if "llamoe" in type(finder).__module__]
before = waiting()
import peft
lora = peft.get_peft_model(model, peft.LoraConfig())
gone = [finder for finder in before if finder not in waiting()]
print(json.dumps([sorted(lora.targeted_module_names)[:2], len(gone)]))
"""
    done = programs.run(["-c", code])
    assert done.returncode == 0, done.stderr
    expected = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    assert json.loads(done.stdout.splitlines()[-1]) == [expected, 1]


# all-linear


def linear_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


@for_models("is_text", models=[case for case in SHALLOW_MODELS if "Mixtral" not in case.name])
def test_all_linear_leaves_the_tower_alone_unless_asked(case):
    model = case.make()
    linear = linear_names(model)
    tower = {name for name in linear if name.startswith("vision_model.")}
    assert bool(tower) == case.has_images
    head = {name for name in linear if name.endswith("lm_head")}
    assert bool(head) == case.is_head

    def targeted(**options):
        config = LoraConfig(target_modules="all-linear", **options)
        wrapped = get_peft_model(copy.deepcopy(model), config).base_model
        found = {
            name.removeprefix("base_model.model.").removeprefix("model.") for name in adapted_names(wrapped)
        }
        assert set(wrapped.targeted_module_names) == found or not case.is_head
        return set(wrapped.targeted_module_names)

    assert targeted() == linear - tower - head
    if case.has_images:
        assert "multi_modal_projector.linear_1" in targeted()
        assert targeted(exclude_modules=[]) == linear - head
        asked = targeted(exclude_modules=["k_proj"])
        assert asked == {name for name in linear - tower - head if not name.endswith("k_proj")}
    assert not any("router" in name or "embed" in name for name in targeted())


def test_all_linear_on_a_tower_by_itself_and_on_other_models():
    tower = next(case for case in SHALLOW_MODELS if not case.is_text).make()
    expected = linear_names(tower)
    wrapped = get_peft_model(tower, LoraConfig(target_modules="all-linear"))
    assert set(wrapped.base_model.targeted_module_names) == expected
    stock = transformers.Llama4VisionModel(
        transformers.Llama4VisionConfig(**llamoe.to_stock(MULTIMODAL.make_config().vision_config))
    )
    other = torch.nn.ModuleDict({"vision_model": stock, "linear": torch.nn.Linear(3, 4)})
    names = linear_names(other)
    wrapped = get_peft_model(other, LoraConfig(target_modules="all-linear"))
    assert set(wrapped.base_model.targeted_module_names) == names


# peft takes a stack of one expert for a linear layer's weight.
ONE = dict(num_local_experts=1, num_experts_per_tok=1)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (DENSE, {}),
        (MIXTRAL, {}),
        (MULTIMODAL, {"vision": SHALLOW_VISION, **SHALLOW}),
        # With no square stack, with a square down_proj, and with a square gate_up_proj.
        *((TEXT, {**ONE, "intermediate_size": size}) for size in (52, 72, 36)),
        (MIXTRAL, {**ONE, "intermediate_size": 72}),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_save_load_merge_and_unmerge(case, sizes, tmp_path):
    base, inputs = case.make(**sizes), case.inputs()
    before = run(base, **inputs)
    config = LoraConfig(target_modules=["q_proj", "down_proj"])
    if case.has_experts:
        config = LoraConfig(target_modules=["q_proj"], target_parameters=EXPERTS, r=3, lora_alpha=5)
    model = randomize(get_peft_model(copy.deepcopy(base), config)).eval()
    expected = run(model, **inputs)
    assert max_abs(expected, before) > 0.3
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.equal(run(loaded, **inputs), expected)
    loaded.merge_adapter()
    assert max_abs(run(loaded, **inputs), expected) < 1e-5
    loaded.unmerge_adapter()
    assert max_abs(run(loaded, **inputs), expected) < 1e-5
    weights = dict(base.named_parameters())
    for name, parameter in loaded.base_model.model.named_parameters():
        if ".lora_" not in name:
            assert max_abs(parameter, weights[name.replace(".base_layer", "")]) < 1e-6, name
    assert max_abs(run(loaded.unload(), **inputs), before) < 1e-5
    merged = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    assert type(merged) is case.model_class
    merged.save_pretrained(tmp_path / "merged", layout="stock")
    assert max_abs(run(case.model_class.from_pretrained(tmp_path / "merged"), **inputs), expected) < 1e-5


@pytest.mark.parametrize("name", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
@for_models("is_head", models=[case for case in SHALLOW_MODELS if not case.has_images])
def test_prompts_are_put_in_front_once(case, name):
    """With a cache, tokens are those of passes over the whole text without one."""
    options = {"encoder_hidden_size": 7} if name == "PromptEncoderConfig" else {}
    config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=4, **options)
    model = get_peft_model(case.make(), config).eval()
    inputs = case.inputs(padding=(0, 0), length=9)
    ids = inputs["input_ids"]
    for _ in range(4):
        ids = torch.cat([ids, run(model, input_ids=ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, inputs, max_new_tokens=4), ids)


def test_prefix_tuning_with_pictures():
    """Logits are those of the text model with the same prompts and the merged embeddings."""
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = MULTIMODAL.make()
    text_model = copy.deepcopy(model.language_model)
    torch.manual_seed(5)
    model = get_peft_model(model, config).eval()
    assert not any(p.requires_grad for p in model.get_base_model().parameters())
    by_text = get_peft_model(text_model, config).eval()
    by_text.prompt_encoder.load_state_dict(model.prompt_encoder.state_dict())
    inputs = MULTIMODAL.inputs(padding=(0, 0, 0))
    base = model.get_base_model()
    with torch.no_grad():
        embeds, _ = base._merge(inputs["input_ids"], None, inputs["pixel_values"], None)
    expected = run(by_text, inputs_embeds=embeds, attention_mask=inputs["attention_mask"])
    assert max_abs(run(model, **inputs), expected) < 1e-5
    assert max_abs(expected[:, -5:], run(base, **inputs)[:, -5:]) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["o_proj", "embed_tokens"]},
        {"trainable_token_indices": [3, 5]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_tied_head_inside_of_the_multimodal_class_is_trained(options):
    """peft finds a tied head in the multimodal class as in the text class."""
    config = LoraConfig(**{"target_modules": ["k_proj"], "ensure_weight_tying": True, **options})
    trained = []
    for make in (MULTIMODAL.make, lambda **text: MULTIMODAL.make(**text).language_model):
        model = get_peft_model(make(tie_word_embeddings=True), copy.deepcopy(config))
        named = model.named_parameters(remove_duplicate=False)
        names = [name.replace("language_model.", "") for name, p in named if p.requires_grad]
        trained.append({name for name in names if "embed" in name or "head" in name})
        factors = dict(model.named_parameters(remove_duplicate=False))
        head = [p for name, p in factors.items() if "lm_head.lora_A" in name]
        # The head shares the embedding's factors.
        assert all(
            any(p.data_ptr() == e.data_ptr() for n, e in factors.items() if "embedding_B" in n) for p in head
        )
    assert trained[0] == trained[1] and any("lm_head" in name for name in trained[0])


def test_a_head_that_merging_unties_is_saved(tmp_path):
    config = LoraConfig(target_modules=["k_proj"], modules_to_save=["embed_tokens"])
    model = get_peft_model(MULTIMODAL.make(tie_word_embeddings=True), config)
    model.get_base_model().get_input_embeddings().modules_to_save["default"].weight.data.mul_(0.5)
    expected = run(model.eval(), **MULTIMODAL.inputs())
    model.merge_and_unload().save_pretrained(tmp_path)
    loaded = llamoe.LlamoeForConditionalGeneration.from_pretrained(tmp_path)
    assert max_abs(run(loaded, **MULTIMODAL.inputs()), expected) < 1e-5
