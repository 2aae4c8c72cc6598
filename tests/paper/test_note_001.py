"""Lecture note 001, an article ("deep dive into the code of ViT"): each block of its code, run on our model.

Where the article has an error, the test has the corrected line and shows that the error matters. Sizes are
the article's (224 pixels, patch 16, width 768, 12 heads of 64), with two layers.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import vitrail as vt
from tests.support.models import add_noise


@pytest.fixture(scope="module")
def article():
    torch.manual_seed(0)
    model = add_noise(vt.create("B/16", depth=2, classes=10, eps=1e-12)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)  # so that the softmax is not one-hot
    return model, torch.randn(1, 3, 224, 224, dtype=torch.float64)


@pytest.fixture(scope="module")
def tape(article):
    model, image = article
    with (
        torch.no_grad(),
        vt.record(
            model,
            "embed",
            "blocks.0.*",
            "blocks.0.attention.*",
            "blocks.0.mlp.*",
            "blocks.1.out",
            "encoded",
            "logits",
        ) as tape,
    ):
        model(image)
    return tape


def test_patch_embedding_by_convolution_and_by_matrix(article):
    """ "Patch Embedding": a Conv2d with kernel and stride 16, flattened and transposed: (1, 196, 768);
    the same by cutting the patches and multiplying each with the flattened kernel, atol 1e-5."""
    model, image = article
    weight, bias = model.tokens.proj.weight, model.tokens.proj.bias
    embeddings = nn.functional.conv2d(image, weight, bias, stride=16).flatten(2).transpose(1, 2)
    assert embeddings.shape == (1, 196, 768)
    assert torch.allclose(model.tokens(image), embeddings, atol=1e-10)
    first = image[0, :, :16, :16].flatten() @ weight.flatten(1).T + bias
    assert np.allclose(embeddings[0, 0].detach().numpy(), first.detach().numpy(), atol=1e-5)


def test_class_token_and_positions(article, tape):
    """ "[CLS] token" and "Positional Embedding": concatenate, then add: (1, 197, 768). The article says that
    the position tensor has the shape [batch_size, 197, 768]; it has no batch axis."""
    model, image = article
    cls_tokens = model.prefix[None].expand(1, -1, -1)
    embeddings = torch.cat((cls_tokens, model.tokens(image)), dim=1) + model.position.table
    assert embeddings.shape == (1, 197, 768)
    assert torch.allclose(tape["embed"], embeddings, atol=1e-12)
    assert model.position.table.shape == (197, 768)


def head_by_hand(model, hidden, head):
    """One head from columns of the matrices; the article takes the first 64."""
    attention = model.blocks[0].attention
    of_head = slice(64 * head, 64 * (head + 1))
    matrices, biases = attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3)
    query, key, value = (hidden @ W.T[:, of_head] + b[of_head] for W, b in zip(matrices, biases, strict=True))
    scores = query @ key.transpose(-1, -2) / math.sqrt(64)
    weights = nn.functional.softmax(scores, dim=-1)
    return query, key, value, scores, weights, weights @ value


@pytest.mark.parametrize("head", [0, 2, 11])
def test_one_head_from_the_columns_of_the_matrices(article, tape, head):
    """ "key_matrix = ...weight.T[:, :attention_head_size]": the head's q, k, v, scores, weights and output."""
    model, _ = article
    names = ("q", "k", "v", "scores", "weights", "heads")
    shapes = [(197, 64)] * 3 + [(197, 197)] * 2 + [(197, 64)]
    for name, shape, ours in zip(
        names, shapes, head_by_hand(model, tape["blocks.0.norm1"], head), strict=True
    ):
        assert ours.shape == (1, *shape)
        assert torch.allclose(tape[f"blocks.0.attention.{name}"][:, head], ours, atol=1e-10), name


def test_the_row_of_one_patch(tape):
    """ "patch_n = 1": token 0 is [CLS], so row 1 is the first patch; its row sums to one."""
    row = tape["blocks.0.attention.weights"][0, 0, 1]
    assert row.shape == (197,)
    assert row.sum().item() == pytest.approx(1)


def test_all_heads_concatenated_and_projected(article, tape):
    """ "transpose_for_scores", context_layer, then context @ output_weight.T + output_bias."""
    model, _ = article
    heads = torch.cat([head_by_hand(model, tape["blocks.0.norm1"], head)[-1] for head in range(12)], dim=-1)
    out = model.blocks[0].attention.out
    assert heads.shape == (1, 197, 768)
    assert torch.allclose(tape["blocks.0.attention.out"], heads @ out.weight.T + out.bias, atol=1e-10)


def test_layer_norm_by_hand(article, tape):
    """ "first_patch_embed": mean, variance (the article's "std"), eps 1e-12, weight and bias. Its
    embeddings[0][0] is the class token, not the first patch."""
    model, _ = article
    norm = model.blocks[0].norm1
    for token in (0, 1):
        embed = tape["embed"][0][token]
        variance = (embed - embed.mean()).pow(2).mean()
        standardized = (embed - embed.mean()) / torch.sqrt(variance + 1e-12)
        assert abs(standardized.mean().item()) < 1e-12
        assert standardized.pow(2).mean().item() == pytest.approx(1)
        assert torch.allclose(
            tape["blocks.0.norm1"][0][token], norm.weight * standardized + norm.bias, atol=1e-10
        )


def test_the_rest_of_the_first_layer_and_the_error_in_it(article, tape):
    """ "Intermediate" and "Output". The article adds attention_output to hidden_states, which by then is the
    *normed* tensor; its text says the embeddings, which is correct."""
    model, _ = article
    block, attended = model.blocks[0], tape["blocks.0.attention.out"]

    def rest(hidden_states):
        layer_output = block.norm2(hidden_states)
        intermediate = nn.functional.gelu(layer_output @ block.mlp.fc1.weight.T + block.mlp.fc1.bias)
        assert intermediate.shape == (1, 197, 3072)
        return intermediate @ block.mlp.fc2.weight.T + block.mlp.fc2.bias + hidden_states

    corrected = rest(attended + tape["embed"])
    as_written = rest(attended + tape["blocks.0.norm1"])
    assert torch.allclose(tape["blocks.0.out"], corrected, atol=1e-10)
    assert (tape["blocks.0.out"] - as_written).abs().max() > 1e-2


def test_all_layers_pooler_and_classifier(article, tape):
    """The loop over layers, model.vit.layernorm (of hidden_states: the article uses an undefined
    sequence_output), output[:, 0, :] and the classifier."""
    model, image = article
    hidden_states = tape["embed"]
    for block in model.blocks:
        hidden_states = block(hidden_states)
    output = model.norm(hidden_states)
    pooled = output[:, 0, :]
    assert pooled.shape == (1, 768)
    logits = model.head(pooled)
    assert torch.allclose(tape["logits"], logits, atol=1e-10)
    assert torch.allclose(model(image), logits, atol=1e-10)


def test_gelu_and_its_approximation():
    """ "Intermediate": GELU is x Phi(x), not the distribution function Phi as in the article; the tanh
    formula approximates it."""
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    phi = torch.distributions.Normal(0, 1).cdf(x)
    exact = nn.functional.gelu(x)
    assert torch.allclose(exact, x * phi, atol=1e-12)
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(nn.functional.gelu(x, approximate="tanh"), tanh, atol=1e-12)
    assert 1e-5 < (tanh - exact).abs().max() < 1e-3
    assert (exact - phi).abs().max() > 1
