"""Make files that no library would write: hostile pickles, broken safetensors and JSON."""

import json
import os
from pathlib import Path

import torch


class _MakesFolder:
    """An object whose pickle, when it is read without care, runs code that makes the folder `was-run`."""

    def __reduce__(self):
        return os.mkdir, ("was-run",)


def code(path: Path, name: str = "model.norm.weight") -> Path:
    """Write a file of torch.save with code in the place of a tensor; return its path."""
    torch.save({name: _MakesFolder()}, path)
    return path


def safetensors(header, data=b""):
    """Return the bytes of a safetensors file with a header, given as a dictionary or as raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(shape, begin, end, dtype="F32"):
    """Return a tensor's entry in a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# Texts of JSON files, and the pattern of the error that each must raise.
JSON = {
    "deep": ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "not a valid JSON file.*recursion"),
    "twice": ('{"model_type": "llamoe_dense", "a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs twice"),
    "nan": ('{"model_type": "llamoe_dense", "rms_norm_eps": NaN}', "NaN is not a number"),
    "digits": ('{"hidden_size": ' + "9" * 10_000 + "}", "not a valid JSON file"),
    "many": ('{"a": [' + "0," * 10**7 + "0]}", "bytes, but at most"),
    "utf16": ('{"a": 1}'.encode("utf-16"), "not a valid JSON file"),
    "list": ("[1]", "JSON object"),
}
