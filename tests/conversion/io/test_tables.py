"""Names that a name table lacks, and names of the table that the files lack, are named by errors."""

import pytest
import torch
from support.lazy_tensors import InMemory

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.io.name_table import Drop, Row, read_through, write_through

TABLE = [
    Row("embed", "model.embed", axis=1),
    Row("layers.{i}.w", "model.{i}.weight", axis=0),
    Row("layers.0.norm", "model.0.norm"),
    Row("layers.{i}.other_norm", "model.{i}.norm"),
    Drop("layers.{i}.rope", "computed"),
    Drop("*._extra", "of no use"),
]
WHOLE = {
    "model.embed": torch.arange(30.0).reshape(5, 6),
    "model.0.weight": torch.arange(24.0).reshape(6, 4),
    "model.0.norm": torch.arange(4.0),
    "model.11.weight": -torch.arange(24.0).reshape(6, 4),
    "model.11.norm": -torch.arange(4.0),
}


def lazy(tensors, file="f"):
    return {name: InMemory(tensor, f"{file}: {name}") for name, tensor in tensors.items()}


def split(files):
    return write_through(TABLE, lazy(WHOLE), files, None)


# A change of the two files, and words of the error.
WRONG = [
    (lambda a, b: [file.update(lazy({"layers.1.q": torch.ones(1)})) for file in (a, b)], r"layers\.1\.q"),
    (lambda a, b: b.pop("embed"), "embed missing"),
    (lambda a, b: b.update(lazy({"extra": torch.ones(2)}, "second")), "unknown tensor extra"),
    (lambda a, b: b.update(lazy({"embed": torch.ones(4, 3)}, "second")), r"second: embed is float32 \[4, 3\]"),
    (lambda a, b: b.update(lazy({"embed": torch.ones(5, 3).half()}, "second")), "second: embed is float16"),
    (lambda a, b: [file.update({"layers.01.w": file["layers.0.w"]}) for file in (a, b)], r"layers\.01\.w"),
    (lambda a, b: [file.update({"layers.1.norm": file["layers.0.norm"]}) for file in (a, b)], r"layers\.1\.norm"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_names_and_shapes_are_named(change, message):
    files = split(2)
    change(*files)
    with pytest.raises(CheckpointError, match=message):
        read_through(TABLE, files, None)


def test_what_is_dropped_need_not_be_in_every_file():
    files = split(2)
    files[0] |= lazy({"layers.0.rope": torch.ones(1)})
    files[1] |= lazy({"b._extra": torch.ones(1)})
    tensors, dropped = read_through(TABLE, files, None)
    assert tensors.keys() == WHOLE.keys()
    assert dropped.keys() == {"layers.0.rope", "b._extra"}


def test_tensors_that_are_there_twice_or_in_part_or_do_not_divide_are_named():
    one = torch.ones(1)
    with pytest.raises(CheckpointError, match="x is stored under two names, one of them b"):
        read_through([Row("a", "x"), Row("b", "x")], [lazy({"a": one, "b": one})], None)
    pairs = [Row(("{i}.a", "{i}.b"), ("x.{i}", "y.{i}"))]
    with pytest.raises(CheckpointError, match=r"1\.b missing, beside 1\.a"):
        read_through(pairs, [lazy({"0.a": one, "0.b": one, "1.a": one})], None)
    with pytest.raises(CheckpointError, match="6 is not a multiple of 4"):
        split(4)
