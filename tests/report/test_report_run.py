"""A run leaves report.html; and where it cannot, says why, and is a finished run all the same."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail as vt
from read_pages import Read, check_safe
from vitrail.data.sources import open_data
from vitrail.errors import FileError
from vitrail.evaluation.run import evaluate
from vitrail.report.numbers import percent
from vitrail.report.run import chosen, run_page

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny_runs import Notes, everything, left_over, one_thread, write_arrays, write_folder

__all__ = ["one_thread"]

HOW = dict(recipe="digits", epochs=1, model=dict(width=16, depth=1, heads=2))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return vt.train("digits", out=tmp_path_factory.mktemp("run") / "out", **HOW)


def copy(run, to):
    to.mkdir()
    for file in run.out.iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_a_run_leaves_a_page(run):
    read = Read((run.out / "report.html").read_text())
    check_safe(read)
    found = evaluate(run.bundle, open_data("digits"), split="val")
    last = run.metrics[-1]
    assert found.scores.top1 == last["val_accuracy"]
    for words in (
        f"{percent(found.scores.top1)} right (top-1), of 360 pictures",
        "A model for digits",
        "The held-out pictures were judged once",
        f"from {last['loss']:.3f} to {last['loss']:.3f} in 1 epoch",
        "1,437 pictures in 10 classes",
        "360 others, which it never learned from",
        "with random weights",
        "best.safetensors",
        '"sampling"',
    ):
        assert words in read.text, words
    assert len(read.all("details")) == 1
    assert len(read.all("img")) == 3 + 2 * (12 + 8) + 3
    assert not left_over(run.out)


def test_a_finished_run_gets_the_page_it_lacks_and_no_other(run, tmp_path):
    out = copy(run, tmp_path / "out")
    before, notes = everything(out), Notes()
    vt.train("digits", out=out, resume=True, listener=notes, **HOW)
    assert (everything(out), notes.notes) == (before, [])
    (out / "report.html").unlink()
    vt.train("digits", out=out, resume=True, report=False, **HOW)
    assert not (out / "report.html").exists()
    vt.train("digits", out=out, resume=True, **HOW)
    assert everything(out, but=["report.html"]) == {n: v for n, v in before.items() if n != "report.html"}
    assert "A model for digits" in (out / "report.html").read_text()


def test_without_matplotlib_there_is_a_note(run, tmp_path, monkeypatch):
    out, notes = copy(run, tmp_path / "out"), Notes()
    (out / "report.html").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    vt.train("digits", out=out, resume=True, listener=notes, **HOW)
    assert notes.notes == ["No report: install vitrail[inspect]."]
    assert not (out / "report.html").exists()


def test_a_page_that_cannot_be_made_fails_no_run(run, tmp_path):
    out = copy(run, tmp_path / "out")
    (out / "report.html").unlink()
    (out / "environment.json").unlink()
    for text, words in ((None, "environment.json: No such file or directory."), ("[", "JSONDecodeError: ")):
        if text:
            (out / "environment.json").write_text(text)
        notes = Notes()
        assert vt.train("digits", out=out, resume=True, listener=notes, **HOW).metrics == run.metrics
        assert [note for note in notes.notes if note.startswith("No report: ") and words in note]
        assert not (out / "report.html").exists()
        assert not left_over(out)


def test_a_full_disk_is_loud(run, tmp_path):
    """A file may become no larger than 20 kB, in a child."""
    out = copy(run, tmp_path / "out")
    (out / "report.html").unlink()
    before = everything(out)
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            vt.train("digits", out=out, resume=True, **HOW)
        except FileError as error:
            words = "A report must be written whole; the run itself is finished and safe. Got "
            code = 0 if str(error).startswith(words) and "--resume" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert everything(out) == before


def test_files_that_could_not_be_read_and_steps_left_out(run, tmp_path):
    write_folder(tmp_path / "pets", each=6)
    for split in ("one", "two"):
        (tmp_path / "pets" / "bee" / f"{split}.png").write_bytes(b"broken")
    how = dict(epochs=2, batch=8, model=dict(width=16, depth=1, heads=2, size=16, patch=4), corrupt="skip")
    done = vt.train(tmp_path / "pets", out=tmp_path / "out", **how)
    text = Read((done.out / "report.html").read_text()).text
    broken = [n for n in open_data(tmp_path / "pets").held_out.names if n.endswith(("one.png", "two.png"))]
    assert ("Pictures that could not be read" in text) == bool(broken)
    assert f"{done.metrics[-1]['corrupt']} training picture" in text
    assert "are held out for validation (seed 0)." in text
    assert "the best on these held-out pictures" in text
    lines = (done.out / "metrics.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "left_out": 2} for line in lines]
    (done.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_data(tmp_path / "pets")
    page = run_page(done.out, done.bundle, data, evaluate(done.bundle, data, split="val"))
    [notes] = [section.points for section in page.sections if section.title == "Notes"]
    assert "4 steps were left out: the gradient was no number." in notes


def test_who_chose_the_weights(run):
    data = open_data("digits")
    rows = [
        {"epoch": 1, "val_accuracy": 0.5},
        {"epoch": 2, "val_accuracy": 0.7},
        {"epoch": 3, "val_accuracy": 0.7},
    ]
    assert chosen(rows, data).startswith("These are the weights of epoch 2 of 3, the best on these")
    alone = type(data)(data.name, data.classes, data.train, None, data.val)
    assert chosen(rows, alone) == (
        "These are the weights of the last epoch, 3; the test pictures chose nothing."
    )


def test_two_processes_leave_one_page(tmp_path):
    """All judge together: one that did not take part would keep the other waiting for ever."""
    write_arrays(tmp_path / "data.npz")
    code = "import sys, torch; torch.set_num_threads(1); from vitrail.cli import main; main()"
    (tmp_path / "go.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "go.py"]
    tiny = [f"--set=model.{text}" for text in ("width=16", "depth=1", "heads=2", "size=8", "patch=4")]
    done = subprocess.run(
        [*command, "train", "data.npz", "--epochs=1", "--batch=16", *tiny, "--out=out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("To read in a browser: out/report.html") == 1
    text = Read((tmp_path / "out" / "report.html").read_text()).text
    assert "of 30 pictures" in text.lower()
    assert not left_over(tmp_path)
