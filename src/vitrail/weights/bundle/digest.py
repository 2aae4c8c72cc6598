"""A hash of a model: equal for equal outputs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import torch

from vitrail.weights.bundle.bundle import Bundle


def bundle_digest(bundle: Bundle) -> str:
    """SHA-256 of everything that a model's logits depend on: weights, config, preprocessing and labels."""
    preprocess = bundle.preprocess and asdict(bundle.preprocess)
    configs = [asdict(bundle.model.config), preprocess, bundle.labels]
    digest = hashlib.sha256(json.dumps(configs).encode())
    for name, tensor in sorted(bundle.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
