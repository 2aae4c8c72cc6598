"""The last block that computes only what the head reads: the same logits and gradients."""

import copy

import pytest
import torch

import vitrail as vt
from vitrail.fast.executable import share_parameters
from vitrail.fast.variants import LastBlock, shorten_last_block, tokens_read
from vitrail.model.block import Block

FIELDS = [
    {},
    {"depth": 1},
    {"registers": 3},
    {"layer_scale": 0.5, "qk_norm": True},
    {"head": "distilled", "distillation_token": True},
    {"position": "rotary"},
    {"position": "rotary-dinov3", "registers": 1},
    {"position": "rotary-eva02"},
    {"position": "rotary-pe"},
    {"mlp": "gated", "norm": "rms"},
    {"pool_norm": "after"},
]


def build(**fields):
    torch.manual_seed(0)
    model = vt.create("mu/4", classes=5, **fields).double()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def images():
    return torch.randn(3, 3, 32, 32, dtype=torch.double, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_logits_and_gradients_are_the_same(fields):
    whole = build(**fields).train()
    short = copy.deepcopy(whole)
    assert shorten_last_block(short)
    gradients = []
    for model in (whole, short):
        logits = model(images())
        logits.square().sum().backward()
        gradients.append([logits.detach(), *(p.grad for p in model.parameters())])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_mask_of_each_image():
    whole = build().train()
    short = copy.deepcopy(whole)
    shorten_last_block(short)
    mask = torch.rand(3, 65, 65, generator=torch.Generator().manual_seed(2)) > 0.3
    torch.testing.assert_close(short(images(), mask), whole(images(), mask), rtol=1e-10, atol=1e-12)


def test_less_is_computed():
    model = build().train()
    shorten_last_block(model)
    with vt.record(model, "blocks.*.mlp.hidden") as tape:
        model(images())
    counts = [tape[f"blocks.{n}.mlp.hidden"].shape[1] for n in range(model.config.depth)]
    assert counts == [65] * (model.config.depth - 1) + [1]


def test_the_model_of_a_short_twin_computes_all_tokens():
    model = build()
    expected = model.encode(images()).tokens
    twin = share_parameters(model)
    assert shorten_last_block(twin)
    assert twin.encode(images()).tokens.shape[1] == 1
    torch.testing.assert_close(twin(images()), model(images()), rtol=1e-10, atol=1e-12)
    assert torch.equal(model.encode(images()).tokens, expected)
    assert type(model.blocks[-1]) is Block


@pytest.mark.parametrize(
    "fields",
    [{"pool": "mean"}, {"position": "relative"}, {"position": "pairwise"}, {"block": "post-norm"}],
    ids=str,
)
def test_where_the_head_reads_more_nothing_changes(fields):
    model = build(**fields)
    assert tokens_read(model) is None
    assert not shorten_last_block(model)
    assert not any(isinstance(block, LastBlock) for block in model.blocks)


def test_images_in_their_own_shape_take_the_whole_block():
    model = build().float().train()
    model.accept_any_size()
    some = [torch.randn(3, 32, 16), torch.randn(3, 16, 24)]
    expected = model(some)
    shorten_last_block(model)
    torch.testing.assert_close(model(some), expected)


def test_training_uses_it():
    import numpy as np

    from vitrail.images.formats.sources import open_dataset
    from vitrail.images.preprocess import Preprocess
    from vitrail.model.device import choose_device
    from vitrail.training.recipes.settings import Recipe, TrainConfig
    from vitrail.training.run_plan import RunPlan
    from vitrail.training.trainer import Trainer

    rng = np.random.default_rng(0)
    data = open_dataset((rng.integers(0, 256, (20, 32, 32, 3), np.uint8), rng.integers(0, 2, 20)))
    model = vt.create("mu/4", classes=2)
    recipe = Recipe(model.config, Preprocess(size=32), TrainConfig(epochs=1, batch=4, ema=None))
    trainer = Trainer(RunPlan(data, recipe, choose_device("cpu")), model)
    assert isinstance(trainer.executable.twin.blocks[-1], LastBlock)
