"""Find the Markdown pages of the repository and the blocks of code in them."""

import re
from dataclasses import dataclass

from support.paths import ROOT

PAGES = ["README.md", "CONTRIBUTING.md"] + sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
)
NOT_RUN = "# Not run by the tests: "
"""First words of a block that tests cannot run; the reason follows them."""


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: path of the page in the repository.
        line: number of the block's first line in the page.
        language: the word after the opening fence.
        code: the text between the fences.
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
        """The commands of a shell block, without comments; continued lines are joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """Return all fenced blocks of a page."""
    text = read(page)
    return [
        Block(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2])
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub and mkdocs make of a page's headings."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
