"""Small mixtures saved in folders."""

from pathlib import Path

import pytest
import torch
from support.offload import mixtral, text_model


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    text_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixtral_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    mixtral().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of 23 tokens."""
    return torch.randint(3, 199, (2, 23), generator=torch.Generator().manual_seed(5))
