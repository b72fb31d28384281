"""Device maps that cannot be followed are refused before a weight is read; the others name every module once."""

import pytest
import torch
from support.models import MODELS, MULTIMODAL, for_models
from support.tables import in_turn
from transformers import AutoModelForCausalLM

import llamoe
from llamoe.modeling.checkpoints.device_map import settle_device_map

HEADS = {case.name: case for case in MODELS if case.is_head}


BAD_MAPS = {
    "misses_the_rest": {"model.layers": "cpu"},
    "misses_the_head": {"model": "cpu"},
    "misses_a_layer": {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    | {f"model.layers.{layer}": "disk" for layer in range(4)},
    "empty": {},
}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    HEADS["LlamoeForCausalLM"].make().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("what", "loader"), in_turn(BAD_MAPS, [llamoe.LlamoeForCausalLM, AutoModelForCausalLM])
)
def test_a_map_that_forgets_a_weight_is_refused_by_accelerate(what, loader, text_folder):
    with pytest.raises(ValueError, match="does not give any device"):
        loader.from_pretrained(text_folder, device_map=BAD_MAPS[what])


@for_models("is_head")
def test_half_of_a_tied_pair_is_not_put_on_disk(case, tmp_path):
    prefix = "language_model." if case.has_images else ""
    case.make(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    halves = {"": "cpu", f"{prefix}lm_head": "disk"}
    with pytest.raises(ValueError, match="lm_head.weight on 'disk' and .*embed_tokens.weight on 'cpu'"):
        case.model_class.from_pretrained(tmp_path / "tied", device_map=halves)


def test_settled_maps_name_every_module_once():
    with torch.device("meta"):
        model = MULTIMODAL.model_class(MULTIMODAL.make_config())
    place = "language_model.model.layers.1.feed_forward.experts"
    settled = settle_device_map(model, {"": "disk", "vision_model.model.layers.0": "cpu", place: "cpu"})
    assert settled["vision_model.class_embedding"] == "cpu", "no module, so nothing that is read from disk"
    assert (
        settled["vision_model.model.layers.0"] == "cpu" and settled["vision_model.model.layers.1"] == "disk"
    )
    assert settled[place] == "cpu" and settled[place.replace("experts", "router")] == "disk"
    assert not [name for name in settled for other in settled if name.startswith(f"{other}.")]
    below = tuple(f"{name}." for name in settled)
    assert all(name in settled or name.startswith(below) for name in model.state_dict())
    assert settle_device_map(model, settled) == settled
    assert settle_device_map(model, {"": torch.device("cpu")}) == {"": torch.device("cpu")}
