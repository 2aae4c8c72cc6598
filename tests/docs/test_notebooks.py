"""The notebooks run from top to bottom at small settings, and are shown with the outputs of a real run."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
EMPTY = FOLDER / "002_practice.ipynb"  # the student's, whose cells are to be written
NOTEBOOKS = sorted(path for path in FOLDER.glob("*.ipynb") if path != EMPTY)
PRINTS = {
    "001_inside_a_model": [
        "largest difference of the logits",
        "without head 0 of block 0",
        "S = q k^T / sqrt(d)",
    ],
    "002_practice_solutions": ["torch.Size([256, 9])", "Model Accuracy", "1 of 1 correct"],
    "003_characters": ["the target is", "0.3333", "do not depend on later ones: True", "temperature 1.0"],
    "004_what_attention_can_do": ["on neighbors", "the partner gets", "decided correctly"],
}


def text_of(notebook):
    """All text that the cells have printed or returned."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(str(one.get("text") or one.get("data", {}).get("text/plain", "")) for one in outputs)


@pytest.fixture
def kernel_environment(tmp_path, monkeypatch):
    """Small settings, and torchvision importable for transformers, in the kernel too."""
    shim = "from bench.peers import make_torchvision_importable\n\nmake_torchvision_importable()\n"
    (tmp_path / "sitecustomize.py").write_text(shim)
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "src")))
    for name in ("WEIGHTS", "MNIST", "TEXT"):
        monkeypatch.delenv(name, raising=False)
    return {**os.environ, "SMALL": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_every_notebook_is_listed_and_checked():
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert {path.stem for path in NOTEBOOKS} == set(PRINTS)
    assert all(f"(notebooks/{path.name})" in page for path in (*NOTEBOOKS, EMPTY))


def test_the_practice_and_its_solutions_differ_only_in_the_cells_to_write():
    empty, solved = (
        nbformat.read(path, as_version=4).cells for path in (EMPTY, FOLDER / "002_practice_solutions.ipynb")
    )
    exercises = 0
    for own, ours in zip(empty, solved, strict=True):
        if "exercise" in own.metadata.get("tags", []):
            exercises += 1
            assert own.source != ours.source
            assert not own.get("outputs")
        else:
            assert own.source == ours.source
    assert exercises == 8
    text = "\n".join(cell.source for cell in empty)
    assert "find_E(model): ..." in text
    assert "named_parameters" in text, "a hint, not the solution"
    assert "proj.weight" not in text
    assert text.count("**Predict:**") == 6
    assert "assert sum(scores) / 3 >= 0.98" in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, kernel_environment):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=kernel_environment)
    assert all(words in text_of(notebook) for words in PRINTS[path.stem])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_shown_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = text_of(notebook)
    assert all(words in text for words in PRINTS[path.stem])
    kinds = {output.output_type for cell in notebook.cells for output in cell.get("outputs", [])}
    assert "error" not in kinds
    assert any(
        "image/png" in one.get("data", {}) for cell in notebook.cells for one in cell.get("outputs", [])
    )
    assert not [words for words in ("/tmp/", "/home/", "/root/", "Warning") if words in text]
    assert path.stat().st_size < 800_000
