"""A training run writes report.html; if it cannot, it says why and the run is complete nevertheless."""

import json
import os
import resource
import subprocess
import sys

import pytest

import vitrail as vt
from tests.support.read_pages import ParsedPage, check_safe
from tests.support.tiny_runs import (
    RecordingCallback,
    file_hashes,
    one_thread,
    partial_files,
    write_arrays,
    write_folder,
)
from vitrail.base.errors import FileError
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.images.formats.sources import open_dataset
from vitrail.views.html_page import percent
from vitrail.views.run_page import describe_selection, run_page

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


def test_a_run_writes_a_report(run):
    read = ParsedPage((run.out / "report.html").read_text())
    check_safe(read)
    found = evaluate(run.bundle, open_dataset("digits"), split="val")
    last = run.metrics[-1]
    assert found.metrics.top1 == last["val_accuracy"]
    for words in (
        f"{percent(found.metrics.top1)} top-1 accuracy on 360 images",
        "Training on digits",
        "The validation set was evaluated once",
        f"from {last['loss']:.3f} to {last['loss']:.3f} in 1 epoch",
        "1,437 images in 10 classes",
        "360 images",
        "initial weights",
        "best.safetensors",
        '"sampling"',
    ):
        assert words in read.text, words
    assert len(read.all("details")) == 1
    assert len(read.all("img")) == 3 + 2 * (12 + 8) + 3
    assert not partial_files(run.out)


def test_resuming_a_finished_run_writes_only_a_missing_report(run, tmp_path):
    out = copy(run, tmp_path / "out")
    before, notes = file_hashes(out), RecordingCallback()
    vt.train("digits", out=out, resume=True, callback=notes, **HOW)
    assert (file_hashes(out), notes.notes) == (before, [])
    (out / "report.html").unlink()
    vt.train("digits", out=out, resume=True, report=False, **HOW)
    assert not (out / "report.html").exists()
    vt.train("digits", out=out, resume=True, **HOW)
    assert file_hashes(out, but=["report.html"]) == {n: v for n, v in before.items() if n != "report.html"}
    assert "Training on digits" in (out / "report.html").read_text()


def test_without_matplotlib_a_note_is_printed(run, tmp_path, monkeypatch):
    out, notes = copy(run, tmp_path / "out"), RecordingCallback()
    (out / "report.html").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    vt.train("digits", out=out, resume=True, callback=notes, **HOW)
    assert notes.notes == ["No report: install vitrail[inspect]."]
    assert not (out / "report.html").exists()


def test_a_failed_report_does_not_fail_the_run(run, tmp_path):
    out = copy(run, tmp_path / "out")
    (out / "report.html").unlink()
    (out / "environment.json").unlink()
    for text, words in ((None, "environment.json: No such file or directory."), ("[", "JSONDecodeError: ")):
        if text:
            (out / "environment.json").write_text(text)
        notes = RecordingCallback()
        assert vt.train("digits", out=out, resume=True, callback=notes, **HOW).metrics == run.metrics
        assert [note for note in notes.notes if note.startswith("No report: ") and words in note]
        assert not (out / "report.html").exists()
        assert not partial_files(out)


def test_a_full_disk_is_an_error(run, tmp_path):
    """In a child process, files are limited to 20 kB."""
    out = copy(run, tmp_path / "out")
    (out / "report.html").unlink()
    before = file_hashes(out)
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            vt.train("digits", out=out, resume=True, **HOW)
        except FileError as error:
            words = ("report.html could not be written", "run itself is complete", "resume=True")
            code = 0 if all(some in str(error) for some in words) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file_hashes(out) == before


def test_unreadable_files_and_skipped_steps_are_noted(run, tmp_path):
    write_folder(tmp_path / "pets", each=6)
    for split in ("one", "two"):
        (tmp_path / "pets" / "bee" / f"{split}.png").write_bytes(split.encode())
    how = dict(epochs=2, batch=8, model=dict(width=16, depth=1, heads=2, size=16, patch=4), corrupt="skip")
    done = vt.train(tmp_path / "pets", out=tmp_path / "out", **how)
    text = ParsedPage((done.out / "report.html").read_text()).text
    broken = [
        n for n in open_dataset(tmp_path / "pets").eval_split.names if n.endswith(("one.png", "two.png"))
    ]
    assert ("Images that could not be read" in text) == bool(broken)
    assert f"{done.metrics[-1]['corrupt_files']} training image" in text
    assert "are held out for validation, chosen by their content" in text
    assert "the best on this validation set" in text
    lines = (done.out / "metrics.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "skipped_steps": 2} for line in lines]
    (done.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_dataset(tmp_path / "pets")
    page = run_page(done.out, done.bundle, data, evaluate(done.bundle, data, split="val"))
    [notes] = [section.points for section in page.sections if section.title == "Notes"]
    assert any("4 steps were skipped" in note for note in notes)


def test_selection_of_the_weights_is_described(run):
    data = open_dataset("digits")
    rows = [
        {"epoch": 1, "val_accuracy": 0.7, "val_loss": 0.9},
        {"epoch": 2, "val_accuracy": 0.7, "val_loss": 0.6},  # of equals, the lowest loss
        {"epoch": 3, "val_accuracy": 0.5, "val_loss": 0.5},
    ]
    assert "epoch 2 of 3, the best on this validation set" in describe_selection(rows, data)
    alone = type(data)(data.name, data.classes, data.train, None, data.val)
    text = describe_selection(rows, alone)
    assert "last epoch, 3; the test set was not used" in text


@pytest.mark.slow
def test_two_processes_write_one_report(tmp_path):
    """All processes take part in the evaluation; otherwise one would wait for the other forever."""
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
    assert done.stdout.count("Saved out/report.html") == 1
    text = ParsedPage((tmp_path / "out" / "report.html").read_text()).text
    assert "of 30 images" in text.lower()
    assert not partial_files(tmp_path)
