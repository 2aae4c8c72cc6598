"""Helpers for tests of models."""

import numpy as np
import torch

from tests.support import oracle


def add_noise(model):
    """Add noise to every parameter, so that a test notices if one is not used; evaluation mode.

    A new model has a zero head, zero biases and a zero class token: without noise, two models would agree
    whatever they do with these.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def oracle_logits(model, images):
    """The logits of a ViT's weights in the NumPy oracle."""
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    c = model.config
    sizes = dict(patch=c.patch, depth=c.depth, heads=c.heads, eps=c.eps)
    return np.stack([oracle.vit(image.double().numpy(), weights, **sizes) for image in images])
