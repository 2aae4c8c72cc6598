"""Property tests: models of random shapes against the oracle, and random names."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail as vt
from tests.support.models import add_noise, oracle_logits

few = st.integers(1, 4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(h=few, w=few, high=few, wide=few, channels=few, heads=few, d=few, depth=st.integers(1, 2), classes=few)
def test_any_shape_agrees_with_the_oracle(h, w, high, wide, channels, heads, d, depth, classes):
    config = vt.ViTConfig(
        width=heads * d, depth=depth, heads=heads, patch=(high, wide), size=(h * high, w * wide),
        channels=channels, classes=classes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = add_noise(vt.ViT(config)).double()
    images = torch.randn(2, channels, *config.pixels, dtype=torch.float64)
    with torch.no_grad():
        ours = model(images).numpy()
    assert np.abs(ours - oracle_logits(model, images)).max() < 1e-9
    enc = model.encode(images)
    assert enc.patches.shape == (2, h, w, heads * d)
    assert enc.tokens.shape == (2, h * w + 1, heads * d)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(name=st.text(max_size=20))
def test_any_name_is_a_model_or_a_config_error(name):
    with contextlib.suppress(vt.ConfigError):
        vt.preset(name)
        return
    with pytest.raises(vt.ConfigError, match=r"not a model name|unknown size|must be|multiple"):
        vt.preset(name)
