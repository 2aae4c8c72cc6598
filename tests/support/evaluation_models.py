"""Models and data for tests of evaluation, and a comparison of its results."""

import math

import torch
from PIL import Image

import vitrail as vt
from tests.support.models import add_noise

DIGITS = [str(digit) for digit in range(10)]


def train_digits_bundle(digits):
    """A small model after three epochs on the digits."""
    torch.manual_seed(0)
    model = vt.ViT(vt.ViTConfig(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=10))
    bundle = vt.Bundle(model=model, labels=DIGITS)
    x = torch.stack([bundle.preprocess(image) for image in digits.train.images])
    y, optimizer = torch.from_numpy(digits.train.labels), torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(3):
        for indices in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
    model.eval()
    return bundle


def write_two_classes(folder):
    """Images of two classes in folder/data, one of them unreadable, and a model for them."""
    for name, value in (("dark", 30), ("light", 220)):
        for split in ("train", "val"):
            (folder / "data" / split / name).mkdir(parents=True)
            for number in range(3):
                image = Image.new("RGB", (9, 8), (value + number,) * 3)
                image.save(folder / "data" / split / name / f"{number}.png")
    (folder / "data" / "val" / "light" / "1.png").write_bytes(b"not an image")
    model = add_noise(vt.ViT(vt.ViTConfig(width=8, depth=1, heads=2, patch=4, size=8, channels=3, classes=2)))
    vt.Bundle(model=model, labels=["dark", "light"]).save(folder / "two.safetensors")
    return folder


def equal_results(one, other):
    """Whether two results agree to four digits, times aside: the batch size changes the order of sums."""
    match one:
        case float():
            return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
        case dict():
            names = set(one) - {"seconds"}
            return names == set(other) - {"seconds"} and all(equal_results(one[n], other[n]) for n in names)
        case list() | tuple():
            return len(one) == len(other) and all(map(equal_results, one, other))
    return one == other
