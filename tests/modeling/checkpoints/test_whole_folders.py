"""A save into a folder that held another model leaves one whole model there, also if the save fails."""

import os
import resource
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from support.models import SHALLOW_MODELS, make_asymmetric, stock_dense_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM, modeling_utils

from llamoe.modeling.checkpoints import saving

pytestmark = pytest.mark.slow

CASE = next(case for case in SHALLOW_MODELS if case.name == "LlamoeDenseForCausalLM")
SHARDED = {"max_shard_size": "90KB"}


def contents(folder):
    """Return the bytes of every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def files(folder):
    return {path.name for path in Path(folder).iterdir()}


def assert_holds(folder, model, **options):
    again, info = CASE.model_class.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


@pytest.fixture
def old(tmp_path):
    """Return a folder with an older model and files that are not the model's."""
    folder = tmp_path / "folder"
    CASE.make(seed=1).save_pretrained(folder, **SHARDED)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "README.md").write_text("mine")
    return folder


# What stays and what goes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"max_shard_size": "50KB"}, {}), ({}, SHARDED), ({"max_shard_size": "50KB"}, SHARDED),
        (SHARDED, {"layout": "stock"}), ({}, {"layout": "stock", **SHARDED}),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_of_the_older_model_stays(before, after, tmp_path):
    fresh, reused = tmp_path / "fresh", tmp_path / "reused"
    model = CASE.make()
    CASE.make(seed=1).save_pretrained(reused, **before)
    for folder in (fresh, reused):
        model.save_pretrained(folder, **after)
    assert contents(reused) == contents(fresh)
    assert_holds(reused, model)
    if after.get("layout") == "stock":
        stock = LlamaForCausalLM.from_pretrained(reused)
        assert torch.equal(stock.lm_head.weight, model.lm_head.weight)


def test_what_belongs_to_others_stays(old):
    before = contents(old)
    CASE.make().save_pretrained(old)
    after = contents(old)
    for name in ("tokenizer.json", "notes/README.md"):
        assert after[name] == before[name]
    assert not any(name.startswith(".") for name in files(old))


def test_variants_do_not_touch_each_other(tmp_path):
    models = {variant: CASE.make(seed) for seed, variant in enumerate((None, "a", "b"))}
    for options in (SHARDED, {}, SHARDED):
        for variant, model in models.items():
            model.save_pretrained(tmp_path, variant=variant, **options)
        for variant, model in models.items():
            assert_holds(tmp_path, model, variant=variant)


def test_older_shards_of_a_job_are_not_read_in_place_of_the_new_weights(tmp_path):
    """transformers reads files of these names instead of model.safetensors."""
    names = ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(b"older")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / names[0]).write_bytes(b"older")
    model = CASE.make()
    model.save_pretrained(tmp_path)
    assert not files(tmp_path) & {*names, "sharded"}
    assert_holds(tmp_path, model)


def test_links(tmp_path):
    """A link to the folder is followed; a file that a link in the folder points to, as to a cache, is not changed."""
    elsewhere = tmp_path / "elsewhere"
    CASE.make(seed=1).save_pretrained(elsewhere)
    (tmp_path / "link").symlink_to(elsewhere)
    model = CASE.make()
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_holds(elsewhere, model)

    cached = tmp_path / "cached.safetensors"
    (elsewhere / "model.safetensors").rename(cached)
    (elsewhere / "model.safetensors").symlink_to(cached)
    before = cached.read_bytes()
    other = CASE.make(seed=2)
    other.save_pretrained(elsewhere)
    assert cached.read_bytes() == before
    assert_holds(elsewhere, other)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_that_transformers_gives(mask, tmp_path):
    before = os.umask(mask)
    try:
        make_asymmetric(LlamaForCausalLM(stock_dense_config())).save_pretrained(tmp_path / "stock")
        CASE.make().save_pretrained(tmp_path / "ours")
    finally:
        os.umask(before)

    def modes(folder):
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}

    ours, stock = modes(tmp_path / "ours"), modes(tmp_path / "stock")
    assert {name: ours[name] for name in stock.keys() - {"stock"}} == {
        name: mode for name, mode in stock.items() if name != "stock"
    }
    assert ours["ours"] == stock["stock"]


def test_other_processes_of_a_job_change_nothing(old):
    before = contents(old)
    CASE.make().save_pretrained(old, is_main_process=False)
    assert contents(old) == before


# What fails


@contextmanager
def full_disk(folder):
    """Let the system refuse files of more than 60 kB, so that Python and safetensors fail as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def raising(module, name, error, after=0):
    """Let a function raise at its call number `after`, before it does anything."""
    original, calls = getattr(module, name), 0

    def replaced(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise error
        return original(*args, **kwargs)

    setattr(module, name, replaced)
    try:
        yield
    finally:
        setattr(module, name, original)


FAILURES = {
    "the disk is full": full_disk,
    "Ctrl-C while writing": lambda _: raising(modeling_utils, "safe_save_file", KeyboardInterrupt(), 1),
    "Ctrl-C while flushing": lambda _: raising(os, "fsync", KeyboardInterrupt(), 2),
    "flushing finds the disk full": lambda _: raising(os, "fsync", OSError(28, "No space left"), 2),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_save_that_fails_leaves_what_was_before(failure, old, tmp_path):
    before, new = contents(old), tmp_path / "new"
    for folder in (old, new):
        with pytest.raises((OSError, SafetensorError, KeyboardInterrupt)), FAILURES[failure](folder):
            CASE.make().save_pretrained(folder, **SHARDED)
    assert contents(old) == before and not new.exists()
    assert not any(name.startswith(".") for name in files(old))
    CASE.make().save_pretrained(old, **SHARDED)
    assert_holds(old, CASE.make())


def test_what_cannot_be_uploaded_is_saved(old, monkeypatch):
    class Api:
        repo_id = "me/model"

        def create_repo(self, repo_id, **_):
            # transformers names the repository after the folder.
            assert repo_id == "folder"
            return self

    def upload(self, folder, repo_id, files_timestamps, **_):
        assert Path(folder) == old
        uploaded.update(files(folder) - files_timestamps.keys())
        raise ConnectionError("no network")

    uploaded = set()
    monkeypatch.setattr(modeling_utils, "hf_api", Api)
    card = type("Card", (), {"save": lambda self, path: Path(path).write_text("card")})
    monkeypatch.setattr(modeling_utils, "create_and_tag_model_card", lambda *_, **__: card())
    monkeypatch.setattr(modeling_utils.PreTrainedModel, "_upload_modified_files", upload)
    with pytest.raises(ConnectionError):
        CASE.make().save_pretrained(old, push_to_hub=True)
    assert_holds(old, CASE.make())
    written = {"config.json", "generation_config.json", "llamoe_hub.py", "model.safetensors"}
    assert uploaded == {"README.md", *written}
    assert "tokenizer.json" in files(old)


# Cut off between two renamings


def loads(folder, *candidates):
    """Return which of the candidates a folder holds; None if it does not load."""
    try:
        CASE.model_class.from_pretrained(folder)
    except (OSError, ValueError):
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(folder)
        return None
    held = []
    for number, model in enumerate(candidates):
        with suppress(AssertionError):
            assert_holds(folder, model)
            held.append(number)
    assert len(held) == 1
    return held[0]


@pytest.mark.parametrize(("before", "after"), [(SHARDED, SHARDED), (SHARDED, {}), ({}, SHARDED), ({}, {})])
def test_a_folder_never_holds_a_part_of_each_of_two_models(before, after, tmp_path):
    older, newer, folder = CASE.make(seed=1), CASE.make(), tmp_path / "model"
    found = []
    for call in ("unlink", "replace"):
        for step in range(12):
            shutil.rmtree(folder, ignore_errors=True)
            older.save_pretrained(folder, **before)
            with suppress(KeyboardInterrupt), raising(Path, call, KeyboardInterrupt(), step):
                newer.save_pretrained(folder, **after)
            found.append(loads(folder, older, newer))
            newer.save_pretrained(folder, **after)
            assert loads(folder, older, newer) == 1 and not any(
                name.startswith(".") for name in files(folder)
            )
    assert {None, 1} <= {*found}


def test_what_another_process_is_writing_is_left_alone(old):
    with saving._Save(old, None).files() as theirs:
        CASE.make().save_pretrained(old)
        assert theirs.exists()
    assert_holds(old, CASE.make())


def test_what_a_killed_process_has_left_is_removed(old):
    name = saving._Save(old, None).new.name
    (old / name).rename(old / name.replace(f"-{os.getpid()}-", "-4194999-"))
    CASE.make().save_pretrained(old)
    assert not any(name.startswith(".") for name in files(old))


def test_no_loader_finds_a_model_without_the_adapter_beside_it(tmp_path):
    """While an adapter beside its model is replaced, no step leaves a folder that loads as the model alone."""
    peft = pytest.importorskip("peft")
    CASE.make().save_pretrained(tmp_path)
    for call in ("unlink", "replace"):
        for step in range(5):
            model = CASE.make()
            model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
            model.save_pretrained(tmp_path)
            with suppress(KeyboardInterrupt), raising(Path, call, KeyboardInterrupt(), step):
                model.save_pretrained(tmp_path)
            with suppress(OSError, ValueError):
                assert CASE.model_class.from_pretrained(tmp_path).peft_config


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path is empty"):
        CASE.make().save_pretrained("")
    assert not files(tmp_path)
