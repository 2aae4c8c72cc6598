"""The page of `vitrail walk --html`: one file with everything in it, each stage with a small picture."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING, Any

from vitrail.cli.picture import heat

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from vitrail.config import ViTConfig
    from vitrail.walkthrough import Stage

MOST_SIDE = 256  # of a picture, in pixels; larger tensors are averaged down

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d22; --dim: #5c5c66; --paper: #fdfcf9; --line: #dcd9d0;
  --card: #ffffff; --mark: #7a2f6d; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --dim: #a2a2ad; --paper: #16161a;
  --line: #34343c; --card: #1f1f25; --mark: #e79bd8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
.note { border-left: 4px solid var(--mark); padding-left: .8rem; }
section { display: flex; flex-wrap: wrap; gap: 1rem; justify-content: space-between; margin: 1rem 0;
  padding: 1rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
section > div { flex: 1 1 18rem; min-width: 0; }
h2 { margin: 0; font-size: 1rem; overflow-wrap: anywhere; }
h2 span { color: var(--dim); font-weight: normal; }
code { display: block; margin: .4rem 0; color: var(--mark); overflow-wrap: anywhere; }
p { margin: .4rem 0; }
.numbers { color: var(--dim); font-size: .85rem; }
figure { margin: 0; flex: 0 1 auto; }
img { display: block; max-width: 100%; image-rendering: pixelated; border: 1px solid var(--line); }
"""


def page(stages: list[Stage], facts: dict[str, Any], config: ViTConfig) -> str:
    """The whole page."""
    title = html.escape(f"{facts['picture']} through {facts['model']}")
    what = facts["weights"]
    where = f"In detail: block {facts['block']}, head {facts['head']}, {facts['token_name']}."
    body = "\n".join(section(stage, config) for stage in stages)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}, stage by stage</h1>
<p class="note">{html.escape(what)}</p>
<p>{html.escape(where)} Dark blue is a map's least value, yellow its greatest.</p>
{body}
</body>
</html>
"""


def section(stage: Stage, config: ViTConfig) -> str:
    """One stage: name, shape, equation, sentence, numbers, picture."""
    from vitrail.cli.walk import short, summary

    if stage.tensor.numel() <= 2:
        numbers, figure = ", ".join(short(number) for number in stage.tensor.tolist()), ""
    else:
        numbers = ", ".join(f"{name} {short(number)}" for name, number in summary(stage.tensor).items())
        drawn = enlarge(draw(stage, config))
        alt = html.escape(f"{stage.name} as a picture")
        size = f'width="{drawn.width}" height="{drawn.height}"'
        figure = f'<figure><img alt="{alt}" {size} src="{data_uri(drawn)}" /></figure>'
    shape = html.escape(" × ".join(map(str, stage.shape)))
    return f"""<section>
<div>
<h2>{html.escape(stage.name)} <span>{shape}</span></h2>
<code>{html.escape(stage.equation)}</code>
<p>{html.escape(stage.meaning)}</p>
<p class="numbers">{html.escape(numbers)}</p>
</div>
{figure}
</section>"""


# ---- pictures -------------------------------------------------------------------------------


def draw(stage: Stage, config: ViTConfig) -> Image:
    """The picture and its patches as they look; a row of attention on the grid; the rest as heat."""
    tensor, C = stage.tensor, config.channels
    if stage.name == "pixels":
        return photo(tensor)
    (h, w), (high, wide) = config.grid, config.patch_pixels
    if stage.name == "tokens.cut" and tensor.shape[1] == C * high * wide:
        gap = max(1, min(high, wide) // 8)
        sheet = tensor.new_ones(C, h * (high + gap) - gap, w * (wide + gap) - gap)  # white between them
        for number, patch in enumerate(tensor):
            top, left = number // w * (high + gap), number % w * (wide + gap)
            sheet[:, top : top + high, left : left + wide] = patch.reshape(C, high, wide)
        return photo(sheet)
    if stage.name.endswith("attention.row"):
        return heat_map(tensor[config.prefix :].reshape(h, w))
    if tensor.ndim == 3:  # the map of a stem: the mean over its channels
        return heat_map(tensor.mean(0))
    return heat_map(tensor if tensor.ndim == 2 else tensor[None])


def photo(values: Tensor) -> Image:
    """(C, H, W) from -1 to 1 as colours, or as grey."""
    from PIL import Image

    levels = ((values.float().clamp(-1, 1) + 1) * 127.5).round().byte()
    if len(levels) == 3:
        return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())
    return Image.fromarray(levels[0].numpy())


def heat_map(matrix: Tensor) -> Image:
    """A matrix in colours, from its least to its greatest value."""
    import torch
    from PIL import Image
    from torch.nn.functional import adaptive_avg_pool2d

    matrix = torch.nan_to_num(matrix.float())
    rows, columns = (min(side, MOST_SIDE) for side in matrix.shape)
    matrix = adaptive_avg_pool2d(matrix[None, None], (rows, columns))[0, 0]
    low, high = matrix.min(), matrix.max()
    levels = ((matrix - low) / (high - low).clamp_min(1e-12) * 255).round().byte()
    image = Image.fromarray(levels.numpy())
    image.putpalette([part for level in range(256) for part in heat(level / 255)])  # a byte for each value
    return image


def enlarge(image: Image) -> Image:
    """At least about 128 pixels wide or high, in whole steps, so that single numbers can be seen; a
    strip is made thick enough to see; nothing is larger than fits."""
    from PIL.Image import Resampling

    step = max(1, 128 // max(image.size))
    wide, high = (max(12, side * step) for side in image.size)
    image = image.resize((wide, high), Resampling.NEAREST)
    image.thumbnail((2 * MOST_SIDE, 2 * MOST_SIDE))
    return image


def data_uri(image: Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
