"""Small models of every token layout, for the figures of attention."""

import gc
import itertools

import numpy as np
import torch

import vitrail as vt
from tests.support.models import add_noise

SMALL = dict(width=32, depth=3, heads=4, patch=8, size=24, channels=1, classes=5)
LAYOUTS = {
    "class token": {},
    "mean pool": dict(class_token=False, pool="mean"),
    "registers": dict(registers=2),
    "registers alone": dict(class_token=False, registers=3, pool="mean"),
    "not square": dict(size=(56, 72)),
    "oblong patches": dict(patch=(4, 8), size=(12, 24)),
    "rotary": dict(position="rotary", registers=1),
    "attention pool": dict(class_token=False, pool="attention"),
    "attention pool and registers": dict(class_token=False, registers=2, pool="attention"),
    "hybrid stem": dict(embedding="conv"),
    "distilled": dict(distillation_token=True, head="distilled"),
    "post-norm": dict(block="post-norm"),
    "no residual": dict(block="no-residual"),
    "relative": dict(position="relative"),
    "pairwise": dict(position="pairwise", scale="width"),
    "qk-norm, wide heads": dict(qk_norm=True, head_width=12),
    "mean of all": dict(pool="mean-all"),
    "class and mean": dict(pool="class-mean"),
    "flatten": dict(pool="flatten", class_token=False),
    "one layer, one head": dict(depth=1, heads=1),
    "cut remainder": dict(size=(26, 30), remainder="cut"),
}


def build(layout="class token", **changes):
    return add_noise(vt.ViT(vt.ViTConfig(**{**SMALL, **LAYOUTS[layout], **changes})))


def random_images(model, count=2):
    return torch.randn(count, model.config.channels, *model.config.pixels)


def random_pixels(model, count=2):
    """uint8 pixels to draw."""
    return torch.randint(0, 256, (count, *model.config.pixels, 1), dtype=torch.uint8).numpy()


def explicit_weights(model, images):
    """Attention weights of every block, by plain loops in float64 from the recorded q and k: [(B, k, T, T)]."""
    with torch.no_grad(), vt.record(model, "blocks.*.attention.q", "blocks.*.attention.k") as tape:
        model(images)
    blocks = []
    for n, block in enumerate(model.blocks):
        q, k = (tape[f"blocks.{n}.attention.{name}"].double() for name in "qk")
        scores = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.float64)
        for image, head in np.ndindex(*q.shape[:2]):
            scores[image, head] = q[image, head] @ k[image, head].T
        scores = scores * {"head": model.config.d, "width": model.config.width}[model.config.scale] ** -0.5
        if block.attention.bias is not None:
            scores = scores + block.attention.bias().double()
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        blocks.append((powers / powers.sum(-1, keepdim=True)).detach().numpy())
    return blocks


def clipped(figure):
    """The texts of a figure that are cut off by its canvas, overlap, or are too small to read."""
    figure.draw_without_rendering()
    texts = [figure._suptitle] if figure._suptitle else []
    for axis in figure.axes:
        texts += [axis.title, *(axis.legend_.get_texts() if axis.legend_ else [])]
        texts += [axis.xaxis.label, axis.yaxis.label] if axis.axison else []
    shown = [text for text in texts if text.get_text()]
    assert shown
    page = figure.bbox.padded(1)
    boxes = {text: text.get_window_extent() for text in shown}
    outside = [
        t.get_text() for t, box in boxes.items() if not page.contains(*box.min) or not page.contains(*box.max)
    ]
    overlapping = [
        (one.get_text(), other.get_text())
        for one, other in itertools.combinations(shown, 2)
        if boxes[one].padded(-1).overlaps(boxes[other].padded(-1))
    ]
    return outside + overlapping + [text.get_text() for text in shown if text.get_fontsize() < 7]


def count_alive(shape):
    """Number of live tensors of a shape."""
    return sum(issubclass(type(one), torch.Tensor) and one.shape == shape for one in gc.get_objects())
