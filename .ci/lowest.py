"""Prints the lowest versions that pyproject.toml allows, as requirements that pip reads."""

import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]

extras = project["optional-dependencies"]
# The examples import it.
others = [requirement for requirement in extras["test"] if requirement.startswith("matplotlib")]
for requirement in project["dependencies"] + extras["vision"] + extras["tokenizers"] + others:
    name, lowest = re.match(r"([\w-]+)>=([\w.]+)", requirement).groups()
    # `===` excludes torch's CPU build, 2.13.0+cpu, which does not fit torchvision's usual build.
    print(f"{name}==={lowest}")
print(
    *(requirement for requirement in extras["test"] if requirement.startswith("pytest")),
    sep="\n",
)
