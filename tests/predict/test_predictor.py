"""vt.Predictor: files, folders, arrays and images; the same answers as evaluate, whatever the batch."""

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from conftest import shake
from vitrail.data.folders import pictures as listed
from vitrail.data.loader import Corrupt
from vitrail.data.sources import Split
from vitrail.errors import InputError
from vitrail.evaluation.forward import outputs_of
from vitrail.predict import Prediction, Predictor, sources

LABELS = ["ant", "bee", "cat"]


def photo(seed, size=(14, 11)):
    levels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(levels)


@pytest.fixture(scope="module")
def bundle():
    torch.manual_seed(0)
    model = shake(vt.ViT(vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=8, channels=3, classes=3)))
    return vt.Bundle(model=model, labels=LABELS)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Seven pictures in a folder and in three below it."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number, place in enumerate(["", "b", "", "a", "a/c", "b", ""]):
        (folder / place).mkdir(parents=True, exist_ok=True)
        photo(number).save(folder / place / f"{number}.png")
    return folder


def calibrated(bundle, **metrics):
    return dataclasses.replace(bundle, card=vt.Card(metrics=metrics))


# ---- the same answers -----------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "workers"), [(3, 0), (3, 2), (1, 2), (32, 2)])
def test_logits_are_those_of_evaluate(bundle, photos, batch, workers):
    paths = listed(photos)
    split = Split(np.zeros(len(paths), np.int64), list(map(str, paths)), paths)
    theirs, _ = outputs_of(bundle.model, split, bundle.preprocess, batch=3, corrupt=Corrupt("skip"))
    found = Predictor(bundle, batch=batch, workers=workers)(photos)
    assert [one.name for one in found] == list(map(str, paths))
    ours = np.stack([one.logits for one in found])
    assert np.abs(ours - theirs.numpy()).max() < 1e-5
    if batch == 3:
        assert np.array_equal(ours, theirs.numpy())  # the same batches: to the bit


def test_one_picture_however_it_comes(bundle, photos, tmp_path):
    path = photos / "0.png"
    image = Image.open(path)
    predict = Predictor(bundle)
    many = predict([str(path), path, image, np.asarray(image), image])
    alone = [predict(one) for one in (str(path), path, image, np.asarray(image))]
    assert all(np.allclose(one.logits, many[0].logits, atol=1e-5) for one in (*many, *alone))
    assert [one.name for one in many] == [str(path)] * 2 + ["picture 2", "picture 3", "picture 4"]
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


def test_an_array_of_many_and_a_generator(bundle):
    batch = np.stack([np.asarray(photo(number)) for number in range(3)])
    predict = Predictor(bundle, batch=2)
    found = predict(batch)
    again = list(predict.stream(Image.fromarray(one) for one in batch))
    assert len(found) == 3
    assert all(np.allclose(a.logits, b.logits, atol=1e-5) for a, b in zip(found, again, strict=True))


def test_a_model_in_training_answers_as_ever_and_is_left_in_training(photos):
    config = vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=8, channels=3, classes=3, dropout=0.5)
    predict = Predictor(vt.Bundle(model=shake(vt.ViT(config))), batch=2)
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
    """The fourth picture cannot be read before the model has begun with the first."""
    begun, read, run = threading.Event(), sources.levels, Predictor.run

    def wait(picture, preprocess):
        if picture.endswith("fourth.png"):
            assert begun.wait(timeout=20)
        return read(photos / "0.png", preprocess)

    def begin(self, pixels):
        begun.set()
        return run(self, pixels)

    monkeypatch.setattr(sources, "levels", wait)
    monkeypatch.setattr(Predictor, "run", begin)
    names = ["first.png", "second.png", "third.png", "fourth.png", "fifth.png"]
    found = Predictor(bundle, batch=1, workers=2)(names)
    assert [(one.name, one.error) for one in found] == [(name, None) for name in names]


# ---- how sure -------------------------------------------------------------------------------


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


def test_a_threshold_without_its_temperature_means_nothing(bundle, photos):
    for metrics in ({"threshold": 1.1}, {"threshold": 1.1, "temperature": float("nan")}):
        assert all(one.label for one in Predictor(calibrated(bundle, **metrics))(photos))


def test_without_labels_classes_are_numbers(bundle, photos):
    assert Predictor(dataclasses.replace(bundle, labels=None))(photos / "0.png").label in ("0", "1", "2")


def test_a_model_without_a_head_has_embeddings_alone(photos):
    model = shake(vt.ViT(vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=8, channels=3, classes=0)))
    found = Predictor(vt.Bundle(model=model))(photos / "0.png")
    assert found.embedding.shape == (12,)
    assert (found.label, found.score, found.logits, found.unsure) == (None, None, None, False)
    with pytest.raises(InputError, match="top needs a model that knows classes"):
        found.top()


# ---- bad pictures ---------------------------------------------------------------------------


@pytest.fixture
def strange(tmp_path, photos):
    """A folder of good pictures with all that may lie between them."""
    folder = tmp_path / "strange"
    (folder / "b").mkdir(parents=True)
    for name in ("=1+1.png", "line\nbreak.png", "b/z.PNG", os.fsdecode(b"caf\xe9.png")):
        (folder / name).write_bytes((photos / "0.png").read_bytes())
    (folder / "broken.jpg").write_bytes(b"not a picture")
    (folder / "notes.txt").write_bytes(b"not even called one")
    (folder / ".hidden.png").write_bytes(b"hidden")
    os.mkfifo(folder / "pipe.png")
    os.symlink("nowhere.png", folder / "gone.png")
    os.symlink("self.png", folder / "self.png")
    os.symlink("..", folder / "b" / "loop")
    os.symlink("..", folder / "b" / "loop.png")
    return folder


def test_a_folder_with_everything_in_it(bundle, strange, photos):
    found = {os.path.relpath(one.name, strange): one for one in Predictor(bundle, batch=2).stream(strange)}
    good = Predictor(bundle)(photos / "0.png")
    right = ["=1+1.png", os.fsdecode(b"caf\xe9.png"), "line\nbreak.png", "b/z.PNG"]
    assert [name for name, one in found.items() if one.error is None] == right
    assert all(np.allclose(found[name].logits, good.logits, atol=1e-5) for name in right)
    reasons = {name: one.error for name, one in found.items() if one.error is not None}
    assert sorted(reasons) == ["broken.jpg", "gone.png", "pipe.png", "self.png"]
    assert "not an image" in reasons["broken.jpg"]
    assert reasons["gone.png"] == "No such file or directory"
    assert "a pipe or a device" in reasons["pipe.png"]
    assert found["pipe.png"].top(3) == []


def test_the_order_is_that_of_the_data(bundle, strange, photos):
    for folder in (photos, strange):
        ours = [one.name for one in Predictor(bundle).stream([folder])]
        theirs = list(map(str, listed(folder)))
        assert [name for name in ours if name in theirs] == theirs


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("missing.png", "missing.png: No such file or directory"),
        ("", "No such file"),
        ("zero\0.png", "null"),
        (np.zeros((4, 4, 3)), "float64"),
        (np.zeros((4, 0, 3), np.uint8), "not empty"),
        (Image.new("RGB", (0, 4)), "not empty"),
        ("/dev/zero", "a pipe or a device"),
    ],
)
def test_one_bad_picture_is_an_error_and_in_a_list_a_reason(bundle, photos, bad, said):
    predict = Predictor(bundle)
    with pytest.raises(InputError, match=r"The picture must be readable\. Got .*") as caught:
        predict(bad)
    assert said in str(caught.value)
    first, second, third = predict([photos / "0.png", bad, photos / "2.png"])
    assert second.error is not None
    assert second.label is second.score is second.embedding is None
    assert np.allclose(first.logits, predict(photos / "0.png").logits, atol=1e-5)
    assert np.allclose(third.logits, predict(photos / "2.png").logits, atol=1e-5)


def test_things_that_are_no_pictures_at_all(bundle):
    found = Predictor(bundle)([None, 3, b"bytes", torch.zeros(3, 8, 8)])
    assert all("A picture must be a PIL image" in one.error for one in found)


def test_empty_and_unreadable_folders_are_not_silence(bundle, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    [found] = Predictor(bundle)(tmp_path / "empty")
    assert (found.name, found.error) == (
        str(tmp_path / "empty"),
        "A folder must hold pictures, and this one holds none.",
    )
    assert Predictor(bundle)([]) == []
    (tmp_path / "shut").mkdir()
    photo(0).save(tmp_path / "z.png")
    scan = os.scandir

    def refuse(path):  # root may read everything, so rights alone would not show it
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = Predictor(bundle)(tmp_path)
    assert [(Path(one.name).name, one.error) for one in found] == [
        ("z.png", None),
        ("shut", "Permission denied"),
    ]


def test_a_model_that_gives_no_numbers_says_so(bundle, photos):
    import copy

    broken = copy.deepcopy(bundle.model)
    with torch.no_grad():
        broken.blocks[0].mlp.fc1.bias[0] = float("nan")
    [found] = Predictor(vt.Bundle(model=broken))([photos / "0.png"])
    assert found.label is None
    assert "not a number" in found.error


def test_what_cannot_be_a_predictor(bundle):
    with pytest.raises(InputError, match="batch must be a whole number from 1"):
        Predictor(bundle, batch=0)
    with pytest.raises(InputError, match="takes no options"):
        Predictor(bundle, size=16)
    text = vt.ViT(
        vt.ViTConfig(width=12, depth=1, heads=3, input="text", vocabulary=9, size=8, patch=1, classes=2)
    )
    with pytest.raises(InputError, match="must take pictures"):
        Predictor(vt.Bundle(model=text))
    with pytest.raises(InputError, match="top must be a number"):
        Prediction("a", logits=np.zeros(3, np.float32)).top(0)


# ---- explain, and memory --------------------------------------------------------------------


def test_explain_is_the_rollout_over_the_picture(bundle, photos, tmp_path):
    from vitrail.inspect import rollout

    predict = Predictor(bundle)
    figure = predict.explain(photos / "0.png")
    drawn = [image.get_array() for axis in figure.axes for image in axis.get_images()]
    expected = rollout.compute(bundle.model, bundle.preprocess(Image.open(photos / "0.png"))[None])
    assert any(one.shape == (2, 2) and np.allclose(one, expected.maps[0, 0]) for one in drawn)
    assert any(one.shape == (8, 8, 3) for one in drawn)
    with pytest.raises(InputError, match="The picture must be readable"):
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
    grown = max(grown, resident() - early) if early else 0  # here: after the loop much is given back
print(count, grown / 1e6)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's own account of memory")
def test_thousands_of_files_in_constant_memory(bundle, tmp_path):
    """Each picture has 28 kB of levels, and as much in logits: were they kept, it would show."""
    wide = shake(vt.ViT(vt.ViTConfig(width=8, depth=1, heads=2, patch=32, size=96, channels=3, classes=7000)))
    vt.Bundle(model=wide).save(tmp_path / "wide.safetensors")
    photo(0).save(tmp_path / "one.png")
    for number in range(3000):
        place = tmp_path / "many" / f"{number % 7}"
        place.mkdir(parents=True, exist_ok=True)
        os.link(tmp_path / "one.png", place / f"{number}.png")
    command = [sys.executable, "-c", MEASURE, tmp_path / "wide.safetensors", tmp_path / "many"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, grown = done.stdout.split()
    assert int(count) == 3000
    assert float(grown) < 30
