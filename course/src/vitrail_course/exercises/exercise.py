"""The list of exercises: task, test inputs and common mistakes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from vitrail_course.exercises import mistakes, mistakes_model, reference
from vitrail_course.exercises.mistakes import Mistakes, Wrong

Case = tuple[Any, ...]  # the arguments of one call


class CommonMistake(NamedTuple):
    """A common wrong solution of an exercise."""

    explanation: str
    """What is wrong, and what would be correct."""
    function: Wrong


@dataclass(frozen=True)
class Exercise:
    name: str
    task: str
    """What the function computes, in a sentence."""
    cases: Callable[[Generator], list[Case]]
    explained: Mistakes
    calls: tuple[tuple[str, str], ...] = ()
    """Input and output of each exercise that it calls, in order."""
    last: str = ""
    """The step after the last of these calls."""

    @property
    def mistakes(self) -> list[CommonMistake]:
        return [
            CommonMistake(explanation, function)
            for explanation, wrong in self.explained.items()
            for function in (wrong if isinstance(wrong, tuple) else (wrong,))
        ]

    @property
    def reference(self) -> Callable[..., Tensor]:
        return getattr(reference, self.name)


def normal(generator: Generator, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    return mean + scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


# ---- inputs: all sizes differ, so that nothing fits by accident ------------------------------


def patches_cases(g: Generator) -> list[Case]:
    return [(normal(g, 2, 3, 8, 12), 4), (normal(g, 1, 2, 6, 4), 2)]


def positions_cases(g: Generator) -> list[Case]:
    return [(5, 8), (7, 6)]


def layer_norm_cases(g: Generator) -> list[Case]:
    """The second has small values, so that eps matters; all sizes differ."""

    def case(*shape: int, eps: float, scale: float = 1.0) -> Case:
        x = normal(g, *shape, scale=scale, mean=scale)
        return x, normal(g, shape[-1], mean=1.0), normal(g, shape[-1]), eps

    return [case(2, 5, 6, eps=0.3), case(3, 4, 7, eps=1e-4, scale=0.02)]


def attention_cases(g: Generator) -> list[Case]:
    """With and without heads and mask; the mask allows each query some of the keys."""

    def case(*batch: int, T: int, S: int, d: int, masked: bool) -> Case:
        q, k, v = (normal(g, *batch, length, d) for length in (T, S, S))
        mask = (torch.arange(T)[:, None] + torch.arange(S)) % 3 > 0
        return q, k, v, mask if masked else None

    return [
        case(2, T=5, S=4, d=6, masked=False),
        case(2, 3, T=4, S=5, d=7, masked=False),
        case(2, 3, T=4, S=5, d=7, masked=True),
    ]


def msa_weights(g: Generator, D: int, scale: float = 0.5) -> dict[str, Tensor]:
    return {
        "qkv.weight": normal(g, 3 * D, D, scale=scale),
        "qkv.bias": normal(g, 3 * D),
        "out.weight": normal(g, D, D, scale=scale),
        "out.bias": normal(g, D),
    }


def mlp_weights(g: Generator, D: int, scale: float = 0.5) -> dict[str, Tensor]:
    M = 2 * D + 1
    return {
        "fc1.weight": normal(g, M, D, scale=scale),
        "fc1.bias": normal(g, M),
        "fc2.weight": normal(g, D, M, scale=scale),
        "fc2.bias": normal(g, D),
    }


def block_weights(g: Generator, D: int, scale: float = 0.5) -> dict[str, Tensor]:
    norms = {f"norm{n}.{kind}": normal(g, D, mean=1.0) for n in (1, 2) for kind in ("weight", "bias")}
    attention = {f"attention.{name}": tensor for name, tensor in msa_weights(g, D, scale).items()}
    return {**norms, **attention, **{f"mlp.{n}": tensor for n, tensor in mlp_weights(g, D, scale).items()}}


def vit_case(g: Generator, C: int, P: int, grid: tuple[int, int], D: int, heads: int, scale: float) -> Case:
    """Three blocks. `scale` applies to all but the last norm and the head: with small tokens, eps matters."""
    (h, w), K, depth = grid, 5, 3
    weights = {
        "tokens.proj.weight": normal(g, D, C, P, P, scale=0.1),
        "tokens.proj.bias": normal(g, D),
        "prefix": normal(g, 1, D),
        "position.table": normal(g, h * w + 1, D),
        "norm.weight": normal(g, D, mean=1.0),
        "norm.bias": normal(g, D),
        "head.weight": normal(g, K, D),
        "head.bias": normal(g, K),
    }
    for index in range(depth):
        blocks = block_weights(g, D, scale=0.2).items()
        weights |= {f"blocks.{index}.{name}": tensor for name, tensor in blocks}
    for name, tensor in weights.items():
        weights[name] = tensor if name.startswith(("norm", "head")) else scale * tensor
    config = SimpleNamespace(patch=P, depth=depth, heads=heads)
    return normal(g, 2, C, h * P, w * P), weights, config


EXERCISES = [
    Exercise(
        "patches",
        "Flattened patches in reading order, channels first within each patch.",
        patches_cases,
        mistakes.PATCHES,
    ),
    Exercise(
        "positions",
        "PE[p, 2i] = sin(p / 10000^(2i / width)), PE[p, 2i + 1] is the cosine of the same angle.",
        positions_cases,
        mistakes.POSITIONS,
    ),
    Exercise(
        "layer_norm",
        "(x - mean) / sqrt(variance + eps) * weight + bias, for each token.",
        layer_norm_cases,
        mistakes.LAYER_NORM,
    ),
    Exercise(
        "attention",
        "softmax(q k^T / sqrt(d)) v, without the masked keys.",
        attention_cases,
        mistakes.ATTENTION,
    ),
    Exercise(
        "multi_head_attention",
        "Attention in each head; the heads are concatenated and projected by out.weight.",
        lambda g: [(normal(g, 2, 5, 6), msa_weights(g, 6), 2), (normal(g, 1, 4, 12), msa_weights(g, 12), 3)],
        mistakes_model.MULTI_HEAD_ATTENTION,
        calls=(("q, k and v of the heads", "the outputs of the heads"),),
        last="the concatenated heads, or their projection",
    ),
    Exercise(
        "mlp",
        "GELU(z fc1^T + b1) fc2^T + b2.",
        lambda g: [(normal(g, 2, 5, 6), mlp_weights(g, 6)), (normal(g, 1, 4, 9), mlp_weights(g, 9))],
        mistakes.MLP,
    ),
    Exercise(
        "block",
        "z' = MSA(LN(z)) + z; out = MLP(LN(z')) + z'.",
        lambda g: [
            (normal(g, 2, 5, 6), block_weights(g, 6), 2),
            (normal(g, 1, 4, 9) / 100, block_weights(g, 9), 3),
        ],
        mistakes_model.BLOCK,
        calls=(
            ("z, the input of the first norm", "LN(z)"),
            ("LN(z), the input of attention", "MSA(LN(z))"),
            ("the first sum, z' = MSA(LN(z)) + z", "LN(z')"),
            ("LN(z'), the input of the MLP", "MLP(LN(z'))"),
        ),
        last="the second sum, MLP(LN(z')) + z'",
    ),
    Exercise(
        "vit",
        "Eq. 1 to 4; the head is applied to the class token.",
        lambda g: [
            vit_case(g, C=3, P=4, grid=(2, 3), D=6, heads=2, scale=1.0),
            vit_case(g, C=2, P=3, grid=(3, 2), D=9, heads=3, scale=0.1),
        ],
        mistakes_model.VIT,
        calls=(
            ("the images", "the patches x_p"),
            ("z_0 = [x_class; x_p E] + E_pos (Eq. 1)", "z_1"),
            ("z_1, after the first block", "z_2"),
            ("z_2, after the second block", "z_3"),
            ("z_3, the input of the last norm", "y = LN(z_3^0) (Eq. 4)"),
        ),
        last="the logits, y head.weight^T + head.bias",
    ),
]
