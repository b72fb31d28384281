"""The expert cache evicts the matrix that is used least often, and keeps what a forward pass and a layer need."""

import random

import pytest
from support.offload import simulate, simulate_lru

pytestmark = pytest.mark.slow


def test_frequent_experts_stay():
    """Each of twelve layers has eight experts; the k-th is requested with a frequency in proportion to k ** -1.2."""
    dice = random.Random(7)
    shares = [(rank + 1) ** -1.2 for rank in range(8)]
    passes = [
        [(layer, expert) for layer in range(12) for expert in sorted({*dice.choices(range(8), shares, k=2)})]
        for _ in range(300)
    ]
    hits = sum(hits for hits, _ in simulate(passes, 24))
    hits_of_lru, _ = simulate_lru((key for keys in passes for key in keys), 24)
    # Measured: hits are 0.53 of all requests, and 0.39 if the least recently used matrix is evicted.
    assert hits - hits_of_lru > 0.12 * sum(map(len, passes))


def test_a_prompt_does_not_evict_what_answers_use():
    answer = [[("a", 0), ("b", 3), ("c", 5), ("d", 2)]] * 9
    prompt = [[(layer, expert) for layer in "abcd" for expert in range(8)]]
    passes = [*answer, *prompt, *answer]
    # There are slots for half of the matrices of the prompt.
    assert simulate(passes, 16)[len(answer) + 1] == (4, 0)


@pytest.mark.parametrize("layers", [2, 3])
def test_matrices_that_a_layer_has_just_used_stay(layers):
    """Even if other layers have used theirs more often."""
    used = [[(layer, expert) for expert in range(5)] * 9 for layer in range(layers)]
    new = [(layers - 1, expert) for expert in range(5, 10)]
    again = simulate([*used, new, new[::-1]], 7)[-1]
    assert again == (5, 0)


def test_matrices_that_were_used_long_ago_are_evicted():
    often = [[("a", 0)]] * 20
    others = [[("a", 1), ("b", 1)], [("a", 2), ("b", 2)]] * 30
    counts = simulate([*often, *others, [("a", 0)]], 4)
    assert counts[-1] == (0, 1)
