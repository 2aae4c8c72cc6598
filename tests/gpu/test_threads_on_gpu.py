"""One model on a GPU in several threads, by its own code and in CUDA graphs; and models on the second GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.fast.cuda_graph import Replay
from vitrail.fast.inference_routes import PaddedReplay, plain_forward
from vitrail.views import rollout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
THREADS = 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))


def build(device="cuda", **fields):
    """In training mode, in which dropout changes every answer."""
    torch.manual_seed(0)
    return add_noise(vt.create("Ti/16@64", classes=10, dropout=0.5, **fields)).to(device).train()


def in_threads(function):
    """What function(number) returns, of threads that start together."""
    barrier = threading.Barrier(THREADS)

    def call(number):
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, range(THREADS)))


def logits_of(predictions):
    return np.stack([one.logits for one in predictions])


def pixels():
    return np.random.default_rng(0).integers(0, 256, (THREADS, 8, 64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("captured", [True, False])
def test_a_predictor_in_threads(captured):
    """Batches of 1, 2, 4 and 8: shapes are captured while other threads compute."""
    model, images = build(), pixels()
    alone, predict = vt.Predictor(model), vt.Predictor(model)
    if captured:
        assert "CUDA graph" in predict.acceleration.route
    else:
        alone.engine.accelerated = predict.engine.accelerated = None
    counts = (1, 2, 4, 8)
    expected = [[logits_of(alone(batch[:count])) for count in counts] for batch in images]

    def call(number):
        wrong = 0
        for turn in range(80):
            kind = (turn + number) % 4
            found = logits_of(predict(images[number][: counts[kind]]))
            wrong += not np.allclose(found, expected[number][kind], atol=1e-3)
        return wrong

    assert in_threads(call) == [0] * THREADS
    assert model.training


@pytest.mark.parametrize("kind", [Replay, PaddedReplay])
def test_a_graph_replayed_in_streams_of_their_own(kind):
    """The same bits as alone; outputs are checked on their own stream after many more calls."""
    model = build()
    replay = kind(plain_forward(model, torch.float32))
    images = torch.randn(THREADS, 8, 3, 64, 64, device="cuda")
    with torch.inference_mode():
        expected = [replay(batch)[1].clone() for batch in images]
    torch.cuda.synchronize()

    def call(number):
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            found = [replay(images[number])[1] for _ in range(300)]
            return int(sum((one != expected[number]).any() for one in found))

    assert in_threads(call) == [0] * THREADS


def test_more_shapes_than_are_captured():
    model = build()
    replay = Replay(plain_forward(model, torch.float32))
    images = torch.randn(12, 3, 64, 64, device="cuda")
    with torch.inference_mode():
        expected = plain_forward(model, torch.float32)(images)[1]

    def call(number):
        wrong = 0
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(60):
                count = 1 + (turn + 3 * number) % 12
                wrong += not torch.allclose(replay(images[:count])[1], expected[:count], atol=1e-3)
        return wrong

    torch.cuda.synchronize()
    assert in_threads(call) == [0] * THREADS


def test_predictors_that_are_built_and_captured_at_the_same_time():
    models, images = [build(depth=2) for _ in range(THREADS)], pixels()
    expected = [logits_of(vt.Predictor(model)(batch)) for model, batch in zip(models, images, strict=True)]
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()

    def call(number):
        predict = vt.Predictor(models[number])
        assert "CUDA graph" in predict.acceleration.route
        return [float(abs(logits_of(predict(images[number])) - expected[number]).max()) for _ in range(10)]

    assert np.max(in_threads(call)) < 1e-3
    assert (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before


@pytest.mark.parametrize("captured", [True, False])
def test_predictions_beside_explanations_and_edits(captured):
    model, images = build(), pixels()
    predict = vt.Predictor(model)
    if not captured:
        predict.engine.accelerated = None
    expected = [logits_of(predict(batch)) for batch in images]
    inputs = torch.stack([predict.preprocess.normalize(image) for image in images[2]]).cuda()
    maps = rollout.compute(model, inputs).maps

    def edited():
        with vt.edit(model, {"embed": torch.zeros_like}), torch.no_grad():
            return model(inputs).cpu().numpy()

    model.eval()  # the edits are of forward passes of the model itself
    expected[3] = edited()

    def call(number):
        errors = []
        for _ in range(30):
            if number == 2:
                error = abs(rollout.compute(model, inputs).maps - maps).max()
            else:
                found = edited() if number == 3 else logits_of(predict(images[number]))
                error = abs(found - expected[number]).max()
            errors.append(float(error))
        return max(errors)

    assert max(in_threads(call)) < 2e-2
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(block.attention.explicit for block in model.blocks)


def test_an_edit_is_in_blocks_that_a_backward_pass_computes_again():
    """On a GPU, that is in a thread of torch."""
    images = torch.randn(2, 3, 64, 64, device="cuda")
    gradients = []
    for checkpointing in (False, True):
        model = build(depth=2).eval().set_grad_checkpointing(checkpointing)
        with vt.edit(model, {"blocks.0.mlp.hidden": lambda hidden: 3 * hidden}):
            model(images).square().mean().backward()
        gradients.append(model.blocks[0].mlp.fc1.weight.grad)
    torch.testing.assert_close(*gradients)


@two_gpus
def test_predictions_and_kernels_on_the_second_gpu():
    assert torch.cuda.current_device() == 0
    images = pixels()[0]
    expected = logits_of(vt.Predictor(build("cuda:0"))(images))
    predict = vt.Predictor(build("cuda:1"))
    assert "CUDA graph" in predict.acceleration.route
    assert np.allclose(logits_of(predict(images)), expected, atol=1e-3)
    model = build("cuda:1")
    fast = vt.accelerate(model, goal="latency")
    assert fast(torch.randn(1, 3, 64, 64, device="cuda:1")).device.index == 1
    assert torch.cuda.current_device() == 0


@two_gpus
def test_training_on_the_second_gpu(tmp_path):
    from tests.support.tiny_runs import write_arrays

    data = write_arrays(tmp_path / "data.npz")
    run = vt.train(data, out=tmp_path / "run", recipe="small", device="cuda:1", epochs=2)
    assert np.isfinite(run.metrics[-1]["val_loss"])
    assert torch.cuda.current_device() == 0
