"""The decoder: causal, equal to torch's own layers, trainable; and sampling from it."""

import math
import re
from fnmatch import fnmatchcase

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import vitrail as vt
from tests.support.models import add_noise
from tests.support.shared_data import shared
from vitrail.base.fields import type_hints
from vitrail.model import attend, attend_explicitly
from vitrail.model.text_tower import causal_mask
from vitrail_course.decoder import (
    CrossBlock,
    Decoder,
    DecoderConfig,
    generate,
    initialize_decoder,
    sample_token,
)

GOOD = dict(vocabulary=11, width=12, depth=2, heads=3, length=7)
V, T = 11, 7


def build(**fields):
    return add_noise(Decoder(DecoderConfig(**{**GOOD, **fields})))


@pytest.fixture
def tokens():
    return torch.randint(V, (4, T))


@pytest.fixture
def context():
    return torch.randn(4, 5, 12)


# ---- causality ------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual", None])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_token_does_not_affect_those_before_it(tokens, context, block, explicit):
    model = build(context_width=12) if block is None else build(block=block)
    cross = {"context": context} if block is None else {}
    names = ["blocks.*.attention.weights"] if explicit else ["embed"]
    with torch.no_grad(), vt.record(model, *names):
        before = model(tokens, **cross)
        for t in range(T):
            changed = tokens.clone()
            changed[:, t] = (tokens[:, t] + 1) % V
            after = model(changed, **cross)
            assert torch.equal(after[:, :t], before[:, :t])  # bit for bit
            assert ((after[:, t:] - before[:, t:]).abs().amax((0, 2)) > 1e-6).all()


def test_every_token_attends_to_the_whole_context(tokens, context):
    model = build(context_width=12)
    with torch.no_grad():
        before = model(tokens, context)
        for s in range(5):
            changed = context.clone()
            changed[:, s] += 1
            assert ((model(tokens, changed) - before).abs().amax((0, 2)) > 1e-6).all()


def test_a_cross_block_requires_a_context():
    block = CrossBlock(DecoderConfig(**GOOD).as_vit_config)
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


# ---- compared with torch's layers -----------------------------------------------------------


def copy(pairs):
    for ours, theirs in pairs:
        theirs.load_state_dict(ours.state_dict())


def copy_attention(ours, theirs):
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
    copy([(ours.out, theirs.out_proj)])


def reference_layer(kind, block, config):
    """torch's own layer with the weights of one of our blocks."""
    c = config.as_vit_config
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
    """The decoder built from torch's own layers."""

    def __init__(self, model):
        super().__init__()
        c = model.config
        kind = nn.TransformerEncoderLayer if c.context_width is None else nn.TransformerDecoderLayer
        self.tokens, self.positions = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.length, c.width)
        self.layers = nn.ModuleList(reference_layer(kind, block, c) for block in model.blocks)
        self.norm, self.head = nn.LayerNorm(c.width, eps=c.eps), nn.Linear(c.width, c.vocabulary)
        copy([(model.tokens, self.tokens), (model.norm, self.norm)])
        self.head.load_state_dict(model.head.state_dict() if model.head else self.head.state_dict())
        with torch.no_grad():
            self.positions.weight.copy_(model.position.table)
            if c.tied:
                self.head.weight.copy_(model.tokens.weight)
                self.head.bias.zero_()

    def forward(self, tokens, context=None):
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), -torch.inf), diagonal=1)  # an additive mask
        z = self.tokens(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            z = layer(z, src_mask=mask) if context is None else layer(z, context, tgt_mask=mask)
        return self.head(self.norm(z))


@pytest.mark.parametrize("length", [1, 4, T])
@pytest.mark.parametrize("fields", [{}, dict(activation="gelu"), dict(tied=True), dict(block="post-norm")])
def test_decoder_only_equals_torch_encoder_layers_with_a_causal_mask(tokens, fields, length):
    model = build(**fields)
    theirs = Reference(model)
    with torch.no_grad():
        expected = theirs(tokens[:, :length])
        assert expected.abs().max() > 0.1
        assert (model(tokens[:, :length]) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, T])
def test_cross_attention_equals_torch_decoder_layers(tokens, context, length):
    model = build(context_width=12)
    theirs = Reference(model)
    prompt = tokens[:, :length]
    with torch.no_grad():
        assert (model(prompt, context) - theirs(prompt, context)).abs().max() < 1e-5


def test_a_vit_and_a_decoder_are_an_encoder_decoder(tiny, images, tokens):
    for width in (12, 6):  # the encoder's width, and another one that needs a projection
        model = build(context_width=tiny.config.width, width=width)
        logits = model(tokens, context=tiny.encode(images).tokens)
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
def test_parameters_are_initialized_as_in_the_table(norm):
    cells = re.findall(r"\| (\S+) +\| (\S+) +\|", initialize_decoder.__doc__)
    fields = dict(vocabulary=300, width=96, depth=2, heads=3, length=200, norm=norm, context_width=64)
    used = set()
    for name, parameter in Decoder(DecoderConfig(**fields)).named_parameters():
        pattern, scheme = next(row for row in cells if fnmatchcase(name, row[0]))
        used.add(pattern)
        if scheme == "normal-0.02":
            error = 0.02 / math.sqrt(parameter.numel())
            assert abs(parameter.mean()) < 5 * error
            assert abs(parameter.std() - 0.02) < 5 * error
        else:
            assert (parameter == float(scheme)).all()
    assert len(cells) == 5
    assert used == {pattern for pattern, _ in cells} - ({"*norm*.weight"} if norm == "none" else set())


def test_the_loss_of_a_new_model_is_that_of_a_uniform_distribution(tokens):
    model = Decoder(DecoderConfig(**GOOD))
    assert F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item() == pytest.approx(
        math.log(V), abs=0.1
    )


@pytest.mark.parametrize("fields", [{}, dict(tied=True), dict(context_width=12)])
def test_save_and_load(tokens, context, fields, tmp_path):
    model, other = build(**fields), build(**fields)
    cross = (context,) if fields.get("context_width") else ()
    assert not torch.equal(model(tokens, *cross), other(tokens, *cross))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "decoder.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "decoder.safetensors"))
    assert torch.equal(model(tokens, *cross), other(tokens, *cross))


def test_a_tied_embedding_has_gradients_from_input_and_output(tokens):
    tied, untied = build(tied=True), build()
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 13 * V
    tied(tokens[:, :1] * 0).sum().backward()  # the input is token 0 only
    assert (tied.tokens.weight.grad.abs().amax(1) > 0).all()


def test_head_width_and_mlp_width():
    model = build(heads=5, head_width=2, mlp_width=7)
    assert model.blocks[0].attention.qkv.weight.shape == (30, 12)
    assert model.blocks[0].mlp.fc1.weight.shape == (7, 12)


def test_dropout_acts_in_training_only(tokens):
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


def test_fields_shared_with_a_vit_have_the_same_type():
    ours, theirs = type_hints(DecoderConfig), type_hints(vt.ViTConfig)
    for name in ("activation", "block", "norm", "eps", "head_width", "mlp_width"):
        assert ours[name] == theirs[name]
    assert DecoderConfig(**GOOD, block="post-layernorm").block == "res-post-norm"


# ---- taps -----------------------------------------------------------------------------------


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
    assert (logits - fused).abs().max() < 1e-5  # recording does not change the logits
    weights = tape["blocks.0.attention.weights"]
    assert (weights.triu(1) == 0).all()
    assert (tape["blocks.0.attention.scores"].triu(1).masked_fill(causal_mask(T), -torch.inf) < -1e30).all()
    for name in ("attention", "cross"):
        torch.testing.assert_close(tape[f"blocks.0.{name}.weights"].sum(-1), torch.ones(4, 3, T))


def test_edit(tokens, context):
    model = build(context_width=12)
    with torch.no_grad():
        with vt.edit(model, {"blocks.*.cross.weights": torch.zeros_like}):
            edited = model(tokens, context)
            assert torch.equal(model(tokens, context + 1), edited)  # independent of the context
        assert not torch.equal(model(tokens, context), edited)


def test_a_name_that_matches_nothing():
    message = r"'blocks.0.cross.wights'. Did you mean 'blocks.\*.cross.weights'\?.* Blocks are 0 to 1."
    with (
        pytest.raises(vt.InputError, match=message),
        vt.record(build(context_width=12), "blocks.0.cross.wights"),
    ):
        pass


# ---- compile and export ---------------------------------------------------------------------


@pytest.mark.parametrize("fields", [dict(tied=True), dict(context_width=12)])
def test_compile_without_graph_breaks(tokens, context, fields):
    model = build(**fields)
    cross = (context,) if fields.get("context_width") else ()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (T, 3):
        prompt = tokens[:, :length]
        assert (compiled(prompt, *cross) - model(prompt, *cross)).abs().max() < 1e-6


def test_export_with_a_dynamic_batch_and_length(tokens, context):
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=T)
    decoder_only, with_context = build(), build(context_width=12)
    dynamic = {0: batch, 1: length}
    programs = [
        torch.export.export(decoder_only, (tokens,), dynamic_shapes=(dynamic,)),
        torch.export.export(with_context, (tokens, context), dynamic_shapes=(dynamic, {0: batch})),
    ]
    models = (decoder_only, with_context)
    for count, long in ((1, 1), (2, 4), (3, T)):
        prompt = torch.randint(V, (count, long))
        for model, program, cross in zip(models, programs, ((), (context[:count],)), strict=True):
            assert (program.module()(prompt, *cross) - model(prompt, *cross)).abs().max() < 1e-6


# ---- sampling -------------------------------------------------------------------------------


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


def test_temperature_0_takes_the_most_likely_token(tokens):
    model = build()
    generated = generate(model, tokens[:, :2], 9, temperature=0)
    assert generated.shape == (4, 11)
    assert torch.equal(generated[:, :2], tokens[:, :2])
    assert torch.equal(generated, generate(model, tokens[:, :2], 9, temperature=0))
    assert torch.equal(generated, generate(model, tokens[:, :2], 9, top=1, temperature=3.0))
    for t in range(2, 11):  # one by one, from the last `length` tokens
        expected = model(generated[:, max(0, t - T) : t])[:, -1].argmax(-1)
        assert torch.equal(generated[:, t], expected)


def test_a_long_prompt_is_truncated_to_the_last_tokens():
    model = build()
    prompt = torch.randint(V, (2, 30))
    generated = generate(model, prompt, 4, generator=seeded())
    assert torch.equal(generated[:, :30], prompt)
    assert torch.equal(generated[:, 30:], generate(model, prompt[:, -T:], 4, generator=seeded())[:, T:])


def test_the_generator_makes_samples_reproducible(tokens):
    model = build()
    one, same, other = (generate(model, tokens, 20, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_samples_follow_the_softmax():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).expand(20_000, 4)
    for temperature, top in ((1.0, None), (0.5, None), (4.0, None), (1.0, 2), (0.5, 3), (1.0, 99)):
        frequencies = (
            sample_token(logits, temperature, top, seeded()).flatten().bincount(minlength=4) / 20_000
        )
        masked = logits[0].clone()
        masked[logits[0].argsort(descending=True)[top:] if top else []] = -torch.inf
        assert (frequencies - (masked / temperature).softmax(-1)).abs().max() < 0.02
        assert (frequencies[masked == -torch.inf] == 0).all()


def test_top_is_exact_when_logits_tie():
    samples = sample_token(torch.zeros(2000, 6), 1.0, 2, seeded())
    assert samples.unique().numel() == 2


def test_generate_with_a_context(tokens, context):
    model = build(context_width=12)
    one = generate(model, tokens, 5, temperature=0, context=context)
    assert not torch.equal(one, generate(model, tokens, 5, temperature=0, context=-3 * context))


def test_generate_restores_the_mode_of_each_module(tokens):
    model = build(dropout=0.5).train()
    model.blocks[0].eval()  # as in fine-tuning of a part
    modes = [module.training for module in model.modules()]
    with vt.record(model, "logits") as tape:
        one, same = (generate(model, tokens, 6, temperature=0) for _ in range(2))
    assert torch.equal(one, same)  # no dropout
    assert not tape["logits"].requires_grad
    assert [module.training for module in model.modules()] == modes
    model.blocks[1].mlp.out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, tokens, 6)
    assert [module.training for module in model.modules()] == modes


def test_generate_returns_the_dtype_of_the_tokens_and_takes_empty_inputs(tokens):
    model = build()
    assert generate(model, tokens.int(), 2).dtype == torch.int32
    assert torch.equal(generate(model, tokens, 0), tokens)
    assert model(tokens[:0]).shape == (0, T, V)


# ---- training -------------------------------------------------------------------------------

RHYME = "The owl and the pussy-cat went to sea in a beautiful pea-green boat; they took some honey. " * 50


def test_training_on_a_rhyme():
    check_training(RHYME)


def test_training_on_shakespeare():
    check_training(shared("data/tinyshakespeare.txt").read_text()[:20_000])


def check_training(text):
    """The loss falls well below that of a uniform distribution, and samples contain words of the text."""
    characters = sorted(set(text))
    data = torch.tensor([characters.index(character) for character in text])
    model = Decoder(DecoderConfig(vocabulary=len(characters), width=48, depth=2, heads=4, length=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(150):
        index = torch.randint(len(data) - 25, (24, 1)) + torch.arange(25)
        xb, yb = data[index][:, :-1], data[index][:, 1:]
        loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    uniform = math.log(len(characters))
    assert losses[0] == pytest.approx(uniform, abs=0.2)
    assert sum(losses[-10:]) / 10 < uniform - 1.5
    generated = generate(model, data[None, :24], 60, temperature=0.5, generator=seeded())
    words = "".join(characters[token] for token in generated[0, 24:].tolist()).split()
    assert any(word in text.split() for word in words if len(word) > 1)


# ---- errors ---------------------------------------------------------------------------------

CONFIG_ERRORS = [
    (dict(vocabulry=3), r"DecoderConfig has no field 'vocabulry'. Did you mean 'vocabulary'\?"),
    (dict(vocabulary=0), r"vocabulary must be an integer from 1 to .*, not 0"),
    (dict(length=0), r"length must be an integer from 1 to .*, not 0"),
    (dict(heads=5), r"width=12 is not a multiple of heads=5; use heads=4 or heads=6"),
    (dict(tied=1), r"tied must be True or False, not 1"),
    (dict(context_width=0), r"context_width must be an integer .*, not 0"),
    (dict(activation="tanh"), r"unknown activation 'tanh'"),
    (dict(dropout=1), r"dropout must be at least 0 and below 1, not 1"),
    (dict(eps=0), r"eps must be above 0 and at most 1, not 0"),
    (dict(depth=20_000), r"depth must be at most 10,000"),
    (dict(vocabulary=10**11), r"parameters, more than the limit .* most of them are in the head"),
    (dict(length=10**11), r"most of them are in the position table"),
    (dict(context_width=8, block="parallel"), r"context_width=8 needs .*pre-norm.* block='parallel'"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS)
def test_config_errors(fields, message):
    with pytest.raises(vt.ConfigError, match=message):
        DecoderConfig(**{**GOOD, **fields})


ROW = torch.zeros(1, 3, dtype=torch.long)
TOKEN_ERRORS = [
    ([[1, 2]], r"must be a torch tensor, not list; convert with torch.tensor"),
    (ROW.float(), r"torch.int64 or torch.int32, not torch.float32; .* tokens.long\(\)"),
    (ROW.bool(), r"not torch.bool"),
    (ROW[0], r"shape \(batch, T\) .*, not \(3,\); add a batch axis: tokens\[None\]"),
    (ROW[:, :0], r"not \(1, 0\); put one sequence in each row"),
    (ROW[None], r"not \(1, 1, 3\); put one sequence in each row"),
    (ROW + 11, r"from 0 to 10, the vocabulary .*, not 11; use the model's own tokenizer"),
    (ROW - 1, r"not -1"),
]


@pytest.mark.parametrize(("tokens", "message"), TOKEN_ERRORS)
def test_token_errors(tokens, message):
    with pytest.raises(vt.InputError, match=message):
        build()(tokens)
    with pytest.raises(vt.InputError, match=message):
        generate(build(), tokens, 2)


def test_a_sequence_that_is_too_long():
    message = r"8 tokens is longer than the model's length of 7; .* tokens\[:, -7:\], .* length=8"
    with pytest.raises(vt.InputError, match=message):
        build()(torch.zeros(1, 8, dtype=torch.long))


CONTEXT_ERRORS = [
    (8, None, r"context_width=8 needs a context; call decoder\("),
    (None, torch.zeros(1, 2, 8), r"takes no context; omit it"),
    (8, torch.zeros(1, 2, 9), r"shape \(1, S, 8\), .* not \(1, 2, 9\); pass vit.encode"),
    (8, torch.zeros(2, 2, 8), r"not \(2, 2, 8\)"),
    (8, torch.zeros(1, 8), r"not \(1, 8\)"),
    (8, [1.0], r"not list"),
    (8, torch.zeros(1, 2, 8, dtype=torch.float64), r"model's dtype, torch.float32, not torch.float64"),
]


@pytest.mark.parametrize(("width", "context", "message"), CONTEXT_ERRORS)
def test_context_errors(width, context, message):
    with pytest.raises(vt.InputError, match=message):
        build(context_width=width)(ROW, context)


def test_the_range_of_token_ids_is_checked_on_a_cpu_only():
    """Reading values would synchronize with a GPU at every step; meta tensors have no values."""
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
        (dict(count=-1), r"count must be an integer from 0 to .*, not -1"),
        (dict(count=1.0), r"count .* not 1.0"),
        (dict(top=0), r"top must be an integer from 1 to .*, not 0"),
        (dict(temperature=-1), r"temperature must be 0, .* or at least 0.001, not -1"),
        (dict(temperature=1e-9), r"not 1e-09"),
        (dict(temperature=math.nan), r"not nan"),
        (dict(temperature=math.inf), r"not inf"),
        (dict(temperature="hot"), r"not 'hot'"),
    ],
)
def test_sampling_errors(options, message):
    with pytest.raises(vt.VitrailError, match=message):
        generate(build(), ROW, **{"count": 2, **options})
