"""Eq. (1) to (4) of the paper as one model has them, and the classes that it predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.model.config import POSITIONS, ViTConfig
from vitrail.views.walk.stage import NORM_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitrail.views.walk.stage import Stage

NUMBERING = (
    "Blocks, heads, tokens, rows and columns count from 0, as in the code. z_ℓ is the output of ℓ blocks: "
    "block 0 turns z_0 into z_1."
)


def paper_equations(config: ViTConfig) -> dict[int, str]:
    """The four equations by number, adapted to the config."""
    prefix = ["x_class"] * config.class_token + ["x_dist"] * config.distillation_token
    prefix += ["x_reg"] * bool(config.registers)
    position = " + E_pos" if POSITIONS[config.position].adds_rows else ""
    return {
        1: f"z_0 = [{'; '.join([*prefix, 'x_p^1 E', '...', 'x_p^N E'])}]{position}",
        **_block_equations(config),
        4: f"y = {_pooled(config)}",
    }


def _block_equations(config: ViTConfig) -> dict[int, str]:
    z, middle = "z_{ℓ−1}", "z'_ℓ"

    def normed(text: str) -> str:
        norm = NORM_NAMES[config.norm]
        return f"{norm}({text})" if norm else text

    match config.block:
        case "pre-norm":
            right = f"MSA({normed(z)}) + {z}", f"MLP({normed(middle)}) + {middle}"
        case "post-norm":
            right = normed(f"MSA({z}) + {z}"), normed(f"MLP({middle}) + {middle}")
        case "res-post-norm":
            right = f"{normed(f'MSA({z})')} + {z}", f"{normed(f'MLP({middle})')} + {middle}"
        case "parallel":
            right = f"MSA({normed(z)})", f"{middle} + MLP({normed(z)}) + {z}"
        case "no-residual":
            right = f"MSA({normed(z)})", f"MLP({normed(middle)})"
    return {2: f"{middle} = {right[0]}", 3: f"z_ℓ = {right[1]}"}


def _pooled(config: ViTConfig) -> str:
    """The right side of Eq. (4)."""
    norm = NORM_NAMES[config.norm] if config.pool_norm != "none" else ""
    z = f"{norm}(z_L)" if norm and config.pool_norm == "before" else "z_L"
    pools = {
        "class": f"{norm}(z_L^0)" if norm else "z_L^0",
        "mean": f"mean({z}^1, ..., {z}^N)",
        "mean-all": f"mean({z})",
        "class-mean": f"[{z}^0; mean({z}^1, ..., {z}^N)]",
        "attention": f"MAP({z})",
        "flatten": f"[{z}^1; ...; {z}^N]",
    }
    pooled = f"[{z}^0; {z}^1]" if config.head == "distilled" else pools[config.pool]
    return f"{norm}({pooled})" if norm and config.pool_norm == "after" and config.pool != "class" else pooled


def top_classes(
    stages: Sequence[Stage], labels: Sequence[str] | None, activation: str = "softmax", count: int = 5
) -> list[tuple[str, float]]:
    """The classes with the highest scores and their scores; none for a model without a head."""
    tensors = {stage.name: stage.tensor for stage in stages}
    if "probabilities" not in tensors:
        return []
    scores = tensors["logits"].sigmoid() if activation == "sigmoid" else tensors["probabilities"]
    best = scores.topk(min(count, len(scores)))
    return [
        (labels[index] if labels else f"class {index}", score)
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
