"""Quantized models with odd rows, tensors at odd addresses, without compiled kernels, and in other programs."""

import os

import pytest
import torch
from support import programs
from support.few_bits import CLOSE, WEIGHTS, distance, logits, packed, save, token_ids
from transformers import AutoModelForCausalLM

from llamoe.modeling.formats import Int4, Int8
from llamoe.modeling.kernels import cpp_kernels, float32_blocks
from llamoe.modeling.moe import multiply_one

# Inputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 9)])
def test_rows(weights, dtype, shape):
    """Rows of each float dtype and of any number, also none; rows of another size are refused."""
    layer = packed("dense", weights).model.layers[0].mlp.down_proj
    x = torch.randn(*shape, 320).to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype and y.shape == (*shape, 128)
    expected = x.float() @ layer.dequantized_weight("weight", torch.float32).T
    assert x.numel() == 0 or distance(y, expected) < 0.01  # one product in bfloat16
    y.sum().backward()
    assert x.grad.shape == x.shape and x.grad.dtype == dtype
    if x.numel():
        with pytest.raises(RuntimeError, match="shape"):
            layer(x[..., :64])


def shifted(tensor, offset):
    """Copy a tensor to an address that is `offset` bytes behind a multiple of 64."""
    room = torch.zeros(tensor.nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + offset
    found = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    found.copy_(tensor)
    assert found.data_ptr() % 64 == offset
    return found


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
@pytest.mark.parametrize("form", [Int4(32), Int8()], ids=lambda form: form.key)
@pytest.mark.parametrize("sizes", [(128, 128), (80, 243), (16, 32)])
def test_addresses_that_kernels_do_not_expect(form, sizes, kernels, monkeypatch):
    """243 inputs are no whole groups of int4, and no whole vectors of int8."""
    if kernels == "torch's":
        monkeypatch.setattr(cpp_kernels, "_library", None)
    codes, scales = form.quantize(torch.randn(sizes))
    expected = form.matrix((codes, scales), sizes, torch.float32).T
    for num_rows in (1, 2, 5, 23, 90):
        x = torch.randn(num_rows, sizes[1]).bfloat16()
        for at_codes, at_scales, at_rows in ((0, 0, 0), (1, 0, 0), (16, 2, 0), (33, 6, 10), (0, 2, 2)):
            parts = shifted(codes, at_codes), shifted(scales, at_scales)
            y = multiply_one(form, shifted(x, at_rows), parts, sizes)
            assert distance(y, x.float() @ expected) < 0.01  # one product in bfloat16
        for strided in (x.T.contiguous().T, x.repeat_interleave(2, 1)[:, ::2]):
            assert distance(multiply_one(form, strided, (codes, scales), sizes), x.float() @ expected) < 0.01


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
def test_codes_of_a_mapped_file_at_odd_addresses(weights, kernels, monkeypatch):
    """safetensors aligns the first tensor of a file; other programs' files may begin tensors at any byte."""
    path = save(packed("mixtral", weights))
    content = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    # Headers may end with spaces.
    header = content[8 : 8 + size] + b" "
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    model = AutoModelForCausalLM.from_pretrained(path)
    if kernels == "torch's":
        monkeypatch.setattr(cpp_kernels, "_library", None)
    for ids in (token_ids(), token_ids(1, 5)):
        assert torch.equal(logits(model, ids), logits(packed("mixtral", weights), ids))


# Other machines and processes


def test_a_processor_without_the_kernels(monkeypatch):
    paths = {weights: save(packed("text", weights)) for weights in WEIGHTS}
    asked = token_ids(), token_ids()[:1, :1]
    expected = {weights: [logits(packed("text", weights), ids) for ids in asked] for weights in WEIGHTS}
    monkeypatch.setattr(cpp_kernels, "_library", None)
    monkeypatch.setattr(float32_blocks, "rows_of_torch", lambda dtype: 3)
    for weights in WEIGHTS:
        model = AutoModelForCausalLM.from_pretrained(paths[weights])
        for ids, wanted in zip(asked, expected[weights], strict=True):
            error = (logits(model, ids) - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)
            # Rounding sends a few tokens to another expert, so judge by the median.
            assert error.median() < CLOSE
        assert model.train()(asked[0], labels=asked[0]).loss.isfinite()


NEVER_IMPORTED = """
import sys, torch
from transformers import AutoModelForCausalLM

assert "llamoe" not in sys.modules
path = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
with torch.no_grad():
    torch.save(model(torch.load(f"{path}/ids.pt")).logits, f"{path}/found.pt")
"""


@pytest.mark.slow
def test_programs_that_never_imported_llamoe(tmp_path):
    model = packed("mixtral", "int4")
    model.save_pretrained(tmp_path / "model")
    torch.save(token_ids(), tmp_path / "model/ids.pt")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = programs.run(["-c", NEVER_IMPORTED, tmp_path / "model"], env=environment)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "model/found.pt"), logits(model))
