"""Dense LLaMA to a mixture: the same function for any router, experts that can be told apart, errors that say why."""

import json

import numpy as np
import pytest
import torch
from support.models import (
    draw,
    max_abs,
    mixtures,
    scaled_rope,
    stock_dense_config,
    stock_text_config,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Llama4ForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from llamoe import LlamoeForCausalLM, LlamoeTextConfig
from llamoe.conversion.convert import convert
from llamoe.conversion.derive.upcycle import Mixture, as_text_model, upcycle
from llamoe.conversion.io.lazy_tensor import LazyTensor, blocks
from llamoe.conversion.open import open_checkpoint

# Logits of deviation about 1. Rotated channels are summed in another order; everything else is equal bit by bit.
TOLERANCE = 1e-5


def save_dense(folder, dtype=torch.float32, **config):
    """A LLaMA that transformers wrote, and the model."""
    config = stock_dense_config(**config)
    model = draw(LlamaForCausalLM, config).to(dtype)
    if config.tie_word_embeddings:
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(config.hidden_size**-0.5)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder, size=90):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"word{index}": index for index in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return fast


def some_ids(config, rows=2, length=37):
    return torch.randint(3, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


def set_routers(model, scale):
    """Routers of that deviation; at 30 every score is close to 0 or 1."""
    with torch.no_grad():
        for block in mixtures(model).values():
            block.router.weight.normal_(0, scale)


@pytest.mark.parametrize(
    ("experts", "interleave", "top_k"), [(5, 1, 1), (5, 2, 2), (3, 1, 3), (1, 3, 1)], ids=str
)
def test_the_mixture_computes_the_dense_function_for_any_router(
    tmp_path, record_parity, experts, interleave, top_k
):
    dense = save_dense(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=experts, interleave=interleave, top_k=top_k)

    ids = some_ids(dense.config)
    expected = logits(dense, ids)
    for model_class in (LlamoeForCausalLM, Llama4ForCausalLM):  # the layout is stock's where it can be
        model, info = model_class.from_pretrained(
            tmp_path / "moe", dtype=torch.float32, output_loading_info=True
        )
        assert not any(info.values()), info
        assert list(mixtures(model)) == list(range(interleave - 1, 3, interleave))
        for scale in (None, 0.3, 30.0):
            if scale is not None:
                set_routers(model.eval(), scale)
            error = max_abs(logits(model, ids), expected)
            assert error < TOLERANCE
            record_parity(f"upcycled, {model_class.__name__}", "LlamaForCausalLM", "float32", error)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "proportional"])
def test_scaled_rotary_biases_activation_and_a_tied_head_survive(tmp_path, kind):
    fields = dict(attention_bias=True, hidden_act="gelu", tie_word_embeddings=True, **scaled_rope(kind))
    dense = save_dense(tmp_path / "dense", **fields)
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, interleave=2)

    ids = some_ids(dense.config, length=90)
    for model_class in (LlamoeForCausalLM, Llama4ForCausalLM):
        model = model_class.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert max_abs(logits(model, ids), logits(dense, ids)) < TOLERANCE


def test_feed_forward_biases_go_to_dense_layers_and_shared_experts(tmp_path):
    dense = save_dense(tmp_path / "dense", mlp_bias=True)
    with pytest.raises(ValueError, match="mlp_bias"):
        upcycle(tmp_path / "dense", tmp_path / "stock", experts=3, layout="stock")
    assert not (tmp_path / "stock").exists()

    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, interleave=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    assert type(model) is LlamoeForCausalLM and model.config.mlp_bias
    ids = some_ids(dense.config)
    assert max_abs(logits(model, ids), logits(dense, ids)) < TOLERANCE


def test_feed_forwards_are_equal_bit_by_bit(tmp_path):
    dense = save_dense(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, top_k=2)
    model = LlamoeForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    set_routers(model, 1.0)
    x = torch.randn(2, 19, dense.config.hidden_size)
    with torch.no_grad():
        for ours, theirs in zip(model.model.layers, dense.model.layers, strict=True):
            assert torch.equal(ours.feed_forward(x), theirs.mlp(x))


def test_a_dense_model_whose_weights_pair_neighbours_is_not_permuted(tmp_path):
    dense = save_dense(tmp_path / "dense")
    config = json.loads((tmp_path / "dense/config.json").read_text())
    config |= {"model_type": "llamoe_dense", "rope_interleave": True, "architectures": None}
    (tmp_path / "dense/config.json").write_text(json.dumps(config))
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3)
    tensors = open_checkpoint(tmp_path / "moe").tensors
    for name in ("q_proj", "k_proj"):
        key = f"model.layers.1.self_attn.{name}.weight"
        assert torch.equal(tensors[key].read(), dense.get_parameter(key))


def test_a_folder_of_metas_gives_the_same_mixture(tmp_path):
    pytest.importorskip("llamoe.conversion.meta.folder", reason="folders of Meta's are written by it")
    save_dense(tmp_path / "dense", head_dim=12)
    convert(tmp_path / "dense", tmp_path / "meta", to="meta")
    for source in ("dense", "meta"):
        upcycle(tmp_path / source, tmp_path / f"moe-{source}", experts=3, noise=0.1)
    expected, given = (open_checkpoint(tmp_path / f"moe-{source}").tensors for source in ("dense", "meta"))
    assert given.keys() == expected.keys()
    for key, tensor in given.items():
        assert torch.equal(tensor.read(), expected[key].read()), key


def test_the_first_step_reaches_the_down_projections_and_the_second_the_rest(tmp_path):
    dense = save_dense(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, top_k=2)
    model = LlamoeForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    ids = some_ids(dense.config, rows=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, largest = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        block = model.model.layers[1].feed_forward
        parts = (block.experts.down_proj, block.experts.gate_up_proj, block.router.weight)
        largest.append([part.grad.abs().amax().item() for part in parts])
        per_expert = block.experts.down_proj.grad.flatten(1)
        optimizer.step()
    assert largest[0][0] > 0 and largest[0][1:] == [0, 0]
    assert all(value > 0 for value in largest[1])
    assert all(not torch.equal(per_expert[0], other) for other in per_expert[1:])
    assert losses[2] < losses[1] < losses[0]


def test_noise_makes_experts_that_differ_and_can_be_made_again(tmp_path):
    dense = save_dense(tmp_path / "dense")
    runs = {
        "a": dict(experts=3, seed=7),
        "b": dict(experts=5, seed=7, interleave=3),
        "c": dict(experts=3, seed=8),
    }
    for name, options in runs.items():
        report = upcycle(tmp_path / "dense", tmp_path / name, noise=0.1, **options)
        assert any("noise of 0.1" in note for note in report.notes)
    tensors = {name: open_checkpoint(tmp_path / name).tensors for name in runs}
    layer = "model.layers.2"
    for part, sources in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        key = f"{layer}.feed_forward.experts.{part}"
        a, b, c = (tensors[name][key].read() for name in runs)
        # What an expert becomes does not depend on how many there are, or in which order files are written.
        assert torch.equal(a, b[:3])
        assert not torch.equal(a, c)
        state = dense.state_dict()
        weights = torch.cat([state[f"{layer}.mlp.{name}.weight"].T for name in sources], 1)
        noise = a - weights if part == "gate_up_proj" else a
        for index, source in enumerate(sources):
            std = state[f"{layer}.mlp.{source}.weight"].std(correction=0).item()
            mine = noise.chunk(len(sources), -1)[index]
            assert mine.std().item() == pytest.approx(0.1 * std, rel=0.03)  # 20,000 numbers: 0.5 %
            assert abs(mine.mean().item()) < 0.004 * std
        assert np.abs(np.corrcoef(noise.flatten(1).numpy()) - np.eye(3)).max() < 0.05
    routers = [tensors["a"][f"model.layers.{index}.feed_forward.router.weight"].read() for index in range(3)]
    assert not torch.equal(routers[0], routers[1])
    assert torch.cat(routers).std().item() == pytest.approx(0.02, rel=0.1)

    model = LlamoeForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    ids = some_ids(dense.config)
    assert 1e-3 < max_abs(logits(model, ids), logits(dense, ids)) < 1


def test_an_expert_is_made_of_its_dense_matrices_alone(tmp_path):
    save_dense(tmp_path / "dense")
    source = open_checkpoint(tmp_path / "dense")
    reads = []

    class Counted(LazyTensor):
        def __init__(self, key, tensor):
            super().__init__(tensor.shape, tensor.dtype, tensor.origin)
            self.key, self.tensor = key, tensor

        def _read(self, start, stop):
            reads.append(self.key)
            return self.tensor.read(start, stop)

    source.tensors = {key: Counted(key, tensor) for key, tensor in source.tensors.items()}
    result = as_text_model(source, Mixture(experts=6, interleave=2, top_k=1, noise=0.1, seed=0))
    stacked = {key: tensor for key, tensor in result.tensors.items() if tensor.ndim == 3}
    assert {tensor.shape for tensor in stacked.values()} == {(6, 72, 184), (6, 92, 72)}
    assert not reads
    for key, tensor in stacked.items():
        assert blocks(tensor) == [(row, row + 1) for row in range(6)]
        reads.clear()
        whole = tensor.read()
        assert len(reads) == 6 * (2 if "gate_up" in key else 1)
        reads.clear()
        assert torch.equal(tensor.read(4, 5)[0], whole[4])
        parts = ["gate_proj", "up_proj"] if "gate_up" in key else ["down_proj"]
        assert reads == [f"model.layers.1.mlp.{part}.weight" for part in parts]


def test_what_belongs_to_the_source_comes_along(tmp_path):
    save_dense(tmp_path / "dense", dtype=torch.bfloat16, max_position_embeddings=300, eos_token_id=[2, 50])
    tokenizer = save_tokenizer(tmp_path / "dense")
    report = upcycle(tmp_path / "dense", tmp_path / "moe", experts=3)
    model = LlamoeForCausalLM.from_pretrained(tmp_path / "moe", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert report.bytes == sum(2 * parameter.numel() for parameter in model.parameters())
    config = model.config
    assert isinstance(config, LlamoeTextConfig)
    assert (config.max_position_embeddings, config.eos_token_id) == (300, [2, 50])
    assert not (config.use_qk_norm or config.attn_temperature_tuning) and all(config.no_rope_layers)
    ours = AutoTokenizer.from_pretrained(tmp_path / "moe")
    text = "word7 word80 nothing word12"
    inputs = ours(text, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [tokenizer(text)["input_ids"]]
    generated = model.generate(inputs["input_ids"], do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert generated.shape[1] == inputs["input_ids"].shape[1] + 7  # as the generation configuration says


def test_a_dry_run_writes_nothing_and_experts_are_cast(tmp_path):
    dense = save_dense(tmp_path / "dense")
    report = upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, dry_run=True)
    assert report.dry_run and not (tmp_path / "moe").exists()
    assert any("3 experts, 1 a token, in 3 of 3 layers" in note for note in report.notes)
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, dtype="bfloat16")
    tensors = open_checkpoint(tmp_path / "moe").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    up = dense.model.layers[0].mlp.up_proj.weight.bfloat16().T
    stacked = tensors["model.layers.0.feed_forward.experts.gate_up_proj"].read()
    assert all(torch.equal(expert[:, 92:], up) for expert in stacked)


class Killed(Exception):
    pass


class KillsLater:
    """Progress that ends the run after so many blocks."""

    def __init__(self, blocks):
        self.left = blocks

    def start(self, total):
        pass

    def advance(self, nbytes, file):
        self.left -= 1
        if not self.left:
            raise Killed


def test_an_interrupted_run_goes_on_with_the_same_noise_only(tmp_path):
    save_dense(tmp_path / "dense")
    options = dict(experts=3, noise=0.1, shard_size="100KB")
    upcycle(tmp_path / "dense", tmp_path / "whole", **options)
    with pytest.raises(Killed):
        upcycle(tmp_path / "dense", tmp_path / "moe", progress=KillsLater(25), **options)
    assert not (tmp_path / "moe/model.safetensors.index.json").exists()
    for other in (dict(seed=1), dict(noise=0.2), dict(top_k=2)):
        with pytest.raises(ValueError, match="with other options"):
            upcycle(tmp_path / "dense", tmp_path / "moe", resume=True, **{**options, **other})
    upcycle(tmp_path / "dense", tmp_path / "moe", resume=True, **options)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "moe").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "moe" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(experts=0), "experts = 0; give an integer of at least 1"),
        (dict(experts=2.0), "experts = 2.0"),
        (dict(experts=4, top_k=5), "top_k = 5 is more than experts = 4"),
        (dict(experts=4, top_k=0), "top_k = 0"),
        (dict(experts=4, interleave=0), "interleave = 0"),
        (dict(experts=4, interleave=4), "interleave = 4, but .* has 3 layers"),
        (dict(experts=4, noise=-0.1), "noise = -0.1"),
        (dict(experts=4, noise=float("nan")), "noise = nan"),
        (dict(experts=4, seed=-1), "seed = -1"),
    ],
    ids=str,
)
def test_numbers_that_make_no_mixture_are_refused(tmp_path, options, message):
    save_dense(tmp_path / "dense")
    with pytest.raises(ValueError, match=message):
        upcycle(tmp_path / "dense", tmp_path / "moe", **options)
    assert not (tmp_path / "moe").exists()


def test_a_mixture_is_not_upcycled_again(tmp_path):
    model: nn.Module = Llama4ForCausalLM(stock_text_config())
    model.save_pretrained(tmp_path / "mixture")
    with pytest.raises(ValueError, match=r"2 of 5 layers are mixtures of 5 experts.*give a dense LLaMA"):
        upcycle(tmp_path / "mixture", tmp_path / "moe", experts=2)
    assert not (tmp_path / "moe").exists()


def test_noise_on_weights_that_are_no_numbers_is_refused(tmp_path):
    model = save_dense(tmp_path / "dense")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        upcycle(tmp_path / "dense", tmp_path / "moe", experts=2, noise=0.1)
    assert not (tmp_path / "moe/config.json").exists()
