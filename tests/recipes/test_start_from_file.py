"""Settings of their own for a start from a weight file."""

from pathlib import Path

import pytest

import vitrail as vt
from vitrail.data.sources import open_data
from vitrail.recipes.start import settle
from vitrail.training.settings import Recipe

SAID = "From a weight file the recipe has: "


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = vt.ViTConfig(width=16, depth=1, heads=2, patch=2, size=8, channels=1, classes=3)
    file = tmp_path_factory.mktemp("start") / "small.safetensors"
    vt.Bundle(model=vt.ViT(config), labels=["a", "b", "c"]).save(file)
    return file


def chosen(start: Path | None, **changes: object) -> Recipe:
    return settle("small", open_data("digits"), start, changes)[0]


def test_from_scratch_and_from_a_file(weights: Path) -> None:
    fresh, tuned = chosen(None), chosen(weights)
    assert (fresh.train.tune, fresh.train.lr, fresh.train.epochs) == ("full", 1e-3, 42)
    assert (tuned.train.tune, tuned.train.lr, tuned.train.epochs) == ("llrd", 1e-4, 10)
    assert tuned.notes == (*fresh.notes, f"{SAID}tune=llrd, lr=0.0001, epochs=10.")


def test_what_the_user_says_goes_before(weights: Path) -> None:
    found = chosen(weights, tune="full", lr=0.002)
    assert (found.train.tune, found.train.lr, found.train.epochs) == ("full", 0.002, 10)
    assert found.notes[-1] == f"{SAID}epochs=10."
    assert not [note for note in chosen(weights, tune="full", lr=0.002, epochs=3).notes if SAID in note]


@pytest.mark.parametrize("tune", ["head", "bias", "lora"])
def test_where_few_weights_learn_the_rate_stays(weights: Path, tune: str) -> None:
    """The lower rate is for weights that have learned already; those of a new head have not."""
    found = chosen(weights, tune=tune)
    assert (found.train.tune, found.train.lr, found.train.epochs) == (tune, 1e-3, 10)
    assert found.notes[-1] == f"{SAID}epochs=10."


def test_a_recipe_without_such_settings_stays_as_it_is(weights: Path) -> None:
    found, _ = settle("digits", open_data("digits"), weights, {})
    assert found.train.lr == 3e-3
    assert not found.notes


def test_other_positions_leave_the_recipes_first_values_of_learned_ones_behind() -> None:
    fields = dict(size=8, patch=2)
    found, _ = settle("mnist-notes", open_data("digits"), None, {"model": fields})
    assert found.model.position_sigma == 1
    found, _ = settle("mnist-notes", open_data("digits"), None, {"model": {**fields, "position": "sincos1d"}})
    assert found.model.position_sigma is None
    with pytest.raises(vt.ConfigError, match="learned positions"):
        settle(
            "mnist-notes",
            open_data("digits"),
            None,
            {"model": {**fields, "position": "sincos1d", "position_sigma": 0.5}},
        )
