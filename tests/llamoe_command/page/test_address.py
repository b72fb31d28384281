"""A free port, told before anything is loaded, and the address that a browser takes."""

import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
from support import chat_folders
from support.paths import EXAMPLES, TINY

from llamoe_command import cli
from llamoe_command.page import address
from llamoe_command.page.address import FIRST_PORT, find_port, has_display, is_loopback, url_of

pytestmark = pytest.mark.slow


@contextmanager
def taken(port=0, host="127.0.0.1"):
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_asked_for_must_be_free():
    with (
        taken() as port,
        pytest.raises(ValueError, match=f"port {port} is taken on 127.0.0.1; give another one"),
    ):
        find_port("127.0.0.1", port)
    assert find_port("127.0.0.1", port) == port
    assert find_port("127.0.0.1", 0) > 1023


def test_the_first_free_port_is_found():
    first = find_port("127.0.0.1", None)
    assert first >= FIRST_PORT
    with taken(first):
        assert find_port("127.0.0.1", None) > first


def test_a_hundred_taken_ports_are_told(monkeypatch):
    monkeypatch.setattr(address, "_bind", lambda host, port: None)
    with pytest.raises(ValueError, match=f"ports {FIRST_PORT} to {FIRST_PORT + 99} are taken"):
        find_port("127.0.0.1", None)


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "999.1.1.1"])
def test_a_host_of_another_machine_is_refused(host):
    with pytest.raises(ValueError, match=f"{host}.* is not an address of this machine"):
        find_port(host, 0)


def test_addresses_are_those_of_a_browser():
    assert url_of("127.0.0.1", 7860) == "http://127.0.0.1:7860"
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert url_of("::", 1) == url_of("::1", 1) == "http://[::1]:1"
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "127.3.2.1", "0.0.0.0")] == [
        True
    ] * 3 + [False]


def test_without_a_display_no_browser_is_opened(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not has_display()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert has_display()


@pytest.mark.skipif(
    find_spec("gradio") is None, reason="the page is not installed: pip install 'llamoe[page]'"
)
def test_what_is_wrong_with_the_command_is_told_before_anything_is_loaded(tmp_path):
    (tmp_path / "text").mkdir()
    with taken() as port:
        cases = {
            ("nowhere",): "nowhere: no such file or folder",
            (str(tmp_path / "text"),): "is not a model folder: it has no config.json",
            (str(TINY), "--picture", "none.png"): "none.png: no such file or folder",
            (str(TINY), "--port", str(port)): f"port {port} is taken",
            (str(TINY), "--host", "203.0.113.7"): "203.0.113.7 is not an address of this machine",
        }
        code = f"""
import contextlib, io, sys
from llamoe_command.cli import main
for words, says in {cases}.items():
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            main(["chat", *words])
        except SystemExit as end:
            assert end.code == 2, words
    assert says in told.getvalue() and told.getvalue().count("\\n") == 1, (words, told.getvalue())
    assert not {{"torch", "gradio", "llamoe"}} & set(sys.modules), words
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def chat(capsys, *words):
    pytest.importorskip("gradio", reason="the page is not installed: pip install 'llamoe[page]'")
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", *map(str, words), "--port", "0", "--quiet"])
    return end.value.code, capsys.readouterr().err


def test_a_folder_or_picture_that_does_not_fit_ends_the_command_with_a_sentence(tmp_path, capsys):
    blind = chat_folders.copy_tiny(tmp_path / "blind", "processor_config.json")
    status, told = chat(capsys, blind)
    assert status == 2 and re.search(
        r"^llamoe: .*sees pictures, but no processor: .*\n\Z", told, re.MULTILINE
    )
    (tmp_path / "text.png").write_text("no picture")
    status, told = chat(capsys, TINY, "--picture", tmp_path / "text.png")
    assert status == 2 and "text.png: is not a picture" in told
    llama = chat_folders.write_llama(tmp_path / "llama")
    status, told = chat(capsys, llama, "--picture", EXAMPLES / "pictures" / "two_shapes.png")
    assert status == 2 and "has no vision tower, so its page takes no --picture" in told
    plan = tmp_path / "plan.json"
    for content in ("[", "{}", '{"device_map": {"": "cpu"}, "weights": 1}'):
        plan.write_text(content)
        status, told = chat(capsys, llama, "--plan", plan)
        assert status == 2 and "Give what `llamoe inspect FOLDER --plan --save FILE` wrote." in told
    status, told = chat(capsys, llama, "--plan", plan, "--experts-memory", "1MB")
    assert status == 2 and "leave --device-map and --experts-memory out" in told
