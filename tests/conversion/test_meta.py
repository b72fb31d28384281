"""Meta folders in and out: files that this test cuts by itself, from weights in which every number is another."""

import base64
import io
import json
import re
from dataclasses import dataclass, field

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaForCausalLM,
)

from llamoe.conversion.convert import convert, open_checkpoint
from llamoe.conversion.meta import open_meta, save_meta
from llamoe.conversion.meta_tables import llama4_table, llama_table
from llamoe.conversion.tables import Drop
from llamoe.modeling.weights import CheckpointError

DIM, HEADS, HEAD, LAYERS = 72, 12, 6, 2


@dataclass
class Case:
    """A model in Meta's unfused names, whole, and how a release would hold it."""

    name: str
    params: dict
    files: tuple[int, ...]
    family: str = "llama4"
    split_embedding_columns: bool = False
    extra: dict = field(default_factory=dict)

    @property
    def vocab(self):
        return self.params["vocab_size"]


def dense_params(**more):
    return {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "vocab_size": 132,
        "multiple_of": 12,
        "norm_eps": 1e-5,
    } | more


def llama4_params(**more):
    return {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": 4,
        "head_dim": HEAD,
        "vocab_size": 2304,
        "multiple_of": 12,
        "ffn_dim_multiplier": 0.7,
        "ffn_exp": 2.5,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
        "attention_chunk_size": 16,
        "nope_layer_interval": 2,
        "use_qk_norm": True,
        "moe_args": {"num_experts": 5, "interleave_moe_layer_step": 2, "top_k": 2},
        "vision_args": None,
    } | more


VISION = {
    "image_size": {"height": 56, "width": 56},
    "patch_size": {"height": 14, "width": 14},
    "dim": 96,
    "n_layers": 1,
    "n_heads": 12,
    "mlp_ratio": 4.0,
    "output_dim": 60,
    "pixel_shuffle_ratio": 0.5,
}

CASES = [
    Case("llama-1", dense_params(vocab_size=-1), (1, 2, 3, 4), "llama", True, {"rope": "layers"}),
    Case("llama-2", dense_params(vocab_size=-1), (2,), "llama", True, {"rope": "top"}),
    Case(
        "llama-2-gqa",
        dense_params(n_kv_heads=4, ffn_dim_multiplier=1.3),
        (1, 2, 4),
        "llama",
        True,
        {"rope": "top"},
    ),
    Case("llama-2-gqa-of-3", dense_params(n_kv_heads=3), (1, 3), "llama", True),
    Case(
        "llama-3",
        dense_params(n_kv_heads=4, vocab_size=512, rope_theta=5e5, use_scaled_rope=True),
        (1, 2, 4),
        "llama",
    ),
    Case("llama-4-text", llama4_params(), (1, 2, 4)),
    Case("llama-4-text-of-3", llama4_params(n_kv_heads=3), (1, 3)),
    Case("llama-4-dense", llama4_params(moe_args=None, ffn_exp=None), (1, 4)),
    Case("llama-4", llama4_params(vision_args=VISION), (1, 2, 4)),
    Case(
        "llama-4-all-mixtures",
        llama4_params(
            vision_args=VISION, moe_args={"num_experts": 3}, use_scaled_rope=False, use_qk_norm=False
        ),
        (1, 2),
    ),
]
BY_NAME = {case.name: case for case in CASES}
EACH_COUNT = [pytest.param(case, n, id=f"{case.name}-{n}") for case in CASES for n in case.files]


class Numbers:
    """Tensors of which no number comes twice, all exact in float32."""

    def __init__(self):
        self.next = 1

    def __call__(self, *shape):
        tensor = torch.arange(self.next, self.next + torch.Size(shape).numel(), dtype=torch.float32).view(
            shape
        )
        self.next += tensor.numel()
        assert self.next < 2**24
        return tensor


def inner_sizes(case):
    return (84, 108) if case.family == "llama4" else (264, 264)  # experts, dense


def whole_model(case):
    """Full tensors by Meta's unfused names."""
    number, params = Numbers(), case.params
    kv = params.get("n_kv_heads") or HEADS
    expert, dense = inner_sizes(case)
    full = {
        "tok_embeddings.weight": number(
            512 if "3" == case.name[6:7] else 132 if case.family == "llama" else case.vocab, DIM
        ),
        "norm.weight": number(DIM),
    }
    full["output.weight"] = number(*full["tok_embeddings.weight"].shape)
    moe = params.get("moe_args")
    for i in range(LAYERS):
        layer = f"layers.{i}."
        full[layer + "attention_norm.weight"] = number(DIM)
        full[layer + "ffn_norm.weight"] = number(DIM)
        full[layer + "attention.wq.weight"] = number(HEADS * HEAD, DIM)
        full[layer + "attention.wk.weight"] = number(kv * HEAD, DIM)
        full[layer + "attention.wv.weight"] = number(kv * HEAD, DIM)
        full[layer + "attention.wo.weight"] = number(DIM, HEADS * HEAD)
        if moe and (i + 1) % moe.get("interleave_moe_layer_step", 1) == 0:
            experts = moe["num_experts"]
            full[layer + "feed_forward.router_DE"] = number(DIM, experts)
            full[layer + "feed_forward.experts.w1"] = number(experts, DIM, expert)
            full[layer + "feed_forward.experts.w2"] = number(experts, expert, DIM)
            full[layer + "feed_forward.experts.w3"] = number(experts, DIM, expert)
            full[layer + "feed_forward.shared_expert.w1.weight"] = number(expert, DIM)
            full[layer + "feed_forward.shared_expert.w2.weight"] = number(DIM, expert)
            full[layer + "feed_forward.shared_expert.w3.weight"] = number(expert, DIM)
        else:
            full[layer + "feed_forward.w1.weight"] = number(dense, DIM)
            full[layer + "feed_forward.w2.weight"] = number(DIM, dense)
            full[layer + "feed_forward.w3.weight"] = number(dense, DIM)
    if params.get("vision_args"):
        full |= whole_tower(number)
    return full


def whole_tower(number):
    width, inner, out = VISION["dim"], 384, VISION["output_dim"]
    encoder = "vision_embeddings.vision_encoder."
    full = {
        encoder + "conv1._linear.weight": number(width, 3 * 14 * 14),
        encoder + "class_embedding": number(width),
        encoder + "positional_embedding_vlm": number(17, width),
        "vision_embeddings.vision_adapter.mlp.c_fc.weight": number(out, 4 * width),
        "vision_embeddings.vision_adapter.mlp.c_proj.weight": number(out, out),
        "vision_projection.weight": number(DIM, out),
    }
    for norm in ("ln_pre", "ln_post"):
        full[encoder + norm + ".weight"], full[encoder + norm + ".bias"] = number(width), number(width)
    for j in range(VISION["n_layers"]):
        block = f"{encoder}transformer.resblocks.{j}."
        shapes = {f"attn.w{x}": (width, width) for x in "qkvo"}
        shapes |= {
            "mlp.c_fc": (inner, width),
            "mlp.c_proj": (width, inner),
            "ln_1": (width,),
            "ln_2": (width,),
        }
        for name, shape in shapes.items():
            full[block + name + ".weight"], full[block + name + ".bias"] = number(*shape), number(shape[0])
    return full


def hugging_face(case, full):
    """What the tensors are called, and how they lie, in stock: written out by hand."""

    def rotated(weight, heads):
        order = [h * HEAD + 2 * j + part for h in range(heads) for part in (0, 1) for j in range(HEAD // 2)]
        return weight[order]

    kv = case.params.get("n_kv_heads") or HEADS
    text = "language_model." if case.params.get("vision_args") else ""
    of_llama = case.family == "llama"
    result = {
        text + "model.embed_tokens.weight": full["tok_embeddings.weight"],
        text + "model.norm.weight": full["norm.weight"],
        text + "lm_head.weight": full["output.weight"],
    }
    for i in range(LAYERS):
        meta, hf = f"layers.{i}.", f"{text}model.layers.{i}."
        forward = "mlp." if of_llama else "feed_forward."
        result[hf + "input_layernorm.weight"] = full[meta + "attention_norm.weight"]
        result[hf + "post_attention_layernorm.weight"] = full[meta + "ffn_norm.weight"]
        q, k = full[meta + "attention.wq.weight"], full[meta + "attention.wk.weight"]
        result[hf + "self_attn.q_proj.weight"] = rotated(q, HEADS) if of_llama else q
        result[hf + "self_attn.k_proj.weight"] = rotated(k, kv) if of_llama else k
        result[hf + "self_attn.v_proj.weight"] = full[meta + "attention.wv.weight"]
        result[hf + "self_attn.o_proj.weight"] = full[meta + "attention.wo.weight"]
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        if meta + "feed_forward.router_DE" in full:
            experts = meta + "feed_forward.experts."
            result[hf + "feed_forward.router.weight"] = full[meta + "feed_forward.router_DE"].T
            gate_up = torch.cat([full[experts + "w1"], full[experts + "w3"]], dim=2)
            result[hf + "feed_forward.experts.gate_up_proj"] = gate_up
            result[hf + "feed_forward.experts.down_proj"] = full[experts + "w2"]
            for ours, its in names.items():
                shared = full[f"{meta}feed_forward.shared_expert.{its}.weight"]
                result[f"{hf}feed_forward.shared_expert.{ours}.weight"] = shared
        else:
            for ours, its in names.items():
                result[f"{hf}{forward}{ours}.weight"] = full[f"{meta}feed_forward.{its}.weight"]
    if text:
        for name, tensor in full.items():
            if name.startswith("vision"):
                result[tower_name(name)] = tensor
    return result


def tower_name(name):
    for pattern, replacement in (
        (r"vision_projection", "multi_modal_projector.linear_1"),
        (r"vision_embeddings\.vision_encoder\.transformer\.resblocks", "vision_model.model.layers"),
        (
            r"vision_embeddings\.vision_(encoder|adapter)",
            lambda m: "vision_model" + {"adapter": ".vision_adapter"}.get(m[1], ""),
        ),
        (r"conv1\._linear", "patch_embedding.linear"),
        (r"ln_p(re|ost)", r"layernorm_p\1"),
        (r"attn\.w([qkvo])", r"self_attn.\1_proj"),
        (r"ln_1", "input_layernorm"),
        (r"ln_2", "post_attention_layernorm"),
        (r"mlp\.c_fc", "mlp.fc1"),
        (r"mlp\.c_proj", "mlp.fc2"),
    ):
        name = re.sub(pattern, replacement, name)
    return name


ROW_PARALLEL = re.compile(r"(attention\.wo|feed_forward\.w2|shared_expert\.w2|attn\.wo|mlp\.c_proj)\.weight$")
COPIED = re.compile(
    r"norm\.weight$|ln_|class_embedding|positional|router_DE|wo\.bias$|c_proj\.bias$|rope\.freqs|freqs_cis|_3E|activation_DE"
)


def axis_of(case, name, tensor):
    """Along which axis of a whole tensor Meta's processes share it."""
    if COPIED.search(name):
        return None
    if name == "tok_embeddings.weight":
        return 1 if case.split_embedding_columns else 0
    if name.endswith("experts.w2"):
        return 1
    if name.endswith(("experts.w1", "experts.w3")):
        return 2
    return 1 if ROW_PARALLEL.search(name) else 0


def cut(case, full, count, style="release"):
    """The files that `count` model-parallel processes would save."""
    files = []
    for rank in range(count):
        part = {}
        for name, tensor in full.items():
            axis = axis_of(case, name, tensor)
            part[name] = tensor.clone() if axis is None else tensor.chunk(count, axis)[rank].clone()
        files.append(fused(part) if style == "release" and case.family == "llama4" else part)
    return files


def fused(part):
    """One process's tensors under the names of the Llama 4 releases."""
    result = {}
    for name, tensor in part.items():
        layer, _, rest = name.partition(".attention")
        layer = layer if rest else name.partition(".feed_forward")[0].partition(".ffn_norm")[0]
        moe = f"{layer}.feed_forward.router_DE" in part
        if rest in (".wk.weight", ".wv.weight") or name.endswith(".feed_forward.w3.weight"):
            continue
        if rest == ".wq.weight":
            pieces = [part[f"{layer}.attention.w{x}.weight"] for x in "qkv"]
            result[f"{layer}.attention.wqkv.weight"] = torch.cat(pieces)
        elif rest == "_norm.weight":
            result[f"{layer}.attention.wqkv.layer_norm_weight"] = tensor
        elif name.endswith(".ffn_norm.weight"):
            result[f"{layer}.feed_forward." + ("norm.weight" if moe else "mlp.layer_norm_weight")] = tensor
        elif name.endswith(".feed_forward.w1.weight"):
            pieces = [tensor, part[f"{layer}.feed_forward.w3.weight"]]
            result[f"{layer}.feed_forward.mlp.fc1_weight"] = torch.cat(pieces)
        elif name.endswith(".feed_forward.w2.weight"):
            result[f"{layer}.feed_forward.mlp.fc2_weight"] = tensor
        elif ".experts." in name:
            new = {"w1": "moe_w_in_eD_F", "w2": "moe_w_out_eF_D", "w3": "moe_w_swiglu_eD_F"}[name[-2:]]
            result[f"{layer}.feed_forward.experts.{new}"] = tensor.flatten(0, 1)
        elif ".shared_expert." in name:
            new = {"w1": "w_in_shared_FD", "w2": "w_out_shared_DF", "w3": "w_swiglu_FD"}[name.split(".")[-2]]
            result[f"{layer}.feed_forward.{new}.weight"] = tensor
        else:
            result[name] = tensor
    return result


def add_ballast(case, files):
    """What real files hold besides weights."""
    for part in files:
        if case.extra.get("rope") == "layers":
            for i in range(LAYERS):
                part[f"layers.{i}.attention.inner_attention.rope.freqs"] = torch.ones(HEAD // 2)
        if case.extra.get("rope") == "top" or case.family == "llama4":
            part["rope.freqs"] = torch.ones(HEAD // 2)
        if case.family == "llama4":
            part["freqs_cis"] = torch.ones(3)
            part["layers.0.attention.wqkv._extra_state"] = io.BytesIO()
            part["layers.0.attention.wo._extra_state"] = torch.zeros(3, dtype=torch.uint8)
            if case.params["moe_args"]:
                part["layers.1.feed_forward.experts.mlp._extra_state"] = io.BytesIO(b"state")
                part["layers.1.feed_forward.expert_activation_DE"] = torch.ones(DIM, 5)
                part["layers.1.feed_forward.global_gate_stats_3E"] = torch.ones(3, 5)
                part["layers.1.feed_forward.running_gate_stats_3E"] = torch.ones(3, 5)
        else:
            part["freqs_cis"] = torch.ones(3)
    return files


def write_folder(folder, params, files, single=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    for rank, part in enumerate(files):
        torch.save(part, folder / ("consolidated.pth" if single else f"consolidated.{rank:02d}.pth"))
    return folder


def make_folder(folder, case, count=1, style="release"):
    full = whole_model(case)
    write_folder(folder, case.params, add_ballast(case, cut(case, full, count, style)))
    return full


def assert_same(tensors, expected):
    assert sorted(tensors) == sorted(expected)
    for name, tensor in expected.items():
        given = tensors[name].read() if hasattr(tensors[name], "read") else tensors[name]
        assert given.dtype == tensor.dtype, name
        assert torch.equal(given, tensor), name


def rank_table():
    """A tokenizer of tiktoken's that knows the 256 bytes only."""
    return b"".join(base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256))


def load_files(folder):
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))]


@pytest.mark.parametrize(("case", "count"), EACH_COUNT)
def test_files_are_joined_as_stock_lays_them_out_and_cut_again_bit_by_bit(case, count, tmp_path):
    full = make_folder(tmp_path / "meta", case, count)
    checkpoint = open_meta(tmp_path / "meta")
    assert checkpoint.kind == ("meta-llama4" if case.family == "llama4" else "meta-llama")
    expected = hugging_face(case, full)
    assert_same(checkpoint.tensors, expected)
    others = (case.files * 2)[case.files.index(count) + 1 :][:1]  # from 1 to 2 to 4 to 1, and so on
    for other in others:
        report = save_meta(checkpoint, tmp_path / str(other), shards=other)
        assert report.files == [f"consolidated.{n:02d}.pth" for n in range(other)]
        # A file of Llama 3's is written with rows of the embedding, whatever a single file was taken for.
        for given, wanted in zip(load_files(tmp_path / str(other)), cut(case, full, other), strict=True):
            assert_same(given, wanted)
        again = open_meta(tmp_path / str(other))
        assert again.config == checkpoint.config
        assert_same(again.tensors, expected)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama-4", "llama-4-dense"])
def test_unfused_names_of_metas_modules_are_read_and_written(name, count, tmp_path):
    case = BY_NAME[name]
    full = make_folder(tmp_path / "meta", case, count, style="unfused")
    checkpoint = open_meta(tmp_path / "meta")
    assert_same(checkpoint.tensors, hugging_face(case, full))
    save_meta(checkpoint, tmp_path / "again", shards=count, style="unfused")
    for given, wanted in zip(load_files(tmp_path / "again"), cut(case, full, count, "unfused"), strict=True):
        assert_same(given, wanted)


def test_fused_and_unfused_names_may_be_mixed(tmp_path):
    case = BY_NAME["llama-4"]
    full = whole_model(case)
    fused_files, plain = cut(case, full, 2), cut(case, full, 2, "unfused")
    mixed = [
        {k: v for k, v in a.items() if not k.startswith("layers.1.")}
        | {k: v for k, v in b.items() if k.startswith("layers.1.")}
        for a, b in zip(fused_files, plain, strict=True)
    ]
    write_folder(tmp_path / "meta", case.params, mixed)
    assert_same(open_meta(tmp_path / "meta").tensors, hugging_face(case, full))


def test_every_row_of_every_table_is_used_by_a_case(tmp_path):
    """And every tensor that is dropped says why."""
    names = {"llama": set(), "llama4": set()}
    configs = {}
    for case in CASES:
        full = make_folder(tmp_path / case.name, case)
        for style in ("release", "unfused"):
            names[case.family] |= set(add_ballast(case, cut(case, full, 1, style))[0])
        checkpoint = open_meta(tmp_path / case.name)
        configs[case.name] = checkpoint.config
        assert all(len(reason) > 10 for reason in checkpoint.dropped.values())
        ballast = set(add_ballast(case, [{}])[0])
        assert set(checkpoint.dropped) == ballast
    names["llama4"].add("vision_embeddings.vision_encoder.positional_embedding")  # has a test of its own
    tables = {"llama": llama_table(0) + llama_table(1), "llama4": llama4_table(configs["llama-4"])}
    for family, table in tables.items():
        for row in table:
            for pattern in [row.pattern] if isinstance(row, Drop) else row.sources:
                regex = (
                    re.escape(pattern)
                    .replace(r"\{i\}", r"\d+")
                    .replace(r"\{j\}", r"\d+")
                    .replace(r"\*", ".*")
                )
                assert any(re.fullmatch(regex, name) for name in names[family]), pattern


def test_older_positions_are_resampled_as_metas_loader_does(tmp_path):
    """It takes them, class token first, with `grid_sample` at x / width * 2 - 1."""
    case = BY_NAME["llama-4"]
    full = whole_model(case)
    old = torch.randn(17, 96, generator=torch.Generator().manual_seed(0))
    files = cut(case, full, 2)
    for part in files:
        del part["vision_embeddings.vision_encoder.positional_embedding_vlm"]
        part["vision_embeddings.vision_encoder.positional_embedding"] = old.clone()
    write_folder(tmp_path, case.params, files)
    given = open_meta(tmp_path).tensors["vision_model.positional_embedding_vlm"].read()
    line = torch.arange(4.0) / 4 * 2 - 1
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)[None]
    patches = torch.nn.functional.grid_sample(
        old[1:].view(1, 4, 4, 96).permute(0, 3, 1, 2), grid, padding_mode="zeros", align_corners=False
    )
    torch.testing.assert_close(given[:16], patches[0].flatten(1).T, atol=1e-6, rtol=0)
    assert torch.equal(given[16], old[0])


def test_a_single_file_may_be_called_consolidated_pth_and_params_nested(tmp_path):
    case = BY_NAME["llama-4-text"]
    full = whole_model(case)
    write_folder(tmp_path, {"model": case.params}, cut(case, full, 1), single=True)
    assert_same(open_meta(tmp_path).tensors, hugging_face(case, full))


@pytest.mark.parametrize(
    ("name", "model_class"),
    [
        ("llama-2-gqa", LlamaForCausalLM),
        ("llama-3", LlamaForCausalLM),
        ("llama-4-text", Llama4ForCausalLM),
        ("llama-4-dense", Llama4ForCausalLM),
        ("llama-4", Llama4ForConditionalGeneration),
    ],
)
def test_a_converted_folder_loads_in_stock_with_every_key_in_its_place(name, model_class, tmp_path):
    case = BY_NAME[name]
    full = make_folder(tmp_path / "meta", case, count=2)
    report = convert(tmp_path / "meta", tmp_path / "hf")
    assert report.kind == ("meta-llama4" if case.family == "llama4" else "meta-llama")
    model, info = model_class.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    assert_same(model.state_dict(), hugging_face(case, full))
    convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=2)
    for given, wanted in zip(load_files(tmp_path / "back"), cut(case, full, 2), strict=True):
        assert_same(given, wanted)
    assert open_meta(tmp_path / "back").config == open_meta(tmp_path / "meta").config


def test_a_head_that_is_the_embedding_is_written_as_a_copy(tmp_path):
    case = BY_NAME["llama-2"]
    full = make_folder(tmp_path / "meta", case)
    checkpoint = open_meta(tmp_path / "meta")
    checkpoint.config.tie_word_embeddings = True
    del checkpoint.tensors["lm_head.weight"]
    report = save_meta(checkpoint, tmp_path / "tied", shards=2)
    assert any("tie_word_embeddings" in note for note in report.notes)
    again = open_meta(tmp_path / "tied")
    assert not again.config.tie_word_embeddings
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(again.tensors[name].read(), full["tok_embeddings.weight"])


def test_another_dtype_is_written_for_every_tensor(tmp_path):
    case = BY_NAME["llama-4"]
    full = make_folder(tmp_path / "meta", case, 2)
    save_meta(open_meta(tmp_path / "meta"), tmp_path / "half", shards=4, dtype="bfloat16")
    again = open_meta(tmp_path / "half")
    assert again.config.dtype == torch.bfloat16
    assert_same(again.tensors, {k: v.bfloat16() for k, v in hugging_face(case, full).items()})


def test_a_dry_run_writes_nothing(tmp_path):
    make_folder(tmp_path / "meta", BY_NAME["llama-4"], 2)
    report = save_meta(open_meta(tmp_path / "meta"), tmp_path / "none", shards=4, dry_run=True)
    assert len(report.files) == 4 and report.dry_run
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "shards", "numbers"),
    [
        ("llama-2-gqa", 6, ["num_key_value_heads = 4", "6", "fewer"]),
        ("llama-2-gqa-of-3", 2, ["num_key_value_heads = 3", "2"]),
        ("llama-4", 3, ["num_key_value_heads = 4", "3"]),
        (
            "llama-4",
            8,
            [
                "num_key_value_heads = 4",
                "intermediate_size = 84",
                "vision_config.num_attention_heads = 12",
                "8",
            ],
        ),
        ("llama-2", 0, ["shards = 0"]),
    ],
)
def test_files_that_sizes_cannot_be_divided_by_are_refused(name, shards, numbers, tmp_path):
    make_folder(tmp_path / "meta", BY_NAME[name])
    with pytest.raises(ValueError, match="shards") as caught:
        save_meta(open_meta(tmp_path / "meta"), tmp_path / "to", shards=shards)
    for number in numbers:
        assert number in str(caught.value)
    assert not (tmp_path / "to").exists()


def test_more_files_than_key_value_heads_cannot_be_read(tmp_path):
    case = BY_NAME["llama-2-gqa"]
    full = whole_model(case)
    files = cut(case, full, 6)
    write_folder(tmp_path, case.params, files)
    with pytest.raises(CheckpointError, match=r"n_kv_heads = 4 cannot be divided by the 6 files"):
        open_meta(tmp_path)


def drop(name):
    return lambda files, params: [part.pop(name) for part in files]


def rename(old, new):
    return lambda files, params: [part.update({new: part.pop(old)}) for part in files]


def double(old, new):
    return lambda files, params: [part.update({new: part[old].clone()}) for part in files]


def shrink(name, rank, rows):
    return lambda files, params: files[rank].update({name: files[rank][name][:rows].clone()})


def say(**entries):
    return lambda files, params: params.update(entries)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "llama-2",
            drop("layers.1.attention.wo.weight"),
            ["consolidated.00.pth: layers.1.attention.wo.weight missing"],
        ),
        ("llama-2", drop("output.weight"), ["output.weight missing", "consolidated.00.pth"]),
        (
            "llama-2",
            lambda files, params: files[1].pop("layers.1.ffn_norm.weight"),
            ["consolidated.01.pth", "ffn_norm"],
        ),
        (
            "llama-2",
            rename("layers.1.attention.wo.weight", "layers.1.attention.wx.weight"),
            ["layers.1.attention.wx.weight"],
        ),
        (
            "llama-2",
            shrink("layers.1.attention.wq.weight", 0, 30),
            ["layers.1.attention.wq.weight", "30", "36"],
        ),
        ("llama-2", say(n_layers=5), ["n_layers = 5", "2 layers"]),
        ("llama-2", say(dim=70), ["dim = 70", "72", "norm.weight"]),
        ("llama-2", say(n_heads=6), ["rope.freqs", "n_heads = 6", "3 frequencies"]),
        ("llama-2", say(n_kv_heads=4), ["layers.0.attention.wk.weight", "72", "24"]),
        ("llama-2", say(vocab_size=100), ["vocab_size = 100", "132"]),
        ("llama-2", say(n_heads="12"), ["params.json", "n_heads = '12'"]),
        ("llama-2", say(n_heads=None), ["params.json", "n_heads is missing"]),
        ("llama-2", say(norm_eps=-1.0), ["norm_eps = -1.0"]),
        (
            "llama-2",
            say(quantization_args={"scheme": "int4_weight_int8_dynamic_activation"}),
            ["quantization_args"],
        ),
        (
            "llama-4",
            double("layers.1.feed_forward.norm.weight", "layers.1.ffn_norm.weight"),
            ["layers.1.feed_forward.norm.weight", "layers.1.ffn_norm.weight", "two names"],
        ),
        ("llama-4", drop("layers.1.feed_forward.experts.moe_w_swiglu_eD_F"), ["moe_w_swiglu_eD_F missing"]),
        ("llama-4", say(moe_args=None), ["router_DE", "moe_args"]),
        (
            "llama-4",
            say(moe_args={"num_experts": 4, "interleave_moe_layer_step": 2}),
            ["router_DE has 5", "num_experts = 4"],
        ),
        ("llama-4", say(moe_args={"num_experts": 5}), ["[1]", "[0, 1]"]),
        ("llama-4", say(vision_args=None), ["vision_embeddings", "vision_args"]),
        ("llama-4", say(n_kv_heads=2), ["layers.0.attention.wqkv.weight", "120", "96"]),
        (
            "llama-4",
            say(vision_args=VISION | {"image_size": {"height": 56, "width": 42}}),
            ["image_size", "square"],
        ),
        ("llama-4", say(vision_args=VISION | {"dim": 48}), ["positional_embedding_vlm|conv1", "96"]),
    ],
)
def test_what_contradicts_itself_is_named(name, change, words, tmp_path):
    case = BY_NAME[name]
    files, params = add_ballast(case, cut(case, whole_model(case), 2)), dict(case.params)
    change(files, params)
    write_folder(tmp_path, params, files)
    with pytest.raises(CheckpointError) as caught:
        open_meta(tmp_path)
    for word in words:
        assert re.search(word if "|" in word else re.escape(word), str(caught.value)), str(caught.value)


def test_a_lost_last_file_is_seen(tmp_path):
    for name in ("llama-1", "llama-3", "llama-4"):
        folder = tmp_path / name
        make_folder(folder, BY_NAME[name], 4)
        (folder / "consolidated.03.pth").unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            open_meta(folder)


def test_a_gap_between_the_files_is_named(tmp_path):
    make_folder(tmp_path, BY_NAME["llama-2-gqa"], 4)
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth missing"):
        open_meta(tmp_path)


def test_quantized_releases_are_refused_by_name(tmp_path):
    make_folder(tmp_path, BY_NAME["llama-4"])
    (tmp_path / "fp8_scales_0.pt").touch()
    with pytest.raises(CheckpointError, match=r"fp8_scales_0\.pt.*fp8"):
        open_meta(tmp_path)


def test_copies_that_differ_between_files_are_found_when_they_are_written(tmp_path):
    case = BY_NAME["llama-4"]
    files = cut(case, whole_model(case), 2)
    files[1]["norm.weight"] += 1
    write_folder(tmp_path / "meta", case.params, files)
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth: norm\.weight: differs"):
        convert(tmp_path / "meta", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_numbers_of_experts_and_tokens_may_be_left_to_the_tensors(tmp_path):
    case = BY_NAME["llama-4"]
    params = case.params | {"vocab_size": -1, "moe_args": {"interleave_moe_layer_step": 2, "num_experts": -1}}
    write_folder(tmp_path, params, cut(case, whole_model(case), 2))
    config = open_meta(tmp_path).config
    assert (config.text_config.num_local_experts, config.text_config.vocab_size) == (5, 2304)
    assert (config.boi_token_index, config.image_token_index) == (256 + 80, 256 + 92)


def test_which_llama_it_is_shows_in_the_context_length(tmp_path):
    lengths = {"llama-1": 2048, "llama-2": 4096, "llama-3": 131072, "llama-4": 262144}
    for name, length in lengths.items():
        make_folder(tmp_path / name, BY_NAME[name])
        assert open_checkpoint(tmp_path / name).config.get_text_config().max_position_embeddings == length
    make_folder(tmp_path / "Llama-4-Instruct" / "original", BY_NAME["llama-4"])
    text = open_meta(tmp_path / "Llama-4-Instruct" / "original").config.text_config
    assert text.max_position_embeddings == 10485760


@pytest.mark.parametrize(("name", "begin"), [("llama-3", 256), ("llama-4", 256)])
@pytest.mark.parametrize("place", [".", ".."])
def test_the_tokenizer_comes_along_from_the_folder_or_from_above_and_goes_back(name, begin, place, tmp_path):
    make_folder(tmp_path / "release" / "meta", BY_NAME[name], 2)
    (tmp_path / "release" / "meta" / place / "tokenizer.model").write_bytes(rank_table())
    convert(tmp_path / "release" / "meta", tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("az").input_ids == [begin, ord("a"), ord("z")]
    assert (
        tokenizer.bos_token_id == AutoConfig.from_pretrained(tmp_path / "hf").get_text_config().bos_token_id
    )
    assert (tmp_path / "hf" / "chat_template.jinja").is_file()
    assert (tmp_path / "hf" / "generation_config.json").is_file()
    assert (tmp_path / "hf" / "processor_config.json").is_file() == (name == "llama-4")
    report = convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=1)
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == rank_table()
    assert not report.notes


def test_a_tokenizer_decides_between_llama_2_and_3(tmp_path):
    case = BY_NAME["llama-2-gqa"]
    params = case.params | {"vocab_size": 512}
    full = whole_model(case) | {
        name: torch.ones(512, DIM) for name in ("tok_embeddings.weight", "output.weight")
    }
    write_folder(tmp_path, params, [full])
    assert open_meta(tmp_path).config.rope_parameters["rope_theta"] == 10000.0
    assert any("no tokenizer.model" in note for note in open_meta(tmp_path).notes)
    (tmp_path / "tokenizer.model").write_bytes(rank_table())
    config = open_meta(tmp_path).config
    assert (config.rope_parameters["rope_theta"], config.bos_token_id) == (500000.0, 256)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    make_folder(tmp_path, BY_NAME["llama-4"], 2)
    (tmp_path / "tokenizer.model").write_bytes(rank_table() + b"YWE= 256\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: .*257 \+ 2048.*2304"):
        open_meta(tmp_path)


def test_a_tokenizer_without_a_form_of_metas_is_noted_and_left_out(tmp_path):
    make_folder(tmp_path / "meta", BY_NAME["llama-4"], 2)
    checkpoint = open_meta(tmp_path / "meta")
    word_level = {"model": {"type": "WordLevel", "vocab": {"a": 0}}, "added_tokens": []}
    checkpoint.companions = {"tokenizer.json": json.dumps(word_level).encode()}
    report = save_meta(checkpoint, tmp_path / "to", shards=1)
    assert any(note.startswith("no tokenizer.model is written: tokenizer.json") for note in report.notes)
    assert not (tmp_path / "to" / "tokenizer.model").exists()


def test_a_sentencepiece_model_comes_along_to_a_llama_2_and_goes_back(tmp_path):
    spm = pytest.importorskip("sentencepiece", reason="SentencePiece models need the extra 'tokenizers'")
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([f"the {n} of a net on {n * 7}" for n in range(200)]),
        model_writer=written,
        vocab_size=312,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    case = BY_NAME["llama-2"]
    full = whole_model(case)
    full |= {name: full[name].repeat(3, 1)[:312] for name in ("tok_embeddings.weight", "output.weight")}
    write_folder(tmp_path / "7B", case.params | {"vocab_size": -1}, cut(case, full, 2))
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    convert(tmp_path / "7B", tmp_path / "hf")
    tokenizer, reference = AutoTokenizer.from_pretrained(tmp_path / "hf"), spm.SentencePieceProcessor()
    reference.LoadFromSerializedProto(written.getvalue())
    for text in ("the net", " of a net", "  12 é"):
        assert tokenizer(text).input_ids == [1, *reference.encode(text)]
    convert(tmp_path / "hf", tmp_path / "back", to="meta", shards=2)
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == written.getvalue()
    for given, wanted in zip(load_files(tmp_path / "back"), cut(case, full, 2), strict=True):
        assert_same(given, wanted)


def test_a_conversion_that_was_cut_short_goes_on(tmp_path):
    full = make_folder(tmp_path / "meta", BY_NAME["llama-4"], 2)

    class Stop:
        """Stands for a process that ends in the middle."""

        def start(self, total):
            self.total, self.done = total, 0

        def advance(self, nbytes, file):
            self.done += nbytes
            if self.done > self.total / 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_meta(open_meta(tmp_path / "meta"), tmp_path / "to", shards=4, progress=Stop())
    assert not (tmp_path / "to" / "params.json").exists()
    assert not list((tmp_path / "to").glob("*.pth"))
    with pytest.raises(ValueError, match="unfinished"):
        save_meta(open_meta(tmp_path / "meta"), tmp_path / "to", shards=4)
    save_meta(open_meta(tmp_path / "meta"), tmp_path / "to", shards=4, resume=True)
    for given, wanted in zip(load_files(tmp_path / "to"), cut(BY_NAME["llama-4"], full, 4), strict=True):
        assert_same(given, wanted)
