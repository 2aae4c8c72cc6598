"""`vitrail train` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import vitrail as vt
from vitrail.cli import app
from vitrail.recipes import recipes

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny_runs import everything, rows, write_arrays, write_folder

TINY = [f"--set=model.{text}" for text in ("width=16", "depth=1", "heads=2")]


def vitrail(*arguments, cwd, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "train", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
    return done


def test_digits(tmp_path, monkeypatch):
    how = ["digits", "--recipe", "digits", "--epochs=1", "--out", "runs/one", *TINY]
    said = vitrail(*how, cwd=tmp_path).stdout
    for words in (
        "Computing on ",
        "digits: 10 classes",
        "1,437 to learn from, 360 to judge by",
        "22 of 64 pictures, in 1 epoch",
        "going by one step",
        "epoch    1   loss ",
        "of 360 held-out pictures.",
        "Written: runs/one, with best.safetensors and last.safetensors.",
        "To read in a browser: runs/one/report.html",
    ):
        assert words in said, words
    out = tmp_path / "runs" / "one"
    found = sorted(p.name for p in out.iterdir())
    assert found == [
        "best.safetensors",
        "checkpoints",
        "config.json",
        "environment.json",
        "last.safetensors",
        "log.txt",
        "metrics.jsonl",
        "report.html",
    ]
    assert (rows(out)[0]["step"], rows(out)[0]["val_seen"]) == (22, 360)
    bundle = vt.load(out / "best.safetensors")
    assert (bundle.model.config.classes, bundle.labels) == (10, list("0123456789"))
    before = everything(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", *how, "--resume"])
    assert done.exit_code == 0, done.output
    assert "of 360 held-out pictures." in done.output
    assert everything(tmp_path) == before


def test_a_folder_of_pictures_then_from_the_file_it_made(tmp_path, monkeypatch):
    write_folder(tmp_path / "pets", each=8)
    (tmp_path / "pets" / "bee" / "3.png").write_bytes(b"broken")
    how = ["pets", "--epochs=2", "--batch=8", "--lr=0.01", "--seed=3", "--set=model.size=16", *TINY]
    said = vitrail(*how, "--set=corrupt=warn", "--out=first", cwd=tmp_path).stdout
    assert "are held out for validation (seed 3)." in said
    assert said.count("bee/3.png could not be read:") == 1
    assert [row["epoch"] for row in rows(tmp_path / "first")] == [1, 2]
    monkeypatch.chdir(tmp_path)
    more = [
        "--from=first/best.safetensors",
        "--set=corrupt=skip",
        "--tune=head",
        "--epochs=1",
        "--out=second",
    ]
    said = CliRunner().invoke(app, ["train", "pets", *more]).output
    assert "of which 51 learn" in said
    assert "bee/3.png" not in said
    assert said.count("1 file could not be read so far; --set corrupt=warn names them.") == 1
    first, second = (vt.load(tmp_path / out / "last.safetensors").model for out in ("first", "second"))
    assert first.config.width == second.config.width == 16


def test_a_name_a_size_lora_and_a_teacher(tmp_path, monkeypatch):
    """A model by name teaches one from its own file, larger, by updates of low rank."""
    write_arrays(tmp_path / "data.npz")
    monkeypatch.chdir(tmp_path)

    def run(*how):
        done = CliRunner().invoke(app, ["train", "data.npz", "--epochs=1", "--batch=16", *how])
        assert done.exit_code == 0, done.output
        return done.output

    run("--model=mu/4", "--set=model.depth=2", "--out=first")
    first = vt.load("first/last.safetensors")
    assert (first.model.config.width, first.model.config.depth, first.model.config.pixels) == (32, 2, (8, 8))
    assert first.model.config.position == "sincos2d"  # the recipe's
    run("--model=mu/4@16", "--out=larger")
    assert vt.load("larger/last.safetensors").preprocess.target == (16, 16)
    run("--model=mu/2", "--size=12x8", "--out=oblong")
    oblong = vt.load("oblong/last.safetensors")
    assert oblong.model.config.pixels == oblong.preprocess.target == (12, 8)
    said = run(
        *("--from=first/best.safetensors", "--size=16", "--tune=lora", "--set=lora_rank=2", "--out=second"),
        *("--teacher=first/best.safetensors", "--set=distill=soft"),
    )
    assert "soft answers, 50% of the loss" in said
    assert f"of which {2 * 2 * 3 * 32 * 2 + 99:,} learn" in said
    second = vt.load("second/last.safetensors")
    assert second.model.config.pixels == second.preprocess.target == (16, 16)
    known = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (known["train"]["tune"], known["train"]["distill"]) == ("lora", "soft")


def test_help_and_recipes():
    said = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, ["train", "--help"]).output
    for words in ("--model", "--from", "--size", "full|llrd|lora|head|bias", "--teacher", "--recipes lists"):
        assert words in said, words
    done = CliRunner().invoke(app, ["train", "--recipes"])
    assert done.exit_code == 0, done.output
    assert "digits  " in done.output
    assert [line.split()[0] for line in done.output.splitlines()] == list(recipes())
    assert all(len(line.split()) > 3 for line in done.output.splitlines())


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Data, and other things, for commands that fail before they train."""
    folder = tmp_path_factory.mktemp("there")
    write_arrays(folder / "data.npz")
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").write_text("years")
    (folder / "one").mkdir()
    (folder / "one" / "a").mkdir()
    (folder / "bad.csv").write_text("path,label\n")
    np.savez(folder / "float.npz", x=np.zeros((9, 8, 8)), y=np.arange(9) % 3)
    return folder


WRONG = [
    (["nowhere"], "vitrail: nowhere does not exist; DATA must be a folder of images with a folder for each class, a .csv,"),
    (["empty"], "vitrail: empty must hold a folder for each class"),
    (["one"], "vitrail: one has 1 class; training needs at least two classes"),
    (["bad.csv"], "vitrail: bad.csv has no rows after its header"),
    (["gone.csv"], "gone.csv does not exist"),
    (["gone.npz"], "gone.npz"),
    (["float.npz"], "vitrail: Images must be uint8 or uint16, and float.npz, x is float64"),
    (["data.npz", "--recipe=smal"], "vitrail: The recipe must be one there is. Got 'smal'. Did you mean 'small'?"),
    (["data.npz", "--set=epoch=3"], "vitrail: A run takes the fields of TrainConfig. Got epoch=3. Did you mean 'epochs'?"),
    (["data.npz", "--set=model.dept=3"], "Did you mean 'depth'?"),
    (["data.npz", "--set=augment.flips=1"], "Did you mean 'flip'?"),
    (["data.npz", "--set=epochs"], "vitrail: --set takes PATH=VALUE. Got 'epochs'."),
    (["data.npz", "--set=modle.depth=3"], "vitrail: --set takes PATH=VALUE. Got 'modle.depth=3'."),
    (["data.npz", "--set=model=3"], "vitrail: --set takes PATH=VALUE. Got 'model=3'."),
    (["data.npz", "--set=model.=3"], "vitrail: --set takes PATH=VALUE. Got 'model.=3'."),
    (["data.npz", "--set=ema=2"], "vitrail: ema must be above 0 and below 1. Got ema=2."),
    (["data.npz", "--set=betas=a,b"], "vitrail: betas must be two numbers from 0 to 1."),
    (["data.npz", "--set=seed=x"], "vitrail: seed must be"),
    (["data.npz", "--set=model.classes=9"], "vitrail: The model must have the classes of the data"),
    (["data.npz", "--lr=-1"], "vitrail: lr must be above 0 and at most 100. Got lr=-1"),
    (["data.npz", "--set=batch=30", "--set=accumulate=4"], "vitrail: accumulate must divide batch."),
    (["data.npz", "--from=nowhere.pth"], "nowhere.pth"),
    (["data.npz", "--from=a.pth", "--model=Ti/16"], "--from 'a.pth' and --model 'Ti/16'. Leave out --model to start from the file, or --from to start anew."),
    (["data.npz", "--model=Tiny"], "vitrail: A model name is size/patch"),
    (["data.npz", "--model=Ti/16"], "size 8x8 with patches of 16x16"),
    (["data.npz", "--model=Ti/4@16", "--size=8"], "vitrail: The size of the pictures must be given once. Got size=8, and name='Ti/4@16'."),
    (["data.npz", "--set=model.size=16", "--size=8"], "vitrail: The size of the pictures must be given once."),
    (["data.npz", "--size=big"], "vitrail: --size must be a number or HxW."),
    (["data.npz", "--tune=loar"], "vitrail: tune must be one of its words. Got tune='loar'. Did you mean 'lora'?"),
    (["data.npz", "--teacher=nowhere.pth"], "nowhere.pth"),
    (["data.npz", "--teacher=nowhere.pth", "--set=distill=none"], "vitrail: A teacher is there to be learned from."),
    (["data.npz", "--set=distill=soft"], "vitrail: distill needs a teacher. Got distill='soft' without one."),
    (["data.npz", "--set=batch=90", "--set=accumulate=3"], "vitrail: A batch must fall into equal parts for every process"),
    (["data.npz", "--out=full"], "vitrail: --out must be a new or empty folder, or a run's. Got full. Name another, or go on with --resume."),
    (["data.npz", "--out=/proc/vitrail"], "vitrail: The system refused /proc/vitrail: No such file or directory. Check the path, its rights and the disk."),
    (["data.npz", "--out=data.npz"], "vitrail: --out must be a new or empty folder"),
]  # fmt: skip


def test_what_is_wrong_is_one_sentence_and_code_2(there):
    """All in one process, by the command's own entry: to start one for each would take a minute."""
    program = """
import json, sys
from vitrail.cli import main
for given in json.load(sys.stdin):
    sys.argv = ["vitrail", "train", *given]
    try:
        main()
    except SystemExit as stop:
        print(stop.code, flush=True)
        print(file=sys.stderr, flush=True)
"""
    before = everything(there)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(
            [[*given, *([] if "--out" in " ".join(given) else ["--out=new"])] for given, _ in WRONG]
        ),
        cwd=there,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stderr.rstrip("\n").split("\n\n")
    assert done.stdout.split() == ["2"] * len(WRONG), list(zip(WRONG, said, strict=False))
    for (given, words), message in zip(WRONG, said, strict=True):
        assert words in message, (given, message)
        assert "\n" not in message.strip()
        assert message.startswith("vitrail: ")
    assert everything(there) == before
    assert not (there / "new").exists()


@pytest.mark.parametrize("given", ["--epochs=0", "--epochs=many", "--seed=-1", "--nonsense"])
def test_options_of_the_wrong_kind(given, there):
    done = CliRunner().invoke(app, ["train", str(there / "data.npz"), "--out", str(there / "new"), given])
    assert done.exit_code == 2
    assert given.split("=")[0] in done.output
    assert not (there / "new").exists()
