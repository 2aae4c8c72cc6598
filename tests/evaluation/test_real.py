"""Accuracy by ImageNet-ReaL labels."""

import json

import numpy as np
import pytest

from tests.support.shared_data import shared
from vitrail.base.errors import FileError, InputError
from vitrail.evaluation.metrics import RealAccuracy, real_accuracy
from vitrail.evaluation.selection import read_real_labels


def test_real_accuracy_by_hand():
    logits = np.eye(4)  # predicts 0, 1, 2, 3
    assert real_accuracy(logits, [[0], [0, 1], [], [2, 0]]) == RealAccuracy(2 / 3, 3)
    assert real_accuracy(logits, [[0], [0, 1], [], [2, 0]], np.array([1, 0, 1, 1])) == RealAccuracy(1 / 2, 2)
    with pytest.raises(InputError, match=r"2 rows for 4 images; use the complete validation set"):
        real_accuracy(logits, [[0], [1]])
    with pytest.raises(InputError, match="No image has a ReaL label"):
        real_accuracy(logits, [[], [], [], []])


def test_real_labels_are_matched_by_file_name_or_else_by_order(tmp_path):
    file = tmp_path / "real.json"
    file.write_text(json.dumps([[0], [1, 2], [], [3]]))
    notes = []
    names = [f"val/n01/ILSVRC2012_val_{number:08}.JPEG" for number in (4, 2, 1)]
    assert read_real_labels(file, names, 4, notes) == [[3], [1, 2], [0]]
    assert notes == []
    assert read_real_labels(str(file), list("abcd"), 4, notes) == [[0], [1, 2], [], [3]]
    assert len(notes) == 1
    assert "by order" in notes[0]


def test_wrong_real_labels_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"2 rows .* 3 images without ImageNet's file names; use ImageNet's"):
        read_real_labels([[0], [1]], list("abc"), 4, [])
    for rows in ([[4]], [["0"]], [[True]], [0], {"0": [1]}, [[-1]]):
        with pytest.raises(InputError, match=r"class indices below 4 .* real\.json"):
            read_real_labels(rows, ["a"], 4, [])
    (tmp_path / "bad.json").write_text("[[")
    with pytest.raises(FileError, match=r"bad\.json is not valid JSON"):
        read_real_labels(tmp_path / "bad.json", ["a"], 4, [])


def test_the_published_real_labels():
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 50_001)]
    rows = read_real_labels(shared("data/imagenet_real.json"), names, 1000, [])
    assert (len(rows), sum(not row for row in rows)) == (50_000, 3_163)
    first = np.array([row[0] if row else 0 for row in rows])
    logits = np.zeros((50_000, 1000), dtype=np.int8)
    logits[np.arange(50_000), first] = 1
    assert real_accuracy(logits, rows) == RealAccuracy(1.0, 46_837)
    logits[:, 0] = 2  # always predicts tench
    assert real_accuracy(logits, rows) == RealAccuracy(sum(0 in row for row in rows) / 46_837, 46_837)
