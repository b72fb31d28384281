"""Saved models load again: with every option; built, loaded, resized and stock models; in our and stock's classes."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from support import mended_stock  # noqa: F401
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import llamoe
from llamoe.conversion import convert

from ..draw import DTYPES, chance, draw_vision, draw_weights
from ..judge import Wrong
from ..subject import FAMILIES, draw_subject
from . import multimodal

# Allowed difference of logits with a standard deviation of one, between ours and stock's on the same weights.
CLOSE = 2e-4


def draw_model(rng: random.Random, seed: int) -> tuple[str, nn.Module, bool]:
    """A model with or without a head, its family, and whether stock can read it."""
    family = rng.choice([*FAMILIES, "multimodal", "multimodal", "multimodal", "vision"])
    for_stock = chance(rng, 0.8)
    match family:
        case "multimodal":
            subject, *_ = multimodal.draw_multimodal(rng, seed, ["float32", "float32", "bfloat16"], for_stock)
            return family, subject.model, for_stock
        case "vision":
            fields = draw_vision(rng)
            model = draw_weights(llamoe.LlamoeVisionModel(llamoe.LlamoeVisionConfig(**fields)), seed)
            return family, model, True
    subject = draw_subject(rng, seed, family, dtypes=["float32", "float32", "bfloat16"], for_stock=for_stock)
    model = subject.model
    if chance(rng, 0.2):
        base = type(model.model)._from_config(model.config).to(subject.dtype).eval()
        base.load_state_dict(model.model.state_dict())
        model = base
    return family, model, for_stock


def inputs_for(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if hasattr(config, "image_size"):
        shape = (2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (2, 19), generator=generator)
    if hasattr(config, "image_token_index"):
        ids[ids == config.image_token_index] = 1
    return {"input_ids": ids}


@torch.no_grad()
def run(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model.eval()(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def load(model_class: type, folder: Path, **options: Any) -> nn.Module:
    """Load a folder; no key may be missing, unexpected or of another shape."""
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
    lost = {name: sorted(map(str, keys))[:3] for name, keys in info.items() if keys}
    if lost:
        raise Wrong(f"{model_class.__name__} loads a folder with {lost}")
    return model


def same_weights(given: nn.Module, expected: nn.Module, what: str) -> None:
    ours, theirs = given.state_dict(), expected.state_dict()
    if ours.keys() != theirs.keys():
        raise Wrong(f"{what}: keys differ: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    for name, value in theirs.items():
        if ours[name].dtype != value.dtype or not torch.equal(ours[name], value):
            raise Wrong(f"{what}: {name} differs ({ours[name].dtype}, {value.dtype})")


def draw_options(rng: random.Random, model: nn.Module, can_stock: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if chance(rng, 0.4):
        options["max_shard_size"] = rng.choice(["4KB", "20KB", "100KB"])
    if chance(rng, 0.2):
        options["variant"] = "other"
    if chance(rng, 0.4):
        options["save_original_format"] = chance(rng, 0.6)
    if chance(rng, 0.15):
        options["state_dict"] = model.state_dict()
    if can_stock and chance(rng, 0.4):
        options["layout"] = "stock"
    return options


def prepare(rng: random.Random, model: nn.Module, place: Path) -> tuple[str, nn.Module]:
    """The model as built, or as a user changed it: loaded before, resized, cast."""
    way = rng.choice(["built", "built", "built", "loaded", "resized", "cast"])
    if way == "loaded":
        model.save_pretrained(place / "before")
        model = load(type(model), place / "before", dtype=model.dtype)
    elif way == "resized" and hasattr(model.config.get_text_config(), "vocab_size"):
        size = model.config.get_text_config().vocab_size + rng.choice([-3, 2, 9])
        model.resize_token_embeddings(size, mean_resizing=False)
    elif way == "cast":
        model = model.to(rng.choice(list(DTYPES.values())))
    return way, model


def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    family, model, can_stock = draw_model(rng, seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        way, model = prepare(rng, model, place)
        options = draw_options(rng, model, can_stock)
        if "Model" == type(model).__name__[-5:] and family == "multimodal":
            options.pop("layout", None)
        notes |= {
            "model": type(model).__name__,
            "way": way,
            **{k: v for k, v in options.items() if k != "state_dict"},
        }
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.save_pretrained(place / "saved", **options)
        for name, value in model.state_dict().items():
            if not torch.equal(value, before[name]):
                raise Wrong(f"saving changed {name}")
        check_folder(rng, seed, family, model, can_stock, place, options)


def check_folder(rng, seed, family, model, can_stock, place, options) -> None:
    saved, inputs = place / "saved", inputs_for(model, seed)
    config = json.loads((saved / "config.json").read_text())
    variant = {"variant": options["variant"]} if "variant" in options else {}
    how = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation, **variant}
    if chance(rng, 0.2):
        how["device_map"] = "cpu"
    again = load(type(model), saved, **how)
    if family != "vision":
        again.set_experts_implementation(model.config.get_text_config()._experts_implementation)
    same_weights(again, model, "read again")
    if not torch.equal(run(again, inputs), run(model, inputs)):
        raise Wrong("other outputs after saving and loading")
    if type(model).__name__ not in (config.get("architectures") or []) and options.get("layout") != "stock":
        raise Wrong(f"architectures {config.get('architectures')} of a {type(model).__name__}")
    if options.get("layout") != "stock":
        auto = AutoModelForCausalLM if family in FAMILIES else AutoModel
        if family == "multimodal":
            auto = transformers.AutoModelForImageTextToText
        if not type(model).__name__.endswith("Model"):
            same_weights(load(auto, saved, **how), model, auto.__name__)
    read = (
        AutoConfig.from_pretrained(saved)
        if options.get("layout") != "stock"
        else type(model.config).from_pretrained(saved)
    )
    if type(read) is not type(model.config):
        raise Wrong(f"the config comes back as a {type(read).__name__}")
    other_classes(rng, seed, family, model, saved, how)
    if options.get("layout") == "stock":
        check_stock(family, model, saved, how, inputs)
    if chance(rng, 0.15) and not variant and not type(model).__name__.endswith("Model"):
        convert(saved, place / "converted")
        same_weights(load(type(model), place / "converted", dtype=model.dtype), model, "converted")


def other_classes(rng, seed, family, model, saved, how) -> None:
    """Load parts: the text model of a multimodal folder, the base model under a head, a head over a base model."""
    name = type(model).__name__
    if name == "LlamoeForConditionalGeneration":
        text, info = llamoe.LlamoeForCausalLM.from_pretrained(saved, output_loading_info=True, **how)
        if info["missing_keys"] or info["mismatched_keys"]:
            raise Wrong(f"the text model of a multimodal folder misses {sorted(info['missing_keys'])[:3]}")
        same_weights(text, model.language_model, "the text model of a multimodal folder")
        tower, info = llamoe.LlamoeVisionModel.from_pretrained(saved, output_loading_info=True, **how)
        if info["missing_keys"]:
            raise Wrong(f"the tower of a multimodal folder misses {sorted(info['missing_keys'])[:3]}")
        same_weights(tower, model.vision_model, "the tower of a multimodal folder")
    elif name.endswith("ForCausalLM"):
        base, info = type(model.model).from_pretrained(saved, output_loading_info=True, **how)
        if info["missing_keys"]:
            raise Wrong(f"the base model of a head's folder misses {sorted(info['missing_keys'])[:3]}")
        same_weights(base, model.model, "the base model of a head's folder")


def check_stock(
    family: str, model: nn.Module, saved: Path, how: dict[str, Any], inputs: dict[str, torch.Tensor]
) -> None:
    """Stock's class reads the folder and computes the same."""
    name = json.loads((saved / "config.json").read_text())["architectures"][0]
    stock = load(getattr(transformers, name), saved, **how)
    same_weights(stock, model, f"stock's {name}")
    if family == "mixtral":
        # torch's grouped product does not take all sizes.
        stock.set_experts_implementation("eager")
    if model.dtype != torch.float32:
        return
    given, expected = run(model, inputs), run(stock, inputs)
    difference = (given - expected).abs().max().item()
    if not difference <= CLOSE * max(1.0, expected.abs().max().item()):
        raise Wrong(f"stock's {name} computes something else from the folder: {difference:.2e}")
