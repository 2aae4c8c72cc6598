"""docs/weights.md: its tables are those of the code, and the command that measures them runs."""

import re

import numpy as np
import pytest

from docs import samples, weights
from vitrail.weights.families import LIBRARIES

FAMILY, BACK, DIFFERENCE, REFERENCE = 0, 4, 5, 6  # columns
NUMBER = r"\d\.\de[+-]\d\d"


def rows(text):
    """The rows of a table, without its heading."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def between(name):
    text = weights.PAGE.read_text()
    return text[text.index(f"<!-- {name} -->") : text.index(f"<!-- end of {name} -->")]


def without_versions(cell):
    return re.sub(r" \d[\w.+]*(?=,|$)", "", cell)


def test_every_family_in_order():
    assert [row[FAMILY] for row in rows(between("families"))] == [f"{f.group}: `{f.name}`" for f in LIBRARIES]
    assert list(samples.SAMPLES) == [*(family.name for family in LIBRARIES), "vitrail"]


def test_what_is_not_measured_is_what_the_code_says():
    """`python -m docs.weights` writes it anew."""
    for row, family in zip(rows(between("families")), LIBRARIES, strict=True):
        now = weights.row(family, weights.Measurement())
        assert row[:BACK] + row[REFERENCE + 1 :] == now[:BACK] + now[REFERENCE + 1 :]


def test_every_file_came_back_and_every_logit_agreed():
    for row in rows(between("families")):
        assert re.fullmatch(r"bit-equal, [1-9]\d* tensors", row[BACK]), row
        assert re.fullmatch(NUMBER, row[DIFFERENCE]), row
        assert float(row[DIFFERENCE]) < 1e-4, row


def test_from_each_to_each():
    """Exact but for float32, or moved by a fact that was given, or refused with the fields in the way."""
    square = rows(between("matrix"))
    assert [row[0] for row in square] == [f"from **{group}**" for group in weights.GROUPS]
    for row in square:
        assert len(row) == 1 + len(weights.GROUPS)
        for cell in row[1:]:
            moved = re.fullmatch(rf"({NUMBER})( with `\w+=.+`)?", cell)
            assert moved or re.fullmatch(r"no: `\w+`(, `\w+`)*", cell), cell
            if moved:
                assert float(moved[1]) < (1e-2 if moved[2] else 1e-4), cell


@pytest.mark.parametrize("name", ["families", "matrix"])
def test_a_number_comes_with_its_circumstances(name):
    last = between(name).strip().splitlines()[-1]
    assert last.startswith("n = ")
    for word in ("`python -m docs.weights`", *weights.VERSIONS):
        assert word in last


def test_the_command_gives_what_the_page_says(capsys):
    before = weights.PAGE.read_text()
    weights.main(["--only", "torchvision", "google"])
    printed = rows(capsys.readouterr().out)
    assert weights.PAGE.read_text() == before
    there = {row[FAMILY]: row for row in rows(between("families"))}
    assert [row[FAMILY] for row in printed] == ["google: `google`", "torchvision: `torchvision`"]
    for row in printed:
        old = there[row[FAMILY]]
        assert 0 < float(row[DIFFERENCE]) < 1e-4
        assert without_versions(row[REFERENCE]) == without_versions(old[REFERENCE])
        assert row[:DIFFERENCE] + row[REFERENCE + 1 :] == old[:DIFFERENCE] + old[REFERENCE + 1 :]


def test_a_cell_that_is_refused_and_one_that_needs_a_fact():
    assert weights.cell("timm", "lucidrains") == "no: `embedding_norm`, `qkv_bias`"
    assert re.fullmatch(NUMBER + ' with `activation="gelu-tanh"`', weights.cell("timm", "google"))


def test_what_bit_equal_means():
    one = {"a": np.array([0.0, 1.0], np.float32)}
    assert weights.same_bits(one, {"a": one["a"].copy()})
    for other in ([-0.0, 1.0], [0.0, np.nextafter(np.float32(1), 2)], [[0.0, 1.0]]):
        assert not weights.same_bits(one, {"a": np.array(other, np.float32)})
    assert not weights.same_bits(one, {"a": one["a"].astype(np.float64)})
    assert not weights.same_bits(one, {})


def test_a_row_shows_a_file_that_did_not_come_back(monkeypatch):
    monkeypatch.setattr(weights, "same_bits", lambda one, other: False)
    monkeypatch.setattr(weights, "MODELS", 1)
    (row,), _ = weights.families(["google"])
    assert row[BACK].startswith("differs")


def test_a_family_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        weights.main(["--only", "timn"])
    assert "not a family: timn" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [float("nan"), 0.0])
def test_numbers_that_prove_nothing_are_no_result(wrong):
    config = weights.vt.ViTConfig(width=8, depth=1, heads=1, patch=4, size=4, classes=2)
    with pytest.raises(RuntimeError, match="prove nothing"):
        weights.compare(lambda x: x[:, 0, 0, :2] * wrong, lambda x: x[:, 0, 0, :2], config)
