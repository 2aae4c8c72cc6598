"""Helpers for models of transformers: written and loaded by its own code, compared with ours."""

import json

import torch


def agree(theirs, bundle, tolerance=1e-5):
    """Assert that both give the same output on random images."""
    images = torch.randn(3, *bundle.model.config.input_shape)
    with torch.no_grad():
        expected, got = theirs(images), bundle.model(images)
    assert expected.shape == got.shape
    assert expected.abs().max() > 0.05
    assert (expected - got).abs().max() < tolerance


def save_pretrained(model, folder):
    """Write a model by transformers' own code; returns its weight file."""
    model.save_pretrained(folder)
    return folder / "model.safetensors"


def from_pretrained(kind, folder):
    """Load a model by transformers' own loader, which must report no missing and no unexpected tensors."""
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def change_config(folder, **settings):
    """Change keys of a folder's config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder
