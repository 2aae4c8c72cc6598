"""The walk through a ViT: every equation is parsed, evaluated in float64 from the earlier stages and the model's
parameters, and compared with the stage's tensor.

test_walk_decoder.py does the same for decoders; tests/support/equations.py has the parser.
"""

import random

import pytest
import torch

import vitrail as vt
from tests.support.equations import check
from tests.support.models import add_noise
from vitrail.views.walk import Stage, token_name, walk

# T = 6 + prefix, D = 12 and the head width all differ: a product that fits in two ways would hide a mistake.
BASE = dict(width=12, depth=2, heads=3, patch=(4, 8), size=(12, 16), channels=2, classes=5)

CONFIGS = {
    "paper": {},
    "mean pool, no class token": dict(pool="mean", class_token=False),
    "registers, rows class": dict(registers=2, rows="class"),
    "rows patches, norm_pre": dict(registers=1, rows="patches", norm_pre=True),
    "rotary": dict(position="rotary"),
    "rotary-dinov3, qk-norm": dict(position="rotary-dinov3", qk_norm=True, registers=2),
    "relative bias": dict(position="relative", scale="width"),
    "pairwise bias alone": dict(position="pairwise", scale=0.0),
    "positions at every block": dict(position_at="every", position="learned2d"),
    "post-norm": dict(block="post-norm"),
    "res-post-norm": dict(block="res-post-norm", layer_scale=0.1),
    "parallel": dict(block="parallel", scale="none"),
    "no residual": dict(block="no-residual", scale=0.3),
    "gated, layer scale": dict(mlp="gated", activation="silu", layer_scale=0.1),
    "two hidden layers, RMS": dict(mlp_hidden=2, norm="rms", qk_norm=True),
    "no norm": dict(norm="none", block="post-norm"),
    "EVA-02": dict(position="rotary-eva02", mlp="gated", activation="silu", mlp_norm=True, qkv_bias="no-k"),
    "Perception Encoder": dict(position="rotary-pe", norm_pre=True, pool="attention", pool_tokens="all"),
    "no biases, norm on the heads": dict(linear_bias=False, attention_norm=True, norm="rms", mlp_hidden=2),
    "gated without biases": dict(linear_bias=False, mlp="gated", mlp_norm=True),
    "attention pool": dict(pool="attention", registers=1),
    "attention pool, norm after": dict(pool="attention", pool_norm="after", norm="rms"),
    "attention pool, no class token": dict(pool="attention", class_token=False),
    "class and mean": dict(pool="class-mean", registers=2, head_bias=False),
    "flatten": dict(pool="flatten", qkv_bias="no-k"),
    "mean of all, norm after": dict(pool="mean-all", pool_norm="after", qkv_bias="none"),
    "distilled": dict(distillation_token=True, head="distilled", head_width=8),
    "embedding mlp, norms": dict(embedding="mlp", embedding_norm="both", head="mlp"),
    "stem": dict(embedding="conv", head="tanh", activation="quick-gelu"),
    "four heads, no head": dict(heads=4, classes=0, activation="gelu-tanh"),
    "no bias on the patches": dict(embedding_bias=False),
    "pixels cut off": dict(size=(14, 19), remainder="cut", dropout=0.3, drop_path=0.2, activation="relu"),
}

# ---- every equation -------------------------------------------------------------------------


def build(fields):
    config = vt.ViTConfig(**{**BASE, **fields})
    model = add_noise(vt.ViT(config)).double()
    return model, torch.randn(config.input_shape, dtype=torch.float64)


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_equation_gives_the_tensor_of_its_stage(fields):
    model, image = build(fields)
    T, k = model.config.tokens, model.config.heads
    for at in (dict(block=0, head=0, token=0), dict(block=1, head=k - 1, token=T - 2)):
        stages = walk(model, image, **at)
        check(model, image, stages, **at)
        assert len({stage.name for stage in stages}) == len(stages)


CHOICES = {
    "block": ["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"],
    "norm": ["layer", "rms", "none"],
    "scale": ["head", "width", "none", 0.3],
    "position": ["learned", "learned2d", "sincos1d", "sincos2d", "rotary", "pairwise", "relative", "none"],
    "rows": ["all", "class", "patches"],
    "position_at": ["start", "every"],
    "registers": [0, 2],
    "class_token": [True, False],
    "norm_pre": [False, True],
    "embedding": ["linear", "mlp", "conv"],
    "embedding_norm": ["none", "before", "after", "both"],
    "embedding_bias": [True, False],
    "qkv_bias": ["all", "none", "no-k"],
    "qk_norm": [False, True],
    "mlp": ["plain", "gated"],
    "activation": ["gelu", "gelu-tanh", "quick-gelu", "relu", "silu"],
    "mlp_hidden": [1, 2],
    "layer_scale": [None, 0.5],
    "pool": ["class", "mean", "mean-all", "class-mean", "attention", "flatten"],
    "pool_norm": ["before", "after", "none"],
    "head": ["linear", "mlp", "tanh"],
    "head_bias": [True, False],
    "head_width": [None, 8],
    "patch_dropout": [0.0, 0.4],
}


@pytest.mark.parametrize("seed", range(24))
def test_equations_hold_for_random_combinations_of_options(seed):
    rng = random.Random(seed)
    fields = {name: rng.choice(values) for name, values in CHOICES.items()}
    for name in rng.sample(list(fields), len(fields)):  # options that clash return to their defaults
        try:
            vt.ViTConfig(**{**BASE, **fields})
        except vt.ConfigError:
            fields.pop(name)
    model, image = build(fields)
    at = dict(block=seed % 2, head=seed % 3, token=rng.randrange(model.config.tokens))
    check(model, image, walk(model, image, **at), **at)


# ---- article 001 of the lecture notes -------------------------------------------------------


@pytest.fixture(scope="module")
def article():
    """A walk through one block of ViT-Base, the model of the article."""
    model = vt.create("B/16", depth=1, classes=10).eval()
    image = torch.randn(3, 224, 224)
    return model, image, {stage.name: stage for stage in walk(model, image, token=1)}


def test_shapes_match_the_article(article):
    _, _, stages = article
    shapes = {
        "pixels": (3, 224, 224),
        "tokens.cut": (196, 768),
        "tokens.proj": (196, 768),
        "prefix": (197, 768),
        "position": (197, 768),
        "blocks.0.attention.q": (197, 64),
        "blocks.0.attention.k": (197, 64),
        "blocks.0.attention.v": (197, 64),
        "blocks.0.attention.scores": (197, 197),
        "blocks.0.attention.weights": (197, 197),
        "blocks.0.attention.row": (197,),
        "blocks.0.attention.head": (197, 64),
        "blocks.0.attention.heads": (197, 768),
        "blocks.0.attention.out": (197, 768),
        "blocks.0.mlp.hidden": (197, 3072),
        "blocks.0.out": (197, 768),
        "encoded": (197, 768),
        "pooled": (768,),
        "logits": (10,),
        "probabilities": (10,),
    }
    assert {name: stages[name].shape for name in shapes} == shapes


def test_the_errors_of_the_article_are_not_repeated(article):
    model, _, stages = article
    # The residual is added to the embeddings, not to their norm.
    branch, z = stages["blocks.0.attention.out"].tensor, stages["embed"].tensor
    assert torch.equal(stages["blocks.0.residual1"].tensor, z + branch)
    assert (stages["blocks.0.residual1"].tensor - stages["blocks.0.norm1"].tensor - branch).abs().max() > 0.1
    # Token 0 is the class token, token 1 the first patch.
    assert token_name(model.config, 0) == "the class token"
    assert "patch 0 (row 0, column 0)" in stages["blocks.0.attention.row"].meaning
    assert torch.equal(stages["prefix"].tensor[1:], stages["tokens.proj"].tensor)
    # The standardized token has mean 0 and variance 1.
    unit = stages["blocks.0.norm1.standard"].tensor
    assert abs(unit.mean()) < 1e-5
    assert abs(unit.var(unbiased=False) - 1) < 1e-3
    # Each row of weights sums to 1, and the row shown is the token's.
    weights = stages["blocks.0.attention.weights"].tensor
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    assert torch.equal(weights[1], stages["blocks.0.attention.row"].tensor)


# ---- equations follow the config ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name", "equation"),
    [
        ({}, "blocks.0.attention.q", "q = LN(z_0) U_q + b_q"),
        ({}, "blocks.0.attention.scores", "S = q k^T / sqrt(d)"),
        (dict(scale="width"), "blocks.0.attention.scores", "S = q k^T / sqrt(D)"),
        (dict(scale="none"), "blocks.0.attention.scores", "S = q k^T"),
        (dict(position="relative", scale=0.3), "blocks.0.attention.scores", "S = 0.3 q k^T + p"),
        (dict(qkv_bias="no-k"), "blocks.0.attention.k", "k = LN(z_0) U_k"),
        (dict(position="rotary"), "blocks.0.attention.k", "k = R(LN(z_0) U_k + b_k)"),
        ({}, "blocks.0.residual1", "z'_1 = MSA + z_0"),
        (dict(block="post-norm"), "blocks.0.attention.q", "q = z_0 U_q + b_q"),
        (dict(block="post-norm"), "blocks.0.out", "z_1 = LN(r)"),
        (dict(block="res-post-norm"), "blocks.0.out", "z_1 = LN(MLP) + z'_1"),
        (dict(block="parallel"), "blocks.0.out", "z_1 = MSA + MLP + z_0"),
        (dict(block="no-residual"), "blocks.0.out", "z_1 = MLP"),
        ({}, "blocks.1.out", "z_2 = Block_1(z_1)"),
        (dict(position_at="every"), "blocks.1.out", "z_2 = Block_1(z_1 + E_pos)"),
        (dict(registers=2), "prefix", "u = [x_class; x_reg^0; x_reg^1; e]"),
        (dict(norm="none"), "blocks.0.mlp.hidden", "h = GELU(z'_1 W_1 + b_1)"),
        (dict(norm="none", pool="attention"), "pooled", "y = MLP(c) + c"),
        (
            dict(pool="attention", registers=1),
            "pool.attention.out",
            "c = MSA(probe, [LN(z_2)^2; ...; LN(z_2)^7])",
        ),
        (dict(pool="class-mean"), "pooled", "y = [LN(z_2)^0; mean(LN(z_2)^1, ..., LN(z_2)^6)]"),
        (dict(head_bias=False), "logits", "o = y W"),
        (dict(pool="mean"), "pooled", "y = mean(LN(z_2)^1, ..., LN(z_2)^6)"),
        ({}, "pooled", "y = LN(z_2)^0"),
    ],
)
def test_equations_follow_the_config(fields, name, equation):
    model, image = build(fields)
    stages = {stage.name: stage for stage in walk(model, image)}
    assert stages[name].equation == equation


def test_stages_that_do_not_apply_are_omitted():
    model, image = build(dict(class_token=False, pool="mean", position="none", norm="none", classes=0))
    names = [stage.name for stage in walk(model, image)]
    assert not {"prefix", "position", "blocks.0.norm1", "blocks.0.norm2", "encoded", "logits"} & set(names)
    assert names[-1] == "pooled"
    model, image = build({})
    assert not [stage.name for stage in walk(model, image) if "bias" in stage.name or "scale" in stage.name]


def test_token_names():
    config = vt.ViTConfig(**BASE, distillation_token=True, registers=2)
    names = [token_name(config, token) for token in range(6)]
    assert names == [
        "the class token",
        "the distillation token",
        "register 0",
        "register 1",
        "patch 0 (row 0, column 0)",
        "patch 1 (row 0, column 1)",
    ]


@pytest.mark.parametrize(
    ("fields", "token", "name"),
    [],
)
def test_token_names_of_other_inputs(fields, token, name):
    model, x = build(fields)
    assert token_name(model.config, token) == name
    stages = {stage.name: stage for stage in walk(model, x, token=token)}
    assert stages["blocks.0.attention.row"].meaning == f"The attention weights of {name} (t = {token})."


# ---- the model is unchanged; wrong arguments are refused ------------------------------------


def test_the_model_is_unchanged():
    model, image = build(dict(dropout=0.5, drop_path=0.5, position="pairwise"))
    model.train()
    model.blocks[1].eval()  # modes of single modules are restored
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, again = walk(model, image), walk(model, image[None])
    assert [module.training for module in model.modules()] == modes
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.tensor, two.tensor), one.name  # no dropout; a batch of one is accepted
    for stage in first[1:]:
        stage.tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_modes_are_restored_after_an_error():
    model, image = build({})
    model.train()
    with pytest.raises(vt.InputError, match="dtype"):
        walk(model, image.float())
    assert all(module.training for module in model.modules())


def test_a_stage_is_frozen_and_compares_by_identity():
    stage = Stage("a", "b", "c", torch.zeros(2, 3))
    assert stage.shape == (2, 3)
    assert stage != Stage("a", "b", "c", stage.tensor)
    with pytest.raises(AttributeError):
        stage.name = "d"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(block=2), "block must be an integer from 0 to 1, not 2; this model has 2 blocks"),
        (dict(block=-1), "block must be an integer from 0 to 1, not -1"),
        (dict(head=3), "head must be an integer from 0 to 2, not 3"),
        (dict(token=7), "token must be an integer from 0 to 6, not 7"),
        (dict(token=1.0), "token must be an integer from 0 to 6, not 1.0"),
    ],
)
def test_indices_out_of_range_are_refused(given, message):
    model, image = build({})
    with pytest.raises(vt.InputError) as caught:
        walk(model, image, **given)
    assert str(caught.value).startswith(message)
    assert "counted from 0." in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((4, 2, 12, 16), "select one of the batch: images[0]"),
        ((12, 16, 2), "put the channels first: image.permute(2, 0, 1)"),
        ((2, 12, 24), "resize the image"),
        ((12, 16), "resize the image"),
    ],
)
def test_an_image_of_the_wrong_shape_is_refused(shape, hint):
    model, _ = build({})
    with pytest.raises(vt.InputError) as caught:
        walk(model, torch.zeros(shape, dtype=torch.float64))
    assert f"shape (2, 12, 16), not {shape}; {hint}" in str(caught.value)
    with pytest.raises(vt.InputError, match="must be a torch tensor"):
        walk(model, [[0.0]])


def test_a_model_of_another_input_is_refused():
    text = vt.ViT(vt.ViTConfig(width=12, depth=1, heads=2, input="text", size=6, patch=1, vocabulary=11))
    with pytest.raises(vt.InputError, match="this one takes text; use"):
        walk(text, torch.zeros(6, dtype=torch.long))
