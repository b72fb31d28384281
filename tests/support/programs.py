"""Runs Python programs in processes that begin with torch and transformers imported.

Importing them takes most of a short program's time. A server imports them once and forks for every program
(multiprocessing's `forkserver`). A test process has one such server, and this file alone says what it imports: never
llamoe, which reads its environment when it is imported. What must begin as a user's process does, and what asks for the
memory or the time of the import, is started with `subprocess`.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import dynamic_module_utils
from transformers.utils import hub

from . import mended_stock  # noqa: F401

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "torch",
        "transformers",
        "transformers.generation",
        "transformers.modeling_utils",
        "transformers.models.llama4.modeling_llama4",
    ]
)


def start(arguments, output, errors, cwd=None, env=None):
    """Start `python ARGUMENTS`, where the arguments begin with `-c`, `-m` or a script's path.

    Args:
        arguments: of Python.
        output: path of a file for what the program prints.
        errors: path of a file for its errors; may be the same.
        cwd: folder in which it runs; this process's by default.
        env: its environment; this process's by default.

    Returns:
        a `multiprocessing` process.
    """
    arguments = [str(argument) for argument in arguments]
    env = dict(os.environ if env is None else env)
    process = _PROCESSES.Process(
        target=_execute, args=(arguments, str(output), str(errors), str(cwd or Path.cwd()), env)
    )
    process.start()
    return process


def call(module, function, *arguments):
    """Start a process that calls a function of a module, which only that process imports."""
    process = _PROCESSES.Process(target=_call, args=(module, function, arguments))
    process.start()
    return process


def run(arguments, cwd=None, env=None, timeout=300) -> subprocess.CompletedProcess:
    """Run a program to its end, as `subprocess.run` with `capture_output=True` and `text=True` does."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start(arguments, output, errors, cwd, env)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout, output.read_text(), errors.read_text())
        return subprocess.CompletedProcess(
            arguments, process.exitcode, output.read_text(), errors.read_text()
        )


def together(arguments, folder, count, timeout):
    """Run a program to its end in processes that torch.distributed can join; what each prints is left in a folder."""
    outputs = [Path(folder, f"output-{rank}.txt") for rank in range(count)]
    processes, end = [], time.monotonic() + timeout
    try:
        for rank, output in enumerate(outputs):
            own = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
            env = os.environ | {name: str(value) for name, value in own.items()}
            processes.append(start(arguments, output, output, folder, env))
        for process in processes:
            process.join(max(1, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * count, "\n".join(output.read_text()[-3000:] for output in outputs)


def in_place_of_subprocess(monkeypatch, module):
    """Let a module that starts Python with `subprocess.run` start it here, where imports are done."""

    def run_python(command, cwd=None, env=None, **_):
        assert command[0] == sys.executable
        return run(command[1:], cwd, env)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run_python))


def _call(module, function, arguments):
    gc.freeze()
    torch.set_num_threads(1)
    getattr(importlib.import_module(module), function)(*arguments)


def _execute(arguments, output, errors, cwd, env):
    for path, number in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    if "HF_MODULES_CACHE" in env:
        # transformers reads it when it is imported.
        for module in (hub, dynamic_module_utils):
            module.HF_MODULES_CACHE = env["HF_MODULES_CACHE"]
    os.chdir(cwd)
    # Collections would go through a million objects of the libraries, and copy the memory that they lie in. Of what
    # the program makes they are as rare as in the tests.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    # Threads that one process starts are lost in those that it forks.
    torch.set_num_threads(1)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    match arguments:
        case "-c", code, *rest:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case "-m", module, *rest:
            sys.argv = [module, *rest]
            sys.path.insert(0, cwd)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case script, *rest:
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
