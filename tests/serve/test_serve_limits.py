"""Too much of everything: what is inside stays bounded, and afterwards all is as before.

In a child process where memory, descriptors or processor time are measured.
"""

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from tests.support.serving import (
    PATIENCE,
    Gated,
    child,
    form,
    make_image,
    png,
    read_all,
    request,
    serving,
    statuses,
    toy,
    until,
)

MiB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "toy.safetensors"
    toy().save(path)
    return path


# ---- a full queue, and late answers -------------------------------------------------------------


def test_full_queue_is_429_and_others_are_served():
    predictor = Gated(toy())
    with serving(predictor, queue=6, batch=4) as running, ThreadPoolExecutor(6) as pool:
        predictor.gate.clear()
        inside = [pool.submit(running.predict) for _ in range(6)]
        until(lambda: running.app.batcher.in_progress == 6)
        start = time.monotonic()
        for _ in range(20):
            status, headers, body = running.ask("/v1/predict", make_image())
            assert (status, headers["Retry-After"]) == (503, "1")
            assert b'"busy"' in body
        assert running.get("/healthz")[0] == 200
        assert time.monotonic() - start < 5
        with running.dial() as client:  # not even its body is wanted
            client.sendall(request(Content_Length=100_000))
            assert statuses(client.recv(65536)) == [503]
        assert running.get("/v1/explain", body=make_image())[0] == 503
        predictor.gate.set()
        assert [one.result()[0] for one in inside] == [200] * 6
        assert running.predict()[0] == 200
        assert running.count("vitrail_rejected_total") == 22
        assert sum(predictor.batches) == 7


def test_request_takes_a_slot_per_image():
    predictor = Gated(toy())
    with serving(predictor, queue=6) as running, ThreadPoolExecutor(1) as pool:
        predictor.gate.clear()
        inside = pool.submit(ask, running, 4)
        until(lambda: running.app.batcher.in_progress == 4)
        assert ask(running, 3)[0] == 503
        predictor.gate.set()
        assert inside.result()[0] == 200
        assert ask(running, 6)[0] == 200
        assert ask(running, 7)[0] == 413  # more than could ever be let in


def ask(running, count):
    body, kind = form(*[make_image()] * count)
    return running.predict(body, kind=kind)


def test_deadline_gives_504_without_computing():
    predictor = Gated(toy())
    with serving(predictor, deadline=1.0, queue=8) as running, ThreadPoolExecutor(4) as pool:
        predictor.gate.clear()
        start = time.monotonic()
        found = [pool.submit(running.predict) for _ in range(4)]
        assert [one.result()[0] for one in found] == [504] * 4
        assert 0.9 < time.monotonic() - start < 6
        assert running.app.batcher.in_progress == 0  # their places are free, though the model is still stuck
        predictor.gate.set()
        assert running.predict()[0] == 200
        assert sum(predictor.batches) == predictor.batches[0] + 1  # what waited was not run
        assert running.count("vitrail_expired_total") == 4


def test_deadline_after_a_stall():
    """As after SIGSTOP: the model's thread finds the time gone before the event loop does."""
    predictor = Gated(toy())
    with serving(predictor, deadline=0.5) as running, ThreadPoolExecutor(4) as pool:
        predictor.gate.clear()
        first = pool.submit(running.predict)
        until(lambda: predictor.batches == [1])
        waiting = [pool.submit(running.predict), pool.submit(ask, running, 3)]
        until(lambda: len(running.app.batcher.jobs) == 4)
        running.server.loop.call_soon_threadsafe(time.sleep, 1)
        time.sleep(0.7)
        predictor.gate.set()
        assert [one.result()[0] for one in waiting] == [504] * 2
        assert first.result()[0] in (200, 504)
        assert predictor.batches == [1]
        assert running.predict()[0] == 200
        assert not [line for line in running.log if line.startswith("internal error")]


# ---- memory -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(model):
    with child(model, header_time=3.0, body_time=3.0) as running:
        for _ in range(20):
            running.predict()
        yield running


def test_oversized_bodies_use_no_memory(server):
    before = server.memory()
    for _ in range(5):
        with server.dial() as client:
            client.sendall(request(Content_Length=10**11))
            try:
                for _ in range(100):
                    client.sendall(bytes(MiB))
            except OSError:  # it has heard enough
                pass
    chunk = b"100000\r\n" + bytes(MiB) + b"\r\n"
    with server.dial() as client:
        client.sendall(request(Content_Length=None, Transfer_Encoding="chunked"))
        try:
            for _ in range(100):
                client.sendall(chunk)
        except OSError:
            pass
    assert server.predict()[0] == 200
    assert server.memory() - before < 40 * MiB  # one body as large as allowed may be among it


def test_decompression_bombs_use_no_memory(server):
    before = server.memory()
    for _ in range(20):
        assert server.predict(png(12_000, 12_000))[0] == 413
        assert server.predict(png(2**31 - 1, 2**31 - 1))[0] == 413
    assert server.memory() - before < 10 * MiB


def test_backpressure():
    """While its answer is computed, a client sends on and on: they wait in the system, not in our memory."""
    predictor = Gated(toy())
    with serving(predictor) as running, running.dial() as client:
        predictor.gate.clear()
        client.sendall(request(body=make_image()))
        until(lambda: running.app.batcher.in_progress == 1)
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(100 * MiB))
        (connection,) = running.app.connections
        assert len(connection.parser.trailing_data[0]) < MiB
        predictor.gate.set()
        client.settimeout(PATIENCE)
        assert statuses(client.recv(65536))[0] == 200


# ---- nothing is left behind ---------------------------------------------------------------------


def churn(server, number):
    """A client of one of many kinds, most of them bad."""
    data = make_image()
    match number % 6:
        case 0:
            assert server.predict(data)[0] == 200
        case 1:
            assert server.predict(b"bad")[0] == 415
        case 2:
            with server.dial() as client:
                client.sendall(request(body=data)[: number % 900])
        case 3:
            with server.dial() as client:
                client.sendall(request(body=data))
        case 4:
            server.talk(b"\0" * (number % 50) + b"\r\n\r\n")
        case 5:
            with server.dial():
                pass


def test_no_leak_of_descriptors_threads_or_slots(server):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: churn(server, number), range(300)))
        until(lambda: server.count("vitrail_connections") == 1)
        before, threads = server.descriptors(), server.threads()
        memory = server.memory()
        list(pool.map(lambda number: churn(server, number), range(900)))
    until(lambda: server.count("vitrail_connections") == 1)
    until(lambda: server.descriptors() <= before)
    assert server.threads() <= threads
    assert server.count("vitrail_queue_depth") == 0
    assert server.memory() - memory < 20 * MiB
    assert not [line for line in server.lines if "internal error" in line or "Traceback" in line]


@pytest.mark.slow
def test_hundreds_of_slow_clients(server):
    """All of them are sent away; meanwhile the others are served."""
    slow = [server.dial() for _ in range(200)]
    for number, client in enumerate(slow):
        client.sendall(request(Content_Length=1000) if number % 2 else b"POST /v1/pre")
    start = time.monotonic()
    while time.monotonic() - start < 2:
        assert server.predict()[0] == 200
    for client in slow:
        assert statuses(read_all(client)) == [408]
        client.close()
    assert time.monotonic() - start < 15


def test_recovery_after_running_out_of_descriptors(server):
    until(lambda: server.count("vitrail_connections") == 1)
    pid, inside = server.process.pid, server.descriptors()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    keep = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    keep.request("GET", "/healthz")
    assert keep.getresponse().read()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (inside + 10, limits[1]))
    clients = [server.dial() for _ in range(100)]
    try:
        until(lambda: any("out of file descriptors" in line for line in server.lines))
        time.sleep(1.5)
        assert sum("out of file descriptors" in line for line in server.lines) < 10  # it does not spin
        keep.request("GET", "/healthz")  # and who is inside is served
        assert keep.getresponse().status == 200
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for client in [*clients, keep]:
            client.close()
    until(lambda: server.predict()[0] == 200)
