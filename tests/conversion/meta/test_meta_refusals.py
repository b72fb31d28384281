"""What is wrong with a Meta folder, or cannot become one, is named before anything is written."""

import re

import pytest
import torch
from support.meta_folders import (
    BY_NAME,
    VISION,
    add_ballast,
    cut,
    make_folder,
    whole_model,
    write_folder,
)
from support.tokenizer_files import rank_table

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.io import WriteOptions
from llamoe.conversion.meta.folder import open_meta, save_meta


@pytest.mark.parametrize(
    ("name", "shards", "words"),
    [
        ("llama-2-gqa", 6, "shards = 6: .* divide 4,"),
        ("llama-2-gqa-of-3", 2, "shards = 2: .* divide 3,"),
        ("llama-4", 3, "shards = 3: .* divide 4,"),
        ("llama-2", 0, "shards=0"),
    ],
)
def test_files_that_heads_cannot_be_divided_by_are_refused(name, shards, words, tmp_path):
    make_folder(tmp_path / "meta", BY_NAME[name])
    with pytest.raises(ValueError, match=words):
        save_meta(open_meta(tmp_path / "meta"), tmp_path / "to", shards=shards)
    assert not (tmp_path / "to").exists()


def drop(name):
    return lambda files, params: [part.pop(name) for part in files]


def rename(old, new):
    return lambda files, params: [part.update({new: part.pop(old)}) for part in files]


def double(old, new):
    return lambda files, params: [part.update({new: part[old].clone()}) for part in files]


def shrink(name, rank, rows):
    return lambda files, params: files[rank].update({name: files[rank][name][:rows].clone()})


def replace(name, change, rank=None):
    def apply(files, params):
        for part in files if rank is None else [files[rank]]:
            part[name] = change(part[name])

    return apply


def say(**entries):
    return lambda files, params: params.update(entries)


WO, EXPERTS = "layers.1.attention.wo.weight", "layers.1.feed_forward.experts.moe_w"
CONTRADICTIONS = [
    ("llama-2", drop(WO), [f"consolidated.00.pth: {WO} missing"]),
    ("llama-2", drop("output.weight"), ["output.weight missing", "consolidated.00.pth"]),
    ("llama-2", lambda files, _: files[1].pop("layers.1.ffn_norm.weight"), ["consolidated.01.pth", "ffn_norm"]),
    ("llama-2", rename(WO, "layers.1.attention.wx.weight"), ["layers.1.attention.wx.weight"]),
    ("llama-2", shrink("layers.1.attention.wq.weight", 0, 30), ["layers.1.attention.wq.weight", "30", "36"]),
    ("llama-2", say(n_layers=5), ["layers.2.attention.wq.weight", "missing"]),
    ("llama-2", say(dim=70), ["dim = 70", "72 in all", "tok_embeddings.weight"]),
    ("llama-2", say(n_heads=6), ["rope.freqs", "n_heads = 6", "3 frequencies"]),
    ("llama-2", say(n_kv_heads=4), ["layers.0.attention.wk.weight", "72", "24"]),
    ("llama-2", say(vocab_size=100), ["vocab_size = 100", "132"]),
    ("llama-2", say(n_heads="12"), ["params.json", "n_heads = '12'"]),
    ("llama-2", say(n_heads=None), ["params.json", "n_heads is missing"]),
    ("llama-2", say(norm_eps=-1.0), ["norm_eps = -1.0"]),
    ("llama-2", replace("layers.1.attention.wk.weight", lambda _: torch.tensor(1.0)), ["wk.weight has shape []"]),
    (
        "llama-4", double("layers.1.feed_forward.norm.weight", "layers.1.ffn_norm.weight"),
        ["two names", "layers.1.ffn_norm.weight"],
    ),
    ("llama-4", drop(f"{EXPERTS}_swiglu_eD_F"), ["moe_w_swiglu_eD_F missing"]),
    (
        "llama-4", replace(f"{EXPERTS}_swiglu_eD_F", lambda weight: weight.bfloat16()),
        ["moe_w_swiglu_eD_F", "bfloat16", "moe_w_in_eD_F", "float32"],
    ),
    (
        "llama-4", replace(f"{EXPERTS}_out_eF_D", lambda weight: weight[:-1], rank=1),
        ["consolidated.01.pth", "moe_w_out_eF_D", "[329, 72]", "[330, 72]"],
    ),
    ("llama-4", say(moe_args=None), ["experts"]),
    (
        "llama-4", say(moe_args={"num_experts": 4, "interleave_moe_layer_step": 2}),
        ["moe_w_out_eF_D has shape [330, 72]", "4 experts"],
    ),
    ("llama-4", say(moe_args={"num_experts": 5}), ["layers.0.feed_forward.mlp.fc1_weight", "params.json"]),
    ("llama-4", say(vision_args=None), ["vision_embeddings"]),
    ("llama-4", say(n_kv_heads=2), ["layers.0.attention.wqkv.weight", "60 rows", "6 + 1 + 1"]),
    ("llama-4", say(vision_args=VISION | {"image_size": {"height": 56, "width": 42}}), ["image_size", "square"]),
    ("llama-4", say(vision_args=VISION | {"dim": 48}), ["positional_embedding_vlm|conv1", "96"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), CONTRADICTIONS)
def test_what_contradicts_itself_is_named(name, change, words, tmp_path):
    case = BY_NAME[name]
    files, params = add_ballast(case, cut(case, whole_model(case), 2)), dict(case.params)
    change(files, params)
    write_folder(tmp_path, params, files)
    with pytest.raises(CheckpointError) as caught:
        open_meta(tmp_path)
    for word in words:
        assert re.search(word if "|" in word else re.escape(word), str(caught.value)), str(caught.value)


def test_dtypes_that_one_tensor_of_metas_cannot_mix_are_refused(tmp_path):
    make_folder(tmp_path / "meta", BY_NAME["llama-4"])
    checkpoint = open_meta(tmp_path / "meta")
    name = "language_model.model.layers.0.self_attn.k_proj.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name].cast(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"bfloat16.*float32.*Choose a dtype"):
        save_meta(checkpoint, tmp_path / "to", shards=2)
    save_meta(checkpoint, tmp_path / "to", WriteOptions(dtype="float32"), shards=2)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    make_folder(tmp_path, BY_NAME["llama-4"], 2)
    (tmp_path / "tokenizer.model").write_bytes(rank_table() + b"YWE= 256\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: .*257 ranks.*2304"):
        open_meta(tmp_path)
