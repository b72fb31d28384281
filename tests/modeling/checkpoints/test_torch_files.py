"""Files of torch.save that are refused; `conversion/io/test_files.py` reads whole ones."""

import os
import zipfile

import pytest
import torch
from support.hostile_files import code
from support.spoilt_folders import refused


def rewrite(path, change):
    """Replace an archive by one with changed records, without compression, as torch writes it."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place(bytes(content))] ^= 1
    path.write_bytes(content)


def other(records, end, content):
    name = next(name for name in records if name.endswith(end))
    records[name] = content


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"no weights"),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "code": code,
    "no pickle": lambda path: rewrite(path, lambda r: [r.pop(n) for n in [*r] if n.endswith("data.pkl")]),
    "no storage": lambda path: rewrite(path, lambda r: [r.pop(n) for n in [*r] if n.endswith("/data/0")]),
    "another order": lambda path: rewrite(path, lambda r: other(r, "byteorder", b"big")),
    "a flipped name": lambda path: flip(path, lambda content: content.index(b"model.norm.weight") + 3),
    "a flipped offset": lambda path: flip(path, lambda content: content.rindex(b"PK\1\2") + 43),
    "before 1.6": lambda path: torch.save(torch.load(path), path, _use_new_zipfile_serialization=False),
    "a list": lambda path: torch.save([torch.ones(2)], path),
    "another key": lambda path: torch.save({"state_dict": torch.load(path)}, path),
    "conjugate": lambda path: torch.save({"x": torch.ones(3, dtype=torch.complex64).conj()}, path),
    "a program": lambda path: torch.jit.script(torch.nn.Linear(2, 3)).save(path),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_refused(damage, model_copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = model_copy("bin")
    DAMAGES[damage](path / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(path, "pytorch_model.bin: ")
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float8_e5m2], ids=str)
def test_dtype_that_no_weight_has(dtype, model_copy):
    """torch would copy integers into a model's weights without an error."""
    path, name = model_copy("bin"), "model.layers.1.mlp.up_proj.weight"
    weights = torch.load(path / "pytorch_model.bin")
    torch.save({**weights, name: (weights[name] * 50).to(dtype)}, path / "pytorch_model.bin")
    refused(path, f"{name} has dtype .*, where the model needs BF16, F16, F32, F64")
