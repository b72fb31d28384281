"""Stock folders as users have them: with unused keys, loaded with fewer layers, or with prefixes of wrappers."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import (
    DENSE,
    IMAGE_TOKEN,
    TOKENS_PER_TILE,
    max_abs,
    stock_dense_config,
    stock_mixtral_config,
    stock_model,
    stock_multimodal_config,
    stock_text_config,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import llamoe
from llamoe.configuration import to_stock
from llamoe.conversion import convert

LENGTH = 21
HALF = ["sliding_attention", "full_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """Stock's class and ours, a tiny config, and keys that stock ignores, but our config could misread as its own."""

    stock: str
    ours: str
    config: Any
    left_over: dict

    @property
    def auto_class(self) -> Any:
        return AutoModelForImageTextToText if "Conditional" in self.stock else AutoModelForCausalLM


# Names of methods and properties of our classes, and an entry that transformers reads only with scaled rotation.
NAMES = dict(
    stock_type="llama",
    layer_plan=1,
    attention_types=HALF,
    _rotary_multiple=4,
    validate=False,
    partial_rotary_factor=0.5,
    rope_interleave=True,
)
MIXTURE = dict(router_name="router", experts_are_output_first=1, pools_router_losses=2)
# Neither class has these fields; both keep them in the config.
KEPT = dict(use_sliding_window=False, _has_experts=True)
ROUTING = dict(router_score_function="softmax", apply_router_weight_on_input=False, router_balancing="bias")
WINDOW = dict(**DENSE, sliding_window=8)
WITHOUT_BIASES = dict(NAMES, **KEPT, attention_bias=True, mlp_bias=True, moe_layers=[0])
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        "LlamoeDenseForCausalLM",
        stock_dense_config,
        dict(NAMES, **KEPT, sliding_window=8, layer_types=HALF, moe_layers=[0]),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "LlamoeDenseForCausalLM",
        lambda: transformers.MistralConfig(**WINDOW),
        WITHOUT_BIASES,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        "LlamoeDenseForCausalLM",
        lambda: transformers.MinistralConfig(**WINDOW, layer_types=HALF),
        WITHOUT_BIASES,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "LlamoeMixtralForCausalLM",
        lambda: stock_mixtral_config(sliding_window=8),
        dict(
            NAMES,
            **KEPT,
            **MIXTURE,
            layer_types=HALF,
            norm_topk_prob=False,
            router_pre_softmax=False,
            use_shared_expert=True,
            moe_layers=[0],
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        "LlamoeForCausalLM",
        stock_text_config,
        dict(
            NAMES,
            **KEPT,
            **MIXTURE,
            **ROUTING,
            num_experts=3,
            use_shared_expert=False,
            rope_interleave=False,
            mlp_bias=True,
        ),
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration",
        "LlamoeForConditionalGeneration",
        stock_multimodal_config,
        dict(
            stock_type="llama4",
            check_multimodal=1,
            validate=False,
            text_config=dict(NAMES, **MIXTURE, **ROUTING, use_shared_expert=False, rope_interleave=False),
            vision_config=dict(
                use_rope=False, use_post_layernorm=False, attention_bias=False, vision_feature_layer=-2,
                validate=False, grid_size=7, tokens_per_tile=9, partial_rotary_factor=0.5,
            ),
        ),
    ),
}  # fmt: skip
families = pytest.mark.parametrize("kind", FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a stock folder for each family."""
    place = tmp_path_factory.mktemp("stock")
    for kind, family in FAMILIES.items():
        stock_model(getattr(transformers, family.stock), family.config()).save_pretrained(place / kind)
    return place


@torch.no_grad()
def logits(model, pictures: bool = True):
    """Return the logits of one row, with a picture if the model takes pictures."""
    ids, more = 1 + torch.arange(LENGTH)[None] * 7 % 90, {}
    if pictures and model.config.model_type in ("llama4", "llamoe"):
        ids[0, 2 : 2 + TOKENS_PER_TILE] = IMAGE_TOKEN
        more["pixel_values"] = torch.linspace(-1, 1, 3 * 56 * 56).sin().view(1, 3, 56, 56)
    return model.eval()(ids, use_cache=False, **more).logits


def change(folder, target, more: dict) -> None:
    """Make a folder with a link to another folder's weights, and its config.json with more keys."""
    target.mkdir()
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    for name, value in more.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    (target / "config.json").write_text(json.dumps(content))


def configs_of(ours, folder):
    """Return our config of a folder, made in each possible way."""
    content = json.loads((folder / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    return [
        ours.from_pretrained(folder),
        ours.from_dict(content),
        ours(**content),
        llamoe.from_stock(content),
        llamoe.from_stock(config),
    ]


@families
def test_what_the_stock_class_does_not_read_changes_nothing(kind, folders, tmp_path):
    family = FAMILIES[kind]
    change(folders / kind, tmp_path / "in", family.left_over)
    expected = logits(family.auto_class.from_pretrained(tmp_path / "in"))
    assert max_abs(expected, logits(family.auto_class.from_pretrained(folders / kind))) == 0
    own = getattr(llamoe, family.ours).from_pretrained(tmp_path / "in")
    with llamoe.adopt():
        adopted = family.auto_class.from_pretrained(tmp_path / "in")
    for model in (own, adopted):
        # Measured up to 5e-6.
        assert max_abs(logits(model), expected) < 2e-5
    first, *others = configs_of(own.config_class, tmp_path / "in")
    plain, *_ = configs_of(own.config_class, folders / kind)
    assert all(config == first for config in others)
    assert {**to_stock(first), **KEPT} == {**to_stock(plain), **KEPT}
    own.save_pretrained(tmp_path / "out", layout="stock")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == kind
    assert max_abs(logits(family.auto_class.from_pretrained(tmp_path / "out")), expected) < 2e-5


def test_layer_types_of_a_mistral(folders, tmp_path):
    """With `layer_types` AutoConfig takes a Mistral for Ministral; so does our class."""
    change(folders / "mistral", tmp_path / "in", {"layer_types": HALF})
    ours, stock = llamoe.LlamoeDenseForCausalLM, transformers.MistralForCausalLM
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "in"))
    assert all(config.layer_types == HALF for config in configs_of(ours.config_class, tmp_path / "in"))
    assert max_abs(logits(ours.from_pretrained(tmp_path / "in")), expected) < 2e-5
    config = stock.config_class.from_pretrained(tmp_path / "in")
    expected = logits(stock.from_pretrained(tmp_path / "in", config=config))
    assert max_abs(logits(ours.from_pretrained(tmp_path / "in", config=config)), expected) < 2e-5


FULL, LOCAL = ["full_attention"] * 3, ["sliding_attention"] * 3


@pytest.mark.parametrize(
    ("family", "fields", "written_by_layers"),
    [
        ("Mistral", dict(sliding_window=None), "llama"),
        ("Ministral", dict(sliding_window=8, layer_types=FULL), "llama"),
        ("Ministral", dict(sliding_window=8, layer_types=LOCAL), "mistral"),
    ],
)
def test_the_stock_type_that_was_read_is_written_again(family, fields, written_by_layers, tmp_path):
    config = getattr(transformers, f"{family}Config")(**DENSE | fields)
    stock = stock_model(getattr(transformers, f"{family}ForCausalLM"), config)
    stock.save_pretrained(tmp_path / "in")
    ours = llamoe.LlamoeDenseForCausalLM
    assert all(
        config.stock_type() == family.lower() for config in configs_of(ours.config_class, tmp_path / "in")
    )
    ours.from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "own")
    model = ours.from_pretrained(tmp_path / "own")
    for kind in (family.lower(), written_by_layers):
        model.save_pretrained(tmp_path / kind, layout="stock")
        back = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        assert (back.config.model_type, hasattr(back.config, "read_from")) == (kind, False)
        assert back.config.architectures == [type(back).__name__]
        assert max_abs(logits(back), logits(stock)) < 2e-5
        model.config.read_from = None


def test_other_layers_are_written_as_the_type_that_has_them(folders):
    config = llamoe.LlamoeDenseConfig.from_pretrained(folders / "mistral")
    config.layer_types = HALF
    assert to_stock(config)["model_type"] == "ministral"
    config.layer_types = FULL
    assert (to_stock(config)["model_type"], to_stock(config)["sliding_window"]) == ("mistral", None)
    config = llamoe.LlamoeDenseConfig.from_pretrained(
        folders / "ministral", sliding_window=None, layer_types=None
    )
    # Without a window this is a Llama: stock's Ministral needs one.
    assert to_stock(config)["model_type"] == "llama"
    with pytest.raises(ValueError, match="read_from = 'mixtral': no such choice"):
        llamoe.LlamoeDenseConfig(read_from="mixtral")


def test_a_file_of_mistrals_may_leave_out_its_defaults():
    config = llamoe.LlamoeDenseConfig.from_dict({"model_type": "mistral"})
    assert (config.sliding_window, config.num_key_value_heads, config.intermediate_size) == (4096, 8, 14336)
    other = llamoe.LlamoeDenseConfig.from_dict(config.to_dict(), num_hidden_layers=3, sliding_window=7)
    assert other.layer_types is None and other.attention_types() == LOCAL
    for content, more in (
        (config.to_dict(), {"sliding_window": None}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
    ):
        without = llamoe.LlamoeDenseConfig.from_dict(content, **more)
        assert without.layer_types is None and without.attention_types() == ["full_attention"] * 32


@pytest.mark.parametrize("window", [0, -1, None])
def test_a_window_that_no_layer_has_may_be_any(window):
    assert llamoe.from_stock(stock_dense_config(sliding_window=window)).sliding_window is None
    if window is not None:
        kinds = ["full_attention"] * 3
        stock = transformers.MinistralConfig(**DENSE | dict(sliding_window=window, layer_types=kinds))
        assert llamoe.from_stock(stock).layer_types == kinds
        for config in (transformers.MistralConfig(**WINDOW), stock_mixtral_config()):
            # With such a window stock's attention implementations disagree, and its caches raise errors.
            config.sliding_window = window
            with pytest.raises(ValueError, match=f"sliding_window = {window}: must be positive"):
                llamoe.from_stock(config)


@pytest.mark.parametrize("kind", ["ministral", "mixtral", "llama4_text", "llama4"])
def test_the_first_layers_of_a_folder(kind, folders, tmp_path):
    """A lower number of layers, set in the config, loads the first layers of a folder, as in stock."""
    family = FAMILIES[kind]
    ours = getattr(llamoe, family.ours)

    def load(config_class, model_class, folder):
        config = config_class.from_pretrained(folder)
        config.get_text_config().num_hidden_layers = 2
        return model_class.from_pretrained(folder, config=config)

    expected = logits(load(AutoConfig, family.auto_class, folders / kind))
    ours.from_pretrained(folders / kind).save_pretrained(tmp_path / "own")
    model = load(ours.config_class, ours, tmp_path / "own")
    assert max_abs(logits(model), expected) < 2e-5
    model.save_pretrained(tmp_path / "back", layout="stock")
    assert max_abs(logits(family.auto_class.from_pretrained(tmp_path / "back")), expected) < 2e-5


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("llama", "module."),
        ("mixtral", "_orig_mod."),
        ("llama4_text", "module._orig_mod."),
        ("llama4", "_orig_mod."),
    ],
)
def test_a_wrapper_before_all_names_is_named(kind, prefix, folders, tmp_path):
    """A prefix before all names is an error, also without a class in config.json; stock initializes all weights."""
    family, folder = FAMILIES[kind], tmp_path / "in"
    ours = getattr(llamoe, family.ours)
    change(folders / kind, folder, {"architectures": None})
    (folder / "model.safetensors").unlink()
    content = load_file(folders / kind / "model.safetensors")
    named = {prefix + name: tensor for name, tensor in content.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(llamoe.CheckpointError, match="of its weights are missing"):
        ours.from_pretrained(folder)
    pattern = "^" + prefix.replace(".", r"\.")
    with pytest.raises(llamoe.CheckpointError, match="^state_dict: .* of its weights are missing"):
        ours.from_pretrained(None, config=family.config(), state_dict=named)
    mapped = logits(ours.from_pretrained(folder, key_mapping={pattern: ""}))
    assert torch.equal(mapped, logits(ours.from_pretrained(folders / kind)))
    report = convert(folder, tmp_path / "out")
    assert f"all names of weights begin with {prefix!r}, which is left out" in report.notes
    assert torch.equal(mapped, logits(ours.from_pretrained(tmp_path / "out")))
