"""The example scripts as modules: they import their neighbours by plain names, as they do when they are run."""

import sys

import pytest
from support.paths import EXAMPLES


@pytest.fixture(scope="session", autouse=True)
def _scripts_can_be_imported():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))
