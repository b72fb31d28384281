"""Checks the built pages in site/: nothing loads from the network, links have targets, `__all__`'s names are described.

python .ci/check_pages.py site
"""

import ast
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of an HTML page, its links, and the addresses that it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        """Collect an element's anchors, its links, and addresses that a browser loads by itself."""
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.loaded |= {given["src"]} if given.get("src") else set()
        if given.get("href"):
            (self.loaded if tag == "link" else self.links).add(given["href"])


def names(init: str | Path) -> list[str]:
    """Return the `__all__` of a package's `__init__.py`."""
    for node in ast.parse(Path(init).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise SystemExit(f"{init} has no __all__")


def main(site: Path) -> int:
    """Print all faults of the pages in `site`; return 1 if there are any, else 0."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        wrong += [f"{path}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        # Skip 404.html: a server shows it at any address, so its links begin at the site's root.
        for url in page.links | page.loaded if path.name != "404.html" else ():
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                wrong.append(f"{path}: {url} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{path}: {url} names no heading of its page")
    # Only an anchor's last part counts: a page may describe `convert` as llamoe.conversion.convert.convert.
    described = {
        anchor.rpartition(".")[2]
        for path, page in pages.items()
        for anchor in page.anchors
        if path.parent.name == "api"
    }
    for package, init in (
        ("llamoe", "llamoe/__init__.py"),
        ("llamoe.configuration", "configuration/__init__.py"),
        ("llamoe.serving", "serving/__init__.py"),
        ("llamoe.planning", "planning/__init__.py"),
        ("llamoe.conversion", "conversion/__init__.py"),
    ):
        wrong += [
            f"{package}.{name} is described on no page" for name in names(init) if name not in described
        ]
    print("\n".join(wrong) or f"{len(pages)} pages: every link and name holds")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
