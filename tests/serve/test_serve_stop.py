"""How a server ends: nobody who is inside is lost, a second signal means it; and how it refuses to begin."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.support.serving import Gated, child, make_image, read_all, request, serving, statuses, toy, until
from vitrail.base.errors import ConfigError, VitrailError
from vitrail.cli.option_groups import flatten
from vitrail.cli.serve import model_name, serve
from vitrail.serve.server_settings import ServeConfig

GET = request("/healthz", method="GET", Content_Length=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "toy.safetensors"
    toy().save(path)
    return path


@pytest.fixture
def predictor():
    return Gated(toy())


class Load:
    """Clients that ask and ask; each request must have its answer, or never have been taken."""

    def __init__(self, running, clients=8):
        self.running, self.answered, self.lost = running, 0, []
        self.threads = [threading.Thread(target=self.ask, args=[bool(n % 2)]) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def ask(self, keep):
        """With a connection for all, or one for each. On an old one a request may cross its end on the way:
        HTTP lets the client try again then, and only then."""
        data = make_image()
        client = None
        while True:
            fresh = client is None
            try:
                client = client or self.running.dial()
            except OSError:
                return  # the door is closed
            said = b""
            with suppress(OSError):
                client.sendall(request(body=data, Connection="keep-alive" if keep else "close"))
                while b'"seconds"' not in said and (part := client.recv(65536)):
                    said += part
            if statuses(said) == [200] and b'"seconds"' in said:
                self.answered += 1
            elif fresh or said:
                self.lost.append(said)
            if not keep or b"connection: close" in said.lower() or statuses(said) != [200]:
                client.close()
                client = None

    def wait(self):
        for thread in self.threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("delay", [0.3, 0.5, 0.75])
def test_sigterm_under_load_loses_no_request(model, delay):
    with child(model, batch=2) as server:
        load = Load(server)
        until(lambda: load.answered > 20)
        time.sleep(delay)
        server.signal()
        assert server.wait() == 0
        load.wait()
        assert load.lost == []
        server.reader.join(30)
        assert not [line for line in server.lines if "internal error" in line or "Traceback" in line]


def test_drain_ends_readiness_and_closes_idle_connections(predictor):
    """Somebody is inside, whose body is still coming: it is answered; nobody else keeps the server."""
    body = make_image()
    with (
        serving(predictor) as server,
        server.dial() as inside,
        server.dial() as idle,
        server.dial() as asking,
    ):
        inside.sendall(request(body=body)[:-100])
        idle.sendall(GET)
        assert statuses(idle.recv(65536)) == [200]
        until(lambda: len(server.app.connections) == 3)
        server.stop()
        until(lambda: server.app.stopping)
        asking.sendall(request("/readyz", method="GET"))
        said = read_all(asking)
        assert statuses(said) == [503]
        assert b"connection: close" in said.lower()
        assert idle.recv(1000) == b""
        with pytest.raises(OSError, match="refused"):
            server.dial()
        assert server.thread.is_alive()
        inside.sendall(body[-100:])
        said = read_all(inside)
        assert statuses(said) == [200]
        assert b"connection: close" in said.lower()
        server.thread.join(10)
        assert server.code == 0


def test_backlog_is_served_during_drain(predictor):
    """The system has taken a client in, with its request, before we could."""
    with serving(predictor) as server:
        busy = threading.Event()
        server.server.loop.call_soon_threadsafe(lambda: (busy.set(), time.sleep(1), server.server.stop()))
        assert busy.wait(10)
        with server.dial() as client:
            client.sendall(request(body=make_image()))
            assert statuses(read_all(client)) == [200]


@pytest.mark.slow
def test_drain_does_not_wait_for_slow_readers(predictor):
    """Its answer was under way, with a promise of more, when the server was told to stop."""
    with serving(predictor, drain=20.0) as server, server.dial() as slow:
        server.app.page["/"] = ("text/html", bytes(64 * 2**20))  # more than any system takes at once
        slow.sendall(request("/", method="GET"))
        assert slow.recv(1)
        server.stop()
        time.sleep(1.5)
        found = 1
        while found < 64 * 2**20:
            found += len(slow.recv(2**20))
        server.thread.join(10)
        assert server.code == 0


def test_drain_timeout(predictor):
    with serving(predictor, drain=1.0) as server, server.dial() as endless:
        endless.sendall(request(Content_Length=1000))
        until(lambda: len(server.app.connections) == 1)
        start = time.monotonic()
        server.stop()
        server.thread.join(10)
        assert server.code == 1
        assert 0.9 < time.monotonic() - start < 8
        assert "requests cut off after 1 seconds: 1" in server.log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_stops_at_once(model, number, code):
    with child(model) as server, server.dial() as endless:
        endless.sendall(request(Content_Length=1000))
        until(lambda: server.count("vitrail_connections") == 2)
        server.signal(number)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.signal(number)
        assert server.wait(10) == code


def busy(server, pool):
    """A client for whom the model is deep inside PyTorch, where Python handles no signals."""
    pool.submit(server.predict)  # its answer never comes
    until(lambda: server.count("vitrail_queue_depth") == 1)
    time.sleep(0.3)


def reachable(server):
    with suppress(OSError), server.dial(timeout=0.2):
        return True
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_while_the_model_is_busy(model, number, code):
    with child(model, slow=True) as server, ThreadPoolExecutor(1) as pool:
        busy(server, pool)
        server.signal(number)
        until(lambda: not reachable(server), 3)  # it hears at once, and takes no more clients
        assert server.process.poll() is None
        server.signal(number)
        assert server.wait(3) == code


def test_busy_model_does_not_delay_shutdown(model):
    with child(model, slow=True, drain=1.0) as server, ThreadPoolExecutor(1) as pool:
        busy(server, pool)
        server.signal()
        assert server.wait(5) == 1


def test_other_signals_are_ignored(model):
    with child(model) as server:
        for _ in range(2):
            server.signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert server.get("/healthz") == (200, {"live": True})
        server.signal()
        assert server.wait(10) == 0


EARLY = """
import os, signal, sys
import vitrail as vt
from vitrail.serve.server import run_server
from vitrail.serve.server_settings import ServeConfig
run_server(
    {"toy": vt.Predictor(sys.argv[1])},
    ServeConfig(port=0),
    started=lambda address: os.kill(os.getpid(), signal.SIGTERM),
    ended=os._exit,
)
"""


def test_signal_right_after_start(model):
    found = subprocess.run([sys.executable, "-c", EARLY, str(model)], timeout=60, check=False)
    assert found.returncode == 0


def test_not_ready_before_the_model_is_warm():
    predictor = Gated(toy())
    predictor.gate.clear()
    threading.Timer(0.5, predictor.gate.set).start()
    seen = []
    original = predictor.predict_batch

    def predict_batch(some):
        seen.append(len(some))
        return original(some)

    predictor.predict_batch = predict_batch
    start = time.monotonic()
    with serving(predictor, batch=4) as running:
        assert time.monotonic() - start >= 0.4
        assert seen == [1, 4]
        assert running.get("/readyz") == (200, {"ready": True})


def test_model_that_fails_its_first_prediction_is_not_served(predictor, monkeypatch):
    monkeypatch.setattr(predictor, "predict_batch", lambda some: 1 / 0)
    with serving(predictor) as server:
        server.thread.join(10)
        assert server.code == 1
        assert not server.app.accepting
        assert server.log[0].startswith("internal error: ZeroDivisionError in <lambda>")


# ---- the command --------------------------------------------------------------------------------

SECRET = "a-secret-of-some-length"


def test_startup_message(model, tmp_path):
    (tmp_path / "token").write_text(SECRET + "\n")
    (tmp_path / "a.png").write_bytes(make_image())
    words = [model, "--port", 0, "--token-file", tmp_path / "token", "--examples", tmp_path, "--batch", 4]
    process = subprocess.Popen(
        [sys.executable, "-m", "vitrail", "serve", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first, second = (process.stdout.readline() for _ in range(2))
    assert first == "toy: 5 classes, 32x32 pixels\n"
    assert re.fullmatch(
        r"http://127\.0\.0\.1:\d+  \(clients with the token; press Ctrl-C to stop\)\n", second
    )
    process.send_signal(signal.SIGINT)
    rest = "".join(process.communicate(timeout=60))
    assert process.returncode == 0
    assert SECRET not in first + second + rest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
def test_startup_without_stdout(model):
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "vitrail", "serve", str(model), "--port", "0"]
        found = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert found.returncode == 2
    assert found.stderr.splitlines()[0].startswith("vitrail: No space left")
    assert "terminate" not in found.stderr


def test_model_name(predictor, tmp_path, monkeypatch):
    (tmp_path / "pets").mkdir()
    monkeypatch.chdir(tmp_path / "pets")
    for model, name in {".": "pets", "best.safetensors": "best", "hf:owner/cats": "cats"}.items():
        assert model_name(predictor, model) == name


def refused(monkeypatch, *words, **environment):
    """What the command says where it does not begin, and whether that names a secret."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    app = typer.Typer()
    app.command()(flatten(serve))
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(found.exception, VitrailError), found.output
    assert found.output == ""
    return str(found.exception)


def test_public_host_needs_a_token(model, monkeypatch):
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert "token" in refused(monkeypatch, model, "--host", host)
    # with one, and with --public, it goes on to take the address
    for more in ([], ["--public"]):
        token = {} if more else {"VITRAIL_TOKEN": SECRET}
        said = refused(monkeypatch, model, "--host", "192.0.2.1", *more, **token)
        assert said.startswith("Cannot listen on 192.0.2.1:8000: ")
        monkeypatch.delenv("VITRAIL_TOKEN", raising=False)


def test_invalid_settings(model, tmp_path, monkeypatch):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "short").write_text("not-long-enough")
    (tmp_path / "long").write_bytes(b"x" * 2**20)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, given in {
            "Cannot listen on 127.0.0.1:": [model, "--port", port],
            "token must have at least 16 characters": [
                model,
                "--token-file",
                tmp_path / "short",
            ],
            "none cannot be read": [model, "--token-file", tmp_path / "none"],
            "zero cannot be read": [model, "--token-file", "/dev/zero"],
            "long is larger than 4,096 bytes": [model, "--token-file", tmp_path / "long"],
            "empty is empty": [model, "--token-file", tmp_path / "empty"],
            "--examples needs a folder": [model, "--port", 0, "--examples", tmp_path / "none"],
            "none.safetensors": [tmp_path / "none.safetensors", "--port", 0],
            "deadline must be a positive number of seconds": [model, "--deadline", "-1"],
        }.items():
            said = refused(monkeypatch, *given)
            assert words in said
            assert "not-long-enough" not in said


def test_settings_do_not_show_the_token():
    settings = ServeConfig(token=SECRET)
    assert SECRET not in repr(settings) + str(settings)
    with pytest.raises(ConfigError) as caught:
        ServeConfig(token=SECRET + " with spaces")
    assert SECRET not in str(caught.value)
