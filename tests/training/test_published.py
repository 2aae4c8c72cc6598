"""The published recipes: their numbers are pinned, and each trains on a small data set."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.tiny_runs import RecordingCallback, rows, train, write_folder
from vitrail.base.errors import ConfigError
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import Dataset, Split, open_dataset
from vitrail.model import ViT
from vitrail.training.recipes import published, recipe, recipes
from vitrail.training.resolve import resolve_recipe

PUBLISHED = ["paper-finetune", "augreg", "simple-vit", "deit3", "mae-finetune"]
TINY = dict(width=16, depth=2, heads=2, patch=8, size=32)


def data_of(count, *, channels=3, multilabel=False):
    """A data set of this many images; recipes use only the number and the shape."""
    labels = np.arange(count) % 3
    if multilabel:
        labels = np.eye(3, dtype=np.int64)[labels]
    images = np.zeros((1, 8, 8, channels), np.uint8)
    split = Split(labels, range(count), images=np.broadcast_to(images, (count, 8, 8, channels)))
    return Dataset("some", ["ant", "bee", "cat"], split, split)


# ---- the numbers ----------------------------------------------------------------------------


def test_paper_finetune():
    found = recipe("paper-finetune", data_of(50_000))
    s, m, p = found.train, found.model, found.preprocess
    assert (s.optimizer, s.momentum, s.lr, s.weight_decay, s.batch) == ("sgd", 0.9, 0.01, 0.0, 512)
    assert (s.clip, s.schedule, s.last_lr, s.smoothing, s.ema) == (1.0, "cosine", 0.0, 0.0, None)
    assert s.augment == Augment(crop=0.05, flip=0.5)
    assert s.mixing == Mixing()
    assert (m.width, m.depth, m.heads, m.patch, m.pixels) == (768, 12, 12, (16, 16), (384, 384))
    assert (m.head, m.pool, m.dropout, m.drop_path, m.init) == ("linear", "class", 0.0, 0.0, "paper")
    assert (p.target, p.resize, p.interpolation, p.mean, p.std) == (
        *((384, 384), "squash", "bilinear"),
        *((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    )
    assert found.model_from_file == {"size": 384}
    assert found.lr_at_batch is None


@pytest.mark.parametrize(
    ("images", "steps", "warmup", "epochs"),
    [
        (1_281_167, 20_000, 500, 8),  # 2,502 steps in an epoch
        (1_000_000, 20_000, 500, 11),
        (999_999, 10_000, 500, 6),
        (50_000, 10_000, 500, 104),  # 97 steps in an epoch
        (20_000, 10_000, 500, 257),
        (19_999, 500, 100, 13),
        (3_680, 500, 100, 72),
        (100, 500, 100, 500),  # all in one batch
    ],
)
def test_steps_are_converted_to_epochs(images, steps, warmup, epochs):
    found = recipe("paper-finetune", data_of(images))
    assert found.train.epochs == epochs
    assert found.train.warmup == warmup / steps
    [note] = found.notes
    assert note.startswith(f"{steps:,} published steps of 512 images are {epochs:,} epochs")
    assert epochs * max(1, images // 512) >= steps > (epochs - 1) * max(1, images // 512)


@pytest.mark.parametrize(
    ("name", "epochs", "batch", "mixup"), [("augreg", 300, 4096, 0.5), ("simple-vit", 90, 1024, 0.2)]
)
def test_big_vision(name, epochs, batch, mixup):
    found = recipe(name, data_of(1_281_167))
    s, m, p = found.train, found.model, found.preprocess
    assert (s.optimizer, s.lr, s.betas, s.batch, s.epochs) == ("adamw", 1e-3, (0.9, 0.999), batch, epochs)
    assert s.weight_decay == pytest.approx(0.1)  # 1e-4 in big_vision's units
    assert s.warmup * s.epochs * 1_281_167 / s.batch == pytest.approx(10_000)
    assert (s.clip, s.schedule, s.last_lr, s.smoothing) == (1.0, "cosine", 0.0, 0.0)
    assert (s.loss, s.ema, s.tune) == ("cross-entropy", None, "full")
    assert s.augment == Augment(crop=0.05, flip=0.5, policy="randaugment", policy_ops=2, policy_magnitude=30)
    assert s.mixing == Mixing(mixup=mixup)
    assert (m.width, m.depth, m.heads, m.patch, m.pixels) == (384, 12, 6, (16, 16), (224, 224))
    assert (m.head, m.dropout, m.drop_path) == ("tanh", 0.0, 0.0)
    if name == "augreg":
        assert (m.position, m.class_token, m.pool) == ("learned", True, "class")
    else:
        assert (m.position, m.class_token, m.pool) == ("sincos2d", False, "mean")
    assert (p.target, p.resize, p.before_crop, p.mean) == ((224, 224), "shortest", (256, 256), (0.5,) * 3)


def test_deit3():
    found = recipe("deit3", data_of(1_281_167))
    s, m, p = found.train, found.model, found.preprocess
    assert (s.optimizer, s.lr, s.betas, s.batch, s.epochs) == ("adamw", 2e-3, (0.9, 0.999), 2048, 800)
    assert (s.weight_decay, s.clip, s.loss, s.smoothing, s.ema) == (0.05, 0.0, "bce", 0.0, None)
    assert s.warmup * 800 == pytest.approx(5)
    assert s.lr * s.last_lr == pytest.approx(1e-5)
    assert found.lr_at_batch == (5e-4, 512)
    assert s.augment == Augment(crop=0.08, flip=0.5, brightness=0.3, contrast=0.3, saturation=0.3, gray=1 / 3)
    assert s.mixing == Mixing(mixup=0.8, cutmix=1.0, probability=1.0, cutmix_probability=0.5)
    assert (m.width, m.depth, m.heads, m.patch, m.pixels) == (768, 12, 12, (16, 16), (192, 192))
    assert (m.layer_scale, m.drop_path, m.rows, m.pool) == (1e-4, 0.2, "patches", "class")
    assert (p.resize, p.before_crop, p.interpolation) == ("shortest", (192, 192), "bicubic")
    assert (p.mean, p.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_mae_finetune():
    found = recipe("mae-finetune", data_of(1_281_167))
    s, m, p = found.train, found.model, found.preprocess
    assert (s.optimizer, s.lr, s.betas, s.batch, s.epochs) == ("adamw", 2e-3, (0.9, 0.999), 1024, 100)
    assert (s.weight_decay, s.clip, s.loss, s.smoothing) == (0.05, 0.0, "cross-entropy", 0.1)
    assert (s.tune, s.layer_decay) == ("llrd", 0.65)
    assert s.warmup * 100 == pytest.approx(5)
    assert s.lr * s.last_lr == pytest.approx(1e-6)
    assert found.lr_at_batch == (5e-4, 256)
    assert s.augment == Augment(
        crop=0.08, flip=0.5, policy="randaugment", policy_ops=1, policy_magnitude=27, erase=0.25
    )
    assert s.mixing == Mixing(mixup=0.8, cutmix=1.0, probability=1.0, cutmix_probability=0.5)
    assert (m.width, m.pool, m.pool_norm, m.drop_path) == (768, "mean", "after", 0.1)
    assert (p.target, p.before_crop, p.interpolation) == ((224, 224), (256, 256), "bicubic")


# ---- learning rate and batch size -----------------------------------------------------------


@pytest.mark.parametrize(("name", "lr", "base"), [("mae-finetune", 5e-4, 256), ("deit3", 5e-4, 512)])
def test_the_learning_rate_is_proportional_to_the_batch(name, lr, base):
    as_is = resolve_recipe(name, data_of(5000), None, {})[0]
    assert as_is.train.lr == pytest.approx(recipe(name, data_of(5000)).train.lr)
    half = resolve_recipe(name, data_of(5000), None, {"batch": 128})[0]
    assert half.train.lr == pytest.approx(lr * 128 / base)
    [note] = half.notes
    assert note.startswith(f"lr {half.train.lr:g} = 0.0005 x 128 / {base}")
    given = resolve_recipe(name, data_of(5000), None, {"batch": 128, "lr": 0.1})[0]
    assert (given.train.lr, given.notes) == (0.1, ())


def test_the_learning_rate_scales_with_the_actual_batch():
    """101 images make batches of 100, whatever the recipe's batch is."""
    chosen, _ = resolve_recipe("mae-finetune", data_of(101), None, {})
    assert chosen.train.lr == pytest.approx(5e-4 * 100 / 256)
    assert "x 100 / 256" in chosen.notes[0]


def test_other_learning_rates_do_not_scale():
    for name in ("paper-finetune", "augreg", "simple-vit", "digits"):
        data = data_of(5000, channels=1)
        assert resolve_recipe(name, data, None, {"batch": 8})[0].train.lr == recipe(name, data).train.lr


# ---- runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), each=5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_recipe_trains(name, folder, tmp_path):
    """Two steps on image files, and the weight file loads."""
    notes, model = RecordingCallback(), TINY if name != "paper-finetune" else {**TINY, "size": 24}
    torch.manual_seed(0)
    train(
        folder, out=tmp_path / "run", recipe=name, callback=notes, epochs=2, batch=8, model=model, workers=0
    )
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2]
    assert all(np.isfinite(row["loss"]) and row["skipped_steps"] == 0 for row in found)
    config = vt.load(tmp_path / "run" / "last.safetensors").model.config
    expected = recipe(name, data_of(50)).model
    assert (config.width, config.classes) == (16, 3)
    assert (config.pool, config.position, config.head, config.drop_path) == (
        *(expected.pool, expected.position, expected.head, expected.drop_path),
    )
    if name in ("deit3", "mae-finetune"):
        assert any(note.startswith("lr ") and "= 0.0005 x 8 / " in note for note in notes.notes)
    if name == "paper-finetune":
        count = len(open_dataset(folder).train)
        assert any(f"500 epochs of these {count} images" in note for note in notes.notes)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("kind", [dict(channels=1), dict(multilabel=True)])
def test_gray_arrays_and_multi_label_data(name, kind):
    chosen, _ = resolve_recipe(name, data_of(40, **kind), None, {"model": TINY})
    assert chosen.model.channels == chosen.preprocess.channels == kind.get("channels", 3)
    assert chosen.train.loss == ("bce" if "multilabel" in kind or name == "deit3" else "cross-entropy")
    assert chosen.preprocess.target == (32, 32)
    assert ViT(chosen.model)(torch.zeros(1, *chosen.model.input_shape)).shape == (1, 3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A weight file of a model for 16 pixels and 5 classes, pooled by the class token."""
    config = vt.ViTConfig(width=16, depth=1, heads=2, patch=8, size=16, classes=5)
    file = tmp_path_factory.mktemp("weights") / "start.safetensors"
    vt.Bundle(model=ViT(config), preprocess=vt.Preprocess(size=16)).save(file)
    return file


def test_what_fine_tuning_recipes_change_of_a_model(weights):
    """With --from the model is the file's, with the size of one recipe or the pool and drop path of the other."""
    chosen, first = resolve_recipe("paper-finetune", data_of(40), weights, {})
    assert chosen.model == first.model.config
    assert (chosen.model.pixels, chosen.model.width) == ((384, 384), 16)
    assert chosen.preprocess.target == (384, 384)
    assert not any(p.any() for p in first.model.head.parameters())
    chosen, first = resolve_recipe("mae-finetune", data_of(40), weights, {})
    assert (chosen.model.pool, chosen.model.pool_norm, chosen.model.drop_path) == ("mean", "after", 0.1)
    assert (chosen.model.pixels, first.model.config.pool) == ((16, 16), "mean")
    chosen, _ = resolve_recipe("paper-finetune", data_of(40), weights, {"model": {"size": 32}})
    assert chosen.model.pixels == (32, 32)  # a change by the user takes precedence


def test_a_run_from_a_weight_file(weights, folder, tmp_path):
    how = dict(epochs=1, batch=8, workers=0, recipe="mae-finetune")
    train(folder, out=tmp_path / "run", from_=weights, **how)
    config = vt.load(tmp_path / "run" / "last.safetensors").model.config
    assert (config.pool, config.pool_norm, config.classes) == ("mean", "after", 3)


# ---- names ----------------------------------------------------------------------------------


def test_an_unknown_name_is_an_error():
    with pytest.raises(
        ConfigError, match=r"unknown recipe 'simple_vit'\. Did you mean 'simple-vit'\? Choose from: auto, "
    ) as error:
        recipe("simple_vit", data_of(40))
    assert all(name in str(error.value) for name in recipes())


def test_each_docstring_has_its_source_and_that_we_did_not_run_it():
    assert list(recipes())[-len(PUBLISHED) :] == PUBLISHED
    for name, function in recipes().items():
        text = " ".join(function.__doc__.split())
        if name in PUBLISHED:
            assert function.__module__ == published.__name__
            assert "Source: " in text
            assert " Published: " in text
        assert ("Not run by us." in text) == (name in PUBLISHED)
