"""The server as an ASGI application: under uvicorn, and mounted in FastAPI, with the same answers."""

import asyncio
import contextlib
import socket
import threading

import fastapi
import pytest
import uvicorn

import vitrail as vt
from tests.support.serving import Running, form, make_image, serving, toy, until
from vitrail.serve import asgi
from vitrail.serve.settings import ServeConfig

TOKEN = "correct-horse-battery-staple"


@contextlib.contextmanager
def under_uvicorn(application):
    """uvicorn in a thread of this process."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        yield Running(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def bundle():
    return toy()


@pytest.fixture(scope="module")
def plain(bundle):
    with under_uvicorn(asgi({"toy": vt.Predictor(bundle)}, ServeConfig(body=100_000, files=4))) as running:
        yield running


def near(said):
    """An answer to compare with: without its seconds, numbers to 1e-6, since images may share a batch or not."""
    if isinstance(said, dict):
        return {key: near(value) for key, value in said.items() if key != "seconds"}
    if isinstance(said, list):
        return [near(value) for value in said]
    return pytest.approx(said, abs=1e-6) if isinstance(said, float) else said


def without_seconds(said):
    return {key: value for key, value in said.items() if key != "seconds"}


def test_the_answers_of_vitrail_serve(plain, bundle):
    body, kind = form(make_image(1), b"no image", make_image(2), top=3)
    headers = {"Content-Type": kind}
    with serving(vt.Predictor(bundle), body=100_000, files=4) as ours:
        for path in ("/v1/predict", "/v1/embed"):
            one, other = (server.get(path, body=body, headers=headers) for server in (ours, plain))
            assert (one[0], without_seconds(one[1])) == (other[0], near(other[1]))
        for path in ("/v1/model", "/openapi.json", "/healthz", "/readyz", "/v1/nothing", "/v1/predict"):
            assert ours.get(path) == plain.get(path)
        hostile = [make_image()[:50], b"", b"x" * 200_000]
        for data in hostile:
            assert ours.predict(data) == plain.predict(data)
        assert ours.ask("/")[2] == plain.ask("/")[2]


def test_headers_and_head(plain):
    status, headers, body = plain.ask("/v1/model", method="HEAD")
    assert (status, body) == (200, b"")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert plain.predict(headers={"Origin": "http://evil"})[0] == 403
    assert plain.get("/v1/model", headers={"Host": "evil.example"})[0] == 403
    assert plain.ask("/metrics")[0] == 200


def test_a_token():
    application = asgi(vt.Predictor(toy()), ServeConfig(token=TOKEN))
    with under_uvicorn(application) as running:
        assert running.predict()[0] == 401
        assert running.predict(headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_mounted_in_fastapi(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    api = fastapi.FastAPI()
    api.mount("/vision", asgi({"pets": tmp_path / "pets.safetensors", "toy": vt.Predictor(bundle)}))

    @api.get("/own")
    def own():
        return {"mine": True}

    with under_uvicorn(api) as running:
        assert running.get("/own") == (200, {"mine": True})
        expected = vt.Predictor(bundle)
        headers = {"Content-Type": "image/png"}
        for path in ("/vision/v1/predict", "/vision/v1/models/toy/predict"):
            status, said = running.get(path, body=make_image(), headers=headers)
            assert status == 200
            assert said["predictions"][0]["label"] in expected.scale.labels
        assert running.get("/vision/v1/models")[1][0]["name"] == "pets"
        assert running.get("/vision/v1/nothing")[0] == 404


def test_websockets_are_closed(bundle):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(asgi(vt.Predictor(bundle))({"type": "websocket"}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1000}]
