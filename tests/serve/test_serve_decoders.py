"""Decoder processes: what an image can cost, whom it can hold up, and who is left when the server ends."""

import io
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from PIL import Image

import vitrail as vt
from bench.hostile import many_scans, strip
from tests.support import hostile_images
from tests.support.serving import (
    PATIENCE,
    child,
    form,
    make_image,
    read_all,
    request,
    serving,
    statuses,
    toy,
    until,
)
from vitrail.serve import decode_pool, decode_process
from vitrail.serve.decode_pool import DecodeJob, DecodeQueue
from vitrail.serve.messages import Client

MiB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "toy.safetensors"
    toy().save(path)
    return path


@pytest.fixture
def obedient(monkeypatch):
    """Servers of this process get decoders that obey images."""
    monkeypatch.setattr(decode_process, "COMMAND", hostile_images.COMMAND)


# ---- what Linux says of processes ---------------------------------------------------------------


def below(pid):
    """The processes that one has started, those that these have, and so on."""
    found = children(pid)
    return found + [one for child in found for one in below(child)]


def children(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processor_time(pids):
    """Seconds that these have computed, all together."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(pid):
    """Bytes that a server and its decoders have in memory."""
    return sum(map(rss, [pid, *below(pid)]))


def rss(pid):
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has just ended
        return 0


def pids(running):
    """Of the decoders of a server in this process, and of what forks them."""
    template = running.app.default.decoders.template
    return [template.process.pid, *below(template.process.pid)] if template else []


def at_rest(running):
    """Whether all decoders are there and none computes."""
    decoders = running.app.default.decoders
    if len(decoders.idle) < running.app.settings.decoders:
        return False
    before = processor_time(pids(running))
    time.sleep(0.3)
    return processor_time(pids(running)) - before < 0.1


# ---- honest clients beside others ---------------------------------------------------------------


class Honest:
    """Clients that send good images, one after the other, and note what came of it."""

    def __init__(self, port, clients=3):
        self.port, self.ended = port, threading.Event()
        self.seconds, self.statuses = [], set()
        self.threads = [threading.Thread(target=self.ask) for _ in range(clients)]

    def ask(self):
        client = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        while not self.ended.is_set():
            start = time.monotonic()
            client.request("POST", "/v1/predict", make_image())
            answer = client.getresponse()
            answer.read()
            self.seconds.append(time.monotonic() - start)
            self.statuses.add(answer.status)
            time.sleep(0.01)
        client.close()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        for thread in self.threads:
            thread.join(PATIENCE)

    def p99(self):
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]


def attack(server, files, seconds):
    """Each file by a client of its own, again when it is answered; and the most memory meanwhile."""
    most, done, end = [0], threading.Event(), time.monotonic() + seconds

    def watch():
        while not done.is_set():
            most[0] = max(most[0], memory(server.process.pid))
            time.sleep(0.02)

    def send(data):
        answers = []
        while time.monotonic() < end:
            answers.append(server.predict(data)[0])
        return answers

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(len(files)) as pool:
        found = [status for some in pool.map(send, files) for status in some]
    done.set()
    watcher.join()
    return found, most[0]


# The header shows that real files such as these are costly. Decoders that obey images do what a file would
# do whose header does not.
COSTLY = {
    "scans": lambda: many_scans(),
    "strips": lambda: strip(),
    "slow": lambda: hostile_images.image_that("spin"),
    "large": lambda: hostile_images.image_that("eat"),
}
OBEDIENT = """
from tests.support import hostile_images
from vitrail.serve import decode_process
decode_process.COMMAND = hostile_images.COMMAND
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", COSTLY)
def test_costly_images_hardly_delay_others(model, kind):
    files = [COSTLY[kind]()] * 12
    with child(model, side=10**9, decode_time=1.5, before=OBEDIENT) as server:
        for _ in range(20):
            server.predict()
        before = memory(server.process.pid)
        budget = server.get("/v1/model")[1]["limits"]["decode_bytes"]
        with Honest(server.port) as usual:
            time.sleep(4)
        with Honest(server.port) as meanwhile:
            time.sleep(0.5)
            # Long enough that a pause of the machine itself, which delays one answer of each of the three
            # clients, is not the 99th percentile.
            found, most = attack(server, files, seconds=8)
            time.sleep(0.5)
        assert not {200, 500} & set(found), found
        assert meanwhile.statuses == usual.statuses == {200}
        assert len(meanwhile.seconds) > 400
        assert meanwhile.p99() < max(2 * usual.p99(), 0.5), (usual.p99(), meanwhile.p99())
        assert most - before < budget
        assert not [line for line in server.lines if "internal error" in line or "Traceback" in line]


def test_default_limits_refuse_costly_images(model):
    with child(model, deadline=60.0) as server:
        assert server.predict(strip())[1]["error"]["code"] == "image_too_large"
        status, said = server.predict(many_scans())
        assert status in (413, 422), said


# ---- one decode ---------------------------------------------------------------------------------


def test_decode_timeout(obedient):
    with serving(vt.Predictor(toy()), decode_time=0.3) as running:
        start = time.monotonic()
        status, said = running.predict(hostile_images.image_that("spin"))
        assert (status, said["error"]["code"]) == (422, "slow_image")
        assert time.monotonic() - start < 5
        until(lambda: at_rest(running), 5)
        assert running.count('vitrail_killed_decodes_total{reason="late"}') == 1
        assert running.predict()[0] == 200


def test_decode_timeout_of_a_large_valid_image():
    """With the decoder as it is."""
    with serving(vt.Predictor(toy()), decode_time=0.03) as running:
        assert running.predict(make_image(size=(2000, 2000)))[1]["error"]["code"] == "slow_image"
        assert running.predict()[0] == 200


def test_decode_stops_at_the_request_deadline(obedient):
    with serving(vt.Predictor(toy()), decode_time=60.0, deadline=0.5) as running:
        assert running.predict(hostile_images.image_that("spin"))[0] == 504
        until(lambda: at_rest(running), 5)
        assert running.count('vitrail_killed_decodes_total{reason="abandoned"}') == 1


@pytest.mark.parametrize("before", [b"", bytes(100_000), bytes(190_000)])
def test_decode_stops_when_the_client_disconnects(obedient, before):
    """After a large body too, of which the end had come before anybody wanted it."""
    with serving(vt.Predictor(toy()), decode_time=60.0, deadline=60.0) as running:
        with running.dial() as client:
            client.sendall(request(body=make_image() + before + b"spin"))
            until(lambda: running.app.default.decoders.running)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it leaves at once
        until(lambda: at_rest(running), 5)
        assert running.predict()[0] == 200


def test_decode_memory_limit(obedient):
    with serving(vt.Predictor(toy()), decode_memory=100 * MiB) as running:
        most, asked = (
            0,
            threading.Thread(target=lambda: found.append(running.predict(hostile_images.image_that("eat")))),
        )
        found = []
        asked.start()
        while asked.is_alive():
            most = max(most, *(rss(pid) for pid in pids(running)))
        assert found[0][1]["error"]["code"] == "too_much_memory"
        assert found[0][0] == 413
        assert 50 * MiB < most < 160 * MiB  # 30 are there before
        assert running.count("vitrail_killed_decodes_total") == 0  # it lives, and is empty again
        until(lambda: max(rss(pid) for pid in pids(running)) < 100 * MiB)
        assert running.predict()[0] == 200


def test_image_that_kills_a_decoder_fails_alone(obedient):
    with serving(vt.Predictor(toy())) as running:
        body, kind = form(make_image(1), hostile_images.image_that("die"), make_image(2))
        status, said = running.predict(body, kind=kind)
        assert status == 200
        assert [one["error"] is None for one in said["predictions"]] == [True, False, True]
        status, said = running.predict(hostile_images.image_that("die"))
        assert (status, said["error"]["code"]) == (422, "broken_image")
        assert not [line for line in running.log if line.startswith("internal error")]


def test_killed_decoders_are_replaced():
    with serving(vt.Predictor(toy())) as running:
        for some in (slice(1), slice(1, 2), slice(1, 3), slice(3)):
            until(lambda: at_rest(running))
            for pid in pids(running)[some]:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            assert running.predict()[0] == 200
        until(lambda: at_rest(running))


def test_empty_and_large_files(obedient):
    with serving(vt.Predictor(toy())) as running:
        body, kind = form(b"", make_image(size=(1500, 2000)))
        (empty, large) = running.predict(body, kind=kind)[1]["predictions"]
        assert "not an image" in empty["error"]
        assert large["error"] is None
        assert running.count("vitrail_killed_decodes_total") == 0


def test_decoders_import_no_torch_and_see_no_token(model, monkeypatch):
    monkeypatch.setenv("VITRAIL_TOKEN", "correct-horse-battery-staple")
    with child(model) as server:
        found = below(server.process.pid)
        assert len(found) == 3  # two, and what forks them
        for pid in found:
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
            assert b"battery" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert rss(pid) < 60 * MiB


@pytest.mark.parametrize("whole", [False, True])
def test_same_prediction_for_any_resize_backend(whole):
    bundle = toy()
    spec = vt.Preprocess(size=32, resize="shortest", resize_to=40, interpolation="bicubic", backend="torch")
    bundle = vt.Bundle(model=bundle.model, labels=bundle.labels, preprocess=spec)
    predictor = vt.Predictor(bundle)
    predictor.engine.one_by_one = whole
    data = make_image(7, size=(70, 50))
    with serving(predictor) as running:
        (found,) = running.predict(data)[1]["predictions"]
    expected = vt.Predictor(bundle)(Image.open(io.BytesIO(data)))
    assert (found["label"], found["score"]) == (expected.label, expected.score)


# ---- turns --------------------------------------------------------------------------------------


@contextmanager
def flood(running, word, files):
    """A client with a request of many such images, until the end of the block."""
    body, kind = form(*[hostile_images.image_that(word)] * files)
    with running.dial() as client:
        client.sendall(request(body=body, Content_Type=kind))
        until(lambda: len(running.app.default.decoders.running) == running.app.settings.decoders)
        yield
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_slow_images_never_occupy_all_decoders(obedient):
    """One request of 32 images without end, and another client: it waits once, for as long as is quick."""
    with serving(vt.Predictor(toy()), decode_time=60.0, deadline=60.0) as running, flood(running, "spin", 32):
        with Honest(running.port, clients=1) as honest:
            until(lambda: len(honest.seconds) > 50)
        assert honest.statuses == {200}
        assert honest.seconds[0] < decode_pool.QUICK + 1.5
        assert sorted(honest.seconds)[len(honest.seconds) // 2] < 0.2
        assert running.count('vitrail_killed_decodes_total{reason="postponed"}') == 1
        assert running.app.default.decoders.queue.jobs


def test_single_client_may_use_all_decoders(obedient):
    with serving(vt.Predictor(toy()), deadline=60.0) as running:
        body, kind = form(*[hostile_images.image_that("nap")] * 2)
        start = time.monotonic()
        assert running.predict(body, kind=kind)[0] == 200
        assert time.monotonic() - start < 1.1  # not one after the other
        assert running.count("vitrail_killed_decodes_total") == 0


def jobs_of(*clients):
    return [DecodeJob(memoryview(b""), client, None) for client in clients]


def test_fast_clients_go_before_new_ones():
    """But not for ever."""
    queue, known = DecodeQueue(2), Client("10.0.0.1", slow=False)
    jobs = jobs_of(Client("10.0.0.1"), known, Client("10.0.0.1"), known)
    jobs[0].arrived -= 60
    for job in jobs:
        queue.jobs.append(job)
    assert [queue.take([]) for _ in jobs] == [jobs[0], jobs[1], jobs[3], jobs[2]]


def order(queue):
    found = []
    while job := queue.take([]):
        found.append(job)
        queue.record(job, 0.1)
    return found


def test_round_robin_over_connections():
    many, few, late = (Client("10.0.0.1", slow=False) for _ in range(3))
    queue, jobs = DecodeQueue(2), jobs_of(many, many, many, many, few, few, late)
    for job in jobs:
        queue.jobs.append(job)
    assert [job.client for job in order(queue)] == [many, few, late, many, few, many, many]


def test_round_robin_over_addresses():
    crowd, one = [Client("10.0.0.1") for _ in range(20)], Client("10.0.0.2")
    queue = DecodeQueue(2)
    for job in jobs_of(*crowd, one, one, one):
        queue.jobs.append(job)
    found = "".join(job.client.address[-1] for job in order(queue))
    assert found.startswith("12")
    assert found[:10].count("2") == 3


def test_no_starvation():
    """Newcomers have used nothing; they come before it only for as long as it has used."""
    queue, waiting = DecodeQueue(2), Client("10.0.0.1")
    (first,) = jobs_of(waiting)
    queue.record(first, 0.01)
    queue.jobs.append(first)
    first.arrived -= 0.25
    for job in jobs_of(*(Client("10.0.0.1") for _ in range(5))):
        queue.jobs.append(job)
    assert queue.take([]) is first


def test_usage_decays():
    usage = decode_pool.RecentUsage()
    usage.add("a", 2.0, now=100)
    usage.add("b", 0.1, now=100)
    assert usage.of("a", 100) > usage.of("b", 100) > usage.of("c", 100) == 0
    assert usage.of("a", 160) == 0
    usage.add("c", 0.1, now=160)
    assert list(usage.until) == ["c"]


def test_slow_images_leave_one_decoder_free():
    slow, quick = Client("10.0.0.1", slow=True), Client("10.0.0.1")
    queue = DecodeQueue(2)
    first, second, other = jobs_of(slow, slow, quick)
    for job in (first, second, other):
        queue.jobs.append(job)
    assert queue.take([]) is first
    assert queue.take([first]) is other
    assert queue.take([first]) is None
    assert queue.take([]) is second
    queue.record(second, 0.001, finished=False)  # it had to make room: that says nothing
    assert slow.slow
    queue.record(second, 0.001)
    assert not slow.slow


# ---- the end ------------------------------------------------------------------------------------


@contextmanager
def spinning(model, monkeypatch_code, **settings):
    """A server, its decoders, and one of them at work without end."""
    with child(model, decode_time=60.0, before=monkeypatch_code, **settings) as server:
        found = below(server.process.pid)
        with server.dial() as client:
            client.sendall(request(body=hostile_images.image_that("spin")))
            until(lambda: server.count("vitrail_decodes_running") == 1)
            yield server, found, client


OBEY = f"from vitrail.serve import decode_process; decode_process.COMMAND = {hostile_images.COMMAND!r}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_decoders_exit_with_the_server(model, number):
    with spinning(model, OBEY, drain=0.5) as (server, found, _):
        assert len(found) == 3
        server.signal(number)
        server.wait(10)
        until(lambda: not any(map(alive, found)), 3)


def test_second_signal_leaves_no_decoder(model):
    with spinning(model, OBEY) as (server, found, _):
        server.signal()
        time.sleep(0.3)
        server.signal()
        assert server.wait(10) == 143
        until(lambda: not any(map(alive, found)), 3)


@pytest.mark.slow
def test_signals_to_the_process_group_lose_no_image(model):
    """As Ctrl-C in a terminal sends them, and a service manager."""
    with child(model, before=OBEY) as server, server.dial() as client:
        client.sendall(request(body=hostile_images.image_that("nap")))
        until(lambda: server.count("vitrail_decodes_running") == 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            for pid in below(server.process.pid):
                os.kill(pid, number)
        server.signal()
        assert statuses(read_all(client)) == [200]
        assert server.wait(10) == 0


def test_server_does_not_start_without_decoders(monkeypatch):
    monkeypatch.setattr(decode_process, "COMMAND", ["/bin/false"])
    with serving(vt.Predictor(toy())) as running:
        running.thread.join(10)
        assert running.code == 1
        assert not running.app.ready
