"""The pages for people, and the blocks of code in them."""

import re
from dataclasses import dataclass

from support.paths import ROOT

PAGES = ["README.md", "CONTRIBUTING.md"] + sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
)
NOT_RUN = "# Not run by the tests: "
"""How a block begins that needs what a test has not; the reason follows, for readers, too."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: path of the page in the repository.
        line: number of its first line in the page.
        language: word behind the fence.
        code: the block's text.
    """

    page: str
    line: int
    language: str
    code: str

    @property
    def is_run(self) -> bool:
        return not self.code.startswith(NOT_RUN)

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones joined, without those that are comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    text = read(page)
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[1], found[2])
        for found in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def anchors(page: str) -> set[str]:
    """The headings of a page, as GitHub and the built pages name them."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
