"""Memory: the allocator setting, and models that do not fit."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.command import run_command
from tests.support.tiny_runs import train, without_dropout, write_arrays
from vitrail.base.machine import failed_allocation, is_out_of_memory
from vitrail.predict.image_sources import describe_error
from vitrail.training.plan import rehearsal as plan
from vitrail.training.trainer import Trainer
from vitrail.views.sample import SAMPLE_FILE

FAULTS = """
import resource
import torch
from vitrail.cli.malloc import keep_freed_memory
if {keep}:
    keep_freed_memory()
def use():
    torch.empty(10_000_000).fill_(1)  # 40 MB
for _ in range(10):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)], stdout=subprocess.PIPE, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_reused():
    assert faults(False) > 1_000  # otherwise the setting has no effect and can be removed
    assert faults(True) < 100


# ---- models that are too large ---------------------------------------------------------------


def limited(*arguments, cwd, gigabytes):
    """Run a command with a memory limit."""
    return run_command(*arguments, cwd=cwd, limits={"RLIMIT_AS": gigabytes * 10**9}, OMP_NUM_THREADS="1")


@pytest.fixture
def image(tmp_path):
    Image.fromarray(np.zeros((28, 28), dtype=np.uint8)).save(tmp_path / "0.png")
    return tmp_path / "0.png"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", SAMPLE_FILE, "new", "--classes", "1000000000"], "256 GB"),
        (["convert", SAMPLE_FILE, "new", "--size", "100000"], "position table"),
        (["predict", SAMPLE_FILE, "0.png", "--size", "40000"], "position table"),
        (["predict", SAMPLE_FILE, "0.png", "--size", "7200"], "3,240,001 tokens"),
        (["walk", "mu/4", "0.png", "--set", "classes=1000000000"], "the head"),
        (["train", "digits", "--recipe", "digits", "--size", "8000"], "A training step"),
        (["inspect", SAMPLE_FILE, "0.png", "--only", "attention", "--size", "800"], "40,001 tokens"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_allocation(tmp_path, image, arguments, message):
    done = limited(*arguments, cwd=tmp_path, gigabytes=5)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "5.0 GB" in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["0.png"]


def test_running_out_of_memory_is_one_message(tmp_path):
    """The parameters alone would fit."""
    done = limited("convert", SAMPLE_FILE, "new", "--classes", 15_000_000, cwd=tmp_path, gigabytes=4)
    assert done.returncode == 2
    assert "out of memory" in done.stderr
    assert "(4.0 GB in total)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "amount"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 128000 bytes."),
            "128 kB",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "2.00 GiB"),
        (MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"), "7.45 GiB"),
        (MemoryError(), None),
    ],
)
def test_out_of_memory_errors_are_recognized(error, amount):
    assert is_out_of_memory(error)
    assert failed_allocation(error) == amount


def test_other_errors_are_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("name", ["Ti/16", "B/16", "mu/16"])
@pytest.mark.parametrize("position", ["learned", "sincos2d", "relative", "pairwise", "rotary"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"pool": "flatten"}, {"head": "tanh", "head_hidden": 8}, {"mlp": "gated"}, {"embedding": "resnet"}],
)
def test_the_parameter_estimate_is_a_lower_bound(name, position, fields):
    """Otherwise a model that fits would be refused."""
    with torch.device("meta"):
        model = vt.create(name, position=position, classes=100, **fields)
    actual = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    estimate = sum(model.config.parameter_counts.values())
    assert estimate <= actual
    assert estimate > 0.5 * actual or model.config.embedding == "resnet"  # the stem is not counted


@pytest.mark.slow
def test_the_forward_pass_estimate_is_a_lower_bound(tmp_path):
    code = (
        "import re, torch, vitrail as vt\n"
        "from vitrail.model.model_memory import forward_bytes\n"
        "model = vt.create('Ti/16', size=512).eval()\n"
        # not ru_maxrss, which starts at the peak of the process that forked this one
        "def peak(): return 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "with torch.inference_mode():\n"
        "    model(torch.zeros(1, 3, 512, 512)); before = peak()\n"
        "    model(torch.zeros(32, 3, 512, 512))\n"
        "print(forward_bytes(model.config, 32), peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    estimate, measured = map(int, done.stdout.split())
    assert estimate <= measured < 4 * estimate


def out_of_memory(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 128000 bytes.")


@pytest.mark.parametrize(("owner", "name"), [(plan, "estimate_seconds"), (Trainer, "take_step")])
def test_a_training_step_that_does_not_fit_names_the_setting(tmp_path, monkeypatch, owner, name):
    """Also the step that only measures the time."""
    monkeypatch.setattr(owner, name, out_of_memory)
    with pytest.raises(vt.ConfigError, match="accumulate=4"):
        train(write_arrays(tmp_path / "data.npz"), out=tmp_path / "out", **without_dropout())


def test_the_reason_for_an_image_that_does_not_fit():
    assert "not enough memory" in describe_error(MemoryError())
