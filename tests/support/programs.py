"""Run Python programs in processes that begin with torch and transformers imported.

The imports take most of a short program's time. A server process (multiprocessing's `forkserver`) does them once, and
forks for every program. It does not import llamoe, which reads the environment when it is imported. A test must use
`subprocess` if its program has to begin as a user's process, or if it measures memory or time of the imports.
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

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
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
        arguments: command-line arguments of Python.
        output: path of a file to which standard output is appended.
        errors: path of a file for standard error; may be the same.
        cwd: working directory of the program; this process's by default.
        env: environment of the program; this process's by default.

    Returns:
        a `multiprocessing` process.
    """
    arguments = [str(argument) for argument in arguments]
    env = dict(os.environ if env is None else env)
    process = PROCESSES.Process(
        target=_execute, args=(arguments, str(output), str(errors), str(cwd or Path.cwd()), env)
    )
    process.start()
    return process


def call(module, function, *arguments):
    """Start a process that imports a module and calls one of its functions; return the process."""
    process = PROCESSES.Process(target=_call, args=(module, function, arguments))
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
    """Run a program in `count` processes with the environment of torch.distributed; fail unless all exit with 0.

    Each process writes its output to a file in `folder`; the processes are killed after `timeout` seconds.
    """
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
    """Replace `subprocess.run` in a module by `run`, which starts Python faster."""

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
        # transformers has read this variable at its import, before the fork.
        for module in (hub, dynamic_module_utils):
            module.HF_MODULES_CACHE = env["HF_MODULES_CACHE"]
    os.chdir(cwd)
    # Otherwise each garbage collection would visit a million objects of the libraries, and copy their memory pages,
    # which are shared with the server until they are written to. The thresholds are those of the tests.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    # A forked process lacks its parent's threads, so torch must not use them.
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
