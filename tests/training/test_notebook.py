"""What `vt.train` shows: in a notebook that is executed, in a script, and with verbose=False."""

import re
import subprocess
import sys

import pytest

import vitrail as vt
from tests.support.notebooks import execute
from vitrail.base.summary import html_table
from vitrail.training.callbacks import NullCallback, Progress
from vitrail.training.notebook import NotebookCallback, in_notebook

HOW = dict(batch=16, model=dict(width=16, depth=1, heads=2, patch=4), report=False)
TRAIN = "run = vt.train({data!r}, out={out!r}, epochs={epochs}, **HOW)"


@pytest.fixture(scope="module")
def outputs(data, tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("notebook"), str(data)
    return execute(
        folder,
        f"import vitrail as vt\nHOW = {HOW}",
        TRAIN.format(data=data, out="shown", epochs=3),
        f"HOW['verbose'] = False\n{TRAIN.format(data=data, out='silent', epochs=1)}",
        "run",
        "run.bundle",
        f"vt.evaluate(run.bundle, {data!r})",
        "import numpy as np\nvt.Predictor(run.bundle)(np.zeros((8, 8), np.uint8))",
        "from vitrail.views import filters\nfilters.draw(filters.compute(run.bundle.model))",
    )


def html_of(output):
    return output["data"]["text/html"]


@pytest.mark.slow
def test_a_run_is_one_output_that_is_updated_in_place(outputs):
    [output] = outputs[1]  # no second output, no text on stdout or stderr
    assert output["output_type"] == "display_data"
    html = html_of(output)
    assert re.findall(r"<tr><td[^>]*>(\d+)</td>", html) == ["1", "2", "3"]
    assert "held-out loss" in html
    assert html.count("data:image/png;base64,") == 2  # loss and accuracy
    assert "<progress" not in html  # it has ended
    assert "<details><summary>Plan</summary>" in html
    assert "Computing on the CPU" in html
    text = output["data"]["text/plain"]
    assert re.findall(r"^epoch +(\d+)", text, re.MULTILINE) == ["1", "2", "3"]


def test_nothing_is_shown_if_verbose_is_false(outputs):
    assert outputs[2] == []


@pytest.mark.parametrize(
    ("cell", "name", "word"),
    [
        (3, "Run", "best epoch"),
        (4, "Bundle", "parameters"),
        (5, "Evaluation", "accuracy"),
        (6, "Prediction", "label"),
    ],
)
def test_results_are_tables(outputs, cell, name, word):
    [output] = outputs[cell]
    assert output["output_type"] == "execute_result"
    assert f"<caption>{name}</caption>" in html_of(output)
    assert word in html_of(output)


def test_figures_are_displayed_without_magic(outputs):
    [output] = outputs[7]
    assert len(output["data"]["image/png"]) > 5_000


# ---- without a kernel -----------------------------------------------------------------------


class Shown(NotebookCallback):
    """Keeps what would be displayed."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def _show(self):
        self.outputs.append(self._html())
        self._shown = True


def row(epoch, **more):
    return {"epoch": epoch, "loss": 2.0, "accuracy": 0.5, "seconds": 1.0, **more}


def test_progress_while_it_trains():
    shown = Shown()
    shown._due = lambda: True
    shown.on_plan({"images": "<b>3</b>"})
    shown.on_progress(Progress(3, 30, 0, 1.25, 0.5, 0.1, 120.0, 45.0))
    assert '<progress value="3" max="30"' in shown.outputs[-1]
    assert "loss 1.250, accuracy 50.0%, 120 images/s, 45 s left" in shown.outputs[-1]
    assert "&lt;b&gt;3" in shown.outputs[-1]  # text, not HTML


def test_many_epochs_show_the_last_and_curves_are_drawn_now_and_then(monkeypatch):
    drawn = []
    monkeypatch.setattr(NotebookCallback, "_draw", lambda self: drawn.append(len(self._epochs)))
    shown = Shown()
    shown._next_drawing = float("inf")
    for epoch in range(1, 31):
        shown.on_epoch(row(epoch, **({"val_loss": 1.0, "val_accuracy": 0.9} if epoch % 2 else {})))
    assert not drawn
    shown.close()
    assert drawn == [30]
    assert "The last 20 of 30 epochs" in shown.outputs[-1]
    assert re.findall(r"<tr><td[^>]*>(\d+)</td>", shown.outputs[-1]) == [str(n) for n in range(11, 31)]


def test_a_table_with_names_of_columns():
    assert html_table([["<a>"]], columns=["x & y"]) == (
        '<table><thead><tr><th style="text-align:left">x &amp; y</th></tr></thead>'
        '<tbody><tr><td style="text-align:left">&lt;a&gt;</td></tr></tbody></table>'
    )


def test_a_script_prints_lines_and_its_callback_is_called_as_well(data, tmp_path, capsys):
    assert not in_notebook()

    seen = []

    class Epochs(NullCallback):
        def on_epoch(self, metrics):
            seen.append(metrics["epoch"])

    vt.train(data, out=tmp_path / "shown", epochs=2, callback=Epochs(), **HOW)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1", "2"]
    vt.train(data, out=tmp_path / "silent", epochs=2, callback=Epochs(), verbose=False, **HOW)
    assert capsys.readouterr() == ("", "")
    assert seen == [1, 2, 1, 2]


def test_a_script_at_a_terminal_has_a_bar(data, tmp_path):
    script = tmp_path / "script.py"
    run = TRAIN.format(data=str(data), out=str(tmp_path / "run"), epochs=2)
    script.write_text(f"import vitrail as vt\nHOW = {HOW}\n{run}\n")
    code = f"import os, pty, sys\nsys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, {str(script)!r}])))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, stdin=subprocess.DEVNULL, timeout=120
    )
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert "images/s" in text  # of the bar
    assert "━" in text
    assert re.search(r"epoch +2  loss", text)
