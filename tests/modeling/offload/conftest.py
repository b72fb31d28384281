"""Folders of small saved mixtures, and a check that no thread and no open file is left."""

import os
import threading
from pathlib import Path

import pytest
import torch
from support.offload import save_kind


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder for each kind of mixture in `support.offload.KINDS`; tests must not change it."""
    return Folders(tmp_path_factory)


class Folders:
    """Folders by kind, each saved when it is first used."""

    def __init__(self, factory):
        self._factory, self._paths = factory, {}

    def __getitem__(self, kind: str) -> Path:
        if kind not in self._paths:
            self._paths[kind] = self._factory.mktemp("folder")
            save_kind(kind, self._paths[kind], self._factory.mktemp("plain"))
        return self._paths[kind]


@pytest.fixture(scope="session")
def text_folder(folders) -> Path:
    return folders["text"]


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of 23 tokens."""
    return torch.randint(3, 199, (2, 23), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def nothing_left():
    """Check that the test leaves no thread of llamoe and no open safetensors file.

    The fixture is a function that returns those threads, and the paths of those files.
    """

    def now() -> tuple[set[threading.Thread], list[str]]:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        files = [os.readlink(link) for link in links if os.path.lexists(link)]
        threads = {thread for thread in threading.enumerate() if thread.name.startswith("llamoe")}
        return threads, sorted(file for file in files if file.endswith(".safetensors"))

    before = now()
    yield now
    assert now() == before


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield
