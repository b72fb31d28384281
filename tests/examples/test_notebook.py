"""Test that the notebook runs from its first cell to its last, and prints what it was saved with."""

import nbclient
import nbformat
import pytest
from support.paths import EXAMPLES

pytestmark = pytest.mark.slow


def said(notebook):
    """Return the printed lines of a notebook without losses, which differ between machines, and its cells' results."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    last = [output.data["text/plain"] for output in outputs if "data" in output]
    return [line for line in printed.splitlines() if "loss" not in line], last


def test_notebook_runs():
    saved = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    run = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(run, timeout=600, kernel_name="python3", resources=resources).execute()
    assert said(run) == said(saved)
    assert "there are three shapes." in "".join(said(saved)[1])
