"""Damaged files give an error that names them or no difference at all; nothing half-made, the source untouched.

Damage that no reader can see is left out: another finite number in the data, two equal tensors exchanged.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conversion_support import META_LLAMA_2, META_MAVERICK, looks_finished, sums
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import make_asymmetric, stock_dense_config
from transformers import LlamaForCausalLM

from llamoe.conversion import convert


def few(examples: int):
    """The same examples every time, no clock, and nothing remembered on the disk."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Original:
    """A whole source folder, as bytes, and the tensors that its conversion gives."""

    files: dict[str, bytes]
    tensors: dict[str, torch.Tensor]

    def weight_files(self) -> list[str]:
        return [name for name in self.files if name.endswith((".safetensors", ".pth", ".bin"))]


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def converted(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A sharded folder of safetensors, one of pickles in both of torch's formats, and two of Meta's."""
    place = tmp_path_factory.mktemp("originals")
    config = stock_dense_config(hidden_size=24, intermediate_size=20, head_dim=6, num_hidden_layers=2, vocab_size=31)
    model = make_asymmetric(LlamaForCausalLM(config))
    model.save_pretrained(place / "hf", max_shard_size="12KB")
    shutil.copytree(place / "hf", place / "bin", ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(model.state_dict(), place / "bin" / "pytorch_model.bin")
    shutil.copytree(place / "bin", place / "legacy")
    torch.save(
        model.state_dict(), place / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    small = {"dim": 24, "n_layers": 2, "multiple_of": 4}
    meta = replace(META_LLAMA_2, params=META_LLAMA_2.params | small)
    meta.write(place / "meta", meta.weights(), 2)
    mixture = {"num_experts": 3, "top_k": 1, "interleave_moe_layer_step": 2}
    params = META_MAVERICK.params | {**small, "n_kv_heads": 2, "moe_args": mixture}
    meta4 = replace(META_MAVERICK, params=params, vocabulary=2304 + 1)
    meta4.write(place / "meta4", meta4.weights(), 1)
    result = {}
    for folder in list(place.iterdir()):
        convert(folder, place / "converted" / folder.name)
        result[folder.name] = Original(read_folder(folder), converted(place / "converted" / folder.name))
        assert result[folder.name].tensors
    return result


def check(original: Original, changes: dict[str, bytes | None], may_pass: bool = True, says=(), **options):
    """Convert with some files changed (None: missing): whether that passed, after all the promises are checked.

    Args:
        may_pass: whether the damage may go unseen, which is fine if the tensors are the same.
        says: words that an error must hold, besides the name of a file or the source's folder.
    """
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place) / "source", Path(place) / "target"
        source.mkdir()
        for name, content in (original.files | changes).items():
            if content is not None:
                (source / name).write_bytes(content)
        before = sums(source)
        try:
            convert(source, target, **options)
        except (ValueError, OSError) as error:
            message = str(error)
            assert str(source) in message, message
            assert all(word in message for word in says), message
            assert not looks_finished(target), message
            assert not target.exists(), (message, list(target.iterdir()))
            passed = False
        else:
            assert may_pass, "the damage went unseen"
            tensors = converted(target)
            assert tensors.keys() == original.tensors.keys()
            assert [name for name in tensors if not torch.equal(tensors[name], original.tensors[name])] == []
            passed = True
        assert sums(source) == before
        return passed


def structure(name: str, content: bytes) -> list[tuple[int, int]]:
    """The parts of a file that are no numbers of tensors, as ranges of bytes."""
    if name.endswith(".safetensors"):
        return [(0, 8 + int.from_bytes(content[:8], "little"))]
    if not content.startswith(b"PK"):
        return [(0, len(content))]
    ranges, position = [], 0
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            lengths = content[info.header_offset + 26 : info.header_offset + 30]
            begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little")
            begin += int.from_bytes(lengths[2:], "little")
            if "/data/" in info.filename:
                ranges.append((position, begin))
                position = begin + info.file_size
    return [*ranges, (position, len(content))]


def pick(data, ranges: list[tuple[int, int]]) -> int:
    """A byte of some ranges, each range as likely as another one."""
    begin, end = data.draw(st.sampled_from([span for span in ranges if span[0] < span[1]]))
    return data.draw(st.integers(begin, end - 1))


def altered(data, content: bytes, ranges: list[tuple[int, int]]) -> bytes:
    """Some bytes exchanged, put in or taken away."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        position = pick(data, ranges)
        match data.draw(st.sampled_from(["flip", "flip", "set", "insert", "remove", "zeros"])):
            case "flip":
                changed[position] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                changed[position] = data.draw(st.integers(0, 255))
            case "insert":
                changed[position:position] = data.draw(st.binary(min_size=1, max_size=9))
            case "remove":
                del changed[position : position + data.draw(st.integers(1, 9))]
            case "zeros":
                changed[position : position + 4] = bytes(len(changed[position : position + 4]))
        ranges = [(begin, min(end, len(changed))) for begin, end in ranges]
    return bytes(changed)


@given(data=st.data())
@few(60)
@pytest.mark.parametrize("kind", ["hf", "bin", "meta", "meta4"])
def test_altered_bytes_of_headers_directories_and_pickles(originals, kind, data):
    original = originals[kind]
    name = data.draw(st.sampled_from(original.weight_files()))
    content = original.files[name]
    check(original, {name: altered(data, content, structure(name, content))})


@given(data=st.data())
@few(30)
@pytest.mark.parametrize("kind", ["hf", "meta"])
def test_altered_bytes_of_json_files(originals, kind, data):
    original = originals[kind]
    name = data.draw(st.sampled_from([name for name in original.files if name.endswith(".json")]))
    content = original.files[name]
    check(original, {name: altered(data, content, [(0, len(content))])})
