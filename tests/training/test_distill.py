"""Distillation: the formulas, the teacher's input, and that it helps."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitrail as vt
from tests.support.models import add_noise
from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    fingerprints,
    stopped_and_resumed,
    train,
)
from vitrail.base.errors import ConfigError, InputError
from vitrail.evaluation.forward import run_model
from vitrail.images.formats.sources import Split, open_dataset
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model.device import choose_device
from vitrail.training import input_pipeline as inputs
from vitrail.training.objective import Teacher, distillation_loss
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

TINY = dict(width=16, depth=1, heads=2, patch=4, size=8, channels=1, classes=3)
OTHER = Preprocess(size=12, mean=(0.2,), std=(0.7,), scale=1 / 128)
CPU = choose_device("fp32")


def build_teacher(seed=5, labels=("0", "1", "2"), preprocess=OTHER, **config):
    torch.manual_seed(seed)
    config = {**TINY, "size": preprocess.target, "depth": 2, "classes": len(labels), **config}
    return vt.Bundle(
        model=add_noise(vt.ViT(vt.ViTConfig(**config))), preprocess=preprocess, labels=list(labels)
    )


# ---- the formulas -------------------------------------------------------------------------------


def test_hard_is_the_cross_entropy_to_the_teachers_class():
    logits, teacher = torch.randn(5, 4), torch.randn(5, 4)
    found = distillation_loss(logits, teacher, TrainConfig(distill="hard", distill_temperature=9.0))
    for each, row, theirs in zip(found, logits, teacher, strict=True):
        predicted = max(range(4), key=lambda k: theirs[k])
        assert each.item() == pytest.approx(-math.log(row.exp()[predicted] / row.exp().sum()), rel=1e-5)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_soft_is_tau_squared_times_kl(tau):
    logits, teacher = torch.randn(5, 4), torch.randn(5, 4)
    found = distillation_loss(logits, teacher, TrainConfig(distill="soft", distill_temperature=tau))
    for each, row, theirs in zip(found, logits, teacher, strict=True):
        p, q = (theirs / tau).exp(), (row / tau).exp()
        p, q = p / p.sum(), q / q.sum()
        by_hand = sum(p[k] * math.log(p[k] / q[k]) for k in range(4))
        assert each.item() == pytest.approx(tau**2 * by_hand.item(), rel=1e-4)
    expected = F.kl_div(
        F.log_softmax(logits / tau, 1), F.log_softmax(teacher / tau, 1), log_target=True, reduction="none"
    )
    torch.testing.assert_close(found, tau**2 * expected.sum(1))
    assert distillation_loss(teacher, teacher, TrainConfig(distill="soft")).abs().max() < 1e-6


DISTILLED = dict(distillation_token=True, head="distilled")


@pytest.mark.parametrize("head", [{}, DISTILLED])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_step_equals_one_by_hand(head, kind, data):
    """Class logits against the labels, distillation logits against the teacher; a single output against both."""
    dataset, bundle = open_dataset(data), build_teacher()
    torch.manual_seed(0)
    model = add_noise(vt.ViT(vt.ViTConfig(**TINY, **head)))
    other = vt.ViT(model.config)
    other.load_state_dict(model.state_dict())
    how = TrainConfig(batch=16, epochs=1, smoothing=0.1, distill=kind, distill_weight=0.3)
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    trainer = Trainer(
        RunPlan(dataset, Recipe(model.config, spec, how), CPU, teacher=Teacher(bundle, dataset, 1, CPU)),
        model,
    )
    _, indices = next(trainer.micro_batch_indices())
    trainer.take_step(Reader(dataset.train, spec).batches(iter([(0, indices)])))

    x = torch.from_numpy(dataset.train.images[indices.numpy()]).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(dataset.train.labels)[indices]
    pooled = other.encode((x - 0.5) / 0.5).pooled
    ours, taught = other.head.separate_logits(pooled) if head else (other.head(pooled),) * 2
    larger = F.interpolate(x, (12, 12), mode="bilinear", antialias=True)
    theirs = bundle.model((larger * (255 / 128) - 0.2) / 0.7)
    of_labels = F.cross_entropy(ours, labels, label_smoothing=0.1)
    if kind == "hard":
        of_teacher = F.cross_entropy(taught, theirs.argmax(1))
    else:
        soft = (theirs / 3).softmax(1)
        of_teacher = 9 * (soft * (soft.log() - (taught / 3).log_softmax(1))).sum(1).mean()
    loss = 0.7 * of_labels + 0.3 * of_teacher
    assert trainer.metrics.sums[0].item() / 16 == pytest.approx(loss.item(), rel=1e-5)
    assert trainer.metrics.sums[1].item() == ((ours + taught) / 2).argmax(1).eq(labels).sum().item()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    for one, mine in zip(other.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, mine.grad, rtol=1e-4, atol=1e-6)


# ---- the teacher --------------------------------------------------------------------------------


def test_the_teacher_is_frozen_and_the_callers_model_is_unchanged(data, tmp_path):
    bundle = build_teacher(dropout=0.5, drop_path=0.5)
    bundle.model.train()
    before = {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}
    teacher = Teacher(bundle, open_dataset(data), 1, CPU)
    x = torch.rand(4, 1, 8, 8, requires_grad=True)
    assert torch.equal(teacher(x), teacher(x))
    assert not teacher(x).requires_grad
    train(data, out=tmp_path / "run", teacher=bundle, epochs=1, batch=16, model=TINY)
    assert bundle.model.training
    assert all(p.requires_grad for p in bundle.model.parameters())
    assert all(torch.equal(tensor, bundle.model.state_dict()[name]) for name, tensor in before.items())


def test_the_teacher_gets_the_students_images(data, tmp_path, monkeypatch):
    """Augmented and mixed; its own image size is tested above."""
    mixed, seen, real, forward = [], [], inputs.mix_batch, Teacher.__call__

    def mix_batch(*args, **how):
        mixed.append(real(*args, **how))
        return mixed[-1]

    monkeypatch.setattr(inputs, "mix_batch", mix_batch)
    monkeypatch.setattr(Teacher, "__call__", lambda self, x: seen.append(x) or forward(self, x))
    train(data, out=tmp_path / "run", teacher=build_teacher(), **{**SETTINGS, "epochs": 1})
    assert len(mixed) == 10  # five steps of two micro-batches
    assert all(one is other for (one, _), other in zip(mixed, seen[-10:], strict=True))


def test_classes_in_another_order_are_matched_by_name(data, tmp_path):
    dataset = open_dataset(data)
    plain, permuted = build_teacher(), build_teacher(labels=("2", "0", "1"))
    head = permuted.model.head
    with torch.no_grad():
        order = [2, 0, 1]
        head.weight.copy_(plain.model.head.weight[order])
        head.bias.copy_(plain.model.head.bias[order])
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(Teacher(permuted, dataset, 1, CPU)(x), Teacher(plain, dataset, 1, CPU)(x))
    callback = RecordingCallback()
    train(data, out=tmp_path / "run", teacher=permuted, epochs=1, batch=16, model=TINY, callback=callback)
    assert any(n.startswith("The teacher: ") and "another order" in n for n in callback.notes)


@pytest.mark.parametrize(
    ("bundle", "message"),
    [
        (lambda: build_teacher(labels=("0", "1", "2", "3")), "teacher must have the classes of the data"),
        (
            lambda: build_teacher(labels=("ant", "bee", "dog")),
            "teacher must have the classes of the data.*dog.*cat",
        ),
        (
            lambda: build_teacher(channels=3, preprocess=Preprocess(size=8)),
            r"teacher must take images of 1 channel.*load\(file, channels=1\)",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_an_error(bundle, message, data, tmp_path):
    named = replace(open_dataset(data), classes=["ant", "bee", "cat"])
    with pytest.raises(InputError, match=message):
        train(named, out=tmp_path / "run", teacher=bundle(), model=TINY)
    assert not (tmp_path / "run").exists()


def test_multi_label_data_cannot_be_distilled(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), rng.integers(0, 2, (40, 2))
    np.savez(tmp_path / "two.npz", images=images, labels=labels)
    with pytest.raises(InputError, match=r"one class per image.*multi-label"):
        train(
            tmp_path / "two.npz",
            out=tmp_path / "run",
            teacher=build_teacher(labels="01"),
            model={**TINY, "classes": 2},
        )


@pytest.mark.parametrize(
    ("has_teacher", "changes", "message"),
    [
        (False, dict(distill="soft"), "distill='soft' needs a teacher"),
        (False, dict(distill_weight=0.2), "distill_weight=0.2 needs a teacher"),
        (False, dict(distill_temperature=2.0), "distill_temperature=2.0 needs a teacher"),
        (True, dict(distill="none"), "distill='none' excludes a teacher"),
        (True, dict(distill="sof"), "Did you mean 'soft'"),
        (True, dict(distill_weight=0.0), "distill_weight must be above 0"),
        (True, dict(distill_temperature=0.0), "distill_temperature must be above 0"),
    ],
)
def test_contradictory_settings_are_errors(has_teacher, changes, message, data, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train(
            data,
            out=tmp_path / "run",
            teacher=build_teacher() if has_teacher else None,
            model=TINY,
            **changes,
        )
    assert not (tmp_path / "run").exists()


# ---- runs ---------------------------------------------------------------------------------------


def saved_config(out):
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("head", [{}, dict(DISTILLED, class_token=True, pool="class")])
def test_distillation_resumes_exactly_and_refuses_another_teacher(head, data, tmp_path):
    build_teacher().save(tmp_path / "teacher.safetensors")
    how = {**SETTINGS, "epochs": 2, "teacher": tmp_path / "teacher.safetensors"}
    how["model"] = {**SETTINGS["model"], **head}
    train(data, out=tmp_path / "uninterrupted", **how)
    stopped_and_resumed(data, tmp_path / "run", 7, **how)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "uninterrupted")
    config = saved_config(tmp_path / "run")
    assert (config["train"]["distill"], len(config["start"]["teacher"])) == ("hard", 64)
    train(data, out=tmp_path / "run", resume=True, **{**how, "teacher": build_teacher()})  # the same weights
    other = build_teacher()
    other.preprocess = replace(other.preprocess, mean=(0.3,))
    train(data, out=tmp_path / "run", resume=True, **{**how, "teacher": None})  # the run knows it
    for wrong in (build_teacher(seed=6), other):
        with pytest.raises(ConfigError, match="teacher"):
            train(data, out=tmp_path / "run", resume=True, **{**how, "teacher": wrong})


def test_without_a_teacher_nothing_is_distilled(data, tmp_path):
    train(data, out=tmp_path / "run", epochs=1, batch=16, model=TINY, distill="none")
    config = saved_config(tmp_path / "run")
    assert (config["train"]["distill"], config["start"]["teacher"]) == ("none", None)


def test_a_student_copies_a_better_teacher(tmp_path):
    """With a hundred training digits, a distilled student agrees with the teacher more often."""
    digits = open_dataset("digits")
    how = dict(recipe="digits", batch=50, lr=1e-2, ema=None, smoothing=0.0, evaluate_every=100)
    how |= dict(model=dict(width=32, depth=1, heads=2, patch=4), augment=dict(rotate=0, zoom=1, translate=0))
    teacher = train(digits, out=tmp_path / "teacher", epochs=6, **how).bundle
    full = digits.train
    few = Split(full.labels[:100], full.names[:100], None, full.images[:100])
    few = replace(digits, train=few)

    def predictions(bundle):
        return run_model(bundle.model, few.eval_split, bundle.preprocess)[0].argmax(1)

    def agreement(name, **more):
        student = train(few, out=tmp_path / name, epochs=25, **how, **more).bundle
        return (predictions(student) == predictions(teacher)).float().mean().item()

    alone = agreement("alone")
    distilled = agreement("distilled", teacher=teacher, distill="soft", distill_weight=0.9)
    assert teacher.card.metrics["accuracy"] > 0.85
    assert distilled > alone + 0.04, (alone, distilled)
