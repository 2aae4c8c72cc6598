"""Cross-validation: which image is in which fold, results, resuming, and wrong use."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

import vitrail as vt
from tests.support.tiny_runs import RecordingCallback, Signals, file_hashes, one_thread, write_folder
from vitrail.base.errors import ConfigError, FileError, InputError
from vitrail.cli import app
from vitrail.experiment.folds import assign_folds
from vitrail.training.trainer import Interrupted

__all__ = ["one_thread"]

TINY = dict(epochs=2, batch=16, ema=None, size=8, model=dict(width=16, depth=1, heads=2, patch=4))
COMMAND = ["--epochs=2", "--batch=16", "--size=8", "--set=model.width=16", "--set=model.depth=1"]
COMMAND += ["--set=model.heads=2", "--set=model.patch=4", "--set=ema=none"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "photos", each=20)


@pytest.fixture(scope="module")
def complete(data, tmp_path_factory):
    return vt.cross_validate(data, out=tmp_path_factory.mktemp("folds") / "whole", folds=3, **TINY)


def test_folds_are_stratified_and_equal_contents_are_together():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 203)
    keys = rng.integers(0, 2**63, 203).astype(np.uint64)
    keys[50:60] = keys[0]
    folds = assign_folds(keys, labels, 5)
    assert set(folds) == set(range(5))
    assert len(set(folds[50:60])) == 1 == len({folds[0], folds[55]})
    alone = np.setdiff1d(np.arange(203), np.arange(50, 60))
    for label in range(4):
        counts = np.bincount(folds[alone][labels[alone] == label], minlength=5)
        assert counts.max() - counts.min() <= 2
    order = rng.permutation(203)  # the order of the files does not matter
    assert np.array_equal(assign_folds(keys[order], labels[order], 5), folds[order])


def test_every_image_is_held_out_once(complete, data):
    assert [fold.val_images for fold in complete.folds] == [20, 20, 20]
    assert all(fold.train_images == 40 for fold in complete.folds)
    digests = {
        json.loads((complete.out / fold.out / "config.json").read_text())["data"]["digest"]
        for fold in complete.folds
    }
    assert len(digests) == 3


def test_mean_spread_and_files(complete):
    scores = [fold.accuracy for fold in complete.folds]
    assert complete.mean == pytest.approx(np.mean(scores))
    assert complete.deviation == pytest.approx(np.std(scores, ddof=1))
    assert complete.interval[0] <= complete.mean <= complete.interval[1]
    saved = json.loads((complete.out / "folds.json").read_text())
    assert saved["mean"] == complete.mean
    assert saved["environment"]["torch"]
    last = json.loads((complete.out / "fold-2" / "metrics.jsonl").read_text().splitlines()[-1])
    assert saved["folds"][1]["accuracy"] == last["val_accuracy"]
    page = (complete.out / "report.html").read_text()
    assert "Cross-validation on photos" in page
    assert "standard deviation between folds" in page


def test_interrupted_in_the_second_fold_and_resumed(complete, data, tmp_path):
    out = tmp_path / "folds"
    stop = Signals(None)
    callback = RecordingCallback()

    def message(text):
        callback.notes.append(text)
        if text == "Fold 2 of 3.":
            stop.at = 3

    callback.on_message = message
    with stop, pytest.raises(Interrupted):
        vt.cross_validate(data, out=out, folds=3, callback=callback, **TINY)
    first = file_hashes(out / "fold-1", but=("log.txt",))
    result = vt.cross_validate(data, out=out, folds=3, resume=True, **TINY)
    assert file_hashes(out / "fold-1", but=("log.txt",)) == first
    assert [fold.accuracy for fold in result.folds] == [fold.accuracy for fold in complete.folds]
    again = vt.cross_validate(data, out=out, folds=3, resume=True, **TINY)
    assert again.folds == result.folds


def test_wrong_use(complete, data, tmp_path):
    with pytest.raises(ConfigError, match=r"folds must be .*2"):
        vt.cross_validate(data, out=tmp_path / "new", folds=1, **TINY)
    with pytest.raises(InputError, match=r"60 images, too few .* 61 folds"):
        vt.cross_validate(data, out=tmp_path / "new", folds=61, **TINY)
    with pytest.raises(FileError, match="resume=True"):
        vt.cross_validate(data, out=complete.out, folds=3, **TINY)
    shutil.copytree(complete.out, tmp_path / "copy")
    with pytest.raises(InputError, match="with 3 folds, not 4"):
        vt.cross_validate(data, out=tmp_path / "copy", folds=4, resume=True, **TINY)
    assert not (tmp_path / "new").exists()


def test_the_command(data, tmp_path):
    out = tmp_path / "folds"
    done = CliRunner().invoke(app, ["train", str(data), "--folds=2", f"--out={out}", *COMMAND])
    assert done.exit_code == 0, done.output
    assert "Mean accuracy" in done.output
    assert (out / "report.html").exists()
    done = CliRunner().invoke(app, ["train", "--folds=2", f"--out={out}", "--resume"])
    assert isinstance(done.exception, InputError)
    assert "--folds needs DATA" in str(done.exception)
