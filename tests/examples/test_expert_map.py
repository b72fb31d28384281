"""The picture of which expert computes what."""

import sys

import pytest
import torch
from PIL import Image
from support.models import MODELS, TEXT
from support.paths import EXAMPLES

PICTURE = EXAMPLES / "pictures" / "two_shapes.png"


def run(monkeypatch, *words):
    # The folder of examples is on the path while these tests run.
    import expert_map

    monkeypatch.setattr(sys, "argv", ["expert_map.py", *map(str, words)])
    expert_map.main()
    return expert_map


def test_it_draws_a_picture_and_the_same_of_experts_on_disk(tmp_path, monkeypatch, capsys):
    run(monkeypatch, "--image", PICTURE, "--out", tmp_path / "map.png")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'map.png'}\n"
    with Image.open(tmp_path / "map.png") as picture:
        picture.load()
        assert picture.format == "PNG" and min(picture.size) > 300 and len(picture.getcolors(1 << 20)) > 50
    run(monkeypatch, "--image", PICTURE, "--out", tmp_path / "on_disk.png", "--experts-memory", "300KB")
    assert (tmp_path / "map.png").read_bytes() == (tmp_path / "on_disk.png").read_bytes()


def test_choices_are_those_of_the_routers():
    import expert_map

    case = next(case for case in MODELS if case.name == "LlamoeForCausalLM")
    model = case.make().eval()
    tokens = torch.randint(1, TEXT["vocab_size"], (1, 23), generator=torch.Generator().manual_seed(0))
    chosen = expert_map.first_choices(model, {"input_ids": tokens})
    output = model(tokens, output_router_logits=True)
    assert torch.equal(chosen, torch.stack([logits.argmax(-1) for logits in output.router_logits]))
    assert len(chosen.unique()) > 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--image", "none.png"], "expert_map: no such image: none.png\n"),
        (["--image", PICTURE, "--model", "{}"], "expert_map: {} is no model folder: it has no config.json\n"),
        (["--image", PICTURE, "--out", "{}/none/map.png"], "expert_map: no such folder: {}/none\n"),
        (
            ["--image", PICTURE, "--experts-memory", "much"],
            'give bytes, or a text like "24GB", of at least 1.\n',
        ),
        (["--image", PICTURE, "--layers", "0"], "argument --layers: must be at least 1, not 0\n"),
    ],
)
def test_bad_input_is_told_in_a_line(words, says, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *(str(word).format(tmp_path) for word in words))
    assert capsys.readouterr().err.endswith(says.format(tmp_path))
