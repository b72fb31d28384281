"""The example scripts as modules: they import their neighbours by plain names, as they do when they are run."""

import sys

import pytest
from support.paths import EXAMPLES


@pytest.fixture(scope="session", autouse=True)
def _scripts_can_be_imported():
    folders = [str(EXAMPLES), str(EXAMPLES / "tiny")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)
