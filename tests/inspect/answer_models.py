"""Models of every layout for the figures about answers, and what their tests share."""

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import vitrail as vt
from conftest import shake

BASE = dict(width=32, depth=2, heads=2, patch=8, size=24, channels=3, classes=5)

LAYOUTS = {
    "class token": {},
    "mean pool": dict(class_token=False, pool="mean"),
    "mean of all, registers": dict(registers=2, pool="mean-all"),
    "class and mean": dict(pool="class-mean", pool_norm="after"),
    "oblong": dict(size=(56, 72), registers=1),
    "rotary": dict(position="rotary", pool_norm="none"),
    "attention pool": dict(pool="attention", class_token=False, depth=1),
    "attention pool with prefix": dict(pool="attention", registers=1),
    "hybrid stem": dict(embedding="conv", heads=4),
    "distilled": dict(distillation_token=True, head="distilled", depth=3),
    "post-norm": dict(block="post-norm", pool="flatten"),
    "pixels left over": dict(size=(27, 25), remainder="cut", layer_scale=0.5),
}


def build(name="class token", **fields):
    torch.manual_seed(0)
    return shake(vt.ViT(vt.ViTConfig(**BASE | LAYOUTS[name] | fields)))


def pictures_for(model, count=2):
    torch.manual_seed(1)
    return torch.randn(count, *model.config.input_shape)


def levels(images):
    """Something to draw, (B, H, W, C)."""
    return ((images - images.min()) / (images.max() - images.min()) * 255).byte().permute(0, 2, 3, 1).numpy()


def log_p(model, images, target):
    with torch.no_grad():
        return torch.log_softmax(model(images), dim=1)[torch.arange(len(images)), torch.as_tensor(target)]


def painted(picture, place, patch, colour=0.0):
    """The picture (C, H, W) with the patch at (row, column) painted over."""
    covered = picture.clone()
    (row, column), (down, across) = place, patch
    covered[:, row * down : (row + 1) * down, column * across : (column + 1) * across] = colour
    return covered


def assert_legible(figure):
    """No text that is drawn leaves the canvas, and none is smaller than 7 points."""
    sheet = FigureCanvasAgg(figure)
    renderer, drawn = sheet.get_renderer(), set()
    renderer.draw_text = lambda *given, mtext=None, **more: drawn.add(mtext)  # ticks out of sight are not
    sheet.draw()
    lined = {text for text in figure.findobj(Text) if "\n" in text.get_text()}  # these come line by line
    width, height = figure.bbox.size
    assert len(drawn) > 5
    for text in drawn - {None} | lined:
        box = text.get_window_extent(renderer)
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -1, text
        assert text.get_fontsize() >= 7, text
