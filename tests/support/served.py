"""Run transformers' server in its own process, and write what clients send to it."""

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
    """Return a port that no process uses now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Server:
    """Runs `transformers serve` on a free port, in the working directory.

    Args:
        folder: where the server writes its log and the code of models' folders.
    """

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "log"
        self.port, self.process, self.words = free_port(), None, None

    @property
    def address(self) -> str:
        return f"http://localhost:{self.port}/v1"

    def start(self, words) -> None:
        """Start the server by a command's words, and wait until it answers.

        A running server that was started with the same words is kept; a server with other words is stopped first.

        Raises:
            AssertionError: the command has ended.
            TimeoutError: the server does not answer within two minutes.
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
            # An open port is not enough: another process may have taken it since it was found to be free.
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
            # A server that goes on generating would slow down all other tests.
            self.process.kill()
            assert has_ended


def python_arguments(words: list[str]) -> list[str]:
    """Return the arguments by which Python runs the command `transformers serve …` or `python -c …`."""
    program, *rest = words
    return rest if program == "python" else ["-m", f"{program}.cli.{program}", *rest]


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment, with a cache in `folder` for the code that models' folders contain."""
    own = {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": os.pathsep.join(sys.path)}
    return os.environ | own


def data_url(content: bytes) -> str:
    """Return the data URL by which a client sends a picture's file."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def asked(question: str, picture: str | None = None) -> list[dict]:
    """Return the chat messages of a question, about the picture at a URL if given."""
    text = {"type": "text", "text": question}
    pictures = [{"type": "image_url", "image_url": {"url": picture}}] if picture else []
    return [{"role": "user", "content": [*pictures, text]}]
