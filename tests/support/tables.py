"""Tables of cases that are smaller than the product of what they vary."""

import itertools


def in_turn(*axes, times=1):
    """Every combination of all axes but the last, whose values come in turn, so that each meets every other value.

    Args:
        axes: values of each axis; of those before the last, the others together are no shorter than the last.
        times: with how many values of the last axis each combination comes.

    Returns:
        a list of tuples.
    """
    axes, last = [list(axis) for axis in axes[:-1]], list(axes[-1])
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        (*(axis[i] for axis, i in zip(axes, place, strict=True)), last[(sum(place) + more) % len(last)])
        for place in places
        for more in range(times)
    ]
