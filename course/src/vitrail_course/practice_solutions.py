"""The solutions of the exercises of the notebook 002_practice, as a student would write them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.model import ViT
from vitrail.model.config import ViTConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def find_E(model: ViT) -> Tensor:
    """E as in the paper: a matrix (P P C, D), with a column for each filter."""
    return model.tokens.proj.weight.flatten(1).T.detach()


def draw_E(model: ViT) -> Figure:
    """The filters: each column of E as an image of P x P pixels."""
    import matplotlib.pyplot as plt

    filters = model.tokens.proj.weight.detach()[:, 0]  # (D, P, P): MNIST has one channel
    figure, axes = plt.subplots(4, 8, figsize=(8, 4.2))
    for axis, image in zip(axes.flat, filters, strict=False):
        limit = float(image.abs().max())
        axis.imshow(image.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
    for axis in axes.flat:
        axis.axis("off")
    plt.close(figure)
    return figure


def draw_positions(model: ViT) -> Figure:
    """For each patch, the cosine similarity of its row of E_pos with those of all patches."""
    import matplotlib.pyplot as plt

    h, w = model.config.grid
    with torch.no_grad():
        E_pos = model.position.all_rows((h, w))[model.config.prefix :]  # type: ignore[operator]  # (N, D)
        E_pos = torch.nn.functional.normalize(E_pos, dim=1)
        cosine = (E_pos @ E_pos.T).reshape(h, w, h, w)
    figure, axes = plt.subplots(h, w, figsize=(5, 5), squeeze=False)
    for row in range(h):
        for column in range(w):
            axes[row, column].imshow(cosine[row, column].numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
            axes[row, column].axis("off")
    plt.close(figure)
    return figure


def make_positions_trainable(config: ViTConfig) -> ViTConfig:
    """Fixed sines and cosines become a parameter, which starts as large as the tokens."""
    return replace(config, position="learned", position_sigma=1.0)


def drop_class_token(config: ViTConfig) -> ViTConfig:
    """Without a class token, the mean of the patches is what the head reads."""
    return replace(config, class_token=False, pool="mean")


def improve(config: ViTConfig) -> ViTConfig:
    """The solution of the slides: smaller patches, more width, fewer layers, dropout in the attention."""
    return replace(config, size=28, patch=4, width=64, heads=4, depth=2, attention_dropout=0.1)
