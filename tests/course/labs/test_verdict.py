"""The rule of all verdicts, and that every saved verdict is what its numbers give."""

import json
import math

import pytest

from vitrail.experiment.study import Difference
from vitrail_course.labs import collect
from vitrail_course.labs.lab import find_lab, format_number, load_results, run_lab, verdict_fields
from vitrail_course.labs.verdict import (
    TOO_SMALL,
    Statement,
    Verdict,
    arm_reaches,
    compare_arms,
    confirming,
    decide,
    equal_within,
    fact,
    format_fraction,
    format_interval,
    format_points,
    gain,
    is_above,
    reaches,
)

TRUE, FALSE, UNCLEAR = (
    Statement(name, true, name) for name, true in (("A", True), ("B", False), ("C", None))
)
ON_CONDITION = fact("D", True, "0", "it rains")


def difference(low, high):
    return Difference((low + high) / 2, (low, high), 3)


@pytest.mark.parametrize(
    ("statements", "word"),
    [
        ([TRUE], "holds"),
        ([TRUE, TRUE], "holds"),
        ([ON_CONDITION], "partly"),
        ([TRUE, ON_CONDITION], "partly"),
        ([TRUE, FALSE], "partly"),
        ([TRUE, UNCLEAR], "partly"),
        ([FALSE], "does not hold"),
        ([FALSE, FALSE], "does not hold"),
        ([UNCLEAR], "not clear here"),
        ([UNCLEAR, UNCLEAR], "not clear here"),
        ([FALSE, UNCLEAR], "does not hold"),
        ([TRUE, FALSE, UNCLEAR], "partly"),
    ],
)
def test_words(statements, word):
    verdict = decide(statements)
    assert verdict.word == word
    assert all(statement.evidence in verdict.condition for statement in statements)


def test_texts_are_grouped():
    assert str(decide([TRUE, UNCLEAR, FALSE, ON_CONDITION])) == (
        "partly: True: A (A); D, if it rains (0). Not true: B (B). Not clear: C (C)"
    )
    assert decide([UNCLEAR]) == Verdict("not clear here", "C (C)")
    assert str(decide([UNCLEAR, FALSE])) == "does not hold: Not true: B (B). Not clear: C (C)"
    assert str(fact("D", False, "0", "it rains")) == "D (0)", "a condition does not save what is not true"


def test_an_interval_that_contains_the_threshold_decides_nothing():
    assert is_above((0.1, 0.2), 0.0) is True
    assert is_above((-0.2, -0.1), 0.0) is False
    for unclear in ((-0.1, 0.1), (0.0, 0.1), (-0.1, 0.0), None):
        assert is_above(unclear, 0.0) is None
    assert gain("x", difference(-0.01, 0.3)).true is None
    assert gain("x", difference(0.01, 0.3)).true
    assert gain("x", Difference(0.5, None, 1)).true is None, "one seed shows nothing"
    assert reaches("x", 0.897, (0.855, 0.938), 0.9).true is None
    assert reaches("x", 0.727, (0.662, 0.791), 0.9).true is False


def test_thresholds_are_printed():
    assert reaches("x", 0.897, (0.855, 0.938), 0.9).evidence == "89.7 [85.5, 93.8] %, threshold 90 %"
    assert reaches("x", 0.5, None, 0.9, n=3).evidence == "50.0 %, n = 3, threshold 90 %"
    assert gain("x", difference(0.1, 0.3)).evidence == "+20.0 [+10.0, +30.0] points, n = 3"
    assert gain("x", difference(0.1, 0.3), 0.05).evidence.endswith("points, n = 3, threshold 5")
    assert equal_within("x", difference(-0.1, 0.3), 0.01).evidence.endswith("equal from -1 to 1")
    assert format_interval(1.5, None) == "1.5"


def test_equality_needs_the_whole_interval_inside_the_margin():
    assert equal_within("x", difference(-0.005, 0.009), 0.01).true
    assert equal_within("x", difference(-0.005, 0.011), 0.01).true is None
    assert equal_within("x", difference(0.011, 0.02), 0.01).true is False
    assert equal_within("x", difference(0.25, 0.28), 0.02, expected=0.27).true is None
    assert equal_within("x", difference(0.26, 0.28), 0.02, expected=0.27).true
    assert equal_within("x", difference(0.2, 0.22), 0.02, expected=0.27).true is False
    assert equal_within("x", Difference(0.0, None, 1), 0.01).true is None


def test_the_seed_that_chose_a_learning_rate_is_not_counted():
    """Its score is the best of several learning rates on the same images."""
    lucky, other = [0.99, 0.8, 0.82], [0.5, 0.7, 0.71]
    assert confirming(lucky) == [0.8, 0.82]
    assert compare_arms(lucky, other, 360) == Difference.of([0.8, 0.82], [0.7, 0.71], 360)
    found = arm_reaches("x", lucky, 10_000, 0.9)
    assert found.evidence.startswith("81.0 [")
    assert ", n = 2, threshold 90 %" in found.evidence


@pytest.mark.parametrize("name", ["blocks", "gelu-relu", "norms", "pool", "positions", "translation"])
def test_saved_headlines_do_not_count_it(name):
    [result] = [one for one in load_results() if one["name"] == name]
    numbers = result["numbers"]
    by_fraction = numbers.get("accuracy by fraction", {})
    arms = by_fraction.get("0.01") or numbers.get("accuracy") or numbers.get("arms")
    first, second = {
        "blocks": ("16 x 32", "1 x 32"),
        "gelu-relu": ("GELU", "ReLU"),
        "norms": ("pre-norm", "no residual"),
        "pool": ("mean pooling", "class token"),
        "positions": ("learned", "none"),
        "translation": ("CNN", "ViT"),
    }[name]
    found = compare_arms(arms[first]["scores"], arms[second]["scores"], numbers["held out"])
    assert result["n"] == found.n == len(arms[first]["scores"]) - 1
    assert result["number"] == pytest.approx(100 * found.mean)
    assert result["interval"] == pytest.approx([100 * bound for bound in found.interval])


def test_small_runs_give_no_verdict(tmp_path):
    result = run_lab("scale", tmp_path, "small")
    assert (result["verdict"], result["condition"]) == (TOO_SMALL.word, TOO_SMALL.condition)
    assert "verdict" not in result["numbers"]


@pytest.mark.parametrize("result", load_results(), ids=lambda result: result["name"])
def test_saved_verdicts_are_what_the_saved_numbers_give(result):
    """`python -m vitrail_course.labs.collect --verdicts` decides them again."""
    assert verdict_fields(result["name"], result["numbers"], "full") == {
        "verdict": result["verdict"],
        "condition": result["condition"],
    }


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


def test_deciding_again_changes_only_what_the_numbers_change():
    results = load_results()
    assert collect.decide_again(results) == results
    wrong = [{**results[0], "verdict": "does not hold", "condition": ""}]
    assert collect.decide_again(wrong) == results[:1]


def test_numbers_are_json():
    for result in load_results():
        assert json.loads(json.dumps(result["numbers"])) == result["numbers"]
        assert not any(
            isinstance(value, float) and not math.isfinite(value) for value in result["numbers"].values()
        )
        assert callable(find_lab(result["name"]).decide_verdict)


def test_rounding_does_not_hide_on_which_side_of_zero_a_bound_lies():
    assert format_points(Difference(0.0087, (0.0004, 0.017), 7)) == "+0.87 [+0.04, +1.70] points"
    assert format_points(Difference(0.2, (0.131, 0.269), 3)) == "+20.0 [+13.1, +26.9] points"
    assert format_points(Difference(0.0, None, 1)) == "+0.0 points"


def test_rounding_does_not_hide_that_an_interval_has_a_width():
    assert format_fraction(1.0, (0.99981, 1.0)) == "100.00 [99.98, 100.00] %"
    assert format_fraction(0.897, (0.83, 0.939)) == "89.7 [83.0, 93.9] %"
    assert format_fraction(0.5, None) == "50.0 %"
    saved = next(result for result in load_results() if result["name"] == "double-if")
    assert format_number(saved).startswith("1 [0.9998, 1] accuracy")
    assert "(100.00 [99.98, 100.00] %, threshold 99 %" in saved["condition"]
