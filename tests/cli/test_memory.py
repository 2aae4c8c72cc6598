"""What commands do about memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from vitrail.inspect.sample import FILE
from vitrail.memory import asked_for, is_out_of_memory
from vitrail.predict.sources import reason_of
from vitrail.training import run

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny_runs import calm, train, write_arrays

FAULTS = """
import resource
import torch
from vitrail.cli.memory import keep_freed_memory
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


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
def test_freed_memory_is_used_again_without_asking_the_system():
    assert faults(False) > 1_000  # otherwise there is nothing to gain, and the function can go
    assert faults(True) < 100


# ---- models that are too large ---------------------------------------------------------------


def limited(*arguments, cwd, gigabytes):
    """A command that may have so much memory and no more."""
    script = f'ulimit -v {gigabytes * 10**9 // 1024}; exec "$@"'
    command = ["bash", "-c", script, "-", sys.executable, "-m", "vitrail", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def picture(tmp_path):
    Image.fromarray(np.zeros((28, 28), dtype=np.uint8)).save(tmp_path / "0.png")
    return tmp_path / "0.png"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", FILE, "new", "--classes", "1000000000"], "256 GB"),
        (["convert", FILE, "new", "--size", "100000"], "position table"),
        (["predict", FILE, "0.png", "--size", "40000"], "position table"),
        (["predict", FILE, "0.png", "--size", "7200"], "3,240,001 tokens"),
        (["walk", "mu/4", "0.png", "--set", "classes=1000000000"], "the head"),
        (["train", "digits", "--recipe", "digits", "--size", "8000"], "A training step"),
        (["inspect", FILE, "0.png", "--only", "attention", "--size", "800"], "40,001 tokens"),
    ],
)
def test_a_model_that_cannot_fit_is_refused_before_memory_is_taken(tmp_path, picture, arguments, said):
    done = limited(*arguments, cwd=tmp_path, gigabytes=5)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "5.0 GB are there" in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["0.png"]


def test_memory_that_runs_out_all_the_same_is_a_sentence(tmp_path):
    """The parameters alone would fit, and they are not alone."""
    done = limited("convert", FILE, "new", "--classes", 15_000_000, cwd=tmp_path, gigabytes=4)
    assert done.returncode == 2
    assert "not enough memory" in done.stderr
    assert "(4.0 GB in all)" in done.stderr
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
def test_errors_of_memory_are_known_by_their_words(error, amount):
    assert is_out_of_memory(error)
    assert asked_for(error) == amount


def test_other_errors_are_not():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("name", ["Ti/16", "B/16", "mu/16"])
@pytest.mark.parametrize("position", ["learned", "sincos2d", "relative", "pairwise", "rotary"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"pool": "flatten"}, {"head": "tanh", "head_hidden": 8}, {"mlp": "gated"}, {"embedding": "resnet"}],
)
def test_what_is_counted_is_never_more_than_there_is(name, position, fields):
    """Or a model that fits would be refused."""
    with torch.device("meta"):
        model = vt.create(name, position=position, classes=100, **fields)
    there = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    counted = sum(model.config.matrices.values())
    assert counted <= there
    assert counted > 0.5 * there or model.config.embedding == "resnet"  # the stem is not counted


def test_a_forward_pass_takes_no_less_than_is_counted(tmp_path):
    code = (
        "import resource, torch, vitrail as vt\n"
        "from vitrail.memory import forward_bytes\n"
        "model = vt.create('Ti/16', size=512).eval()\n"
        "def peak(): return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with torch.inference_mode():\n"
        "    model(torch.zeros(1, 3, 512, 512)); before = peak()\n"
        "    model(torch.zeros(32, 3, 512, 512))\n"
        "print(forward_bytes(model.config, 32), peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    counted, measured = map(int, done.stdout.split())
    assert counted <= measured < 4 * counted


def out_of_memory(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 128000 bytes.")


@pytest.mark.parametrize(("home", "name"), [(run, "seconds_left"), (run.Trainer, "take_step")])
def test_a_step_that_does_not_fit_names_the_setting(tmp_path, monkeypatch, home, name):
    """Also the one that only measures the time."""
    monkeypatch.setattr(home, name, out_of_memory)
    with pytest.raises(vt.ConfigError, match="accumulate=4"):
        train(write_arrays(tmp_path / "data.npz"), out=tmp_path / "out", **calm())


def test_a_picture_without_memory_for_it_has_a_reason():
    assert "not enough memory" in reason_of(MemoryError())
