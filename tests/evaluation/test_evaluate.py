"""vt.evaluate: one forward pass, independent of batch size and number of processes."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.evaluation_models import DIGITS, equal_results, train_digits_bundle, write_two_classes
from vitrail.base.errors import InputError
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.evaluation.forward import run_model
from vitrail.images.formats.sources import Dataset, open_dataset


@pytest.fixture(scope="module")
def digits():
    return open_dataset("digits")


@pytest.fixture(scope="module")
def bundle(digits):
    return train_digits_bundle(digits)


# ---- the forward pass -----------------------------------------------------------------------


def test_metrics_match_the_models_own_logits(bundle, digits):
    result = evaluate(bundle, digits)
    with torch.no_grad():
        logits = bundle.model(torch.stack([bundle.preprocess(image) for image in digits.val.images]))
    correct = (logits.argmax(1).numpy() == digits.val.labels).sum()
    assert result.metrics.top1 == correct / 360
    assert 0.3 < result.metrics.top1 < 1
    assert (result.split, result.images, result.metrics.count, result.classes) == ("val", 360, 360, DIGITS)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(digits.val.labels)).item()
    assert result.metrics.loss == pytest.approx(loss, rel=1e-5)
    assert (result.probes, result.real, result.corrupt, result.notes) == ([], None, {}, [])
    assert result.seconds > 0
    labels = dict(zip(digits.val.names, digits.val.labels, strict=True))
    assert all(labels[one.name] == int(one.label) for one in result.metrics.mistakes)


def test_results_do_not_depend_on_the_batch_size(bundle, digits):
    few = dataclasses.replace(digits, train=digits.train.take(np.arange(120)))
    first, *others = (
        evaluate(bundle, few, batch=batch, probe=["knn", "fewshot"]).as_dict() for batch in (128, 7, 1)
    )
    assert len(first["probes"]) == 3 * (3 + 2)
    assert all(equal_results(other, first) for other in others)


@pytest.mark.parametrize("batch", [7, 128])
def test_outputs_of_all_ranks_sum_to_the_complete_result(bundle, digits, batch):
    outputs, valid = run_model(bundle.model, digits.val, bundle.preprocess, batch=batch)
    for ranks in (2, 5):
        parts = [
            run_model(bundle.model, digits.val, bundle.preprocess, batch=batch, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        computed = [part for part in parts if part[0].shape == outputs.shape]
        assert torch.equal(sum(rows for rows, _ in computed), outputs)
        assert torch.equal(sum(mask for _, mask in parts), valid)


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(tmp_path):
    """The second has no batch of its own in the split of four images; both report the corrupt file."""
    write_two_classes(tmp_path)
    script = tmp_path / "both.py"
    script.write_text(
        "import dataclasses, json, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "import torch.distributed as dist\n"
        "from vitrail.evaluation.evaluate_model import evaluate\n"
        "if len(sys.argv) > 2:\n"
        "    dist.init_process_group('gloo', init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)\n"
        "results = [evaluate('two.safetensors', 'data', batch=b, probe=['knn'], workers=0).as_dict() for b in (2, 64)]\n"
        "open(f'{sys.argv[1]}.json', 'w').write(json.dumps(results))\n"
        "if dist.is_initialized():\n"
        "    dist.destroy_process_group()\n"  # left to the end of Python, its threads may abort
    )
    address = (tmp_path / "meeting").as_uri()  # a file: no port that another process may take
    started = [
        subprocess.Popen([sys.executable, script.name, *arguments], cwd=tmp_path)
        for arguments in (["0", address], ["1", address], ["alone"])
    ]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    first, second, alone = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0", "1", "alone")
    )
    assert equal_results(first, second)
    assert equal_results(first, alone)
    assert list(alone[0]["corrupt"]) == ["val/light/1.png"]
    assert (alone[0]["images"], alone[0]["metrics"]["count"]) == (6, 5)


# ---- labels and classes ---------------------------------------------------------------------


def test_classes_in_another_order_are_matched_by_name(bundle, digits):
    expected = evaluate(bundle, digits)
    order = np.random.default_rng(0).permutation(10)
    labels = np.argsort(order)[digits.val.labels]  # class order[i] has index i
    permuted = dataclasses.replace(
        digits, classes=[DIGITS[i] for i in order], val=dataclasses.replace(digits.val, labels=labels)
    )
    result = evaluate(bundle, permuted)
    assert len(result.notes) == 1
    assert "matched by name" in result.notes[0]
    assert result.metrics.top1 == expected.metrics.top1
    assert equal_results(result.as_dict()["metrics"]["mistakes"], expected.as_dict()["metrics"]["mistakes"])
    assert {row.name: row for row in result.metrics.per_class} == {
        row.name: row for row in expected.metrics.per_class
    }


def test_classes_without_names_are_matched_by_index(bundle, digits):
    expected = evaluate(bundle, digits).metrics.top1
    named = dataclasses.replace(bundle, labels=[f"digit {name}" for name in DIGITS])
    result = evaluate(named, digits)
    assert result.metrics.top1 == expected
    assert len(result.notes) == 1
    assert "matched by index: 0 is digit 0" in result.notes[0]
    wordnet = dataclasses.replace(digits, classes=[f"n0000000{digit}" for digit in range(10)])
    assert "n00000000 is digit 0" in evaluate(named, wordnet).notes[0]
    assert evaluate(dataclasses.replace(bundle, labels=None), wordnet).notes == []


def test_other_classes_are_refused(bundle, digits):
    named = dataclasses.replace(digits, classes=[*DIGITS[:8], "eight", "nine"])
    with pytest.raises(
        InputError, match=r"2 classes .* not among the model's: eight, nine\. .* map=\{'eight': "
    ):
        evaluate(bundle, named)
    duplicate = dataclasses.replace(bundle, labels=[*DIGITS[:9], "8"])
    with pytest.raises(InputError, match="One class of the data is not among the model's: nine"):
        evaluate(duplicate, dataclasses.replace(digits, classes=[*DIGITS[:9], "nine"]))


# ---- splits, multi-label data, ReaL, models without a head ----------------------------------


def test_the_split_is_test_or_else_val(bundle, digits):
    three = dataclasses.replace(digits, test=digits.val.take(np.arange(20)))
    assert [evaluate(bundle, three, split=s).images for s in (None, "val", "train")] == [20, 360, 1437]
    assert evaluate(bundle, three).split == "test"
    with pytest.raises(InputError, match=r"Unknown split 'tset'\. Did you mean 'test'\?"):
        evaluate(bundle, three, split="tset")
    with pytest.raises(InputError, match="Choose from: train, val"):
        evaluate(bundle, digits, split="test")


def test_multi_label_data(bundle, digits):
    def multi_label(split):
        return dataclasses.replace(split, labels=np.eye(10, dtype=np.int64)[split.labels])

    data = Dataset("many", DIGITS, multi_label(digits.train), val=multi_label(digits.val))
    result = evaluate(bundle, data)
    assert result.metrics.mean_ap > 0.4
    assert result.calibration is result.metrics.top1 is None
    with pytest.raises(InputError, match=r"one class per image, and many is multi-label; .* without probes"):
        evaluate(bundle, data, probe=["knn"])


def test_real_labels_are_indices_of_the_models_outputs(bundle, digits):
    real = [[int(label), 3] if label else [] for label in digits.val.labels]
    reversed_digits = dataclasses.replace(
        digits, classes=DIGITS[::-1], val=dataclasses.replace(digits.val, labels=9 - digits.val.labels)
    )
    for data in (digits, reversed_digits):
        result = evaluate(bundle, data, real=real)
        predicted = run_model(bundle.model, digits.val, bundle.preprocess)[0].argmax(1).tolist()
        hits = [p in row for p, row in zip(predicted, real, strict=True) if row]
        assert (result.real.accuracy, result.real.count) == (sum(hits) / len(hits), len(hits))


def test_a_model_without_a_head_can_be_probed(bundle, digits, tmp_path):
    bundle.save(tmp_path / "digits.safetensors")
    headless = vt.load(tmp_path / "digits.safetensors", classes=0)
    result = evaluate(headless, digits, probe="knn", layers="all")
    assert result.metrics is None
    assert {row.layer for row in result.probes} == {0, 1}
    assert max(row.top1 for row in result.probes) > 0.5
    (note,) = evaluate(headless, digits, probe=["knn"], split="train").notes
    assert "evaluated on the images they were fitted on" in note
    with pytest.raises(InputError, match=r"without a head can only be probed; .* knn or linear"):
        evaluate(headless, digits)


def test_wrong_arguments_are_refused(bundle, digits, tiny):
    with pytest.raises(InputError, match=r"digits have 1 channels and the model takes 2; .* channels=1"):
        evaluate(vt.Bundle(model=tiny), digits)
    with pytest.raises(InputError, match="batch must be an integer from 1 to 1,000,000, not 0"):
        evaluate(bundle, digits, batch=0)
    with pytest.raises(InputError, match="above 0 and at most 1, not 0"):
        evaluate(bundle, digits, target_accuracy=0)
    text = vt.ViTConfig(width=8, depth=1, heads=2, classes=10, input="text", vocabulary=9, patch=1, size=4)
    with pytest.raises(InputError, match=r"Only models for images .* takes text"):
        evaluate(vt.Bundle(model=vt.ViT(text)), digits)


def test_features_that_do_not_fit_in_memory_are_refused(bundle, digits, monkeypatch):
    monkeypatch.setattr("vitrail.evaluation.forward.MAX_BYTES", 100_000)
    with pytest.raises(InputError, match=r"74 numbers for each of 360 images .* probe fewer layers"):
        evaluate(bundle, digits, probe=["knn"], layers="all")


def test_a_split_without_readable_images_is_refused(tmp_path):
    write_two_classes(tmp_path)
    for image in (tmp_path / "data" / "val").rglob("*.png"):
        image.write_bytes(b"not an image")
    with pytest.raises(
        InputError, match=r"None of the 6 images of data \(split val\) could be read. The first error: \S"
    ):
        evaluate(tmp_path / "two.safetensors", tmp_path / "data")
