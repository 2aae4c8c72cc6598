"""Every option combined with every other: shapes, gradients, save and load, export, taps.

A covering array is built greedily: a small set of configs in which each pair of values of two fields occurs
at least once, if the config allows it.
"""

import dataclasses
import itertools
import random
from typing import get_type_hints

import pytest
import safetensors.torch
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.fields import literal_values

BASE = dict(width=32, depth=2, heads=2, patch=8, size=(16, 24), classes=5)
HINTS = get_type_hints(vt.ViTConfig)
CHOICES = {
    field.name: literal_values(HINTS[field.name])
    for field in dataclasses.fields(vt.ViTConfig)
    if literal_values(HINTS[field.name]) and field.name != "input"  # tests/model/test_inputs.py
}
VALUES = {
    **CHOICES,
    "scale": [*CHOICES["scale"], 0.3, 0.0],
    "embedding": ["linear", "mlp", "conv"],  # "resnet" needs another patch size, below
    "class_token": [True, False],
    "distillation_token": [False, True],
    "registers": [0, 3],
    "norm_pre": [False, True],
    "embedding_bias": [True, False],
    "qk_norm": [False, True],
    "mlp_hidden": [1, 2],
    "mlp_norm": [False, True],
    "attention_norm": [False, True],
    "linear_bias": [True, False],
    "layer_scale": [None, 0.1],
    "head_bias": [True, False],
    "head_width": [None, 8],
    "mlp_width": [None, 20],
    "classes": [5, 0],
    "dropout": [0.0, 0.1],
    "attention_dropout": [0.0, 0.1],
    "patch_dropout": [0.0, 0.4],
    "drop_path": [0.0, 0.2],
}


def difference(actual, expected):
    """The largest difference, relative to the largest value (without norms logits can be large)."""
    return (actual - expected).abs().max().item() / max(1, expected.abs().max().item())


def config_of(fields):
    try:
        return vt.ViTConfig(**{**BASE, **fields})
    except vt.ConfigError:
        return None


def covering():
    """Configs that together contain every valid pair of values."""
    rng = random.Random(0)
    pairs = {
        ((one, x), (two, y))
        for one, two in itertools.combinations(VALUES, 2)
        for x in VALUES[one]
        for y in VALUES[two]
        if config_of({**companions(one, x), **companions(two, y), one: x, two: y})
    }
    while pairs:
        (one, x), (two, y) = min(pairs, key=repr)
        best, gain = None, -1
        for _ in range(25):
            fields = {name: rng.choice(values) for name, values in VALUES.items()}
            fields |= {**companions(one, x), **companions(two, y), one: x, two: y}
            for name in rng.sample(list(fields), len(fields)):  # reset fields until the config is valid
                if config_of(fields):
                    break
                if name not in (one, two, *companions(one, x), *companions(two, y)):
                    fields.pop(name)
            covered = {p for p in pairs if all(fields.get(n, default(n)) == v for n, v in p)}
            if config_of(fields) and len(covered) > gain:
                best, gain, best_covered = fields, len(covered), covered
        yield best
        pairs -= best_covered


def companions(name, value):
    """Other fields that a value needs."""
    return {
        ("pool", "class"): dict(class_token=True),
        ("pool", "class-mean"): dict(class_token=True),
        ("head_bias", False): dict(head="linear"),
        ("rows", "class"): dict(class_token=True),
        ("distillation_token", True): dict(class_token=True),
        ("head", "distilled"): dict(class_token=True, distillation_token=True, pool="class"),
        ("class_token", False): dict(pool="mean", rows="all"),
        ("scale", 0.0): dict(position="pairwise"),
        ("mlp", "gated"): dict(mlp_hidden=1),
        ("pool_tokens", "all"): dict(pool="attention"),
        ("position_at", "every"): dict(position="learned"),
    }.get((name, value), {})


def default(name):
    return next(field.default for field in dataclasses.fields(vt.ViTConfig) if field.name == name)


POOL = dict(pool="attention", pool_tokens="all", pool_heads=4, pool_mlp_width=20)
STEMS = [dict(embedding=stem, patch=16, size=(32, 48)) for stem in ("resnet", "mobile")]
CASES = [{}, *STEMS, POOL, *covering()]


def test_every_value_of_every_field_is_in_a_case():
    covered = {(name, repr(getattr(config_of(case), name))) for case in CASES for name in VALUES}
    for name, values in VALUES.items():
        for value in {*values, *CHOICES.get(name, [])}:
            assert (name, repr(value)) in covered


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_model_with_these_options(case, tmp_path):
    config = config_of(case)
    model = add_noise(vt.ViT(config)).double()  # without norms float32 can be inaccurate
    images = torch.randn(2, 3, *config.pixels, dtype=torch.float64)

    # Forward: shapes, and the same logits alone and in a batch.
    with torch.no_grad():
        logits = model(images)
        enc = model.encode(images, layers=[0])
    assert logits.shape == (2, config.classes or config.pooled_width)
    assert enc.patches.shape == (2, *config.grid, config.width)
    assert enc.prefix.shape == (2, config.prefix, config.width)
    assert enc.pooled.shape == enc.layers[0].pooled.shape == (2, config.pooled_width)
    assert logits.isfinite().all()
    assert difference(model(images[:1]), logits[:1]) < 1e-5

    # Backward: every parameter has a finite gradient.
    model.train()
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    model.eval()

    # Save and load: bit-equal.
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    again = vt.ViT(config).double().eval()
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(again(images), model(images))

    # Taps: recording does not change the logits; attention weights sum to 1.
    with torch.no_grad(), vt.record(model, "blocks.*.attention.weights", "embed", "logits") as tape:
        recorded = model(images)
    assert difference(recorded, logits) < 1e-5
    if config.pool == "attention":
        with torch.no_grad(), vt.record(model, "pool.attention.weights") as pooled:
            model(images)
        attended = config.tokens if config.pool_tokens == "all" else config.patches
        shape = (2, config.pool_heads or config.heads, 1, attended)
        assert pooled["pool.attention.weights"].shape == shape
        assert (pooled["pool.attention.weights"].sum(-1) - 1).abs().max() < 1e-5
    weights = tape["blocks.1.attention.weights"]
    assert weights.shape == (2, config.heads, config.tokens, config.tokens)
    assert (weights.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    "case", CASES[:: max(1, len(CASES) // 12)], ids=range(len(CASES[:: max(1, len(CASES) // 12)]))
)
def test_export_with_a_dynamic_batch(case):
    model = add_noise(vt.ViT(config_of(case))).double()
    shape = (3, *model.config.pixels)
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(
        model, (torch.randn(2, *shape, dtype=torch.float64),), dynamic_shapes=dynamic
    )
    images = torch.randn(5, *shape, dtype=torch.float64)
    assert difference(program.module()(images), model(images)) < 1e-5
