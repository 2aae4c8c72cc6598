"""log.txt: all that a run says, with the time; and a disk that will not take it."""

import re
import shutil

import pytest

from tiny_runs import (
    SETTINGS,
    Notes,
    Signals,
    everything,
    one_thread,
    prints,
    rows,
    train,
    write_arrays,
    write_folder,
)
from vitrail.data.sources import open_data
from vitrail.errors import FileError
from vitrail.training.listen import Progress, Silent, epoch_line
from vitrail.training.log import Log
from vitrail.training.loop import Stopped

__all__ = ["one_thread"]

HOW = {**SETTINGS, "epochs": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_arrays(tmp_path_factory.mktemp("data") / "data.npz")


def lines(out):
    """Without the time, which every line must begin with."""
    found = [
        re.fullmatch(r"(20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ) (.+)", line)
        for line in (out / "log.txt").read_text().split("\n")[:-1]
    ]
    assert all(found)
    assert [one[1] for one in found] == sorted(one[1] for one in found)
    return [one[2] for one in found]


def test_all_that_is_said_is_in_the_log_over_restarts(data, tmp_path):
    first, second = Notes(), Notes()
    with Signals(7), pytest.raises(Stopped):
        train(data, out=tmp_path, listener=first, **HOW)
    begun = (tmp_path / "log.txt").read_text()
    train(data, out=tmp_path, resume=True, listener=second, **HOW)
    assert (tmp_path / "log.txt").read_text().startswith(begun)
    found = lines(tmp_path)
    for note in (*first.notes, *second.notes):
        assert note in found
    assert sum(line.startswith("parameters: ") for line in found) == 2  # a plan for each start
    for row in rows(tmp_path):
        assert found.count(epoch_line(row)) == 1
    assert [row["epoch"] for row in (*first.rows, *second.rows)] == [1, 2]
    stopped = found.index("Stopped at step 7 of 10; go on with --resume.")
    assert found[stopped + 1].startswith("Computing on ")  # then it goes on
    train(data, out=tmp_path, resume=True, **HOW)
    assert lines(tmp_path) == found  # a finished run has nothing to add


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_files_that_cannot_be_read_are_named_or_counted(policy, tmp_path):
    """Both leave them out and count them; `warn` names each once, `skip` says a number when it changes."""
    write_folder(tmp_path / "pictures", each=8)
    for name in ("bee/03.png", "cat/00.jpg"):
        (tmp_path / "pictures" / name).write_bytes(b"no picture")
    listener, out = Notes(), tmp_path / "run"
    train(tmp_path / "pictures", out=out, corrupt=policy, listener=listener, **{**SETTINGS, "batch": 8})
    said = [note for note in listener.notes if "could not be read" in note]
    if policy == "warn":
        assert sorted(note.split(":")[0] for note in said) == [
            f"{name} could not be read" for name in ("bee/03.png", "cat/00.jpg")
        ]
    else:
        counts = [int(note.split()[0]) for note in said]
        assert counts == sorted(set(counts))
        assert counts[-1] == 2
        assert said[-1] == "2 files could not be read so far; --set corrupt=warn names them."
    unread = [(row["corrupt"], row["val_seen"]) for row in rows(out)]
    held_out = open_data(tmp_path / "pictures").held_out
    assert unread[-1][0] + len(held_out) - unread[-1][1] == 2
    assert all(note in lines(out) for note in said)


def test_what_is_said_before_there_is_a_folder_comes_first(tmp_path):
    log = Log(Silent(), tmp_path / "run" / "log.txt")
    log.note("a fifth is held out")
    (tmp_path / "run").mkdir()
    log.begin()
    log.plan({"steps": 3})
    log.progress(Progress(1, 3, 0, 0.0, 0.0, 0.0, 0.0))
    log.note("two\nlines \x1b[2J")
    assert lines(tmp_path / "run") == ["a fifth is held out", "steps: 3", "two\\nlines \\x1b[2J"]


def test_another_process_than_the_first_writes_nothing(tmp_path):
    notes = Notes()
    log = Log(notes, tmp_path / "log.txt", writes=False)
    log.begin()
    log.note("heard")
    assert (notes.notes, list(tmp_path.iterdir())) == (["heard"], [])


def test_a_line_that_was_cut_off_is_ended(tmp_path):
    (tmp_path / "log.txt").write_text("2026-01-01T00:00:00Z epo")
    log = Log(Silent(), tmp_path / "log.txt")
    log.note("again")
    log.begin()
    assert lines(tmp_path) == ["epo", "again"]


def test_a_full_disk_is_loud(data, tmp_path):
    """/dev/full takes nothing. What the run had is as it was, and it goes on when there is room."""
    out, notes = tmp_path / "run", Notes()
    with Signals(7), pytest.raises(Stopped):
        train(data, out=out, **HOW)
    shutil.move(out / "log.txt", tmp_path / "log.txt")
    before = everything(out)
    (out / "log.txt").symlink_to("/dev/full")
    with pytest.raises(FileError, match=r"write its log. Got .*log\.txt: No space left on device\. Free"):
        train(data, out=out, resume=True, listener=notes, **HOW)
    (out / "log.txt").unlink()
    assert everything(out) == before
    train(data, out=out, resume=True, **HOW)
    train(data, out=tmp_path / "whole", **HOW)
    assert prints(out) == prints(tmp_path / "whole")
