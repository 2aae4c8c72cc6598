"""Lecture note 002: patches, E, the PatchEmbedding class, fine-tuning; and the tokens of note 003."""

import pytest
import torch
from torch import nn

import vitrail as vt
from tests.support.models import add_noise
from vitrail.model import surgery


class PatchEmbedding(nn.Module):
    """The computation of "Trick: combine patching and linear projection", in code of our own."""

    def __init__(self, width, patch, channels):
        super().__init__()
        self.project = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, x):
        return self.project(x).flatten(2).transpose(-2, -1)  # (B, D, rows, columns) -> (B, N, D)


def test_the_patch_embedding_of_the_note():
    model = add_noise(
        vt.ViT(vt.ViTConfig(width=64, depth=1, heads=4, patch=4, size=28, channels=1, classes=10))
    )
    theirs = PatchEmbedding(64, (4, 4), 1)
    theirs.project.load_state_dict(model.tokens.proj.state_dict())
    images = torch.randn(3, 1, 28, 28)
    assert theirs(images).shape == (3, 49, 64)
    assert (theirs(images) - model.tokens(images)).abs().max() < 1e-5


def test_the_matrix_e():
    """ "What does the E matrix do?": 768 x 1024 in ViT-Large, one filter in each column."""
    with torch.device("meta"):
        E = vt.create("L/16").tokens.proj.weight.flatten(1).T
    assert E.shape == (16 * 16 * 3, 1024)


def test_fine_tuning_replaces_the_head_and_resamples_positions():
    """ "Finetuning": a new D x K head, interpolated position embeddings, and nothing else changes."""
    model = add_noise(
        vt.ViT(vt.ViTConfig(width=16, depth=2, heads=2, patch=4, size=16, classes=100, head="tanh"))
    )
    tuned = surgery.resize(surgery.reclass(model, 7), 32)
    assert tuned.head.weight.shape == (7, 16)
    assert tuned.position.table.shape == (65, 16)
    for name in {name for name in model.state_dict() if not name.startswith(("head", "position"))}:
        assert torch.equal(tuned.state_dict()[name], model.state_dict()[name])


@pytest.mark.parametrize(("patch", "tokens"), [(1, 64), ((1, 8), 8), ((8, 1), 8), (8, 1)])
def test_pixels_rows_and_columns_as_tokens(patch, tokens):
    """Note 003, "Tokens": "Image - pixel, image patch, row/column of pixels"."""
    model = vt.ViT(vt.ViTConfig(width=8, depth=1, heads=2, patch=patch, size=8, channels=3, classes=2))
    assert model.config.patches == tokens
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 2)
