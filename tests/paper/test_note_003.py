"""Lecture note 003, "Visual Transformers": its formulas, tables and code, compared with ours."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrail as vt
from tests.support.models import add_noise
from tests.support.slide_003 import WHEN, XB, YB
from vitrail.model import attend, attend_explicitly
from vitrail.model.layers import MLP
from vitrail.model.text_tower import causal_mask
from vitrail_course.decoder import Decoder, DecoderConfig

# "Masked Multi-Head attention", the three tables as printed.
TRIL = """
[1., 0., 0., 0., 0., 0., 0., 0.],
[1., 1., 0., 0., 0., 0., 0., 0.],
[1., 1., 1., 0., 0., 0., 0., 0.],
[1., 1., 1., 1., 0., 0., 0., 0.],
[1., 1., 1., 1., 1., 0., 0., 0.],
[1., 1., 1., 1., 1., 1., 0., 0.],
[1., 1., 1., 1., 1., 1., 1., 0.],
[1., 1., 1., 1., 1., 1., 1., 1.]
"""
SCORES = """
[0., -inf, -inf, -inf, -inf, -inf, -inf, -inf],
[0., 0., -inf, -inf, -inf, -inf, -inf, -inf],
[0., 0., 0., -inf, -inf, -inf, -inf, -inf],
[0., 0., 0., 0., -inf, -inf, -inf, -inf],
[0., 0., 0., 0., 0., -inf, -inf, -inf],
[0., 0., 0., 0., 0., 0., -inf, -inf],
[0., 0., 0., 0., 0., 0., 0., -inf],
[0., 0., 0., 0., 0., 0., 0., 0.]
"""
WEIGHTS = """
[1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
[0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
[0.3333, 0.3333, 0.3333, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
[0.2500, 0.2500, 0.2500, 0.2500, 0.0000, 0.0000, 0.0000, 0.0000],
[0.2000, 0.2000, 0.2000, 0.2000, 0.2000, 0.0000, 0.0000, 0.0000],
[0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.0000, 0.0000],
[0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.0000],
[0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250]
"""


def table(text):
    rows = text.strip().replace("[", "").replace("],", "\n").replace("]", "").splitlines()
    return torch.tensor([[float(cell) for cell in row.split(",")] for row in rows if row.strip()])


@pytest.mark.parametrize("form", [attend, attend_explicitly])
def test_the_attention_formula(form):
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V."""
    Q, K, V = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    expected = F.softmax(Q @ K.transpose(-2, -1) / math.sqrt(4), dim=-1) @ V
    assert (form(Q, K, V, scale=4**-0.5) - expected).abs().max() < 1e-12


def test_the_mask_table():
    """`tril`, then zeros with -inf where it is 0, then softmax: every row is 1/n."""
    recorded = {}

    def tap(name):
        return lambda tensor: recorded.setdefault(name, tensor)

    q = k = torch.zeros(1, 1, 8, 4)  # zero scores, the note's torch.zeros((T, T))
    mask = causal_mask(8)
    values = torch.eye(8)[None, None]  # so that the output is the weights
    out = attend_explicitly(
        q, k, values, scale=0.5, mask=mask, tap_scores=tap("scores"), tap_weights=tap("weights")
    )
    assert mask.dtype == torch.bool
    assert torch.equal(mask.float(), table(TRIL))
    assert torch.equal(recorded["scores"][0, 0], table(SCORES))
    assert torch.equal((recorded["weights"][0, 0] * 10_000).round() / 10_000, table(WEIGHTS))
    assert torch.equal(out, recorded["weights"])
    torch.testing.assert_close(attend(q, k, values, scale=0.5, mask=mask), out)
    tril = torch.tril(torch.ones(8, 8))  # the three lines of the note
    weights = F.softmax(torch.zeros(8, 8).masked_fill(tril == 0, float("-inf")), dim=-1)
    assert torch.equal(recorded["weights"][0, 0], weights)


def test_the_weights_of_a_decoder_with_equal_scores_are_the_table():
    """The same table, recorded from a model whose queries are zero."""
    config = DecoderConfig(vocabulary=9, width=8, depth=1, heads=2, length=8)
    model = add_noise(Decoder(config))
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight[:8] = 0
        model.blocks[0].attention.qkv.bias[:8] = 0
        with vt.record(model, "blocks.0.attention.weights") as tape:
            model(torch.randint(9, (3, 8)))
    weights = tape["blocks.0.attention.weights"]
    assert torch.equal((weights * 10_000).round() / 10_000, table(WEIGHTS).expand(3, 2, 8, 8))


class FeedForward(nn.Module):
    """The note's class, as printed (its `dropout` is a global there)."""

    def __init__(self, no_of_embedding_dims, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(no_of_embedding_dims, 4 * no_of_embedding_dims),
            nn.ReLU(),
            nn.Linear(4 * no_of_embedding_dims, no_of_embedding_dims),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


def test_feed_forward_is_our_mlp_with_relu():
    config = DecoderConfig(vocabulary=9, width=12, depth=1, heads=2, length=8)
    ours, theirs = MLP(config.as_vit_config), FeedForward(12)
    assert config.activation == "relu"
    add_noise(theirs)
    ours.fc1.load_state_dict(theirs.net[0].state_dict())
    ours.fc2.load_state_dict(theirs.net[2].state_dict())
    x = torch.randn(2, 5, 12)
    assert torch.equal(ours(x), theirs(x))


def test_targets_are_the_inputs_shifted_by_one():
    assert torch.equal(XB[:, 1:], YB[:, :-1])
    lines = [
        f"when input is {xs[: t + 1]} the target: {ys[t]}"
        for xs, ys in zip(XB.tolist(), YB.tolist(), strict=True)
        for t in range(8)
    ]
    assert lines[:14] == WHEN.strip().splitlines()


def test_one_forward_pass_predicts_every_line_of_the_table():
    """Logits at position t equal those of the input cut off after t: eight examples in one sequence."""
    model = add_noise(Decoder(DecoderConfig(vocabulary=65, width=16, depth=2, heads=4, length=8))).double()
    with torch.no_grad():
        together = model(XB)
        for tokens, target in re.findall(r"input is \[(.*)\] the target: (\d+)", WHEN):
            prompt = torch.tensor([[int(token) for token in tokens.split(",")]])
            row = [24, 44].index(int(prompt[0, 0]))
            t = prompt.shape[1] - 1
            assert YB[row, t] == int(target)
            assert (model(prompt)[0, -1] - together[row, t]).abs().max() < 1e-12


def test_the_parts_of_the_language_model():
    """BigramLanguageModel.__init__: two tables, blocks, a layer norm and a linear head of the same sizes."""
    vocabulary_size, block_size, width, layers = 65, 8, 32, 3
    model = Decoder(
        DecoderConfig(vocabulary=vocabulary_size, length=block_size, width=width, depth=layers, heads=4)
    )
    assert model.tokens.weight.shape == nn.Embedding(vocabulary_size, width).weight.shape
    assert model.position.table.shape == nn.Embedding(block_size, width).weight.shape
    assert len(model.blocks) == layers
    assert isinstance(model.norm, nn.LayerNorm)
    assert model.head.weight.shape == nn.Linear(width, vocabulary_size).weight.shape
    assert model.head.bias is not None
    assert model(XB).shape == (4, 8, vocabulary_size)


def test_layer_norm_gives_mean_0_and_variance_1():
    """Before the learned scale, and up to eps."""
    model = Decoder(DecoderConfig(vocabulary=65, width=32, depth=1, heads=4, length=8))
    add_noise(model.tokens)
    with vt.record(model, "blocks.0.norm1") as tape:
        model(XB)
    normed = tape["blocks.0.norm1"]
    assert normed.mean(-1).abs().max() < 1e-5
    assert (normed.var(-1, unbiased=False) - 1).abs().max() < 1e-3
