"""The choice of a device, where a GPU is there, hidden, broken, full or old. No GPU is needed: torch is told of one.

The torch of these tests may be built without CUDA: then what touches the told GPU fails as with a broken driver.
"""

import subprocess
import sys
import warnings
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.models import add_noise
from tests.support.tiny_runs import write_arrays
from vitrail.base.errors import ConfigError, DeviceWarning, InputError
from vitrail.fast.halving import FittingBatches
from vitrail.images.formats.sources import open_dataset
from vitrail.model import device as devices
from vitrail.model.device import choose_device, find_device, place
from vitrail.training.resolve import resolve_recipe

GB = 10**9
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TOLD = (
    "import sys, torch\n"
    "torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1\n"
    "torch.cuda.get_device_name = lambda device=None: 'Told 3000'\n"
    "from vitrail.cli import main\n"
    "main()\n"
)
"""A process in which torch reports a GPU that fails when it is first used, unless there is a real one."""


@pytest.fixture
def told(monkeypatch):
    """A GPU that works: what it is, and how much memory is free, may be changed."""
    gpu = SimpleNamespace(name="Told 3000", bf16=True, capability=(9, 0), free=80 * GB, count=1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu.count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpu.count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: gpu.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu.capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: gpu.bf16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (gpu.free, 80 * GB))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None: ones(*size))
    return gpu


def test_a_gpu_that_works(told):
    assert find_device() == (GPU, "")
    assert find_device("cuda") == (GPU, "")
    assert find_device("cpu") == (CPU, "")
    assert find_device(torch.device("cpu")) == (CPU, "")
    told.count = 2
    assert find_device("cuda:1")[0].index == 1
    assert find_device("auto", local_rank=1)[0].index == 1


def test_the_gpu_of_a_process_of_torchrun(told, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    told.count = 2
    assert find_device()[0].index == 1
    told.count = 1
    with pytest.raises(ConfigError, match="needs GPU 1, and there is 1"):
        find_device()


def test_a_gpu_without_room_means_the_cpu(told):
    told.free = 3 * GB
    assert find_device(needed=2 * GB) == (GPU, "")
    assert find_device(needed=3 * GB) == (
        CPU,
        "Told 3000 has 3.0 GB of free memory, and 3.3 GB are needed",
    )
    told.free = 10**6
    found, problem = find_device()
    assert found == CPU
    assert "1.0 MB of free memory" in problem
    assert find_device("cuda") == (GPU, "")  # obeyed
    assert choose_device().reason == f"the CPU, fp32: {problem}"


def test_one_process_of_several_does_not_go_on_alone(told, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    told.free = 0
    with pytest.raises(ConfigError, match="GPU of process 0 cannot be used: Told 3000 has 0"):
        find_device()


def test_a_gpu_that_does_not_compute(told, monkeypatch):
    def fail(*size, device=None):
        raise RuntimeError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch, "ones", fail)
    assert find_device() == (CPU, "cuda:0 does not compute (CUDA error: unknown error)")
    with pytest.raises(ConfigError, match=r"device='cuda' cannot be used: .*unknown error.*device='cpu'"):
        find_device("cuda")


def test_a_hidden_gpu_is_named_and_none_is_not(told, monkeypatch):
    told.count = 0
    assert find_device()[1] == "" or torch.backends.cuda.is_built()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for reason in ("No CUDA GPUs are available", "Found no NVIDIA driver on your system."):
        monkeypatch.setattr(torch.cuda, "init", failing(reason))
        assert find_device() == (CPU, "")
    monkeypatch.setattr(torch.cuda, "init", failing("The NVIDIA driver on your system is too old (9010)."))
    found, problem = find_device()
    assert found == CPU
    assert "driver on your system is too old" in problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_device() == (CPU, "CUDA_VISIBLE_DEVICES='' leaves no GPU")
    with pytest.raises(ConfigError, match=r"torch finds none \(CUDA_VISIBLE_DEVICES='' leaves no GPU\)"):
        find_device("cuda")


def failing(reason):
    def fail(*args):
        raise RuntimeError(reason)

    return fail


@pytest.mark.parametrize("device", ["gpu", "cuda:9999", "", "cuda:x"])
def test_a_device_that_is_none(device):
    with pytest.raises(ConfigError, match="device"):
        find_device(device)


# ---- the dtype of a run ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bf16", "capability", "dtype", "words"),
    [
        ("NVIDIA H200", True, (9, 0), torch.bfloat16, "NVIDIA H200, bf16"),
        (
            "Tesla T4",
            False,
            (7, 5),
            torch.float16,
            "Tesla T4, fp16 with loss scaling: it does not support bf16",
        ),
        ("Tesla V100", False, (7, 0), torch.float16, "fp16 with loss scaling"),
        ("GTX 1080", False, (6, 1), torch.float32, "GTX 1080, fp32: it supports no bf16, and has no tensor"),
    ],
)
def test_the_precision_of_a_gpu(told, name, bf16, capability, dtype, words):
    told.name, told.bf16, told.capability = name, bf16, capability
    chosen = choose_device()
    assert (chosen.device, chosen.dtype) == (GPU, dtype)
    assert words in chosen.reason
    assert choose_device("fp32").dtype == torch.float32
    if not bf16:
        with pytest.raises(ConfigError, match="use fp16"):
            choose_device("bf16")


# ---- the recipe -----------------------------------------------------------------------------


def test_auto_follows_the_device_that_is_chosen(told, tmp_path):
    data = open_dataset(write_arrays(tmp_path / "data.npz"))

    def note(**changes):
        return resolve_recipe("auto", data, None, changes)[0].notes[0]

    assert "on a GPU" in note()
    assert "on a GPU" in note(device="cuda")
    assert "on a CPU" in note(device="cpu")
    told.free = 0
    assert "on a CPU" in note()
    told.count = 0
    assert "on a CPU" in note()


# ---- models ---------------------------------------------------------------------------------


@pytest.fixture
def pets(tmp_path):
    model = add_noise(vt.create("mu/8@16", classes=3))
    vt.Bundle(model=model, labels=["ant", "bee", "cat"]).save(tmp_path / "pets.safetensors")
    return tmp_path / "pets.safetensors"


def test_files_go_to_the_chosen_device_and_models_stay(pets, monkeypatch):
    asked = []

    def find(device="auto", local_rank=None, needed=0):
        asked.append(str(device))
        return (torch.device("meta") if device == "auto" else torch.device(device)), ""

    monkeypatch.setattr(devices, "find_device", find)
    assert vt.load(pets).model.head.weight.device == CPU
    assert "auto" not in asked
    bundle = vt.load(pets)
    assert vt.Predictor(bundle).bundle is bundle
    assert vt.Predictor(bundle.model).on_cpu
    assert vt.Predictor(pets, device="cpu").on_cpu
    assert "auto" not in asked
    assert vt.load(pets, device="auto").model.head.weight.device.type == "meta"
    assert not vt.Predictor(pets).on_cpu  # the chosen device, which is no CPU
    asked.clear()
    with pytest.raises(vt.VitrailError):  # three classes for ten digits
        vt.evaluate(pets, "digits")
    assert asked == ["auto"]


def test_a_model_that_does_not_fit_stays_on_the_cpu_with_a_warning(told):
    model = vt.create("mu/8@16", classes=3)
    told.free = 10**6
    with pytest.warns(DeviceWarning, match="Computing on the CPU: Told 3000 has 1.0 MB"):
        place(model)
    assert model.head.weight.device == CPU


def run_told(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-c", TOLD, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the told GPU would be a real one")
def test_commands_beside_a_broken_gpu(pets, tmp_path):
    image = tmp_path / "a.png"
    Image.new("RGB", (20, 20), "red").save(image)
    line = "Computing on the CPU: cuda:0 does not compute (Torch not compiled with CUDA enabled).\n"
    done = run_told("predict", pets, image)
    assert (done.returncode, done.stderr.count(line)) == (0, 1), done.stderr
    quiet = run_told("predict", pets, image, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, done.stdout, "")
    asked = run_told("predict", pets, image, "--device", "cpu")
    assert (asked.returncode, asked.stdout) == (0, done.stdout)
    assert line not in asked.stderr
    refused = run_told("predict", pets, image, "--device", "cuda")
    assert refused.returncode == 2
    assert "vitrail: --device cuda cannot be used: cuda:0 does not compute" in refused.stderr
    assert run_told("info", pets).stderr == ""  # which runs no model


# ---- memory that runs out -------------------------------------------------------------------


class Gpu:
    """Computes with images up to a number, and is out of memory with more."""

    def __init__(self, most):
        self.most, self.sizes = most, []

    def __call__(self, images):
        self.sizes.append(len(images))
        if len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return [2 * image for image in images]


def test_batches_are_halved_until_they_fit():
    gpu, fitting = Gpu(3), FittingBatches()
    with pytest.warns(DeviceWarning, match="memory ran out: it computes 2 images at once") as told:
        rows = list(chain.from_iterable(fitting(gpu, list(range(10)))))
    assert rows == [2 * number for number in range(10)]
    assert gpu.sizes == [10, 5, 2, 2, 2, 2, 2]
    assert len(told) == 1
    with warnings.catch_warnings(action="error"):  # known from now on
        assert list(chain.from_iterable(fitting(gpu, list(range(5))))) == [0, 2, 4, 6, 8]
    assert gpu.sizes[7:] == [2, 2, 1]


def test_a_single_image_that_does_not_fit_is_an_error():
    with pytest.raises(InputError, match=r"memory ran out with a single image; .*device='cpu'"):
        list(FittingBatches()(Gpu(0), [1, 2, 3]))


def test_other_errors_pass():
    for error in (RuntimeError("shape mismatch"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):

        def fail(images, error=error):
            raise error

        with pytest.raises(RuntimeError) as caught:
            list(FittingBatches()(fail, [1, 2]))
        assert caught.value is error


def test_a_failed_capture_is_out_of_memory_too():
    def capture(images):
        try:
            Gpu(1)(images)
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904
        return images

    with pytest.warns(DeviceWarning, match="1 images? at once"):
        assert [len(part) for part in FittingBatches()(capture, [1, 2])] == [1, 1]


def test_predictions_in_smaller_batches_are_the_same(pets, monkeypatch):
    images = torch.rand(9, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    whole = vt.Predictor(vt.load(pets), batch=9)
    expected = whole(images)
    forward, sizes = whole.engine.forward, []

    def limited(pixels):
        sizes.append(len(pixels))
        Gpu(4)(pixels)
        return forward(pixels)

    monkeypatch.setattr(whole.engine, "forward", limited)
    with pytest.warns(DeviceWarning, match="4 images at once"):
        found = whole(images)
    assert sizes == [9, 4, 4, 1]
    assert [one.label for one in found] == [one.label for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert abs(one.logits - other.logits).max() < 1e-5
