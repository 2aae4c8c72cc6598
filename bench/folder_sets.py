"""The data sets of bench.anyfolder, as folders of image files: SET/train/CLASS and SET/test/CLASS.

    python -m bench.folder_sets OUT digits outlines tiny-objects

Eight are real: they come from scikit-learn or ../shared/data. Four are made to break an assumption: outlines
(digits without their strokes), textures (which may be turned freely), letters (which a flip changes into
another class) and tiny objects (which a crop cuts off). Every image is a function of the set and its number.
"""

from __future__ import annotations

import argparse
import csv
import io
import tarfile
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
MADE_TRAIN, MADE_TEST = 4000, 2000  # images of a made set
FLOWERS = ("046", "051", "073", "074", "077", "078", "081", "088", "089", "094")  # the ten largest classes

Array = NDArray[np.uint8]
Sample = tuple[str, str, "Array | bytes"]
"""The split, the class, and the pixels or the bytes of a JPEG file."""


def write_set(name: str, folder: Path, train: int | None = None) -> Path:
    """Write a set below `folder` where it is missing, with at most `train` training images."""
    out = folder / (name if train is None else f"{name}-{train}")
    if out.exists():
        return out
    samples = list(SETS[name]())
    training = [sample for sample in samples if sample[0] == "train"]
    kept = training if train is None or train >= len(training) else some(training, train)
    partial = out.with_name(out.name + ".partial")
    for number, (split, label, data) in enumerate([*kept, *(s for s in samples if s[0] == "test")]):
        path = partial / split / label / f"{number:05d}.{'jpg' if isinstance(data, bytes) else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            Image.fromarray(data).save(path)
    partial.rename(out)
    return out


def some(samples: list[Sample], count: int) -> list[Sample]:
    """So many samples, the same ones on every machine."""
    chosen = np.random.default_rng(0).permutation(len(samples))[:count]
    return [samples[index] for index in np.sort(chosen)]


# ---- real sets --------------------------------------------------------------------------------


def digits() -> Iterator[Sample]:
    """scikit-learn's 1,797 digits of 8x8 pixels; every fifth is for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        yield "train" if number % 5 else "test", str(label), (image * 15.9).astype(np.uint8)


def mnist() -> Iterator[Sample]:
    from vitrail.images.formats.sources import open_dataset

    data = open_dataset(SHARED / "mnist")
    for split, part in (("train", data.train), ("test", data.test or data.eval_split)):
        assert part.images is not None
        for image, label in zip(part.images, part.labels, strict=True):
            yield split, str(label), np.asarray(image).reshape(28, 28)


def cifar10() -> Iterator[Sample]:
    path = next(path for path in (SHARED / "cifar10.npz", Path("cifar10.npz")) if path.exists())
    arrays = np.load(path)
    for split in ("train", "test"):
        for image, label in zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True):
            yield split, str(int(label)), image


def flowers(classes: tuple[str, ...] | None = None) -> Iterator[Sample]:
    """Oxford Flowers at 64 pixels; its validation and test images are for testing."""
    with zipfile.ZipFile(SHARED / "flowers102_64.zip") as archive:
        for name in sorted(archive.namelist()):
            *_, split, label, file = ["", "", *name.split("/")]
            if file.endswith(".jpg") and (classes is None or label in classes):
                yield "train" if split == "train" else "test", label, archive.read(name)


def hymenoptera() -> Iterator[Sample]:
    """244 ants and bees, and 153 for testing."""
    with tarfile.open(SHARED / "hymenoptera_s160.tar") as archive:
        for member in archive:
            *_, split, label, file = ["", "", *member.name.split("/")]
            if file.lower().endswith(".jpg") and (content := archive.extractfile(member)):
                yield "train" if split == "train" else "test", label, content.read()


def pets() -> Iterator[Sample]:
    """Oxford-IIIT Pet: 37 breeds, the official split."""
    with zipfile.ZipFile(SHARED / "pets_160.zip") as archive:
        names = {Path(name).name: name for name in archive.namelist()}
        for row in csv.DictReader(io.StringIO(archive.read(names["list.csv"]).decode())):
            split = "test" if row["split"] == "test" else "train"
            yield split, row["breed"], archive.read(names[row["name"] + ".jpg"])


def spoken_digits() -> Iterator[Sample]:
    """900 spoken digits as spectrograms; recordings 0 to 2 of each speaker are for testing."""
    with zipfile.ZipFile(SHARED / "fsdd_idx0-14.zip") as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".wav"):
                label, _, index = Path(name).stem.split("_")
                with wave.open(io.BytesIO(archive.read(name))) as sound:
                    samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16) / 2**15
                yield "test" if int(index) < 3 else "train", label, spectrogram(samples)


def spectrogram(samples: NDArray[np.floating]) -> Array:
    """The logarithm of the spectrum of 64 windows, low frequencies at the bottom."""
    window = 256
    starts = np.linspace(0, max(0, len(samples) - window), 64).astype(int)
    padded = np.pad(samples, (0, window))
    frames = np.stack([padded[start : start + window] for start in starts]) * np.hanning(window)
    power = np.log(np.abs(np.fft.rfft(frames, axis=1))[:, 1:129] + 1e-4).reshape(64, 64, 2).mean(2).T[::-1]
    low, high = np.percentile(power, [5, 99.5])
    return (255 * np.clip((power - low) / (high - low + 1e-9), 0, 1)).astype(np.uint8)


# ---- made sets --------------------------------------------------------------------------------


def outlines() -> Iterator[Sample]:
    """MNIST digits with their holes filled: what is left of a digit is its outline."""
    from scipy.ndimage import binary_fill_holes

    for split, label, image in mnist():
        yield split, label, (255 * binary_fill_holes(np.asarray(image) > 100)).astype(np.uint8)


def made(count: int, draw: Callable[[int, np.random.Generator], Array]) -> Iterator[Sample]:
    """So many classes, drawn in turn; each image has a generator of its own."""
    for number in range(MADE_TRAIN + MADE_TEST):
        label = number % count
        image = draw(label, np.random.default_rng([number, count]))
        yield "train" if number < MADE_TRAIN else "test", f"{label:02d}", image


def textures() -> Iterator[Sample]:
    """Eight textures of 64x64 pixels in color, each turned by any angle."""
    return made(8, draw_texture)


def draw_texture(label: int, rng: np.random.Generator) -> Array:
    """Four kinds of pattern, coarse or fine, with noise and two random colors."""
    angle, y_x = rng.uniform(0, np.pi), np.mgrid[:64, :64].astype(float)
    scale = (5.0, 7.5)[label % 2] * rng.uniform(0.9, 1.1)
    u = (np.cos(angle) * y_x[0] + np.sin(angle) * y_x[1]) / scale + rng.uniform(0, 9)
    v = (-np.sin(angle) * y_x[0] + np.cos(angle) * y_x[1]) / scale + rng.uniform(0, 9)
    pattern = (
        np.sin(2 * u),
        np.sin(2 * u) * np.sin(2 * v),
        np.maximum(np.sin(2 * u), np.sin(2 * v)),
        np.sin(2 * u + 1.5 * np.sin(v)),
    )[label // 2]
    pattern = pattern + rng.normal(0, 0.9, pattern.shape)
    one, other = rng.uniform(30, 225, (2, 3))
    mixed = one + (other - one) * np.clip(pattern / 4 + 0.5, 0, 1)[..., None]
    return mixed.astype(np.uint8)


_LETTERS = "bdpqunsz2567"


def letters() -> Iterator[Sample]:
    """Letters of 48x48 pixels that a flip or half a turn makes another one, in fonts of matplotlib."""
    return made(len(_LETTERS), draw_letter)


def draw_letter(label: int, rng: np.random.Generator) -> Array:
    from matplotlib import get_data_path

    fonts = [
        path
        for path in sorted((Path(get_data_path()) / "fonts" / "ttf").glob("*.ttf"))
        if path.name.startswith(("DejaVu", "STIXGeneral")) and "Display" not in path.name
    ]
    font = ImageFont.truetype(str(fonts[rng.integers(len(fonts))]), int(rng.integers(20, 34)))
    ink, paper = rng.integers(0, 110), rng.integers(140, 256)
    page = Image.new("L", (48, 48), int(paper))
    position = tuple(float(value) for value in 24 + rng.uniform(-5, 5, 2))
    ImageDraw.Draw(page).text(position, _LETTERS[label], int(ink), font, anchor="mm")
    page = page.rotate(float(rng.uniform(-8, 8)), Image.Resampling.BILINEAR, fillcolor=int(paper))
    noisy = np.asarray(page) + rng.normal(0, 18, (48, 48))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def tiny_objects() -> Iterator[Sample]:
    """Six shapes of 9 pixels anywhere in 96x96 pixels of clutter: most crops cut them off."""
    return made(6, draw_tiny_object)


def draw_tiny_object(label: int, rng: np.random.Generator) -> Array:
    field = Image.fromarray(rng.integers(60, 190, (12, 12, 3)).astype(np.uint8)).resize((96, 96), 3)
    draw = ImageDraw.Draw(field)
    x, y = (int(value) for value in rng.integers(2, 85, 2))
    box, color = (x, y, x + 8, y + 8), tuple(int(value) for value in rng.integers(200, 256, 3))
    middle = (x + 4, y + 4)
    match label:
        case 0:
            draw.ellipse(box, fill=color)
        case 1:
            draw.rectangle(box, fill=color)
        case 2:
            draw.polygon([(x, y + 8), (x + 8, y + 8), (x + 4, y)], fill=color)
        case 3:
            draw.line([(x, y), (x + 8, y + 8)], color, 2)
            draw.line([(x, y + 8), (x + 8, y)], color, 2)
        case 4:
            draw.line([(x, middle[1]), (x + 8, middle[1])], color, 2)
            draw.line([(middle[0], y), (middle[0], y + 8)], color, 2)
        case _:
            draw.ellipse(box, outline=color, width=2)
    return np.clip(np.asarray(field) + rng.normal(0, 6, (96, 96, 3)), 0, 255).astype(np.uint8)


SETS: dict[str, Callable[[], Iterator[Sample]]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "flowers102": flowers,
    "flowers10": lambda: flowers(FLOWERS),
    "hymenoptera": hymenoptera,
    "pets": pets,
    "spoken-digits": spoken_digits,
    "outlines": outlines,
    "textures": textures,
    "letters": letters,
    "tiny-objects": tiny_objects,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="*", default=list(SETS), choices=list(SETS), metavar="SET")
    parser.add_argument("--train", type=int, help="at most so many training images")
    args = parser.parse_args()
    for name in args.sets:
        print(write_set(name, args.out, args.train))


if __name__ == "__main__":
    main()
