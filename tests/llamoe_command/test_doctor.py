"""Test `llamoe doctor`: it shows versions, devices and their kernels, and says how to install what is missing."""

import contextlib
import io
import json
import os
import subprocess
import sys
from importlib.metadata import metadata, version

import pytest

from llamoe.modeling.kernels import cpp_instructions, why_no_cpp_kernels
from llamoe_command.cli import main
from llamoe_command.doctor_command import EXTRAS

pytestmark = pytest.mark.slow

FEW_ROWS = "decoding, int4 and int8"
# On other processors doctor gives another reason for the absence of kernels.
has_kernels = pytest.mark.skipif(
    why_no_cpp_kernels() is not None, reason="needs a C++ compiler, and a CPU with AVX2, AVX-512 or NEON"
)


def doctor_in_a_process(*words, **environment):
    # A new process, since llamoe reads environment variables when it is imported.
    command = [sys.executable, *(words or ("-m", "llamoe", "doctor", "--json"))]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def doctor_here(*options):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main(["doctor", *options])
    return output.getvalue()


def blocking(*modules):
    """Return a program that runs `llamoe doctor` in a process that cannot find these modules."""
    return f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for name in [name for name in sys.modules if name.partition(".")[0] in {modules!r}]:
    del sys.modules[name]
from llamoe_command.cli import main
main(["doctor", "--json"])
"""


def test_versions_devices_and_kernels():
    content = json.loads(doctor_here("--json"))
    for name in ("llamoe", "torch", "transformers", "accelerate", "safetensors", "peft"):
        assert content["versions"][name] == version(name)
    assert "free" in content["cpu"]["memory"]
    if why_no_cpp_kernels() is None:
        assert f"C++ kernels for {cpp_instructions()}" in content["cpu"][FEW_ROWS]
    assert not [line for line in content["advice"] if "C++" in line and why_no_cpp_kernels() is None]


def test_the_text_has_every_section():
    titles = [line for line in doctor_here().splitlines() if line and not line.startswith(" ")]
    assert [title for title in titles if title != "environment"] == ["versions", "cpu", "gpu", "advice"]


@pytest.mark.parametrize("name", ["LLAMOE_CPP_KERNELS", "LLAMOE_CPU_SHORTCUTS"])
def test_a_variable_that_turns_off_kernels_is_reported(name):
    content = doctor_in_a_process(**{name: "0"})
    assert content["cpu"][FEW_ROWS].startswith("torch's products") and name in content["cpu"][FEW_ROWS]
    assert content["environment"][name] == "0"
    assert [line for line in content["advice"] if f"unset {name}" in line]


@has_kernels
def test_a_missing_compiler_is_reported(tmp_path):
    # Not by the variable CXX: torch reads it when it is imported, which may have happened before.
    program = """
import torch._inductor.config
from llamoe_command.cli import main
torch._inductor.config.cpp.cxx = (None, "/nowhere")
main(["doctor", "--json"])
"""
    content = doctor_in_a_process("-c", program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert "/nowhere" in content["cpu"][FEW_ROWS]
    assert len([line for line in content["advice"] if "install a C++ compiler" in line]) == 1


def test_a_missing_package_is_reported_with_its_extra():
    content = doctor_in_a_process("-c", blocking("sentencepiece"))
    assert content["versions"]["sentencepiece"].startswith("missing")
    (line,) = [line for line in content["advice"] if line.startswith("sentencepiece is missing")]
    assert line.endswith("pip install 'llamoe[tokenizers]'")


def test_without_torch_the_versions_are_shown():
    content = doctor_in_a_process("-c", blocking("torch"))
    assert content["advice"][0].startswith("llamoe cannot be imported") and "cpu" not in content
    assert [line for line in content["advice"] if line.startswith("torch is missing")]
    assert content["versions"]["rich"] == version("rich")


def test_a_version_below_the_bound_is_reported(tmp_path, monkeypatch):
    # This metadata is found before that of the installed package.
    folder = tmp_path / "tiktoken-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tiktoken\nVersion: 0.1.0\n")
    pytest.importorskip("tiktoken", reason="needs the extra llamoe[tokenizers]")
    monkeypatch.syspath_prepend(tmp_path)
    content = json.loads(doctor_here("--json"))
    assert "tiktoken is 0.1.0, llamoe needs >=0.12.0: pip install 'tiktoken>=0.12.0'" in content["advice"]


def test_every_extra_for_users_has_its_purpose():
    extras = set(metadata("llamoe").get_all("Provides-Extra"))
    assert extras - {"dev", "docs", "test", "bench"} <= set(EXTRAS)
