"""The page of a walk, and its numbers."""

import pytest
import torch

import vitrail as vt
from tests.support.read_pages import HOSTILE_NAMES, ParsedPage, check_safe
from vitrail.course.walk import token_name, walk
from vitrail.course.walk.format import finite_or_none, format_number, summarize
from vitrail.course.walk.page import walk_page
from vitrail.report.page import render


def build(image="cat.png", **fields):
    """A walk and its page, read back."""
    model = vt.create("mu/8", **fields)
    stages = walk(model, torch.rand(model.config.input_shape), token=3)
    facts = {"model": "mu/8", "weights": "Random weights.", "image": image, "block": 0, "head": 0}
    facts["token_name"] = token_name(model.config, 3)
    return stages, render(walk_page(stages, facts, model.config))


@pytest.mark.parametrize("fields", [{}, dict(channels=1), dict(embedding="conv", depth=3)])
def test_every_stage_is_on_the_page(fields):
    stages, text = build(**fields)
    read = ParsedPage(text)
    check_safe(read)
    assert len(read.all("section")) == len(stages)
    images = [one for one in read.all("img") if one["src"].startswith("data:image/png;base64,iVBOR")]
    assert len(images) == len(read.all("img")) == sum(stage.tensor.numel() > 2 for stage in stages)
    for stage in stages:
        for words in (stage.name, stage.equation, stage.meaning, " × ".join(map(str, stage.shape))):
            assert words in read.text, words
    assert "Random weights." in read.text
    assert "patch 2 (row 0, column 2)" in read.text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_the_name_of_the_image_is_text(name):
    _, text = build(name)
    check_safe(ParsedPage(text))
    assert "<b>" not in text
    assert "onerror" not in text.replace("onerror=alert(1)&gt;", "")


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0.1234567, "0.123"), (-0.000123456, "-1e-04"), (0.0, "0"), (12345.0, "1e+04")],
)
def test_numbers_are_at_most_seven_characters(number, text):
    assert format_number(number) == text


def test_summaries_have_no_nan():
    assert summarize(torch.tensor([1.0, float("nan")])) == dict.fromkeys(("mean", "std", "min", "max"))
    assert summarize(torch.tensor([1.0, 3.0])) == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert finite_or_none([[1.0, float("inf")], [2.0, float("nan")]]) == [[1.0, None], [2.0, None]]
