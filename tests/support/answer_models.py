"""Models of every layout for the figures about predictions, and helpers of their tests."""

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import vitrail as vt
from tests.support.models import add_noise

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
    "cut remainder": dict(size=(27, 25), remainder="cut", layer_scale=0.5),
}


def build(name="class token", **fields):
    torch.manual_seed(0)
    return add_noise(vt.ViT(vt.ViTConfig(**BASE | LAYOUTS[name] | fields)))


def images_for(model, count=2):
    torch.manual_seed(1)
    return torch.randn(count, *model.config.input_shape)


def to_pixels(images):
    """The images as uint8 pixels to draw, (B, H, W, C)."""
    return ((images - images.min()) / (images.max() - images.min()) * 255).byte().permute(0, 2, 3, 1).numpy()


def log_p(model, images, target):
    with torch.no_grad():
        return torch.log_softmax(model(images), dim=1)[torch.arange(len(images)), torch.as_tensor(target)]


def painted(image, position, patch, color=0.0):
    """The image (C, H, W) with the patch at (row, column) painted over."""
    covered = image.clone()
    (row, column), (height, width) = position, patch
    covered[:, row * height : (row + 1) * height, column * width : (column + 1) * width] = color
    return covered


def assert_legible(figure):
    """All drawn text is within the canvas and at least 7 points high."""
    sheet = FigureCanvasAgg(figure)
    renderer, drawn = sheet.get_renderer(), set()
    renderer.draw_text = lambda *args, mtext=None, **options: drawn.add(mtext)  # omits invisible ticks
    sheet.draw()
    lined = {text for text in figure.findobj(Text) if "\n" in text.get_text()}  # drawn line by line
    width, height = figure.bbox.size
    assert len(drawn) > 5
    for text in drawn - {None} | lined:
        box = text.get_window_extent(renderer)
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -1, text
        assert text.get_fontsize() >= 7, text


def one_patch_model(position):
    """A model whose logits are (0, x), where x is the first pixel of the patch at (row, column)."""
    config = vt.ViTConfig(
        **dict(width=4, depth=1, heads=1, patch=4, size=12, channels=1, classes=2),
        **dict(class_token=False, pool="flatten", pool_norm="none", position="none", norm="none"),
    )
    model = vt.ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.tokens.proj.weight[0, 0, 0, 0] = 1  # token channel 0 is the first pixel of its patch
        model.head.weight[1, (position[0] * 3 + position[1]) * 4] = 1
    return model
