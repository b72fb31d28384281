"""Weight files are opened without reading weights, and give the tensors that were saved."""

import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.io.read_files import (
    FileTensor,
    open_weights,
)

BASE = torch.randn(5, 7, 9)
TENSORS = {
    "cube": BASE.bfloat16(),
    "turned": BASE.transpose(0, 2),
    "part": BASE[1:4, 2],
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "steps": torch.arange(11),
    "half": BASE[0].half(),
    "byte": torch.tensor([True, False]),
    "expanded": torch.ones(1).expand(2, 3),
    "unsigned": torch.arange(3).to(torch.uint16),
    "float8": torch.arange(3.0).to(torch.float8_e4m3fn),
}


def same(first, second):
    """Compare the bytes of two tensors, since torch cannot compare float8."""
    bytes_of_both = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (first, second)]
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(*bytes_of_both)


def test_torch_file_gives_every_tensor(tmp_path):
    """Tensors with strides and slices of a shared storage are among them, as in old files of Meta."""
    torch.save(TENSORS, tmp_path / "x.pth")
    opened, others = open_weights(tmp_path / "x.pth")
    assert others == {}
    assert opened.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert same(opened[name].read(), expected), name
        if expected.ndim:
            assert same(opened[name].read(0, 0), expected[0:0])
        if expected.numel():
            assert isinstance(opened[name], FileTensor), "its numbers stay in the file"


def test_safetensors_file_gives_every_tensor_and_is_recognised_by_its_content(tmp_path):
    plain = {name: tensor.contiguous().clone() for name, tensor in TENSORS.items()}
    save_file(plain, tmp_path / "x.safetensors")
    save_file(plain, tmp_path / "x.bin")
    for path in (tmp_path / "x.safetensors", tmp_path / "x.bin"):
        opened = open_weights(path)[0]
        assert opened.keys() == TENSORS.keys()
        for name, expected in TENSORS.items():
            assert same(opened[name].read(), expected), name
            assert opened[name].origin == f"{path}: {name}"


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"state_dict": x, "epoch": 3}, lambda x: {"model": {"state_dict": x}}]
)
def test_tensors_are_unwrapped(tmp_path, wrap):
    torch.save(
        wrap({"x": torch.nn.Parameter(BASE), "note": "text", "state": io.BytesIO(b"")}), tmp_path / "x.pt"
    )
    tensors, others = open_weights(tmp_path / "x.pt")
    assert torch.equal(tensors["x"].read(), BASE)
    assert others.items() >= {"note": "str", "state": "BytesIO"}.items()
    assert ("epoch" in others) == ("epoch" in wrap({}))


def test_rows_of_a_transposed_stack_are_read_alone(tmp_path, monkeypatch):
    """Otherwise a stack of experts that was saved as a view would be read whole for every expert."""
    stack = torch.randn(6, 5, 8).transpose(1, 2)
    torch.save({"x": stack}, tmp_path / "x.pth")
    tensor = open_weights(tmp_path / "x.pth")[0]["x"]
    read, plain = [], FileTensor._bytes
    monkeypatch.setattr(
        FileTensor, "_bytes", lambda self, first, count: read.append(count) or plain(self, first, count)
    )
    for row in range(6):
        assert torch.equal(tensor.read(row, row + 1), stack[row : row + 1])
    assert sum(read) == stack.numel()


def test_file_that_shrinks_while_it_is_read_names_the_tensor(tmp_path):
    save_file({"x": BASE}, tmp_path / "x.safetensors")
    tensor = open_weights(tmp_path / "x.safetensors")[0]["x"]
    os.truncate(tmp_path / "x.safetensors", 300)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: x: cannot be read"):
        tensor.read()


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="reads the size of memory from /proc/meminfo")
def test_file_larger_than_memory_opens(tmp_path):
    """The file is a hole of twice the machine's memory, since a stack of experts can be that large."""
    memory = 1024 * int(re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[1])
    rows = 2 * memory // 2**20
    path = tmp_path / "x.safetensors"
    header = {"x": {"dtype": "U8", "shape": [rows, 2**20], "data_offsets": [0, rows * 2**20]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + rows * 2**20)
    assert not open_weights(path)[0]["x"].read(rows - 1, rows).any()
