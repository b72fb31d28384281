"""The README is a promise: its Python runs, its commands exist."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def blocks(document, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def commands():
    lines = "\n".join(block for name in DOCUMENTS for block in blocks(name, "(?:bash|sh|console)"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.split("#")[0].strip():
            yield shlex.split(line, comments=True)


def test_python_runs_from_top_to_bottom(tmp_path):
    """All blocks in one process, in the repository root, as a reader would paste them; it shows what they print."""
    code = "\n".join(blocks("README.md", "python"))
    assert code
    script = tmp_path / "readme.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        assert line in (ROOT / "README.md").read_text()


def test_first_example_is_short():
    assert len(ast.parse(blocks("README.md", "python")[0]).body) <= 8


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for words in commands() if words[0] == "make" and len(words) > 1}
    for document in DOCUMENTS:
        named |= set(re.findall(r"`make ([a-z-]+)", (ROOT / document).read_text()))
    assert named
    assert named <= targets


def test_commands_name_files_that_exist():
    files = {word for words in commands() for word in words if re.match(r"(examples|tests|\.ci)/", word)}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_backticks_exist(document):
    text = (ROOT / document).read_text()
    paths = re.findall(r"`((?:configuration|modeling|conversion|tests|examples|llamoe)/[\w./-]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_figures_of_speed_are_those_of_the_results():
    """`python -m benchmarks.readme` writes them."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.readme", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
