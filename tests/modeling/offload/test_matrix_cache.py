"""Which matrix makes room: what is used least often, and what a pass and a layer need stays."""

import random

import pytest
from support.offload import simulate, simulate_lru

pytestmark = pytest.mark.slow


def test_frequent_experts_stay():
    """Of eight experts in each of twelve layers the k-th is asked for in proportion to k ** -1.2."""
    dice = random.Random(7)
    shares = [(rank + 1) ** -1.2 for rank in range(8)]
    passes = [
        [(layer, expert) for layer in range(12) for expert in sorted({*dice.choices(range(8), shares, k=2)})]
        for _ in range(300)
    ]
    often = sum(hits for hits, _ in simulate(passes, 24))
    recent, _ = simulate_lru((key for asked in passes for key in asked), 24)
    # Measured: 0.53 of all by frequency, 0.39 by recency.
    assert often - recent > 0.12 * sum(map(len, passes))


def test_a_prompt_does_not_push_out_what_answers_use():
    answer = [[("a", 0), ("b", 3), ("c", 5), ("d", 2)]] * 9
    prompt = [[(layer, expert) for layer in "abcd" for expert in range(8)]]
    passes = [*answer, *prompt, *answer]
    # Half of what the prompt asks for has room.
    assert simulate(passes, 16)[len(answer) + 1] == (4, 0)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_layer_finds_all_that_it_has_just_used(layers):
    """Whatever other layers have used more often."""
    used = [[(layer, expert) for expert in range(5)] * 9 for layer in range(layers)]
    new = [(layers - 1, expert) for expert in range(5, 10)]
    again = simulate([*used, new, new[::-1]], 7)[-1]
    assert again == (5, 0)


def test_what_was_used_long_ago_goes():
    often = [[("a", 0)]] * 20
    others = [[("a", 1), ("b", 1)], [("a", 2), ("b", 2)]] * 30
    counts = simulate([*often, *others, [("a", 0)]], 4)
    assert counts[-1] == (0, 1)
