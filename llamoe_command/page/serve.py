"""Starts the page: what can be wrong is checked before the weights are read."""

import errno
import os
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

# The page's library would tell its makers of every start, and ask for newer versions of itself.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from .chat_model import ChatModel
from .layout import make_page

FIRST_PORT = 7860
_NUM_PORTS = 100
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
MAX_FILE_SIZE = "20mb"
"""Largest file that can be dropped on the page."""

MAX_WAITING = 32
"""Questions that wait for those before them; more are refused."""

# Fonts of the system: others would come from the network.
_FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


def serve(
    folder: Path,
    host: str = "127.0.0.1",
    port: int | None = None,
    dtype: str = "auto",
    device_map: str = "auto",
    pictures: Sequence[Path] = (),
    open_browser: bool = True,
) -> None:
    """Load a model and show its page until the process is interrupted.

    Args:
        folder: of the model.
        host: address to listen on; the default is reached from this machine alone.
        port: number, 0 for any free one; the default is the first free one from 7860 on.
        dtype, device_map: as in `from_pretrained`.
        pictures: to click on.
        open_browser: whether to open the page, where there is a display.

    Raises:
        CheckpointError, OSError, ValueError: the folder cannot be loaded, or the port is taken.
    """
    port = find_port(host, port)
    chat = ChatModel(folder, dtype, device_map)
    page = make_page(chat, pictures if chat.sees_pictures else ())
    page.queue(max_size=MAX_WAITING, default_concurrency_limit=1)
    page.launch(
        server_name=host,
        server_port=port,
        max_file_size=MAX_FILE_SIZE,
        allowed_paths=[str(path.resolve()) for path in pictures],
        theme=gr.themes.Default(**_FONTS),
        share=False,
        quiet=True,
        prevent_thread_lock=True,
    )
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    address = f"http://{shown}:{port}"
    print(f"{chat.name} answers at {address} (end with Ctrl-C)", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(f"llamoe: everybody who reaches {host} can use the page", file=sys.stderr)
    if open_browser and has_display():
        webbrowser.open(address)
    try:
        page.block_thread()
    finally:
        page.close(verbose=False)


def find_port(host: str, port: int | None) -> int:
    """A port that is free now.

    Raises:
        ValueError: it is taken, all are, or the host is none of this machine's.
    """
    if port is not None:
        found = _bind(host, port)
        if found is None:
            raise ValueError(
                f"port {port} is taken on {host}; give another one, or --port 0 for any free one."
            )
        return found
    for candidate in range(FIRST_PORT, FIRST_PORT + _NUM_PORTS):
        if _bind(host, candidate) is not None:
            return candidate
    last = FIRST_PORT + _NUM_PORTS - 1
    raise ValueError(f"ports {FIRST_PORT} to {last} are taken on {host}; --port 0 takes any free one.")


def _bind(host: str, port: int) -> int | None:
    """The port, or for 0 a free one; None where it is taken."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise ValueError(f"{host}:{port} is no address of this machine ({error}).") from error
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except PermissionError as error:
            raise ValueError(
                f"port {port} needs the rights of an administrator; give one above 1023."
            ) from error
        except OSError as error:
            if error.errno in _NOT_HERE:
                raise ValueError(
                    f"{host} is no address of this machine; the default is 127.0.0.1."
                ) from error
            return None
        return listener.getsockname()[1]


def has_display() -> bool:
    """Whether a browser with windows can open here; on a terminal alone another kind might, and block it."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
