"""torch Datasets as data for vt.train and vt.evaluate."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import vitrail as vt
from vitrail.images.formats.sources import open_dataset

PIXELS = np.random.default_rng(0).integers(256, size=(12, 8, 10, 3), dtype=np.uint8)


class Images(torch.utils.data.Dataset):
    classes = ("ant", "bee", "cat")

    def __init__(self, convert=Image.fromarray, label=int, count=12):
        self.convert, self.label, self.count = convert, label, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.convert(PIXELS[index]), self.label(index % 3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Images())


def to_float(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


CONVERSIONS = {
    "PIL": Image.fromarray,
    "array": lambda pixels: pixels,
    "tensor": lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1),
    "ToTensor": to_float,
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("label", [int, np.int64, torch.tensor])
def test_images_are_read_exactly(name, label):
    data = open_dataset({"train": Images(CONVERSIONS[name], label), "val": Subset(Images(), [0, 1, 2])})
    assert data.classes == ["ant", "bee", "cat"]
    assert (data.train.images == PIXELS).all()
    assert (data.train.labels == np.arange(12) % 3).all()
    assert len(data.val) == 3


def test_a_tensor_dataset_and_a_part_that_is_held_out():
    images = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    data = open_dataset(TensorDataset(images, torch.arange(12) % 3))
    assert data.classes == ["0", "1", "2"]
    assert len(data.train) + len(data.val) == 12
    assert open_dataset(Subset(Images(), range(9))).classes == ["ant", "bee", "cat"]


def test_several_labels():
    data = open_dataset(Images(label=lambda number: torch.eye(3, dtype=torch.int64)[number]))
    assert data.multilabel


class Folder(Images):
    """As torchvision's ImageFolder."""

    transform = staticmethod(to_float)

    def __init__(self, folder):
        super().__init__()
        self.samples = []
        for index in range(12):
            path = folder / f"{index}.png"
            Image.fromarray(PIXELS[index]).resize((8 + index, 9)).save(path)  # of different sizes
            self.samples.append((str(path), index % 3))


def test_an_image_folder_is_read_by_its_files(tmp_path):
    data = open_dataset(Folder(tmp_path))
    assert data.train.paths is not None
    assert any("transform of the Dataset is not used" in note for note in data.notes)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), "Stream has no length.*map-style Dataset"),
        (DataLoader(Images()), r"pass its Dataset: vt\.train\(loader\.dataset"),
        (Images(count=0), "has no images"),
        (Images(lambda pixels: to_float(pixels) * 4 - 2), r"floats from 0 to 1, .*remove Normalize"),
        (Images(lambda pixels: "a.jpg"), "image 0 of Images .* must be a PIL image.*'a.jpg'"),
        (Images(lambda pixels: pixels[: 4 + pixels[0, 0, 0] % 3]), "differ in size"),
        (Images(lambda pixels: pixels[None]), "must have the shape"),
        (Images(label=float), "must be integers"),
        ([1, 2], r"item 0 of list .* must be \(image, label\), not 1"),
        ({"val": Images()}, "with at least train, not with the keys val"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(dataset, message):
    with pytest.raises(vt.InputError, match=message):
        open_dataset(dataset)


def test_training_and_evaluation_take_a_dataset(tmp_path):
    model = dict(width=16, depth=1, heads=1, patch=2)
    run = vt.train(Images(), out=tmp_path / "run", epochs=1, model=model, report=False)
    assert run.bundle.labels == ["ant", "bee", "cat"]
    assert vt.evaluate(run.bundle, {"train": Images(), "test": Images()}).metrics.count == 12
