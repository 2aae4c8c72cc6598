"""Scores against scikit-learn, on random logits with ties and on real ones; ReaL labels."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as sk
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier

from vitrail.errors import FileError, InputError
from vitrail.evaluation.metrics import real_accuracy, real_labels, score

NAMES = [f"class {k}" for k in range(10)]
SHARED = Path(__file__).parents[3] / "shared" / "data"


def random_logits(ties):
    chance = np.random.default_rng(0)
    logits, labels = chance.normal(size=(500, 10)).astype(np.float32), chance.integers(0, 10, 500)
    logits[np.arange(500), labels] += 1
    logits = np.round(logits) if ties else logits
    labels[labels == 7] = 6  # a class that no picture shows
    logits[:, 3] = -9  # a class that is never said
    return logits, labels


def digit_logits():
    x, y = load_digits(return_X_y=True)
    model = RidgeClassifier().fit(x[:900], y[:900])
    return 3 * model.decision_function(x[900:]), y[900:]


CASES = {"random": random_logits(False), "ties": random_logits(True), "digits": digit_logits()}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def softmax(logits):
    raised = np.exp(logits.astype(np.float64))
    return raised / raised.sum(axis=1, keepdims=True)


def test_shares_are_those_of_scikit_learn(case):
    logits, labels = case
    found, said = score(logits, labels, NAMES), logits.argmax(axis=1)
    assert found.count == len(labels)
    assert found.top1 == sk.accuracy_score(labels, said)
    assert found.loss == pytest.approx(sk.log_loss(labels, softmax(logits), labels=range(10)), rel=1e-9)
    assert found.confusion == sk.confusion_matrix(labels, said, labels=range(10)).tolist()
    how = dict(labels=range(10), average=None, zero_division=np.nan)
    for name, theirs in (
        ("precision", sk.precision_score(labels, said, **how)),
        ("recall", sk.recall_score(labels, said, **how)),
    ):
        ours = [getattr(row, name) for row in found.per_class]
        assert [np.nan if share is None else share for share in ours] == pytest.approx(theirs, nan_ok=True)
    assert [row.count for row in found.per_class] == np.bincount(labels, minlength=10).tolist()
    assert [row.name for row in found.per_class] == NAMES


def test_nobody_and_never_are_not_zero():
    rows = score(*CASES["random"], NAMES).per_class
    assert rows[7].recall is None
    assert rows[3].precision is None
    assert rows[3].recall == 0


def test_top_5_is_that_of_scikit_learn():
    for case in ("random", "digits"):
        logits, labels = CASES[case]
        theirs = sk.top_k_accuracy_score(labels, logits, k=5, labels=range(10))
        assert score(logits, labels, NAMES).top5 == pytest.approx(theirs)


def test_a_model_that_says_the_same_of_every_class_is_not_always_right():
    found = score(np.zeros((10, 10)), np.arange(10), NAMES)
    assert (found.top1, found.top5) == (0.1, 0.5)
    assert score(np.zeros((3, 5)), np.zeros(3, dtype=int), NAMES[:5]).top5 is None


def test_the_worst_mistakes_are_the_surest():
    logits, labels = CASES["random"]
    names = [f"picture {i}" for i in range(len(labels))]
    found = score(logits, labels, NAMES, names=names, worst=1000).mistakes
    said, sure = logits.argmax(axis=1), softmax(logits).max(axis=1)
    assert len(found) == (said != labels).sum()
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        i = names.index(one.name)
        assert (one.said, one.was) == (NAMES[said[i]], NAMES[labels[i]])
        assert one.said != one.was
        assert one.score == pytest.approx(sure[i])
    assert score(logits, labels, NAMES, worst=3).mistakes == [
        type(one)(one.name.split()[1], one.said, one.was, one.score) for one in found[:3]
    ]


def test_what_is_not_kept_counts_for_nothing(case):
    logits, labels = case
    kept = np.arange(len(labels)) % 3 > 0
    broken = np.where(kept[:, None], logits, np.nan)  # whatever stands there
    names = [str(i) for i in range(len(labels))]
    few = score(logits[kept], labels[kept], NAMES, names=[n for n, k in zip(names, kept, strict=True) if k])
    assert score(broken, labels, NAMES, kept.astype(np.float32), names) == few


def test_a_large_confusion_matrix_is_left_out():
    classes = [str(k) for k in range(201)]
    logits = np.eye(201)
    assert score(logits, np.arange(201), classes).confusion is None
    assert score(logits[:200, :200], np.arange(200), classes[:200]).confusion == np.eye(200).tolist()


def test_large_logits_are_no_trouble():
    found = score(np.array([[1e4, 0.0], [0.0, 1e4]]), np.array([0, 0]), ["a", "b"])
    assert found.loss == 5000
    assert found.mistakes[0].score == 1


@pytest.mark.parametrize("ties", [False, True])
def test_several_classes_against_scikit_learn(ties):
    chance = np.random.default_rng(1)
    labels = (chance.random((300, 6)) < 0.3).astype(np.int64)
    labels[:, 5] = 0
    logits = chance.normal(size=(300, 6)) * 2 + labels
    logits = np.round(logits) + 0.25 if ties else logits
    found = score(logits, labels, NAMES[:6])
    theirs = [sk.average_precision_score(labels[:, k], logits[:, k]) for k in range(5)]
    assert [row.ap for row in found.per_class[:5]] == pytest.approx(theirs)
    assert found.per_class[5].ap is None
    assert found.mean_ap == pytest.approx(np.mean(theirs))
    said = logits > 0
    assert found.exact == sk.accuracy_score(labels, said)
    how = dict(average=None, zero_division=0)
    assert [row.precision for row in found.per_class] == pytest.approx(
        sk.precision_score(labels, said, **how)
    )
    assert [row.recall for row in found.per_class[:5]] == pytest.approx(
        sk.recall_score(labels, said, **how)[:5]
    )
    chances = 1 / (1 + np.exp(-logits))
    assert found.loss == pytest.approx(
        np.mean([sk.log_loss(labels[:, k], chances[:, k], labels=[0, 1]) for k in range(6)])
    )
    assert found.top1 is found.top5 is found.ece is found.confusion is None
    worst = found.mistakes[0]
    row = int(worst.name)
    assert labels[row, logits[row].argmax()] == 0
    assert worst.said == NAMES[logits[row].argmax()]
    assert worst.was == (", ".join(NAMES[k] for k in np.flatnonzero(labels[row])) or "none")
    assert worst.score == pytest.approx(chances[row].max())


def test_each_error_says_what_to_do():
    def said(*arguments, **more):
        with pytest.raises(InputError) as caught:
            score(*arguments, **more)
        return str(caught.value)

    zeros = np.zeros((2, 3))
    assert said(zeros, np.zeros(2, dtype=int), ["a", "b"]) == (
        "Logits must be (N, K) and labels (N,) or (N, K), for K classes. Got logits (2, 3), labels (2,) and 2 classes. "
        "Compare the model with the data."
    )
    assert said(zeros, np.array([0, 3]), ["a", "b", "c"]) == (
        "Labels must be numbers from 0 to 2. Got 0 to 3. Check the data."
    )
    assert said(zeros, np.array([0, 1]), ["a", "b", "c"], np.zeros(2)) == (
        "There must be pictures to judge by. Got none that could be read. Check the data."
    )
    assert said(zeros * np.nan, np.array([0, 1]), ["a", "b", "c"]) == (
        "A model's logits must be finite. Got NaN or infinity for 2 of 2 pictures. "
        "Look at the weights with `vitrail info MODEL --check`."
    )


# ---- ReaL -----------------------------------------------------------------------------------


def test_real_accuracy_by_hand():
    logits = np.eye(4)  # says 0, 1, 2, 3
    assert real_accuracy(logits, [[0], [0, 1], [], [2, 0]]) == (2 / 3, 3)
    assert real_accuracy(logits, [[0], [0, 1], [], [2, 0]], np.array([1, 0, 1, 1])) == (1 / 2, 2)
    with pytest.raises(
        InputError,
        match=r"^There must be a row of ReaL labels for each picture. Got 2 for 4 pictures. Use all of val.$",
    ):
        real_accuracy(logits, [[0], [1]])
    with pytest.raises(
        InputError, match=r"^ReaL labels must name a class of some picture. Got none that does. Check them.$"
    ):
        real_accuracy(logits, [[], [], [], []])


def test_real_labels_go_by_the_name_of_the_file(tmp_path):
    file = tmp_path / "real.json"
    file.write_text(json.dumps([[0], [1, 2], [], [3]]))
    notes = []
    names = [f"val/n01/ILSVRC2012_val_{number:08}.JPEG" for number in (4, 2, 1)]
    assert real_labels(file, names, 4, notes) == [[3], [1, 2], [0]]
    assert notes == []
    assert real_labels(str(file), list("abcd"), 4, notes) == [[0], [1, 2], [], [3]]
    assert notes == ["The ReaL labels are taken in the order of the pictures."]


def test_wrong_real_labels(tmp_path):
    with pytest.raises(
        InputError,
        match=r"^ReaL labels must belong to the pictures. Got 2 rows for 3 pictures without ImageNet's file names. Use ImageNet's val.$",
    ):
        real_labels([[0], [1]], list("abc"), 4, [])
    for rows in ([[4]], [["0"]], [[True]], [0], {"0": [1]}, [[-1]]):
        with pytest.raises(
            InputError,
            match=r"^ReaL labels must be a list of class numbers below 4 for each picture. Got something else. Use its real.json, with a model of ImageNet's classes.$",
        ):
            real_labels(rows, ["a"], 4, [])
    (tmp_path / "bad.json").write_text("[[")
    with pytest.raises(FileError, match=r"^ReaL labels must be JSON. Got .*bad.json: .* Use its real.json.$"):
        real_labels(tmp_path / "bad.json", ["a"], 4, [])


@pytest.mark.skipif(not (SHARED / "imagenet_real.json").exists(), reason="the labels are not here")
def test_the_published_real_labels():
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 50_001)]
    rows = real_labels(SHARED / "imagenet_real.json", names, 1000, [])
    assert (len(rows), sum(not row for row in rows)) == (50_000, 3_163)
    first = np.array([row[0] if row else 0 for row in rows])
    logits = np.zeros((50_000, 1000), dtype=np.int8)
    logits[np.arange(50_000), first] = 1
    assert real_accuracy(logits, rows) == (1.0, 46_837)
    logits[:, 0] = 2  # always says tench
    assert real_accuracy(logits, rows) == (sum(0 in row for row in rows) / 46_837, 46_837)
