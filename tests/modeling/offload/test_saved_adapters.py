"""An adapter's folder is written whole, or stays as it was."""

import json
import resource
from contextlib import contextmanager

import peft
import pytest
import torch
from support.killed_training import trainer_of
from support.offload import load_both, mixtral, text_model
from transformers import TrainerCallback

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


def test_several_adapters_have_folders_of_their_own(tmp_path):
    model = adapted(text_model())
    model.add_adapter("other", llamoe.lora_config(model.get_base_model(), r=2))
    for _ in range(2):
        model.save_pretrained(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            "README.md", "adapter_config.json", "adapter_model.safetensors", "other"
        }  # fmt: skip
        assert json.loads((tmp_path / "other" / "adapter_config.json").read_text())["r"] == 2
    model.save_pretrained(tmp_path / "one", selected_adapters=["other"])
    assert [path.name for path in (tmp_path / "one").iterdir() if path.is_dir()] == ["other"]
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not contents(tmp_path / "none")


class Full(TrainerCallback):
    """The disk is full when the second checkpoint is written."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 4:
            self.disk = full_disk()
            self.disk.__enter__()


def test_training_goes_on_from_the_checkpoint_before_a_full_disk(tmp_path, folders):
    _, model = load_both(folders["mixtral"], 2)
    full = Full()
    trainer = trainer_of(model, tmp_path, full)
    with pytest.raises(OSError, match="the adapter cannot be written"):
        trainer.train()
    full.disk.__exit__(None, None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]
    _, model = load_both(folders["mixtral"], 2)
    again = trainer_of(model, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
