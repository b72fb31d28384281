"""transformers' server in a process of its own, and what clients send it."""

import base64
import os
import socket
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from . import programs


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Server:
    """`transformers serve` on a free port in place of 8000, run from the present folder.

    Args:
        folder: for its log and for the code that it takes from models' folders.
    """

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "log"
        self.port, self.process, self.words = free_port(), None, None

    @property
    def address(self) -> str:
        return f"http://localhost:{self.port}/v1"

    def start(self, words) -> None:
        """Start it by a command's words and wait until it answers; one that runs goes on or, if its words differ, ends.

        Raises:
            AssertionError: the command ended.
            TimeoutError: it does not answer within two minutes.
        """
        if self.words == words:
            return
        self.stop()
        self.words = words
        self.process = programs.start(
            [*python_arguments(words), "--port", self.port],
            self.log,
            self.log,
            Path.cwd(),
            environment(self.folder),
        )
        for _ in range(1200):
            # Ask the server itself: since its port was found, another process may have taken it for a while.
            with suppress(OSError, HTTPException):
                client = HTTPConnection("localhost", self.port, timeout=10)
                client.request("GET", "/health")
                if client.getresponse().status == 200:
                    return
            assert self.process.is_alive(), self.log.read_text()
            time.sleep(0.1)
        raise TimeoutError(self.log.read_text())

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.join(60)
            has_ended = not self.process.is_alive()
            self.process.kill()  # A server that still generates would slow down all other tests.
            assert has_ended


def python_arguments(words: list[str]) -> list[str]:
    """The arguments of Python by which a command runs: `transformers serve …` or `python -c …`."""
    program, *rest = words
    return rest if program == "python" else ["-m", f"{program}.cli.{program}", *rest]


def environment(folder: Path) -> dict[str, str]:
    """This process's environment, with a folder's own place for the code that transformers takes from models."""
    own = {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": os.pathsep.join(sys.path)}
    return os.environ | own


def data_url(content: bytes) -> str:
    """A file's bytes as a client sends a picture."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def asked(question: str, picture: str | None = None) -> list[dict]:
    """Messages that ask about a picture's URL, or without a picture."""
    text = {"type": "text", "text": question}
    pictures = [{"type": "image_url", "image_url": {"url": picture}}] if picture else []
    return [{"role": "user", "content": [*pictures, text]}]
