"""What Meta's and Mistral AI's folders share: the files of weights, and llamoe.json beside params.json."""

import re

import pytest
import torch
from support.conversions import META_LLAMA_1, META_LLAMA_3, META_SCOUT
from support.lazy_tensors import InMemory
from support.meta_releases import read_ranks
from support.mistral_folders import DENSE

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import Checkpoint, convert
from llamoe.conversion.checkpoint import expected_shapes
from llamoe.conversion.meta import open_meta, save_meta
from llamoe.conversion.meta.params import write_params


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def add(name):
    return lambda folder: torch.save(DENSE.weights(), folder / name)


@pytest.mark.parametrize(
    ("case", "count", "change", "words"),
    [
        (META_LLAMA_1, 3, remove("consolidated.01.pth"), "Each number"),
        *(
            (case, 2, remove("consolidated.01.pth"), " missing")
            for case in (META_LLAMA_1, META_LLAMA_3, META_SCOUT)
        ),
        (META_LLAMA_1, 3, add("consolidated.1.pth"), "Each number"),
        (META_LLAMA_1, 3, add("consolidated.pth"), "Each number"),
        (META_LLAMA_1, 1, remove("consolidated.00.pth"), "no consolidated weights"),
        (DENSE, None, add("consolidated.00.pth"), "with one ending"),
        (DENSE, None, remove("params.json"), "holds no params.json"),
        (DENSE, None, remove("consolidated.safetensors"), "no consolidated weights"),
    ],
)
def test_wrong_files_of_weights_are_named(case, count, change, words, tmp_path):
    folder = case.write(tmp_path / "source", case.weights(), *([count] if count else []))
    change(folder)
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        convert(folder, tmp_path / "hf")
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_copies_that_differ_between_files_are_found_when_they_are_written(tmp_path):
    folder = META_SCOUT.write(tmp_path / "meta", META_SCOUT.weights(), 2)
    file = read_ranks(folder)[1]
    file["norm.weight"] += 1
    torch.save(file, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth: norm\.weight: differs"):
        convert(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_changes_no_number_is_kept_beside_params_json():
    config = llamoe.preset(
        "llama-4-maverick",
        text_config=dict(
            router_aux_loss_coef=0.25, attn_temperature_tuning=4, max_position_embeddings=1048576
        ),
        image_token_index=7,
    )
    _, kept = write_params(config, 4)
    assert kept["image_token_index"] == 7
    assert kept["text_config"]["router_aux_loss_coef"] == 0.25
    assert kept["text_config"]["attn_temperature_tuning"] == 4
    assert kept["text_config"]["max_position_embeddings"] == 1048576


def test_the_file_beside_params_json_decides_nothing_that_is_computed(tmp_path):
    config = llamoe.preset(
        "llama-2-7b", hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_hidden_layers=1,
        intermediate_size=36, vocab_size=30,
    )  # fmt: skip
    tensors = {key: torch.zeros(shape) for key, shape in expected_shapes(config).items()}
    checkpoint = Checkpoint(
        tmp_path, "hf", config, {key: InMemory(tensor, key) for key, tensor in tensors.items()}
    )
    save_meta(checkpoint, tmp_path / "meta", shards=2)
    assert open_meta(tmp_path / "meta").config.max_position_embeddings == 4096
    (tmp_path / "meta" / "llamoe.json").write_text('{"rms_norm_eps": 0.5}')
    with pytest.raises(CheckpointError, match=r"llamoe\.json: rms_norm_eps = 0\.5"):
        open_meta(tmp_path / "meta")
