"""What a few random tokens or normalized pixels do not show is found all the same, and nothing is invented."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import dense_config, draw, make_asymmetric, multimodal_config, text_config
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.assemble import assemble
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.hf import open_hf
from llamoe.conversion.upcycle import upcycle
from llamoe.conversion.verify import run_streamed
from llamoe.conversion.verify.command import verify

pytestmark = pytest.mark.slow

EMBEDDING = "model.embed_tokens.weight"
EXPERTS = "model.layers.{}.feed_forward.experts.{}"
ROUTER = "model.layers.{}.feed_forward.router.weight"
CLIP = {"image_mean": [0.48, 0.45, 0.41], "image_std": [0.27, 0.26, 0.28]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Gives a folder with a model that has more rows and experts than a run can reach; it is not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    makes = {
        "dense": lambda: llamoe.LlamoeDenseForCausalLM(dense_config(vocab_size=1000)),
        "text": lambda: llamoe.LlamoeForCausalLM(
            text_config(vocab_size=1000, num_local_experts=64, num_experts_per_tok=1)
        ),
        "multimodal": lambda: llamoe.LlamoeForConditionalGeneration(multimodal_config(num_local_experts=9)),
    }

    def folder(family):
        if not (root / family).exists():
            make_asymmetric(makes[family]()).save_pretrained(root / family, layout="stock")
        return root / family

    return folder


def edited(folder: Path, target: Path, change) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target / "model.safetensors")
    return target


def swapped(key, first, second):
    def change(tensors):
        tensors[key][[first, second]] = tensors[key][[second, first]]

    return change


def used_experts(folder, stream=True):
    """Experts of each layer that tokens of a `verify` with the usual seed are sent to."""
    opened = open_hf(folder)
    weights = run_streamed.Weights(opened.config, opened.tensors, torch.device("cpu"))
    inputs, _ = run_streamed.random_inputs((opened.config, opened.config), 32, 2, 0)
    run_streamed.run(weights, inputs, stream=stream, watch=lambda *_: None)
    return weights.used


def unused_experts(folder, layer=3):
    count = open_hf(folder).config.num_local_experts
    return sorted(set(range(count)) - used_experts(folder)[EXPERTS.format(layer, "")[:-1]])


def check_other(result, *words):
    assert result.same_function is False and not result.same_weights
    assert any(all(word in reason for word in words) for reason in result.reasons), result.reasons


@pytest.mark.parametrize("family", ["dense", "text"])
def test_rows_of_the_embedding_that_differ_are_among_the_tokens(family, saved, tmp_path):
    folder = saved(family)
    result = verify(folder, edited(folder, tmp_path / "swapped", swapped(EMBEDDING, 500, 501)))
    assert result.same_function is False and result.first_layer == "embed_tokens"
    filled = edited(folder, tmp_path / "filled", lambda tensors: tensors[EMBEDDING][777].fill_(1e4))
    assert verify(folder, filled).first_layer == verify(filled, folder).first_layer == "embed_tokens"

    # The worst of them are, where there is no room for all.
    def change(tensors):
        tensors[EMBEDDING] *= 1 + 1e-7 * torch.arange(1000)[:, None].remainder(7)
        tensors[EMBEDDING][640] = tensors[EMBEDDING][640].flip(0)

    result = verify(folder, edited(folder, tmp_path / "all", change), tokens=2, rows=1)
    assert result.same_function is False and result.first_layer == "embed_tokens"


def test_rows_that_no_token_reads_are_compared_by_themselves(saved, tmp_path, monkeypatch):
    # As a rule those that differ most are run, and show. Here none of them is.
    monkeypatch.setattr(sys.modules["llamoe.conversion.verify.command"], "wanted_tokens", lambda rows: [])
    folder = saved("dense")

    def change(tensors):
        tensors[EMBEDDING][[100, 300]] *= 1.001
        tensors[EMBEDDING][200] *= 1.002

    near = edited(folder, tmp_path / "near", change)
    result = verify(folder, near)
    assert all(part.max_abs < 1e-5 for part in result.outputs)
    check_other(result, "embedding rows 100, 200, 300", "no random token read")
    sizes = load_file(folder / "model.safetensors")[EMBEDDING].abs() / 1000
    sizes = sizes.amax(-1) / (1000 * sizes).square().mean(-1).sqrt()
    limit = max(sizes[100], sizes[300], 2 * sizes[200]).item()
    assert verify(folder, near, tolerance=1.01 * limit).same_function
    assert verify(folder, near, tolerance=0.98 * limit).same_function is False


def test_another_basis_is_no_other_function_but_cannot_be_told_row_by_row(saved, tmp_path):
    """All channels of the hidden states in another order: each row of the embedding is another one."""
    folder = saved("dense")
    order = torch.randperm(72, generator=torch.Generator().manual_seed(1))

    def turn(tensors):
        for name, value in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")) or value.ndim == 1:
                tensors[name] = value[order]
            else:
                tensors[name] = value[:, order]

    result = verify(folder, edited(folder, tmp_path / "turned", turn))
    assert result.outputs[0].max_abs < 1e-5 and result.same_function is None
    assert any("another basis" in reason for reason in result.reasons)
    assert dict(result.sections()[0][1])["same function"] == "cannot be told"


def test_the_experts_that_got_a_token_are_known(saved):
    folder = saved("text")
    states = {}
    model = llamoe.LlamoeForCausalLM.from_pretrained(folder)
    for name, module in model.named_modules():
        if name.endswith(".router"):
            module.register_forward_hook(
                lambda _, inputs, output, name=name: states.update({name: output[2].unique().tolist()})
            )
    inputs, _ = run_streamed.random_inputs((model.config, model.config), 32, 2, 0)
    model(**inputs)
    expected = {name.replace(".router", ".experts"): set(chosen) for name, chosen in states.items()}
    assert used_experts(folder, stream=True) == used_experts(folder, stream=False) == expected
    assert expected and all(1 < len(chosen) < 64 for chosen in expected.values())


@pytest.mark.parametrize("by_layer", [True, False])
def test_experts_to_which_no_token_was_sent_are_compared_by_themselves(by_layer, saved, tmp_path):
    folder = saved("text")
    first, second, *_ = unused_experts(folder)
    down = EXPERTS.format(3, "down_proj")
    other = edited(folder, tmp_path / "swapped", swapped(down, first, second))
    check_other(
        verify(folder, other, by_layer=by_layer), "layers.3", f"experts {first}, {second}", "no token"
    )

    def fill(tensors):
        tensors[EXPERTS.format(3, "gate_up_proj")][second] = 77

    check_other(
        verify(folder, edited(folder, tmp_path / "filled", fill), by_layer=by_layer), "layers.3", str(second)
    )


def test_a_row_of_the_router_that_no_token_followed_counts(saved, tmp_path):
    folder = saved("text")
    first, *_ = unused_experts(folder)

    def lower_row(tensors):
        tensors[ROUTER.format(3)][first] *= 0.5

    result = verify(folder, edited(folder, tmp_path / "lower", lower_row))
    assert all(part.max_abs < 1e-5 for part in result.outputs)
    check_other(result, "layers.3", "router", f"expert {first}")


def test_experts_written_in_another_way_are_the_same_function(saved, tmp_path):
    """Experts in another order with their router's rows; inner channels in another; norms multiplied in."""
    folder = saved("text")
    generator = torch.Generator().manual_seed(2)

    def rewrite(tensors):
        gate_up, down, router = (
            *(EXPERTS.format(3, part) for part in ("gate_up_proj", "down_proj")),
            ROUTER.format(3),
        )
        order = torch.randperm(64, generator=generator)
        for key in (gate_up, down, router):
            tensors[key] = tensors[key][order]
        inner = torch.randperm(tensors[down].shape[1], generator=generator)
        tensors[down] = tensors[down][:, inner]
        tensors[gate_up] = torch.cat([half[..., inner] for half in tensors[gate_up].chunk(2, -1)], -1)
        norm = "model.layers.3.post_attention_layernorm.weight"
        scale = tensors[norm]
        tensors[norm] = torch.ones_like(scale)
        tensors[gate_up] *= scale[:, None]
        for key in [
            router,
            *(f"model.layers.3.feed_forward.shared_expert.{x}_proj.weight" for x in ("gate", "up")),
        ]:
            tensors[key] *= scale

    other = edited(folder, tmp_path / "other", rewrite)
    result = verify(folder, other)
    assert result.same_function and len(result.tensors) == 6, result.reasons
    # One of its experts is another, then.
    back = edited(other, tmp_path / "back", lambda tensors: tensors[EXPERTS.format(3, "down_proj")].mul_(-1))
    assert verify(folder, back).same_function is False


def test_experts_that_give_zero_are_the_same_whatever_their_gates_and_routers(saved, tmp_path):
    still, other = tmp_path / "still", tmp_path / "other"
    upcycle(saved("dense"), still, experts=24)
    upcycle(saved("dense"), other, experts=24, seed=9)
    again = edited(
        still, tmp_path / "again", lambda tensors: tensors[EXPERTS.format(0, "gate_up_proj")].mul_(-3)
    )
    more = tmp_path / "more"
    upcycle(saved("dense"), more, experts=27, top_k=3)
    for target in (other, again, more, saved("dense")):
        result = verify(still, target)
        assert result.same_function and not result.same_weights, result.reasons

    def wake(tensors):
        tensors[EXPERTS.format(2, "down_proj")][unused_experts(still, 2)[0]].normal_()

    awake = edited(still, tmp_path / "awake", wake)
    for target, words in ((still, "no token was sent"), (saved("dense"), "is not zero, as the others are")):
        check_other(verify(awake, target), "layers.2", words)
    assert verify(other, awake).same_function is False
    result = verify(more, awake)
    assert not result.same_function and any("layers.2" in reason for reason in result.reasons)


def test_a_tower_that_no_token_can_call_for_is_not_vouched_for(saved, tmp_path):
    silent = Path(shutil.copytree(saved("multimodal"), tmp_path / "silent"))
    config = json.loads((silent / "config.json").read_text())
    (silent / "config.json").write_text(json.dumps({**config, "image_token_index": 5000}))
    assert verify(silent, silent).same_function
    name = "vision_model.class_embedding"
    result = verify(silent, edited(silent, tmp_path / "other", lambda tensors: tensors[name].fill_(9)))
    assert result.same_function is None
    assert any("no picture was run" in reason and name in reason for reason in result.reasons)


def test_a_device_that_is_not_there_is_refused_before_any_work(tmp_path):
    for device in ("foo", "meta", *([] if torch.cuda.is_available() else ["cuda", torch.device("cuda", 1)])):
        with pytest.raises(ValueError, match=f"device = '{device}'.*there is cpu") as raised:
            verify(tmp_path / "nowhere", tmp_path / "nowhere", device=device)
        assert not isinstance(raised.value, CheckpointError)
    with pytest.raises(CheckpointError, match="/dev/null"):
        verify("/dev/null", "/dev/null")


def tower(**fields):
    fields = dict(use_rope=False, use_adapter=False, projection_dim=22, vision_output_dim=120) | fields
    return llamoe.LlamoeVisionConfig(
        hidden_size=120, num_hidden_layers=3, num_attention_heads=6, intermediate_size=200,
        image_size=56, patch_size=14, hidden_act="quick_gelu", **fields,
    )  # fmt: skip


def processed(folder, **content):
    """A folder with an image processor."""
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor", **content})
    )
    return folder


def test_a_tower_is_the_encoder_of_the_model_that_was_assembled_with_it(saved, tmp_path):
    model = draw(llamoe.LlamoeDenseForCausalLM, dense_config())
    model.save_pretrained(tmp_path / "text", layout="stock")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path / "text")
    draw(llamoe.LlamoeVisionModel, tower()).save_pretrained(tmp_path / "tower")
    processed(tmp_path / "tower", **CLIP)
    for fold in (False, True):
        whole = tmp_path / f"whole{fold}"
        assemble(tmp_path / "text", tmp_path / "tower", whole, fold_normalization=fold, projector_dim=60)
        for pair in [(tmp_path / "tower", whole), (whole, tmp_path / "tower")][: 1 + fold]:
            result = verify(*pair)
            assert result.same_function and result.same_weights is not fold, result.reasons
            assert [part.name for part in result.outputs] == ["last_hidden_state", "pooler_output"]
            assert any("has an adapter" in reason for reason in result.reasons)
            assert any("has a projection" in reason for reason in result.reasons)
    name = "vision_model.model.layers.1.mlp.fc1.weight"
    broken = edited(whole, tmp_path / "broken", lambda tensors: tensors[name].mul_(1.01))
    result = verify(tmp_path / "tower", broken)
    assert result.same_function is False and result.first_layer == "vision_model.layers.1"
    # An adapter that both have is compared.
    model = llamoe.LlamoeForConditionalGeneration.from_pretrained(saved("multimodal"))
    model.vision_model.save_pretrained(tmp_path / "adapted")
    name = "vision_model.vision_adapter.mlp.fc1.weight"
    other = edited(saved("multimodal"), tmp_path / "other", lambda tensors: tensors[name].mul_(1.01))
    assert verify(tmp_path / "adapted", saved("multimodal")).same_weights
    assert verify(tmp_path / "adapted", other).same_function is False


def test_a_folded_normalization_is_the_same_function_of_raw_pixels(tmp_path):
    draw(llamoe.LlamoeVisionModel, tower()).save_pretrained(tmp_path / "tower")
    processed(tmp_path / "tower", **CLIP)
    convert_vision(tmp_path / "tower", tmp_path / "folded", fold_normalization=True)
    for pair in ((tmp_path / "tower", tmp_path / "folded"), (tmp_path / "folded", tmp_path / "tower")):
        result = verify(*pair)
        assert result.same_function and not result.same_weights, result.reasons
        assert "normalization of pixels" in result.structure
    # The same weights for other pixels are another function of pictures.
    other = processed(
        Path(shutil.copytree(tmp_path / "tower", tmp_path / "other")), **{**CLIP, "image_std": [0.5] * 3}
    )
    result = verify(tmp_path / "tower", other)
    assert result.same_weights and result.same_function is False
    assert verify(tmp_path / "tower", other, logits=False).same_function is None
    # As the part of a model's processor, which says nothing else of it.
    (other / "preprocessor_config.json").unlink()
    (other / "processor_config.json").write_text(json.dumps({"image_processor": {**CLIP, "image_std": 0.5}}))
    assert verify(tmp_path / "tower", other).same_function is False
    (other / "processor_config.json").write_text(json.dumps({"processor_class": "Llama4Processor"}))
    assert verify(tmp_path / "tower", other).same_function  # nothing is known: both get the same numbers
    (other / "processor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"processor_config\.json"):
        verify(tmp_path / "tower", other)
