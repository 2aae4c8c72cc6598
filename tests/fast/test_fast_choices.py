"""What was the fastest is measured once, remembered, and can be forgotten."""

import json

import pytest
import torch

from vitrail.fast import choices as choices_module
from vitrail.fast.choices import Choices, choices_path, forget

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choices_module, "is_busy", lambda: False)


def never(name):
    raise AssertionError("measured again")


def test_the_fastest_is_remembered_and_forgotten():
    seconds = {"plain": 2.0, "fused": 1.0}
    assert Choices(CPU).fastest("product", list(seconds), seconds.__getitem__) == "fused"
    assert Choices(CPU).fastest("product", list(seconds), never) == "fused"
    assert forget()
    assert not forget()
    assert Choices(CPU).fastest("product", list(seconds), {"plain": 1.0, "fused": 2.0}.__getitem__) == "plain"


def test_what_is_measured_on_a_busy_machine_is_not_remembered(monkeypatch):
    monkeypatch.setattr(choices_module, "is_busy", lambda: True)
    assert Choices(CPU).fastest("product", ["a", "b"], {"a": 2.0, "b": 1.0}.__getitem__) == "b"
    assert Choices(CPU).fastest("product", ["a", "b"], {"a": 1.0, "b": 2.0}.__getitem__) == "a"


def test_another_set_of_candidates_is_measured_again():
    Choices(CPU).fastest("product", ["plain"], lambda name: 1.0)
    assert Choices(CPU).fastest("product", ["plain", "new"], {"plain": 2.0, "new": 1.0}.__getitem__) == "new"


def test_a_candidate_that_fails_is_out_and_says_why():
    def measure(name):
        if name == "kernel":
            raise RuntimeError("no such instruction")
        return 1.0

    choices = Choices(CPU)
    assert choices.fastest("product", ["kernel", "plain"], measure) == "plain"
    assert "no such instruction" in choices.failures["product: kernel"]
    assert Choices(CPU).fastest("product", ["kernel", "plain"], never) == "plain"


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": {"b": {"c": "x"}}}', "\x00"])
def test_a_damaged_file_is_measured_again(text):
    choices_path().parent.mkdir(parents=True)
    choices_path().write_text(text)
    assert Choices(CPU).fastest("product", ["a", "b"], {"a": 2.0, "b": 1.0}.__getitem__) == "b"
    assert json.loads(choices_path().read_text())


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file" / "cache"))
    assert Choices(CPU).fastest("product", ["a", "b"], {"a": 2.0, "b": 1.0}.__getitem__) == "b"
