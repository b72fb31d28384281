"""Contradictions within a folder of Meta or Mistral AI are named by errors, and nothing is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.conversions import META_LLAMA_1, META_LLAMA_2, META_LLAMA_3, META_MAVERICK, META_SCOUT
from support.meta_releases import VISION
from support.mistral_folders import DENSE, FIRST_MIXTRAL, MIXTRAL, MOE
from support.tokenizer_files import rank_table

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert


def remove(name):
    return lambda folder: (folder / name).unlink()


def rename(name, other):
    return lambda folder: (folder / name).rename(folder / other)


def add(name):
    return lambda folder: torch.save({}, folder / name)


def tokenizer_of_257_ranks(folder):
    (folder / "tokenizer.model").write_bytes(rank_table() + b"YWE= 256\n")


def say(**entries):
    """Change entries of params.json; None removes one."""

    def change(folder):
        params = json.loads((folder / "params.json").read_text()) | entries
        params = {name: value for name, value in params.items() if value is not None}
        (folder / "params.json").write_text(json.dumps(params))

    return change


def tensors(function, rank=None):
    """Apply a function to the tensors of each weight file, or of file `rank` alone."""

    def change(folder):
        files = sorted(folder.glob("consolidated.*"))
        for file in files if rank is None else [files[rank]]:
            is_safe = file.suffix == ".safetensors"
            content = load_file(file) if is_safe else torch.load(file, weights_only=False)
            function(content)
            (save_file if is_safe else torch.save)(content, file)

    return change


def drop(*names, rank=None):
    return tensors(lambda content: [content.pop(name) for name in names], rank)


def put(name, make, rank=None):
    return tensors(lambda content: content.update({name: make(content[name])}), rank)


def ones(*shape):
    return lambda _: torch.ones(shape)


LLAMA_1, LLAMA, SCOUT, MAVERICK = (META_LLAMA_1, 3), (META_LLAMA_2, 2), (META_SCOUT, 2), (META_MAVERICK, 3)
MISTRAL, MIXTRAL_8X7B, FIRST_RELEASE = (DENSE,), (MIXTRAL,), (FIRST_MIXTRAL,)
WO, EXPERTS = "layers.1.attention.wo.weight", "layers.1.feed_forward.experts.moe_w"
EXPERT, FIRST = "layers.1.feed_forward.experts.2.{}.weight", "layers.1.block_sparse_moe.w{}"
# A model and its number of files, a change of its folder, and words of the error.
FILES = [
    (LLAMA_1, remove("consolidated.01.pth"), ["holds consolidated.00.pth, consolidated.02.pth", "from 00 on"]),
    (LLAMA_1, remove("consolidated.02.pth"), ["embed_tokens.weight of shape [306, 40]", "[306, 60]"]),
    *(((case, 2), remove("consolidated.01.pth"), [" missing"]) for case in (META_LLAMA_1, META_LLAMA_3, META_SCOUT)),
    (LLAMA_1, add("consolidated.1.pth"), ["consolidated.01.pth, consolidated.02.pth, consolidated.1.pth", "one file"]),
    (LLAMA_1, add("consolidated.03.pth"), ["n_heads = 6 cannot be divided by the 4 files"]),
    # Two halves of the same heads have the shapes of a whole model.
    (LLAMA, rename("consolidated.01.pth", "consolidated.pth"), ["holds consolidated.00.pth, consolidated.pth"]),
    ((META_LLAMA_1, 1), remove("consolidated.00.pth"), ["no consolidated weights"]),
    (MISTRAL, add("consolidated.00.pth"), ["holds consolidated.00.pth, consolidated.safetensors", "one file"]),
    (MISTRAL, remove("params.json"), ["params.json: cannot be read"]),
    (MISTRAL, remove("consolidated.safetensors"), ["no consolidated weights"]),
]  # fmt: skip
TENSORS = [
    (LLAMA, drop(WO), ["consolidated.00.pth: model.layers.1.self_attn.o_proj.weight missing"]),
    (LLAMA, drop("layers.1.ffn_norm.weight", rank=1), ["consolidated.01.pth", "ffn_norm"]),
    (LLAMA, put("layers.1.attention.wq.weight", lambda w: w[:-1], 0), ["layers.1.attention.wq.weight", "59", "60"]),
    (
        SCOUT, put(f"{EXPERTS}_swiglu_eD_F", lambda weight: weight.bfloat16()),
        ["moe_w_swiglu_eD_F", "bfloat16", "moe_w_in_eD_F", "float32"],
    ),
    (
        SCOUT, put(f"{EXPERTS}_out_eF_D", lambda weight: weight[:-1], 1),
        ["consolidated.01.pth", "moe_w_out_eF_D", "[244, 60]", "rows of 5 experts"],
    ),
    (SCOUT, put("layers.0.attention.wqkv.weight", ones(), 1), ["consolidated.01.pth", "has shape []", "1 axes"]),
    (LLAMA_1, put(WO, ones(60), 1), ["consolidated.01.pth", "has shape [60]", "at least 2 axes"]),
    (LLAMA_1, put("tok_embeddings.weight", ones(60), 0), ["consolidated.00.pth", "has shape [60]", "a matrix"]),
    (MISTRAL, drop(WO), ["self_attn.o_proj.weight missing"]),
    (MISTRAL, put("layers.0.attention.wq.weight", ones(40, 24)), ["attention.wq.weight", "[40, 24]", "[48, 24]"]),
    (MISTRAL, put("tok_embeddings.weight", ones(55, 24)), ["output.weight", "[53, 24]", "[55, 24]"]),
    (MIXTRAL_8X7B, drop(EXPERT.format("w3")), ["experts.2.w3.weight missing", "experts.0.w1.weight"]),
    (
        MIXTRAL_8X7B, drop(*(EXPERT.format(part) for part in ("w1", "w2", "w3"))),
        ["layers.1.feed_forward.experts", "[2, 80, 24]", "[3, 80, 24]"],
    ),
    (MIXTRAL_8X7B, put(EXPERT.format("w2"), ones(24, 41)), [EXPERT.format("w2"), "24, 41]", "24, 40]"]),
    (
        FIRST_RELEASE,
        tensors(lambda content: content.update({n: torch.ones(121, 24) for n in content if FIRST[:-2] in n})),
        [FIRST.format(1), "[121, 24]", "3 experts"],
    ),
    (
        FIRST_RELEASE,
        tensors(lambda content: FIRST.format(2) in content and content.update({FIRST.format(2): torch.ones(117, 24)})),
        ["down_proj of shape [3, 24, 39]", "[3, 24, 40]"],
    ),
    # Copies of a tensor that differ are found when the tensor is written.
    (SCOUT, put("norm.weight", lambda weight: weight + 1, 1), ["consolidated.01.pth: norm.weight: differs"]),
    (FIRST_RELEASE, put("norm.weight", lambda weight: weight + 1, 3), ["norm.weight: differs"]),
]  # fmt: skip
SCOUTS = META_SCOUT.params["moe_args"]
PARAMS = [
    (LLAMA, say(n_layers=5), ["model.layers.3.", "missing"]),
    (LLAMA, say(n_heads=10), ["rope.freqs", "n_heads = 10", "heads of 10 channels, but"]),
    (LLAMA, say(n_kv_heads=6), ["layers.0.attention.wk.weight", "20", "60"]),
    (LLAMA, say(n_kv_heads=3), ["n_kv_heads = 3 cannot be divided by the 2 files"]),
    (LLAMA, say(n_heads="12"), ["params.json", "n_heads = '12'"]),
    (SCOUT, say(moe_args=None), ["experts"]),
    (SCOUT, say(moe_args=SCOUTS | {"num_experts": 4}), ["moe_w_out_eF_D has shape [245, 60]", "rows of 4 experts"]),
    (SCOUT, say(vision_args=None), ["vision_embeddings"]),
    (SCOUT, say(vision_args=VISION | {"image_size": {"height": 24, "width": 18}}), ["image_size", "square"]),
    (SCOUT, say(vision_args=VISION | {"dim": 48}), ["vision_encoder", "72"]),
    (
        MAVERICK, say(moe_args=META_MAVERICK.params["moe_args"] | {"interleave_moe_layer_step": 1}),
        ["layers.0.feed_forward.mlp.fc1_weight", "another model's"],
    ),
    (MAVERICK, say(n_kv_heads=6), ["layers.0.attention.wqkv.weight", "40 rows", "1 + 1 + 1"]),
    # Keys of models that our classes do not compute.
    (MISTRAL, say(model_type="mamba"), ["model_type = mamba", "'transformer'"]),
    (MISTRAL, say(vision_encoder={"image_size": 1024}), ["vision_encoder", "decoders of text"]),
    (MISTRAL, say(quantization={"qformat_weight": "fp8_e4m3"}), ["quantization ="]),
    (MISTRAL, say(moe=MOE | {"num_shared_experts": 1}), ["moe.num_shared_experts"]),
    (MISTRAL, say(moe=MOE | {"norm_topk_prob": False}), ["moe.norm_topk_prob"]),
    (MISTRAL, say(moe={"num_experts": 3}), ["moe"]),
    (MISTRAL, say(causal=False), ["causal = False", "True"]),
    (MISTRAL, say(qk_norm=True), ["qk_norm = True"]),
    # A key that is off may also change what is computed.
    (MISTRAL, say(use_rope=False), ["use_rope = False", "changes nothing, remove"]),
    (MISTRAL, say(hidden_dim=None), ["hidden_dim is missing"]),
    (MISTRAL, say(dim=25), ["layers.0.attention.wk", "[16, 24]", "[16, 25]"]),
    (MISTRAL, say(n_heads="6"), ["n_heads = '6'", "number above 0"]),
    (MISTRAL, say(rope_theta="1e6"), ["rope_theta = '1e6'"]),
    (MISTRAL, say(hidden_size=24), ["hidden_size = 24", "only one of hidden_size and dim"]),
    (MISTRAL, say(sliding_window=[4, None, 4]), ["sliding_window = [4, None, 4]", "2 layers"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [*FILES, *TENSORS, *PARAMS, (SCOUT, tokenizer_of_257_ranks, ["tokenizer.model", "257 ranks", "2312"])],
)
def test_what_contradicts_itself_is_named(model, change, words, tmp_path):
    case, *count = model
    source = case.write(tmp_path / "source", case.weights(), *count)
    change(source)
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "hf")
    for word in [*words, str(source)]:
        assert word in str(caught.value)
    assert not (tmp_path / "hf").exists()
