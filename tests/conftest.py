"""What every test shares: no network, one seed, the markers `gpu` and `slow`, the table of parity."""

import gc
import getpass
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

# Before anything imports torch or transformers, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# peft's BOFT builds an extension under a lock file in this folder. A killed run leaves it behind, and later ones wait.
os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # torch keeps compiled graphs by their operations, and compiles the lanes of one processor for another.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers with a thread per core each would spend their time waiting for one another.
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
    """Leaves what is there out of garbage collections, and makes them rare: they took a tenth of all time.

    Again behind each test in which one took long: libraries that tests import stay, and every Trainer collects.
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
    """Let Python find its libraries' objects when it ends: some complain about what is left."""
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
            if item.get_closest_marker(marker):  # keywords hold names of folders too
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def record_parity(request):
    """Notes how far a model is from its reference; the terminal summary shows all of them as a table."""

    def record(model: str, against: str, dtype: str, max_abs: float, note: str = "") -> None:
        row = {"model": model, "against": against, "dtype": dtype, "max_abs": float(max_abs), "note": note}
        # Travels with the report of the test, also from a worker to the process that prints.
        request.node.user_properties.append(("parity", row))

    return record


@pytest.fixture(scope="session")
def guard():
    """A process of little memory and time, which opens hostile files."""
    from support.guarded import Guard

    guard = Guard()
    yield guard
    guard.close()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """One dense model in all forms that transformers reads, and one model of each family; not to be changed."""
    from support.spoilt_folders import save_all

    place = tmp_path_factory.mktemp("models")
    save_all(place)
    return place


@pytest.fixture
def model_copy(model_folders, tmp_path):
    """Gives a copy of one of `model_folders`, to spoil."""

    def copy(kind):
        shutil.copytree(model_folders / kind, tmp_path / "model")
        return tmp_path / "model"

    return copy


class ParityTable:
    """Collects what `record_parity` noted, prints it and, where LLAMOE_PARITY_JSON names a file, writes it."""

    def __init__(self):
        self.worst = {}

    def pytest_runtest_logreport(self, report):
        if report.when != "call":
            return
        for name, row in report.user_properties:
            if name == "parity":
                key = (row["model"], row["against"], row["dtype"], row["note"])
                # A nan is worse than every number, and `max` would lose it.
                known = self.worst.get(key, 0.0)
                self.worst[key] = row["max_abs"] if not row["max_abs"] <= known else known

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
