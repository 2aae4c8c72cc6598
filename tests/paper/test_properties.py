"""Whatever the shape of the model, it computes what the oracle computes."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_oracle import numpy_logits

import vitrail as vt
from conftest import shake

few = st.integers(1, 4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(h=few, w=few, high=few, wide=few, channels=few, heads=few, d=few, depth=st.integers(1, 2), classes=few)
def test_any_shape_agrees_with_the_oracle(h, w, high, wide, channels, heads, d, depth, classes):
    config = vt.ViTConfig(
        width=heads * d, depth=depth, heads=heads, patch=(high, wide), size=(h * high, w * wide),
        channels=channels, classes=classes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = shake(vt.ViT(config)).double()
    images = torch.randn(2, channels, *config.pixels, dtype=torch.float64)
    with torch.no_grad():
        ours = model(images).numpy()
    assert np.abs(ours - numpy_logits(model, images)).max() < 1e-9
    enc = model.encode(images)
    assert enc.patches.shape == (2, h, w, heads * d)
    assert enc.tokens.shape == (2, h * w + 1, heads * d)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(name=st.text(max_size=20))
def test_any_name_is_a_model_or_a_sentence(name):
    said = None
    try:
        vt.preset(name)
    except vt.ConfigError as error:
        said = str(error)
    assert said is None or "Got " in said
