"""`vitrail doctor --model`: planted copies, wrong labels and odd images are found by features and pixels."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from typer.testing import CliRunner

import vitrail as vt
from tests.support.command import run_command
from tests.support.digit_clip import DIGITS, FILE, scenes
from tests.support.models import add_noise
from tests.support.scenes import scene_digits
from tests.support.shared_data import shared
from vitrail.cli import app
from vitrail.evaluation.curation import SIDE, correlations, curate, embed_dataset, thumbnails
from vitrail.images.formats.sources import open_labeled


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """240 digit scenes with 8 wrong labels and 12 brightened copies in val; and what was planted."""
    folder = tmp_path_factory.mktemp("planted")
    pixels, chosen = scenes(240, seed=3)
    labels = [DIGITS[digit] for digit in scene_digits(chosen).tolist()]
    wrong, copies = {}, {}
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        name = f"{number:03}.png"
        if number < 8:
            own, label = label, DIGITS[(DIGITS.index(label) + 3) % 10]
            wrong[f"train/{label}/{name}"] = own
        save(image, folder / "train" / label / name)
        if number >= 228:
            bright = ImageEnhance.Brightness(Image.fromarray(image)).enhance(0.6)
            save(np.asarray(bright), folder / "val" / label / f"copy-{name}")
            copies[f"val/{label}/copy-{name}"] = f"train/{label}/{name}"
    save(
        np.random.default_rng(0).integers(0, 256, (24, 24), np.uint8), folder / "train" / "one" / "noise.png"
    )
    return folder, wrong, copies


def save(image, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def command(*arguments, codes=(0,)):
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code in codes, f"{result.output} {result.exception!r}"
    return result


def test_planted_problems_are_found(planted):
    folder, wrong, copies = planted
    images = embed_dataset(vt.load(FILE), open_labeled(folder), workers=0)
    found = curate(images)
    names = ["/".join(name.split("/")[-3:]) for name in images.names]
    pairs = {frozenset((names[one.first], names[one.second])) for one in found.duplicates if one.across}
    expected = {frozenset(pair) for pair in copies.items()}
    assert len(pairs & expected) >= 11
    assert len(pairs - expected) <= 2
    errors = {names[one.index]: open_labeled(folder).classes[one.suggested] for one in found.mislabeled}
    assert sum(errors.get(name) == own for name, own in wrong.items()) >= 6
    assert len(errors) <= 20
    assert "train/one/noise.png" in [names[one.index] for one in found.outliers] + list(errors)


def test_the_command_and_its_page(planted, tmp_path):
    folder = planted[0]
    page = tmp_path / "page.html"
    output = command("doctor", folder, "--model", FILE, "--html", page, codes=(0, 1)).output
    assert "probably the same image in two splits" in output
    assert "labels that may be wrong" in output
    lines = [line for line in output.splitlines() if str(tmp_path) not in line]  # paths are not broken
    assert max(map(len, lines)) <= 80
    text = page.read_text()
    assert text.count("data:image/png") >= 2 * 11 + 6
    assert "Labels that may be wrong" in text
    report = json.loads(
        command(
            "doctor", folder, "--model", FILE, "--html", tmp_path / "b.html", "--json", codes=(0, 1)
        ).output
    )
    assert len(report["near_leaks"]) >= 11
    assert {"image", "label", "suggested", "probability"} == set(report["label_errors"][0])
    counted = command("doctor", folder, "--model", FILE, "--no-features", "--json", codes=(0, 1)).output
    assert json.loads(counted)["near_leaks"] is None  # the model is not run


def test_the_same_pixels_are_reported_once(tmp_path):
    pixels, chosen = scenes(30, seed=5)
    for number, (image, digit) in enumerate(zip(pixels, scene_digits(chosen).tolist(), strict=True)):
        save(image, tmp_path / "data" / "train" / DIGITS[digit % 2] / f"{number}.png")
    save(pixels[0], tmp_path / "data" / "train" / DIGITS[scene_digits(chosen)[0] % 2] / "again.png")
    report = json.loads(
        command(
            "doctor",
            tmp_path / "data",
            "--model",
            FILE,
            "--html",
            tmp_path / "p.html",
            "--json",
            codes=(0, 1),
        ).output
    )
    assert len(report["duplicates"]) == 1
    same = {name.split("/")[-1] for name in report["duplicates"][0]}
    assert same == {"0.png", "again.png"}
    assert same not in [{name.split("/")[-1] for name in pair} for pair in report["near_duplicates"]]


def test_the_summary_without_a_page(planted, tmp_path):
    """As a command of its own, at 80 columns: the findings are those of the page, and the model's features."""
    folder, _, copies = planted
    done = run_command("doctor", folder, "--model", FILE, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])
    assert max(map(len, lines)) <= 80
    start = lines.index("GUESSES BY THE MODEL'S FEATURES")
    titles = [line for line in lines[start:] if line.endswith("):")]
    report = json.loads(run_command("doctor", folder, "--model", FILE, "--json", cwd=tmp_path).stdout)
    named = {
        "probably the same image in two splits": report["near_leaks"],
        "probably the same image twice": report["near_duplicates"],
        "labels that may be wrong": report["label_errors"],
        "unlike all other images": report["outliers"],
    }
    assert titles == [f"{title} ({len(found)}):" for title, found in named.items() if found]
    pairs = {copy.split("/")[-1]: original for copy, original in copies.items()}
    first = lines[start + 2].strip().split(" = ")  # the first pair, with both names complete
    assert first[0] == pairs[first[1].split("/")[-1]]
    assert "train: train/" not in done.stdout
    assert lines[-2:] == ["Nothing must be repaired.", "Add --html PAGE to see the images."]


def test_a_summary_without_findings(tmp_path):
    """Also of gray arrays, which a model of color images takes."""
    rng = np.random.default_rng(0)
    arrays = dict(x_train=rng.integers(0, 256, (8, 24, 24), np.uint8), y_train=np.arange(8) % 2)
    np.savez(tmp_path / "noise.npz", **arrays)
    vt.Bundle(model=add_noise(vt.create("mu/4", classes=2))).save(tmp_path / "color.safetensors")
    done = run_command("doctor", "noise.npz", "--model", "color.safetensors", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "near-duplicates, labels that may be wrong, outliers (0):\n  none found" in done.stdout


CHANGES = {
    "re-encoded": lambda image: save_jpeg(image, 40),
    "cropped": lambda image: save_jpeg(image.crop((5, 5, 59, 59)).resize((64, 64)), 85),
    "brightened": lambda image: save_jpeg(ImageEnhance.Brightness(image).enhance(1.35), 85),
}


def save_jpeg(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def test_copies_of_photographs_within_and_across_splits(tmp_path):
    """Real flowers and a real model: 12 copies of each kind, half of them in val; bench.curation has more."""
    weights = shared("data/weights/deit_tiny_imagenet1k.safetensors")
    planted = {"near_duplicates": {}, "near_leaks": {}}
    with zipfile.ZipFile(shared("data/flowers102_64.zip")) as archive:
        names = sorted(name for name in archive.namelist() if "/train/" in name and name.endswith(".jpg"))
        for number, name in enumerate(names[:120]):
            label, file = name.split("/")[-2:]
            content = archive.read(name)
            files = {f"train/{label}/{file}": content}
            if number % 10 in (0, 3, 6):
                how, across = list(CHANGES)[number % 10 // 3], number // 10 % 2
                copy = f"{'val' if across else 'train'}/{label}/{how}-{file}"
                files[copy] = CHANGES[how](Image.open(io.BytesIO(content)).convert("RGB"))
                kind = "near_leaks" if across else "near_duplicates"
                planted[kind][frozenset((copy, f"train/{label}/{file}"))] = how
            for path, data in files.items():
                (tmp_path / "data" / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "data" / path).write_bytes(data)
    done = run_command("doctor", "data", "--model", weights, "--json", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    for kind, pairs in planted.items():
        assert len(pairs) == 18
        found = {frozenset(name.partition(": ")[2] for name in pair) for pair in report[kind]}
        for how in CHANGES:
            assert len([pair for pair in pairs if pairs[pair] == how and pair in found]) >= 5  # of 6
        assert len(found - set(pairs)) <= 1


def test_bad_use(tmp_path, planted):
    result = CliRunner().invoke(app, ["doctor", str(planted[0]), "--html", str(tmp_path / "p.html")])
    assert "give --model" in str(result.exception)
    both = ["--model", str(FILE), "--no-features", "--html", str(tmp_path / "p.html")]
    result = CliRunner().invoke(app, ["doctor", str(planted[0]), *both])
    assert "leave out --no-features" in str(result.exception)
    (tmp_path / "p.html").write_text("mine")
    result = CliRunner().invoke(
        app, ["doctor", str(planted[0]), "--model", str(FILE), "--html", str(tmp_path / "p.html")]
    )
    assert "already exists" in str(result.exception)


def test_correlation_of_changed_and_of_other_images():
    pixels, _ = scenes(20, seed=2)
    images = torch.from_numpy(pixels[:, None].astype(np.float32)) / 255
    bright = (1.4 * images + 0.1).clamp(0, 1)
    cropped = images[:, :, 1:23, 1:23]
    flat = torch.full((1, 1, 24, 24), 0.4)
    small = torch.cat(
        [thumbnails(images), thumbnails(bright), thumbnails(cropped), thumbnails(flat), thumbnails(flat)]
    )
    assert small.shape[-1] == SIDE
    rows = torch.arange(20)
    assert correlations(small, torch.stack([rows, rows + 20], 1)).min() > 0.96
    assert correlations(small, torch.stack([rows, rows + 40], 1)).min() > 0.9
    assert correlations(small, torch.stack([rows, rows.roll(1)], 1)).median() < 0.8
    assert correlations(small, torch.tensor([[60, 61]])).item() == 0  # one color: nothing to compare


@pytest.mark.parametrize("count", [1, 3, 12])
def test_few_images(tmp_path, count):
    pixels, _ = scenes(count, seed=4)
    for number, image in enumerate(pixels):
        save(image, tmp_path / "train" / str(number % 2) / f"{number}.png")
    found = curate(embed_dataset(vt.load(FILE), open_labeled(tmp_path), workers=0))
    assert len(found.outliers) <= 1
