"""The decoder: it looks back only, is the same as torch's own layers, learns and writes."""

import math
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import vitrail as vt
from conftest import shake
from vitrail.fields import describe, type_hints
from vitrail.model import attend, attend_explicitly
from vitrail.model.decoder import (
    CrossBlock,
    Decoder,
    DecoderConfig,
    causal_mask,
    draw,
    generate,
    initialise_decoder,
)

GOOD = dict(vocabulary=11, width=12, depth=2, heads=3, length=7)
V, T = 11, 7


def build(**fields):
    return shake(Decoder(DecoderConfig(**{**GOOD, **fields})))


@pytest.fixture
def tokens():
    return torch.randint(V, (4, T))


@pytest.fixture
def context():
    return torch.randn(4, 5, 12)


# ---- looking back only ----------------------------------------------------------------------


@pytest.mark.parametrize("block", ["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual", None])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_token_changes_nothing_before_it(tokens, context, block, explicit):
    model = build(context_width=12) if block is None else build(block=block)
    seen = {"context": context} if block is None else {}
    names = ["blocks.*.attention.weights"] if explicit else ["embed"]
    with torch.no_grad(), vt.record(model, *names):
        before = model(tokens, **seen)
        for t in range(T):
            changed = tokens.clone()
            changed[:, t] = (tokens[:, t] + 1) % V
            after = model(changed, **seen)
            assert torch.equal(after[:, :t], before[:, :t])  # bit for bit
            assert ((after[:, t:] - before[:, t:]).abs().amax((0, 2)) > 1e-6).all()


def test_every_place_sees_the_whole_context(tokens, context):
    model = build(context_width=12)
    with torch.no_grad():
        before = model(tokens, context)
        for s in range(5):
            changed = context.clone()
            changed[:, s] += 1
            assert ((model(tokens, changed) - before).abs().amax((0, 2)) > 1e-6).all()


def test_a_forgotten_context_cannot_open_the_future():
    block = CrossBlock(DecoderConfig(**GOOD).encoder_like)
    with pytest.raises(TypeError, match="context"):
        block(torch.zeros(1, 3, 12), causal_mask(3))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_fused_and_explicit_agree_under_the_mask(length):
    def run(form):
        generator = torch.Generator().manual_seed(3)
        q, k, v = (
            torch.randn(2, 3, length, 4, dtype=torch.float64, generator=generator).requires_grad_()
            for _ in range(3)
        )
        heads = form(q, k, v, scale=0.5, mask=causal_mask(length))
        heads.square().sum().backward()
        return heads, q.grad, k.grad, v.grad

    for fused, explicit in zip(run(attend), run(attend_explicitly), strict=True):
        torch.testing.assert_close(fused, explicit, atol=1e-12, rtol=1e-12)


# ---- the same as torch's layers -------------------------------------------------------------


def copy(pairs):
    for ours, theirs in pairs:
        theirs.load_state_dict(ours.state_dict())


def copy_attention(ours, theirs):
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
    copy([(ours.out, theirs.out_proj)])


def reference_layer(kind, block, config):
    """A block of ours with its weights in torch's own layer."""
    c = config.encoder_like
    layer = kind(
        c.width, c.heads, c.F, dropout=0.0, activation=config.activation, layer_norm_eps=c.eps,
        batch_first=True, norm_first=config.block == "pre-norm",
    )  # fmt: skip
    copy_attention(block.attention, layer.self_attn)
    copy([(block.norm1, layer.norm1), (block.mlp.fc1, layer.linear1), (block.mlp.fc2, layer.linear2)])
    if kind is nn.TransformerDecoderLayer:
        copy_attention(block.cross, layer.multihead_attn)
        copy([(block.norm_cross, layer.norm2), (block.norm2, layer.norm3)])
    else:
        copy([(block.norm2, layer.norm2)])
    return layer


class Reference(nn.Module):
    """The decoder out of torch's own parts."""

    def __init__(self, model):
        super().__init__()
        c = model.config
        kind = nn.TransformerEncoderLayer if c.context_width is None else nn.TransformerDecoderLayer
        self.tokens, self.places = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.length, c.width)
        self.layers = nn.ModuleList(reference_layer(kind, block, c) for block in model.blocks)
        self.norm, self.head = nn.LayerNorm(c.width, eps=c.eps), nn.Linear(c.width, c.vocabulary)
        copy([(model.tokens, self.tokens), (model.norm, self.norm)])
        self.head.load_state_dict(model.head.state_dict() if model.head else self.head.state_dict())
        with torch.no_grad():
            self.places.weight.copy_(model.position.table)
            if c.tied:
                self.head.weight.copy_(model.tokens.weight)
                self.head.bias.zero_()

    def forward(self, tokens, context=None):
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), -torch.inf), diagonal=1)  # theirs is additive
        z = self.tokens(tokens) + self.places(torch.arange(length))
        for layer in self.layers:
            z = layer(z, src_mask=mask) if context is None else layer(z, context, tgt_mask=mask)
        return self.head(self.norm(z))


@pytest.mark.parametrize("length", [1, 4, T])
@pytest.mark.parametrize("fields", [{}, dict(activation="gelu"), dict(tied=True), dict(block="post-norm")])
def test_decoder_only_is_torchs_encoder_layer_with_a_causal_mask(tokens, fields, length):
    model = build(**fields)
    theirs = Reference(model)
    given = tokens[:, :length]
    with torch.no_grad():
        expected = theirs(given)
        assert expected.abs().max() > 0.1
        assert (model(given) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, T])
def test_cross_attention_is_torchs_decoder_layer(tokens, context, length):
    model = build(context_width=12)
    theirs = Reference(model)
    given = tokens[:, :length]
    with torch.no_grad():
        assert (model(given, context) - theirs(given, context)).abs().max() < 1e-5


def test_a_vit_and_a_decoder_are_an_encoder_decoder(tiny, pictures, tokens):
    for width in (12, 6):  # as wide as the encoder, and another width, over a bridge
        model = build(context_width=tiny.config.width, width=width)
        logits = model(tokens, context=tiny.encode(pictures).tokens)
        assert logits.shape == (4, T, V)
        tiny.zero_grad()
        logits.square().mean().backward()
        assert tiny.tokens.proj.weight.grad.abs().max() > 0  # the loss reaches the pixels
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert isinstance(model.bridge, nn.Identity if width == 12 else nn.Linear)


# ---- parameters -----------------------------------------------------------------------------

BLOCK_KEYS = [
    *("norm1.weight", "norm1.bias", "attention.qkv.weight", "attention.qkv.bias"),
    *("attention.out.weight", "attention.out.bias", "norm2.weight", "norm2.bias"),
    *("mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"),
]
CROSS_KEYS = [
    *("norm_cross.weight", "norm_cross.bias", "cross.qkv.weight", "cross.qkv.bias"),
    *("cross.out.weight", "cross.out.bias"),
]


@pytest.mark.parametrize(
    ("fields", "block", "more"),
    [
        ({}, BLOCK_KEYS, ["head.weight", "head.bias"]),
        (dict(tied=True), BLOCK_KEYS, []),
        (dict(context_width=12, tied=True), BLOCK_KEYS + CROSS_KEYS, []),
        (dict(context_width=8, tied=True), BLOCK_KEYS + CROSS_KEYS, ["bridge.weight", "bridge.bias"]),
    ],
)
def test_keys(fields, block, more):
    with torch.device("meta"):
        state = Decoder(DecoderConfig(**{**GOOD, **fields})).state_dict()
    blocks = [f"blocks.{index}.{name}" for index in (0, 1) for name in block]
    assert set(state) == {"tokens.weight", "position.table", *blocks, "norm.weight", "norm.bias", *more}
    assert state["tokens.weight"].shape == (V, 12)
    assert state["position.table"].shape == (T, 12)


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_the_table_of_first_values_tells_the_truth(norm):
    cells = re.findall(r"\| (\S+) +\| (\S+) +\|", initialise_decoder.__doc__)
    fields = dict(vocabulary=300, width=96, depth=2, heads=3, length=200, norm=norm, context_width=64)
    used = set()
    for name, parameter in Decoder(DecoderConfig(**fields)).named_parameters():
        pattern, word = next(row for row in cells if fnmatchcase(name, row[0]))
        used.add(pattern)
        if word == "normal-0.02":
            error = 0.02 / math.sqrt(parameter.numel())
            assert abs(parameter.mean()) < 5 * error
            assert abs(parameter.std() - 0.02) < 5 * error
        else:
            assert (parameter == float(word)).all()
    assert len(cells) == 5
    assert used == {pattern for pattern, _ in cells} - ({"*norm*.weight"} if norm == "none" else set())


def test_a_fresh_model_expects_everything_alike(tokens):
    model = Decoder(DecoderConfig(**GOOD))
    assert F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item() == pytest.approx(
        math.log(V), abs=0.1
    )


@pytest.mark.parametrize("fields", [{}, dict(tied=True), dict(context_width=12)])
def test_save_and_load(tokens, context, fields, tmp_path):
    model, other = build(**fields), build(**fields)
    seen = (context,) if fields.get("context_width") else ()
    assert not torch.equal(model(tokens, *seen), other(tokens, *seen))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "decoder.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "decoder.safetensors"))
    assert torch.equal(model(tokens, *seen), other(tokens, *seen))


def test_a_tied_embedding_learns_from_both_ends(tokens):
    tied, apart = build(tied=True), build()
    assert sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in tied.parameters()) == 13 * V
    tied(tokens[:, :1] * 0).sum().backward()  # only token 0 goes in, all come out
    assert (tied.tokens.weight.grad.abs().amax(1) > 0).all()


def test_head_width_and_mlp_width():
    model = build(heads=5, head_width=2, mlp_width=7)
    assert model.blocks[0].attention.qkv.weight.shape == (30, 12)
    assert model.blocks[0].mlp.fc1.weight.shape == (7, 12)


def test_dropout_works_in_training_only(tokens):
    for fields in (dict(dropout=0.5), dict(attention_dropout=0.5)):
        model = build(**fields)
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))


def test_every_branch_ends_in_dropout(tokens, context):
    """As in torch's decoder layer: dropout1, dropout2 and dropout3."""
    model, calls = build(context_width=12), []
    model.blocks[0].drop.register_forward_hook(lambda *_: calls.append(1))
    model(tokens, context)
    assert len(calls) == 3


def test_fields_that_a_vit_has_too_mean_the_same():
    ours, theirs = type_hints(DecoderConfig), type_hints(vt.ViTConfig)
    for name in ("activation", "block", "norm", "eps", "head_width", "mlp_width"):
        assert ours[name] == theirs[name]
    assert all(describe(DecoderConfig).values())
    assert DecoderConfig(**GOOD, block="post-layernorm").block == "res-post-norm"


# ---- looking --------------------------------------------------------------------------------


def test_taps_and_their_shapes(tokens, context):
    model = build(context_width=8)
    heads = dict.fromkeys(("q", "heads"), (4, 3, T, 4))
    own = {**heads, "k": (4, 3, T, 4), "v": (4, 3, T, 4), "scores": (4, 3, T, T), "weights": (4, 3, T, T)}
    cross = {**heads, "k": (4, 3, 5, 4), "v": (4, 3, 5, 4), "scores": (4, 3, T, 5), "weights": (4, 3, T, 5)}
    wide = (4, T, 12)
    shapes = {
        **{
            "tokens": wide,
            "embed": wide,
            "encoded": wide,
            "norm": wide,
            "logits": (4, T, V),
            "head": (4, T, V),
        },
        **{f"blocks.0.{name}": wide for name in ("norm1", "norm_cross", "norm2", "out", "mlp.out")},
        **{"blocks.1.mlp.hidden": (4, T, 48), "bridge": (4, 5, 12)},
        **{f"blocks.0.attention.{name}": shape for name, shape in own.items()},
        **{f"blocks.0.cross.{name}": shape for name, shape in cross.items()},
        **{"blocks.0.attention.out": wide, "blocks.0.cross.out": wide},
    }
    context = context[..., :8]
    with torch.no_grad():
        fused = model(tokens, context)
        with vt.record(model, *shapes) as tape:
            logits = model(tokens, context)
    assert {name: tuple(tensor.shape) for name, tensor in tape.items()} == shapes
    assert torch.equal(tape["logits"], logits)
    assert (logits - fused).abs().max() < 1e-5  # looking changes nothing
    weights = tape["blocks.0.attention.weights"]
    assert (weights.triu(1) == 0).all()
    assert (tape["blocks.0.attention.scores"].triu(1).masked_fill(causal_mask(T), -torch.inf) < -1e30).all()
    for name in ("attention", "cross"):
        torch.testing.assert_close(tape[f"blocks.0.{name}.weights"].sum(-1), torch.ones(4, 3, T))


def test_edit(tokens, context):
    model = build(context_width=12)
    with torch.no_grad():
        with vt.edit(model, {"blocks.*.cross.weights": torch.zeros_like}):
            blind = model(tokens, context)
            assert torch.equal(model(tokens, context + 1), blind)  # it sees no context now
        assert not torch.equal(model(tokens, context), blind)


def test_a_name_that_matches_nothing():
    message = r"Got 'blocks.0.cross.wights'. Did you mean 'blocks.\*.cross.weights'\?.* Blocks are 0 to 1."
    with (
        pytest.raises(vt.InputError, match=message),
        vt.record(build(context_width=12), "blocks.0.cross.wights"),
    ):
        pass


# ---- compile and export ---------------------------------------------------------------------


@pytest.mark.parametrize("fields", [dict(tied=True), dict(context_width=12)])
def test_compiles_without_graph_breaks_and_gives_the_same(tokens, context, fields):
    model = build(**fields)
    seen = (context,) if fields.get("context_width") else ()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (T, 3):
        given = tokens[:, :length]
        assert (compiled(given, *seen) - model(given, *seen)).abs().max() < 1e-6


def test_exports_with_a_free_batch_and_length(tokens, context):
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=T)
    alone, crossed = build(), build(context_width=12)
    free = {0: batch, 1: length}
    programs = [
        torch.export.export(alone, (tokens,), dynamic_shapes=(free,)),
        torch.export.export(crossed, (tokens, context), dynamic_shapes=(free, {0: batch})),
    ]
    for count, long in ((1, 1), (2, 4), (3, T)):
        given = torch.randint(V, (count, long))
        for model, program, seen in zip((alone, crossed), programs, ((), (context[:count],)), strict=True):
            assert (program.module()(given, *seen) - model(given, *seen)).abs().max() < 1e-6


# ---- writing --------------------------------------------------------------------------------


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_likeliest_each_time(tokens):
    model = build()
    written = generate(model, tokens[:, :2], 9, temperature=0)
    assert written.shape == (4, 11)
    assert torch.equal(written[:, :2], tokens[:, :2])
    assert torch.equal(written, generate(model, tokens[:, :2], 9, temperature=0))
    assert torch.equal(written, generate(model, tokens[:, :2], 9, top=1, temperature=3.0))
    for t in range(2, 11):  # by hand, on the last `length` tokens
        expected = model(written[:, max(0, t - T) : t])[:, -1].argmax(-1)
        assert torch.equal(written[:, t], expected)


def test_only_the_last_tokens_count_for_a_long_prompt():
    model = build()
    prompt = torch.randint(V, (2, 30))
    written = generate(model, prompt, 4, generator=seeded())
    assert torch.equal(written[:, :30], prompt)
    assert torch.equal(written[:, 30:], generate(model, prompt[:, -T:], 4, generator=seeded())[:, T:])


def test_seeds(tokens):
    model = build()
    one, same, other = (generate(model, tokens, 20, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_draws_follow_the_softmax():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).expand(20_000, 4)
    for temperature, top in ((1.0, None), (0.5, None), (4.0, None), (1.0, 2), (0.5, 3), (1.0, 99)):
        found = draw(logits, temperature, top, seeded()).flatten().bincount(minlength=4) / 20_000
        kept = logits[0].clone()
        kept[logits[0].argsort(descending=True)[top:] if top else []] = -torch.inf
        assert (found - (kept / temperature).softmax(-1)).abs().max() < 0.02
        assert (found[kept == -torch.inf] == 0).all()


def test_top_keeps_exactly_so_many_even_when_logits_tie():
    drawn = draw(torch.zeros(2000, 6), 1.0, 2, seeded())
    assert drawn.unique().numel() == 2


def test_generate_with_a_context(tokens, context):
    model = build(context_width=12)
    one = generate(model, tokens, 5, temperature=0, context=context)
    assert not torch.equal(one, generate(model, tokens, 5, temperature=0, context=-3 * context))


def test_generate_leaves_the_model_as_it_was(tokens):
    model = build(dropout=0.5).train()
    model.blocks[0].eval()  # as someone does who trains only a part
    modes = [module.training for module in model.modules()]
    with vt.record(model, "logits") as tape:
        one, same = (generate(model, tokens, 6, temperature=0) for _ in range(2))
    assert torch.equal(one, same)  # no dropout while it writes
    assert not tape["logits"].requires_grad
    assert [module.training for module in model.modules()] == modes
    model.blocks[1].mlp.out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, tokens, 6)
    assert [module.training for module in model.modules()] == modes


def test_generate_keeps_the_dtype_of_tokens_and_takes_nothing(tokens):
    model = build()
    assert generate(model, tokens.int(), 2).dtype == torch.int32
    assert torch.equal(generate(model, tokens, 0), tokens)
    assert model(tokens[:0]).shape == (0, T, V)


# ---- learning -------------------------------------------------------------------------------

SHAKESPEARE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "tinyshakespeare.txt"
RHYME = "The owl and the pussy-cat went to sea in a beautiful pea-green boat; they took some honey. " * 50


def test_it_learns_to_write():
    text = SHAKESPEARE.read_text()[:20_000] if SHAKESPEARE.exists() else RHYME
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    model = Decoder(DecoderConfig(vocabulary=len(letters), width=48, depth=2, heads=4, length=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(150):
        at = torch.randint(len(data) - 25, (24, 1)) + torch.arange(25)
        xb, yb = data[at][:, :-1], data[at][:, 1:]
        loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    chance = math.log(len(letters))
    assert losses[0] == pytest.approx(chance, abs=0.2)
    assert sum(losses[-10:]) / 10 < chance - 1.5
    written = generate(model, data[None, :24], 60, temperature=0.5, generator=seeded())
    words = "".join(letters[token] for token in written[0, 24:].tolist()).split()
    assert any(word in text.split() for word in words if len(word) > 1)  # a word it has read


# ---- errors ---------------------------------------------------------------------------------

CONFIG_ERRORS = [
    (dict(vocabulry=3), r"DecoderConfig takes only .* Got vocabulry=3. Did you mean 'vocabulary'\?"),
    (dict(vocabulary=0), r"vocabulary must be a whole number from 1 to .* Got vocabulary=0."),
    (dict(length=0), r"length must be a whole number from 1 to .* Got length=0."),
    (dict(heads=5), r"width must be a multiple of heads.* Got width=12, heads=5. Use heads=4 or heads=6"),
    (dict(tied=1), r"tied must be True or False. Got tied=1."),
    (dict(context_width=0), r"context_width must be a whole number .* Got context_width=0."),
    (dict(activation="tanh"), r"activation must be one of its words. Got activation='tanh'."),
    (dict(dropout=1), r"dropout must be at least 0 and below 1. Got dropout=1."),
    (dict(eps=0), r"eps must be above 0 and at most 1. Got eps=0."),
    (dict(depth=20_000), r"depth must be at most 10,000."),
    (dict(vocabulary=10**11), r"at most 100,000,000,000 parameters, .* most of them are in the head"),
    (dict(length=10**11), r"most of them are in the position table"),
    (
        dict(context_width=8, block="parallel"),
        r"context_width=8 needs pre-norm blocks. Got block='parallel'. Change context_width or block.",
    ),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS)
def test_config_errors(fields, message):
    with pytest.raises(vt.ConfigError, match=message):
        DecoderConfig(**{**GOOD, **fields})


ROW = torch.zeros(1, 3, dtype=torch.long)
TOKEN_ERRORS = [
    ([[1, 2]], r"Tokens must come as a torch tensor. Got list. Convert with torch.tensor.$"),
    (ROW.float(), r"whole numbers, torch.int64 or torch.int32. Got torch.float32. .* tokens.long\(\).$"),
    (ROW.bool(), r"Got torch.bool."),
    (ROW[0], r"shape \(batch, T\), T from 1 up. Got \(3,\). Add a batch axis: tokens\[None\].$"),
    (ROW[:, :0], r"Got \(1, 0\). Put one sequence in each row.$"),
    (ROW[None], r"Got \(1, 1, 3\). Put one sequence in each row.$"),
    (ROW + 11, r"numbers from 0 to 10, below the vocabulary. Got 11. Use the model's own .* more than 11.$"),
    (ROW - 1, r"Got -1."),
]


@pytest.mark.parametrize(("tokens", "message"), TOKEN_ERRORS)
def test_token_errors(tokens, message):
    with pytest.raises(vt.InputError, match=message):
        build()(tokens)
    with pytest.raises(vt.InputError, match=message):
        generate(build(), tokens, 2)


def test_a_sequence_that_is_too_long():
    message = (
        r"at most 7 tokens long, the length the model was built for. Got 8 tokens. "
        r"Keep the last: tokens\[:, -7:\], or build the model with length=8.$"
    )
    with pytest.raises(vt.InputError, match=message):
        build()(torch.zeros(1, 8, dtype=torch.long))


CONTEXT_ERRORS = [
    (8, None, r"with a context_width, and to no other. Got no context, and context_width=8. Call decoder\("),
    (None, torch.zeros(1, 2, 8), r"Got a context, and context_width=None. Leave the context out, or build"),
    (8, torch.zeros(1, 2, 9), r"shape \(1, S, 8\): a row .* Got \(1, 2, 9\). Give the encoder's tokens as"),
    (8, torch.zeros(2, 2, 8), r"Got \(2, 2, 8\)."),
    (8, torch.zeros(1, 8), r"Got \(1, 8\)."),
    (8, [1.0], r"Got list."),
    (
        8,
        torch.zeros(1, 2, 8, dtype=torch.float64),
        r"model's dtype, torch.float32. Got torch.float64. Convert them with .to\(torch.float32\).$",
    ),
]


@pytest.mark.parametrize(("width", "context", "message"), CONTEXT_ERRORS)
def test_context_errors(width, context, message):
    with pytest.raises(vt.InputError, match=message):
        build(context_width=width)(ROW, context)


def test_off_the_cpu_the_range_of_tokens_is_not_looked_at():
    """Reading values back would make a GPU's queue run dry at every step; meta tensors have none."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**GOOD))
        assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, V)


def test_autocast_takes_a_context_of_another_dtype():
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        logits = build(context_width=8)(ROW, torch.zeros(1, 2, 8, dtype=torch.float16))
    assert logits.shape == (1, 3, V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(count=-1), r"count must be a whole number from 0 to .* Got count=-1."),
        (dict(count=1.0), r"Got count=1.0."),
        (dict(top=0), r"top must be a whole number from 1 to .* Got top=0."),
        (dict(temperature=-1), r"temperature must be 0, .* or from 0.001 up. Got temperature=-1. Set temp"),
        (dict(temperature=1e-9), r"Got temperature=1e-09."),
        (dict(temperature=math.nan), r"Got temperature=nan."),
        (dict(temperature=math.inf), r"Got temperature=inf."),
        (dict(temperature="hot"), r"Got temperature='hot'."),
    ],
)
def test_sampling_errors(options, message):
    with pytest.raises(vt.VitrailError, match=message):
        generate(build(), ROW, **{"count": 2, **options})
