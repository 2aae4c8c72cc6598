"""The default recipe: what it chooses for which data, and that it says so."""

import re

import numpy as np
import pytest
from PIL import Image

import vitrail as vt
from vitrail.images.formats.sources import Dataset, Split, open_dataset
from vitrail.training.recipes import recipe
from vitrail.training.recipes.auto import RunContext, _multiplications
from vitrail.training.resolve import resolve_recipe

TWO_CORES = 2.4e10  # multiplications per second
GPU = RunContext(gpu=True)


def arrays(count, side, channels, classes=10):
    """A data set of this many images that needs the memory of one pixel."""
    pixels = np.broadcast_to(np.zeros(1, np.uint8), (count, side, side, channels))
    split = Split(np.arange(count) % classes, range(count), None, pixels)
    return Dataset("arrays", [str(k) for k in range(classes)], split, val=split)


def photos(folder, side, each=6):
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            Image.new("RGB", (side + 7, side), (40 * i, 90, 30)).save(folder / name / f"{i}.jpg")
    return folder


def minutes(data, found):
    return found.train.epochs * len(data.train) * _multiplications(found.model) / TWO_CORES / 60


@pytest.mark.parametrize("count", [100, 2_000, 60_000, 1_000_000])
@pytest.mark.parametrize(("side", "channels"), [(8, 1), (28, 1), (31, 3), (32, 3), (96, 3)])
def test_a_run_on_two_cores_is_minutes_or_has_the_fewest_epochs(count, side, channels):
    data = arrays(count, side, channels)
    found = recipe("auto", data)
    assert minutes(data, found) <= 15.5 or (found.train.epochs == 3 and found.model.width == 64)
    assert found.model.tokens <= 100
    assert found.model.channels == channels


def test_sixty_thousand_gray_images_get_a_small_model_with_a_stem_and_no_flips():
    found = recipe("auto", arrays(60_000, 28, 1))
    assert (found.model.width, found.model.embedding, found.model.tokens) == (64, "conv", 49)
    assert found.train.epochs == 10
    assert found.train.augment.flip == 0
    assert found.train.augment.rotate > 0


def test_few_images_get_more_epochs_smaller_batches_and_more_augmentation(tmp_path):
    few, many = (recipe("auto", arrays(count, 32, 3)) for count in (500, 20_000))
    assert few.train.epochs > many.train.epochs
    assert few.train.batch < many.train.batch
    assert few.train.lr < many.train.lr
    assert few.train.mixing.mixup > many.train.mixing.mixup == 0


def test_a_gpu_gets_more_of_everything_and_the_measured_recipe_where_there_is_one():
    few = arrays(5_000, 28, 1)
    on_cpu, on_gpu = recipe("auto", few), recipe("auto", few, GPU)
    assert on_gpu.model.width > on_cpu.model.width
    assert on_gpu.train.epochs > on_cpu.train.epochs
    for name, many in (("mnist", arrays(60_000, 28, 1)), ("cifar10-small", arrays(50_000, 32, 3))):
        chosen, measured = recipe("auto", many, GPU), recipe(name, many)
        assert (chosen.model, chosen.train) == (measured.model, measured.train)
        assert f"auto: {name}, measured" in chosen.notes[0]


def test_epochs_and_minutes_of_the_user_bound_the_model():
    data = arrays(10_000, 32, 3)
    short, long = (recipe("auto", data, RunContext(epochs=epochs)) for epochs in (2, 100))
    assert (short.train.epochs, long.train.epochs) == (2, 100)
    assert short.model.width > long.model.width
    quick, slow = (recipe("auto", data, RunContext(minutes=time)) for time in (1, 120))
    assert quick.model.width < slow.model.width
    assert minutes(data, quick) <= 1.2


@pytest.mark.parametrize(("side", "size"), [(20, 32), (64, 64), (100, 96), (500, 128)])
def test_the_image_size_follows_the_files(tmp_path, side, size):
    found = recipe("auto", open_dataset(photos(tmp_path / "photos", side)))
    assert found.model.size == (size, size) == found.preprocess.target
    assert found.model.embedding == "conv"
    assert min(found.model.grid) >= 7


def test_the_patch_follows_a_given_size(tmp_path):
    """With the recipe small, --size 64 left four patches along a side."""
    data = open_dataset(photos(tmp_path / "photos", 200))
    found, _ = resolve_recipe("auto", data, None, {}, size=64)
    assert (found.model.size, found.model.grid) == ((64, 64), (8, 8))
    found, _ = resolve_recipe("auto", data, None, {"model": {"size": 96}})
    assert found.model.grid == (8, 8)


def test_files_that_cannot_be_read_do_not_decide(tmp_path):
    folder = photos(tmp_path / "photos", 64)
    (folder / "ant" / "0.jpg").write_bytes(b"not an image")
    assert recipe("auto", open_dataset(folder)).model.size == (64, 64)


def test_it_says_what_it_chose_and_why():
    note = " ".join(recipe("auto", arrays(1_505, 64, 3)).notes)
    assert re.search(
        r"1,505 training images on a CPU.* width 128 and depth 6 .*stem at 64x64 .* 40 epochs", note
    )


def test_it_does_not_speak_of_a_model_that_the_user_changes():
    found, _ = resolve_recipe("auto", arrays(100, 32, 3), None, {"model": {"width": 16, "heads": 2}})
    assert "width" not in found.notes[0]


def test_a_named_model_is_the_published_one():
    named, _ = resolve_recipe("auto", arrays(500, 32, 3), None, {"model": {"name": "Ti/16@32"}})
    assert (named.model.width, named.model.embedding, named.model.patch) == (192, "linear", (16, 16))


def test_a_patch_that_does_not_fit_the_stem_drops_it():
    changed, _ = resolve_recipe("auto", arrays(500, 28, 1), None, {"model": {"patch": 7}})
    assert (changed.model.embedding, changed.model.grid) == ("linear", (4, 4))
    kept, _ = resolve_recipe("auto", arrays(500, 32, 1), None, {"model": {"patch": 8}})
    assert kept.model.embedding == "conv"


def test_it_is_the_default_and_trains(tmp_path):
    data = photos(tmp_path / "photos", 32, each=10)
    run = vt.train(data, out=tmp_path / "out", epochs=1, report=False)
    assert run.bundle.model.config.embedding == "conv"
    assert "Recipe auto" in (tmp_path / "out" / "log.txt").read_text()
