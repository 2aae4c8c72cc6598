"""How a picture becomes the model's input: plain data that travels with the weights.

Always in this order: turned as its EXIF says, made 8-bit in the model's channels, resized, cut to
its centre (`pixels`); then (level * scale - mean) / std (`normalise`). On 8-bit pictures timm,
torchvision and transformers get the same, bit by bit where Pillow resizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from vitrail.errors import ConfigError, InputError
from vitrail.fields import Config, choice, declare, is_real, number, per_axis, show, sides

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image
    from torch import Tensor

MEMORY = 512 * 2**20  # bytes that an image may take until it is the model's input
STRIP = 2**20  # pixels of an image that are changed at once
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
WORDS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers for them
HALF = (0.5, 0.5, 0.5)


def per_channel(doc: str, must: str, holds: Callable[[float], bool]) -> Any:
    """A number for each channel."""

    def check(name: str, value: Any, hint: Any) -> tuple[float, ...]:
        values = value if isinstance(value, (tuple, list)) else []
        if not values or not all(is_real(one) and holds(float(one)) for one in values):
            got, do = f"{name}={show(value)}", f"Set {name} to as many numbers as the pictures have channels."
            raise ConfigError(f"{name} must be {must} for each channel.", got, do)
        return tuple(float(one) for one in values)

    return declare(doc, check, HALF)


@dataclass(frozen=True, kw_only=True)
class Preprocess(Config):
    """What is done to a picture before the model sees it. The defaults are those of Google's ViT."""

    size: int | tuple[int, int] = sides("The side in pixels of what the model gets, or (H, W)", 224)
    resize: Literal["squash", "shortest", "none"] = choice(
        "The whole picture, whatever its shape; its short side, keeping its shape; or nothing: it fits",
        default="squash",
    )
    resize_to: int | tuple[int, int] | None = sides(
        "The side that is resized to before the centre is cut out; size when not given", None
    )
    interpolation: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = choice(
        "Pillow's word for how levels are mixed", default="bilinear"
    )
    backend: Literal["pillow", "torch"] = choice(
        "Who resizes: Pillow, or torch on 8-bit levels (transformers' fast processors)", default="pillow"
    )
    crop_rounding: Literal["even", "down"] = choice(
        "Where a centre that begins at half a pixel begins: at the even one of the two beside it "
        "(torchvision, timm), or at the first (transformers)",
        default="even",
    )
    scale: float = number("What 8-bit levels are multiplied with", "above 0", lambda s: s > 0, 1 / 255)
    mean: tuple[float, ...] = per_channel("What is then subtracted", "a number", lambda m: True)
    std: tuple[float, ...] = per_channel("What is then divided by", "at least 1e-6", lambda s: s >= 1e-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size", "resize_to"):
            if value := getattr(self, name):
                self.set(name, per_axis(name, value, ("height", "width")))
        if self.resize_to == self._least:  # settings that do the same compare equal
            self.set("resize_to", None)
        if not self.crops:
            self.set("crop_rounding", "even")
        (h, w), (least_h, least_w) = self.before_crop, self._least
        lacks = self.backend == "torch" and self.interpolation not in ("bilinear", "bicubic")
        rules = [
            (len(self.mean) != len(self.std), "mean", "std", "as many numbers in std"),
            (self.resize == "none" and self.resize_to, "resize", "resize_to", "no resize_to"),
            (self.resize == "shortest" and h != w, "resize", "resize_to", "one number"),
            (h < least_h or w < least_w, "size", "resize_to", "a resize_to that fills it"),
            (lacks, "backend", "interpolation", "bilinear or bicubic"),
        ]
        for wrong, name, other, needs in rules:
            if wrong:
                got = f"{other}={show(getattr(self, other))}"
                raise ConfigError(
                    f"{name}={show(getattr(self, name))} needs {needs}.", got, f"Change {name} or {other}."
                )

    # ---- what follows from the fields -------------------------------------------------------

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def crops(self) -> bool:
        return self.resize == "shortest" or self.resize_to is not None

    @property
    def target(self) -> tuple[int, int]:
        """(H, W)."""
        return cast(tuple[int, int], self.size)

    @property
    def _least(self) -> tuple[int, int]:
        """What resize_to is when not given. With less, some pictures would not fill the crop."""
        return (max(self.target),) * 2 if self.resize == "shortest" else self.target

    @property
    def before_crop(self) -> tuple[int, int]:
        """What resizing aims at, (height, width); for shortest, the short side twice."""
        return cast(tuple[int, int], self.resize_to or self._least)

    def describe(self) -> list[str]:
        """Each step in words."""
        (H, W), (h, w) = self.target, self.before_crop
        how = f"by {self.interpolation} ({self.backend.capitalize()})"
        steps = {"squash": f"all of it to {h}x{w} {how}", "shortest": f"short side to {h} {how}"}
        return [
            f"upright, 8 bits, {MODES.get(self.channels, f'{self.channels} channels')}",
            steps.get(self.resize, f"not resized: it must be {H}x{W}"),
            *([f"centre {H}x{W}"] if self.crops else []),
            "levels / 255" if self.scale == 1 / 255 else f"levels times {self.scale:g}",
            f"minus {self.mean if len(self.mean) > 1 else self.mean[0]}",
            f"over {self.std if len(self.std) > 1 else self.std[0]}",
        ]

    # ---- pictures ---------------------------------------------------------------------------

    def pixels(self, image: Image.Image | NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The levels that the model sees, (H, W, C). An array is taken as it is; PIL images by `upright`."""
        from PIL import Image

        whole = self._whole(image)
        high, wide = whole.size[::-1] if isinstance(whole, Image.Image) else whole.shape[:2]
        (H, W), (h, w) = self.target, self._resized(high, wide)
        array = resized(whole, h, w, self.interpolation, self.backend)
        down = self.crop_rounding == "down"
        top, left = (spare // 2 if down else round(spare / 2) for spare in (h - H, w - W))
        return array[top : top + H, left : left + W].copy()

    def normalise(self, pixels: NDArray[np.uint8]) -> Tensor:
        """(level * scale - mean) / std, (H, W, C) to (C, H, W); each of the three rounded to float32."""
        import numpy as np
        import torch

        x = (pixels.astype(np.float64) * self.scale).astype(np.float32)
        x -= np.array(self.mean, np.float32)
        x /= np.array(self.std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(x.transpose(2, 0, 1)))

    def __call__(self, image: Image.Image | NDArray[np.uint8]) -> Tensor:
        """The model's input for a picture, float32 (C, H, W)."""
        return self.normalise(self.pixels(image))

    def batch(self, images: Iterable[Image.Image | NDArray[np.uint8]]) -> Tensor:
        """The model's input for some pictures, float32 (B, C, H, W)."""
        import torch

        inputs = [self(image) for image in images]
        if not inputs:
            raise InputError("A batch must hold at least one picture.", "none", "Give a list of pictures.")
        return torch.stack(inputs)

    def _whole(self, image: Any) -> Image.Image | NDArray[np.uint8]:
        """The picture as whoever resizes it wants it: to bring it from Pillow to NumPy is to copy it."""
        from PIL import Image

        stays = self.backend == "pillow" and self.channels == 3 and isinstance(image, Image.Image)
        return upright(image, 3) if stays and all(image.size) else self._array(image)

    def _array(self, image: Any) -> NDArray[np.uint8]:
        import numpy as np
        from PIL import Image

        array = levels(image, self.channels) if isinstance(image, Image.Image) else image
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
            must = "A picture must be a PIL image, or a NumPy array of levels from 0 to 255 (uint8)."
            got = f"{type(image).__name__} {getattr(image, 'dtype', '')}".strip()
            raise InputError(must, got, "Open a file with PIL.Image.open; round an array to such levels.")
        deep = array[..., None] if array.ndim == 2 else array
        if deep.ndim != 3 or deep.shape[2] != self.channels or 0 in deep.shape:
            must = f"A picture must be h high, w wide and {self.channels} deep, and not empty."
            raise InputError(must, f"the shape {array.shape}", f"Give the shape (h, w, {self.channels}).")
        return deep

    def resize_bytes(self, high: int, wide: int) -> int:
        """Memory that resizing an image takes, beside the image itself; at least what Pillow and torch take.

        Rows come first: w x high pixels are kept for the columns. Then w x h pixels, and their copies in
        NumPy; and for each row and column that comes out the weights of those that go in.
        """
        h, w = self._after_resize(high, wide)
        bands = 4 if self.channels > 1 else 1
        weights = sum(8 * (7 * max(new, old) + new) for new, old in ((h, high), (w, wide)))
        return bands * w * high + (bands + 2 * self.channels) * h * w + weights

    def _after_resize(self, high: int, wide: int) -> tuple[int, int]:
        """The long side is cut to whole pixels, as everybody does."""
        (h, w), short = self.before_crop, min(high, wide)
        if self.resize == "shortest":
            h, w = (h if side == short else int(h * side / short) for side in (high, wide))
        return h, w

    def _resized(self, high: int, wide: int) -> tuple[int, int]:
        """Height and width after resizing."""
        if self.resize == "none" and (high, wide) != self.target:
            must = f"With resize='none' the picture must be {self.target}, high and wide."
            raise InputError(must, f"{(high, wide)}", "Resize it first, or set resize to another word.")
        h, w = self._after_resize(high, wide)
        if (needed := self.resize_bytes(high, wide)) > MEMORY:
            raise InputError(
                f"an image of {high} x {wide} (height x width) would become {h} x {w} and take "
                f"{needed / 2**20:,.0f} MiB; the limit is {MEMORY / 2**20:,.0f} MiB. "
                "Cut it to a shape nearer to square, or make size smaller."
            )
        return h, w


def resized(
    picture: Image.Image | NDArray[np.uint8], h: int, w: int, interpolation: str, backend: str
) -> NDArray[np.uint8]:
    """The levels (h, w, C) of a picture, given as such or as RGB of Pillow's, in another size."""
    import numpy as np
    from PIL import Image

    how = Image.Resampling[interpolation.upper()]
    if isinstance(picture, Image.Image):
        return np.asarray(picture if picture.size == (w, h) else picture.resize((w, h), how))
    if picture.shape[:2] == (h, w):
        return picture
    if backend == "torch":
        import torch

        ours = picture if picture.flags.writeable and picture.flags.c_contiguous else picture.copy()
        x = torch.from_numpy(ours).movedim(-1, 0)[None]  # (1, C, h, w)
        x = torch.nn.functional.interpolate(x, (h, w), mode=interpolation, antialias=True)
        return cast("NDArray[np.uint8]", x[0].movedim(0, -1).numpy())
    # Other than RGB band by band: in RGBA, Pillow would weigh the colours by the fourth.
    bands = [picture] if picture.shape[2] == 3 else [picture[..., c] for c in range(picture.shape[2])]
    done = [np.asarray(Image.fromarray(band).resize((w, h), how)) for band in bands]
    return done[0] if picture.shape[2] == 3 else np.stack(done, axis=-1)


def levels(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    """A PIL image upright, as 8-bit levels (h, w, C)."""
    import numpy as np

    found = upright(image, channels)
    if found.width * found.height <= STRIP:
        return np.asarray(found)
    array = np.empty((found.height, found.width, channels)[: 2 if channels == 1 else 3], np.uint8)
    for box in strips(found):  # np.asarray would take the memory for all of it twice
        array[box[1] : box[3]] = np.asarray(found.crop(box))
    return array


def upright(image: Image.Image, channels: int) -> Image.Image:
    """A PIL image turned as its EXIF says, with 8 bits in each of these channels.

    Transparency is laid over white, as transformers does; four channels keep it. Other modes are
    changed by Pillow's `convert`, but those of more than 8 bits by `eight_bit`. What is upright
    and in its mode already is not copied.
    """
    from PIL import ExifTags

    if channels not in MODES:
        must = f"A picture of {channels} channels must be an array: PIL images have 1, 3 or 4."
        raise InputError(must, f"a PIL image of mode {image.mode}", f"Give an array (h, w, {channels}).")
    try:
        image.load()
        found = turned(image, image.getexif().get(ExifTags.Base.Orientation, 1))
    except (OSError, SyntaxError, ValueError) as error:
        must, do = "The picture must be whole.", "Save or download it again."
        raise InputError(must, f"one that Pillow cannot read ({error})", do) from error
    found = eight_bit(found)
    try:
        if found.has_transparency_data and channels != 4:
            return over_white(found, MODES[channels])
        return found if found.mode == MODES[channels] else found.convert(MODES[channels])
    except ValueError as error:
        must = f"Pillow must be able to change the picture to {MODES[channels]}."
        raise InputError(must, f"a PIL image of mode {image.mode}", "Make it RGB first.") from error


def turned(image: Image.Image, orientation: Any) -> Image.Image:
    """As EXIF's orientation says, and without that EXIF, which ImageOps.exif_transpose would write anew."""
    from PIL.Image import Transpose as T

    ways = {
        2: T.FLIP_LEFT_RIGHT,
        3: T.ROTATE_180,
        4: T.FLIP_TOP_BOTTOM,
        5: T.TRANSPOSE,
        6: T.ROTATE_270,
        7: T.TRANSVERSE,
        8: T.ROTATE_90,
    }
    if orientation not in ways:
        return image
    found = image.transpose(ways[orientation])
    found.info = {key: value for key, value in image.info.items() if key == "transparency"}
    return found


def strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Boxes of some whole rows: what is done to them one after the other takes little memory."""
    rows = max(1, STRIP // max(image.width, 1))
    for top in range(0, image.height if image.width else 0, rows):
        yield 0, top, image.width, min(top + rows, image.height)


def over_white(image: Image.Image, mode: str) -> Image.Image:
    """A transparent image on white."""
    from PIL import Image

    found = Image.new(mode, image.size)
    for box in strips(image):
        part = image.crop(box).convert("RGBA")
        part = Image.alpha_composite(Image.new("RGBA", part.size, "white"), part)
        found.paste(part.convert(mode), box)
    return found


def eight_bit(image: Image.Image) -> Image.Image:
    """16-bit grey, also in Pillow's 32-bit mode I, divided by 257, and floats from 0 to 1 times 255.

    Pillow's `convert` would cut all of these off at 255. Range is not guessed from the levels that
    happen to be there: a dark picture stays dark.
    """
    import numpy as np
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    most = 1 if image.mode == "F" else 65535
    found = Image.new("L", image.size)
    least, largest = np.inf, -np.inf
    for box in strips(image):
        array = np.asarray(image.crop(box))
        least, largest = np.minimum(least, array.min()), np.maximum(largest, array.max())
        with np.errstate(invalid="ignore"):  # of NaN; refused below
            found.paste(Image.fromarray(np.rint(array * (255 / most)).astype(np.uint8)), box)
    if all(image.size) and not (least >= 0 and largest <= most):  # not so for NaN either
        must = f"A picture of mode {image.mode} must have levels from 0 to {most}."
        raise InputError(must, f"levels from {least:g} to {largest:g}", "Bring it to 8 bits first.")
    return found
