"""Lab `resolution`: what becomes of positions on a larger grid, and what that is worth before and after tuning."""

import numpy as np
import pytest
import torch

from vitrail.labs import resolution as lab
from vitrail.labs.given import opened
from vitrail.labs.job import Job, do, judge
from vitrail.labs.lab import Verdict
from vitrail.labs.study import Difference, settled
from vitrail.labs.trial import one_thread
from vitrail.model import ViT
from vitrail.model.resample import resize_grid

UP = Difference(0.1, (0.08, 0.12), 3)
FLAT = Difference(0.01, (-0.02, 0.04), 3)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("resolution"), "small")


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    fields = dict(size=(16, 16), patch=(4, 4), channels=1, width=8, depth=1, heads=2)
    recipe = settled(lab.RECIPE, opened(None, 40, 20), {}, {"model": fields}, 1e-3, 0)
    return ViT(recipe.model)


def test_a_number_a_picture_a_verdict(result):
    before, after = result.numbers["before tuning"], result.numbers["after tuning"]
    assert list(before) == list(after) == list(lab.ARMS)
    assert all(len(scores) == 2 for scores in (*before.values(), *after.values()))
    each = np.subtract(before["interpolated"], before["new random"])
    assert result.number == pytest.approx(100 * each.mean())
    assert result.verdict.word in ("holds", "holds if", "does not hold")
    assert "200 pictures to learn from and 60 held out, at 16x16 pixels" in result.sentence
    assert "At 32x32" in result.sentence
    assert len(result.figure.axes) == 2


def test_positions_on_the_larger_grid(trained):
    old = trained.position.table.detach()
    states = {arm: lab.begin(arm, trained, 0) for arm in lab.ARMS}
    for state in states.values():
        assert state["position.table"].shape == (65, 8)  # 8 x 8 patches and the class token
        assert np.array_equal(state["position.table"][0], old[0].numpy())  # whose row stays
        assert np.array_equal(state["tokens.proj.weight"], trained.tokens.proj.weight.detach().numpy())
    stretched = resize_grid(old[1:], (4, 4), (8, 8)).numpy()
    assert np.array_equal(states[lab.INTERPOLATED]["position.table"][1:], stretched)
    numbered = states[lab.NUMBERED]["position.table"]
    assert np.array_equal(numbered[:17], old.numpy())
    assert not numbered[17:].any()
    new = states[lab.RANDOM]["position.table"][1:]
    assert new.std() == pytest.approx(lab.SIGMA, rel=0.15)
    assert np.array_equal(new, lab.begin(lab.RANDOM, trained, 0)["position.table"][1:])
    assert not np.array_equal(new, lab.begin(lab.RANDOM, trained, 1)["position.table"][1:])


def test_what_is_judged_before_tuning_is_what_was_trained():
    """At the resolution it was trained at, the weights get what they got."""
    data = lab.pictures_at(opened(None, 100, 50), (16, 16), 1)
    fields = dict(size=(16, 16), patch=(4, 4), channels=1, width=16, depth=1, heads=2)
    recipe = settled(lab.RECIPE, data, {}, {"model": fields, "epochs": 5, "batch": 20}, 1e-2, 0)
    with one_thread():
        done = do(Job(recipe, keep=(5,)), data)
        assert judge(Job(recipe, start=done.states[5]), data) == done.score
        assert judge(Job(recipe), data) != done.score


def test_the_verdict_can_go_every_way():
    def gains(*four):
        arms = (lab.RANDOM, lab.NUMBERED)
        return {
            "before": dict(zip(arms, four[:2], strict=True)),
            "after": dict(zip(arms, four[2:], strict=True)),
        }

    assert lab.judge(gains(UP, UP, UP, UP)) == Verdict("holds")
    found = lab.judge(gains(UP, UP, FLAT, FLAT))
    assert found.word == "holds if"
    assert (
        "before tuning interpolated rows are clearly better than new random and by number" in found.condition
    )
    assert "after it interpolated rows are not clearly better" in found.condition
    assert lab.judge(gains(FLAT, UP, FLAT, FLAT)).word == "holds if"
    worse = Difference(-0.1, (-0.12, -0.08), 3)
    assert lab.judge(gains(worse, FLAT, worse, FLAT)).word == "does not hold"
