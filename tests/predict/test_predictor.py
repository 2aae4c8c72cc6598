"""vt.Predictor: files, folders, arrays and images; the same outputs as evaluate, for any batch size."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import InputError
from vitrail.evaluation.forward import run_model
from vitrail.images.formats.folders import list_images
from vitrail.images.formats.sources import Split
from vitrail.images.loader import CorruptFiles
from vitrail.predict import Prediction, Predictor
from vitrail.predict import image_sources as sources

LABELS = ["ant", "bee", "cat"]


def photo(seed, size=(14, 11)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def bundle():
    torch.manual_seed(0)
    model = add_noise(
        vt.ViT(vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=8, channels=3, classes=3))
    )
    return vt.Bundle(model=model, labels=LABELS)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Seven images in a folder and its three subfolders."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number, subfolder in enumerate(["", "b", "", "a", "a/c", "b", ""]):
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        photo(number).save(folder / subfolder / f"{number}.png")
    return folder


def calibrated(bundle, **metrics):
    return dataclasses.replace(bundle, card=vt.Card(metrics=metrics))


# ---- outputs -----------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "workers"), [(3, 0), (3, 2), (1, 2), (32, 2)])
def test_logits_are_those_of_evaluate(bundle, photos, batch, workers):
    paths = list_images(photos)
    split = Split(np.zeros(len(paths), np.int64), list(map(str, paths)), paths)
    theirs, _ = run_model(bundle.model, split, bundle.preprocess, batch=3, corrupt=CorruptFiles("skip"))
    found = Predictor(bundle, batch=batch, workers=workers)(photos)
    assert [one.name for one in found] == list(map(str, paths))
    ours = np.stack([one.logits for one in found])
    assert np.abs(ours - theirs.numpy()).max() < 1e-5
    if batch == 3:
        assert np.array_equal(ours, theirs.numpy())  # the same batches are bit-equal


def test_int8_of_an_open_model_with_the_path_of_a_folder_as_text(bundle, photos):
    fast = Predictor(bundle, precision="int8", calibration=str(photos), min_agreement=0)
    assert fast.acceleration.precision == "int8"
    assert [one.error for one in fast(photos)] == [None] * 7


def test_one_image_as_path_image_or_array(bundle, photos, tmp_path):
    path = photos / "0.png"
    image = Image.open(path)
    predict = Predictor(bundle)
    many = predict([str(path), path, image, np.asarray(image), image])
    alone = [predict(one) for one in (str(path), path, image, np.asarray(image))]
    assert all(np.allclose(one.logits, many[0].logits, atol=1e-5) for one in (*many, *alone))
    assert [one.name for one in many] == [str(path)] * 2 + ["image 2", "image 3", "image 4"]
    with torch.no_grad():
        images = bundle.preprocess(image)[None]
        logits, pooled = bundle.model(images)[0], bundle.model.encode(images).pooled[0]
    assert np.allclose(alone[0].logits, logits, atol=1e-5)
    assert np.allclose(alone[0].embedding, pooled, atol=1e-5)
    scores = logits.double().softmax(0)
    assert alone[0].label == LABELS[scores.argmax()]
    assert alone[0].score == pytest.approx(scores.max().item(), abs=1e-6)
    top = alone[0].top(2)
    assert top[0] == (alone[0].label, alone[0].score)
    assert [label for label, _ in top] == [LABELS[i] for i in scores.argsort(descending=True)[:2]]
    assert sum(score for _, score in alone[0].top()) == pytest.approx(1)
    assert not alone[0].unsure


def test_a_batch_array_and_a_generator(bundle):
    batch = np.stack([np.asarray(photo(number)) for number in range(3)])
    predict = Predictor(bundle, batch=2)
    found = predict(batch)
    again = list(predict.stream(Image.fromarray(one) for one in batch))
    assert len(found) == 3
    assert all(np.allclose(a.logits, b.logits, atol=1e-5) for a, b in zip(found, again, strict=True))


def test_a_model_in_training_mode_predicts_in_eval_mode_and_stays_in_training_mode(photos):
    config = vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=8, channels=3, classes=3, dropout=0.5)
    predict = Predictor(vt.Bundle(model=add_noise(vt.ViT(config))), batch=2)
    before = predict(photos)
    predict.bundle.model.train()
    stream = predict.stream([photos])
    first = next(stream)
    assert predict.bundle.model.training
    assert torch.is_grad_enabled()  # also while a stream is half read
    assert all(
        np.array_equal(one.logits, two.logits) for one, two in zip(before, [first, *stream], strict=True)
    )


def test_files_are_read_while_the_model_computes(bundle, photos, monkeypatch):
    """The fourth image becomes readable only once the model has started on the first."""
    started, read, run = threading.Event(), sources.read_pixels, Predictor.run

    def wait(image, preprocess, **options):
        if image.endswith("fourth.png"):
            assert started.wait(timeout=20)
        return read(photos / "0.png", preprocess, **options)

    def start(self, pixels):
        started.set()
        return run(self, pixels)

    monkeypatch.setattr(sources, "read_pixels", wait)
    monkeypatch.setattr(Predictor, "run", start)
    names = ["first.png", "second.png", "third.png", "fourth.png", "fifth.png"]
    found = Predictor(bundle, batch=1, workers=2)(names)
    assert [(one.name, one.error) for one in found] == [(name, None) for name in names]


@pytest.mark.parametrize("workers", [0, 2])
def test_beside_a_gpu_batches_are_made_by_a_thread_of_their_own(bundle, photos, monkeypatch, workers):
    """The same predictions; and no thread stays if they are not all taken."""
    plain = Predictor(bundle, batch=3, workers=workers)(photos)
    monkeypatch.setattr(Predictor, "on_cpu", False)
    predict = Predictor(bundle, batch=3, workers=workers)
    found = predict([photos, "missing.png"])
    assert [one.name for one in found[:-1]] == [one.name for one in plain]
    assert all(np.array_equal(a.logits, b.logits) for a, b in zip(found, plain, strict=False))
    assert "No such file" in found[-1].error
    before = threading.active_count()
    stream = predict.stream([photos] * 50)
    next(stream)
    stream.close()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)  # a thread of the pool ends with the file that it reads
    assert threading.active_count() <= before


# ---- scores -------------------------------------------------------------------------------


def test_scores_use_the_temperature_and_the_threshold_of_the_file(bundle, photos, tmp_path):
    logits = np.stack([one.logits for one in Predictor(bundle)(photos)])
    scores = torch.from_numpy(logits).double().div(2.5).softmax(1).amax(1).numpy()
    threshold = float(np.sort(scores)[3])
    file = tmp_path / "model.safetensors"
    calibrated(bundle, temperature=2.5, threshold=threshold - 1e-6).save(file)
    found = Predictor(file)(photos)
    assert [one.score for one in found] == pytest.approx(list(scores), abs=1e-6)
    assert [one.unsure for one in found] == [bool(score < threshold - 1e-6) for score in scores]
    assert sum(one.unsure for one in found) == 3
    for one, row in zip(found, logits, strict=True):
        assert one.label is None if one.unsure else one.label == LABELS[row.argmax()]
        assert one.top(1) == [(LABELS[row.argmax()], one.score)]


def test_a_threshold_without_its_temperature_is_ignored(bundle, photos):
    for metrics in ({"threshold": 1.1}, {"threshold": 1.1, "temperature": float("nan")}):
        assert all(one.label for one in Predictor(calibrated(bundle, **metrics))(photos))


def test_without_labels_classes_are_numbers(bundle, photos):
    assert Predictor(dataclasses.replace(bundle, labels=None))(photos / "0.png").label in ("0", "1", "2")


def test_a_model_without_a_head_has_only_embeddings(photos):
    model = add_noise(
        vt.ViT(vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=8, channels=3, classes=0))
    )
    found = Predictor(vt.Bundle(model=model))(photos / "0.png")
    assert found.embedding.shape == (12,)
    assert (found.label, found.score, found.logits, found.unsure) == (None, None, None, False)
    with pytest.raises(InputError, match="no head"):
        found.top()


# ---- bad images ---------------------------------------------------------------------------


@pytest.fixture
def strange(tmp_path, photos):
    """A folder of good images and of everything else that may be in one."""
    folder = tmp_path / "strange"
    (folder / "b").mkdir(parents=True)
    for name in ("=1+1.png", "line\nbreak.png", "b/z.PNG", os.fsdecode(b"caf\xe9.png")):
        (folder / name).write_bytes((photos / "0.png").read_bytes())
    (folder / "broken.jpg").write_bytes(b"not an image")
    (folder / "notes.txt").write_bytes(b"not even called one")
    (folder / ".hidden.png").write_bytes(b"hidden")
    os.mkfifo(folder / "pipe.png")
    os.symlink("nowhere.png", folder / "gone.png")
    os.symlink("self.png", folder / "self.png")
    os.symlink("..", folder / "b" / "loop")
    os.symlink("..", folder / "b" / "loop.png")
    return folder


def test_a_folder_with_good_broken_and_special_files(bundle, strange, photos):
    found = {os.path.relpath(one.name, strange): one for one in Predictor(bundle, batch=2).stream(strange)}
    good = Predictor(bundle)(photos / "0.png")
    readable = ["=1+1.png", os.fsdecode(b"caf\xe9.png"), "line\nbreak.png", "b/z.PNG"]
    assert [name for name, one in found.items() if one.error is None] == readable
    assert all(np.allclose(found[name].logits, good.logits, atol=1e-5) for name in readable)
    reasons = {name: one.error for name, one in found.items() if one.error is not None}
    assert sorted(reasons) == ["broken.jpg", "gone.png", "pipe.png", "self.png"]
    assert "not an image" in reasons["broken.jpg"]
    assert reasons["gone.png"] == "No such file or directory"
    assert "a pipe or a device" in reasons["pipe.png"]
    assert found["pipe.png"].top(3) == []


def test_the_order_is_that_of_list_images(bundle, strange, photos):
    for folder in (photos, strange):
        ours = [one.name for one in Predictor(bundle).stream([folder])]
        theirs = list(map(str, list_images(folder)))
        assert [name for name in ours if name in theirs] == theirs


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("missing.png", "missing.png: No such file or directory"),
        ("", "No such file"),
        ("zero\0.png", "null"),
        (np.full((4, 4, 3), 2.0), "float64"),
        (np.zeros((4, 0, 3), np.uint8), "not be empty"),
        (Image.new("RGB", (0, 4)), "not be empty"),
        ("/dev/zero", "a pipe or a device"),
    ],
)
def test_a_bad_image_raises_and_in_a_list_has_a_reason(bundle, photos, bad, message):
    predict = Predictor(bundle)
    with pytest.raises(InputError, match=message):
        predict(bad)
    first, second, third = predict([photos / "0.png", bad, photos / "2.png"])
    assert second.error is not None
    assert second.label is second.score is second.embedding is None
    assert np.allclose(first.logits, predict(photos / "0.png").logits, atol=1e-5)
    assert np.allclose(third.logits, predict(photos / "2.png").logits, atol=1e-5)


def test_objects_that_are_not_images(bundle):
    found = Predictor(bundle)([None, 3, b"bytes"])
    assert all("An image must be a PIL image" in one.error for one in found)
    for bad in (None, 3, b"bytes", {"a": 1}):
        with pytest.raises(InputError, match=r"takes a path, a PIL image, .* a list of them, not"):
            Predictor(bundle)(bad)


def test_tensors_and_floats_are_images_as_torchvision_makes_them(bundle):
    """Channels first as a tensor; floats from 0 to 1, from which the pixels come back exactly."""
    arrays = np.stack([np.asarray(photo(number)) for number in range(3)])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    predict = Predictor(bundle)
    expected = [one.logits for one in predict(arrays)]
    for many in (
        tensors,
        tensors / 255,
        arrays / 255,
        (arrays / 255).astype(np.float32),
        list(tensors / 255),
    ):
        assert np.array_equal([one.logits for one in predict(many)], expected)
    assert np.array_equal(predict(tensors[0] / 255).logits, predict(arrays[0]).logits)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            torch.randn(2, 3, 8, 8),
            r"batch of images must be uint8, or floats from 0 to 1, .*remove Normalize",
        ),
        (np.full((2, 8, 8, 3), 255.0), "float64 from 255 to 255; convert it to uint8"),
        (np.zeros((2, 3, 8, 8), np.uint8), r"shape \(h, w, 3\), or \(3, h, w\) as a tensor; .*\(3, 8, 8\)"),
        (np.zeros((1, 2, 8, 8, 3), np.uint8), r"has the shape \(2, 8, 8, 3\)"),
    ],
)
def test_a_wrong_batch_is_one_error(bundle, images, message):
    with pytest.raises(InputError, match=message):
        Predictor(bundle)(images)


def test_empty_and_unreadable_folders_are_reported(bundle, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    [found] = Predictor(bundle)(tmp_path / "empty")
    assert found.name == str(tmp_path / "empty")
    assert "no images" in found.error
    assert Predictor(bundle)([]) == []
    (tmp_path / "shut").mkdir()
    photo(0).save(tmp_path / "z.png")
    scan = os.scandir

    def refuse(path):  # root may read everything, so permissions alone do not test this
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = Predictor(bundle)(tmp_path)
    assert [(Path(one.name).name, one.error) for one in found] == [
        ("z.png", None),
        ("shut", "Permission denied"),
    ]


def test_nan_outputs_are_reported(bundle, photos):
    import copy

    broken = copy.deepcopy(bundle.model)
    with torch.no_grad():
        broken.blocks[0].mlp.fc1.bias[0] = float("nan")
    [found] = Predictor(vt.Bundle(model=broken))([photos / "0.png"])
    assert found.label is None
    assert "NaN" in found.error


def test_a_model_is_a_predictor_with_default_preprocessing(bundle, tmp_path):
    image = Image.new("RGB", (40, 30), (200, 10, 60))
    plain = vt.Bundle(model=bundle.model)
    assert np.array_equal(Predictor(bundle.model)(image).logits, Predictor(plain)(image).logits)
    with pytest.raises(InputError, match="ViT is loaded already and takes no options"):
        Predictor(bundle.model, size=16)
    with pytest.raises(InputError, match="holds a ViT"):
        Predictor(torch.nn.Linear(2, 2))


def test_wrong_arguments_are_refused(bundle):
    with pytest.raises(InputError, match="batch must be an integer from 1"):
        Predictor(bundle, batch=0)
    with pytest.raises(InputError, match="takes no options"):
        Predictor(bundle, size=16)
    text = vt.ViT(
        vt.ViTConfig(width=12, depth=1, heads=3, input="text", vocabulary=9, size=8, patch=1, classes=2)
    )
    with pytest.raises(InputError, match="needs a model of images"):
        Predictor(vt.Bundle(model=text))
    with pytest.raises(InputError, match="top must be an integer"):
        Prediction("a", logits=np.zeros(3, np.float32)).top(0)


# ---- explain, memory --------------------------------------------------------------------


def test_explain_is_the_rollout_over_the_image(bundle, photos, tmp_path):
    from vitrail.views import rollout

    predict = Predictor(bundle)
    figure = predict.explain(photos / "0.png")
    drawn = [image.get_array() for axis in figure.axes for image in axis.get_images()]
    expected = rollout.compute(bundle.model, bundle.preprocess(Image.open(photos / "0.png"))[None])
    assert any(one.shape == (2, 2) and np.allclose(one, expected.maps[0, 0]) for one in drawn)
    assert any(one.shape == (8, 8, 3) for one in drawn)
    with pytest.raises(InputError, match="No such file"):
        predict.explain(tmp_path / "missing.png")


MEASURE = """
import sys
import torch
torch.set_num_threads(1)
from vitrail.predict import Predictor

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

early = grown = 0
for count, found in enumerate(Predictor(sys.argv[1], batch=16).stream([sys.argv[2]]), 1):
    assert found.error is None, found.error
    early = resident() if count == 500 else early
    grown = max(grown, resident() - early) if early else 0  # inside the loop: after it, much is freed
print(count, grown / 1e6)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_thousands_of_files_in_constant_memory(bundle, tmp_path):
    """Each image has 28 kB of pixels and as much in logits: if they were kept, memory would grow."""
    wide = add_noise(
        vt.ViT(vt.ViTConfig(width=8, depth=1, heads=2, patch=32, size=96, channels=3, classes=7000))
    )
    vt.Bundle(model=wide).save(tmp_path / "wide.safetensors")
    photo(0).save(tmp_path / "one.png")
    for number in range(3000):
        folder = tmp_path / "many" / f"{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(tmp_path / "one.png", folder / f"{number}.png")
    command = [sys.executable, "-c", MEASURE, tmp_path / "wide.safetensors", tmp_path / "many"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, grown = done.stdout.split()
    assert int(count) == 3000
    assert float(grown) < 30
