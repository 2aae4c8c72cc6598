"""Muon against NumPy, and what it updates."""

from __future__ import annotations

import numpy as np
import torch

import vitrail as vt
from vitrail.training.optim import MOMENTUM, build_optimizer, optimizer_step, orthogonalize, set_lr
from vitrail.training.recipes.settings import TrainConfig


def test_singular_values_become_about_one_and_vectors_stay():
    x = torch.randn(4, 32, 96, generator=torch.Generator().manual_seed(0))
    for matrices in (x, x.mT):
        done = orthogonalize(matrices)
        values = torch.linalg.svdvals(done)
        assert values.min() > 0.6
        assert values.max() < 1.3
        U, _, V = torch.linalg.svd(matrices, full_matrices=False)
        torch.testing.assert_close(U @ torch.diag_embed((U.mT @ done @ V.mT).diagonal(0, 1, 2)) @ V, done)


def reference_steps(weight, gradients, lr, decay, parts):
    """In NumPy, from the paper: momentum, Nesterov, five iterations, a step with the RMS of AdamW's."""
    momentum = np.zeros_like(weight)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        ahead = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
        steps = []
        for x in np.split(ahead, parts):
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / np.linalg.norm(x)
            for _ in range(5):
                A = x @ x.T
                x = 3.4445 * x + (-4.7750 * A + 2.0315 * A @ A) @ x
            steps.append(0.2 * max(x.shape) ** 0.5 * (x.T if tall else x))
        weight = weight * (1 - lr * decay) - lr * np.concatenate(steps)
    return weight


def test_steps_are_those_of_numpy_and_the_rest_is_adamw():
    settings = TrainConfig(optimizer="muon", weight_decay=0.1)
    torch.manual_seed(0)
    model = vt.create("mu/4", classes=5)
    twin = vt.create("mu/4", classes=5)
    twin.load_state_dict(model.state_dict())
    before = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    muon, adamw = build_optimizer(model, settings), build_optimizer(twin, TrainConfig(weight_decay=0.1))
    gradients = {name: [torch.randn_like(p) for _ in range(3)] for name, p in model.named_parameters()}
    for number in range(3):
        for optimizer, one in ((muon, model), (adamw, twin)):
            for name, parameter in one.named_parameters():
                parameter.grad = gradients[name][number].clone()
            set_lr(optimizer, 0.01)
            optimizer_step(optimizer, torch.zeros(()))
    others = dict(twin.named_parameters())
    by_muon = []
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            by_muon.append(name.split(".", 2)[2])
            parts = 3 if "qkv" in name else 1
            exact = [g.double().numpy() for g in gradients[name]]
            expected = reference_steps(before[name], exact, 0.01, 0.1, parts)
            np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=2e-5)
        else:
            torch.testing.assert_close(parameter, others[name], rtol=0, atol=0)
    names = {"attention.qkv.weight", "attention.out.weight", "mlp.fc1.weight", "mlp.fc2.weight"}
    assert set(by_muon) == names
