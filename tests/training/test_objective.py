"""The training objective: targets, class weights and losses, against torch's own."""

from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_runs import RARE, SETTINGS, train, write_arrays
from tests.training.test_trainer import build_trainer
from vitrail.base.errors import ConfigError
from vitrail.images.formats.sources import Split
from vitrail.images.loader import Reader
from vitrail.training.objective import build_targets, class_weights, per_image_loss
from vitrail.training.recipes.settings import TrainConfig


def split_of(labels):
    labels = np.array(labels)
    return Split(
        labels, [str(i) for i in range(len(labels))], None, np.zeros((len(labels), 8, 8, 1), np.uint8)
    )


def targets_of(split, settings):
    return build_targets(torch.from_numpy(split.labels), 4, settings.smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_equals_torchs(smoothing):
    logits, labels = torch.randn(6, 4), [0, 1, 2, 3, 3, 3]
    how = TrainConfig(smoothing=smoothing)
    split = split_of(labels)
    each = per_image_loss(logits, targets_of(split, how), class_weights(split, 4, how), how)
    expected = F.cross_entropy(logits, torch.tensor(labels), label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_balanced_class_weights_equal_torchs(smoothing):
    logits, labels = torch.randn(6, 4), [0, 1, 2, 3, 3, 3]
    how, split = TrainConfig(class_weights="balanced", smoothing=smoothing), split_of(labels)
    weights = class_weights(split, 4, how)
    torch.testing.assert_close(weights, torch.tensor([1.2, 1.2, 1.2, 0.4]))
    each = per_image_loss(logits, targets_of(split, how), weights, how)
    expected = F.cross_entropy(
        logits, torch.tensor(labels), weights, label_smoothing=smoothing, reduction="none"
    )
    torch.testing.assert_close(each, expected)


def test_bce_equals_torchs_for_single_and_multi_label():
    logits = torch.randn(3, 4)
    how = TrainConfig(loss="bce")
    multilabel = split_of([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    for split, targets in ((multilabel, multilabel.labels), (split_of([0, 3, 3]), np.eye(4)[[0, 3, 3]])):
        each = per_image_loss(logits, targets_of(split, how), torch.ones(4), how)
        expected = F.binary_cross_entropy_with_logits(logits, torch.tensor(targets).float(), reduction="none")
        torch.testing.assert_close(each, expected.mean(1))
    weights = class_weights(multilabel, 4, TrainConfig(loss="bce", class_weights="balanced"))
    torch.testing.assert_close(weights, torch.tensor([8, 8, 4, 8]) / 7)
    each = per_image_loss(logits, targets_of(multilabel, how), weights, how)
    expected = F.binary_cross_entropy_with_logits(
        logits, torch.tensor(multilabel.labels).float(), weights, reduction="none"
    )
    torch.testing.assert_close(each, expected.mean(1))


def test_a_multi_label_model_trains(tmp_path):
    """A bright top row, a bright left column, both or neither."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (160, 2))
    images = rng.integers(0, 60, (160, 8, 8), dtype=np.uint8)
    images[labels[:, 0] == 1, :3] += 150
    images[labels[:, 1] == 1, :, :2] += 40
    np.savez(tmp_path / "two.npz", images=images, labels=labels)
    how = {
        **SETTINGS,
        "epochs": 12,
        "smoothing": 0.0,
        "mixing": {},
        "augment": dict(rotate=0, zoom=1, translate=0),
        "lr": 0.01,
    }
    run = train(tmp_path / "two.npz", out=tmp_path / "run", **how)
    assert run.metrics[-1]["val_accuracy"] > 0.9
    assert run.bundle.model.config.classes == 2
    with pytest.raises(ConfigError, match="one class per image"):
        train(tmp_path / "two.npz", out=tmp_path / "other", **{**how, "sampling": "balanced"})


# ---- class weights ------------------------------------------------------------------------------

SGD = dict(optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=0.0, warmup=0.0, ema=None)


def first_step(data, **settings):
    """A trainer after its first step, with the logits, the smoothed and the plain targets of that step."""
    trainer, plain = (build_trainer(data, **SGD, **{**settings, **more}) for more in ({}, {"smoothing": 0.0}))
    parts = islice(trainer.micro_batch_indices(), trainer.settings.accumulate)
    whole = torch.cat([indices for _, indices in parts])
    read = Reader(trainer.data.train, trainer.preprocess)
    (batch,) = read.batches([(0, whole)])
    _, images, targets = trainer.inputs(batch.images, whole, 0, mixes=True)
    unsmoothed = plain.inputs(batch.images, whole, 0, mixes=True)[2]
    logits = plain.model.train()(images)
    trainer.take_step(read.batches(trainer.micro_batch_indices()))
    labels = trainer.labels[whole]
    return trainer, plain.model, logits, targets, unsmoothed, labels


def assert_step_of(trainer, model, loss):
    """The step had this loss, and its gradients."""
    loss.backward()
    assert trainer.metrics.totals()[0] == pytest.approx(loss.item(), rel=1e-6)
    for found, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-7)


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """Two rare classes beside a frequent one."""
    return write_arrays(tmp_path_factory.mktemp("rare") / "rare.npz", cycle=RARE)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_balanced_class_weights_are_torchs_weighted_mean(rare, accumulate, smoothing):
    """Loss and gradients of a step; micro-batches whose classes differ are those of one batch."""
    how = dict(class_weights="balanced", smoothing=smoothing, accumulate=accumulate)
    trainer, model, logits, _, _, labels = first_step(rare, **how)
    weights = class_weights(trainer.data.train, 3, trainer.settings)
    assert weights.max() > 5 * weights.min()
    of_parts = [weights[part].sum().item() for part in labels.chunk(4)]
    assert max(of_parts) > 1.2 * min(of_parts)
    loss = F.cross_entropy(logits, labels, weights, label_smoothing=smoothing, reduction="mean")
    assert_step_of(trainer, model, loss)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_weighted_mean_of_mixed_images(rare, accumulate):
    """Each image counts with the mean weight of the classes it is mixed from."""
    mixing = dict(mixup=0.8, cutmix=1.0)
    how = dict(class_weights="balanced", smoothing=0.1, accumulate=accumulate, mixing=mixing)
    trainer, model, logits, targets, unsmoothed, _ = first_step(rare, **how)
    assert ((unsmoothed > 0.01).sum(1) == 2).any()
    weights = class_weights(trainer.data.train, 3, trainer.settings)
    losses = -(targets * weights * logits.log_softmax(1)).sum()
    assert_step_of(trainer, model, losses / (unsmoothed * weights).sum())


def test_weighted_binary_cross_entropy_is_torchs_mean(rare):
    trainer, model, logits, targets, _, _ = first_step(rare, class_weights="balanced", loss="bce")
    weights = class_weights(trainer.data.train, 3, trainer.settings)
    assert_step_of(trainer, model, F.binary_cross_entropy_with_logits(logits, targets, weights))


# ---- smoothing ----------------------------------------------------------------------------------


def test_smoothing_of_multi_label_targets_is_symmetric():
    """For 20 classes as for 2: each class is a yes or no of its own."""
    labels = torch.eye(20, dtype=torch.int64)[:3]
    labels[0, 5] = 1
    targets = build_targets(labels, 20, 0.1)
    torch.testing.assert_close(targets[labels == 1], torch.full((4,), 0.95))
    torch.testing.assert_close(targets[labels == 0], torch.full((56,), 0.05))
    one_class = build_targets(torch.tensor([3]), 20, 0.1)  # a distribution over the classes
    torch.testing.assert_close(one_class.sum(), torch.tensor(1.0))
    torch.testing.assert_close(one_class[0, 3], torch.tensor(0.905))
