"""vt.evaluate and `vitrail evaluate`: one pass, any batch size, any number of processes."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail as vt
from conftest import shake
from vitrail.cli import app
from vitrail.data.sources import Dataset, open_data
from vitrail.errors import InputError
from vitrail.evaluation.forward import outputs_of
from vitrail.evaluation.run import evaluate

DIGITS = [str(digit) for digit in range(10)]


@pytest.fixture(scope="module")
def digits():
    return open_data("digits")


@pytest.fixture(scope="module")
def bundle(digits):
    """A small model that has learnt something: three times through the digits."""
    torch.manual_seed(0)
    model = vt.ViT(vt.ViTConfig(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=10))
    bundle = vt.Bundle(model=model, labels=DIGITS)
    x = torch.stack([bundle.preprocess(image) for image in digits.train.images])
    y, steps = torch.from_numpy(digits.train.labels), torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(3):
        for some in torch.randperm(len(x)).split(32):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            steps.step()
    model.eval()
    return bundle


@pytest.fixture(scope="module")
def file(bundle, tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "digits.safetensors"
    bundle.save(file)
    return file


@pytest.fixture
def folder(tmp_path):
    """Pictures of two classes, one of them no picture at all, and a model for them."""
    for name, level in (("dark", 30), ("light", 220)):
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for number in range(3):
            for split in ("train", "val"):
                Image.new("RGB", (9, 8), (level + number,) * 3).save(
                    tmp_path / "data" / split / name / f"{number}.png"
                )
    (tmp_path / "data" / "val" / "light" / "1.png").write_bytes(b"no picture")
    model = shake(vt.ViT(vt.ViTConfig(width=8, depth=1, heads=2, patch=4, size=8, channels=3, classes=2)))
    vt.Bundle(model=model, labels=["dark", "light"]).save(tmp_path / "two.safetensors")
    return tmp_path


def run(*arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "80"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def alike(one, other):
    """The same to four digits: batches of another size are added up in another order by the machine."""
    match one:
        case float():
            return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
        case dict():
            names = set(one) - {"seconds"}
            return names == set(other) - {"seconds"} and all(alike(one[n], other[n]) for n in names)
        case list() | tuple():
            return len(one) == len(other) and all(map(alike, one, other))
    return one == other


# ---- the same, however it is computed -------------------------------------------------------


def test_the_numbers_are_those_of_the_model(bundle, digits):
    found = evaluate(bundle, digits)
    with torch.no_grad():
        logits = bundle.model(torch.stack([bundle.preprocess(image) for image in digits.val.images]))
    right = (logits.argmax(1).numpy() == digits.val.labels).sum()
    assert found.scores.top1 == right / 360
    assert 0.3 < found.scores.top1 < 1
    assert (found.split, found.pictures, found.scores.count, found.classes) == ("val", 360, 360, DIGITS)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(digits.val.labels)).item()
    assert found.scores.loss == pytest.approx(loss, rel=1e-5)
    assert (found.probes, found.real, found.corrupt, found.notes) == ([], None, {}, [])
    assert found.seconds > 0
    names = dict(zip(digits.val.names, digits.val.labels, strict=True))
    assert all(names[one.name] == int(one.was) for one in found.scores.mistakes)


def test_batches_of_any_size(bundle, digits):
    few = dataclasses.replace(digits, train=digits.train.take(np.arange(120)))
    first, *others = (
        evaluate(bundle, few, batch=batch, probe=["knn", "fewshot"]).as_dict() for batch in (128, 7, 1)
    )
    assert len(first["probes"]) == 3 * (3 + 2)
    assert all(alike(other, first) for other in others)


@pytest.mark.parametrize("batch", [7, 128])
def test_parts_of_any_number_of_processes(bundle, digits, batch):
    whole, kept = outputs_of(bundle.model, digits.val, bundle.preprocess, batch=batch)
    for ranks in (2, 5):
        parts = [
            outputs_of(bundle.model, digits.val, bundle.preprocess, batch=batch, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        sums = [part for part in parts if part[0].shape == whole.shape]
        assert torch.equal(sum(rows for rows, _ in sums), whole)
        assert torch.equal(sum(one for _, one in parts), kept)


def test_two_processes_give_what_one_gives(folder):
    """The second has no batch of its own in the split of four pictures; a corrupt one is known to both."""
    script = folder / "both.py"
    script.write_text(
        "import dataclasses, json, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "import torch.distributed as dist\n"
        "from vitrail.evaluation.run import evaluate\n"
        "if len(sys.argv) > 2:\n"
        "    dist.init_process_group('gloo', init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)\n"
        "found = [evaluate('two.safetensors', 'data', batch=b, probe=['knn'], workers=0).as_dict() for b in (2, 64)]\n"
        "open(f'{sys.argv[1]}.json', 'w').write(json.dumps(found))\n"
        "if dist.is_initialized():\n"
        "    dist.destroy_process_group()\n"  # left to the end of Python, its threads may abort
    )
    address = (folder / "meeting").as_uri()  # a file: no port that somebody else may take
    started = [
        subprocess.Popen([sys.executable, script.name, *arguments], cwd=folder)
        for arguments in (["0", address], ["1", address], ["alone"])
    ]
    assert [one.wait(120) for one in started] == [0, 0, 0]
    first, second, alone = (
        [{**one, "seconds": 0} for one in json.loads((folder / f"{name}.json").read_text())]
        for name in ("0", "1", "alone")
    )
    assert alike(first, second)
    assert alike(first, alone)
    assert list(alone[0]["corrupt"]) == ["val/light/1.png"]
    assert (alone[0]["pictures"], alone[0]["scores"]["count"]) == (6, 5)


# ---- which class is which -------------------------------------------------------------------


def test_classes_in_another_order_are_matched_by_name(bundle, digits):
    straight = evaluate(bundle, digits)
    order = np.random.default_rng(0).permutation(10)
    labels = np.argsort(order)[digits.val.labels]  # class order[i] is now number i
    turned = dataclasses.replace(
        digits, classes=[DIGITS[i] for i in order], val=dataclasses.replace(digits.val, labels=labels)
    )
    found = evaluate(bundle, turned)
    assert found.notes == ["The data has the model's classes in another order; they are matched by name."]
    assert found.scores.top1 == straight.scores.top1
    assert alike(found.as_dict()["scores"]["mistakes"], straight.as_dict()["scores"]["mistakes"])
    assert {row.name: row for row in found.scores.per_class} == {
        row.name: row for row in straight.scores.per_class
    }


def test_classes_without_names_are_matched_by_number(bundle, digits):
    straight = evaluate(bundle, digits).scores.top1
    named = dataclasses.replace(bundle, labels=[f"digit {name}" for name in DIGITS])
    found = evaluate(named, digits)
    assert found.scores.top1 == straight
    assert found.notes == ["The data's classes have no names; they are matched by number: 0 is digit 0."]
    coded = dataclasses.replace(digits, classes=[f"n0000000{digit}" for digit in range(10)])
    assert "n00000000 is digit 0" in evaluate(named, coded).notes[0]
    assert evaluate(dataclasses.replace(bundle, labels=None), coded).notes == []


def test_other_classes_are_an_error(bundle, digits):
    named = dataclasses.replace(digits, classes=[*DIGITS[:8], "eight", "nine"])
    with pytest.raises(
        InputError,
        match=r"^The model must have the classes of the data. Got in the model alone 8, 9, in the data alone eight, nine. Rename the data's classes, or the model's labels.$",
    ):
        evaluate(bundle, named)
    fewer = dataclasses.replace(digits, classes=DIGITS[:9])
    with pytest.raises(
        InputError,
        match=r"^The model must have the classes of the data. Got a model of 10 for data of 9. Train a head for these, or load the model with classes=0 and probe its features.$",
    ):
        evaluate(bundle, fewer)
    twice = dataclasses.replace(bundle, labels=[*DIGITS[:9], "8"])
    with pytest.raises(InputError, match="Got in the model alone a name twice, in the data alone nine"):
        evaluate(twice, dataclasses.replace(digits, classes=[*DIGITS[:9], "nine"]))


# ---- splits, several classes, ReaL, features alone ------------------------------------------


def test_which_split(bundle, digits):
    some = digits.val.take(np.arange(20))
    three = dataclasses.replace(digits, test=some)
    assert [evaluate(bundle, three, split=s).pictures for s in (None, "val", "train")] == [20, 360, 1437]
    assert evaluate(bundle, three).split == "test"
    with pytest.raises(
        InputError,
        match=r"^The split must be one that holds pictures. Got 'tset', which digits does not have. Did you mean 'test'\? There is: train, val, test.$",
    ):
        evaluate(bundle, three, split="tset")
    with pytest.raises(InputError, match="There is: train, val"):
        evaluate(bundle, digits, split="test")


def test_several_classes(bundle, digits):
    def many(split):
        return dataclasses.replace(split, labels=np.eye(10, dtype=np.int64)[split.labels])

    data = Dataset("many", DIGITS, many(digits.train), val=many(digits.val))
    found = evaluate(bundle, data)
    assert found.scores.mean_ap > 0.4
    assert found.calibration is found.scores.top1 is None
    with pytest.raises(
        InputError,
        match=r"^Probes need one class for each picture. Got many, where a picture can show several. Leave out the probes.$",
    ):
        evaluate(bundle, data, probe=["knn"])


def test_real(bundle, digits):
    real = [[int(label), 3] if label else [] for label in digits.val.labels]
    order = [DIGITS[9 - i] for i in range(10)]  # ReaL counts as the model does, not as the data does
    turned = dataclasses.replace(
        digits, classes=order, val=dataclasses.replace(digits.val, labels=9 - digits.val.labels)
    )
    for data in (digits, turned):
        found = evaluate(bundle, data, real=real)
        said = outputs_of(bundle.model, digits.val, bundle.preprocess)[0].argmax(1).tolist()
        hits = [s in row for s, row in zip(said, real, strict=True) if row]
        assert (found.real.accuracy, found.real.count) == (sum(hits) / len(hits), len(hits))


def test_a_model_without_a_head_can_be_probed(file, digits):
    bare = vt.load(file, classes=0)
    found = evaluate(bare, digits, probe="knn", layers="all")
    assert found.scores is None
    assert {row.layer for row in found.probes} == {0, 1}
    assert max(row.top1 for row in found.probes) > 0.5
    assert evaluate(bare, digits, probe=["knn"], split="train").notes == [
        "The probes are judged by the pictures they were fitted on."
    ]
    with pytest.raises(
        InputError, match=r"^A model without a head can only be probed. Got no probe. Ask for knn or linear.$"
    ):
        evaluate(bare, digits)


def test_what_does_not_fit(bundle, digits, tiny):
    with pytest.raises(
        InputError,
        match=r"^The pictures must have the model's 2 channels. Got 1 in digits. Load the model with channels=1.$",
    ):
        evaluate(vt.Bundle(model=tiny), digits)
    with pytest.raises(InputError, match=r"batch must be a whole number from 1 to .*, not 0"):
        evaluate(bundle, digits, batch=0)
    with pytest.raises(
        InputError, match=r"^A precision must be above 0 and at most 1. Got 0. Such as 0.95.$"
    ):
        evaluate(bundle, digits, precision=0)
    text = vt.ViTConfig(width=8, depth=1, heads=2, classes=10, input="text", vocabulary=9, patch=1, size=4)
    with pytest.raises(
        InputError, match=r"^The model must take pictures. Got one that takes text. Use another.$"
    ):
        evaluate(vt.Bundle(model=vt.ViT(text)), digits)


def test_features_that_would_not_fit_in_memory(bundle, digits, monkeypatch):
    monkeypatch.setattr("vitrail.evaluation.run.MOST_BYTES", 100_000)
    with pytest.raises(
        InputError,
        match=r"^Features must fit in memory. Got 74 numbers for each of 360 pictures. Probe fewer layers, or fewer pictures.$",
    ):
        evaluate(bundle, digits, probe=["knn"], layers="all")


def test_nothing_that_can_be_read(folder):
    for picture in (folder / "data" / "val").rglob("*.png"):
        picture.write_bytes(b"no picture")
    with pytest.raises(
        InputError,
        match=r"^There must be pictures that can be read. Got 6 in val of data, none of which could. The first: ",
    ):
        evaluate(folder / "two.safetensors", folder / "data")


# ---- the command ----------------------------------------------------------------------------


def test_the_command_on_digits(file, bundle, digits, tmp_path):
    out, new = tmp_path / "out.json", tmp_path / "calibrated.safetensors"
    done = run(file, "digits", "--probe", "knn,fewshot", "--layers", "0,1", "--json", out, "--calibrate", new)
    said = done.stdout
    assert done.exit_code == 0
    assert max(len(line) for line in said.splitlines() if str(new) not in line) <= 80
    found = evaluate(bundle, digits, probe=["knn", "fewshot"], layers=[0, 1])
    assert f"{100 * found.scores.top1:.2f} %, {round(360 * found.scores.top1)} right" in said
    for words in (
        "digits, val: 360 pictures",
        "Classes",
        "Worst mistakes",
        "Most often confused",
        "Probes: top-1 in %",
        "k 200",
        "10 each",
        "don't know",
    ):
        assert words in said, words
    assert f"with temperature {found.calibration.temperature:.3f}, fitted on val" in " ".join(said.split())
    written = json.loads(out.read_text())
    assert written.pop("model") == str(file)
    assert alike(written, json.loads(json.dumps(found.as_dict())))
    metrics = vt.load(new).card.metrics
    assert metrics["temperature"] == pytest.approx(found.calibration.temperature)
    assert metrics["threshold"] == pytest.approx(found.calibration.threshold.score)
    again = run(new, "digits").stdout
    assert re.search(r"as stored +ECE ", again)
    assert "Probes" not in again


def test_corrupt_pictures_are_named_and_the_code_is_1(folder):
    done = run(folder / "two.safetensors", folder / "data")
    assert done.exit_code == 1
    assert "not read: val/light/1.png: " in done.stdout
    assert re.search(r"judged +5; 1 could not be read", done.stdout)


def test_wrong_use(file, tmp_path):
    (tmp_path / "old.json").write_text("mine")
    for arguments, words in (
        (["--json", tmp_path / "old.json"], "--json must name a new file"),
        (["--calibrate", tmp_path / "x.bin"], "--calibrate must name a file that ends in .safetensors"),
        (["--layers", "0,x"], "not '0,x'"),
        (
            ["--probe", "knn", "--layers", "0,7"],
            'layers must be "all" or block numbers from 0 to 1. Got [0, 7].',
        ),
        (["--probe", "svm"], "A probe is one of"),
        (["--set", "classes=0"], "A model without a head can only be probed."),
        (
            ["--set", "classes=0", "--probe", "knn", "--calibrate", tmp_path / "y.safetensors"],
            "A temperature needs a model with a head, and one class for each picture. Got digits. Leave out --calibrate.",
        ),
    ):
        with pytest.raises(InputError) as caught:
            run(file, "digits", *arguments)
        assert words in str(caught.value)
    assert (tmp_path / "old.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json"]


def test_as_a_user_runs_it(file, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "evaluate", file, "no-data"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("vitrail: no-data does not exist; DATA must be a folder of images")
    assert done.stdout == ""
