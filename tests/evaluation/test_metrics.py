"""Classification metrics against scikit-learn, on random logits with and without ties and on digits."""

import numpy as np
import pytest
from sklearn import metrics as sk
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier

from vitrail.base.errors import InputError
from vitrail.evaluation.metrics import compute_metrics
from vitrail.weights.bundle.scores import Scores

NAMES = [f"class {k}" for k in range(10)]


def random_logits(ties):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(500, 10)).astype(np.float32), rng.integers(0, 10, 500)
    logits[np.arange(500), labels] += 1
    logits = np.round(logits) if ties else logits
    labels[labels == 7] = 6  # a class without images
    logits[:, 3] = -9  # a class that is never predicted
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
    exp = np.exp(logits.astype(np.float64))
    return exp / exp.sum(axis=1, keepdims=True)


def test_metrics_match_scikit_learn(case):
    logits, labels = case
    result, predicted = compute_metrics(logits, labels, NAMES), logits.argmax(axis=1)
    assert result.count == len(labels)
    assert result.top1 == sk.accuracy_score(labels, predicted)
    assert result.loss == pytest.approx(sk.log_loss(labels, softmax(logits), labels=range(10)), rel=1e-9)
    assert result.confusion == sk.confusion_matrix(labels, predicted, labels=range(10)).tolist()
    how = dict(labels=range(10), average=None, zero_division=np.nan)
    for name, theirs in (
        ("precision", sk.precision_score(labels, predicted, **how)),
        ("recall", sk.recall_score(labels, predicted, **how)),
    ):
        ours = [getattr(row, name) for row in result.per_class]
        assert [np.nan if value is None else value for value in ours] == pytest.approx(theirs, nan_ok=True)
    present = np.unique(labels)  # a class without images has no F1, and is not in the mean
    f1 = sk.f1_score(labels, predicted, labels=present, average=None, zero_division=0)
    assert [row.f1 for row in result.per_class if row.count] == pytest.approx(f1)
    assert all(row.f1 is None for row in result.per_class if not row.count)
    assert result.macro_f1 == pytest.approx(np.mean(f1))
    assert [row.count for row in result.per_class] == np.bincount(labels, minlength=10).tolist()
    assert [row.name for row in result.per_class] == NAMES


def test_recall_without_images_and_precision_without_predictions_are_none():
    rows = compute_metrics(*CASES["random"], NAMES).per_class
    assert rows[7].recall is None
    assert rows[3].precision is None
    assert rows[3].recall == 0


def test_top_5_accuracy_matches_scikit_learn():
    for case in ("random", "digits"):
        logits, labels = CASES[case]
        theirs = sk.top_k_accuracy_score(labels, logits, k=5, labels=range(10))
        assert compute_metrics(logits, labels, NAMES).top5 == pytest.approx(theirs)


def test_ties_go_to_the_first_class():
    result = compute_metrics(np.zeros((10, 10)), np.arange(10), NAMES)
    assert (result.top1, result.top5) == (0.1, 0.5)
    assert compute_metrics(np.zeros((3, 5)), np.zeros(3, dtype=int), NAMES[:5]).top5 is None


def test_mistakes_are_sorted_by_confidence():
    logits, labels = CASES["random"]
    names = [f"image {i}" for i in range(len(labels))]
    result = compute_metrics(logits, labels, NAMES, names=names, worst=1000).mistakes
    predicted, confidence = logits.argmax(axis=1), softmax(logits).max(axis=1)
    assert len(result) == (predicted != labels).sum()
    assert [one.confidence for one in result] == sorted((one.confidence for one in result), reverse=True)
    for one in result:
        i = names.index(one.name)
        assert (one.predicted, one.label) == (NAMES[predicted[i]], NAMES[labels[i]])
        assert one.predicted != one.label
        assert one.confidence == pytest.approx(confidence[i])
    assert compute_metrics(logits, labels, NAMES, worst=3).mistakes == [
        type(one)(one.name.split()[1], one.predicted, one.label, one.confidence) for one in result[:3]
    ]


def test_invalid_images_are_ignored(case):
    logits, labels = case
    valid = np.arange(len(labels)) % 3 > 0
    broken = np.where(valid[:, None], logits, np.nan)
    names = [str(i) for i in range(len(labels))]
    few = compute_metrics(
        logits[valid], labels[valid], NAMES, names=[n for n, v in zip(names, valid, strict=True) if v]
    )
    assert compute_metrics(broken, labels, NAMES, valid.astype(np.float32), names) == few


def test_a_large_confusion_matrix_is_not_computed():
    classes = [str(k) for k in range(201)]
    logits = np.eye(201)
    assert compute_metrics(logits, np.arange(201), classes).confusion is None
    assert (
        compute_metrics(logits[:200, :200], np.arange(200), classes[:200]).confusion == np.eye(200).tolist()
    )


def test_large_logits_do_not_overflow():
    result = compute_metrics(np.array([[1e4, 0.0], [0.0, 1e4]]), np.array([0, 0]), ["a", "b"])
    assert result.loss == 5000
    assert result.mistakes[0].confidence == 1


@pytest.mark.parametrize("ties", [False, True])
def test_multi_label_metrics_match_scikit_learn(ties):
    rng = np.random.default_rng(1)
    labels = (rng.random((300, 6)) < 0.3).astype(np.int64)
    labels[:, 5] = 0
    logits = rng.normal(size=(300, 6)) * 2 + labels
    logits = np.round(logits) + 0.25 if ties else logits
    result = compute_metrics(logits, labels, NAMES[:6])
    theirs = [sk.average_precision_score(labels[:, k], logits[:, k]) for k in range(5)]
    assert [row.ap for row in result.per_class[:5]] == pytest.approx(theirs)
    assert result.per_class[5].ap is None
    assert result.mean_ap == pytest.approx(np.mean(theirs))
    predicted = logits > 0
    assert result.exact == sk.accuracy_score(labels, predicted)
    how = dict(average=None, zero_division=0)
    assert [row.precision for row in result.per_class] == pytest.approx(
        sk.precision_score(labels, predicted, **how)
    )
    assert [row.recall for row in result.per_class[:5]] == pytest.approx(
        sk.recall_score(labels, predicted, **how)[:5]
    )
    f1 = sk.f1_score(labels, predicted, **how)[:5]
    assert [row.f1 for row in result.per_class] == [*(pytest.approx(one) for one in f1), None]
    assert result.macro_f1 == pytest.approx(np.mean(f1))
    probabilities = 1 / (1 + np.exp(-logits))
    assert result.loss == pytest.approx(
        np.mean([sk.log_loss(labels[:, k], probabilities[:, k], labels=[0, 1]) for k in range(6)])
    )
    assert result.top1 is result.top5 is result.ece is result.confusion is None
    worst = result.mistakes[0]
    row = int(worst.name)
    assert labels[row, logits[row].argmax()] == 0
    assert worst.predicted == NAMES[logits[row].argmax()]
    assert worst.label == (", ".join(NAMES[k] for k in np.flatnonzero(labels[row])) or "none")
    assert worst.confidence == pytest.approx(probabilities[row].max())


def test_multi_label_predictions_are_above_the_thresholds_of_their_classes():
    labels = np.array([[1, 0], [1, 1], [0, 1]])
    scores = np.array([[0.3, 0.6], [0.4, 0.9], [0.1, 0.8]])
    logits = np.log(scores / (1 - scores))
    half = compute_metrics(logits, labels, ["a", "b"])
    chosen = Scores(activation="sigmoid", thresholds=(0.2, 0.7))
    result = compute_metrics(logits, labels, ["a", "b"], scores=chosen)
    assert (half.exact, result.exact) == (pytest.approx(1 / 3), 1.0)
    assert [row.f1 for row in result.per_class] == [1.0, 1.0]
    assert result.mean_ap == half.mean_ap


def test_sigmoid_scores_of_single_label_data():
    logits, labels = np.array([[2.0, 1.0], [-1.0, -3.0]]), np.array([0, 1])
    result = compute_metrics(logits, labels, ["a", "b"], scores=Scores(activation="sigmoid"))
    assert (result.top1, result.mistakes[0].confidence) == (0.5, pytest.approx(1 / (1 + np.e)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (np.zeros((2, 3)), np.zeros(2, dtype=int), ["a", "b"]),
            r"shape \(N, 2\) .* not \(2, 3\) and \(2,\)",
        ),
        (
            (np.zeros((2, 3)), np.array([0, 3]), list("abc")),
            r"integers from 0 to 2, not 0 to 3; check the data",
        ),
        ((np.zeros((2, 3)), np.array([0, 1]), list("abc"), np.zeros(2)), r"no images .* Check the data"),
        (
            (np.full((2, 3), np.nan), np.array([0, 1]), list("abc")),
            r"NaN .* for 2 of 2 images; .*`vitrail info",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        compute_metrics(*arguments)
