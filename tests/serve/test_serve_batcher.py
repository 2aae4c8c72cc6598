"""The queue and the model's thread: who is run, with whom, and who never is."""

import asyncio
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from PIL import Image

import vitrail as vt
from tests.support.serving import LABELS, PATIENCE, Gated, form, make_image, serving, toy, until
from vitrail.predict import Prediction
from vitrail.serve.batcher import Batcher, DeadlineExceeded
from vitrail.serve.messages import HTTPError
from vitrail.serve.prometheus import Metrics


def levels(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3)).astype(np.uint8)


def run(story, predictor=None, capacity=64, batch=16, died=lambda error: None):
    """Run a coroutine with a batcher."""

    async def whole():
        batcher = Batcher(capacity, Metrics())
        batcher.submit = partial(batcher.submit, predictor=predictor, batch=batch)
        threading.Thread(target=batcher.run, args=[died], name="model", daemon=True).start()
        return await asyncio.wait_for(story(batcher), PATIENCE)

    return asyncio.run(whole())


def soon(seconds=PATIENCE):
    return time.monotonic() + seconds


def test_waiting_images_are_batched_without_delay():
    predictor = Gated(toy())

    async def story(batcher):
        await batcher.submit(levels(), soon())
        predictor.gate.clear()
        jobs = [batcher.submit(levels(0), soon())]
        await asyncio.to_thread(predictor.entered.acquire)
        await asyncio.to_thread(predictor.entered.acquire)
        jobs += [batcher.submit(levels(seed), soon()) for seed in range(1, 21)]
        predictor.gate.set()
        found = await asyncio.gather(*jobs)
        assert predictor.batches == [1, 1, 8, 8, 4]
        return found

    found = run(story, predictor, batch=8)
    alone = list(predictor.stream([levels(seed) for seed in range(21)]))
    for one, other in zip(found, alone, strict=True):
        assert np.abs(one.logits - other.logits).max() < 1e-5
        assert one.label == other.label


def test_images_of_different_sizes_are_not_batched():
    """As those do that an ONNX file resizes: together they would only wait for each other."""
    predictor = Gated(toy())
    predictor.engine.one_by_one = True
    with serving(predictor) as running:
        body, kind = form(*[make_image()] * 3)
        assert running.predict(body, kind=kind)[0] == 200
        assert predictor.batches == [1, 1, 1]
        limits = running.get("/v1/model")[1]["limits"]
        assert (limits["batch"], limits["queue"], limits["files"]) == (1, 8, 8)  # whole images wait: fewer


def test_exclusive_call_in_order():
    predictor = Gated(toy())

    async def story(batcher):
        predictor.gate.clear()
        first = batcher.submit(levels(), soon())
        await asyncio.to_thread(predictor.entered.acquire)
        jobs = [batcher.submit(levels(), soon()) for _ in range(2)]
        call = batcher.call(lambda: (threading.current_thread().name, list(predictor.batches)), soon())
        jobs += [batcher.submit(levels(), soon()) for _ in range(3)]
        predictor.gate.set()
        await asyncio.gather(first, *jobs)
        assert await call == ("model", [1, 2])
        assert predictor.batches == [1, 2, 3]

    run(story, predictor)


def test_late_and_cancelled_requests_are_not_run():
    predictor = Gated(toy())

    async def story(batcher):
        predictor.gate.clear()
        first = batcher.submit(levels(), soon())
        await asyncio.to_thread(predictor.entered.acquire)
        late = batcher.submit(levels(), soon(0.05))
        gone = batcher.submit(levels(), soon())
        good = batcher.submit(levels(), soon())
        gone.cancel()
        await asyncio.sleep(0.1)
        predictor.gate.set()
        await asyncio.gather(first, good)
        with pytest.raises(DeadlineExceeded):
            await late
        assert predictor.batches == [1, 1]
        assert b"vitrail_dropped_total 2.0" in batcher.metrics.text()

    run(story, predictor)


class Poisoned(Gated):
    """Chokes on a batch with a black image in it, once it is told to; has no answer for a white one."""

    armed = True

    def predict_batch(self, batch):
        if self.armed and any(not found.any() for _, found in batch):
            raise RuntimeError("/home/somebody/model.py choked")
        for (_, found), good in zip(batch, super().predict_batch(batch), strict=True):
            yield Prediction("", error="The model's answer is not a number.") if found.min() == 255 else good


def test_bad_image_fails_alone():
    predictor = Poisoned(toy())
    some = [
        levels(1),
        np.zeros((32, 32, 3), np.uint8),
        levels(2),
        np.full((32, 32, 3), 255, np.uint8),
        levels(3),
    ]

    async def story(batcher):
        predictor.gate.clear()
        jobs = [batcher.submit(one, soon()) for one in some]
        predictor.gate.set()
        return await asyncio.gather(*jobs, return_exceptions=True)

    found = run(story, predictor)
    assert isinstance(found[1], RuntimeError)
    assert "not a number" in found[3].error
    for place in (0, 2, 4):
        assert np.abs(found[place].logits - predictor(some[place]).logits).max() < 1e-5


def blank(level):
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (level,) * 3).save(file, "PNG")
    return file.getvalue()


def test_bad_image_fails_alone_over_http():
    predictor = Poisoned(toy())
    predictor.armed = False  # the warm-up's image is black
    with serving(predictor) as running:
        predictor.armed = True
        body, kind = form(make_image(1), blank(0), make_image(2), blank(255))
        status, said = running.predict(body, kind=kind)
        assert status == 200
        assert [one["error"] is None for one in said["predictions"]] == [True, False, True, False]
        assert [one["label"] in LABELS for one in said["predictions"]] == [True, False, True, False]
        assert running.predict(blank(255))[0] == 500
        status, said = running.predict(blank(0))
        assert status == 500
        assert said["error"]["code"] == "internal_error"
        assert "somebody" not in str(said) + str(running.log)
        assert running.predict()[0] == 200


def test_slots_are_held_from_decoding_to_response():
    async def story(batcher):
        with batcher.reserve(3):
            with pytest.raises(HTTPError) as caught:
                batcher.check_capacity(2)
            assert caught.value.status == 503
            with batcher.reserve(1), pytest.raises(HTTPError):
                batcher.check_capacity()
        assert batcher.in_progress == 0

    run(story, capacity=4)


def test_death_of_the_model_thread_is_reported():
    died = []

    async def story(batcher):
        jobs = [batcher.call(leave, soon()), batcher.call(lambda: 1, soon())]
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(one) for one in found] == [RuntimeError] * 2

    run(story, died=died.append)
    assert [type(error) for error in died] == [SystemExit]


def test_responses_are_never_swapped():
    """Hundreds of different images at once, alone and in forms: each client gets the answer for its own."""
    bundle = toy()
    predictor = vt.Predictor(bundle)
    files = [make_image(seed, size=(8, 8)) for seed in range(60)]
    images = [Image.open(io.BytesIO(data)) for data in files]
    expected = [found.top() for found in predictor(images)]
    assert len({tuple(guesses) for guesses in expected}) == 60

    with serving(vt.Predictor(bundle), queue=200) as running:

        def ask(number):
            some = [(number * 7 + step) % 60 for step in range(1 + number % 4)]
            body, kind = form(*(files[one] for one in some))
            status, said = running.predict(body, kind=kind)
            assert status == 200
            for one, found in zip(some, said["predictions"], strict=True):
                for (label, score), guess in zip(expected[one], found["top"], strict=True):
                    assert guess["label"] == label
                    assert abs(guess["score"] - score) < 1e-5

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(240)))
        assert running.count("vitrail_images_total") == 600
        assert running.count("vitrail_batch_size_count") < 600  # some went together


def leave(*given):
    raise SystemExit


def test_server_exits_when_the_model_dies():
    predictor = Gated(toy())
    with serving(predictor) as running:
        predictor.predict_batch = leave
        assert running.predict()[0] == 500
        until(lambda: running.app.stopping)
        assert not running.app.accepting
    assert running.code == 1
