"""The same weights in timm, transformers, torchvision and here give the same logits.

Tiny random models of each library, with noise on every parameter, are copied by the tables of
tests/support/peer_keys.py. Nothing is downloaded and nothing is skipped: a library that does not import is
a failure.
"""

import pytest
import torch

import vitrail as vt
from bench.peers import PEERS
from tests.support.models import add_noise
from tests.support.peer_keys import TIMM, TORCHVISION, TRANSFORMERS, load_peer_weights

# name -> table, LayerNorm eps, whether it takes oblong images and other channels
LIBRARIES = {
    "timm": (TIMM, 1e-6, True),
    "transformers": (TRANSFORMERS, 1e-12, True),
    "torchvision": (TORCHVISION, 1e-6, False),
}


@pytest.mark.parametrize("oblong", [False, True], ids=["square", "oblong"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_logits_agree(library, oblong):
    table, eps, flexible = LIBRARIES[library]
    fields = dict(width=48, depth=3, heads=4, mlp_width=96, patch=8, size=32, classes=7, eps=eps)
    if oblong and flexible:
        fields |= dict(size=(16, 48), channels=5)
    elif oblong:
        fields |= dict(patch=4, size=20)  # torchvision: square only, so another square
    config = vt.ViTConfig(**fields)
    theirs = add_noise(PEERS[library](config))
    ours = load_peer_weights(table, theirs.state_dict(), vt.ViT(config))
    images = torch.randn(5, config.channels, *config.pixels)
    with torch.no_grad():
        expected, logits = theirs(images), ours(images)
    assert expected.abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-5
    assert torch.equal(logits.argmax(1), expected.argmax(1))
