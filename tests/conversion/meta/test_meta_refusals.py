"""What is wrong with a Meta folder, or cannot become one, is named before anything is written."""

import json
import re

import pytest
import torch
from support.conversions import META_LLAMA_2, META_MAVERICK, META_SCOUT
from support.meta_releases import VISION, read_ranks
from support.tokenizer_files import rank_table

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.io import WriteOptions
from llamoe.conversion.meta.folder import open_meta, save_meta


@pytest.mark.parametrize(
    ("case", "shards", "words"),
    [
        (META_LLAMA_2, 6, "shards = 6: .* divide 2,"),
        (META_MAVERICK, 2, "shards = 2: .* divide 3,"),
        (META_SCOUT, 3, "shards = 3: .* divide 2,"),
        (META_LLAMA_2, 0, "shards=0"),
    ],
)
def test_files_that_heads_cannot_be_divided_by_are_refused(case, shards, words, tmp_path):
    folder = case.write(tmp_path / "meta", case.weights(), 1)
    with pytest.raises(ValueError, match=words):
        save_meta(open_meta(folder), tmp_path / "to", shards=shards)
    assert not (tmp_path / "to").exists()


def drop(name):
    return lambda files, params: [part.pop(name) for part in files]


def put(name, change, rank=None):
    def apply(files, params):
        for part in files if rank is None else [files[rank]]:
            part[name] = change(part[name])

    return apply


def say(**entries):
    return lambda files, params: params.update(entries)


def say_experts(**entries):
    return lambda files, params: params.update(moe_args={**params["moe_args"], **entries})


LLAMA, SCOUT, MAVERICK = (META_LLAMA_2, 2), (META_SCOUT, 2), (META_MAVERICK, 3)
WO, EXPERTS = "layers.1.attention.wo.weight", "layers.1.feed_forward.experts.moe_w"
CONTRADICTIONS = [
    (LLAMA, drop(WO), [f"consolidated.00.pth: {WO} missing"]),
    (LLAMA, lambda files, _: files[1].pop("layers.1.ffn_norm.weight"), ["consolidated.01.pth", "ffn_norm"]),
    (LLAMA, put("layers.1.attention.wq.weight", lambda w: w[:-1], 0), ["layers.1.attention.wq.weight", "29", "30"]),
    (LLAMA, say(n_layers=5), ["layers.3.attention.wq.weight", "missing"]),
    (LLAMA, say(dim=54), ["dim = 54", "60 in all", "tok_embeddings.weight"]),
    (LLAMA, say(n_heads=10), ["rope.freqs", "n_heads = 10", "5 frequencies"]),
    (LLAMA, say(n_kv_heads=6), ["layers.0.attention.wk.weight", "20", "60"]),
    (LLAMA, say(n_kv_heads=3), ["n_kv_heads = 3 cannot be divided by the 2 files"]),
    (LLAMA, say(vocab_size=100), ["vocab_size = 100", "310"]),
    (LLAMA, say(n_heads="12"), ["params.json", "n_heads = '12'"]),
    (LLAMA, put("layers.1.attention.wk.weight", lambda _: torch.tensor(1.0)), ["wk.weight has shape []"]),
    (
        SCOUT, put(f"{EXPERTS}_swiglu_eD_F", lambda weight: weight.bfloat16()),
        ["moe_w_swiglu_eD_F", "bfloat16", "moe_w_in_eD_F", "float32"],
    ),
    (
        SCOUT, put(f"{EXPERTS}_out_eF_D", lambda weight: weight[:-1], 1),
        ["consolidated.01.pth", "moe_w_out_eF_D", "[244, 60]", "[245, 60]"],
    ),
    (SCOUT, say(moe_args=None), ["experts"]),
    (SCOUT, say_experts(num_experts=4), ["moe_w_out_eF_D has shape [245, 60]", "4 experts"]),
    (
        MAVERICK, say_experts(interleave_moe_layer_step=1),
        ["layers.0.feed_forward.mlp.fc1_weight", "params.json"],
    ),
    (MAVERICK, say(n_kv_heads=6), ["layers.0.attention.wqkv.weight", "40 rows", "1 + 1 + 1"]),
    (SCOUT, say(vision_args=None), ["vision_embeddings"]),
    (SCOUT, say(vision_args=VISION | {"image_size": {"height": 24, "width": 18}}), ["image_size", "square"]),
    (SCOUT, say(vision_args=VISION | {"dim": 48}), ["positional_embedding_vlm|conv1", "72"]),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "change", "words"), CONTRADICTIONS)
def test_what_contradicts_itself_is_named(folder, change, words, tmp_path):
    case, count = folder
    source = case.write(tmp_path / "meta", case.weights(), count)
    files, params = read_ranks(source), dict(case.params)
    change(files, params)
    for rank, part in enumerate(files):
        torch.save(part, source / f"consolidated.{rank:02d}.pth")
    (source / "params.json").write_text(json.dumps(params))
    with pytest.raises(CheckpointError) as caught:
        open_meta(source, companions=False)
    for word in words:
        assert re.search(word if "|" in word else re.escape(word), str(caught.value)), str(caught.value)


def test_dtypes_that_one_tensor_of_metas_cannot_mix_are_refused(tmp_path):
    checkpoint = open_meta(META_SCOUT.write(tmp_path / "meta", META_SCOUT.weights(), 1))
    name = "language_model.model.layers.0.self_attn.k_proj.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name].cast(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"bfloat16.*float32.*Choose a dtype"):
        save_meta(checkpoint, tmp_path / "to", shards=2)
    save_meta(checkpoint, tmp_path / "to", WriteOptions(dtype="float32"), shards=2)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    folder = META_SCOUT.write(tmp_path / "meta", META_SCOUT.weights(), 2)
    (folder / "tokenizer.model").write_bytes(rank_table() + b"YWE= 256\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: .*257 ranks.*2312"):
        open_meta(folder)
