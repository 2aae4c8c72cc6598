"""Which images are evaluated, and how their classes are matched: new photos, test sets alone, missing classes."""

import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.evaluation.selection import select_images
from vitrail.images.formats.sources import open_dataset

FLOWERS = ["aster", "daisy", "iris", "lily", "peony", "poppy", "rose", "sage", "tulip", "violet"]
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def bundle():
    torch.manual_seed(0)
    fields = dict(width=8, depth=1, heads=2, patch=4, size=8, channels=3, classes=10)
    return vt.Bundle(model=add_noise(vt.ViT(vt.ViTConfig(**fields))), labels=FLOWERS)


@pytest.fixture(scope="module")
def file(bundle, tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "flowers.safetensors"
    bundle.save(file)
    return file


def photos(folder, counts):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(RNG.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def expected_accuracy(bundle, folder):
    """Of all images below a folder of classes, by the model itself."""
    correct = []
    for path in sorted(folder.rglob("*.png")):
        with torch.no_grad():
            logits = bundle.model(bundle.preprocess(Image.open(path))[None])
        correct.append(FLOWERS[int(logits.argmax())] == path.parent.name)
    return np.mean(correct)


def test_progress_while_a_large_table_is_read(bundle, tmp_path):
    (tmp_path / "new.csv").write_text("path,label\n" + "a.png,iris\nb.png,rose\n" * 10_000)
    calls = []
    select_images(bundle, tmp_path / "new.csv", progress=lambda *call: calls.append(call))
    assert calls == [("reading rows", 10_000, None), ("reading rows", 20_000, None)]


# ---- images -------------------------------------------------------------------------------------


def test_all_new_photos_are_evaluated(bundle, file, tmp_path):
    """183 photos in class folders: all are evaluated, and not a held-out fifth."""
    folder = photos(tmp_path / "new", {name: 18 + (name in ("iris", "rose", "sage")) for name in FLOWERS})
    result = evaluate(bundle, folder)
    assert (result.split, result.images, result.metrics.count) == ("all", 183, 183)
    assert result.metrics.top1 == pytest.approx(expected_accuracy(bundle, folder))
    assert result.notes == []
    page = tmp_path / "page.html"
    arguments = ["evaluate", file, folder, "--json", tmp_path / "r.json", "--html", page]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "new, all 183 images" in done.output
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["split"], saved["images"]) == ("all", 183)
    assert "183 images of new (all images)" in page.read_text()


def test_splits_of_data_without_splits(bundle, tmp_path):
    """train and val are those of training; all is both of them."""
    folder = photos(tmp_path / "new", dict.fromkeys(FLOWERS, 6))
    data = open_dataset(folder)
    for split, count in {"train": len(data.train), "val": len(data.val), "all": 60}.items():
        assert evaluate(bundle, folder, split=split).images == count
    assert evaluate(bundle, data).split == "val"
    assert evaluate(bundle, data, split="all").images == 60
    assert evaluate(bundle, folder, probe=["knn"]).split == "val"
    with pytest.raises(InputError, match=r"new has no split 'test'. Choose from: train, all"):
        evaluate(bundle, folder, split="test")
    with pytest.raises(InputError, match=r"Unknown split 'everything'. Choose from: train, val, test, all"):
        evaluate(bundle, folder, split="everything")


@pytest.mark.parametrize(
    ("splits", "chosen"), [(["test"], "test"), (["val"], "val"), (["val", "test"], "test")]
)
def test_a_folder_with_test_or_val_only(bundle, splits, chosen, tmp_path):
    for split in splits:
        photos(tmp_path / "new" / split, {"rose": 3, "tulip": 4})
    result = evaluate(bundle, tmp_path / "new")
    assert (result.split, result.images) == (chosen, 7)
    assert result.metrics.top1 == pytest.approx(expected_accuracy(bundle, tmp_path / "new" / chosen))
    assert evaluate(bundle, tmp_path / "new", split="all").images == 7 * len(splits)
    with pytest.raises(InputError, match="but none of train"):
        open_dataset(tmp_path / "new")
    with pytest.raises(InputError, match=r"Probes are fitted on training images, and new has none"):
        evaluate(bundle, tmp_path / "new", probe=["knn"])


def test_tables_with_test_rows_only(bundle, tmp_path):
    photos(tmp_path / "a", {"rose": 3, "tulip": 4})
    rows = [
        {"path": str(p.relative_to(tmp_path)), "label": p.parent.name, "split": "test"}
        for p in tmp_path.rglob("*.png")
    ]
    (tmp_path / "t.csv").write_text(
        "\n".join(["path,label,split", *(",".join(row.values()) for row in rows)])
    )
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for table in ("t.csv", "t.jsonl"):
        result = evaluate(bundle, tmp_path / table)
        assert (result.split, result.images) == ("test", 7)
        assert result.metrics.top1 == pytest.approx(expected_accuracy(bundle, tmp_path / "a"))
        with pytest.raises(InputError, match="but none of train"):
            open_dataset(tmp_path / table)


def test_arrays_with_a_test_set_only(bundle, tmp_path):
    """Numbered classes are the model's by index; the last ones may be missing."""
    x, y = RNG.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8), np.arange(12) % 4
    np.savez(tmp_path / "t.npz", x_test=x, y_test=y)
    result = evaluate(bundle, tmp_path / "t.npz")
    assert (result.split, result.images, result.classes) == ("test", 12, FLOWERS)
    assert "matched by index: 0 is aster" in result.notes[0]
    with pytest.raises(InputError, match="but none of train"):
        open_dataset(tmp_path / "t.npz")
    np.savez(tmp_path / "none.npz", z=x)
    with pytest.raises(InputError, match="must hold x_train and y_train"):
        evaluate(bundle, tmp_path / "none.npz")
    for name, array in (("images-idx4", x), ("labels-idx1", y.astype(np.uint8))):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (tmp_path / "idx").mkdir(exist_ok=True)
        (tmp_path / "idx" / f"t10k-{name}-ubyte").write_bytes(header + array.tobytes())
    again = evaluate(bundle, tmp_path / "idx")
    assert (again.split, again.metrics.top1) == ("test", result.metrics.top1)


def test_one_class_or_no_images(bundle, tmp_path):
    result = evaluate(bundle, photos(tmp_path / "roses", {"rose": 5}))
    assert (result.images, result.classes) == (5, FLOWERS)
    assert result.metrics.top1 == pytest.approx(expected_accuracy(bundle, tmp_path / "roses"))
    (tmp_path / "empty" / "rose").mkdir(parents=True)
    with pytest.raises(InputError, match="empty has no images"):
        evaluate(bundle, tmp_path / "empty")


# ---- classes ------------------------------------------------------------------------------------


def test_nine_of_ten_classes(bundle, tmp_path):
    """The tenth can still be predicted, and then it is a mistake."""
    folder = photos(tmp_path / "new", dict.fromkeys([*FLOWERS[:4], *FLOWERS[5:]], 8))
    (folder / "weeds").mkdir()  # without images
    result = evaluate(bundle, folder)
    assert (result.images, result.classes) == (72, FLOWERS)
    assert result.metrics.top1 == pytest.approx(expected_accuracy(bundle, folder))
    assert [row.count for row in result.metrics.per_class] == [8] * 4 + [0] + [8] * 5
    assert result.metrics.per_class[4].recall is None
    assert result.notes[0] == "The data has images of 9 of the model's 10 classes, and none of: peony."


def test_unknown_classes_are_listed_and_can_be_mapped(bundle, file, tmp_path):
    folder = photos(tmp_path / "new", {"rose": 4, "Roses": 3, "tulp": 4})
    with pytest.raises(InputError) as caught:
        evaluate(bundle, folder)
    assert str(caught.value) == (
        "2 classes of the data are not among the model's: Roses, tulp. Map each to one of the model's, such as "
        "map={'Roses': 'rose'}, or remove it from the data. The model's 10 classes: aster, daisy, iris, lily, peony and 5 more."
    )
    done = CliRunner().invoke(app, ["evaluate", str(file), str(folder)])
    assert "one of the model's, such as --map Roses=rose, or remove" in str(done.exception)
    result = evaluate(bundle, folder, map={"Roses": "rose", "tulp": "tulip"})
    counts = {row.name: row.count for row in result.metrics.per_class}
    assert (counts["rose"], counts["tulip"], sum(counts.values())) == (7, 4, 11)
    options = ["--map", "Roses=rose", "--map", "tulp=tulip", "--json", str(tmp_path / "r.json")]
    done = CliRunner().invoke(app, ["evaluate", str(file), str(folder), *options])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "r.json").read_text())["metrics"]["top1"] == result.metrics.top1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--map", "rose"], "--map takes OLD=NEW, .* not 'rose'"),
        (["--map", "rose="], "--map takes OLD=NEW"),
        (["--map", "rose=iris", "--map", "rose=lily"], "'rose' is mapped twice"),
        (["--map", "ros=iris"], "The data has no class 'ros' to map. Did you mean 'rose'"),
        (["--map", "rose=Iriss"], "cannot be mapped to 'Iriss', .* Did you mean 'iris'"),
        (["--map", "rose=iris", "--set", "classes=0", "--probe", "knn"], "this model has none; leave it out"),
    ],
)
def test_invalid_maps(file, options, message, tmp_path):
    folder = photos(tmp_path / "new", {"rose": 4, "iris": 4})
    done = CliRunner().invoke(app, ["evaluate", str(file), str(folder), *options])
    with pytest.raises(InputError, match=message):
        raise done.exception


def test_a_model_without_labels(bundle, tmp_path):
    """Classes named by numbers are matched; other names cannot be."""
    nameless = vt.Bundle(model=bundle.model)
    result = evaluate(nameless, photos(tmp_path / "numbers", {"3": 4, "7": 4}))
    assert result.classes == [str(number) for number in range(10)]
    assert [row.count for row in result.metrics.per_class] == [0, 0, 0, 4, 0, 0, 0, 4, 0, 0]
    folder = photos(tmp_path / "names", {"rose": 4, "iris": 4})
    with pytest.raises(InputError, match=r"10 classes without names, .* map=\{'iris': '0'\}"):
        evaluate(nameless, folder)
    assert evaluate(nameless, folder, map={"rose": "6", "iris": "2"}).images == 8


def test_multi_label_data_with_some_of_the_classes(bundle, tmp_path):
    photos(tmp_path / "a", {"x": 6})
    labels = ["rose|iris", "rose", "iris", "rose|tulip", "tulip", "Rose"]
    rows = [f"a/x/{i}.png,{label}" for i, label in enumerate(labels)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    result = evaluate(bundle, tmp_path / "t.csv", map={"Rose": "rose"})
    counts = {row.name: row.count for row in result.metrics.per_class}
    assert (counts["rose"], counts["iris"], counts["tulip"], counts["lily"]) == (4, 2, 2, 0)
    assert result.evaluated.labels.shape == (6, 10)
