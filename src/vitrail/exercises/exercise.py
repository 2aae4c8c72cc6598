"""The list of exercises: what must hold, on which inputs it is tried, and what often goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor

from vitrail.exercises import reference, slips, slips_model
from vitrail.exercises.slips import Slip

Case = tuple[Any, ...]  # the arguments of one call


@dataclass(frozen=True)
class Exercise:
    name: str
    must: str
    """What must hold, in a sentence."""
    cases: Callable[[Generator], list[Case]]
    slips: list[Slip]
    calls: tuple[tuple[str, str], ...] = ()
    """For each part that it calls: what goes in, and what comes out."""
    last: str = ""
    """What is left to do after the last of these calls."""

    @property
    def reference(self) -> Callable[..., Tensor]:
        return getattr(reference, self.name)


def drawn(generator: Generator, *shape: int, scale: float = 1.0, about: float = 0.0) -> Tensor:
    return about + scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


# ---- inputs: oblong and odd, so that nothing fits by chance ----------------------------------


def patches_cases(g: Generator) -> list[Case]:
    return [(drawn(g, 2, 3, 8, 12), 4), (drawn(g, 1, 2, 6, 4), 2)]


def positions_cases(g: Generator) -> list[Case]:
    return [(5, 8), (7, 6)]


def layer_norm_cases(g: Generator) -> list[Case]:
    """The second is small, so that eps counts; no two dimensions of one are alike."""

    def case(*shape: int, eps: float, scale: float = 1.0) -> Case:
        x = drawn(g, *shape, scale=scale, about=scale)
        return x, drawn(g, shape[-1], about=1.0), drawn(g, shape[-1]), eps

    return [case(2, 5, 6, eps=0.3), case(3, 4, 7, eps=1e-4, scale=0.02)]


def attention_cases(g: Generator) -> list[Case]:
    """Without and with heads, without and with a mask; each query may look somewhere, not everywhere."""

    def case(*front: int, T: int, S: int, d: int, masked: bool) -> Case:
        q, k, v = (drawn(g, *front, length, d) for length in (T, S, S))
        mask = (torch.arange(T)[:, None] + torch.arange(S)) % 3 > 0
        return q, k, v, mask if masked else None

    return [
        case(2, T=5, S=4, d=6, masked=False),
        case(2, 3, T=4, S=5, d=7, masked=False),
        case(2, 3, T=4, S=5, d=7, masked=True),
    ]


def msa_weights(g: Generator, D: int, scale: float = 0.5) -> dict[str, Tensor]:
    return {
        "qkv.weight": drawn(g, 3 * D, D, scale=scale),
        "qkv.bias": drawn(g, 3 * D),
        "out.weight": drawn(g, D, D, scale=scale),
        "out.bias": drawn(g, D),
    }


def mlp_weights(g: Generator, D: int, scale: float = 0.5) -> dict[str, Tensor]:
    M = 2 * D + 1
    return {
        "fc1.weight": drawn(g, M, D, scale=scale),
        "fc1.bias": drawn(g, M),
        "fc2.weight": drawn(g, D, M, scale=scale),
        "fc2.bias": drawn(g, D),
    }


def block_weights(g: Generator, D: int, scale: float = 0.5) -> dict[str, Tensor]:
    norms = {f"norm{n}.{kind}": drawn(g, D, about=1.0) for n in (1, 2) for kind in ("weight", "bias")}
    attention = {f"attention.{name}": tensor for name, tensor in msa_weights(g, D, scale).items()}
    return {**norms, **attention, **{f"mlp.{n}": tensor for n, tensor in mlp_weights(g, D, scale).items()}}


def vit_case(g: Generator, C: int, P: int, grid: tuple[int, int], D: int, heads: int, scale: float) -> Case:
    """Three blocks; `scale` for all but the last norm and the head: with small tokens, eps counts there."""
    (h, w), K, depth = grid, 5, 3
    weights = {
        "tokens.proj.weight": drawn(g, D, C, P, P, scale=0.1),
        "tokens.proj.bias": drawn(g, D),
        "prefix": drawn(g, 1, D),
        "position.table": drawn(g, h * w + 1, D),
        "norm.weight": drawn(g, D, about=1.0),
        "norm.bias": drawn(g, D),
        "head.weight": drawn(g, K, D),
        "head.bias": drawn(g, K),
    }
    for index in range(depth):
        blocks = block_weights(g, D, scale=0.2).items()
        weights |= {f"blocks.{index}.{name}": tensor for name, tensor in blocks}
    for name, tensor in weights.items():
        weights[name] = tensor if name.startswith(("norm", "head")) else scale * tensor
    config = SimpleNamespace(patch=P, depth=depth, heads=heads)
    return drawn(g, 2, C, h * P, w * P), weights, config


EXERCISES = [
    Exercise(
        "patches", "Flat patches in reading order, channels first in each.", patches_cases, slips.PATCHES
    ),
    Exercise(
        "positions",
        "PE[p, 2i] = sin(p / 10000^(2i / width)), PE[p, 2i + 1] the cosine of the same.",
        positions_cases,
        slips.POSITIONS,
    ),
    Exercise(
        "layer_norm",
        "(x - mean) / sqrt(variance + eps) * weight + bias, for each token.",
        layer_norm_cases,
        slips.LAYER_NORM,
    ),
    Exercise("attention", "softmax(q k^T / sqrt(d)) v, within the mask.", attention_cases, slips.ATTENTION),
    Exercise(
        "multi_head_attention",
        "Attention in each head, the heads side by side, times out.weight^T.",
        lambda g: [(drawn(g, 2, 5, 6), msa_weights(g, 6), 2), (drawn(g, 1, 4, 12), msa_weights(g, 12), 3)],
        slips_model.MULTI_HEAD_ATTENTION,
        calls=(("q, k and v of the heads", "the heads' results"),),
        last="the heads side by side, or their projection",
    ),
    Exercise(
        "mlp",
        "GELU(z fc1^T + b1) fc2^T + b2.",
        lambda g: [(drawn(g, 2, 5, 6), mlp_weights(g, 6)), (drawn(g, 1, 4, 9), mlp_weights(g, 9))],
        slips.MLP,
    ),
    Exercise(
        "block",
        "z' = MSA(LN(z)) + z; out = MLP(LN(z')) + z'.",
        lambda g: [
            (drawn(g, 2, 5, 6), block_weights(g, 6), 2),
            (drawn(g, 1, 4, 9) / 100, block_weights(g, 9), 3),
        ],
        slips_model.BLOCK,
        calls=(
            ("z, as the first norm gets it", "LN(z)"),
            ("LN(z), as attention gets it", "MSA(LN(z))"),
            ("the first sum, z' = MSA(LN(z)) + z", "LN(z')"),
            ("LN(z'), as the MLP gets it", "MLP(LN(z'))"),
        ),
        last="the second sum, MLP(LN(z')) + z'",
    ),
    Exercise(
        "vit",
        "Eq. 1 to 4, and the head on the class token.",
        lambda g: [
            vit_case(g, C=3, P=4, grid=(2, 3), D=6, heads=2, scale=1.0),
            vit_case(g, C=2, P=3, grid=(3, 2), D=9, heads=3, scale=0.1),
        ],
        slips_model.VIT,
        calls=(
            ("the pictures", "the patches x_p"),
            ("z_0 = [x_class; x_p E] + E_pos (Eq. 1)", "z_1"),
            ("z_1, after the first block", "z_2"),
            ("z_2, after the second block", "z_3"),
            ("z_3, as the last norm gets it", "y = LN(z_3^0) (Eq. 4)"),
        ),
        last="the logits, y head.weight^T + head.bias",
    ),
]
