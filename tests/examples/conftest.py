"""Put the examples' folders on the path, as the scripts import each other by plain names."""

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
