"""Recipe settings for a start from a weight file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail as vt
from vitrail.cli.option_values import apply_setting
from vitrail.images.formats.sources import open_dataset
from vitrail.training.recipes.settings import Recipe
from vitrail.training.resolve import resolve_recipe

NOTE = "The recipe's settings for a weight file: "


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = vt.ViTConfig(width=16, depth=1, heads=2, patch=2, size=8, channels=1, classes=3)
    file = tmp_path_factory.mktemp("start") / "small.safetensors"
    vt.Bundle(model=vt.ViT(config), labels=["a", "b", "c"]).save(file)
    return file


def resolve(from_: Path | None, **changes: object) -> Recipe:
    return resolve_recipe("small", open_dataset("digits"), from_, changes)[0]


def test_from_scratch_and_from_a_file(weights: Path) -> None:
    fresh, tuned = resolve(None), resolve(weights)
    assert (fresh.train.tune, fresh.train.lr, fresh.train.epochs) == ("full", 1e-3, 42)
    assert (tuned.train.tune, tuned.train.lr, tuned.train.epochs) == ("llrd", 1e-3, 10)
    assert tuned.notes == (*fresh.notes, f"{NOTE}tune=llrd, epochs=10.")


def test_fewer_images_than_a_batch(weights: Path) -> None:
    data = open_dataset("digits")
    for count, tune in ((31, "lora"), (32, "llrd")):
        some = replace(data, train=data.train.take(np.arange(count)))
        assert resolve_recipe("small", some, weights, {})[0].train.tune == tune


def test_all_weights_alike_have_a_lower_learning_rate(weights: Path) -> None:
    found = resolve(weights, tune="full")
    assert (found.train.tune, found.train.lr, found.train.epochs) == ("full", 3e-4, 10)


def test_changes_by_the_user_take_precedence(weights: Path) -> None:
    found = resolve(weights, tune="full", lr=0.002)
    assert (found.train.tune, found.train.lr, found.train.epochs) == ("full", 0.002, 10)
    assert found.notes[-1] == f"{NOTE}epochs=10."
    assert not [note for note in resolve(weights, tune="full", lr=0.002, epochs=3).notes if NOTE in note]


@pytest.mark.parametrize("tune", ["head", "bias", "lora"])
def test_where_few_weights_are_trained_the_learning_rate_stays(weights: Path, tune: str) -> None:
    found = resolve(weights, tune=tune)
    assert (found.train.tune, found.train.lr, found.train.epochs) == (tune, 1e-3, 10)
    assert found.notes[-1] == f"{NOTE}epochs=10."


def test_a_recipe_without_such_settings_is_unchanged(weights: Path) -> None:
    found, _ = resolve_recipe("digits", open_dataset("digits"), weights, {})
    assert found.train.lr == 3e-3
    assert not found.notes


def test_another_position_embedding_drops_the_recipes_initialization() -> None:
    fields = dict(size=8, patch=2)
    found, _ = resolve_recipe("mnist-notes", open_dataset("digits"), None, {"model": fields})
    assert found.model.position_sigma == 1
    found, _ = resolve_recipe(
        "mnist-notes", open_dataset("digits"), None, {"model": {**fields, "position": "sincos1d"}}
    )
    assert found.model.position_sigma is None
    with pytest.raises(vt.ConfigError, match="learned positions"):
        resolve_recipe(
            "mnist-notes",
            open_dataset("digits"),
            None,
            {"model": {**fields, "position": "sincos1d", "position_sigma": 0.5}},
        )


def test_preprocessing_of_the_user(weights: Path) -> None:
    plain = resolve(weights)
    mapped = resolve(weights, preprocess={"mean": 0.25, "std": (0.5,)})
    assert mapped.preprocess.mean == (0.25,) != plain.preprocess.mean
    assert (mapped.model, mapped.train) == (plain.model, plain.train)
    assert any("mean" in note for note in mapped.notes)
    fresh = resolve(None, preprocess={"interpolation": "bicubic"})
    assert fresh.preprocess.interpolation == "bicubic"
    for given, words in ((5, "takes a mapping"), ("diet", "Did you mean 'deit'"), ({"men": 1}, "'mean'")):
        with pytest.raises(vt.ConfigError, match=words):
            resolve(weights, preprocess=given)


def test_preprocessing_on_the_command_line() -> None:
    changes: dict[str, Any] = {}
    apply_setting(changes, "preprocess.mean=0.1,0.2,0.3")
    apply_setting(changes, "preprocess.interpolation=bilinear")
    assert changes == {"preprocess": {"mean": (0.1, 0.2, 0.3), "interpolation": "bilinear"}}
    with pytest.raises(vt.InputError, match="exclude each other"):
        apply_setting(changes, "preprocess=deit")
    other: dict[str, Any] = {}
    apply_setting(other, "preprocess=deit")
    assert other == {"preprocess": "deit"}
    with pytest.raises(vt.InputError, match=r"preprocess\.mean"):
        apply_setting({}, "preprocess.men=1")
