"""The walk through a decoder: its equations, read and worked out as in test_walkthrough.py, and its mask."""

import pytest
import torch

import vitrail as vt
from conftest import shake
from equations import check
from vitrail.walkthrough import token_name, walk

# T = 5, S = 7, D = 12, d = 4 and V = 11 are all different: a product that fits in two ways would hide a slip.
BASE = dict(vocabulary=11, width=12, depth=2, heads=3, length=8)
CROSS = dict(context_width=12)
BRIDGE = dict(context_width=10)

CONFIGS = {
    "plain": {},
    "tied": dict(tied=True),
    "post-norm": dict(block="post-norm", activation="gelu"),
    "res-post-norm, rms": dict(block="res-post-norm", norm="rms"),
    "parallel": dict(block="parallel", tied=True),
    "no residual": dict(block="no-residual", head_width=8),
    "no norm": dict(norm="none"),
    "no norm, post-norm": dict(norm="none", block="post-norm"),
    "four heads, rms": dict(heads=4, norm="rms", mlp_width=20, eps=1e-3),
    "cross": CROSS,
    "cross, rms, tied": dict(CROSS, norm="rms", tied=True),
    "bridge": BRIDGE,
    "bridge, no norm, four heads": dict(BRIDGE, norm="none", heads=4, activation="silu", dropout=0.3),
}


def build(fields, length=5, seen=7):
    decoder = shake(vt.Decoder(vt.DecoderConfig(**{**BASE, **fields}))).double()
    width = decoder.config.context_width
    context = None if width is None else torch.randn(seen, width, dtype=torch.float64)
    return decoder, torch.randint(decoder.config.vocabulary, (length,)), context


def named(stages):
    return {stage.name: stage for stage in stages}


# ---- every equation -------------------------------------------------------------------------


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_equation_gives_the_tensor_beside_it(fields):
    decoder, tokens, context = build(fields)
    for at in (dict(block=0, head=0, token=4), dict(block=1, head=decoder.config.heads - 1, token=2)):
        stages = walk(decoder, tokens, context=context, **at)
        check(decoder, tokens, stages, context, **at)
        assert len({stage.name for stage in stages}) == len(stages)


@pytest.mark.parametrize("length", [1, 8])
def test_and_so_for_the_shortest_and_the_longest_sequence(length):
    decoder, tokens, context = build(CROSS, length)
    at = dict(block=1, head=1, token=0)
    check(decoder, tokens, walk(decoder, tokens, context=context, **at), context, **at)


@pytest.mark.parametrize(
    ("fields", "name", "equation"),
    [
        ({}, "numbers", "x in {0, ..., 10}^5"),
        ({}, "tokens", "e = E[x]"),
        ({}, "position", "s = e + E_pos[0 ... 4]"),
        ({}, "blocks.0.attention.products", "S = q k^T / sqrt(d)"),
        ({}, "blocks.0.attention.scores", "M = mask(S)"),
        ({}, "blocks.0.attention.weights", "A = softmax(M)"),
        ({}, "blocks.0.out", "z_1 = MLP + z'_1"),
        ({}, "blocks.1.out", "z_2 = Block_2(z_1)"),
        ({}, "logits", "o = LN(z_2) W + b"),
        (dict(tied=True), "logits", "o = LN(z_2) E^T"),
        ({}, "next", "p = P^t"),
        (CROSS, "blocks.0.cross.k", "k = c U_k + b_k"),
        (BRIDGE, "bridge", "c' = c W + b"),
        (BRIDGE, "blocks.0.cross.q", "q = LN(z'_1) U_q + b_q"),
        (BRIDGE, "blocks.0.cross.v", "v = c' U_v + b_v"),
        (BRIDGE, "blocks.0.cross.scores", "S = q k^T / sqrt(d)"),
        (BRIDGE, "blocks.0.residual_cross", "z''_1 = MCA + z'_1"),
        (BRIDGE, "blocks.0.out", "z_1 = MLP + z''_1"),
        (BRIDGE, "blocks.1.out", "z_2 = Block_2(z_1, c')"),
    ],
)
def test_an_equation_in_words_of_the_paper(fields, name, equation):
    decoder, tokens, context = build(fields)
    assert named(walk(decoder, tokens, context=context))[name].equation == equation


def test_stages_that_do_not_apply_are_left_out():
    names = {}
    for key, fields in {"plain": dict(norm="none"), "cross": CROSS}.items():
        decoder, tokens, context = build(fields)
        names[key] = [stage.name for stage in walk(decoder, tokens, context=context)]
    assert not [name for name in names["plain"] if "norm" in name or "cross" in name]
    assert not {"context", "bridge", "encoded"} & set(names["plain"])
    assert "context" in names["cross"]
    assert "bridge" not in names["cross"]


# ---- note 003: mask, -inf, softmax ----------------------------------------------------------


def test_the_note_s_table():
    """Where all scores are 0, the mask leaves 0 and -inf, and softmax makes 1/n of them."""
    decoder, tokens, _ = build({}, length=8)
    with torch.no_grad():
        for parameter in (decoder.blocks[0].attention.qkv.weight, decoder.blocks[0].attention.qkv.bias):
            parameter[:12] = 0  # no query asks for anything
    stages = named(walk(decoder, tokens))
    products, scores, weights = (
        stages[f"blocks.0.attention.{part}"].tensor for part in ("products", "scores", "weights")
    )
    ahead = torch.ones(8, 8).triu(1) == 1
    assert (products == 0).all()
    assert (scores[ahead] == -torch.inf).all()
    assert (scores[~ahead] == 0).all()
    for row in range(8):
        assert torch.allclose(
            weights[row, : row + 1], torch.full((row + 1,), 1 / (row + 1), dtype=torch.float64)
        )
        assert (weights[row, row + 1 :] == 0).all()


def test_no_token_looks_ahead_but_all_look_at_the_whole_context():
    decoder, tokens, context = build(BRIDGE)
    stages = named(walk(decoder, tokens, context=context, token=2, head=1, block=1))
    own, cross = stages["blocks.1.attention.row"].tensor, stages["blocks.1.cross.row"].tensor
    assert (own[:3] > 0).all()
    assert (own[3:] == 0).all()
    assert cross.shape == (7,)
    assert (cross > 0).all()
    for part in ("attention", "cross"):
        weights = stages[f"blocks.1.{part}.weights"].tensor
        assert torch.allclose(weights.sum(-1), torch.ones(5, dtype=torch.float64))
    assert torch.isfinite(stages["blocks.1.attention.products"].tensor).all()


def test_a_stage_with_the_name_of_a_tap_is_what_the_tap_sees():
    decoder, tokens, context = build(BRIDGE)
    taps = ("blocks.0.attention.scores", "blocks.0.cross.weights", "blocks.0.norm_cross", "bridge", "logits")
    stages = named(walk(decoder, tokens, context=context, head=2))
    with vt.record(decoder, *taps) as tape, torch.no_grad():
        decoder(tokens[None], context[None])
    for name in taps:
        seen = tape[name][0, 2] if tape[name].ndim == 4 else tape[name][0]
        assert torch.allclose(stages[name].tensor, seen, atol=1e-12), name


def test_the_last_token_is_the_one_followed_unless_told_otherwise():
    decoder, tokens, _ = build({})
    stages = named(walk(decoder, tokens))
    assert stages["next"].meaning == "What comes after token 4 (t = 4)."
    assert torch.equal(stages["next"].tensor, stages["probabilities"].tensor[4])
    assert stages["probabilities"].shape == (5, 11)
    expected = decoder(tokens[None])[0, -1].softmax(-1)
    assert torch.allclose(stages["next"].tensor, expected, atol=1e-12)
    assert "token 1 (t = 1)" in named(walk(decoder, tokens, token=1))["next"].meaning
    assert token_name(decoder.config, 3) == "token 3"


# ---- what it does to the model, and what it refuses -----------------------------------------


def test_the_decoder_is_left_as_it_was():
    decoder, tokens, context = build(dict(BRIDGE, dropout=0.5, attention_dropout=0.5))
    decoder.train()
    decoder.blocks[1].eval()
    modes = [module.training for module in decoder.modules()]
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    first = walk(decoder, tokens, context=context)
    again = walk(decoder, tokens[None].int(), context=context[None])
    assert [module.training for module in decoder.modules()] == modes
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.tensor, two.tensor), one.name
    for stage in first:
        stage.tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in decoder.state_dict().items())
    assert not any(module._forward_hooks for module in decoder.modules())


ROW = torch.tensor([1, 2, 3])
SEEN = torch.zeros(7, 10, dtype=torch.float64)


@pytest.mark.parametrize(
    ("fields", "tokens", "given", "message"),
    [
        ({}, ROW, dict(block=2), "block must be a whole number from 0 to 1. Got block=2. This model has 2"),
        ({}, ROW, dict(head=-1), "head must be a whole number from 0 to 2. Got head=-1. This model has 3"),
        ({}, ROW, dict(token=3), "from 0 to 2. Got token=3. This sequence has 3 tokens, counted from 0."),
        ({}, [1, 2], {}, "Tokens must be a torch tensor. Got list. Use torch.tensor."),
        ({}, ROW[None].expand(2, 3), {}, "Got (2, 3). Pick one of the batch: tokens[0]."),
        ({}, ROW[None, None], {}, "Got (1, 1, 3). Put the numbers in one row."),
        ({}, ROW[:0], {}, "Got (1, 0)."),
        (
            {},
            ROW.double(),
            {},
            "Tokens must be whole numbers, torch.int64 or torch.int32. Got torch.float64.",
        ),
        ({}, ROW + 8, {}, "Tokens must be numbers from 0 to 10, below the vocabulary. Got 11."),
        ({}, ROW.repeat(3), {}, "A sequence must be at most 8 tokens long"),
        ({}, ROW, dict(context=SEEN), "Got a context, and context_width=None."),
        (BRIDGE, ROW, {}, "Got no context, and context_width=10."),
        (BRIDGE, ROW, dict(context=SEEN[:, :9]), "of the shape (1, S, 10)"),
        (BRIDGE, ROW, dict(context=SEEN.expand(2, 7, 10)), "Got (2, 7, 10)."),
        (BRIDGE, ROW, dict(context=[1.0]), "Got list."),
        (BRIDGE, ROW, dict(context=SEEN.float()), "must have the model's dtype, torch.float64."),
    ],
)
def test_what_does_not_fit_is_refused(fields, tokens, given, message):
    decoder, _, _ = build(fields)
    decoder.train()
    with pytest.raises(vt.InputError) as caught:
        walk(decoder, tokens, **given)
    assert message in str(caught.value)
    assert all(module.training for module in decoder.modules())


def test_only_models_are_walked_and_only_decoders_have_a_context(tiny, pictures):
    with pytest.raises(vt.InputError, match=r"Only a decoder looks at a context\. Got a ViT with one"):
        walk(tiny, pictures[0], context=SEEN)
    with pytest.raises(vt.InputError, match=r"A walk is through a ViT or a Decoder\. Got Linear"):
        walk(torch.nn.Linear(2, 2), ROW)
