"""Choose test cases from a product of axes, without taking every combination."""

import itertools


def in_turn(*axes, times=1):
    """Return every combination of the first axes, each with only `times` values of the last axis, taken in turn.

    Every value of one axis still occurs with every value of the last axis, if there are enough combinations of the
    other axes.

    Returns:
        a list of tuples, one value of each axis.
    """
    axes, last = [list(axis) for axis in axes[:-1]], list(axes[-1])
    combinations = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        (*(axis[i] for axis, i in zip(axes, indices, strict=True)), last[(sum(indices) + more) % len(last)])
        for indices in combinations
        for more in range(times)
    ]
