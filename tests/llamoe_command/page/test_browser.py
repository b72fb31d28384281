"""Test the page in a browser: it shows answers about pictures and their experts, and keeps running after errors."""

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image
from support import chat_folders
from support.browser import ChatWindow, PageServer, chromium, require_browser
from support.chat_folders import ABOUT_THREE, ABOUT_TWO, QUESTION, THREE, TWO
from support.paths import TINY

require_browser()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tiny():
    server = PageServer(TINY)
    yield server
    server.close()


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """Serve a dense model that is large enough to need minutes for 4,096 tokens."""
    folder = tmp_path_factory.mktemp("chat") / "llama"
    chat_folders.write_llama(folder, hidden_size=768, num_hidden_layers=8, max_position_embeddings=8192)
    server = PageServer(folder)
    yield server
    server.close()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Serve a mixture with an adapter, whose answers take minutes."""
    folder = tmp_path_factory.mktemp("chat")
    sizes = dict(hidden_size=384, num_hidden_layers=4, max_position_embeddings=8192)
    chat_folders.write_adapter(chat_folders.write_mixtral(folder / "mixtral", **sizes), folder / "adapter")
    server = PageServer(folder / "mixtral", "--adapter", folder / "adapter")
    yield server
    server.close()


@pytest.fixture
def window(browser, tiny):
    window = ChatWindow(browser, tiny.address)
    yield window
    window.page.close()


def loaded_sizes(locator):
    """Return the widths of pictures in the browser; 0 for a picture that the browser cannot decode."""
    return [
        image.evaluate("image => image.decode().then(() => image.naturalWidth, () => 0)")
        for image in locator.all()
    ]


def test_a_picture_gets_an_answer_and_its_experts_are_shown(window):
    window.ask(QUESTION, THREE)
    assert window.wait_for_answer() == ABOUT_THREE
    window.page.get_by_role("tab", name="Experts").click()
    window.wait_for_text("#answered", "triangle")
    # The picture, and a mask over it for each expert that computed a part of it.
    window.page.locator("#overlay img").nth(1).wait_for()
    sizes = loaded_sizes(window.page.locator("#overlay img"))
    assert len(sizes) >= 2 and min(sizes) >= 480
    assert min(loaded_sizes(window.page.locator("#load img"))) > 300
    assert "expert 2" in window.page.locator("#overlay").inner_text()
    window.wait_for_text("#table", "triangle")
    assert re.search(r"\d \(0\.\d\d\)", window.page.locator("#table").inner_text())

    # Another layer shows other experts.
    def overlay():
        return [image.get_attribute("src") for image in window.page.locator("#overlay img").all()]

    before = overlay()
    window.page.locator("#layer input").click()
    window.page.get_by_role("option", name="layer 3").click()
    for _ in range(100):
        if len(overlay()) >= 2 and overlay()[1:] != before[1:]:
            break
        time.sleep(0.1)
    assert overlay()[1:] != before[1:]


def test_the_conversation_goes_on(window):
    window.ask(QUESTION, TWO)
    assert window.wait_for_answer() == ABOUT_TWO
    window.ask("How many shapes are there?")
    assert window.wait_for_answer(2)
    assert window.answers()[0] == ABOUT_TWO


def test_settings_reach_the_model(window):
    window.page.get_by_text("Settings").click()
    window.set_length(3)
    window.ask(QUESTION, TWO)
    assert window.wait_for_answer() == "a red circle"


def test_nothing_comes_from_the_network(window, tiny):
    window.ask(QUESTION, TWO)
    window.wait_for_answer()
    assert len(window.requests) > 10
    assert {url for url in window.requests if not url.startswith((tiny.address, "data:", "blob:"))} == set()


@pytest.fixture
def broken(tmp_path):
    """Return a folder of files that are no valid pictures."""
    whole = TWO.read_bytes()
    (tmp_path / "text.png").write_text("I am no picture. " * 9)
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (20_000, 20_000)).save(tmp_path / "huge.png")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("text.png", "text.png: is not a picture, or of another format; expected a JPEG"),
        ("cut.png", "cut.png: is not a picture, or of another format"),
        ("huge.png", "huge.png: is not a picture, or of another format"),
    ],
)
def test_a_broken_picture_is_reported_and_the_page_goes_on(window, broken, name, says):
    window.ask(QUESTION, broken / name)
    window.wait_for_text("#question", says)
    assert str(broken) not in window.page.content()
    window.page.reload()
    window.page.wait_for_selector("#question textarea")
    window.ask(QUESTION, TWO)
    assert window.wait_for_answer() == ABOUT_TWO


def test_a_file_that_is_too_large_is_refused(window, tmp_path):
    (tmp_path / "large.png").write_bytes(os.urandom(21_000_000))
    window.page.locator("#question input[type=file]").first.set_input_files(tmp_path / "large.png")
    window.wait_for_text(".toast-body", "exceed the maximum allowed size of 20")
    window.ask(QUESTION, TWO)
    assert window.wait_for_answer() == ABOUT_TWO


def test_an_empty_question_is_reported(window):
    window.ask("  ", TWO)
    window.wait_for_text("#question", "The question is empty")


def test_a_conversation_that_is_too_long_is_reported(window):
    window.ask("shape " * 600)
    assert "and the model has 512 positions" in window.wait_for_answer()
    # The question without an answer does not count as part of the conversation.
    window.ask(QUESTION, TWO)
    assert window.wait_for_answer(2) == ABOUT_TWO


# Models whose answers take minutes


def idle(server):
    """Return True if the server stops computing within half a minute."""
    for _ in range(30):
        before = server.seconds_of_work()
        time.sleep(1)
        if server.seconds_of_work() - before < 0.3:
            return True
    return False


def begin_endless_answer(browser, server):
    window = ChatWindow(browser, server.address)
    window.page.get_by_text("Settings").click()
    window.set_length(4096)
    window.ask("Hello")
    window.wait_for_some_text()
    return window


def test_a_text_model_has_the_page_without_pictures_and_experts(browser, endless):
    window = ChatWindow(browser, endless.address)
    assert window.page.locator("input[type=file]").count() == 0
    assert window.page.get_by_role("tab", name="Experts").count() == 0
    window.page.close()


def test_stop_stops_the_model(browser, endless):
    window = begin_endless_answer(browser, endless)
    assert not idle_now(endless)
    window.page.locator("#question .stop-button").click()
    assert idle(endless)
    assert 0 < len(window.answers()[0])
    window.set_length(5)
    window.ask("Hello again")
    window.wait_for_answer(2)
    window.page.close()


def test_an_adapter_is_switched_off_on_the_page(browser, mixture):
    window = ChatWindow(browser, mixture.address)
    window.page.get_by_text("Settings").click()
    window.set_length(9)
    window.ask("Hello")
    adapted = window.wait_for_answer()
    window.page.locator("#adapter input").click()
    window.page.locator("#conversation button[aria-label='Clear']").first.click()
    window.ask("Hello")
    assert window.wait_for_answer() != adapted
    window.page.close()


def idle_now(server):
    before = server.seconds_of_work()
    time.sleep(1)
    return server.seconds_of_work() - before < 0.3


def test_a_closed_window_stops_the_model(browser, endless):
    window = begin_endless_answer(browser, endless)
    assert not idle_now(endless)
    window.page.close()
    assert idle(endless)


def test_questions_at_once_are_answered_one_after_the_other(browser, endless):
    from gradio_client import Client

    def ask(index):
        # Each client has a conversation of its own, whose question waits for those of the others.
        client = Client(endless.address, verbose=False, httpx_kwargs={"timeout": 120})
        return str(client.predict(f"Question {index}", 30, 0.0, api_name="/chat"))

    with ThreadPoolExecutor(20) as people:
        assert all(people.map(ask, range(20)))
    window = ChatWindow(browser, endless.address)
    window.page.get_by_text("Settings").click()
    window.set_length(5)
    window.ask("And now?")
    assert window.wait_for_answer()
    window.page.close()


# The command


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ctrl_c_ends_it(tmp_path, host):
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    folder = chat_folders.write_mixtral(tmp_path / "mixtral")
    (tmp_path / "plan.json").write_text('{"device_map": {"experts": "disk"}, "experts_memory": 1000000}')
    server = PageServer(folder, "--host", host, "--plan", tmp_path / "plan.json")
    with socket.create_connection((host, int(server.address.rpartition(":")[2]))):
        pass
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) in (0, 130)
    assert "Traceback" not in server.log.read_text()
    server.close()
