"""`llamoe doctor`: what is installed, which devices there are, what serves each step, and what is missing."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib.metadata import metadata, requires, version

import psutil
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support import programs

from llamoe.modeling.kernels import cpp_instructions, plain_max_rows, rows_of_torch, why_no_cpp_kernels
from llamoe_command.cli import main
from llamoe_command.doctor_packages import EXTRAS

pytestmark = pytest.mark.slow

DOCTOR = ("-m", "llamoe", "doctor")
# Kernels are compiled for these processors alone; on others the reason is another one.
has_kernels = pytest.mark.skipif(
    why_no_cpp_kernels() is not None, reason="needs a C++ compiler, and a CPU with AVX2, AVX-512 or NEON"
)


def told(*words, **environment):
    """What a program that runs the command says in JSON, with these environment variables."""
    done = programs.run(words or (*DOCTOR, "--json"), env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def told_here(*options):
    """What the command says in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main(["doctor", *options])
    return output.getvalue()


def served(content, step, device="cpu"):
    found = [row for row in content["steps"] if (row["device"], row["step"]) == (device, step)]
    assert len(found) == 1, step
    return found[0]


def package(content, name):
    return next(row for row in content["packages"] if row["name"] == name)


def blocking(*modules):
    """A program: the command in a process where these modules cannot be found."""
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


@pytest.fixture(scope="module")
def content():
    return json.loads(told_here("--json"))


def test_it_tells_what_is_here(content):
    assert content["versions"]["llamoe"] == version("llamoe")
    for name in ("torch", "transformers", "accelerate", "safetensors", "peft"):
        assert package(content, name)["version"] == version(name)
        assert package(content, name)["is_needed"]
    needed = [found for found in map(Requirement, requires("llamoe")) if found.marker is None]
    (declared,) = (found for found in needed if found.name == "transformers")
    assert SpecifierSet(package(content, "transformers")["wanted"]) == declared.specifier
    cpu = content["devices"]["cpu"]
    assert cpu["memory"] == psutil.virtual_memory().total
    assert cpu["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert len(content["devices"]) == 1 + torch.accelerator.device_count()
    assert served(content, "attention")["served_by"].startswith("sdpa")
    assert served(content, "experts, one token")["served_by"] == "a loop over the hit experts"
    for step in ("many tokens", "training"):
        assert served(content, f"experts, {step}")["served_by"] == "a loop over the hit experts"


def test_the_text_has_every_section():
    output = told_here()
    titles = [line for line in output.splitlines() if line and not line.startswith((" ", "on cuda"))]
    on_a_gpu = [] if torch.accelerator.is_available() else ["on a GPU"]
    sections = ["versions", "optional packages", "devices", "on cpu", *on_a_gpu, "environment", "advice"]
    assert titles == sections
    assert re.search(rf"^  torch +{re.escape(torch.__version__.partition('+')[0])}", output, re.MULTILINE)


@has_kernels
def test_compiled_kernels_serve_where_they_can(content):
    few_rows = served(content, "products of few rows")["served_by"]
    assert f"C++ kernels for {cpp_instructions()}" in few_rows
    # What the kernels were compiled to is what this processor has, unless torch is held to less.
    wanted = {"AVX512": ("AVX-512", "AVX2"), "AVX2": ("AVX2",)}.get(
        torch.backends.cpu.get_cpu_capability(), ("NEON",)
    )
    assert cpp_instructions().startswith(wanted)
    assert f"up to {plain_max_rows(torch.float32)} in float32" in few_rows
    assert served(content, "prompts and training, float32")["served_by"] == "torch's products"
    is_cast = rows_of_torch(torch.bfloat16) is not None
    assert ("float32 by blocks" in served(content, "prompts and training, bfloat16")["served_by"]) == is_cast
    assert served(content, "training beside int4 and int8")["served_by"].startswith("unpacked")
    assert "C++ kernels" in served(content, "int4 and int8")["served_by"]
    assert not [line for line in content["advice"] if " on cpu" in line]


@pytest.mark.parametrize(
    ("name", "value", "step", "served_by"),
    [
        ("LLAMOE_CPP_KERNELS", "0", "products of few rows", "torch's products"),
        ("LLAMOE_CPP_KERNELS", "0", "int8", "torch's kernel"),
        ("LLAMOE_CPU_SHORTCUTS", "0", "products of few rows", "torch's products"),
        ("LLAMOE_EXPERTS", "eager", "experts", "eager"),
    ],
)
def test_a_variable_changes_what_serves_and_is_named(name, value, step, served_by):
    content = told(**{name: value})
    found = served(content, step)
    assert found["served_by"] == served_by
    assert name in found["why"]
    assert ("two to three times as long" in found["why"]) == (name == "LLAMOE_CPP_KERNELS")
    assert content["environment"][name] == value
    assert [line for line in content["advice"] if step in line.partition(":")[0] and f"unset {name}" in line]


def test_a_wrong_name_of_experts_is_told(monkeypatch):
    monkeypatch.setenv("LLAMOE_EXPERTS", "nothing")
    content = json.loads(told_here("--json"))
    assert [line for line in content["advice"] if "LLAMOE_EXPERTS" in line and "'nothing'" in line]


@has_kernels
def test_a_missing_compiler_is_told(tmp_path):
    # torch reads the compiler's name, CXX, when it is imported, which it is here.
    program = """
import torch._inductor.config
from llamoe_command.cli import main
torch._inductor.config.cpp.cxx = (None, "/nowhere")
main(["doctor", "--json"])
"""
    content = told("-c", program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert served(content, "products of few rows")["served_by"] == "torch's products"
    assert "/nowhere" in served(content, "products of few rows")["why"]
    # One line, whatever number of steps it would help.
    assert len([line for line in content["advice"] if "install a C++ compiler" in line]) == 1


def test_a_missing_package_is_told_with_its_advice():
    content = told("-c", blocking("sentencepiece", "flash_attn", "kernels"))
    assert package(content, "sentencepiece")["version"] is None
    lines = [line for line in content["advice"] if line.startswith("sentencepiece is missing")]
    assert len(lines) == 1
    assert lines[0].endswith("pip install 'llamoe[tokenizers]'")
    # What serves GPUs alone is missed only where there is one.
    of_gpus = [line for line in content["advice"] if line.startswith(("flash-attn is", "kernels is"))]
    assert len(of_gpus) == (2 if torch.accelerator.is_available() else 0)


def test_without_torch_the_rest_is_told():
    done = subprocess.run([sys.executable, "-c", blocking("torch")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["advice"][0].startswith("llamoe cannot be imported")
    assert [line for line in content["advice"] if line.startswith("torch is missing")]
    assert content["steps"] == []
    assert package(content, "rich")["version"] == version("rich")


def test_a_version_below_the_bound_is_told(tmp_path, monkeypatch):
    # Metadata that is found before that of the package.
    folder = tmp_path / "tiktoken-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tiktoken\nVersion: 0.1.0\n")
    pytest.importorskip("tiktoken", reason="needs the extra llamoe[tokenizers]")
    monkeypatch.syspath_prepend(tmp_path)
    content = json.loads(told_here("--json"))
    assert package(content, "tiktoken")["version"] == "0.1.0"
    assert "tiktoken is 0.1.0, llamoe needs >=0.12.0: pip install 'tiktoken>=0.12.0'" in content["advice"]


def test_a_package_that_cannot_be_imported_is_told_by_try(tmp_path):
    (tmp_path / "tiktoken.py").write_text("raise RuntimeError('its library is spoilt')\n")
    pytest.importorskip("tiktoken", reason="needs the extra llamoe[tokenizers]")
    looked = told(PYTHONPATH=str(tmp_path))
    assert not [line for line in looked["advice"] if "spoilt" in line]
    tried = told(*DOCTOR, "--json", "--try", PYTHONPATH=str(tmp_path))
    assert [line for line in tried["advice"] if "cannot be imported (its library is spoilt)" in line]


def test_every_extra_for_users_has_its_purpose():
    extras = set(metadata("llamoe").get_all("Provides-Extra"))
    assert extras - {"dev", "docs", "test"} <= set(EXTRAS)
