"""Routes: what they take, what they say, and to whom."""

import base64
import io
import json
import os
import re
import time

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

import vitrail as vt
from tests.support.serving import LABELS, form, make_image, png, request, serving, statuses, toy, until
from vitrail.serve.examples import Example
from vitrail.serve.openapi import SCHEMAS

TOKEN = "correct-horse-battery-staple"
WITH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def bundle():
    return toy()


@pytest.fixture(scope="module")
def server(bundle):
    examples = [Example("one", "image/png", make_image())]
    with serving(vt.Predictor(bundle), files=4, pixels=1_000_000, examples=examples) as running:
        yield running
    assert not [line for line in running.log if line.startswith("internal error")]


@pytest.fixture(scope="module")
def guarded(bundle):
    with serving(vt.Predictor(bundle), token=TOKEN) as running:
        yield running


# ---- answers ------------------------------------------------------------------------------------


def test_predictions_are_bit_equal_to_the_predictor(server, bundle):
    data = make_image(3, size=(70, 33))
    expected = vt.Predictor(bundle)(Image.open(io.BytesIO(data)))
    status, said = server.predict(data, "?top=3")
    assert status == 200
    (found,) = said["predictions"]
    guesses = [{"label": label, "score": score} for label, score in expected.top(3)]
    assert found == dict(
        name=None,
        label=expected.label,
        score=expected.score,
        unsure=False,
        ood=None,
        ood_score=None,
        labels=guesses[:1],
        top=guesses,
        error=None,
    )
    assert said["model"] == "toy"
    assert 0 <= said["seconds"]["decode"] <= said["seconds"]["total"]


def test_unsure_field(bundle):
    card = vt.Card(metrics={"temperature": 1.0, "threshold": 0.999})
    with serving(vt.Predictor(vt.Bundle(model=bundle.model, labels=LABELS, card=card))) as running:
        (found,) = running.predict()[1]["predictions"]
        assert found["label"] is None
        assert found["unsure"] is True
        assert 0 < found["score"] == found["top"][0]["score"] < 0.999
        assert running.get("/v1/model")[1]["card"]["metrics"]["threshold"] == 0.999


def test_model_without_a_head():
    with serving(vt.Predictor(vt.Bundle(model=vt.create("mu/4", classes=0)))) as running:
        assert running.predict()[1]["predictions"][0]["top"] == []


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_formats_are_recognized_by_content(server, kind):
    assert server.predict(make_image(kind=kind), kind="image/jpeg")[0] == 200
    assert server.predict(make_image(kind=kind), kind="application/octet-stream")[0] == 200


def test_several_images_with_one_bad(server):
    body, kind = form(make_image(1), b"no image", make_image(2), top=2)
    status, said = server.predict(body, kind=kind)
    assert status == 200
    assert [one["name"] for one in said["predictions"]] == ["f0.png", "f1.png", "f2.png"]
    assert [len(one["top"]) for one in said["predictions"]] == [2, 0, 2]
    assert said["predictions"][1]["error"].startswith("The file is not an image")


def test_names_are_shortened(server):
    head = '--e\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n'
    for name, expected in [('a\\"b<ü>.png', 'a"b<ü>.png'), ("x" * 1000, "x" * 200), ("", None)]:
        body = (head % name).encode() + make_image() + b"\r\n--e--"
        (found,) = server.predict(body, kind="multipart/form-data; boundary=e")[1]["predictions"]
        assert found["name"] == expected


def test_explain(server, bundle):
    status, said = server.get("/v1/explain?layer=0&top=2", body=make_image())
    assert status == 200
    assert said["model"] == "toy"
    assert said["prediction"] == server.predict(query="?top=2")[1]["predictions"][0]
    assert (said["layer"], said["layers"], said["grid"]) == (0, 1, [8, 8])
    levels = np.asarray(Image.open(io.BytesIO(base64.b64decode(said["image"]["png"]))))
    image = Image.open(io.BytesIO(make_image()))
    assert (levels == bundle.preprocess.pixels(image)).all()
    for path, body in [("?layer=1", make_image()), ("?layer=-1", make_image()), ("?layer=x", make_image())]:
        assert server.get("/v1/explain" + path, body=body)[1]["error"]["code"] == "bad_layer"
    body, kind = form(make_image(), make_image())
    assert server.get("/v1/explain", body=body, headers={"Content-Type": kind})[0] == 400
    assert server.get("/v1/explain", body=b"x")[0] == 415


def test_weight_figures_are_computed_once(server):
    for name in ("filters", "positions"):
        first, second = (server.get(f"/v1/{name}") for _ in range(2))
        assert first == second
        assert first[0] == 200


def test_model_description(server, bundle):
    status, said = server.get("/v1/model")
    assert status == 200
    assert (said["name"], said["size"], said["grid"], said["depth"]) == ("toy", [32, 32], [8, 8], 1)
    assert said["labels"] == {"count": 5, "first": LABELS}
    assert said["parameters"] == sum(p.numel() for p in bundle.model.parameters())
    assert said["limits"]["files"] == 4
    assert said["explain"] == {"available": True, "reason": None}


def test_examples(server):
    assert server.get("/v1/examples") == (200, [{"name": "one", "url": "/v1/examples/0"}])
    status, headers, data = server.ask("/v1/examples/0")
    assert (status, headers["Content-Type"], data) == (200, "image/png", make_image())
    assert server.ask("/v1/examples/%30")[2] == data  # the same path, percent-encoded
    for path in ("1", "-1", "00", "", "0/", "x", "../examples/0"):
        assert server.get(f"/v1/examples/{path}")[0] == 404


# ---- what is refused ----------------------------------------------------------------------------


HOSTILE = {
    "text": (b"hello", 415),
    "a script": (b"#!/bin/sh\nrm -rf /\n", 415),
    "EPS, which Pillow would give to a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415),
    "PPM, which Pillow reads": (b"P6 2 2 255\n" + bytes(12), 415),
    "a pickle": (b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x02os\x94.", 415),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415),
    "a bomb": (png(30_000, 30_000), 413),
    "a bomb beyond what Pillow opens": (png(2**31 - 1, 2**31 - 1), 413),
    "just too large": (png(1001, 1000), 413),
    "half a PNG": (make_image()[:2000], 422),
    "half a JPEG": (make_image(kind="JPEG", size=(100, 100))[:2000], 422),
    "a PNG without pixels": (png(100, 100), 422),
    "a PNG of garbage": (png(100, 100, b"\xff" * 50), 422),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images(server, name):
    data, expected = HOSTILE[name]
    status, said = server.predict(data)
    assert (status, set(said["error"])) == (expected, {"code", "message"})
    assert server.predict()[0] == 200


def test_extreme_aspect_ratio(bundle):
    """Resized by its short side, a strip of 20,000 x 1 would become 640,000 x 32."""
    squashed, kept = (
        vt.Predictor(vt.Bundle(model=bundle.model, preprocess=vt.Preprocess(size=32, resize=how)))
        for how in ("squash", "shortest")
    )
    strip = png(20_000, 1, bytes(20_001))
    with serving(kept, pixels=1_000_000) as running:
        assert running.predict(strip)[0] == 413
    with serving(squashed, pixels=1_000_000) as running:
        assert running.predict(strip)[0] == 200


FORMS = {
    "no boundary": (b"", "multipart/form-data", 400),
    "an empty boundary": (b"--\r\n", "multipart/form-data; boundary=", 400),
    "a boundary of 71 letters": (b"", "multipart/form-data; boundary=" + "x" * 71, 400),
    "nothing": (b"", "multipart/form-data; boundary=e", 400),
    "only an end": (b"--e--", "multipart/form-data; boundary=e", 400),
    "a preamble": (b"x" * 9999 + b"\r\n--e--", "multipart/form-data; boundary=e", 400),
    "another boundary": (form(make_image())[0], "multipart/form-data; boundary=e", 400),
    "no end": (form(make_image())[0][:-9], "multipart/form-data; boundary=edge", 400),
    "no head": (b"--e\r\nhello\r\n--e--", "multipart/form-data; boundary=e", 400),
    "an endless head": (
        b"--e\r\nA: " + b"x" * 9999 + b"\r\n\r\n\r\n--e--",
        "multipart/form-data; boundary=e",
        400,
    ),
    "no name": (b"--e\r\nA: b\r\n\r\nx\r\n--e--", "multipart/form-data; boundary=e", 400),
    "another name": (form(other="x")[0], "multipart/form-data; boundary=edge", 400),
    "a field twice": (form(top=1)[0][:-8] + form(top=1)[0], "multipart/form-data; boundary=edge", 400),
    "a long field": (form(top="1" * 200)[0], "multipart/form-data; boundary=edge", 400),
    "only fields": (form(top=1)[0], "multipart/form-data; boundary=edge", 400),
    "base64": (
        b'--e\r\nContent-Disposition: form-data; name="file"\r\nContent-Transfer-Encoding: base64\r\n\r\nAA\r\n--e--',
        "multipart/form-data; boundary=e",
        400,
    ),
    "too many files": (form(*[b"x"] * 5)[0], "multipart/form-data; boundary=edge", 413),
    "ten thousand parts": (form(*[b""] * 10_000)[0], "multipart/form-data; boundary=edge", 413),
    "fields in the address": (b"file=x", "application/x-www-form-urlencoded", 415),
    "JSON with an address": (b'{"url": "http://169.254.169.254/"}', "application/json", 415),
    "a pickle": (b"\x80\x04.", "application/python-pickle", 415),
}


@pytest.mark.parametrize("name", FORMS)
def test_hostile_forms(server, name):
    body, kind, expected = FORMS[name]
    start = time.monotonic()
    status, said = server.predict(body, kind=kind)
    assert (status, set(said["error"])) == (expected, {"code", "message"})
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "query",
    [
        "?top=0",
        "?top=101",
        "?top=x",
        "?top=",
        "?top=1&top=2",
        "?other=1",
        "?" + "a&" * 500,
        "?top=" + "9" * 5000,
    ],
)
def test_hostile_addresses(server, query):
    assert server.predict(query=query)[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        "/../settings.py",
        "/%2e%2e/settings.py",
        "//etc/passwd",
        "/page/index.html",
        "/index.html/",
        "/./style.css",
        "/style.css%00",
        "/..\\settings.py",
        "/__init__.py",
        "/v1/",
        "/v1/predict/",
        "/V1/predict",
    ],
)
def test_unknown_routes(server, path):
    said = server.talk(request(path, method="GET", Connection="close"))
    assert statuses(said) == [404]


def test_page(server):
    status, headers, body = server.ask("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    names = re.findall(r"""(?:src|href)="([\w./-]+)\"""", body.decode())
    assert names
    for name in names:
        assert server.ask("/" + name)[0] == 200


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [
        ("/v1/predict", "GET", "POST"),
        ("/healthz", "POST", "GET, HEAD"),
        ("/v1/model", "DELETE", "GET, HEAD"),
        ("/", "PUT", "GET, HEAD"),
        ("/v1/predict", "OPTIONS", "POST"),
    ],
)
def test_wrong_method(server, path, method, allow):
    status, headers, _ = server.ask(path, method=method)
    assert (status, headers["Allow"]) == (405, allow)


# ---- who may ask --------------------------------------------------------------------------------


def test_routes_without_a_token(guarded):
    for path in ("/v1/model", "/v1/filters", "/v1/positions", "/v1/examples", "/v1/examples/0", "/metrics"):
        status, headers, _ = guarded.ask(path)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert guarded.predict()[0] == guarded.get("/v1/explain", body=make_image())[0] == 401
    for path in ("/", "/healthz", "/readyz", "/openapi.json"):
        assert guarded.ask(path)[0] == 200


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer \xfc" * 3,
    ],
)
def test_wrong_tokens(guarded, given):
    status, said = guarded.predict(headers={"Authorization": given})
    assert status == 401
    assert TOKEN not in str(said)


def test_token(guarded):
    assert guarded.predict(headers=WITH)[0] == 200
    assert guarded.predict(headers={"Authorization": f"bearer {TOKEN}"})[0] == 200
    assert guarded.get("/v1/model", headers=WITH)[0] == 200


def test_two_tokens_are_refused(guarded):
    """One proxy may check the first of them and the next the second."""
    for pair in [(TOKEN, "other"), ("other", TOKEN), (TOKEN, TOKEN)]:
        rows = "".join(f"Authorization: Bearer {one}\r\n" for one in pair)
        said = guarded.talk(f"GET /v1/model HTTP/1.1\r\nHost: a\r\n{rows}Connection: close\r\n\r\n".encode())
        assert statuses(said) == [400]


def test_token_comparison_is_constant_time(guarded, monkeypatch):
    asked = []
    monkeypatch.setattr("vitrail.serve.app.hmac.compare_digest", lambda *pair: asked.append(pair) or False)
    assert guarded.predict(headers=WITH)[0] == 401
    assert asked == [(f"Bearer {TOKEN}".encode(),) * 2]


def test_token_is_never_shown_or_logged(guarded):
    cases = [("/v1/predict?top=" + TOKEN, "POST"), ("/" + TOKEN, "GET"), ("/v1/model", TOKEN)]
    for path, method in cases:
        assert TOKEN.encode() not in guarded.talk(
            request(path, method=method, Authorization=f"Bearer {TOKEN}", Connection="close")
        )
    assert TOKEN not in "".join(guarded.log) + repr(guarded.app.settings)
    assert TOKEN.encode() not in guarded.ask("/metrics", headers=WITH)[2]


def test_cross_origin_requests_are_refused(server):
    own = f"127.0.0.1:{server.port}"
    for origin, expected in [
        (f"http://{own}", 200),
        ("http://evil.example", 403),
        ("null", 403),
        (f"http://{own}.evil.example", 403),
        ("http://127.0.0.1:1", 403),
    ]:
        assert server.predict(headers={"Origin": origin})[0] == expected


def test_dns_rebinding_is_refused(server):
    """DNS rebinding: to the browser, the page of evil.example and this server are then one and the same."""
    for host, expected in [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("vitrail.localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.0.7", 200),  # a forwarded port; nobody can give an address another meaning
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ]:
        status, said = server.predict(headers={"Host": host, "Origin": f"http://{host}"})
        assert status == expected, (host, said)
        assert status == 200 or said["error"]["code"] == "wrong_host"
    assert server.ask("/metrics", headers={"Host": "evil.example"})[0] == 403
    assert statuses(server.talk(b"GET /metrics HTTP/1.0\r\n\r\n")) == [403]  # no name at all
    assert server.ask("/healthz", headers={"Host": "evil.example"})[0] == 200


def test_token_or_public_allows_any_host(guarded, bundle):
    assert guarded.ask("/metrics", headers={**WITH, "Host": "pets.example"})[0] == 200
    with serving(vt.Predictor(bundle), public=True) as running:
        assert running.predict(headers={"Host": "pets.example"})[0] == 200


# ---- what is counted and written ----------------------------------------------------------------


def test_metrics_parse_as_prometheus(server):
    before = {name: server.count(name) for name in ("vitrail_bad_images_total", "vitrail_images_total")}
    body, kind = form(make_image(), b"bad")
    server.predict(body, kind=kind)
    families = {
        family.name: family for family in text_string_to_metric_families(server.ask("/metrics")[2].decode())
    }
    assert server.count("vitrail_bad_images_total") == before["vitrail_bad_images_total"] + 1
    assert server.count("vitrail_images_total") == before["vitrail_images_total"] + 1
    assert families["vitrail_requests"].type == "counter"
    rows = {tuple(sorted(one.labels.items())): one.value for one in families["vitrail_requests"].samples}
    assert rows[("method", "POST"), ("route", "/v1/predict"), ("status", "200")] >= 1
    sizes = [one for one in families["vitrail_batch_size"].samples if one.name.endswith("bucket")]
    assert [one.value for one in sizes] == sorted(one.value for one in sizes)
    assert sizes[-1].labels["le"] == "+Inf"
    assert families["vitrail_queue_depth"].samples[0].value == 0
    assert families["vitrail_ready"].samples[0].value == 1
    assert all(family.documentation for family in families.values())


def test_log_has_one_line_per_request_and_no_client_text(server):
    until(lambda: not server.app.connections)  # a line is written when its answer has been sent
    del server.log[:]
    head = '--e\r\nContent-Disposition: form-data; name="file"; filename="secret.png"\r\n\r\n'
    server.predict(
        head.encode() + make_image() + b"\r\n--e--", "?top=2", kind="multipart/form-data; boundary=e"
    )
    server.ask("/secret", headers={"Secret": "secret"})
    server.talk(request("/secret?secret", method="SECRET", Connection="close"))
    server.talk(b"secret\r\n\r\n")
    until(lambda: not server.app.connections)
    assert "secret" not in "".join(server.log).lower()
    pattern = r"(GET|POST|other) (\S+) \d{3} [\d.]+ ms \d+ images"
    assert [re.fullmatch(pattern, line)[2] for line in server.log] == [
        "/v1/predict",
        "unknown",
        "unknown",
        "unknown",
    ]
    assert server.log[0].endswith("1 images")


def test_responses_contain_no_paths_or_reprs(server):
    found = [server.predict(data)[1] for data, _ in HOSTILE.values()]
    found += [server.predict(body, kind=kind)[1] for body, kind, _ in FORMS.values()]
    for said in found:
        assert not re.search(
            r"Traceback|File \"|/home|/tmp|\.py|0x[0-9a-f]{4}|<\w+|object at|Error\b", json.dumps(said)
        )


# ---- openapi ------------------------------------------------------------------------------------


def check(value, schema, place="answer"):
    """Whether a value is what a schema says: as much of JSON Schema as ours use."""
    if "$ref" in schema:
        return check(value, SCHEMAS[schema["$ref"].rpartition("/")[2]], place)
    if "anyOf" in schema:
        assert any(is_valid(value, one) for one in schema["anyOf"]), (place, value)
        return None
    kinds = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    kind = schema["type"]
    assert isinstance(value, kinds[kind]), (place, value)
    assert kind == "boolean" or not isinstance(value, bool), (place, value)
    if kind == "array":
        for one in value:
            check(one, schema["items"], place + "[]")
    if kind == "object":
        known = schema.get("properties", {})
        assert set(schema.get("required", ())) <= set(value), place
        more = schema.get("additionalProperties", True)
        assert more is not False or set(value) <= set(known), (place, set(value) - set(known))
        for name, one in value.items():
            if name in known or isinstance(more, dict):
                check(one, known.get(name, more), f"{place}.{name}")
    return None


def is_valid(value, schema):
    try:
        check(value, schema)
    except AssertionError:
        return False
    return True


def test_openapi_routes(server):
    paths = server.get("/openapi.json")[1]["paths"]
    routes = {path for path in server.app.routes if path not in server.app.page or path == "/"}
    assert set(paths) == routes
    for path, methods in paths.items():
        assert list(methods) == [server.app.routes[path].method.lower()]


def test_responses_match_openapi(server):
    document = server.get("/openapi.json")[1]
    two, kind = form(make_image(), b"bad")
    asked = [
        ("GET", path, path.replace("{number}", "0"), None, {})
        for path, methods in document["paths"].items()
        if "get" in methods
    ]
    asked += [("GET", "/v1/examples/{number}", "/v1/examples/7", None, {})]
    asked += [("DELETE", path, path, None, {}) for path in document["paths"] if "{" not in path]
    for path in ("/v1/predict", "/v1/explain", "/v1/embed"):
        asked += [("POST", path, path, data, {}) for data, _ in HOSTILE.values()]
        asked += [("POST", path, path, body, {"Content-Type": kind}) for body, kind, _ in FORMS.values()]
        asked += [
            ("POST", path, path, make_image(), {}),
            ("POST", path, path, make_image(), {"Origin": "http://evil"}),
        ]
        asked += [("POST", path, path + "?top=x", make_image(), {}), ("POST", path, path, b"", {})]
    asked += [("POST", "/v1/predict", "/v1/predict", two, {"Content-Type": kind})]
    met = set()
    for method, template, path, body, headers in asked:
        status, said, data = server.ask(path, body, method, headers)
        (operation,) = document["paths"][template].values()
        content = operation["responses"][str(status)]["content"]
        kind = said["Content-Type"].partition(";")[0]
        assert kind in content, (path, status)
        if kind == "application/json":
            check(json.loads(data), content[kind]["schema"], f"{method} {path} {status}")
        met.add(status)
    assert met >= {200, 400, 403, 404, 405, 413, 415, 422}


def test_openapi_common_errors(server):
    for methods in server.get("/openapi.json")[1]["paths"].values():
        assert {"400", "405", "408", "431", "500", "501", "503"} <= set(
            *(m["responses"] for m in methods.values())
        )


def test_openapi_token(guarded, server):
    for running, expected in ((guarded, True), (server, False)):
        document = running.get("/openapi.json")[1]
        assert ("securitySchemes" in document["components"]) == expected
        assert ("security" in document["paths"]["/v1/predict"]["post"]) == expected
        assert "security" not in document["paths"]["/healthz"]["get"]


def test_no_model_management_and_no_urls(server):
    for path in ("/v1/models", "/models", "/admin", "/v1/load", "/debug", "/docs"):
        assert server.ask(path)[0] == 404
    assert server.predict(b"http://127.0.0.1/cat.png", kind="text/uri-list")[0] == 415


def test_no_information_about_the_machine(server):
    texts = [
        server.ask(path)[2].decode()
        for path in ("/v1/model", "/openapi.json", "/metrics", "/healthz", "/readyz")
    ]
    assert os.getcwd() not in "".join(texts)
