"""The server as an ASGI application: under uvicorn, and mounted in FastAPI, with the same answers."""

import asyncio
import contextlib
import socket
import threading

import fastapi
import pytest
import uvicorn

import vitrail as vt
from tests.support.browser import needs_chromium
from tests.support.digit_clip import FILE
from tests.support.serving import Running, form, make_image, serving, toy, until
from vitrail.serve import asgi
from vitrail.serve.server_settings import ServeConfig

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


@pytest.fixture(scope="module")
def both(bundle):
    """The plain server and FastAPI with the app mounted in it, each with a classifier and a tiny CLIP."""
    models = {"pets": bundle, "digits": vt.load(FILE)}
    api = fastapi.FastAPI()
    api.mount("/vision", asgi({name: vt.Predictor(one) for name, one in models.items()}))
    predictors = {name: vt.Predictor(one) for name, one in models.items()}
    with serving(predictors) as ours, under_uvicorn(api) as mounted:
        yield ours, mounted


IMAGES = [make_image(seed) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("path", "files", "fields"),
    [
        ("/v1/predict", IMAGES, {"top": 5}),
        ("/v1/models/digits/predict", IMAGES, {"labels": "zero,one,seven", "top": 3}),
        ("/v1/models/digits/predict", IMAGES, {"labels": "a large two,a small two"}),
        ("/v1/models/digits/predict", IMAGES, {}),
        ("/v1/models/digits/predict", IMAGES, {"labels": "zero"}),
        ("/v1/predict", IMAGES, {"labels": "cat,dog"}),
        ("/v1/embed", [*IMAGES, b"no image"], {}),
        ("/v1/models/digits/embed", IMAGES, {}),
        ("/v1/explain", IMAGES[:1], {"layer": 0, "top": 2}),
        ("/v1/models/digits/explain", IMAGES[:1], {}),
        ("/v1/explain", IMAGES, {}),
        ("/v1/models/none/explain", IMAGES, {}),
    ],
)
def test_values_of_the_mounted_app_are_those_of_the_plain_server(both, path, files, fields):
    body, kind = form(*files, **fields)
    ours, mounted = (
        server.get(prefix + path, body=body, headers={"Content-Type": kind})
        for server, prefix in zip(both, ("", "/vision"), strict=True)
    )
    assert (ours[0], without_seconds(ours[1])) == (mounted[0], near(mounted[1]))
    if ours[0] == 200:
        assert len(set(numbers(ours[1]))) >= 6  # there is something to compare


def numbers(said):
    """All numbers of an answer."""
    if isinstance(said, dict | list):
        return [one for part in (said.values() if isinstance(said, dict) else said) for one in numbers(part)]
    return [said] if isinstance(said, float) else []


def test_labels_of_a_request_are_its_own(both, tmp_path):
    """One request after the other with other words: each has the scores of its words, by value."""
    (tmp_path / "one.png").write_bytes(IMAGES[0])
    for labels in (["zero", "one"], ["one", "zero", "nine"], ["zero", "one"]):
        predictor = vt.Predictor(vt.load(FILE).zero_shot(labels), workers=0)
        body, kind = form(IMAGES[0], labels=",".join(labels))
        path = "/vision/v1/models/digits/predict"
        status, said = both[1].get(path, body=body, headers={"Content-Type": kind})
        assert status == 200
        top = {one["label"]: one["score"] for one in said["predictions"][0]["top"]}
        assert top == pytest.approx(dict(predictor(tmp_path / "one.png").top(3)), abs=1e-5)


def test_addresses_start_where_the_app_is_mounted(both):
    ours, mounted = both
    assert [one["url"] for one in ours.get("/v1/models")[1]] == ["/v1/models/pets", "/v1/models/digits"]
    (url, _) = [one["url"] for one in mounted.get("/vision/v1/models")[1]]
    assert url == "/vision/v1/models/pets"
    assert mounted.get(f"{url}/model") == ours.get("/v1/model")
    plain, document = ours.get("/openapi.json")[1], mounted.get("/vision/openapi.json")[1]
    assert document == {**plain, "servers": [{"url": "/vision"}]}


def test_websockets_are_closed(bundle):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(asgi(vt.Predictor(bundle))({"type": "websocket"}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1000}]


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/vision", "/vision/"])
def test_the_page_where_the_app_is_mounted(browser, both, path, tmp_path):
    (tmp_path / "one.png").write_bytes(IMAGES[0])
    page = browser.new_page()
    try:
        page.goto(f"http://127.0.0.1:{both[1].port}{path}")
        page.wait_for_selector("#model-name:text-is('pets')", timeout=30_000)
        page.set_input_files("#pick", tmp_path / "one.png")
        expected = both[0].predict(IMAGES[0])[1]["predictions"][0]["label"]
        page.wait_for_selector(f"#label:text-is({expected!r})", timeout=30_000)
    finally:
        page.close()
