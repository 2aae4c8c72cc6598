"""The training loop of the labs and the learning rate sweep: convergence, determinism, worker processes."""

import os

import pytest
import torch
from torch import nn

from vitrail.base.errors import InputError
from vitrail.experiment.trial import ProcessPool, map_in_processes, one_thread
from vitrail_course.labs.lab import process_count
from vitrail_course.labs.lr_sweep import (
    BATCH,
    ClassifierRun,
    iterate_batches,
    lr_factor,
    sweep_learning_rates,
    train_classifier,
    train_model,
)


@pytest.fixture(autouse=True)
def single_thread():
    with one_thread():
        yield


def build_linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


def classifier_run(lr=0.05, seed=0, steps=60):
    """Two linearly separable classes."""
    images = torch.randn(96, 1, 2, 2, generator=torch.Generator().manual_seed(5))
    labels = (images.sum(dim=(1, 2, 3)) > 0).long()
    return ClassifierRun(build_linear, images[:64], labels[:64], (images[64:], labels[64:]), steps, lr, seed)


def test_training_converges_and_is_deterministic():
    score, state = train_classifier(classifier_run())
    again, same = train_classifier(classifier_run())
    assert score > 0.9
    assert score == again
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not torch.equal(train_classifier(classifier_run(seed=1))[1]["1.weight"], state["1.weight"])


def test_every_image_is_in_an_epoch_once():
    batches = iterate_batches(3 * BATCH, seed=0)
    epochs = [torch.cat([next(batches) for _ in range(3)]) for _ in range(2)]
    for order in epochs:
        assert order.sort().values.tolist() == list(range(3 * BATCH))
    assert not torch.equal(*epochs)
    assert next(iterate_batches(10, seed=0)).sort().values.tolist() == list(range(10))  # fewer than a batch


def test_every_arm_gets_its_best_learning_rate():
    result = sweep_learning_rates(
        lambda name, lr, seed: classifier_run(lr, seed), ["a"], [1e-6, 0.05], seeds=2, pool=ProcessPool(1)
    )["a"]
    assert result.lr == 0.05
    assert result.sweep == {lr: train_classifier(classifier_run(lr))[0] for lr in (1e-6, 0.05)}
    assert result.scores == [train_classifier(classifier_run(0.05, seed))[0] for seed in range(2)]
    assert result.mean == pytest.approx(sum(result.scores) / 2)


@pytest.mark.slow
def test_worker_processes_give_the_same_results():
    with ProcessPool(2) as pool:
        (score, state), _ = pool.map(train_classifier, [classifier_run(steps=5), classifier_run(steps=1)])
        assert pool.pool is not None, "a worker process was used"
    again, same = train_classifier(classifier_run(steps=5))
    assert score == again
    assert torch.equal(state["1.weight"], same["1.weight"])


def test_a_lost_process_is_an_error():
    with pytest.raises(InputError, match=r"(?i)process"):
        map_in_processes(os._exit, [3, 3], 2)


def test_small_labs_use_no_processes():
    assert process_count("small") == 1
    assert 2 <= process_count("full") <= 16


def test_learning_rate_schedule():
    assert [lr_factor(step, 100) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    falling = [lr_factor(step, 100) for step in range(5, 100)]
    assert falling == sorted(falling, reverse=True)
    assert (falling[0], falling[-1]) == pytest.approx((1, 0), abs=1e-3)
    assert lr_factor(0, 1) == 1


def test_training_loop_returns_losses_and_ends_in_eval_mode():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    losses = train_model(model, lambda: (model(torch.ones(1, 1)) - 5).square().sum(), 200, 0.1)
    assert len(losses) == 200
    assert losses[-1] < 0.01 < losses[0]
    assert not model.training
