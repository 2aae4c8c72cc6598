"""Classes without images, and classes whose names are almost the same."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.images.classes import check_empty_classes, class_notes, quoted, similar_names
from vitrail.images.formats.sources import Dataset, Split, open_dataset

SPARSE = np.repeat([0, 1000, 2000, 3000], 10)


def saved(path, labels, **more):
    pixels = np.random.default_rng(0).integers(0, 255, (len(labels), 8, 8)).astype(np.uint8)
    np.savez(path, x=pixels, y=labels, **more)
    return path


def doctor(path):
    done = CliRunner().invoke(app, ["doctor", str(path)])
    return done.exit_code, done.output


# ---- gaps --------------------------------------------------------------------------------------


def test_labels_with_gaps_are_refused_by_training_and_listed_by_the_doctor(tmp_path):
    path = saved(tmp_path / "t.npz", SPARSE)
    code, output = doctor(path)
    assert code == 1
    assert "classes without a training image (2,997):" in output
    assert "1, 2, 3, 4, 5 and 2,992 more" in output
    done = CliRunner().invoke(app, ["train", str(path), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, InputError)
    assert "2,997 of the 3,001 classes of t have no training image" in str(done.exception)
    assert "0, 1000, 2000, 3000" in str(done.exception)
    assert "return_inverse" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_model_of_many_classes_may_be_evaluated_on_few(tmp_path):
    """Images of four classes of ImageNet are a valid test set."""
    data = open_dataset(saved(tmp_path / "t.npz", SPARSE))
    assert len(data.classes) == 3001
    assert data.notes[0].startswith(
        "2,997 of 3,001 classes have no training image: 1, 2, 3, 4, 5 and 2,992 more"
    )


def test_few_gaps_are_noted_and_training_works(tmp_path):
    path = saved(tmp_path / "t.npz", np.repeat([1, 2, 3], 10))
    data = open_dataset(path)
    check_empty_classes(data)
    assert data.notes[0].startswith("One class has no training image: 0.")
    assert doctor(path)[0] == 1
    tiny = ["--epochs=1", "--batch=8", "--model=mu/4", "--set=model.depth=1"]
    done = CliRunner().invoke(app, ["train", str(path), *tiny, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "One class has no training image: 0." in done.output


@pytest.mark.parametrize("count", [5, 6])
def test_more_than_half_of_the_classes_empty_is_refused(count):
    classes, labels = list("0123456789"), np.arange(20) % (10 - count)
    data = Dataset("t", classes, Split(labels, labels, labels))
    if count == 5:
        check_empty_classes(data)
    else:
        with pytest.raises(InputError, match="6 of the 10 classes of t"):
            check_empty_classes(data)


def test_label_columns_that_are_always_0(tmp_path):
    rows = np.zeros((12, 5), int)
    rows[:, :2] = 1
    code, output = doctor(saved(tmp_path / "t.npz", rows))
    assert code == 1
    assert "2, 3, 4" in output
    with pytest.raises(InputError, match="label columns that are always 0"):
        check_empty_classes(open_dataset(tmp_path / "t.npz"))


def test_classes_missing_in_one_split(tmp_path):
    y = np.arange(30) % 3
    x = np.zeros((4, 8, 8), np.uint8)
    data = open_dataset(saved(tmp_path / "t.npz", y, x_val=x, y_val=np.array([0, 0, 3, 3])))
    assert [note.split(":")[0] for note in data.notes] == [
        "One class has no training image",
        "2 of 4 classes have no image in val",
    ]


def test_one_hot_labels_are_noted_as_multi_label(tmp_path):
    data = open_dataset(saved(tmp_path / "t.npz", np.eye(3, dtype=int)[np.arange(12) % 3]))
    assert data.multilabel
    assert any("one-hot" in note for note in data.notes)


def test_unused_arrays_are_noted(tmp_path):
    path = saved(
        tmp_path / "t.npz", np.arange(12) % 2, x_test=np.zeros((4, 8, 8), np.uint8), extra=np.zeros(1)
    )
    assert "that are not read: x_test, extra." in open_dataset(path).notes[0]


def test_the_first_pair_of_names_is_used(tmp_path):
    y, pixels = np.arange(12) % 2, np.full((12, 8, 8), 7, np.uint8)
    pixels[:, 0, 0] = range(12)
    data = open_dataset(saved(tmp_path / "t.npz", y, x_train=pixels, y_train=y))
    assert (data.train.images[:, 1:] == 7).all()
    assert "not read: x, y." in data.notes[0]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0, 1, None, "a"], dtype=object), r"y is not an array of plain numbers"),
        (np.array(list("abcd")), r"y is not an array of plain numbers.* arrays of integers"),
        (np.array([0, 1, 2, 2**64 - 1], dtype=np.uint64), r"highest label .* 18,446,744,073,709,551,615"),
        (np.array([0, 1, np.nan, 2]), r"decimal fractions \(float64\)"),
        (np.array([0, 1, -3, 2]), r"count from 0; .* from -3 to 2"),
        (np.zeros((4, 1, 1), int), r"of shape \(4, 1, 1\)"),
        (np.zeros(5, int), r"4 images and 5 labels"),
    ],
)
def test_invalid_labels(labels, words, tmp_path):
    np.savez(tmp_path / "t.npz", x=np.zeros((4, 8, 8), np.uint8), y=labels)
    with pytest.raises(InputError, match=words):
        open_dataset(tmp_path / "t.npz")


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ["Cat", "cat", "CAT"],
        ["cat", " cat", "cat "],
        ["golden retriever", "golden_retriever", "Golden-Retriever", "golden  retriever"],
        ["caf\u00e9", "cafe\u0301"],
        ["cat", "c\u200bat"],
        ["stra\u00dfe", "STRASSE"],
        ["1", "01", "1.0"],
    ],
)
def test_names_that_are_almost_the_same(names):
    assert similar_names(["dog", *names, "emu"]) == [names]
    shown = quoted(names)
    assert shown.isprintable()
    assert len(set(shown.split(" = "))) == len(names)  # the difference can be seen


def test_names_that_differ():
    """Single letters of handwriting, grades, signs, negative numbers."""
    names = [
        "a",
        "A",
        "b",
        "B",
        "AB",
        "A-",
        "A+",
        "1",
        "-1",
        "10",
        "1.5",
        "C",
        "C++",
        "C#",
        "cat",
        "cats",
        "",
    ]
    assert similar_names(names) == []


def test_similar_names_are_noted_and_listed_by_the_doctor(tmp_path):
    for number, name in enumerate(["Cat", "cat", "CAT", "dog"]):
        for index in range(10):
            pixels = np.random.default_rng(100 * number + index).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    data = open_dataset(tmp_path)
    assert "separate classes with similar names: 'CAT' = 'Cat' = 'cat'." in data.notes[0]
    code, output = doctor(tmp_path)
    assert code == 1
    assert "'CAT' = 'Cat' = 'cat'" in output


def test_many_similar_names_give_a_short_note():
    names = [name for i in range(1000) for name in (f"class {i}", f"class_{i}")]
    data = Dataset("t", names, Split(np.arange(2000), names, names))
    [note] = class_notes(data)
    assert "and 997 more groups" in note
    assert len(note) < 300
