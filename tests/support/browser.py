"""Run the page of `llamoe chat` in its own process, and use it through Debian's Chromium without a display."""

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
# Chromium's sandbox does not start for root. The options after it keep Chromium from calling its maker's servers.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Milliseconds to wait for an element of the page; long, as other tests may keep the machine busy.
PATIENCE = 60_000


def require_browser():
    """Skip the tests of a module if gradio, playwright or Chromium is missing."""
    for is_there, needed in (
        (find_spec("gradio"), "the page: pip install 'llamoe[page]'"),
        (find_spec("playwright"), "playwright, which drives the browser: pip install playwright"),
        (CHROMIUM, "Chromium: apt-get install chromium"),
    ):
        if not is_there:
            pytest.skip(f"needs {needed}", allow_module_level=True)


class PageServer:
    """A process that runs `llamoe chat` on a free port.

    Attributes:
        address: URL of the page.
        process: the `subprocess.Popen` of the command.
    """

    def __init__(self, folder, *words):
        self.log = Path(tempfile.mkdtemp()) / "log"
        # Without a display the command cannot open a window. The proxy does not answer, so a request to this machine
        # that went through the proxy would fail.
        env = os.environ | {"HTTP_PROXY": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1"}
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "NO_PROXY", "no_proxy"):
            env.pop(name, None)
        command = [sys.executable, "-m", "llamoe", "chat", folder, "--port", free_port(), *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=env)
        for _ in range(1200):
            if match := re.search(r"answers at (http://\S+)", self.log.read_text()):
                self.address = match[1]
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.process.kill()
        raise AssertionError(self.log.read_text())

    def seconds_of_work(self):
        """Return the processor time of the command so far, in seconds (Linux only)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        self.process.terminate()
        self.process.wait(60)
        shutil.rmtree(self.log.parent)


@contextmanager
def chromium():
    """Yield playwright's browser, without a display."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


class ChatWindow:
    """A window with the page, and what a person does in it.

    Attributes:
        page: playwright's page.
        requests: URLs that the page has requested.
    """

    def __init__(self, browser, address, width=1100, height=1000):
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(PATIENCE)
        self.requests = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#question textarea")

    def drop(self, *pictures):
        """Drop picture files on the box of the question, and wait until they are uploaded."""
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
        """Set the largest number of tokens of an answer; *Settings* must be open."""
        # While the page sets the field up, it forgets what is typed. Type until the slider beside it shows the number.
        for _ in range(100):
            self.page.locator("#length input[type=number]").fill(str(tokens))
            self.page.locator("#length input[type=number]").press("Tab")
            if self.page.locator("#length input[type=range]").input_value() == str(tokens):
                return
            time.sleep(0.1)
        raise AssertionError("the page does not take the length")

    def answers(self):
        """Return the texts of all answers."""
        texts = self.page.locator("#conversation .bot .message-content").all_inner_texts()
        return [text.strip() for text in texts]

    def wait_for_answer(self, count=1):
        """Wait until the answer number `count` is complete, and return its text."""
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

    def wait_for_text(self, selector, text):
        """Wait until the first element of a selector contains a text; the failure says what the element shows."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector).first).to_contain_text(text, timeout=PATIENCE)
