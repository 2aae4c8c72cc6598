"""The loop of labs that train no run of a recipe: it learns, is the same twice, and in any process."""

import os

import pytest
import torch
from torch import nn

from vitrail.errors import InputError
from vitrail.labs.descent import descend, share
from vitrail.labs.lesson import BATCH, Lesson, at_best_rates, drawn, learn
from vitrail.labs.trial import Pool, each, one_thread, processes_for


@pytest.fixture(autouse=True)
def alone():
    with one_thread():
        yield


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


def lesson(rate=0.05, seed=0, steps=60):
    """Two classes that one linear layer tells apart."""
    images = torch.randn(96, 1, 2, 2, generator=torch.Generator().manual_seed(5))
    labels = (images.sum(dim=(1, 2, 3)) > 0).long()
    return Lesson(flat, images[:64], labels[:64], (images[64:], labels[64:]), steps, rate, seed)


def test_the_loop_learns_and_gives_the_same_twice():
    score, state = learn(lesson())
    again, same = learn(lesson())
    assert score > 0.9
    assert score == again
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not torch.equal(learn(lesson(seed=1))[1]["1.weight"], state["1.weight"])


def test_every_picture_comes_once_in_an_epoch():
    batches = drawn(3 * BATCH, seed=0)
    epochs = [torch.cat([next(batches) for _ in range(3)]) for _ in range(2)]
    for order in epochs:
        assert order.sort().values.tolist() == list(range(3 * BATCH))
    assert not torch.equal(*epochs)
    assert next(drawn(10, seed=0)).sort().values.tolist() == list(range(10))  # fewer than a batch


def test_every_arm_gets_its_best_rate():
    found = at_best_rates(
        lambda name, rate, seed: lesson(rate, seed), ["a"], [1e-6, 0.05], seeds=2, pool=Pool(1)
    )["a"]
    assert found.rate == 0.05
    assert found.scores == [learn(lesson(0.05, seed))[0] for seed in range(2)]
    assert found.mean == pytest.approx(sum(found.scores) / 2)


def test_a_process_gives_what_this_one_gives():
    with Pool(2) as pool:
        (score, state), _ = pool.each(learn, [lesson(steps=5), lesson(steps=1)])
        assert pool.pool is not None, "it was done elsewhere"
    again, same = learn(lesson(steps=5))
    assert score == again
    assert torch.equal(state["1.weight"], same["1.weight"])


def test_a_process_that_ends_is_told_of():
    with pytest.raises(
        InputError, match=r"able to start and go on. Got one that ended by itself. In a script"
    ):
        each(os._exit, [3, 3], 2)


def test_small_labs_need_no_processes():
    assert processes_for("small") == 1
    assert 2 <= processes_for("full") <= 16


def test_the_rate_rises_and_falls():
    assert [share(step, 100) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    falling = [share(step, 100) for step in range(5, 100)]
    assert falling == sorted(falling, reverse=True)
    assert (falling[0], falling[-1]) == pytest.approx((1, 0), abs=1e-3)
    assert share(0, 1) == 1


def test_descent_says_how_wrong_each_step_was_and_ends_ready_to_judge():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    curve = descend(model, lambda: (model(torch.ones(1, 1)) - 5).square().sum(), 200, 0.1)
    assert len(curve) == 200
    assert curve[-1] < 0.01 < curve[0]
    assert not model.training
