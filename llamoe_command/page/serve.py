"""Starts the page and keeps it open until the process is interrupted."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The page's library would report every start to its makers, and look for newer versions of itself.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

import llamoe

from .chat_model import ChatModel
from .layout import make_page

MAX_FILE_SIZE = "20mb"
"""Largest file that can be dropped on the page."""

# Fonts of the system: others would come from the network.
_FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


def serve(
    folder: Path,
    host: str,
    port: int | None,
    placement: dict[str, Any],
    *,
    adapter: Path | None,
    pictures: Sequence[Path],
    open_browser: bool,
) -> None:
    """Load a model and show its page until the process is interrupted.

    Args:
        folder: of the model.
        host: address to listen on.
        port: None for the first free one from 7860 on.
        placement: dtype, device_map and experts_memory, as in `from_pretrained`.
        adapter: folder of an adapter, which the page lets one switch on and off.
        pictures: to click on.
        open_browser: whether to open the page, where there is a display.

    Raises:
        CheckpointError, OSError, ValueError: the folder or a picture cannot be loaded, the model sees no pictures, or
            the port is taken.
    """
    for path in pictures:
        llamoe.read_picture(path)
    chat = ChatModel(folder, **placement, adapter=adapter)
    if pictures and not chat.sees_pictures:
        raise ValueError(f"{folder} has no vision tower, so its page takes no --picture.")
    page = make_page(chat, pictures)
    # The page's library requests its own address when it starts, which must not go through a proxy.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))
    _, address, _ = page.launch(
        server_name=f"[{host}]" if ":" in host else host,
        server_port=port,
        max_file_size=MAX_FILE_SIZE,
        allowed_paths=[str(path.resolve()) for path in pictures],
        theme=gr.themes.Default(**_FONTS),
        footer_links=[],
        run_history=False,
        share=False,
        quiet=True,
        show_error=True,
        prevent_thread_lock=True,
    )
    print(f"{chat.name} answers at {address.rstrip('/')} (end with Ctrl-C)", flush=True)
    if host not in ("127.0.0.1", "localhost"):
        print(f"llamoe: everybody who reaches {host} can use the page", file=sys.stderr)
    # Without a display a text browser would block the terminal.
    if open_browser and (sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        webbrowser.open(address)
    try:
        page.block_thread()
    finally:
        page.close(verbose=False)
