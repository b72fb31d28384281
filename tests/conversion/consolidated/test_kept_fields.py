"""llamoe.json beside params.json, which holds what changes no number."""

import pytest
import torch
from support.lazy_tensors import InMemory

import llamoe
from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import Checkpoint
from llamoe.conversion.checkpoint import expected_shapes
from llamoe.conversion.meta import open_meta, save_meta
from llamoe.conversion.meta.params import write_params


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
