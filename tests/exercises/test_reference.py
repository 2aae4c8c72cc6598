"""The reference is the package's model, and the paper's equations in NumPy."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.paper import oracle

import vitrail as vt
from conftest import shake
from vitrail.exercises import reference, slips, slips_model, template
from vitrail.exercises.exercise import EXERCISES
from vitrail.exercises.run import NAMES
from vitrail.model.position import sincos


@pytest.fixture
def model():
    config = vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=(8, 12), channels=2, classes=5)
    return shake(vt.ViT(config)).double()


@pytest.fixture
def images():
    return torch.randn(3, 2, 8, 12, dtype=torch.float64)


def near(one, other):
    return np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-10


def test_the_whole_model(model, images):
    config, weights = SimpleNamespace(patch=4, depth=2, heads=3), model.state_dict()
    came = reference.vit(images, weights, config)
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    with torch.no_grad():
        assert near(came, model(images))
    for row, image in zip(came, images.numpy(), strict=True):
        assert near(row, oracle.vit(image, arrays, patch=(4, 4), depth=2, heads=3))


def test_the_parts(model, images):
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    z = torch.randn(7, 12, dtype=torch.float64)
    at = {
        name: template.inside(model.state_dict(), f"blocks.0.{name}")
        for name in ("attention", "mlp", "norm1")
    }
    assert near(reference.patches(images, 4)[1], oracle.patches(images[1].numpy(), 4, 4))
    msa = reference.multi_head_attention(z[None], at["attention"], 3)[0]
    assert near(msa, oracle.msa(z.numpy(), weights, "blocks.0", 3))
    assert near(reference.mlp(z, at["mlp"]), oracle.mlp(z.numpy(), weights, "blocks.0"))
    norm = {name: tensor.numpy() for name, tensor in at["norm1"].items()}
    assert near(
        reference.layer_norm(z, **at["norm1"], eps=0.1), oracle.layer_norm(z.numpy(), **norm, eps=0.1)
    )
    with torch.no_grad():
        assert near(
            reference.block(z[None], template.inside(model.state_dict(), "blocks.1"), 3),
            model.blocks[1](z[None]),
        )


def test_attention_and_its_mask():
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for given in (None, mask):
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=given)
        assert near(reference.attention(q, k, v, given), right)


def test_positions():
    assert torch.equal(reference.positions(7, 8), sincos(torch.arange(7), 8))


def test_names_and_arguments_are_those_of_the_template():
    assert [exercise.name for exercise in EXERCISES] == list(NAMES)
    written = [name for name, value in vars(template).items() if inspect.isfunction(value)]
    assert written == ["inside", *NAMES]
    for exercise in EXERCISES:
        asked = inspect.signature(getattr(template, exercise.name)).parameters
        ours = inspect.signature(exercise.reference).parameters
        assert [(p.name, p.default) for p in asked.values()] == [(p.name, p.default) for p in ours.values()]
        assert getattr(template, exercise.name).__doc__


def test_slips_without_a_slip_are_right():
    torch.set_default_dtype(torch.float64)
    try:
        for exercise in EXERCISES:
            home = slips if hasattr(slips, exercise.name) else slips_model
            loose = (
                slips_model.wired(slips_model.pre_norm)
                if exercise.name == "block"
                else getattr(home, exercise.name)
            )
            for case in exercise.cases(torch.Generator().manual_seed(1)):
                assert near(loose(*case), exercise.reference(*case))
    finally:
        torch.set_default_dtype(torch.float32)
