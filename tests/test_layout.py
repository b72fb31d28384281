"""Test that imports between the library's folders run one way, and that no folder uses another's private names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Dependencies run one way: a folder imports only those that stand before it.
LIBRARY = ("configuration", "serving", "modeling", "planning", "conversion")
# Files that every other file may import, wherever it stands.
FOR_ALL = ("_compat", "_private_api")
PACKAGES = sorted(
    str(path.parent.relative_to(ROOT)) for f in LIBRARY for path in (ROOT / f).rglob("__init__.py")
)


def package_of(folder):
    """Return the dotted name under which a folder is installed."""
    return ".".join(("llamoe", *folder.relative_to(ROOT).parts))


def imported_modules(path):
    """Return the absolute names of all modules that a library file imports, also inside of functions."""
    package = package_of(path.parent).split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(folder):
    """Return pairs of a file of a library folder and a module that it imports."""
    return [(path, module) for path in (ROOT / folder).rglob("*.py") for module in imported_modules(path)]


def is_in(module, *packages):
    """Return True if a module is one of these packages, or inside of one."""
    return any(module == name or module.startswith(f"{name}.") for name in packages)


@pytest.mark.parametrize("folder", LIBRARY)
def test_dependencies_run_one_way(folder):
    forbidden = [f"llamoe.{later}" for later in LIBRARY[LIBRARY.index(folder) + 1 :]]
    if folder in ("configuration", "serving"):
        forbidden.append("torch")
    assert [(path, module) for path, module in imports_of(folder) if is_in(module, *forbidden)] == []


@pytest.mark.parametrize("folder", LIBRARY)
def test_private_names_stay_in_their_folder(folder):
    """All folders may use `_compat` and `_private_api`, whose underscore keeps users away."""
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path, module in imports_of(folder)
        if (owner := re.sub(r"\._(compat|private_api)", "", module).rpartition("._")[0])
        and module.startswith("llamoe.")
        and not package_of(path.parent).startswith(owner)
        and owner not in (f"{package_of(path.parent)}.{file.stem}" for file in path.parent.glob("*.py"))
    }
    assert not wrong


@pytest.mark.parametrize("folder", PACKAGES)
def test_files_import_only_earlier_files(folder):
    """The order stands in the folder's `__init__`, after the words "in this order" or "Reading order".

    A subfolder is listed like a file, and has an order of its own.
    """
    package = package_of(ROOT / folder)
    files = {path.stem: [path] for path in (ROOT / folder).glob("*.py")} | dict.fromkeys(FOR_ALL, [])
    for path in (ROOT / folder).glob("*/__init__.py"):
        files[path.parent.name] = list(path.parent.rglob("*.py"))
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    text = re.split(r"in this order|Reading order", text)[1]
    order = list(dict.fromkeys(word for word in re.findall(r"\w+", text) if word in files))
    assert set(files) - {"__init__", *FOR_ALL} <= set(order), "files that the list does not name"
    wrong = {
        f"{name} imports {module}"
        for number, name in enumerate(order)
        for path in files[name]
        for module in imported_modules(path)
        if module.startswith(f"{package}.")
        and (base := module.removeprefix(f"{package}.").split(".")[0]) in order[number + 1 :]
        and base not in FOR_ALL
    }
    assert not wrong


def test_changelog_names_the_version():
    """A section above it may be marked as unreleased."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "llamoe/__init__.py").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == version[1]
