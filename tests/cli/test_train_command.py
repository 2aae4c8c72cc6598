"""`vitrail train`: its output, run directory and errors."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import vitrail as vt
from tests.support.command import run_command
from tests.support.tiny_runs import file_hashes, rows, write_arrays, write_folder
from vitrail.cli import app
from vitrail.training.recipes import recipes

TINY = [f"--set=model.{text}" for text in ("width=16", "depth=1", "heads=2")]


def vitrail(*arguments, cwd, code=0):
    done = run_command("train", *arguments, cwd=cwd, columns=100, OMP_NUM_THREADS="1")
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
    return done


def test_digits(tmp_path, monkeypatch):
    options = ["digits", "--recipe", "digits", "--epochs=1", "--out", "runs/one", *TINY]
    output = vitrail(*options, cwd=tmp_path).stdout
    for text in (
        "Computing on ",
        "digits: 10 classes",
        "1,437",
        "22 of 64 images",
        "epoch   1  loss ",
        "on 360 held-out images, after epoch 1 of 1",
        "Saved runs/one/best.safetensors",
        "Saved runs/one/last.safetensors",
        "Saved runs/one/report.html",
    ):
        assert text in output, text
    out = tmp_path / "runs" / "one"
    assert sorted(path.name for path in out.iterdir()) == [
        "best.safetensors",
        "checkpoints",
        "config.json",
        "environment.json",
        "fingerprint.npz",
        "last.safetensors",
        "log.txt",
        "metrics.jsonl",
        "report.html",
    ]
    assert (rows(out)[0]["step"], rows(out)[0]["val_images"]) == (22, 360)
    bundle = vt.load(out / "best.safetensors")
    assert (bundle.model.config.classes, bundle.labels) == (10, list("0123456789"))
    before = file_hashes(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", *options, "--resume"])
    assert done.exit_code == 0, done.output
    assert "on 360 held-out images, after epoch 1 of 1" in done.output
    assert file_hashes(tmp_path) == before


def test_a_folder_of_images_then_fine_tuning(tmp_path, monkeypatch):
    write_folder(tmp_path / "pets", each=8)
    (tmp_path / "pets" / "bee" / "3.png").write_bytes(b"broken")
    options = ["pets", "--epochs=2", "--batch=8", "--lr=0.01", "--seed=3", "--set=model.size=16", *TINY]
    output = vitrail(*options, "--set=corrupt=warn", "--out=first", cwd=tmp_path).stdout
    assert "images are held out for validation, chosen by their content (val_fraction 0.2)." in output
    assert output.count("bee/3.png could not be read:") == 1
    assert [row["epoch"] for row in rows(tmp_path / "first")] == [1, 2]
    monkeypatch.chdir(tmp_path)
    more = [
        "--from=first/best.safetensors",
        "--set=corrupt=skip",
        "--tune=head",
        "--epochs=1",
        "--out=second",
    ]
    output = CliRunner().invoke(app, ["train", "pets", *more]).output
    assert "51 of them trained" in output
    assert "bee/3.png" not in output
    assert output.count("1 file could not be read") == 1
    first, second = (vt.load(tmp_path / out / "last.safetensors").model for out in ("first", "second"))
    assert first.config.width == second.config.width == 16


def test_model_name_size_lora_and_teacher(tmp_path, monkeypatch):
    """Train a model by name; then fine-tune it with LoRA at a larger size, with itself as the teacher."""
    write_arrays(tmp_path / "data.npz")
    monkeypatch.chdir(tmp_path)

    def run(*options):
        done = CliRunner().invoke(app, ["train", "data.npz", "--epochs=1", "--batch=16", *options])
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
    output = run(
        *("--from=first/best.safetensors", "--size=16", "--tune=lora", "--set=lora_rank=2", "--out=second"),
        *("--teacher=first/best.safetensors", "--set=distill=soft"),
    )
    assert "soft distillation, 50% of the loss" in output
    assert f"{2 * 2 * 3 * 32 * 2 + 99:,} of them trained" in output
    second = vt.load("second/last.safetensors")
    assert second.model.config.pixels == second.preprocess.target == (16, 16)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (config["train"]["tune"], config["train"]["distill"]) == ("lora", "soft")


def test_help_and_recipes():
    output = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, ["train", "--help"]).output
    for text in ("--model", "--from", "--size", "full|llrd|lora|head|bias", "--teacher", "see --recipes"):
        assert text in output, text
    done = CliRunner().invoke(app, ["train", "--recipes"])
    assert done.exit_code == 0, done.output
    assert "digits  " in done.output
    assert [line.split()[0] for line in done.output.splitlines()] == list(recipes())
    assert all(len(line.split()) > 3 for line in done.output.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and other files for commands that fail before training."""
    folder = tmp_path_factory.mktemp("folder")
    write_arrays(folder / "data.npz")
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").write_text("years")
    (folder / "one").mkdir()
    (folder / "one" / "a").mkdir()
    (folder / "bad.csv").write_text("path,label\n")
    np.savez(folder / "float.npz", x=np.zeros((9, 8, 8)), y=np.arange(9) % 3)
    return folder


WRONG = [  # options, and a pattern in the message
    (["nowhere"], "nowhere does not exist"),
    (["empty"], "empty .*folder for each class"),
    (["one"], "one .*1 class.*at least two"),
    (["bad.csv"], "bad.csv has no rows"),
    (["gone.csv"], "gone.csv does not exist"),
    (["gone.npz"], "gone.npz"),
    (["float.npz"], "uint8 or uint16, .*float.npz, x is float64"),
    (["data.npz", "--recipe=smal"], "'smal'.*Did you mean 'small'"),
    (["data.npz", "--set=epoch=3"], "no field 'epoch'.*Did you mean 'epochs'"),
    (["data.npz", "--set=out=x"], "no field 'out'"),
    (["data.npz", "--set=learning_rate=1"], "'learning_rate'; here it is called 'lr'"),
    (["data.npz", "--set=mixup=1"], "--set mixing.mixup=VALUE"),
    (["data.npz", "--set=hflip=1"], "--set augment.flip=VALUE"),
    (["data.npz", "--set=ema=0"], "--set ema=none to switch it off"),
    (["data.npz", "--learning-rate=1"], "no option --learning-rate; use --lr"),
    (["data.npz", "--weight-decay", "1"], "no option --weight-decay; use --set weight_decay=VALUE"),
    ([], "training needs data"),
    (["--resume"], "no run to resume in new"),
    (["data.npz", "--set=model.dept=3"], "Did you mean 'depth'"),
    (["data.npz", "--set=augment.flips=1"], "Did you mean 'flip'"),
    (["data.npz", "--set=epochs"], "--set takes NAME=VALUE.*'epochs'"),
    (["data.npz", "--set=modle.depth=3"], "--set takes NAME=VALUE.*'modle.depth=3'"),
    (["data.npz", "--set=model=3"], "--set takes NAME=VALUE.*'model=3'"),
    (["data.npz", "--set=model.=3"], "--set takes NAME=VALUE.*'model.=3'"),
    (["data.npz", "--set=ema=2"], "ema must be above 0 and below 1"),
    (["data.npz", "--set=betas=a,b"], "betas must be two numbers"),
    (["data.npz", "--set=seed=x"], "seed must be"),
    (["data.npz", "--set=model.classes=9"], "classes"),
    (["data.npz", "--lr=-1"], "lr must be above 0 and at most 100"),
    (["data.npz", "--batch=all"], "or auto"),
    (["data.npz", "--set=batch=30", "--set=accumulate=4"], "accumulate"),
    (["data.npz", "--from=nowhere.pth"], "nowhere.pth"),
    (["data.npz", "--from=a.pth", "--model=Ti/16"], "--from a.pth and --model Ti/16"),
    (["data.npz", "--model=Tiny"], "Tiny"),
    (["data.npz", "--model=Ti/16"], "8.*16"),
    (["data.npz", "--model=Ti/4@16", "--size=8"], "size.* twice|size.* once"),
    (["data.npz", "--set=model.size=16", "--size=8"], "size.* twice|size.* once"),
    (["data.npz", "--size=big"], "--size must be .*'big'"),
    (["data.npz", "--tune=loar"], "'loar'.*Did you mean 'lora'"),
    (["data.npz", "--teacher=nowhere.pth"], "nowhere.pth"),
    (["data.npz", "--teacher=nowhere.pth", "--set=distill=none"], "teacher"),
    (["data.npz", "--set=distill=soft"], "distill.* needs a teacher"),
    (["data.npz", "--set=batch=90", "--set=accumulate=3"], "(?i)batch"),
    (["data.npz", "--out=full"], "full.*--resume"),
    (["data.npz", "--out=/proc/vitrail"], r"/proc/vitrail.* No such file or directory"),
    (["data.npz", "--out=data.npz"], "--out|data.npz"),
]  # fmt: skip


def test_wrong_use_is_one_message_and_exit_code_2(folder):
    """All in one process: to start one for each would take a minute."""
    program = """
import json, sys
from vitrail.cli import main
for options in json.load(sys.stdin):
    sys.argv = ["vitrail", "train", *options]
    try:
        main()
    except SystemExit as stop:
        print(stop.code, flush=True)
        print(file=sys.stderr, flush=True)
"""
    before = file_hashes(folder)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(
            [[*options, *([] if "--out" in " ".join(options) else ["--out=new"])] for options, _ in WRONG]
        ),
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    messages = done.stderr.rstrip("\n").split("\n\n")
    assert done.stdout.split() == ["2"] * len(WRONG), list(zip(WRONG, messages, strict=False))
    for (options, pattern), message in zip(WRONG, messages, strict=True):
        assert re.search(pattern, message), (options, message)
        assert "\n" not in message.strip()
        assert message.startswith("vitrail: ")
    assert file_hashes(folder) == before
    assert not (folder / "new").exists()


@pytest.mark.parametrize("option", ["--epochs=0", "--epochs=many", "--seed=-1", "--nonsense"])
def test_invalid_option_values(option, folder):
    done = CliRunner().invoke(app, ["train", str(folder / "data.npz"), "--out", str(folder / "new"), option])
    assert done.exit_code == 2
    assert option.split("=")[0] in done.output
    assert not (folder / "new").exists()


def test_dry_run_prints_plan_and_settings_and_writes_nothing(tmp_path):
    options = ["digits", "--recipe", "digits", "--epochs=1", "--out", "run", *TINY]
    done = vitrail(*options, "--dry-run", "--lr=0.002", cwd=tmp_path)
    for text in ("Computing on ", "22 of 64 images", "lr ", "0.002", "model.width", "16", "preprocess.size"):
        assert text in done.stdout, text
    assert "epoch   1" not in done.stdout
    assert list(tmp_path.iterdir()) == []
    quiet = vitrail(*options, "--dry-run", "--quiet", cwd=tmp_path).stdout
    assert "Computing" not in quiet
    assert "model.width" in quiet


@pytest.mark.slow
def test_dry_run_refuses_what_a_run_refuses(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for options in (["digits", "--lr=-3"], ["digits", "--out", "full"], [], ["digits", "--patience=0"]):
        dry = vitrail(*options, "--dry-run", cwd=tmp_path, code=2).stderr
        assert dry == vitrail(*options, cwd=tmp_path, code=2).stderr
    assert "remove --resume" in vitrail("digits", "--dry-run", "--resume", cwd=tmp_path, code=2).stderr


def test_quiet_prints_the_result_only(tmp_path):
    options = ["digits", "--recipe", "digits", "--epochs=1", "--out", "run", *TINY]
    done = vitrail(*options, "--quiet", cwd=tmp_path)
    assert done.stdout.startswith("Accuracy ")
    assert len(done.stdout.splitlines()) == 4  # and three saved files
    assert "Computing on" in (tmp_path / "run" / "log.txt").read_text()
