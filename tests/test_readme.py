"""Test the pages: links work, and commands, files and figures are those of the repository."""

import json
import math
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import programs
from support.documents import PAGES, ROOT, anchors, blocks, read
from typer.main import get_command

import llamoe
from llamoe_command import cli

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARY = ("llamoe", "configuration", "serving", "planning", "conversion")
FOLDERS = (*LIBRARY, "modeling", "tests", "examples", "benchmarks")


def commands():
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                yield from (shlex.split(line, comments=True) for line in block.commands)


def test_first_snippet_prints_the_first_answer(tmp_path):
    """Run it in the repository root, as a reader would; the answer is the one shown in the README."""
    script = tmp_path / "first.py"
    (snippet,) = (block for block in blocks("README.md") if "examples/llamoe-tiny" in block.code)
    script.write_text(snippet.code)
    done = programs.run([script], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"<br>**{done.stdout.strip()}**" in read("README.md")
    # transformers prints a progress bar while it loads.
    assert not re.sub(r"(Loading weights: .*?\]|\s)", "", done.stderr)


def test_differences_from_other_implementations_are_small():
    text = read("README.md")
    rows = re.findall(r"^\| .* \| ([\d.e;, -]+) \|$", text, re.MULTILINE)
    largest = max(float(number) for row in rows for number in row.split("; "))
    assert len(rows) == 7 and largest < 1e-5


def test_what_commands_name_exists():
    """Check make targets, files of the repository, and extras."""
    text = "\n".join(map(read, PAGES))
    words = list(commands())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line[1] for line in words if line[0] == "make"} | set(
        re.findall(r"`make ([a-z-]+)", text)
    ) <= targets
    files = {word for line in words for word in line if re.match(r"(examples|tests|\.ci)/", word)}
    files |= set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", text))
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
    extras = ",".join(re.findall(r"pip install [^`\n]*?\.\[([\w,]+)\]", text)).split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_pages_name_the_lower_bounds(page):
    """Each page names the lower bounds of pyproject.toml."""
    bounds = {"Python": PROJECT["requires-python"].removeprefix(">=")}
    for requirement in PROJECT["dependencies"]:
        name, lowest = re.match(r"([\w-]+)>=(\d+\.\d+(?:\.[1-9]\d*)?)", requirement).groups()
        bounds[name] = lowest
    text = " ".join(read(page).split())
    named = dict(re.findall(r"\b(Python|torch|transformers|accelerate|peft) (\d[\d.]*\d) or newer", text))
    assert named.keys() >= {"Python", "torch", "transformers"}
    assert named == {name: bounds[name] for name in named}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    wrong = []
    for link in re.findall(r"\]\(([^)]+)", read(page)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if "://" in link:
            continue
        if not target.exists():
            wrong.append(link)
        elif anchor and anchor not in anchors(str(target.resolve().relative_to(ROOT.resolve()))):
            wrong.append(link)
    assert wrong == []


def test_readme_stays_short():
    lines = read("README.md").splitlines()
    assert len(lines) <= 120
    assert sum(len(read(page).split()) for page in PAGES if page.startswith("docs/")) <= 12_400


def test_figures_are_those_of_the_results():
    """The README's first figures are in the results that it names."""
    text = read("README.md")
    scout = read("benchmarks/results/published_sizes_llama-4-scout-int4-128.md")
    (tokens,) = re.findall(r"^\| tokens a second \| ([\d.]+) \|", scout, re.MULTILINE)
    assert f"{float(tokens):.2f} tokens a second, from a drive of 2.2 GB/s" in text
    results = json.loads(read("benchmarks/results/avx512.json"))
    for pattern, group, case, ratios in (
        (
            r"LoRA on 128 experts.* \| ([\d.]+) of the time and ([\d.]+) of",
            "lora-128",
            "training, 512 rows",
            2,
        ),
        (r"layer with 16 experts.* \| ([\d.]+) of the time", "block-16", "1 rows", 1),
    ):
        (figures,) = re.findall(pattern, text)
        (row,) = (entry["rows"]["llamoe"] for entry in results[group]["cases"] if entry["case"] == case)
        printed = [float(figure) for figure in (figures if ratios == 2 else (figures,))]
        assert printed == [round(row[ratio], 2) for ratio in ("ratio", "memory_ratio")[:ratios]]


def test_a_model_is_planned_for_the_machine_of_the_table():
    """The pages' plans of Mixtral 8x7B for a laptop and for a GPU are those of the planner."""
    text = read("README.md")
    options = dict(quantization="int4", context=8192)
    laptop = llamoe.plan_placement("mixtral-8x7b", gpus=0, ram="32GB", **options)
    (row,) = re.findall(r"^\| Mixtral 8x7B .*$", text, re.MULTILINE)
    assert f"int4, experts on disk, ≤ {laptop.tokens_per_second:.2g} tokens a second" in row
    card = llamoe.plan_placement("mixtral-8x7b", gpus=["24GB"], ram="64GB", **options)
    quickstart = read("docs/quickstart.md")
    assert f"{card.tokens_per_second:.1f}, if reading took all the time" in quickstart
    kept = [name for name, place in card.device_map.items() if name.endswith("experts") and place == "cpu"]
    assert len(kept) == 13 and "the other 13 layers' in RAM" in quickstart


def test_troubleshooting_quotes_what_is_said():
    """Each quoted message is in the source code of llamoe, or of the library that raises it."""
    import accelerate
    import bitsandbytes
    import transformers

    folders = [ROOT / folder for folder in (*LIBRARY, "modeling", "llamoe_command")]
    others = [Path(library.__file__).parent for library in (transformers, accelerate, bitsandbytes)]
    theirs = [
        others[0] / "dynamic_module_utils.py",
        others[0] / "modeling_rope_utils.py",
        others[0] / "modeling_utils.py",
        others[0] / "models/auto/configuration_auto.py",
        others[0] / "utils/loading_report.py",
        others[1] / "big_modeling.py",
        others[1] / "utils/modeling.py",
        others[2] / "backends/cpu/ops.py",
    ]
    files = [*(file for folder in folders for file in folder.rglob("*.py")), *theirs]
    # Messages of the source code: string literals joined, values left out.
    said = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)
    said = said.replace("{CONFIG_NAME}", "config.json")
    said = re.sub(r"\{[^{}\n]*\}|%s", "…", said)
    # Stock's error for an argument that only llamoe has.
    with pytest.raises(TypeError) as error:
        transformers.MixtralForCausalLM(
            transformers.MixtralConfig(num_hidden_layers=0), experts_memory="16GB"
        )
    said += str(error.value)
    quotes = re.findall(r"^> (.*)$", read("docs/troubleshooting.md"), re.MULTILINE)
    assert len(quotes) > 20
    assert [q for q in quotes if any(part.strip() not in said for part in q.split("…"))] == []


def test_every_command_has_a_row():
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert set(re.findall(r"^\| `llamoe (\w+)`", read("docs/checkpoints.md"), re.MULTILINE)) == names


def test_makefile_calls_the_command_with_options_that_it_has():
    """No test runs `make chat`, whose page waits for a reader."""
    calls = re.findall(r"-m llamoe (\w+)(.*)", read("Makefile"))
    assert calls
    for name, words in calls:
        parameters = get_command(cli.app).commands[name].params
        options = {option for parameter in parameters for option in parameter.opts}
        assert options >= set(re.findall(r"--[a-z][a-z-]*", words)), name


def test_small_models_page_shows_good_answers():
    shares = re.findall(r"^\| [a-z]+ \| ([\d.]+)% \|$", read("docs/small_model.md"), re.MULTILINE)
    assert len(shares) == 8 and min(map(float, shares)) >= 85


def test_page_shows_the_results_of_quality():
    page = read("docs/quantization.md")
    rows = {row["name"]: row for row in json.loads(read("benchmarks/results/quality.json"))["rows"]}
    shares = dict(re.findall(r"^\| ([^|]+?) \| [\d.]+ MB \| ([\d.]+)% \|", page, re.MULTILINE))
    assert len(shares) == 6
    assert {name: float(share) for name, share in shares.items()} == {
        name: pytest.approx(100 * rows[name]["accuracy"], abs=0.006) for name in shares
    }


def test_page_shows_the_formats_bits():
    from llamoe.modeling.formats import Int4, Int8

    page = read("docs/quantization.md")
    for text, form in {
        '"int8"': Int8(),
        '"int4"': Int4(32),
        **{f"`group_size={size}": Int4(size) for size in (64, 128)},
    }.items():
        sizes = (4096, 4096)
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in form.parts(sizes))
        (bits,) = re.findall(rf"^\|.*{text}`? \| ([\d.]+) \|", page, re.MULTILINE)
        assert float(bits) == pytest.approx(8 * nbytes / math.prod(sizes), abs=0.01)


def test_search_for_scales_lowers_the_error():
    import torch

    from llamoe.modeling.formats import Int4

    weight = torch.randn(128, 2048, generator=torch.Generator().manual_seed(0))
    for size in (32, 64, 128):
        errors = []
        for form in (Int4(size), Int4(size, search=False)):
            dequantized = form.matrix(form.quantize(weight), (128, 2048), torch.float32)
            errors.append((dequantized - weight).square().mean().item())
        assert 0.85 < errors[0] / errors[1] < 0.92


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('<a href="api/all.html#llamoe.adopt">adopt</a>', "every link and name holds"),
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "loads //fonts.example/x.css"),
        ('<a href="nowhere.html">there</a>', "nowhere.html leads nowhere"),
        ('<a href="api/all.html#llamoe.adapt">adapt</a>', "all.html#llamoe.adapt names no heading"),
        ("", "llamoe.adopt is described on no page"),
    ],
)
def test_check_of_built_pages(body, says, tmp_path):
    """`make docs` runs `.ci/check_pages.py` on the pages that it has built."""
    check = [sys.executable, str(ROOT / ".ci/check_pages.py"), str(tmp_path)]
    names_of = runpy.run_path(check[1])["names"]
    names = {name for folder in LIBRARY for name in names_of(ROOT / folder / "__init__.py")}
    (tmp_path / "api").mkdir()
    headings = [f'<h2 id="llamoe.{name}">' for name in sorted(names) if body or name != "adopt"]
    (tmp_path / "api/all.html").write_text("".join(headings))
    (tmp_path / "index.html").write_text(body)
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert says in done.stdout
    assert done.returncode == int("holds" not in says)
