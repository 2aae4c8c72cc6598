"""Atomic writes: a file or folder is complete, or it does not exist."""

import os

import pytest

from vitrail.base.errors import InputError
from vitrail.base.safe_files import atomic_file, atomic_folder, remove_partial, write_bytes, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_written_completely(tmp_path):
    write_text(tmp_path / "a.txt", "zwei Äpfel\n")
    write_bytes(tmp_path / "b.bin", b"\x00\xff")
    assert (tmp_path / "a.txt").read_bytes() == "zwei Äpfel\n".encode()
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["a.txt", "b.bin"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "a") as partial:
            partial.unlink()
            os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors does
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, overwrite):
    if overwrite:
        (tmp_path / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "a", overwrite=overwrite) as partial:
        partial.write_text("new" * (1 // 0))
    assert names(tmp_path) == (["a"] if overwrite else [])
    assert not overwrite or (tmp_path / "a").read_text() == "old"


def test_a_check_can_reject_the_file(tmp_path):
    def reject(partial):
        assert partial.read_text() == "new"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "a", check=reject) as partial:
        partial.write_text("new")
    assert names(tmp_path) == []


def test_existing_files_are_not_overwritten(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("a", "dangling"):
        with pytest.raises(InputError, match="already exists"):
            write_text(tmp_path / name, "new")
    other = tmp_path / "b"
    with pytest.raises(InputError, match="already exists"), atomic_file(other):
        other.write_text("written by another process")
    assert (tmp_path / "b").read_text() == "written by another process"


def test_overwriting_keeps_links_and_refuses_folders(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to("a")
    write_text(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "new"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="not a file"):
        write_text(tmp_path / "folder", "new", overwrite=True)


def test_folders_are_complete_or_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new/nested", "empty"):
        with atomic_folder(tmp_path / name) as partial:
            (partial / "x").write_text("1")
            assert not (tmp_path / name / "x").exists()
        assert (tmp_path / name / "x").read_text() == "1"
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "empty") as partial:
        (partial / "x").write_text("2")
    assert (tmp_path / "empty" / "x").read_text() == "1"
    assert names(tmp_path) == ["empty", "new"]


def test_partial_files_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / f".{'0a' * 8}.part").write_text("half")
    (tmp_path / f".{'1b' * 8}.part").mkdir()
    (tmp_path / f".{'1b' * 8}.part" / "x").write_text("half")
    for name in ("mine.part", ".0a.part"):
        (tmp_path / name).write_text("the user's")
    remove_partial(tmp_path)
    remove_partial(tmp_path / "missing")
    assert names(tmp_path) == [".0a.part", "mine.part"]
