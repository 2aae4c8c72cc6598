"""Files that are locked while they are written: never through a link, and never a file that was renamed."""

import os
import subprocess
import sys
import time

import pytest

from tests.support.command import run_command
from tests.support.tiny_runs import forked, write_folder
from vitrail.base.errors import FileError, InputError
from vitrail.base.safe_files import lock, locked_file, open_own
from vitrail.images.formats import pack_writer as pack
from vitrail.images.formats.pack_writer import pack_dataset
from vitrail.images.formats.sources import read_data


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images", each=4)


def link_of(kind, path, target):
    if kind == "pipe":
        os.mkfifo(path)
    else:
        {"symbolic": os.symlink, "hard": os.link}[kind](target, path)


@pytest.mark.parametrize("kind", ["symbolic", "hard", "pipe"])
def test_links_and_pipes_are_refused(tmp_path, kind):
    (tmp_path / "mine.txt").write_text("keep me")
    link_of(kind, tmp_path / "link", tmp_path / "mine.txt")
    with pytest.raises(InputError, match="is a link, a pipe or a device"):
        open_own(tmp_path / "link")
    assert (tmp_path / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("o.partial", ()), ("o.partial.rows", ()), ("o/.resume", ("--to", "shards"))],
)
def test_pack_writes_nothing_through_a_link(folder, tmp_path, kind, name, options):
    (tmp_path / "mine.txt").write_text("")  # an empty file would be taken for a new one
    (tmp_path / name).parent.mkdir(exist_ok=True)
    link_of(kind, tmp_path / name, tmp_path / "mine.txt")
    done = run_command("pack", folder, "o", *options, "--quiet", "--workers", 0, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{os.path.basename(name)} is a link" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == ""


def test_pack_does_not_overwrite_a_file_that_it_has_not_written(folder, tmp_path):
    mine = tmp_path / "o.pack.partial"
    mine.write_text("a download")
    with pytest.raises(InputError, match=r"o.pack.partial is not of an interrupted vitrail pack"):
        pack_dataset(read_data(folder), tmp_path / "o.pack", workers=0)
    assert mine.read_text() == "a download"
    assert {path.name for path in tmp_path.iterdir()} == {"images", "o.pack.partial"}


def test_a_lock_is_held_against_other_processes(tmp_path):
    path = tmp_path / "file"
    read, write = os.pipe()

    def work():
        with locked_file(path, path):
            os.write(write, b"x")
            time.sleep(60)

    child = forked(work)
    os.read(read, 1)
    try:
        with pytest.raises(FileError, match="Another process is writing"), locked_file(path, path):
            pass
        with open_own(path) as file:
            assert lock(file, shared=True) is False
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    with locked_file(path, path) as file, open_own(path) as other:
        assert lock(file, shared=True)
        assert lock(other, shared=True)
        assert lock(other) is False


WRITER = """
import sys
from pathlib import Path
from vitrail.base.safe_files import locked_file

with locked_file(Path(sys.argv[1]), Path(sys.argv[1]), wait=True) as file:
    file.truncate()
    file.write(b"other")
"""


def waits_for(child, path):
    """Whether a process has a file open."""
    folder = f"/proc/{child}/fd"
    return any(os.path.realpath(f"{folder}/{number}") == str(path) for number in os.listdir(folder))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_file_that_was_renamed_while_waiting_for_its_lock_is_not_written(tmp_path):
    """What pack does at its end: another process that has opened the file must not write to the result."""
    path, result = (tmp_path / "o.partial").resolve(), tmp_path / "o"
    with locked_file(path, result) as file:
        file.write(b"complete")
        file.flush()
        child = subprocess.Popen([sys.executable, "-c", WRITER, path])  # a fork would share the lock
        while child.poll() is None and not waits_for(child.pid, path):
            time.sleep(0.005)
        os.replace(path, result)
    assert child.wait(60) == 0
    assert (result.read_bytes(), path.read_bytes()) == (b"complete", b"other")


def test_a_pack_that_another_process_finishes_meanwhile(folder, tmp_path, monkeypatch):
    """It finishes after the first check of OUT: it is refused, or waited for, and OUT stays as it is."""
    out, real = tmp_path / "o.pack", pack._source_rows

    def finished_meanwhile(splits):
        monkeypatch.setattr(pack, "_source_rows", real)
        pack_dataset(read_data(folder), out, workers=0)
        return real(splits)

    monkeypatch.setattr(pack, "_source_rows", finished_meanwhile)
    with pytest.raises(InputError, match="already exists"):
        pack_dataset(read_data(folder), out, workers=0)
    before = out.read_bytes()
    assert pack_dataset(read_data(folder), out, workers=0, wait=True).bytes == len(before)
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"images", "o.pack"}
