"""Tiny configurations and models of all classes, their inputs, and comparisons of weights, outputs and gradients."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Llama4Config,
    Llama4TextConfig,
    Llama4VisionConfig,
    LlamaConfig,
    MixtralConfig,
)
from transformers.initialization import no_init_weights

import llamoe

from . import mended_stock  # noqa: F401

# No two sizes are equal, so that a confused axis fails: 3 query heads share a key/value head, heads * head_dim (6 * 20)
# is not the hidden size (72), and the vocabulary is odd. Llama 4's pattern of layers (with and without rotary
# embedding, dense and mixture) repeats after four layers; the tiny model has five.
_SIZES = dict(
    vocab_size=101,
    hidden_size=72,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=20,
    max_position_embeddings=256,
    pad_token_id=0,
)
DENSE = dict(_SIZES, intermediate_size=92, num_hidden_layers=3)
TEXT = dict(
    _SIZES,
    intermediate_size=52,
    intermediate_size_mlp=92,
    num_hidden_layers=5,
    num_local_experts=5,
    interleave_moe_layer_step=2,
    attention_chunk_size=16,
    floor_scale=8,
)
MIXTRAL = dict(
    _SIZES,
    intermediate_size=52,
    num_hidden_layers=3,
    num_local_experts=5,
    num_experts_per_tok=2,
    sliding_window=16,
)
# Fields of a text config with two layers, for tests that take longer the more weights there are: a dense layer, and a
# mixture with full attention and without rotary embedding.
SHALLOW = dict(num_hidden_layers=2, moe_layers=[1], no_rope_layers=[1, 0])
SHALLOW_VISION = dict(num_hidden_layers=2)
VISION = dict(
    hidden_size=120,
    num_hidden_layers=3,
    num_attention_heads=6,
    intermediate_size=480,
    image_size=56,
    patch_size=14,
    projector_input_dim=44,
    projector_output_dim=44,
    vision_output_dim=44,
)
# Parameters of each type of rotary scaling, chosen to change the frequencies of the tiny configs' ten channel pairs.
FACTORS = [1.0 + 0.3 * pair for pair in range(10)]
ROPES = {
    "default": dict(rope_theta=500.0),
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=64, beta_fast=4.0),
    "yarn-mscale": dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        mscale=0.7,
        mscale_all_dim=0.4,
        truncate=False,
    ),
    "longrope": dict(
        factor=4.0, original_max_position_embeddings=32, short_factor=FACTORS, long_factor=FACTORS[::-1]
    ),
    "llama3": dict(
        factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "proportional": dict(partial_rotary_factor=0.5, factor=2.0),
}
IMAGE_TOKEN = 99
TOKENS_PER_TILE = 4


# Functions that return tiny configurations, with the fields that they are called with.
stock_dense_config = partial(LlamaConfig, **DENSE)
stock_text_config = partial(Llama4TextConfig, **TEXT)
stock_mixtral_config = partial(MixtralConfig, **MIXTRAL)
dense_config = partial(llamoe.LlamoeDenseConfig, **DENSE)
mixtral_config = partial(llamoe.LlamoeMixtralConfig, **MIXTRAL)
text_config = partial(llamoe.LlamoeTextConfig, **TEXT, num_experts_per_tok=2)
vision_config = partial(llamoe.LlamoeVisionConfig, **VISION)


def stock_multimodal_config(text: dict | None = None, vision: dict | None = None) -> Llama4Config:
    """Return a tiny `Llama4Config`, with tiles of 56 pixels, 4 x 4 patches and four tokens."""
    return Llama4Config(
        text_config=Llama4TextConfig(**{**TEXT, **(text or {})}),
        vision_config=Llama4VisionConfig(**{**VISION, **(vision or {})}),
        image_token_index=IMAGE_TOKEN,
        boi_token_index=97,
        eoi_token_index=98,
    )


def scaled_rope(name: str) -> dict:
    """Return the fields of a decoder's config for an entry of `ROPES`."""
    # "dynamic" scales beyond `max_position_embeddings`: with 32, inputs of 50 tokens are scaled, those of 20 are not.
    parameters = {"rope_type": name, "rope_theta": 10000.0, **ROPES[name]}
    return dict(rope_parameters=parameters, max_position_embeddings=32 if name == "dynamic" else 256)


def make_asymmetric(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights so that a wrong split, order or transpose changes results, and logits have a deviation near 1.

    Columns grow in scale from left to right; the weights of norms are not all one, and biases not all zero.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                value = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
            else:
                fan_in = parameter.shape[-2] if "feed_forward.experts." in name else parameter.shape[-1]
                fan_in = 1 if "embed_tokens" in name else fan_in
                value = noise * fan_in**-0.5 * torch.linspace(0.7, 1.3, parameter.shape[-1])
            parameter.copy_(value)
    return model.eval()


def draw(model_class: type[nn.Module], config, seed: int = 0) -> nn.Module:
    """Build a model with weights of `make_asymmetric`, and skip the class's own initialisation."""
    with no_init_weights():
        model = model_class(config)
    # The skipped initialisation would have tied the weights.
    model.tie_weights()
    return make_asymmetric(model, seed)


def filled(model: nn.Module) -> nn.Module:
    """Fill a large model by repeating random numbers, which is faster than drawing all; return the model.

    The count is a prime, so that each row and each expert begins at another of the numbers.
    """
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) / 5
    for parameter in model.parameters():
        repeated = numbers.to(parameter.dtype).repeat(parameter.numel() // len(numbers) + 1)
        parameter.data.copy_(repeated[: parameter.numel()].view(parameter.shape))
    return model


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    return (a.float() - b.float()).abs().max().item()


def stock_model(model_class: type[nn.Module], config, exact_in_bfloat16: bool = False) -> nn.Module:
    """Build a stock model with weights of `make_asymmetric`; scale a tied embedding to the size of a head's weights.

    With `exact_in_bfloat16`, bfloat16 holds all weights exactly, so that dtypes differ by their arithmetic alone.
    """
    model = draw(model_class, config)
    with torch.no_grad():
        if config.get_text_config().tie_word_embeddings:
            model.get_input_embeddings().weight.mul_(config.get_text_config().hidden_size ** -0.5)
    return rounded_to_bfloat16(model) if exact_in_bfloat16 else model


@torch.no_grad()
def rounded_to_bfloat16(model: nn.Module) -> nn.Module:
    """Round a model's weights in place to numbers that bfloat16 holds exactly; return the model."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


def load_whole(model_class: type[nn.Module], folder, **kwargs) -> nn.Module:
    """Load a folder, and check that no key is missing, unexpected or of another shape."""
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model


def tensors_in(folder) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in a folder by name."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_weights(given: dict, expected: dict) -> None:
    """Check that two state dicts have equal names, dtypes and bits."""
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert given[name].dtype == tensor.dtype and torch.equal(given[name], tensor), name


def deviation_in_range(logits: torch.Tensor) -> bool:
    """Return True if the deviation of logits is near 1, for which absolute tolerances were chosen."""
    return 0.3 < logits.float().std().item() < 3


def rms(x: torch.Tensor) -> float:
    """Return the root mean square of all elements."""
    return x.float().square().mean().sqrt().item()


def mixtures(model: nn.Module) -> dict[int, nn.Module]:
    """Return the mixture blocks of a causal Llama 4 model, stock's or ours, by layer."""
    blocks = {i: layer.feed_forward for i, layer in enumerate(model.model.layers)}
    return {i: block for i, block in blocks.items() if hasattr(block, "router")}


def choices(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the ids of each token's experts in ascending order, `[T, k]`."""
    return router_logits.topk(top_k, dim=-1).indices.sort(-1).values


# Inputs of the common model tests: 53 tokens span several attention chunks of 16 and temperature floors of 8. The first
# and last rows begin with 5 and 17 tokens of padding.
LENGTH = 53
PADDING = (5, 0, 17)


def multimodal_config(vision=None, **text):
    """Return a tiny `LlamoeConfig`, with fields of its tower and of its decoder."""
    return llamoe.LlamoeConfig(
        text_config={**TEXT, **text},
        vision_config={**VISION, **(vision or {})},
        image_token_index=IMAGE_TOKEN,
        boi_token_index=97,
        eoi_token_index=98,
    )


# Models that `Case.make` has built and copies for each test.
_BUILT = {}


@dataclass(frozen=True)
class Case:
    """A model class with the facts by which tests choose and build models.

    Attributes:
        name: of our class.
        make_config: function that returns a tiny configuration, from fields of its decoder and `vision`.
        auto_class: the Auto class that loads it.
        stock_name: name of transformers' class for the same model; None if it has none.
        is_text: takes token ids.
        has_images: takes pictures.
        has_experts: has mixtures.
    """

    name: str
    make_config: Callable
    auto_class: type
    stock_name: str | None
    is_text: bool = True
    has_images: bool = False
    has_experts: bool = False

    @property
    def is_head(self):
        """True if the model returns logits of tokens."""
        return self.name.endswith(("ForCausalLM", "ForConditionalGeneration"))

    @property
    def is_llama4(self):
        """True if the decoder has Llama 4's pattern of different layers."""
        return self.has_experts and "Mixtral" not in self.name

    @property
    def model_class(self):
        return getattr(llamoe, self.name)

    def make(self, seed=0, **text):
        """Return a copy of a model that is built once, as drawing its weights takes longer than copying."""
        key = self, seed, repr(text)
        if key not in _BUILT:
            # A test must draw the same numbers later, whether it builds the model here or copies it.
            with torch.random.fork_rng(devices=[]):
                _BUILT[key] = draw(self.model_class, self.make_config(**text), seed)
        return copy.deepcopy(_BUILT[key])

    def make_small(self, seed=0, **text):
        """Return a model of two layers; Llama 4's are a chunked dense layer, and a mixture without positions."""
        if self.is_text:
            text = {"num_hidden_layers": 2, **text}
        if self.is_llama4:
            text = {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"], **text}
        model = self.make(seed, **text)
        if self.has_images:
            tower = getattr(model, "vision_model", model)
            del tower.model.layers[1:]
            tower.config.num_hidden_layers = 1
        return model

    def stock_of(self, model):
        """Return transformers' model with the weights of `model`, which is one of ours."""
        stock_class = getattr(transformers, self.stock_name)
        stock = stock_class(stock_class.config_class(**llamoe.to_stock(model.config)))
        stock.load_state_dict(model.state_dict())
        return stock.train(model.training)

    def inputs(self, padding=PADDING, length=LENGTH):
        """Return the inputs of left-padded rows, one for each number of `padding`; row 1 has two tiles, row 2 one."""
        generator = torch.Generator().manual_seed(1)
        inputs = {}
        tiles = 0
        if self.is_text:
            ids = torch.randint(3, 90, (len(padding), length), generator=generator)
            mask = torch.ones_like(ids)
            for row, pad in enumerate(padding):
                ids[row, :pad], mask[row, :pad] = 0, 0
                if self.has_images and row:
                    count = TOKENS_PER_TILE * (3 - row)
                    ids[row, pad + 2 : pad + 2 + count] = IMAGE_TOKEN
                    tiles += 3 - row
            inputs = {"input_ids": ids, "attention_mask": mask}
        if self.has_images:
            size = VISION["image_size"]
            inputs["pixel_values"] = torch.randn(tiles or 3, 3, size, size, generator=generator)
        return inputs

    def row(self, inputs, row):
        """Return the inputs of one row, without its padding."""
        pad = int((inputs["attention_mask"][row] == 0).sum())
        alone = {name: inputs[name][row : row + 1, pad:] for name in ("input_ids", "attention_mask")}
        if self.has_images and row:
            alone["pixel_values"] = inputs["pixel_values"][slice(0, 2) if row == 1 else slice(2, 3)]
        return alone


MODELS = [
    Case("LlamoeDenseModel", dense_config, AutoModel, "LlamaModel"),
    Case("LlamoeDenseForCausalLM", dense_config, AutoModelForCausalLM, "LlamaForCausalLM"),
    Case(
        "LlamoeMixtralForCausalLM",
        mixtral_config,
        AutoModelForCausalLM,
        "MixtralForCausalLM",
        has_experts=True,
    ),
    Case("LlamoeTextModel", text_config, AutoModel, "Llama4TextModel", has_experts=True),
    Case("LlamoeForCausalLM", text_config, AutoModelForCausalLM, "Llama4ForCausalLM", has_experts=True),
    Case("LlamoeVisionModel", vision_config, AutoModel, "Llama4VisionModel", is_text=False, has_images=True),
    Case("LlamoeModel", multimodal_config, AutoModel, None, has_images=True, has_experts=True),
    Case(
        "LlamoeForConditionalGeneration",
        multimodal_config,
        AutoModelForImageTextToText,
        "Llama4ForConditionalGeneration",
        has_images=True,
        has_experts=True,
    ),
]
MULTIMODAL = MODELS[-1]


def shallow(case):
    """Return a case with two layers in decoder and tower; Llama 4's decoder has those of `SHALLOW`."""
    if not case.is_text:
        fields = SHALLOW_VISION
    elif not case.is_llama4:
        fields = {"num_hidden_layers": 2}
    else:
        fields = {**SHALLOW, "vision": SHALLOW_VISION} if case.has_images else SHALLOW
    return replace(case, make_config=partial(case.make_config, **fields))


SHALLOW_MODELS = [shallow(case) for case in MODELS]


def for_models(*wanted, models=MODELS):
    """Parametrise a test over the cases of which all `wanted` attributes, as "has_experts", are true."""
    chosen = [case for case in models if all(getattr(case, name) for name in wanted)]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


def random_ids(rows, length, seed=0):
    """Draw ids of ordinary tokens, `[rows, length]`."""
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding_mask(padding, length):
    """Return the attention mask of left-padded rows, `[rows, length]`; `padding` has a number for each row."""
    return (torch.arange(length) >= torch.tensor(padding)[:, None]).long()


def main_output(output):
    """Return the logits of a model's output, or its last hidden state if it has none."""
    return output.logits if "logits" in output else output.last_hidden_state


@torch.no_grad()
def run(model, **inputs):
    """Call a model without gradients, and return its `main_output`."""
    return main_output(model(**inputs))


def loss_and_gradients(model, inputs, call=None, **options):
    """Run a model forward and backward with a fixed seed; return its loss, and its gradients by name.

    Without `labels` the loss is the mean square of the output. `call` is called in place of the model, for example the
    compiled model.
    """
    torch.manual_seed(0)
    model.zero_grad()
    output = (model if call is None else call)(**inputs, **options)
    loss = output.loss if options.get("labels") is not None else main_output(output).float().square().mean()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(given, expected, tolerance=1e-5, of_loss=1e-6):
    """Compare two results of `loss_and_gradients`, relative to the loss and to each weight's largest gradient."""
    assert given[0] == pytest.approx(expected[0], rel=of_loss)
    assert given[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert max_abs(given[1][name], gradient) <= tolerance * gradient.abs().max(), name


def generate(model, inputs, **options):
    """Call `generate` with a fixed seed, by default for eight tokens by greedy search."""
    torch.manual_seed(0)
    return model.generate(
        **inputs, **{"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1, **options}
    )


def new_tokens(model, inputs, **options):
    """Return the generated tokens without the prompt."""
    return generate(model, inputs, **options)[:, inputs["input_ids"].shape[1] :]
