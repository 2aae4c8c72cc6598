"""Rounding of int8 weights: GPTQ by NumPy, smaller errors, and a graph that computes what is simulated."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.fast.choices import Choices
from vitrail.fast.inference_routes import Builder
from vitrail.fast.int8 import _DAMPING, round_columns, round_to_nearest
from vitrail.fast.onnx_graph import OnnxForward
from vitrail.fast.quantize import row_scales


def gptq(weight, products):
    """One column after the other, with the inverse of what remains computed anew each time."""
    products = products + _DAMPING * np.diag(products).mean() * np.eye(len(products))
    scales = np.abs(weight).max(1) / 127
    left, integers = weight / scales[:, None], np.zeros_like(weight)
    remaining = list(np.argsort(-np.diag(products)))
    while remaining:
        column, *later = remaining
        inverse = np.linalg.inv(products[np.ix_(remaining, remaining)])
        integers[:, column] = np.clip(np.rint(left[:, column]), -127, 127)
        error = (left[:, column] - integers[:, column]) / inverse[0, 0]
        left[:, later] -= np.outer(error, inverse[0, 1:])
        remaining = later
    return integers


@pytest.fixture(scope="module")
def layer():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 150)) @ rng.normal(size=(150, 150)) + rng.normal(size=150)
    return torch.from_numpy(rng.normal(size=(20, 150))), torch.from_numpy(x)


def test_weights_are_rounded_as_by_numpy(layer):
    weight, x = layer
    products = x.T @ x / len(x)
    found = round_columns(weight, products)
    assert (found.numpy() == gptq(weight.numpy(), products.numpy())).mean() > 0.999  # ties may round apart


def test_rounded_weights_make_up_for_each_other(layer):
    weight, x = layer
    rows = row_scales(weight)[:, None]

    def error(integers):
        return ((weight - integers * rows) @ x.T).norm()

    assert error(round_columns(weight, x.T @ x / len(x))) < 0.8 * error(round_to_nearest(weight))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"mlp": "gated"}, {"qkv_bias": "no-k"}], ids=str)
def test_the_graph_computes_what_is_simulated(fields):
    """Also with biases that are corrected, and rows that the next layer's factors divide."""
    torch.manual_seed(0)
    model = add_noise(vt.create("mu/4", depth=2, classes=5, **fields)).eval()
    images, device = torch.randn(24, 3, 32, 32), torch.device("cpu")
    builder = Builder(model, device, "throughput", Choices(device, remember=False), images)
    assert all(one.shift.abs().max() > 0 for one in builder.calibration.scales.values())
    with torch.no_grad(), builder.calibration.simulate("int8", builder.calibration.scales):
        expected = model(images)
    with torch.no_grad():
        exact, found = model(images), OnnxForward(builder.int8_graph())(images)[1]
    assert (found - expected).norm() < 0.1 * (exact - expected).norm()
