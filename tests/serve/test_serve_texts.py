"""Requests that name classes: what their texts cost others, and when they are no longer encoded.

The text tower sleeps for every text, so that 100 classes in seven templates take seconds, as on real models.
"""

import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import count

import pytest
import torch

import vitrail as vt
from tests.serve.test_serve_asgi import under_uvicorn
from tests.support.digit_clip import FILE
from tests.support.serving import PATIENCE, form, make_image, request, serving, toy, until
from vitrail.serve import asgi, request_classes
from vitrail.serve.served_model import fit_memory
from vitrail.serve.server_settings import ServeConfig
from vitrail.weights.text.prompts import TEMPLATES

PATH = "/v1/models/words/predict"
TEXTS = len(TEMPLATES)  # of each class
SECONDS = 0.01  # for a text
FRESH = count()


class SlowTexts:
    """A text encoder that takes its time for every text, and counts the texts."""

    def __init__(self, encoder):
        self.encoder, self.seconds, self.count, self.most = encoder, SECONDS, 0, 0

    def __call__(self, texts):
        texts = [texts] if isinstance(texts, str) else texts
        self.count += len(texts)
        self.most = max(self.most, len(texts))
        time.sleep(self.seconds * len(texts))
        return self.encoder(texts)

    def __getattr__(self, name):
        return getattr(self.encoder, name)


@contextmanager
def two_models(start=serving, **settings):
    """A server with a classifier, and a CLIP whose text tower is slow: `texts` counts what it encodes."""
    bundle = vt.load(FILE)
    bundle.text = texts = SlowTexts(bundle.text)
    with start({"pets": vt.Predictor(toy()), "words": vt.Predictor(bundle)}, **settings) as running:
        running.texts = texts
        texts.count = 0  # without the warm-up
        yield running
    assert not [line for line in running.log if line.startswith("internal error")]


@contextmanager
def mounted(models, **settings):
    """The same under uvicorn."""
    application = asgi(models, ServeConfig(**settings))
    with under_uvicorn(application) as running:
        running.app, running.log = application, []
        yield running


def classes(number=100):
    """So many names that nobody has asked for."""
    return [f"thing {next(FRESH)}" for _ in range(number)]


def post(server, labels, path=PATH, source="127.0.0.1"):
    """Status and body of a request with labels."""
    client = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE, source_address=(source, 0))
    body, kind = form(make_image(size=(24, 24)), labels=",".join(labels))
    client.request("POST", path, body, {"Content-Type": kind})
    answer = client.getresponse()
    found = answer.status, answer.read()
    client.close()
    return found


def waiting(server):
    """How many requests of this machine wait for texts."""
    found = server.app.models["words"].zero_shot.waiting.get("127.0.0.1")
    return found.requests if found else 0


def at_rest(server):
    """Whether no text is encoded any more."""
    before = server.texts.count
    time.sleep(0.3)
    return server.texts.count == before


# ---- others --------------------------------------------------------------------------------------


def test_images_of_another_model_are_predicted_between_texts():
    """A request takes 7 s for its texts, and nobody else may wait for 4."""
    with two_models(deadline=4.0) as server:
        ended, statuses = threading.Event(), []

        def ask():
            while not ended.is_set():
                statuses.append(post(server, classes())[0])

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: server.texts.count)
        before = server.texts.count
        found = [server.predict()[0] for _ in range(20)]
        meanwhile = server.texts.count - before
        ended.set()
        thread.join(PATIENCE)
        assert found == [200] * 20
        assert set(statuses) == {504}
        assert meanwhile  # texts were encoded between the images
        assert server.texts.most < TEXTS  # slow as they are, not even those of one class together


def test_clients_and_their_requests_take_turns():
    """Eight requests of one client for 100 classes each, and one of another client for ten."""
    with two_models(deadline=30.0) as server, ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(post, server, classes()) for _ in range(8)]
        until(lambda: waiting(server) == 8)
        before = server.texts.count
        assert post(server, classes(10), source="127.0.0.2")[0] == 200
        assert server.texts.count - before <= 50 * TEXTS  # its own ten and about as many, not eight for each
        server.texts.seconds = 0
        assert {one.result()[0] for one in crowd} == {200}


def test_requests_that_need_the_same_texts_share_them():
    labels = classes(12)
    with two_models() as server, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: post(server, labels)[0], range(6)))
        assert found == [200] * 6
        assert server.texts.count == 12 * TEXTS


def test_requests_of_a_client_that_wait_for_texts_are_limited():
    with two_models(queue=2, deadline=30.0) as server, ThreadPoolExecutor(2) as pool:
        crowd = [pool.submit(post, server, classes()) for _ in range(2)]
        until(lambda: waiting(server) == 2)
        status, said = post(server, classes())
        assert status == 503
        assert b"labels of at most 2 requests of a client; try again" in said
        assert server.predict()[0] == 200  # images have places of their own
        assert post(server, classes(2), source="127.0.0.2")[0] == 200
        server.texts.seconds = 0
        assert {one.result()[0] for one in crowd} == {200}


# ---- those who leave, and those who are late ------------------------------------------------------


@pytest.mark.parametrize("start", [serving, mounted])
def test_texts_of_closed_requests_are_not_encoded(start):
    """Ten requests with 7,000 texts, which take 70 s. The server notices within about a second."""
    with two_models(start, deadline=60.0) as server:
        for _ in range(10):
            body, kind = form(make_image(size=(24, 24)), labels=",".join(classes()))
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(request(PATH, body, Content_Type=kind))
                time.sleep(0.05)
        assert server.predict()[0] == 200
        until(lambda: server.count("vitrail_abandoned_total") == 10)
        until(lambda: at_rest(server))
        assert 0 < server.texts.count < 600
        assert server.count("vitrail_text_batch_size_sum") == server.texts.count
        assert server.predict()[0] == 200


def test_texts_are_not_encoded_after_the_deadline():
    with two_models(deadline=1.0) as server:
        labels, start = classes(), time.monotonic()
        status, said = post(server, labels)
        assert (status, b"deadline_exceeded" in said) == (504, True)
        assert time.monotonic() - start < 5  # of 7
        until(lambda: at_rest(server))
        assert 0 < server.texts.count < 350
        server.texts.seconds = 0
        until(lambda: post(server, labels)[0] == 200)
        assert server.texts.count < 900  # those that had been encoded were not encoded again


# ---- limits --------------------------------------------------------------------------------------


def test_the_cost_of_texts_decides_how_many_are_encoded_together():
    with two_models() as server:
        server.texts.seconds = 0
        assert post(server, classes())[0] == 200
        assert TEXTS < server.texts.most <= request_classes.MAX_TEXTS


def test_kept_vectors_are_bounded(monkeypatch):
    monkeypatch.setattr(request_classes, "_KEPT", 10)
    with two_models() as server:
        server.texts.seconds = 0
        labels = classes(30)
        assert post(server, labels)[0] == 200
        kept = server.app.models["words"].zero_shot.kept
        assert list(kept) == labels[20:]
        assert post(server, labels[:2] + labels[20:22])[0] == 200
        assert list(kept)[-2:] == labels[:2]
        assert len(kept) == 10


def test_limits_are_named_before_a_text_is_encoded():
    with two_models() as server:
        for labels, sentence in [
            (["thing"] * 2, "labels must be 2 to 100 different names"),
            ([f"thing {n}" for n in range(101)], "labels must be 2 to 100 different names"),
            (["x" * 101, "y"], "each of 1 to 100 characters"),
        ]:
            status, said = post(server, labels)
            assert (status, sentence in said.decode()) == (400, True)
        assert server.texts.count == 0


def test_templates_are_the_servers_own():
    """A request cannot make a class cost more texts."""
    with two_models() as server:
        body, kind = form(make_image(), labels="a,b", templates="a {}|the {}")
        status, _, said = server.ask(PATH, body, headers={"Content-Type": kind})
        assert (status, b"top, layer and labels only" in said) == (400, True)
        status, _, said = server.ask(
            PATH + "?labels=a,b&templates=a", make_image(), headers={"Content-Type": "image/png"}
        )
        assert (status, b"top, layer and labels, each once" in said) == (400, True)
        assert server.texts.count == 0


# ---- memory --------------------------------------------------------------------------------------

TOKENS = "text_model.embeddings.token_embedding.weight"


@pytest.fixture(scope="module")
def wordy(tmp_path_factory):
    """A CLIP with a tiny image tower and 200,000 tokens: 13 MB in the file, 26 as float32."""
    bundle = vt.load(FILE)
    tokens = bundle.extras[TOKENS]
    bundle.extras[TOKENS] = torch.cat([tokens, tokens.new_zeros(200_000, tokens.shape[1])])
    path = tmp_path_factory.mktemp("wordy") / "wordy.safetensors"
    bundle.save(path)
    return path


def test_memory_counts_the_text_tower(wordy):
    command = [sys.executable, "-m", "vitrail", "serve", str(wordy), "--memory", "20", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    sentence = r"needs \d\d MB for its weights, with those of its text tower, and one image.*may take 21 MB"
    assert re.search(sentence, " ".join(done.stderr.split())), done.stderr


def test_memory_of_a_text_tower_is_the_files_and_its_own(wordy):
    predictor = vt.Predictor(wordy)
    with pytest.raises(vt.InputError, match="text tower"):
        fit_memory(predictor, ServeConfig(model_memory=38 * 10**6), "x")
    assert fit_memory(predictor, ServeConfig(model_memory=50 * 10**6), "x").batch == 16
    same = vt.load(wordy)
    same.extras = {name: tensor.float() for name, tensor in same.extras.items()}
    fit_memory(vt.Predictor(same), ServeConfig(model_memory=35 * 10**6), "x")  # shared, not twice
