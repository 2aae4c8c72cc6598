"""Servers for tests: in a thread of this process, or in a child that can be measured and killed."""

import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from http.client import HTTPConnection

import numpy as np
from PIL import Image

import vitrail as vt
from tests.support.models import add_noise
from vitrail.serve.app import App
from vitrail.serve.server import Server, bind
from vitrail.serve.server_settings import ServeConfig

LABELS = ["ant", "bee", "cat", "dog", "elk"]
PATIENCE = 30  # seconds that no test should need

CHILD = """
import json, os, signal, sys, torch
torch.set_num_threads(1)
import vitrail as vt
from vitrail.serve.server import run_server
from vitrail.serve.server_settings import ServeConfig
settings = ServeConfig(**json.loads(sys.argv[2]))
exec(sys.argv[3])
predictor = vt.Predictor(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: None)
if sys.argv[4:]:  # after the warm-up, each prediction is one PyTorch call of many seconds
    original, calls = predictor.predict_batch, []
    def predict_batch(some):
        calls.append(len(some))
        if len(calls) > 2:
            torch.linalg.matrix_power(torch.eye(4000), 2**12)
        return original(some)
    predictor.predict_batch = predict_batch
run_server({"toy": predictor}, settings, started=lambda address: print(address, flush=True), ended=os._exit)
"""


def toy(**fields):
    """The toy preset with five classes and parameters that all matter."""
    return vt.Bundle(model=add_noise(vt.create("mu/4", classes=5, **fields)), labels=LABELS)


def make_image(seed=0, kind="PNG", size=(40, 50)):
    levels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, kind)
    return file.getvalue()


def png(wide, high, data=b""):
    """A PNG that says how large it is, and little more."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", wide, high, 8, 0, 0, 0, 0)
    rows = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(rows)


class Gated(vt.Predictor):
    """A predictor that waits for its gate, and remembers how many images each batch had."""

    def __init__(self, bundle):
        super().__init__(bundle)
        self.gate, self.batches = threading.Event(), []
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def predict_batch(self, batch):
        self.batches.append(len(batch))
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        return super().predict_batch(batch)


class Running:
    """A server, and ways to talk to it."""

    def __init__(self, port):
        self.port = port

    def ask(self, path, body=None, method=None, headers=None, timeout=PATIENCE):
        """(status, headers, body) by a connection of its own."""
        client = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            client.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
            answer = client.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            client.close()

    def get(self, path, **more):
        status, _, body = self.ask(path, **more)
        return status, json.loads(body)

    def predict(self, data=None, query="", kind="image/png", **more):
        headers = {"Content-Type": kind} | more.pop("headers", {})
        return self.get(
            "/v1/predict" + query, body=make_image() if data is None else data, headers=headers, **more
        )

    def dial(self, timeout=PATIENCE):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def talk(self, *parts, half=False, timeout=PATIENCE):
        """Everything that the server says until it closes, to what was sent as it is."""
        with self.dial(timeout) as client:
            for part in parts:
                client.sendall(part)
            if half:
                client.shutdown(socket.SHUT_WR)
            return read_all(client)

    def count(self, name):
        """A number of /metrics."""
        text = self.ask("/metrics")[2].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def read_all(client):
    found = b""
    while part := client.recv(65536):
        found += part
    return found


def statuses(said):
    """The status of every answer in some bytes."""
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]


def request(path="/v1/predict", body=b"", method="POST", **headers):
    """The bytes of a request."""
    rows = {
        "Host": "localhost",
        "Content-Length": len(body),
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    head = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in rows.items() if v is not None), "", ""]
    return "\r\n".join(head).encode() + body


def form(*files, **fields):
    """(body, content type) of a form."""
    rows = b""
    for name, value in fields.items():
        rows += f'--edge\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    for number, data in enumerate(files):
        head = f'--edge\r\nContent-Disposition: form-data; name="file"; filename="f{number}.png"\r\n\r\n'
        rows += head.encode() + data + b"\r\n"
    return rows + b"--edge--\r\n", "multipart/form-data; boundary=edge"


def until(holds, seconds=PATIENCE):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@contextmanager
def serving(predictor, *, examples=(), **settings):
    """A server in a thread of this process; `log` has its lines, `app` its insides."""
    settings = ServeConfig(port=0, **settings)
    listener = bind(settings)
    running = Running(listener.getsockname()[1])
    running.log = []
    predictors = predictor if isinstance(predictor, dict) else {"toy": predictor}
    running.app = App(predictors, settings, examples=examples, log=running.log.append)
    running.server = Server(running.app, listener)

    def run():
        running.server.listen()
        running.code = running.server.run()

    def stop():
        """As a signal does."""
        with suppress(RuntimeError):  # it has stopped already
            running.server.loop.call_soon_threadsafe(running.server.stop)

    running.stop = stop
    running.thread = thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: running.app.ready or not thread.is_alive())
        getattr(predictor, "batches", []).clear()
        while getattr(predictor, "entered", None) and predictor.entered.acquire(blocking=False):
            pass
        yield running
    finally:
        stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


class Child(Running):
    def __init__(self, path, settings, slow, before):
        given = [str(path), json.dumps({"port": 0, **settings}), before, *["slow"] * slow]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        super().__init__(int(self.process.stdout.readline().rpartition(":")[2]))
        self.lines = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self.reader.start()
        until(lambda: self.get("/readyz")[0] == 200)

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, seconds=PATIENCE):
        return self.process.wait(seconds)

    def memory(self, field="VmRSS"):
        """Bytes that the child has in memory."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self):
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


@contextmanager
def child(path, *, slow=False, before="", **settings):
    """A server in a process of its own; `before` is code that runs there first."""
    found = Child(path, settings, slow, before)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        found.reader.join(PATIENCE)
        found.process.stdout.close()
        found.process.stderr.close()


@contextmanager
def serve_command(*arguments):
    """Run `vitrail serve` as a user does, and yield its address."""
    command = [sys.executable, "-m", "vitrail", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in process.stdout:
            if match := re.search(r"http://[\d.:]+", line):
                yield match[0]
                break
        else:
            raise AssertionError("the server printed no address")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
