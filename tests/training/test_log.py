"""log.txt: every message of a run with its time, and disk errors."""

import re
import shutil

import pytest

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    file_hashes,
    fingerprints,
    rows,
    train,
    write_folder,
)
from vitrail.base.errors import FileError
from vitrail.images.formats.sources import open_dataset
from vitrail.training import open_data
from vitrail.training.callbacks import Callbacks, LogFile, Progress, epoch_line
from vitrail.training.console_lines import ConsoleCallback
from vitrail.training.trainer import Interrupted

HOW = {**SETTINGS, "epochs": 2}


def lines(out):
    """The lines of the log without the timestamp that each must start with."""
    matches = [
        re.fullmatch(r"(20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ) (.+)", line)
        for line in (out / "log.txt").read_text().split("\n")[:-1]
    ]
    assert all(matches)
    assert [match[1] for match in matches] == sorted(match[1] for match in matches)
    return [match[2] for match in matches]


def test_the_log_has_every_message_of_every_start(data, tmp_path):
    first, second = RecordingCallback(), RecordingCallback()
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=tmp_path, callback=first, **HOW)
    before = (tmp_path / "log.txt").read_text()
    train(data, out=tmp_path, resume=True, callback=second, **HOW)
    assert (tmp_path / "log.txt").read_text().startswith(before)
    found = lines(tmp_path)
    for note in (*first.notes, *second.notes):
        assert note in found
    assert sum(line.startswith("parameters: ") for line in found) == 2  # one plan per start
    for row in rows(tmp_path):
        assert found.count(epoch_line(row)) == 1
    assert [row["epoch"] for row in (*first.rows, *second.rows)] == [1, 2]
    stopped = next(i for i, line in enumerate(found) if line.startswith("Stopped at step 7 of 10"))
    assert found[stopped + 1].startswith("Computing on ")  # the second start
    train(data, out=tmp_path, resume=True, **HOW)
    assert lines(tmp_path) == found  # a finished run adds nothing


def test_the_rows_of_a_large_table_are_reported(tmp_path, monkeypatch, capsys):
    """As a bar at a terminal, and as messages elsewhere."""
    rows = "".join(f"{name}.png,{name},{split}\n" for name in "ab" for split in ("train", "val"))
    (tmp_path / "table.csv").write_text("path,label,split\n" + rows * 5_000)
    monkeypatch.setattr(open_data, "_REPORT_SECONDS", -1.0)
    callback = RecordingCallback()
    open_data.open_training_data(tmp_path / "table.csv", None, {}, callback)
    assert callback.notes == ["Read 10,000 rows of the table.", "Read 20,000 rows of the table."]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    with ConsoleCallback() as console:
        open_data.open_training_data(tmp_path / "table.csv", None, {}, console)
    out, err = capsys.readouterr()
    assert "reading rows" in err
    assert out == ""


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_files_that_cannot_be_read_are_named_or_counted(policy, tmp_path):
    """Both skip them and count them; `warn` names each once, `skip` reports the number when it changes."""
    write_folder(tmp_path / "images", each=8)
    for name in ("bee/03.png", "cat/00.jpg"):
        (tmp_path / "images" / name).write_bytes(b"no image")
    callback, out = RecordingCallback(), tmp_path / "run"
    train(tmp_path / "images", out=out, corrupt=policy, callback=callback, **{**SETTINGS, "batch": 8})
    reported = [note for note in callback.notes if "could not be read" in note]
    if policy == "warn":
        assert sorted(note.split(":")[0] for note in reported) == [
            f"{name} could not be read" for name in ("bee/03.png", "cat/00.jpg")
        ]
    else:
        counts = [int(note.split()[0]) for note in reported]
        assert counts == sorted(set(counts))
        assert counts[-1] == 2
        assert reported[-1].startswith("2 files could not be read so far")
    unread = [(row["corrupt_files"], row["val_images"]) for row in rows(out)]
    held_out = open_dataset(tmp_path / "images").eval_split
    assert unread[-1][0] + len(held_out) - unread[-1][1] == 2
    assert all(note in lines(out) for note in reported)


def test_messages_before_the_folder_exists_are_written_first(tmp_path):
    log = LogFile(tmp_path / "run" / "log.txt")
    log.on_message("a fifth is held out")
    (tmp_path / "run").mkdir()
    log.open()
    log.on_plan({"steps": 3})
    log.on_progress(Progress(1, 3, 0, 0.0, 0.0, 0.0, 0.0))
    log.on_message("two\nlines \x1b[2J")
    assert lines(tmp_path / "run") == ["a fifth is held out", "steps: 3", "two\\nlines \\x1b[2J"]


def test_only_the_main_process_writes(tmp_path):
    notes = RecordingCallback()
    file = LogFile(tmp_path / "log.txt", enabled=False)
    file.open()
    Callbacks(notes, file).on_message("heard")
    assert (notes.notes, list(tmp_path.iterdir())) == (["heard"], [])


def test_a_truncated_last_line_is_ended(tmp_path):
    (tmp_path / "log.txt").write_text("2026-01-01T00:00:00Z epo")
    log = LogFile(tmp_path / "log.txt")
    log.on_message("again")
    log.open()
    assert lines(tmp_path) == ["epo", "again"]


def test_a_full_disk_is_an_error(data, tmp_path):
    """Every write to /dev/full fails. The run directory stays as it was, and the run can be resumed later."""
    out, notes = tmp_path / "run", RecordingCallback()
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=out, **HOW)
    shutil.move(out / "log.txt", tmp_path / "log.txt")
    before = file_hashes(out)
    (out / "log.txt").symlink_to("/dev/full")
    with pytest.raises(
        FileError, match=r"log\.txt could not be written: No space left on device.* resume=True"
    ):
        train(data, out=out, resume=True, callback=notes, **HOW)
    (out / "log.txt").unlink()
    assert file_hashes(out) == before
    train(data, out=out, resume=True, **HOW)
    train(data, out=tmp_path / "uninterrupted", **HOW)
    assert fingerprints(out) == fingerprints(tmp_path / "uninterrupted")


def test_messages_fit_the_terminal(monkeypatch, capsys):
    """Broken between words at a terminal, with the command to copy in one line; in a pipe they stay as they are."""
    text = "Stopped at step 1,234 of 5,678 because of a signal that somebody sent; resume with: vitrail train --out a"
    ConsoleCallback().on_message(text)
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setenv("COLUMNS", "50")
    console = ConsoleCallback()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console.on_message(text)
    first, second, command = capsys.readouterr().out.splitlines()
    assert max(len(first), len(second)) <= 50
    assert f"{first} {second} {command}" == text
    assert command == "vitrail train --out a"
