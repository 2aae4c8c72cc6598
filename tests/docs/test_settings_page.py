"""docs/training-settings.md has every setting, as the code has it."""

import dataclasses

import pytest

from docs import settings as page
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.training.recipes.settings import TrainConfig

CONFIGS = {"": TrainConfig, "augment.": Augment, "mixing.": Mixing}


def test_the_page_is_that_of_the_code():
    """`python -m docs.settings` writes it anew."""
    assert page.page() == page.PAGE.read_text()


@pytest.mark.parametrize("prefix", CONFIGS)
def test_every_field_is_there_once_with_allowed_values(prefix):
    text = page.PAGE.read_text()
    for field in dataclasses.fields(CONFIGS[prefix]):
        if field.name in ("augment", "mixing"):
            continue
        assert text.count(f"| `{prefix}{field.name}` | ") == 1, field.name
        assert page.allowed(CONFIGS[prefix], field.name), field.name


def test_values_are_written_as_after_set():
    text = page.PAGE.read_text()
    for row in (
        "| `ema` | `none` | above 0 and below 1, `none` |",
        "| `betas` | `0.9,0.999` |",
        "| `compile` | `auto` | `auto`, `true`, `false` |",
        "| `sampling` | `shuffle` | `shuffle`, `balanced` |",
    ):
        assert row in text, row
