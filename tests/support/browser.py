"""The page of `llamoe chat` in a process of its own, and Debian's Chromium, without a window, that looks at it."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from .served import free_port

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# The sandbox wants a user other than root. The others keep Chromium from asking its maker's servers.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# For a page's elements, on a machine that does other things besides.
PATIENCE = 60_000


def require_browser():
    """Skip the tests of a module where they cannot run."""
    for is_there, needed in (
        (find_spec("gradio"), "the page: pip install 'llamoe[page]'"),
        (find_spec("playwright"), "playwright, which drives the browser: pip install playwright"),
        (CHROMIUM, "Chromium: apt-get install chromium"),
    ):
        if not is_there:
            pytest.skip(f"needs {needed}", allow_module_level=True)


class PageServer:
    """A running `llamoe chat`.

    Attributes:
        address: of the page.
        process: a `subprocess.Popen`.
    """

    def __init__(self, folder, *words):
        self.log = Path(tempfile.mkdtemp()) / "log"
        # No display: nothing may try to open a window. And a proxy that answers nobody, as in some offices: nothing may
        # ask it for this machine.
        env = os.environ | {"HTTP_PROXY": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1"}
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "NO_PROXY", "no_proxy"):
            env.pop(name, None)
        command = [sys.executable, "-m", "llamoe", "chat", folder, "--port", free_port(), *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=env)
        for _ in range(1200):
            if found := re.search(r"answers at (http://\S+)", self.log.read_text()):
                self.address = found[1]
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.process.kill()
        raise AssertionError(self.log.read_text())

    def seconds_of_work(self):
        """Processor time that the process has taken; only on Linux."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        self.process.terminate()
        self.process.wait(60)
        shutil.rmtree(self.log.parent)


@contextmanager
def chromium():
    """A browser; `new_page` opens a window that nobody sees."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


class ChatWindow:
    """The page as a person sees and uses it.

    Attributes:
        page: playwright's page.
        requests: addresses that it has loaded.
    """

    def __init__(self, browser, address, width=1100, height=1000):
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(PATIENCE)
        self.requests = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#question textarea")

    def drop(self, *pictures):
        """Drop pictures on the box of the question, and wait until they are sent."""
        with self.page.expect_response(lambda response: "/upload" in response.url):
            self.page.locator("#question input[type=file]").first.set_input_files(
                [str(path) for path in pictures]
            )

    def ask(self, text, *pictures):
        """Type a question, drop pictures beside it, send it."""
        if pictures:
            self.drop(*pictures)
            self.page.locator("#question .thumbnail-item").nth(len(pictures) - 1).wait_for()
        self.page.locator("#question textarea").fill(text)
        self.page.locator("#question .submit-button").click()

    def set_length(self, tokens):
        """Set the longest answer; *Settings* must be open."""
        # A field that is still being set up forgets what is typed: the slider beside it tells what the page has taken.
        for _ in range(100):
            self.page.locator("#length input[type=number]").fill(str(tokens))
            self.page.locator("#length input[type=number]").press("Tab")
            if self.page.locator("#length input[type=range]").input_value() == str(tokens):
                return
            time.sleep(0.1)
        raise AssertionError("the page does not take the length")

    def answers(self):
        """Texts of all answers."""
        texts = self.page.locator("#conversation .bot .message-content").all_inner_texts()
        return [text.strip() for text in texts]

    def wait_for_answer(self, count=1):
        """The text of an answer that is complete."""
        self.page.wait_for_function(
            """count => {
                const answers = document.querySelectorAll("#conversation .bot .message-content");
                const isOver = !document.querySelector("#question .stop-button, #question textarea:disabled");
                return isOver && answers.length >= count && answers[count - 1].innerText != "Loading content";
            }""",
            arg=count,
        )
        return self.answers()[count - 1]

    def wait_for_some_text(self):
        """Wait until the first answer has begun."""
        self.page.wait_for_function(
            """() => {
                const answer = document.querySelector("#conversation .bot .message-content");
                return answer && !["", "Loading content"].includes(answer.innerText.trim());
            }"""
        )

    def wait_for_text(self, place, text):
        """Wait until an element shows a text, or fail with what it shows."""
        from playwright.sync_api import expect

        expect(self.page.locator(place).first).to_contain_text(text, timeout=PATIENCE)
