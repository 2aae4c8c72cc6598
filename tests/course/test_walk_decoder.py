"""The walk through a decoder: its equations, evaluated as in test_walk.py, and its causal mask."""

import pytest
import torch

import vitrail as vt
from tests.support.equations import check
from tests.support.models import add_noise
from vitrail.views.walk import token_name, walk

# T = 5, S = 7, D = 12, d = 4 and V = 11 all differ: a product that fits in two ways would hide a mistake.
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


def build(fields, length=5, context_length=7):
    decoder = add_noise(vt.Decoder(vt.DecoderConfig(**{**BASE, **fields}))).double()
    width = decoder.config.context_width
    context = None if width is None else torch.randn(context_length, width, dtype=torch.float64)
    return decoder, torch.randint(decoder.config.vocabulary, (length,)), context


def named(stages):
    return {stage.name: stage for stage in stages}


# ---- every equation -------------------------------------------------------------------------


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_equation_gives_the_tensor_of_its_stage(fields):
    decoder, tokens, context = build(fields)
    for at in (dict(block=0, head=0, token=4), dict(block=1, head=decoder.config.heads - 1, token=2)):
        stages = walk(decoder, tokens, context=context, **at)
        check(decoder, tokens, stages, context, **at)
        assert len({stage.name for stage in stages}) == len(stages)


@pytest.mark.parametrize("length", [1, 8])
def test_equations_hold_for_the_shortest_and_the_longest_sequence(length):
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
        ({}, "blocks.1.out", "z_2 = Block_1(z_1)"),
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
        (BRIDGE, "blocks.1.out", "z_2 = Block_1(z_1, c')"),
    ],
)
def test_equations_follow_the_config(fields, name, equation):
    decoder, tokens, context = build(fields)
    assert named(walk(decoder, tokens, context=context))[name].equation == equation


def test_stages_that_do_not_apply_are_omitted():
    names = {}
    for key, fields in {"plain": dict(norm="none"), "cross": CROSS}.items():
        decoder, tokens, context = build(fields)
        names[key] = [stage.name for stage in walk(decoder, tokens, context=context)]
    assert not [name for name in names["plain"] if "norm" in name or "cross" in name]
    assert not {"context", "bridge", "encoded"} & set(names["plain"])
    assert "context" in names["cross"]
    assert "bridge" not in names["cross"]


# ---- the causal mask (note 003 of the lecture notes) ----------------------------------------


def test_equal_scores_give_equal_weights_to_all_earlier_tokens():
    """The table of the note: scores of 0 and -inf become weights of 1/n and 0."""
    decoder, tokens, _ = build({}, length=8)
    with torch.no_grad():
        for parameter in (decoder.blocks[0].attention.qkv.weight, decoder.blocks[0].attention.qkv.bias):
            parameter[:12] = 0  # all queries are zero
    stages = named(walk(decoder, tokens))
    products, scores, weights = (
        stages[f"blocks.0.attention.{part}"].tensor for part in ("products", "scores", "weights")
    )
    later = torch.ones(8, 8).triu(1) == 1
    assert (products == 0).all()
    assert (scores[later] == -torch.inf).all()
    assert (scores[~later] == 0).all()
    for row in range(8):
        assert torch.allclose(
            weights[row, : row + 1], torch.full((row + 1,), 1 / (row + 1), dtype=torch.float64)
        )
        assert (weights[row, row + 1 :] == 0).all()


def test_self_attention_is_causal_and_cross_attention_is_not():
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


def test_a_stage_with_the_name_of_a_tap_has_its_activation():
    decoder, tokens, context = build(BRIDGE)
    taps = ("blocks.0.attention.scores", "blocks.0.cross.weights", "blocks.0.norm_cross", "bridge", "logits")
    stages = named(walk(decoder, tokens, context=context, head=2))
    with vt.record(decoder, *taps) as tape, torch.no_grad():
        decoder(tokens[None], context[None])
    for name in taps:
        activation = tape[name][0, 2] if tape[name].ndim == 4 else tape[name][0]
        assert torch.allclose(stages[name].tensor, activation, atol=1e-12), name


def test_the_last_token_is_shown_by_default():
    decoder, tokens, _ = build({})
    stages = named(walk(decoder, tokens))
    assert stages["next"].meaning == "The probabilities of the token after token 4 (t = 4)."
    assert torch.equal(stages["next"].tensor, stages["probabilities"].tensor[4])
    assert stages["probabilities"].shape == (5, 11)
    expected = decoder(tokens[None])[0, -1].softmax(-1)
    assert torch.allclose(stages["next"].tensor, expected, atol=1e-12)
    assert "token 1 (t = 1)" in named(walk(decoder, tokens, token=1))["next"].meaning
    assert token_name(decoder.config, 3) == "token 3"


# ---- the model is unchanged; wrong arguments are refused ------------------------------------


def test_the_decoder_is_unchanged():
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
CONTEXT = torch.zeros(7, 10, dtype=torch.float64)


@pytest.mark.parametrize(
    ("fields", "tokens", "given", "message"),
    [
        ({}, ROW, dict(block=2), "block must be an integer from 0 to 1, not 2; this model has 2"),
        ({}, ROW, dict(head=-1), "head must be an integer from 0 to 2, not -1; this model has 3"),
        ({}, ROW, dict(token=3), "from 0 to 2, not 3; this sequence has 3 tokens, counted from 0"),
        ({}, [1, 2], {}, "must be a torch tensor, not a list"),
        ({}, ROW[None].expand(2, 3), {}, "not (2, 3); select one of the batch: tokens[0]"),
        ({}, ROW[None, None], {}, "not (1, 1, 3); put the indices in one row"),
        ({}, ROW[:0], {}, "(1, 0)"),
        ({}, ROW.double(), {}, "float64"),
        ({}, ROW + 8, {}, "11"),
        ({}, ROW.repeat(3), {}, "longer than the model's length"),
        ({}, ROW, dict(context=CONTEXT), "takes no context"),
        (BRIDGE, ROW, {}, "context_width=10"),
        (BRIDGE, ROW, dict(context=CONTEXT[:, :9]), "(1, S, 10)"),
        (BRIDGE, ROW, dict(context=CONTEXT.expand(2, 7, 10)), "(2, 7, 10)"),
        (BRIDGE, ROW, dict(context=[1.0]), "list"),
        (BRIDGE, ROW, dict(context=CONTEXT.float()), "torch.float64"),
    ],
)
def test_wrong_arguments_are_refused(fields, tokens, given, message):
    decoder, _, _ = build(fields)
    decoder.train()
    with pytest.raises(vt.InputError) as caught:
        walk(decoder, tokens, **given)
    assert message in str(caught.value)
    assert all(module.training for module in decoder.modules())


def test_only_a_decoder_takes_a_context_and_only_models_are_walked(tiny, images):
    with pytest.raises(vt.InputError, match=r"Only a decoder takes a context, .* omit the context"):
        walk(tiny, images[0], context=CONTEXT)
    with pytest.raises(vt.InputError, match="a ViT or a Decoder, not a Linear"):
        walk(torch.nn.Linear(2, 2), ROW)
