"""Two runs into one folder of parts, parts that are not whole, and a disk that is full."""

import os
from pathlib import Path

import pytest

from tests.predict.test_prediction_parts import model, photos, predict, rows_of
from tests.support.command import run_command
from tests.support.tiny_runs import forked
from vitrail.base.safe_files import atomic_file
from vitrail.predict import Predictor
from vitrail.predict.parts import ImageList, PartOptions, Parts

__all__ = ["model", "photos"]
LEFT = ".0123456789abcdef.part"


def test_a_second_run_leaves_the_temporary_files_of_the_first(model, photos, tmp_path):
    out = tmp_path / "parts"
    predict(model, photos, out)
    expected = (out / "part-000002.csv").read_bytes()
    (out / "part-000002.csv").unlink()
    (out / LEFT).write_text("left by a kill")
    ready, go = os.pipe(), os.pipe()

    def first():
        parts = Parts(out, ImageList([str(photos)]), Predictor(model), PartOptions("predict", "csv", 1, 5))
        with parts.in_use(), atomic_file(parts.path(2), overwrite=True) as partial:
            partial.write_bytes(expected)
            os.write(ready[1], b"x")
            os.read(go[0], 1)

    child = forked(first)
    os.read(ready[0], 1)
    assert not (out / LEFT).exists()  # no other process was at work
    temporary = [name for name in os.listdir(out) if name.startswith(".")]
    assert len(temporary) == 1
    code, text = predict(model, photos, out)
    assert (code, "5 of them from before" in text) == (1, True), text
    assert (out / temporary[0]).exists()
    os.write(go[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (out / "part-000002.csv").read_bytes() == expected
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert len(rows_of(out)) == 28


def test_two_commands_at_once_write_every_part(model, photos, tmp_path):
    def command(folder):
        words = ["predict", model, photos, "--out", f"{folder}/", "--part-size", 2, "--workers", 0, "--quiet"]
        done = run_command(*words, cwd=tmp_path)
        os._exit(0 if done.returncode == 1 and "have no result" in done.stderr else 2)

    children = [forked(lambda: command("both")) for _ in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    names = [row["file"] for row in rows_of(tmp_path / "both")]
    assert len(names) == len(set(names)) == 28
    assert not [name for name in os.listdir(tmp_path / "both") if name.startswith(".")]


def test_a_repaired_image_leaves_no_list_of_errors(model, tmp_path):
    from tests.support.tiny_runs import write_folder

    photos = write_folder(tmp_path / "photos", each=2)
    broken = sorted(photos.rglob("*.*"))[1]
    good = broken.read_bytes()
    broken.write_bytes(b"")
    out = tmp_path / "parts"
    assert predict(model, photos, out)[0] == 1
    broken.write_bytes(good)
    (out / "part-000000.csv").unlink()
    code, text = predict(model, photos, out)
    assert (code, "have no result" in text) == (0, False), text
    assert not list(out.glob("*.errors"))


@pytest.mark.parametrize(
    ("form", "name"), [("csv", "part-000001.csv"), ("npy", "part-000001.npy"), ("npy", "part-000001.json")]
)
def test_an_empty_part_is_made_again_and_a_folder_is_named(model, photos, tmp_path, form, name):
    out = tmp_path / "parts"
    predict(model, photos, out, "--format", form, "--batch", 5)
    expected = (out / name).read_bytes()
    (out / name).write_bytes(b"")
    assert "5 of them from before" in predict(model, photos, out, "--format", form, "--batch", 5)[1]
    assert (out / name).read_bytes() == expected
    (out / name).unlink()
    (out / name).mkdir()
    code, text = predict(model, photos, out, "--format", form, "--batch", 5)
    assert code
    assert f"{name} must be a file with a part of the results, and is none; move it away" in text


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["embed", "-o", "e.npy"], "e.npy"),
        (["embed", "-o", "p/", "--format", "npy"], "p/part-000000.npy"),
        (["embed", "-o", "p/", "--format", "parquet"], "p/part-000000.parquet"),
        (["predict", "--out", "q.csv", "--format", "csv"], "q.csv"),
        (["predict", "--embeddings", "e.npy"], "e.npy"),
    ],
)
def test_a_full_disk_names_file_and_cause(model, photos, tmp_path, words, name):
    """No file may grow past 700 bytes, as if the disk ended there."""
    command, *options = words
    links = []
    for number in range(40):  # short names: the list of names must fit where the vectors do not
        links.append(f"{number}.jpg")
        (tmp_path / links[-1]).symlink_to(photos / "ant" / "00.jpg")
    done = run_command(
        command,
        model,
        *links,
        *options,
        "--workers",
        0,
        "--quiet",
        cwd=tmp_path,
        limits={"RLIMIT_FSIZE": 700},
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"vitrail: {name}: "), done.stderr
    assert "File too large" in done.stderr
    assert not [path for path in Path(tmp_path).rglob(".*") if path.is_file()]
