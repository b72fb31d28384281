"""Makes files that no library would write, of torch.save, safetensors and JSON."""

import json
import os
from pathlib import Path

import torch


class _Runs:
    """An object whose pickle makes a folder when it is read."""

    def __reduce__(self):
        return os.mkdir, ("was-run",)


def code(path: Path, name: str = "model.norm.weight") -> Path:
    """Write a file of torch.save that wants to run code in the place of a tensor."""
    torch.save({name: _Runs()}, path)
    return path


def safetensors(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def deep(depth=200_000):
    return '{"a": ' + "[" * depth + "]" * depth + "}"


JSON = {
    "deep": (deep(), "not a valid JSON file.*recursion"),
    "twice": ('{"model_type": "llamoe_dense", "a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs twice"),
    "nan": ('{"model_type": "llamoe_dense", "rms_norm_eps": NaN}', "NaN is not a number"),
    "digits": ('{"hidden_size": ' + "9" * 10_000 + "}", "not a valid JSON file"),
    "many": ('{"a": [' + "0," * 10**7 + "0]}", "bytes, where at most"),
    "utf16": ('{"a": 1}'.encode("utf-16"), "not a valid JSON file"),
    "list": ("[1]", "JSON object"),
}
