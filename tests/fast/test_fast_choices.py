"""What was the fastest is measured once, remembered, and can be forgotten."""

import json

import pytest
import torch

import vitrail as vt
from vitrail.fast import choices as choices_module
from vitrail.fast.accelerate import accelerate_by_default
from vitrail.fast.choices import Choices, choices_path, forget
from vitrail.fast.cuda_graph import MAX_SHAPES
from vitrail.fast.inference_routes import PLAIN, Builder, padded_size, plain_forward

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


@pytest.mark.parametrize("factor", [1.0, 1.01, float("nan")])
def test_a_route_with_wrong_answers_is_not_used(monkeypatch, factor):
    """Such as a kernel that this version of the compiler gets wrong."""
    model = vt.create("mu/4", classes=3).eval()

    def slightly_wrong(images):
        pooled, logits = plain_forward(model, torch.float32)(images)
        return pooled * factor, logits * factor

    def routes(self, precision, kept):
        return {PLAIN: lambda: plain_forward(model, torch.float32), "kernels": lambda: slightly_wrong}, []

    monkeypatch.setattr(Builder, "routes", routes)
    found = Builder(model, CPU, "throughput", Choices(CPU, measure=False), None).fastest("fp32").report
    assert found.route == ("kernels" if factor == 1 else PLAIN)
    if factor == 1.01:
        sentence = "kernels gave other answers than the model (they differ by 0.01 of their size)"
        assert found.why == [f"{sentence}, so the model itself computes."]


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


def test_without_measuring_what_is_remembered_decides_or_the_default():
    choices = Choices(CPU, measure=False)
    assert choices.fastest("product", ["plain", "fused"], never) == "plain"
    assert choices.fastest("product", ["plain", "fused"], never, default="fused") == "fused"
    Choices(CPU).fastest("product", ["plain", "fused"], {"plain": 2.0, "fused": 1.0}.__getitem__)
    assert Choices(CPU, measure=False).fastest("product", ["plain", "fused"], never) == "fused"
    assert choices_path().is_file()


def test_small_batches_have_few_sizes():
    sizes = {padded_size(count) for count in range(1, 33)}
    assert sizes == {1, 2, 4, 8, 16, 24, 32}
    assert len(sizes) < MAX_SHAPES
    assert all(count <= padded_size(count) < 2 * count for count in range(1, 300))
    assert padded_size(100) == 100


def test_on_a_cpu_a_model_is_computed_as_it_is_by_default():
    assert accelerate_by_default(vt.create("mu/4", classes=3)) is None


def test_a_model_that_cannot_be_accelerated_is_computed_as_it_is_and_says_why(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("vitrail.fast.accelerate.has_bf16", lambda device: True)
    monkeypatch.setattr("vitrail.fast.inference_routes.Builder.fastest", fail)
    model = vt.create("mu/4", classes=3).eval()
    fast = accelerate_by_default(model)
    assert "could not be accelerated (RuntimeError: no C compiler)" in fast.report.sentences()[1]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(fast(images), model(images))
