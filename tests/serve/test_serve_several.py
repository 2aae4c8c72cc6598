"""Several models in one server, with requests for all of them at once: each answer is of its own model."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import vitrail as vt
from tests.support.digit_clip import DIGITS, FILE
from tests.support.models import add_noise
from tests.support.serving import (
    PATIENCE,
    Gated,
    Running,
    form,
    make_image,
    serve_command,
    serving,
    toy,
    until,
)

REQUESTS = 24  # of each model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A classifier of colors and one of digits, with other classes, sizes and channels."""
    folder = tmp_path_factory.mktemp("models")
    toy().save(folder / "pets.safetensors")
    vt.load(FILE).zero_shot(DIGITS).save(folder / "digits.safetensors")
    return {name: folder / f"{name}.safetensors" for name in ("pets", "digits")}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    paths = [folder / f"{seed}.png" for seed in range(REQUESTS)]
    for seed, path in enumerate(paths):
        path.write_bytes(make_image(seed))
    return paths


def expected(files, photos):
    """All scores of each image, by model."""
    return {
        name: [dict(one.top(10)) for one in vt.Predictor(path, workers=0)(photos)]
        for name, path in files.items()
    }


def ask(server, name, path):
    body, kind = form(path.read_bytes(), top=5 if name == "pets" else 10)
    return server.get(f"/v1/models/{name}/predict", body=body, headers={"Content-Type": kind})


def check_answers(server, files, photos, answers):
    scores = expected(files, photos)
    for (name, number), (status, said) in answers.items():
        assert (status, said["model"]) == (200, name)
        (found,) = said["predictions"]
        top = {guess["label"]: guess["score"] for guess in found["top"]}
        assert top == pytest.approx(scores[name][number], abs=1e-5)
    assert len({json.dumps(said["predictions"][0]["top"]) for _, said in answers.values()}) == len(answers)


def test_the_command_with_two_models(files, photos):
    models = [f"{name}={path}" for name, path in files.items()]
    with serve_command(*models, "--memory", 50) as address:
        server = Running(int(address.rpartition(":")[2]))
        assert [one["name"] for one in server.get("/v1/models")[1]] == ["pets", "digits"]
        jobs = [(name, number) for number in range(REQUESTS) for name in files]
        with ThreadPoolExecutor(16) as pool:
            said = list(pool.map(lambda job: ask(server, job[0], photos[job[1]]), jobs))
        check_answers(server, files, photos, dict(zip(jobs, said, strict=True)))


def test_images_of_a_model_are_batched_past_those_of_another(files, photos):
    """Requests for two models in turn: two batches, not one for each image."""
    models = {name: Gated(vt.load(path)) for name, path in files.items()}
    with serving(models, batch=32, queue=64) as server, ThreadPoolExecutor(2 * REQUESTS) as pool:
        first = models["pets"]
        while first.entered.acquire(blocking=False):  # the warm-up
            pass
        first.gate.clear()
        held = pool.submit(ask, server, "pets", photos[0])
        assert first.entered.acquire(timeout=PATIENCE)
        for model in models.values():
            model.batches.clear()
        jobs = [(name, number) for number in range(8) for name in ("digits", "pets")]
        waiting = []
        for count, (name, number) in enumerate(jobs, 1):  # so that they wait in this order
            waiting.append(pool.submit(ask, server, name, photos[number]))
            until(lambda count=count: len(server.app.batcher.jobs) == count)
        first.gate.set()
        answers = {job: one.result(PATIENCE) for job, one in zip(jobs, waiting, strict=True)}
        assert held.result(PATIENCE)[0] == 200
        assert {name: model.batches for name, model in models.items()} == {"pets": [8], "digits": [8]}
    check_answers(server, files, photos, answers)


# ---- memory -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    vt.Bundle(model=add_noise(vt.create("Ti/16", classes=3))).save(path)
    return path


def test_a_model_beyond_the_memory_is_named(files, large):
    models = [f"pets={files['pets']}", f"large={large}"]
    command = [sys.executable, "-m", "vitrail", "serve", *models, "--memory", "10", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    sentence = (
        r"large needs 2\d MB for its weights and one image, and each model may take 10 MB; raise --memory, or "
        r"serve a smaller model\."
    )
    assert re.search(sentence, " ".join(done.stderr.split())), done.stderr
    assert "Traceback" not in done.stderr


def test_each_model_has_a_batch_that_fits(files, large):
    """And the command says so of the one whose batch is smaller."""
    models = [f"pets={files['pets']}", f"large={large}"]
    command = [sys.executable, "-m", "vitrail", "serve", *models, "--memory", "30", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        server = Running(int(re.search(r"http://[\d.]+:(\d+)", lines[2])[1]))
        until(lambda: server.get("/readyz")[0] == 200)
        limits = {name: server.get(f"/v1/models/{name}/model")[1]["limits"] for name in ("pets", "large")}
        assert limits["pets"]["batch"] == 16
        assert 1 <= (few := limits["large"]["batch"]) < 16
        assert lines[0] == "pets: 5 classes, 32x32 pixels\n"
        assert lines[1] == f"large: 3 classes, 224x224 pixels, at most {few} images in a batch (--memory)\n"
        body, kind = form(*[make_image(seed) for seed in range(8)])
        status, said = server.get("/v1/models/large/predict", body=body, headers={"Content-Type": kind})
        assert status == 200
        assert len(said["predictions"]) == 8
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
