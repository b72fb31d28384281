"""An adapter's folder is written whole, or stays as it was."""

import resource
from contextlib import contextmanager

import peft
import pytest
import torch
from support.offload import mixtral, text_model

import llamoe

pytestmark = pytest.mark.slow


@contextmanager
def full_disk(most: int = 3_000):
    """The system refuses larger files, as safetensors and Python then tell."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def adapted(model, **options):
    torch.manual_seed(2)
    return peft.get_peft_model(model, llamoe.lora_config(model, r=3, **options))


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", [text_model, mixtral])
def test_a_full_disk_leaves_no_half_of_an_adapter(make, tmp_path):
    model = adapted(make())
    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            model.save_pretrained(folder)
            (folder / "README.md").write_text("mine\n")
        before = contents(folder)
        with full_disk(), pytest.raises(OSError, match=r"the adapter cannot be written .*make room") as error:
            model.save_pretrained(folder)
        assert "\n" not in str(error.value) and str(folder) in str(error.value)
        assert contents(folder) == before and folder.exists() == (folder.name == "old")
    model.save_pretrained(tmp_path / "old")
    assert b"\nmine\n" in contents(tmp_path / "old")["README.md"]
    again = peft.PeftModel.from_pretrained(make(), tmp_path / "old")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
