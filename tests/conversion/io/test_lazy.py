"""Every view reads what torch gives for the whole tensor, for any range of rows."""

import pytest
import torch
from support.lazy_tensors import InMemory

from llamoe.conversion.io.lazy_tensor import Computed, blocks, join, stack

CUBE = torch.arange(5 * 6 * 8.0).reshape(5, 6, 8)
MATRIX = torch.arange(6 * 10.0).reshape(6, 10)
# Small, since the flat view reads every range of its elements.
SMALL = torch.arange(2 * 3 * 5.0).reshape(2, 3, 5)
cube, matrix = InMemory(CUBE, "f: cube"), InMemory(MATRIX, "f: matrix")
parts = [InMemory(part) for part in CUBE.split([2, 1, 2])]

VIEWS = {
    "cast": (cube.cast(torch.bfloat16), CUBE.bfloat16()),
    "cut of the first axis": (cube.cut(0, 1, 4), CUBE[1:4]),
    "cut of the last axis": (cube.cut(-1, 3, 8), CUBE[..., 3:8]),
    "rows merged": (cube.view(30, 8), CUBE.view(30, 8)),
    "rows split": (matrix.view(2, 3, 10), MATRIX.view(2, 3, 10)),
    "view across rows": (cube.view(12, 20), CUBE.view(12, 20)),
    "flat": (InMemory(SMALL).view(30), SMALL.view(30)),
    "transposed": (cube.transpose(), CUBE.transpose(1, 2)),
    "transposed matrix": (matrix.transpose(), MATRIX.t()),
    "joined rows": (join(parts, 0), CUBE),
    "joined columns": (join([cube, cube.cut(2, 0, 3)], 2), torch.cat([CUBE, CUBE[..., :3]], 2)),
    "stacked": (stack([matrix, matrix.map(torch.neg)]), torch.stack([MATRIX, -MATRIX])),
    "a row": (cube.row(3), CUBE[3]),
    "mapped": (matrix.map(lambda x: x[:, :1] * 2, (6, 1)), MATRIX[:, :1] * 2),
    "computed": (
        Computed(torch.matmul, [matrix, matrix.transpose()], (6, 6), torch.float32, "product"),
        MATRIX @ MATRIX.t(),
    ),
    "cut of a cast": (cube.cast(torch.bfloat16).cut(2, 2, 5), CUBE[..., 2:5].bfloat16()),
    "cut of a cut": (cube.cut(2, 2, 7).cut(2, 1, 4), CUBE[..., 3:6]),
    "cut of a cut of rows": (cube.cut(0, 1, 5).cut(0, 1, 3).cut(1, 2, 4), CUBE[2:4, 2:4]),
    "cut of one part of a join": (join(parts, 0).cut(0, 2, 3), CUBE[2:3]),
    "cut across parts of a join": (join(parts, 0).cut(0, 1, 4), CUBE[1:4]),
    "cut of another axis of a join": (join(parts, 0).cut(1, 2, 5), CUBE[:, 2:5]),
    "cut of joined columns": (join([cube, cube], -1).cut(-1, 10, 13), CUBE[..., 2:5]),
    "row of a stack": (stack([matrix, matrix.map(torch.neg)]).row(1), -MATRIX),
    "cut of a view of a join": (join(parts, 0).view(30, 8).cut(0, 7, 23), CUBE.view(30, 8)[7:23]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_gives_what_torch_gives(name):
    view, expected = VIEWS[name]
    assert view.shape == tuple(expected.shape)
    assert view.dtype == expected.dtype
    assert torch.equal(view.read(), expected)
    rows = expected.shape[0]
    for start in range(rows):
        for stop in range(start, rows + 1):
            assert torch.equal(view.read(start, stop), expected[start:stop])
    assert torch.equal(torch.cat([view.read(*span) for span in blocks(view)]), expected)


def test_a_part_of_a_join_is_the_tensor_itself():
    assert join([matrix, matrix.transpose().transpose()], 0).cut(0, 0, 6) is matrix


def test_tensor_without_axes_is_one_block():
    scalar = InMemory(torch.tensor(3.0))
    assert blocks(scalar) == [(0, 1)]
    assert scalar.read().item() == 3


def test_empty_tensor_has_no_block():
    assert blocks(InMemory(torch.empty(0, 4))) == []


def test_stacks_are_read_by_row_and_matrices_whole():
    """A stack that is viewed as a matrix keeps blocks of one expert."""
    assert blocks(cube) == [(i, i + 1) for i in range(5)]
    assert blocks(matrix) == [(0, 6)]
    assert blocks(cube.view(30, 8)) == [(i, i + 6) for i in range(0, 30, 6)]
    assert blocks(cube.cut(2, 0, 4).view(30, 4)) == [(i, i + 6) for i in range(0, 30, 6)]
    assert blocks(cube.row(2)) == [(0, 6)]


def test_integers_are_not_cast():
    steps = InMemory(torch.arange(4))
    assert steps.cast(torch.float16) is steps
