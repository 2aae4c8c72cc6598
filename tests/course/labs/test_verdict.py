"""Verdicts: the words of each kind, thresholds and their sources, and the saved results."""

import json
import math

import pytest

from vitrail.experiment.study import Difference
from vitrail_course.labs import collect
from vitrail_course.labs.lab import (
    RESULTS,
    format_number,
    load_results,
    result_verdict,
    run_lab,
    verdict_fields,
)
from vitrail_course.labs.verdict import (
    NO_DIFFERENCE,
    OURS,
    TOO_SMALL,
    WORDS,
    Statement,
    Verdict,
    compare_arms,
    confirming,
    equal_within,
    exceeds,
    format_fraction,
    format_interval,
    format_points,
    gain,
    identity,
    is_above,
    reaches,
)


def statement(true, kind="toy experiment", condition=""):
    return Statement("A", kind, true, "1", "0", OURS, condition)


def difference(low, high):
    return Difference((low + high) / 2, (low, high), 3)


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize(
    ("truths", "word"),
    [
        ([True, True], 0),
        ([True, False], 1),
        ([True, None], 1),
        ([False, False], 2),
        ([False, None], 2),
        ([None, None], "not clear"),
    ],
)
def test_words(kind, truths, word):
    verdict = Verdict([statement(true, kind) for true in truths])
    expected = word if isinstance(word, str) else WORDS[kind][word]
    assert verdict.words == {kind: expected}
    assert str(verdict) == f"{kind}: {expected}"


def test_kinds_are_decided_apart():
    mixed = Verdict([statement(True, "identity"), statement(False), statement(True, "replication")])
    assert mixed.words == {"identity": "holds", "replication": "replicated", "toy experiment": "not seen"}


def test_a_toy_experiment_never_says_that_a_claim_holds():
    assert not {"holds", "does not hold", "replicated"} & set(WORDS["toy experiment"])


def test_a_condition_makes_it_partly():
    assert Verdict([statement(True, "identity", "it rains")]).words == {"identity": "partly holds"}
    assert statement(True, "identity", "it rains").answer == "holds, if it rains"
    assert statement(False, "identity", "it rains").answer == "does not hold", "a condition saves nothing"
    assert str(statement(None)) == "A: not clear (1; threshold 0, our choice)"


def test_an_interval_that_contains_the_threshold_decides_nothing():
    assert is_above((0.1, 0.2), 0.0) is True
    assert is_above((-0.2, -0.1), 0.0) is False
    for unclear in ((-0.1, 0.1), (0.0, 0.1), (-0.1, 0.0), None):
        assert is_above(unclear, 0.0) is None
    assert gain("x", difference(-0.01, 0.3)).true is None
    assert gain("x", difference(0.01, 0.3)).true
    assert gain("x", Difference(0.5, None, 1)).true is None, "one seed shows nothing"
    assert exceeds("x", [1.0, 1.1, 1.2], 0.5, OURS).true
    assert exceeds("x", [1.0, 1.1, 1.2], 0.5, OURS, below=True).true is False
    assert exceeds("x", [0.1, 0.9], 0.5, OURS).true is None
    assert reaches("x", [0.5], 100, 0.9, OURS).true is None


def test_statements_print_measurement_threshold_and_source():
    found = gain("x", difference(0.1, 0.3))
    assert (found.evidence, found.threshold) == ("+20.0 [+10.0, +30.0] points, n = 3", "0")
    assert found.source == NO_DIFFERENCE
    found = reaches("x", [0.8, 0.82], 10_000, 0.9, "note 002")
    assert found.evidence.startswith("81.0 [")
    assert (found.evidence[-5:], found.threshold, found.source) == ("n = 2", "90 %", "note 002")
    assert equal_within("x", difference(-0.1, 0.3), 0.01, OURS).threshold == "-1 to 1 points"
    assert identity("x", True, "0", "1e-12").source == "rounding of float64"
    assert format_interval(1.5, None) == "1.5"


def test_equality_needs_the_whole_interval_inside_the_margin():
    def true(low, high, expected=0.0, margin=0.01):
        return equal_within("x", difference(low, high), margin, OURS, expected=expected).true

    assert true(-0.005, 0.009)
    assert true(-0.005, 0.011) is None
    assert true(0.011, 0.02) is False
    assert true(0.25, 0.28, 0.27, 0.02) is None
    assert true(0.26, 0.28, 0.27, 0.02)
    assert equal_within("x", Difference(0.0, None, 1), 0.01, OURS).true is None


def test_the_seed_that_chose_a_learning_rate_is_not_counted():
    """Its score is the best of several learning rates on the same images."""
    lucky, other = [0.99, 0.8, 0.82], [0.5, 0.7, 0.71]
    assert confirming(lucky) == [0.8, 0.82]
    assert compare_arms(lucky, other, 360) == Difference.of([0.8, 0.82], [0.7, 0.71], 360)


@pytest.mark.parametrize("name", ["activation", "blocks", "norms", "pool", "positions", "translation"])
def test_saved_headlines_do_not_count_it(name):
    [result] = [one for one in load_results() if one["name"] == name]
    numbers = result["numbers"]
    by_fraction = numbers.get("accuracy by fraction", {})
    arms = by_fraction.get("0.01") or numbers.get("accuracy") or numbers.get("arms")
    first, second = {
        "activation": ("GELU", "ReLU"),
        "blocks": ("16 x 32", "1 x 32"),
        "norms": ("pre-norm", "no residual"),
        "pool": ("mean pooling", "class token"),
        "positions": ("learned", "none"),
        "translation": ("CNN", "ViT"),
    }[name]
    found = compare_arms(arms[first]["scores"], arms[second]["scores"], numbers["held out"])
    assert result["n"] == found.n == len(arms[first]["scores"]) - 1
    assert result["number"] == pytest.approx(100 * found.mean)
    assert result["interval"] == pytest.approx([100 * bound for bound in found.interval], rel=1e-4)


def test_small_runs_give_no_verdict(tmp_path):
    result = run_lab("scale", tmp_path, "small")
    assert (result["verdict"], result["statements"]) == (TOO_SMALL, [])


@pytest.mark.parametrize("result", load_results(), ids=lambda result: result["name"])
def test_every_saved_result_has_a_verdict_with_sources(result):
    assert result["size"] == "full"
    statements = result_verdict(result).statements
    assert statements
    assert all(one.threshold and one.source and one.evidence for one in statements)
    assert verdict_fields(result)["verdict"] == str(result_verdict(result))


@pytest.mark.parametrize("result", load_results(), ids=lambda result: result["name"])
def test_saved_intervals_have_width_and_fractions_stay_between_0_and_1(result):
    def intervals(value):
        if isinstance(value, dict):
            if value.get("interval"):
                yield value
            for part in value.values():
                yield from intervals(part)

    for one in intervals(result["numbers"]):
        low, high = one["interval"]
        assert 0 <= low < high <= 1
        assert low <= one["mean"] <= high
    if result["interval"]:
        low, high = result["interval"]
        assert low < result["number"] < high or (low < high and result["number"] in (low, high))
        if not any(word in result["unit"] for word in ("points", "%", "times", "nats")):
            assert 0 <= low < high <= 1


def test_a_new_result_replaces_the_old_one_in_the_order_of_the_labs(tmp_path):
    file = tmp_path / "results.json"
    saved = json.loads(RESULTS.read_text())
    file.write_text(json.dumps(saved[1:3]))
    new = load_results()[0] | {"verdict": "x", "statements": []}
    collect.save_result(new, file)
    collect.save_result({**new, "n": 7}, file)
    assert json.loads(file.read_text()) == [{**saved[0], "n": 7}, *saved[1:3]]


def test_numbers_are_finite():
    for result in load_results():
        values = result["numbers"].values()
        assert not any(isinstance(value, float) and not math.isfinite(value) for value in values)


def test_rounding_does_not_hide_on_which_side_of_zero_a_bound_lies():
    assert format_points(Difference(0.0087, (0.0004, 0.017), 7)) == "+0.87 [+0.04, +1.70] points"
    assert format_points(Difference(0.2, (0.131, 0.269), 3)) == "+20.0 [+13.1, +26.9] points"
    assert format_points(Difference(0.0, None, 1)) == "+0.0 points"


def test_rounding_does_not_hide_that_an_interval_has_a_width():
    assert format_fraction(1.0, (0.99981, 1.0)) == "100.00 [99.98, 100.00] %"
    assert format_fraction(0.897, (0.83, 0.939)) == "89.7 [83.0, 93.9] %"
    assert format_fraction(0.5, None) == "50.0 %"
    assert format_number({"number": 1.0, "interval": (0.99981, 1.0), "unit": "x", "n": 3}).startswith(
        "1 [0.9998"
    )
