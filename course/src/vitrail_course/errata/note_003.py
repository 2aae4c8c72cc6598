"""Errata of note 003, slides from text to images. Each function computes the evidence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.decoder import Decoder, DecoderConfig
from vitrail_course.errata.erratum import (
    Evidence,
    count_parameters,
    erratum,
    max_difference,
    normal,
    outcome,
    tiny,
)


@erratum(
    "003",
    "History, on the architecture since 2017",
    "imprecise",
    claim="It is almost unchanged.",
    correction="ViT has the norms before attention and MLP (000 to 002), Vaswani et al. after each sum. With "
    "the same weights, the two are different functions.",
)
def norm_before_or_after() -> Evidence:
    pre, post, z = tiny().blocks[0], tiny(block="post-norm").blocks[0], normal(1, 5, 12)
    post.load_state_dict(pre.state_dict())
    return {
        "difference of pre-norm and post-norm": max_difference(pre(z), post(z)),
        "of pre-norm and itself": max_difference(pre(z), pre(z)),
    }


@erratum(
    "003",
    "Tokens, what they can be",
    "imprecise",
    claim="A token of an image can be a pixel.",
    correction="Only for small images: attention has T^2 weights in each head.",
)
def pixels_as_tokens() -> Evidence:
    patches, pixels = 14 * 14, 224 * 224
    return {
        "weights of a head, with patches of 16": patches**2,
        "with pixels": pixels**2,
        "the latter in float32, GB": pixels**2 * 4 / 1e9,
    }


@erratum(
    "003",
    "on residual pathways",
    "imprecise",
    claim="They reduce overfitting and stabilize gradient descent.",
    correction="The second can be shown: with residuals far more gradient reaches the first block. Without "
    "them it falls on the way, here by 20 times over 24 blocks, and vanishes only if the norms are missing "
    "too (the lab norms, which compares the gradients of the parameters of the first and the last block). No "
    "reason is given for the first; residual connections have no parameters.",
)
def residual_and_gradient() -> Evidence:
    def gradient(block: str) -> tuple[float, float]:
        """At the input of the first and of the last block."""
        torch.manual_seed(0)
        base = ViTConfig(width=16, depth=24, heads=2, patch=4, size=8, block=block)  # type: ignore[arg-type]
        model = ViT(base).double()
        inputs = [normal(1, 5, 16).requires_grad_()]
        for one in model.blocks:
            inputs.append(one(inputs[-1]))
        ends = torch.autograd.grad((inputs[-1] * normal(1, 5, 16)).sum(), [inputs[0], inputs[-2]])
        return ends[0].norm().item(), ends[1].norm().item()

    fields = {"depth": 1, "classes": 0}
    return {
        "gradient at the first of 24 blocks, with residuals": gradient("pre-norm")[0],
        "without": gradient("no-residual")[0],
        "without, at the last block": gradient("no-residual")[1],
        "difference in parameters": count_parameters("B/16", **fields)
        - count_parameters("B/16", block="no-residual", **fields),
    }


@erratum(
    "003",
    "on layer normalization",
    "imprecise",
    claim="It guarantees mean 0 and variance 1, and prevents covariance shift.",
    correction="Only before the learned scale and shift, which may undo it, and not for a token whose "
    "entries are all equal. The term is covariate shift, as in 001.",
)
def no_guarantee_of_variance_one() -> Evidence:
    token, weight, bias = normal(64), torch.full((64,), 2.0).double(), torch.full((64,), 3.0).double()

    def moments(x: Tensor) -> tuple[float, float]:
        return round(x.mean().item(), 3), round(x.var(unbiased=False).item(), 3)

    return {
        "mean, variance before scale and shift": moments(F.layer_norm(token, (64,))),
        "after a scale of 2 and a shift of 3": moments(F.layer_norm(token, (64,), weight, bias)),
        "of a constant token": moments(F.layer_norm(torch.ones(64).double(), (64,))),
    }


@erratum(
    "003",
    "the class FeedForward",
    "wrong",
    claim="According to its docstring it is one linear layer followed by a non-linearity.",
    correction="It is two linear layers with the non-linearity between them. After a ReLU no output would be "
    "negative.",
)
def two_linear_layers() -> Evidence:
    D = 16
    net = nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D)).double()
    with torch.no_grad():
        out, described = net(normal(500, D)), net[:2](normal(500, D))
    return {
        "linear layers": sum(isinstance(layer, nn.Linear) for layer in net),
        "fraction of negative outputs": round((out < 0).double().mean().item(), 1),
        "as described": (described < 0).double().mean().item(),
    }


@erratum(
    "003",
    "the class FeedForward, for images (000 and 001 on the MLP)",
    "imprecise",
    claim="ReLU here, GELU in 000 and 001; yet any input is said to use the same transformer.",
    correction="ViT uses GELU. The two differ most near 0.75 on either side of zero.",
)
def relu_or_gelu() -> Evidence:
    x = torch.linspace(-4, 4, 801, dtype=torch.float64)
    gap = (F.relu(x) - F.gelu(x)).abs()
    return {"largest difference": gap.max().item(), "at |x|": abs(x[gap.argmax()].item())}


@erratum(
    "003",
    "How to scale, and the class of the language model",
    "imprecise",
    claim="To scale, add blocks.",
    correction="The published sizes also grow in width and heads: Base with the 24 blocks of Large has "
    "little more than half of its parameters.",
)
def not_only_blocks() -> Evidence:
    names = {"B/16": {}, "B/16 with 24 blocks": {"depth": 24}, "L/16": {}}
    return {f"{name}, millions": count_parameters(name[:4], **fields) / 1e6 for name, fields in names.items()}


@erratum(
    "003",
    "the class of the language model, its name",
    "wrong",
    claim="It is called a bigram model.",
    correction="A bigram model uses only the last token. With attention, the first token changes the "
    "prediction after the eighth.",
)
def not_a_bigram_model() -> Evidence:
    one = torch.tensor([[24, 43, 58, 5, 57, 1, 46, 43]])
    other = one.clone()
    other[0, 0] = 44
    bigram = nn.Embedding(65, 65).double()
    model = Decoder(DecoderConfig(vocabulary=65, width=16, depth=1, heads=2, length=8)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        return {
            "change of the last logits, the note's model": max_difference(
                model(one)[0, -1], model(other)[0, -1]
            ),
            "a bigram model": max_difference(bigram(one)[0, -1], bigram(other)[0, -1]),
        }


@erratum(
    "003",
    "the class FeedForward, its last layer",
    "imprecise",
    claim="Its last layer is nn.Dropout(dropout).",
    correction="dropout is neither an argument of the class nor set on the slides. The rate must be defined "
    "before a model is built.",
)
def dropout_is_not_defined() -> Evidence:
    def build(**names: float) -> str:
        return outcome(lambda: eval("nn.Dropout(dropout)", {"nn": nn, **names}))

    return {"as printed": build(), "with dropout = 0.2": build(dropout=0.2)}
