"""The demo: a small ViT learns scikit-learn's handwritten digits, and we see where it looks.

1,797 real digits of 8 x 8 pixels come inside the scikit-learn package, so nothing is downloaded.
The model is the paper's, only small; the training loop is the plain one of a textbook.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import needs
from vitrail.model import ViT, record

CONFIG = ViTConfig(width=64, depth=3, heads=4, patch=2, size=8, channels=1, classes=10)
BATCH, PEAK_RATE, WEIGHT_DECAY, WARM_UP = 64, 3e-3, 0.05, 0.1


@dataclass(frozen=True)
class Digits:
    """Pictures (N, 1, 8, 8) with values from 0 to 1, and what they show."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Looked:
    """What the model said of some digits, and how much its class token looked at each patch."""

    digits: Digits
    predicted: Tensor  # (B,)
    score: Tensor  # (B,) the probability of what it said
    attention: Tensor  # (B, h, w), each map sums to 1

    @property
    def right(self) -> Tensor:
        return self.predicted == self.digits.labels

    @property
    def accuracy(self) -> float:
        return self.right.double().mean().item()


def check_extras() -> None:
    """Say what is missing before anything is trained, not after."""
    with needs("train"):
        import sklearn  # noqa: F401
    with needs("inspect"):
        import matplotlib  # noqa: F401


def load() -> tuple[Digits, Digits]:
    """The digits to learn from and the held-out fifth, the same split every time."""
    with needs("train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    flat, labels = load_digits(return_X_y=True)
    images = torch.tensor(flat, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def build(seed: int) -> ViT:
    """A fresh model. The paper's first positions, sigma 0.02, are so small beside the patch tokens
    that 1,400 pictures hardly teach the model where a patch is; here they start at sigma 1."""
    torch.manual_seed(seed)
    model = ViT(CONFIG)
    nn.init.normal_(model.get_parameter("position.table"))
    return model


def train(model: ViT, digits: Digits, *, epochs: int, seed: int = 0) -> Iterator[tuple[float, float]]:
    """Train in place; after each epoch comes (mean loss, accuracy) over its augmented pictures."""
    chance = torch.Generator().manual_seed(seed)
    matrices = [p for name, p in model.named_parameters() if name.endswith(".weight") and "norm" not in name]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    steps = epochs * (len(digits.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    model.train()
    for _ in range(epochs):
        losses, right = [], 0
        batches = torch.randperm(len(digits.labels), generator=chance).split(BATCH)
        batches = [batch for batch in batches if len(batch) == BATCH]  # the rest comes next time
        for batch in batches:
            labels = digits.labels[batch]
            logits = model(normalise(jiggle(digits.images[batch], chance)))
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            right += int((logits.argmax(1) == labels).sum())
        yield sum(losses) / len(losses), right / (len(batches) * BATCH)
    model.eval()


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a linear warm-up, then half a cosine down to zero."""
    warm = WARM_UP * steps
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))


def jiggle(images: Tensor, chance: torch.Generator) -> Tensor:
    """Turn each picture by up to 10 degrees, zoom by up to 10 %, shift by up to 0.7 pixels."""

    def some(most: float) -> Tensor:
        return (2 * torch.rand(len(images), generator=chance) - 1) * most

    turn, zoom = some(math.radians(10)), torch.exp(some(math.log(1.1)))
    cos, sin, down, across = zoom * turn.cos(), zoom * turn.sin(), some(1.4 / 8), some(1.4 / 8)
    matrix = torch.stack([cos, -sin, across, sin, cos, down], dim=1).view(-1, 2, 3)
    places = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, places, align_corners=False)


def normalise(images: Tensor) -> Tensor:
    """To mean 0 and deviation 1, over the digits' pixels."""
    return (images - 0.305) / 0.376


@torch.no_grad()
def look(model: ViT, digits: Digits) -> Looked:
    """Classify, and follow the class token's attention through all blocks (rollout, Fig. 6)."""
    with record(model, "blocks.*.attention.weights") as tape:
        probabilities = model(normalise(digits.images)).softmax(dim=1)
    rolled = torch.eye(model.config.tokens)
    for weights in tape.values():  # (B, k, T, T) in the order of the blocks
        mixed = (weights.mean(dim=1) + torch.eye(model.config.tokens)) / 2  # the residual looks at itself
        rolled = mixed @ rolled
    attention = rolled[:, 0, model.config.prefix :].unflatten(1, model.config.grid)
    attention = attention / attention.sum(dim=(1, 2), keepdim=True)
    score, predicted = probabilities.max(dim=1)
    return Looked(digits, predicted, score, attention)


def choose(looked: Looked, most: int = 12) -> tuple[list[int], list[int]]:
    """Which digits to show: wrong ones, surest first, and right ones of different kinds, from 0 on."""
    wrong = (~looked.right).nonzero().flatten()
    wrong = wrong[looked.score[wrong].argsort(descending=True)][: most // 2]
    right: list[int] = []
    for kind in range(10):
        right += (looked.right & (looked.digits.labels == kind)).nonzero()[:1].flatten().tolist()
    return right[: most - len(wrong)], wrong.tolist()


def light(looked: Looked, index: int) -> Tensor:
    """The attention on one digit as brightness for each of its pixels: (8, 8), at most 1."""
    down, across = CONFIG.patch_pixels
    attention = looked.attention[index] / looked.attention[index].max()
    return attention.repeat_interleave(down, dim=0).repeat_interleave(across, dim=1)


def draw(looked: Looked, path: Path) -> None:
    """A PNG of right and wrong digits, each above the same digit lit by the attention on it."""
    with needs("inspect"):
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    tight = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    heat = matplotlib.colormaps["inferno"]
    right, wrong = choose(looked)
    columns = [*right, None, *wrong] if right and wrong else [*right, *wrong]  # None: a gap
    figure = Figure(figsize=(len(columns), 2.6), dpi=120, facecolor="#17131f", layout=tight)
    count, total = int(looked.right.sum()), len(looked.right)
    title = f"{count} of {total} right, {total - count} wrong. Above the digit, below where the model looked"
    figure.suptitle(title, color="white", fontsize=11)
    for column, axes in zip(columns, figure.subplots(2, len(columns), squeeze=False).T, strict=True):
        for axis in axes:
            axis.axis("off")
        if column is not None:
            ink = looked.digits.images[column, 0]
            lit = torch.tensor(heat(light(looked, column).numpy())[..., :3]) * (0.3 + 0.7 * ink)[..., None]
            axes[0].imshow(ink.numpy(), cmap="gray", vmin=0, vmax=1)
            axes[1].imshow(lit.numpy())
            colour = "white" if column in right else "#ff8a70"
            axes[0].set_title(caption(looked, column), color=colour, fontsize=9)
    figure.savefig(path)


def caption(looked: Looked, index: int) -> str:
    """What the model said of one digit: how sure it was, or what would have been right."""
    said, truth = int(looked.predicted[index]), int(looked.digits.labels[index])
    return f"{said} ({looked.score[index]:.0%})" if said == truth else f"{said}, is {truth}"
