"""Fixtures: int4 and int8, the model families, and the quantized model of each family."""

import pytest
from support.few_bits import FAMILIES, WEIGHTS, packed


@pytest.fixture(params=WEIGHTS)
def weights(request):
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family, weights):
    return packed(family, weights)
