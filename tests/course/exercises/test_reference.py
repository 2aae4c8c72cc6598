"""The reference solution against the package's model and the NumPy oracle."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support import oracle
from tests.support.models import add_noise
from vitrail.model.position import sincos
from vitrail_course.exercises import mistakes, mistakes_model, reference, template
from vitrail_course.exercises.exercise import EXERCISES
from vitrail_course.exercises.run import NAMES


@pytest.fixture
def model():
    config = vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=(8, 12), channels=2, classes=5)
    return add_noise(vt.ViT(config)).double()


@pytest.fixture
def images():
    return torch.randn(3, 2, 8, 12, dtype=torch.float64)


def is_close(one, other):
    return np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-10


def test_the_model(model, images):
    config, weights = SimpleNamespace(patch=4, depth=2, heads=3), model.state_dict()
    logits = reference.vit(images, weights, config)
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    with torch.no_grad():
        assert is_close(logits, model(images))
    for row, image in zip(logits, images.numpy(), strict=True):
        assert is_close(row, oracle.vit(image, arrays, patch=(4, 4), depth=2, heads=3))


def test_the_parts(model, images):
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    z = torch.randn(7, 12, dtype=torch.float64)
    modules = {
        name: template.inside(model.state_dict(), f"blocks.0.{name}")
        for name in ("attention", "mlp", "norm1")
    }
    assert is_close(reference.patches(images, 4)[1], oracle.patches(images[1].numpy(), 4, 4))
    msa = reference.multi_head_attention(z[None], modules["attention"], 3)[0]
    assert is_close(msa, oracle.msa(z.numpy(), weights, "blocks.0", 3))
    assert is_close(reference.mlp(z, modules["mlp"]), oracle.mlp(z.numpy(), weights, "blocks.0"))
    norm = {name: tensor.numpy() for name, tensor in modules["norm1"].items()}
    assert is_close(
        reference.layer_norm(z, **modules["norm1"], eps=0.1), oracle.layer_norm(z.numpy(), **norm, eps=0.1)
    )
    with torch.no_grad():
        assert is_close(
            reference.block(z[None], template.inside(model.state_dict(), "blocks.1"), 3),
            model.blocks[1](z[None]),
        )


def test_attention_with_and_without_a_mask():
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for given in (None, mask):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=given)
        assert is_close(reference.attention(q, k, v, given), expected)


def test_positions():
    assert torch.equal(reference.positions(7, 8), sincos(torch.arange(7), 8))


def test_names_and_arguments_match_the_template():
    assert [exercise.name for exercise in EXERCISES] == list(NAMES)
    functions = [name for name, value in vars(template).items() if inspect.isfunction(value)]
    assert functions == ["inside", *NAMES]
    for exercise in EXERCISES:
        expected = inspect.signature(getattr(template, exercise.name)).parameters
        ours = inspect.signature(exercise.reference).parameters
        assert [(p.name, p.default) for p in expected.values()] == [
            (p.name, p.default) for p in ours.values()
        ]
        assert getattr(template, exercise.name).__doc__


def test_mistakes_with_default_choices_are_correct():
    torch.set_default_dtype(torch.float64)
    try:
        for exercise in EXERCISES:
            module = mistakes if hasattr(mistakes, exercise.name) else mistakes_model
            function = getattr(module, exercise.name)
            for case in exercise.cases(torch.Generator().manual_seed(1)):
                assert is_close(function(*case), exercise.reference(*case))
    finally:
        torch.set_default_dtype(torch.float32)
