"""Commands and classes beside a GPU: they take it and say so, unless they are told otherwise or it is full."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import DeviceWarning, InputError
from vitrail_course.character_model import CharacterModel
from vitrail_course.decoder import Decoder, DecoderConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CLASSES = ["ant", "bee", "cat"]
LINE = re.compile(
    r"^Computing on (?!the CPU).*, (bf16|fp16|fp32|fp8|bf16, fp8); --device cpu chooses otherwise\.$", re.M
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, images in a folder for each class, an index and a decoder of characters."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    for name, seed in (("pets", 0), ("other", 1)):
        torch.manual_seed(seed)
        model = add_noise(vt.create("Ti/16@64", classes=3))
        vt.Bundle(model=model, labels=CLASSES).save(folder / f"{name}.safetensors")
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    decoder = Decoder(DecoderConfig(width=32, depth=1, heads=2, vocabulary=3, length=16))
    CharacterModel(decoder, ["a", "b", "\n"]).save(folder / "characters.safetensors")
    done = run(folder, "embed", "pets.safetensors", "photos", "-o", "index.safetensors", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    return folder


def run(folder, *arguments, **environment):
    command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
    how = {"cwd": folder, "env": {**os.environ, "NO_COLOR": "1", **environment}, "timeout": 300}
    return subprocess.run(command, capture_output=True, text=True, **how)


IMAGE = "photos/ant/0.png"
COMMANDS = {
    "predict": ["predict", "pets.safetensors", "photos"],
    "evaluate": ["evaluate", "pets.safetensors", "photos"],
    "evaluate --probe": ["evaluate", "pets.safetensors", "photos", "--split", "all", "--probe", "knn"],
    "embed": ["embed", "pets.safetensors", "photos", "-o", "{out}/i.safetensors"],
    "search": ["search", "index.safetensors", IMAGE],
    "inspect": ["inspect", "pets.safetensors", "photos", "--out", "{out}/inspection"],
    "probe": ["probe", "pets.safetensors", "photos"],
    "bench": ["bench", "pets.safetensors", "--batch", "1"],
    "bench of a size": ["bench", "mu/8", "--batch", "1"],
    "doctor": ["doctor", "photos", "--model", "pets.safetensors"],
    "walk": ["walk", "pets.safetensors", IMAGE, "--json", "{out}/walk.json", "--html", "{out}/walk.html"],
    "walk of a size": ["walk", "mu/8", IMAGE],
    "generate": ["generate", "characters.safetensors", "ab", "--length", "30", "--seed", "0"],
    "convert": [
        *("convert", "pets.safetensors", "{out}/between.safetensors"),
        *("--toward", "other.safetensors", "--data", "photos"),
    ],
    "predict in parts": [
        "predict",
        "pets.safetensors",
        "photos",
        "--out",
        "{out}/parts/",
        "--part-size",
        "10",
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name, files, tmp_path):
    """By default the GPU with a line; with --device cpu and a hidden GPU, the CPU."""

    def run_in(folder, *more, **environment):
        (tmp_path / folder).mkdir()
        arguments = [one.replace("{out}", str(tmp_path / folder)) for one in COMMANDS[name]]
        done = run(files, *arguments, *more, **environment)
        assert done.returncode in ((0, 1) if name == "doctor" else (0,)), done.stderr
        return done

    gpu = run_in("gpu")
    assert len(LINE.findall(gpu.stderr)) == 1, gpu.stderr
    cpu = run_in("cpu", "--device", "cpu")
    assert "Computing on" not in cpu.stderr, cpu.stderr
    if name in ("predict", "bench of a size", "walk"):
        hidden = run_in("hidden", CUDA_VISIBLE_DEVICES="")
        assert "Computing on the CPU: CUDA_VISIBLE_DEVICES='' leaves no GPU." in hidden.stderr
        assert not LINE.search(hidden.stderr)
        asked = run_in("asked", "--device", "cuda")
        assert not LINE.search(asked.stderr)
    if name == "predict":
        assert "--quiet" not in gpu.stderr
        assert run_in("quiet", "--quiet").stderr == ""


def test_inference_is_in_bf16_where_the_gpu_has_it(files):
    done = run(files, "predict", "pets.safetensors", IMAGE)
    expected = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    assert LINE.search(done.stderr)[1] == expected
    exact = run(files, "predict", "pets.safetensors", IMAGE, "--precision", "fp32")
    assert LINE.search(exact.stderr)[1] == "fp32"


def test_int8_is_computed_on_the_cpu(files):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    arguments = ["--precision", "int8", "--calibration", "photos", "--min-agreement", "0"]
    done = run(files, "predict", "pets.safetensors", IMAGE, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Computed in int8" in done.stderr


def test_the_walk_is_the_same_as_on_the_cpu(files, tmp_path):
    for device in ("auto", "cpu"):
        arguments = ["walk", "pets.safetensors", IMAGE, "--json", tmp_path / f"{device}.json"]
        assert run(files, *arguments, "--device", device).returncode == 0
    stages = [json.loads((tmp_path / f"{device}.json").read_text())["stages"] for device in ("auto", "cpu")]
    assert [stage["name"] for stage in stages[0]] == [stage["name"] for stage in stages[1]]
    for one, other in zip(*stages, strict=True):
        if "values" in one:
            np.testing.assert_allclose(one["values"], other["values"], atol=1e-3, rtol=1e-3)


def test_verify(files):
    for more, where in (([], torch.cuda.get_device_name()), (["--device", "cpu"], "the CPU")):
        done = run(files, "verify", "pets.safetensors", *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"computed     on {where}, in fp32" in done.stdout


def test_verify_of_a_convolutional_stem(tmp_path):
    """cuDNN would round to TF32."""
    torch.manual_seed(0)
    model = add_noise(vt.create("Ti/16@64", classes=3, embedding="conv"))
    vt.Bundle(model=model).save(tmp_path / "stem.safetensors")
    done = run(tmp_path, "verify", "stem.safetensors")
    assert done.returncode == 0, done.stdout


def test_an_index_is_searched_on_either_device(files, tmp_path):
    """Embeddings in bf16 and in fp32 are of the same model."""
    index = tmp_path / "gpu.safetensors"
    assert run(files, "embed", "pets.safetensors", "photos", "-o", index).returncode == 0
    done = run(files, "search", index, IMAGE, "--model", "pets.safetensors", "--device", "cpu", "--top", "1")
    assert done.returncode == 0, done.stderr
    assert IMAGE in done.stdout
    done = run(files, "search", index, IMAGE, "--model", "other.safetensors")
    assert done.returncode == 2
    assert "another model" in done.stderr


def test_serve(files):
    command = [sys.executable, "-m", "vitrail", "serve", "pets.safetensors", "--port", "0"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=files, **how) as server:
        try:
            address = None
            for line in server.stdout:
                if found := re.search(r"http://[\d.]+:\d+", line):
                    address = found[0]
                    break
            assert address, server.stderr.read()
            request = urllib.request.Request(f"{address}/v1/predict", (files / IMAGE).read_bytes())
            request.add_header("Content-Type", "image/png")
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200
        finally:
            server.send_signal(signal.SIGTERM)
            errors = server.communicate(timeout=60)[1]
    assert LINE.search(errors), errors


def test_a_program_for_the_gpu(files, tmp_path):
    done = run(files, "export", "pets.safetensors", "--to", "torch-export", "--out", tmp_path / "x.pt2")
    assert done.returncode == 0, done.stderr
    assert "The program runs on a GPU only" in done.stdout
    arguments = ["--to", "torch-export", "--device", "cpu", "--out", tmp_path / "y.pt2"]
    done = run(files, "export", "pets.safetensors", *arguments)
    assert done.returncode == 0, done.stderr
    assert "GPU only" not in done.stdout


def test_training_on_the_cpu_has_the_recipe_of_a_cpu(files, tmp_path):
    recipes = {}
    for device in ("auto", "cpu"):
        done = run(files, "train", "photos", "--dry-run", "--out", tmp_path / device, "--device", device)
        assert done.returncode == 0, done.stdout + done.stderr
        recipes[device] = " ".join(f"{done.stdout} {done.stderr}".split())  # lines may be wrapped
    assert "on a GPU" in recipes["auto"]
    assert "--device cpu chooses otherwise" in recipes["auto"]
    assert "on a CPU" in recipes["cpu"]


# ---- Python ---------------------------------------------------------------------------------


def test_python(files):
    path = files / "pets.safetensors"
    assert vt.load(path).model.head.weight.device.type == "cpu"
    assert vt.load(path, device="auto").model.head.weight.is_cuda
    assert vt.Predictor(path).bundle.model.head.weight.is_cuda
    assert vt.Predictor(vt.load(path)).on_cpu
    assert vt.Predictor(vt.load(path).model).on_cpu
    assert vt.Predictor(path, device="cpu").on_cpu
    assert not vt.Predictor(vt.load(path, device="cuda")).on_cpu
    notes = vt.evaluate(path, files / "photos").notes
    assert any("CUDA graph" in note for note in notes), notes
    assert not any("CUDA graph" in note for note in vt.evaluate(vt.load(path), files / "photos").notes)


@pytest.fixture
def small_memory():
    """A GPU on which this process may have little more than it has."""

    def limit(megabytes):
        gc.collect()  # what earlier tests left would be freed later, and be room for this one
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + megabytes * 2**20) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def images_of(count, side=224):
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)


def test_less_memory_means_smaller_batches(small_memory):
    model = add_noise(vt.create("S/16", classes=10)).cuda().eval()  # a new head answers zeros
    predict = vt.Predictor(vt.Bundle(model=model), batch=512)
    images = images_of(512)
    expected = predict(images)
    fresh = vt.Predictor(vt.Bundle(model=model), batch=512)  # with no graph of 512 images yet
    del predict
    small_memory(600)
    with pytest.warns(DeviceWarning, match=r"memory ran out: it computes \d+ images? at once") as told:
        found = fresh(images)
    assert len(told) == 1
    assert fresh.engine.fitting.limit < 512
    largest = max(abs(one.logits).max() for one in expected)
    for one, other in zip(found, expected, strict=True):
        assert abs(one.logits - other.logits).max() < 0.05 * largest


def test_an_evaluation_with_less_memory(files, small_memory):
    bundle = vt.Bundle(model=vt.create("S/16@64", classes=3).cuda().eval(), labels=CLASSES)
    whole = vt.evaluate(bundle, files / "photos", batch=36)
    model = vt.create("L/4@64", classes=3).cuda().eval()
    large = vt.Bundle(model=model, labels=CLASSES)
    small_memory(700)
    with pytest.warns(DeviceWarning, match="at once from now on"):
        result = vt.evaluate(large, files / "photos", batch=36, probe=["knn"], split="all")
    assert result.images == whole.images
    assert not result.corrupt


def test_no_room_for_one_image_is_an_error(small_memory):
    model = vt.create("B/16@1024", classes=3).cuda().eval()
    predict = vt.Predictor(vt.Bundle(model=model), batch=4, precision=None)
    small_memory(1)
    with pytest.raises(InputError, match="memory ran out with a single image"):
        predict(images_of(4, 1024))


def test_a_full_gpu_means_the_cpu(files, monkeypatch):
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10 * 2**20, total))
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > 2**27:
        pytest.skip("memory of other tests is still cached")
    with pytest.warns(DeviceWarning, match="Computing on the CPU: .* of free memory"):
        assert vt.Predictor(files / "pets.safetensors").on_cpu
    assert not vt.Predictor(files / "pets.safetensors", device="cuda").on_cpu
