"""Every lab that sweeps learning rates saves the rates and their scores, and warns of a rate at an edge."""

import json

import pytest

from vitrail.experiment.study import edge_note, scores_by_lr
from vitrail.experiment.trial import Trial, one_thread
from vitrail_course.labs.lab import LABS, find_lab
from vitrail_course.labs.lr_sweep import SweepResult
from vitrail_course.labs.translation import _edge_notes

SWEEPING = [  # labs that choose a learning rate; the others use one, or train nothing
    *("activation", "blocks", "norms", "pool", "positions", "resolution"),
    *("tokens", "translation"),
]


def find_sweeps(numbers):
    """All sweeps in the numbers of a result: mappings of learning rates to scores."""
    for name, value in numbers.items():
        if name.startswith("sweep"):
            yield from leaves(value)
        elif isinstance(value, dict):
            yield from find_sweeps(value)


def leaves(value):
    if all(isinstance(part, dict) for part in value.values()):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


@pytest.mark.slow  # trains small models of ten labs
@pytest.mark.parametrize("name", SWEEPING)
def test_the_sweep_is_saved(name, tmp_path):
    with one_thread():
        result = find_lab(name).run(tmp_path, "small")
    numbers = json.loads(json.dumps(result.numbers))
    sweeps = list(find_sweeps(numbers))
    assert len(sweeps) >= 2, "one for each arm"
    for sweep in sweeps:
        assert sweep
        assert all(float(lr) > 0 and isinstance(score, float) for lr, score in sweep.items())


def test_all_labs_that_sweep_are_tested():
    """A lab sweeps if its module warns of learning rates at an edge, itself or by its study."""
    for name in LABS:
        lab = find_lab(name)
        sweeps = any(hasattr(lab, word) for word in ("edge_note", "study", "sweep_learning_rates"))
        assert sweeps == (name in SWEEPING), name


def test_scores_by_learning_rate_are_means_in_order():
    trials = [Trial("a", lr, seed, lr + seed, 0.0, 0.0) for lr in (0.1, 0.01) for seed in (0, 1)]
    assert scores_by_lr(trials) == {0.01: pytest.approx(0.51), 0.1: pytest.approx(0.6)}
    assert list(scores_by_lr(trials)) == [0.01, 0.1]


def test_a_rate_at_an_edge_is_a_warning():
    sweep = {0.001: 0.5, 0.01: 0.7, 0.1: 0.9}
    assert edge_note("a", 0.1, [*sweep]).endswith("is the highest tried; extend the range.")
    assert edge_note("a", 0.001, [*sweep]).endswith("is the lowest tried; extend the range.")
    assert edge_note("a", 0.01, [*sweep]) == ""
    arms = {"40 steps": {"CNN": SweepResult(0.1, [0.9], {}, sweep)}}
    assert _edge_notes(arms, [*sweep]) == [
        "The best learning rate of the CNN with 40 steps, 0.1, is the highest tried; extend the range."
    ]
