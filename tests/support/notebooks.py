"""Notebooks that are executed in a kernel of their own."""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(folder: Path, *cells: str):
    """The outputs of each cell, executed in a folder, in the order of the cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=dict(os.environ))
    return [cell["outputs"] for cell in notebook.cells]
