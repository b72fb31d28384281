"""Test the installed package: built from the source archive, installed, and used outside of the checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from support import programs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ROOMS = ("configuration", "serving", "modeling", "planning", "conversion")

USE = """
import sys
import llamoe
import torch
from transformers import AutoModelForCausalLM
config = llamoe.LlamoeTextConfig(
    vocab_size=61, hidden_size=48, intermediate_size=40, intermediate_size_mlp=88, num_hidden_layers=4,
    num_attention_heads=6, num_key_value_heads=2, head_dim=8, num_local_experts=3, interleave_moe_layer_step=2,
)
model = AutoModelForCausalLM.from_config(config)
assert type(model) is llamoe.LlamoeForCausalLM
logits = model(torch.arange(7)[None]).logits
assert logits.shape == (1, 7, 61) and logits.isfinite().all()
ours = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "llamoe"}
assert "llamoe.modeling.decoder" in ours
assert {name: file for name, file in ours.items() if not file.startswith(sys.argv[1])} == {}
"""


def run(*command, cwd):
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from the source archive of a copy, since setuptools leaves folders behind."""
    folder = tmp_path_factory.mktemp("build")
    clutter = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder / "source", ignore=clutter)
    build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    run(*build, "--outdir", folder, folder / "source", cwd=folder)
    return next(folder.glob("*.whl"))


def test_pyproject_names_every_package():
    """A package that pyproject.toml does not name may be missing in the wheel, or installed as data."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    mapped = {".".join(("llamoe", *folder.parts)): str(folder) for folder in folders}
    assert named["package-dir"] == mapped
    assert set(named["packages"]) == {*mapped, "llamoe", "llamoe_command", "llamoe_command.page"}


def test_wheel_holds_every_library_file_alone(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    on_disk = {
        ("llamoe/" if folder in ROOMS else "") + str(path.relative_to(ROOT))
        for folder in (*ROOMS, "llamoe", "llamoe_command")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == on_disk


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    """The wheel's folder is first on the path, and no module comes from the checkout."""
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    done = programs.run(["-c", USE, site], tmp_path, os.environ | {"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
