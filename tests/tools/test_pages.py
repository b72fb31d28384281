"""Test that the code of docs/evaluation.md runs, which needs lm-eval and TRL."""

import importlib.util
import re
import shlex

import pytest
from support import programs
from support.documents import ROOT, blocks, read
from support.paths import environment

pytestmark = pytest.mark.slow

PAGE = "docs/evaluation.md"
MISSING = [name for name in ("lm_eval", "trl") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install lm-eval trl")
def test_what_the_page_shows_runs(tmp_path):
    """Run all Python blocks as one program, then the commands, which use the files that it has written."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    python = "\n".join(block.code for block in blocks(PAGE) if block.language == "python")
    ran = run(["-c", python], tmp_path)
    for expected in re.findall(r"^ *print\(.*\)  # (.*)", read(PAGE), re.MULTILINE):
        assert expected in ran.stdout.splitlines()
    assert (tmp_path / "sft/adapter/adapter_model.safetensors").is_file()
    commands = [line for block in blocks(PAGE) if block.language == "bash" for line in block.commands]
    ran = [run(shlex.split(line)[1:], tmp_path) for line in commands if " pip install " not in line]
    assert len(ran) == 1 and re.search(r"exact_match\|.*\|1\b", re.sub(" +", "", ran[0].stdout)), ran[
        0
    ].stdout


def run(arguments, folder):
    ran = programs.run(arguments, folder, environment(HF_DATASETS_CACHE=str(folder / "cache")))
    assert ran.returncode == 0, ran.stderr
    return ran
