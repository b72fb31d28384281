"""Start the page of `llamoe chat`, and keep it open until the process is interrupted."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import Any

# Otherwise gradio reports every start to its developers, and looks for newer versions.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from .chat_model import ChatModel
from .layout import make_page

MAX_FILE_SIZE = "20mb"
"""Largest file that can be dropped on the page."""

# Fonts of the system; gradio's own fonts are loaded from the network.
_FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


def serve(
    folder: Path,
    host: str,
    port: int | None,
    placement: dict[str, Any],
    *,
    adapter: Path | None,
    open_browser: bool,
) -> None:
    """Load a model, and serve its page until the process is interrupted.

    Args:
        folder: folder of the model.
        host: address to listen on.
        port: port to listen on; None for the first free one from 7860 on.
        placement: dtype, device_map and experts_memory, as in `from_pretrained`.
        adapter: folder of an adapter, which the page can switch off.
        open_browser: whether to open the page in a browser, if there is a display.

    Raises:
        CheckpointError, OSError, ValueError: the folder cannot be loaded, or the port is in use.
    """
    chat = ChatModel(folder, **placement, adapter=adapter)
    page = make_page(chat)
    # gradio sends a request to its own address when it starts. That request must not go through a proxy.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))
    _, address, _ = page.launch(
        server_name=f"[{host}]" if ":" in host else host,
        server_port=port,
        max_file_size=MAX_FILE_SIZE,
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
        print(f"llamoe: everybody who can connect to {host} can use the page", file=sys.stderr)
    # Without a display Python may start a text browser, which blocks the terminal.
    if open_browser and (sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        webbrowser.open(address)
    try:
        page.block_thread()
    finally:
        page.close(verbose=False)
