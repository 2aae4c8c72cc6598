"""Models, images and checks for tests of figures."""

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import vitrail as vt
from vitrail.views.figure_images import ImageBatch

SMALL = dict(width=32, depth=2, heads=2, patch=8, size=24, classes=3)
LAYOUTS = {
    "class": {},
    "mean": dict(class_token=False, pool="mean"),
    "registers": dict(registers=3, rows="class"),
    "oblong": dict(size=(56, 72)),
    "rotary": dict(position="rotary"),
    "attention": dict(class_token=False, pool="attention"),
    "hybrid": dict(embedding="conv"),
    "distilled": dict(distillation_token=True, head="distilled"),
    "post-norm": dict(block="post-norm"),
    "norm-after": dict(pool="mean", pool_norm="after"),
    "one-layer": dict(depth=1),
    "gray": dict(channels=1),
    "many-channels": dict(channels=5),
}


def build(**fields):
    return vt.ViT(vt.ViTConfig(**{**SMALL, **fields}))


def random_images(model, count=3):
    h, w = model.config.pixels
    shape = (count, h, w, model.config.channels)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    return ImageBatch([f"a rather long name {n}.jpg" for n in range(count)], pixels, images)


def check_figure(figure):
    """Draw a figure and check that it fits its canvas and that all text is legible. Returns the texts."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert box.x0 >= -0.01, box
    assert box.y0 >= -0.01, box
    assert box.x1 <= width + 0.01, box
    assert box.y1 <= height + 0.01, box
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert min(text.get_fontsize() for text in texts) >= 7
    return [text.get_text() for text in texts]
