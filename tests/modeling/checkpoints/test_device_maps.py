"""Device maps that cannot be followed are refused before a weight is read; all others name every module once."""

import pytest
import torch
from support.models import MULTIMODAL, for_models

import llamoe
from llamoe.modeling.checkpoints.device_map import settle_device_map


@pytest.mark.parametrize("device_map", [{"model": "cpu"}, {}], ids=["misses the head", "empty"])
def test_a_map_that_forgets_a_weight_is_refused(device_map, tmp_path):
    MULTIMODAL.make().language_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not give any device"):
        llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, device_map=device_map)


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
