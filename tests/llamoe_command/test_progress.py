"""Test that progress is drawn only on a terminal, for which the tests use a `pty`."""

import contextlib
import os
import pty
import termios
import threading
from pathlib import Path

import pytest
from support import programs
from support.models import make_asymmetric, stock_dense_config
from transformers import LlamaForCausalLM

from llamoe.modeling.kernels import cpp_kernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Control characters with which rich and tqdm draw.
DRAWN = ("\x1b[", "\r")
LOADING = "loading torch and transformers"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    make_asymmetric(LlamaForCausalLM(stock_dense_config())).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path):
    """Return a function that runs Python and returns its standard error, a terminal or a pipe, and standard output."""

    def run(*arguments, on_terminal=True, **environment):
        environment = {**os.environ, "TERM": "xterm", **environment}
        if not on_terminal:
            done = programs.run(arguments, env=environment)
            assert done.returncode == 0, done.stderr
            return done.stderr, done.stdout
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 120))
        reader = threading.Thread(target=read_to_end, args=(ours, written := bytearray()))
        reader.start()
        process = programs.start(arguments, tmp_path / "output", os.ttyname(theirs), env=environment)
        process.join(300)
        os.close(theirs)
        reader.join()
        os.close(ours)
        assert process.exitcode == 0, written.decode()
        return written.decode(), (tmp_path / "output").read_text()

    return run


def read_to_end(terminal, written):
    # Reading a terminal raises an error once no program has it open.
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 1 << 16):
            written.extend(piece)


# What each command draws besides the status line about torch.
COMMANDS = {"convert": "preparing", "verify": "preparing", "inspect": "", "doctor": ""}


def words(name, source, tmp_path):
    more = {
        "convert": [source, tmp_path / "out"],
        "verify": [source, source],
        "inspect": [source],
        "doctor": [],
    }
    return ["-m", "llamoe", name, *more[name]]


@pytest.mark.parametrize(("name", "drawn"), COMMANDS.items())
def test_a_command_draws_on_a_terminal(name, drawn, source, tmp_path, run):
    errors, output = run(*words(name, source, tmp_path))
    assert LOADING in errors
    assert drawn in errors
    assert not any(sign in output for sign in DRAWN)


@pytest.mark.parametrize("option", ["--quiet", "--json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_drawn_with_quiet_or_json(name, option, source, tmp_path, run):
    errors, output = run(*words(name, source, tmp_path), option)
    assert errors == ""
    assert output


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_drawn_into_a_pipe(name, source, tmp_path, run):
    """Not even if FORCE_COLOR is set, as on build servers."""
    errors, output = run(*words(name, source, tmp_path), on_terminal=False, FORCE_COLOR="1")
    assert errors == ""
    assert output


LOAD = """
import sys
from llamoe_command.app import load
llamoe = load("llamoe", is_silent={is_silent})
llamoe.LlamoeDenseForCausalLM.from_pretrained(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("is_silent", "on_terminal", "is_drawn"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_transformers_bars_are_drawn_if_llamoes_are(is_silent, on_terminal, is_drawn, source, run):
    errors, _ = run("-c", LOAD.format(is_silent=is_silent), source, on_terminal=on_terminal)
    assert ("Loading weights" in errors) == is_drawn
    assert (LOADING in errors) == is_drawn


COMPILE = """
import torch._inductor.config
from transformers.utils import logging
import llamoe
from llamoe.modeling.kernels import why_no_cpp_kernels
torch._inductor.config.cpp.cxx = (None, "{compiler}")
{switch}
print(why_no_cpp_kernels())
"""
# A script in place of the compiler. After two seconds, instead of half a minute, it copies kernels that were compiled
# before. It fails for the programs with which torch tests instruction sets.
COMPILER = """#!/bin/sh
case $* in
    *--version*) exec g++ "$@" ;;
esac
for word; do
    [ "$before" = -o ] && output_file=$word
    before=$word
done
echo "$output_file" >> {log}
case $output_file in
    *.main.so) sleep 2; exec cp {kernels} "$output_file" ;;
    *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("switch", "on_terminal", "is_shown"),
    [("", True, True), ("logging.disable_progress_bar()", True, False), ("", False, False)],
)
def test_compiling_kernels_is_shown_on_a_terminal(switch, on_terminal, is_shown, tmp_path, run):
    if (kernels := cpp_kernels.library()) is None:
        pytest.skip("needs a C++ compiler, and a CPU with AVX2, AVX-512 or NEON")
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(kernels=kernels._name, log=log))
    compiler.chmod(0o755)
    # An empty cache folder, so that the kernels are compiled.
    new = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    program = COMPILE.format(switch=switch, compiler=compiler)
    errors, output = run("-c", program, on_terminal=on_terminal, **new)
    assert output.strip() == "None" and log.read_text().count(".main.so") == 1
    assert ("compiling kernels for this processor" in errors) == is_shown
