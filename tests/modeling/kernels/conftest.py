"""What tests of single tokens share."""

import pytest

from llamoe.modeling.kernels import FewRows


@pytest.fixture
def taken(monkeypatch):
    """How many layers had their attention in one go, and how many called the modules."""
    counts = {True: 0, False: 0}

    def count(*args, original=FewRows._attend_one_token):
        found = original(*args)
        counts[found is not None] += 1
        return found

    def count_all(self, layers, *args, original=FewRows.token):
        found = original(self, layers, *args)
        counts[True] += len(layers) if found is not None else 0
        return found

    monkeypatch.setattr(FewRows, "_attend_one_token", count)
    monkeypatch.setattr(FewRows, "token", count_all)
    return counts
