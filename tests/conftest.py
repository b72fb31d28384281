"""Set up all tests: no network, one seed, the markers `gpu` and `slow`, the table of parity."""

import gc
import getpass
import json
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

# Set variables before anything imports torch or transformers; processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# peft's BOFT builds an extension in this folder under a lock file. If a killed run left the lock in a folder that runs
# share, all later runs would wait for it.
os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # torch's cache of compiled graphs does not distinguish processors, so that each kind needs another folder.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
if "PYTEST_XDIST_WORKER" in os.environ:
    # With a thread for each core in each worker, workers would mostly wait for each other.
    cores_each = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores_each)))

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    config.pluginmanager.register(Collections(), "llamoe-collections")
    if not hasattr(config, "workerinput"):  # the process that talks to the terminal, not one of its workers
        config.pluginmanager.register(ParityTable(), "llamoe-parity")


class Collections:
    """A pytest plugin that makes garbage collections rare and short, as they took a tenth of all time.

    Objects that exist after pytest has collected the tests are left out of garbage collections. So are, after a test in
    which a garbage collection took long, those that exist then, for example of libraries that the test imported.
    """

    def __init__(self):
        self.begun, self.is_slow = 0.0, False

    def pytest_collection_finish(self):
        self.leave_out()
        gc.set_threshold(20_000, 10, 10)
        gc.callbacks.append(self.notice)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self):
        yield
        if self.is_slow:
            self.leave_out()

    def notice(self, phase, info):
        if info["generation"] == 2 and phase == "start":
            self.begun = time.process_time()
        elif info["generation"] == 2:
            self.is_slow |= time.process_time() - self.begun > 0.03

    def leave_out(self):
        gc.collect()
        gc.freeze()
        self.is_slow = False


def pytest_sessionfinish(session):
    """Let Python collect all objects when it ends: some libraries warn about objects that are left."""
    gc.unfreeze()
    shutil.rmtree(os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    reasons = {}
    if not config.getoption("--run-slow"):
        reasons["slow"] = "slow: `make test-all` runs it"
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    for item in items:
        for marker, reason in reasons.items():
            # `item.keywords` would contain the names of folders, too.
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def record_parity(request):
    """Record the difference of a model from its reference; the terminal summary shows all differences as a table."""

    def record(model: str, against: str, dtype: str, max_abs: float, note: str = "") -> None:
        row = {"model": model, "against": against, "dtype": dtype, "max_abs": float(max_abs), "note": note}
        # Stored in the test's report, which workers send to the process that prints.
        request.node.user_properties.append(("parity", row))

    return record


@pytest.fixture(scope="session")
def guard():
    """Start a process with little memory and time, which opens hostile files."""
    from support.guarded import Guard

    guard = Guard()
    yield guard
    guard.close()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Save a dense model in all forms that transformers reads, and one of each family; do not change them."""
    from support.spoilt_folders import save_all

    folder = tmp_path_factory.mktemp("models")
    save_all(folder)
    return folder


@pytest.fixture
def model_copy(model_folders, tmp_path):
    """Return a function that copies one of `model_folders`; tests may change the copy."""

    def copy(kind):
        shutil.copytree(model_folders / kind, tmp_path / "model")
        return tmp_path / "model"

    return copy


class ParityTable:
    """A pytest plugin that prints what `record_parity` recorded, and writes it to the file in LLAMOE_PARITY_JSON."""

    def __init__(self):
        self.worst = {}

    def pytest_runtest_logreport(self, report):
        if report.when != "call":
            return
        for name, row in report.user_properties:
            if name == "parity":
                key = (row["model"], row["against"], row["dtype"], row["note"])
                # NaN is worse than every number.
                errors = self.worst.get(key, 0.0), row["max_abs"]
                self.worst[key] = max(errors, key=lambda error: (math.isnan(error), error))

    def pytest_terminal_summary(self, terminalreporter):
        if not self.worst:
            return
        columns = ("model", "against", "dtype", "max |Δ|", "note")
        rows = [(m, a, d, f"{self.worst[m, a, d, note]:.1e}", note) for m, a, d, note in sorted(self.worst)]
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        terminalreporter.section("parity")
        for row in [columns, *rows]:
            terminalreporter.write_line(" · ".join(map(str.ljust, row, widths)).rstrip(" ·"))

    def pytest_sessionfinish(self):
        if path := os.environ.get("LLAMOE_PARITY_JSON"):
            fields = ("model", "against", "dtype", "note")
            table = [
                dict(zip(fields, key, strict=True), max_abs=self.worst[key]) for key in sorted(self.worst)
            ]
            Path(path).write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
