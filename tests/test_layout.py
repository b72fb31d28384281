"""The library folders stand at the root: nothing but these tests keeps packaging and disk together."""

import ast
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

# Dependencies run one way: a folder imports only those that stand before it.
FRONT = ("llamoe", "llamoe_command")
ROOMS = ("configuration", "serving", "modeling", "planning", "conversion")
LIBRARY = [folder for folder in ROOMS if (ROOT / folder).is_dir()]


def library_files(folder):
    return [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def package_of(folder):
    """The dotted name of a folder on disk, as it is when installed."""
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts if parts[0].startswith("llamoe") else ("llamoe", *parts))


def imported_modules(path):
    """Absolute names of the modules that a library file imports, wherever in the file that happens."""
    package = package_of(path.parent).split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_package_on_disk_is_packaged():
    on_disk = {
        package_of(path.parent) for f in (*FRONT, *LIBRARY) for path in (ROOT / f).rglob("__init__.py")
    }
    assert on_disk == set(SETUPTOOLS["packages"])


def test_every_library_folder_is_a_package():
    folders = {path.parent for f in (*FRONT, *LIBRARY) for path in library_files(f) if path.suffix == ".py"}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_data_file_is_packaged():
    forgotten = [
        str(path.relative_to(ROOT))
        for folder in (*FRONT, *LIBRARY)
        for path in library_files(folder)
        if path.suffix != ".py"
        and not any(
            fnmatch(str(path.relative_to(parent)), glob)
            for parent in path.parents
            if ROOT in parent.parents
            for glob in SETUPTOOLS["package-data"].get(package_of(parent), [])
        )
    ]
    assert forgotten == []


def test_every_library_folder_is_mapped():
    folders = [path.parent.relative_to(ROOT) for f in LIBRARY for path in (ROOT / f).rglob("__init__.py")]
    assert SETUPTOOLS["package-dir"] == {package_of(ROOT / folder): str(folder) for folder in folders}


def test_root_and_tests_are_no_packages():
    """With a root `__init__.py`, pytest imports everything twice; one in tests/ makes a `llamoe.tests`."""
    assert not (ROOT / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_tests_mirror_the_rooms():
    """Who looks for the tests of a room finds a folder of its name; in `tools` others' programs take our models."""
    rooms = {
        str(path.parent.relative_to(ROOT))
        for f in (*LIBRARY, "llamoe_command")
        for path in (ROOT / f).rglob("__init__.py")
    }
    tests = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    folders = {str(folder) for path in tests for folder in path.parents}
    assert folders - {".", "examples", "fuzz", "tools"} == rooms


def test_llamoe_holds_nothing_but_its_front_door():
    assert {path.name for path in library_files("llamoe")} == {"__init__.py", "__main__.py", "py.typed"}


@pytest.mark.parametrize("folder", LIBRARY)
def test_dependencies_run_one_way(folder):
    forbidden = [f"llamoe.{later}" for later in LIBRARY[LIBRARY.index(folder) + 1 :]]
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in library_files(folder)
        if path.suffix == ".py"
        for module in imported_modules(path)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    }
    assert not wrong


@pytest.mark.parametrize("folder", ["configuration", "serving"])
def test_what_is_data_imports_no_torch(folder):
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in library_files(folder)
        if path.suffix == ".py"
        for module in imported_modules(path)
        if module.split(".")[0] == "torch"
    }
    assert not wrong


def test_changelog_names_the_version():
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "llamoe/__init__.py").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None
    assert newest is not None
    assert newest[1] == version[1]


# Files that every other file may import, wherever it stands.
FOR_ALL = ("_compat", "_private_api")
PACKAGES = sorted(
    str(path.parent.relative_to(ROOT)) for f in LIBRARY for path in (ROOT / f).rglob("__init__.py")
)


@pytest.mark.parametrize("folder", LIBRARY)
def test_nobody_uses_private_names_of_another_folder(folder):
    """A name with an underscore belongs to the folder that it stands in; what others use has none.

    `_compat` and `_private_api` are for all: their underscore tells users that they are not for them.
    """
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in library_files(folder)
        if path.suffix == ".py"
        for module in imported_modules(path)
        if (owner := re.sub(r"\._(compat|private_api)", "", module).rpartition("._")[0])
        and module.startswith("llamoe.")
        and not package_of(path.parent).startswith(owner)
        and owner not in (f"{package_of(path.parent)}.{file.stem}" for file in path.parent.glob("*.py"))
    }
    assert not wrong


@pytest.mark.parametrize("folder", PACKAGES)
def test_files_import_only_what_stands_before_them(folder):
    """In the order that the folder's `__init__` gives, after its words "in this order" or "Reading order".

    A folder inside stands there as a file does, and has an order of its own.
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
        for place, name in enumerate(order)
        for path in files[name]
        for module in imported_modules(path)
        if module.startswith(f"{package}.")
        and (base := module.removeprefix(f"{package}.").split(".")[0]) in order[place + 1 :]
        and base not in FOR_ALL
    }
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "most_rooms", "most_imports"), [("modeling", 21, 66), ("conversion", 17, 67)]
)
def test_rooms_are_few_and_import_few_others(folder, most_rooms, most_imports):
    """Rooms and files at a folder's top level, and the pairs of them of which one imports the other.

    The files that are for all, `FOR_ALL`, count as rooms, but not what imports them.
    """
    package = package_of(ROOT / folder)
    pairs, rooms = set(), set()
    for path in library_files(folder):
        if path.suffix == ".py" and path != ROOT / folder / "__init__.py":
            room = path.relative_to(ROOT / folder).parts[0].removesuffix(".py")
            rooms.add(room)
            for module in imported_modules(path):
                if module.startswith(f"{package}."):
                    pairs.add((room, module.removeprefix(f"{package}.").split(".")[0]))
    imports = {(room, other) for room, other in pairs if other in rooms - {room, *FOR_ALL}}
    assert len(rooms) <= most_rooms, sorted(rooms)
    assert len(imports) <= most_imports, sorted(imports)
