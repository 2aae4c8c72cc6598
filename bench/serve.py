"""`vitrail serve` beside a plain loop, a FastAPI route and LitServe, in one run.

    python -m bench.serve

The model is S/16 with random weights; images are cut from scikit-learn's two photographs, 224 pixels,
JPEG. The plain loop decodes an image and asks the model, 16 at a time, in one process without HTTP; the
faster of decoding in between and in two threads counts. Rounds are interleaved. The soak and the stops
run on the toy model `mu/4`, where a mistake has the most chances. Everything shares the same cores,
clients included.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import vitrail as vt
from bench.load import Body, Client, Seen, ask, closed, open_loop, until_gone
from bench.measure import environment, save
from vitrail.cli.malloc import keep_freed_memory

CLIENTS, BATCH = 16, 16
SERVERS = {
    "ours": [sys.executable, "-m", "vitrail", "serve"],
    "fastapi": [sys.executable, "-m", "bench.serve_peers", "fastapi"],
    "litserve": [sys.executable, "-m", "bench.serve_peers", "litserve"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="of each load")
    parser.add_argument("--soak", type=int, default=20_000, help="requests")
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--peers", default="fastapi,litserve")
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        big, toy = make_model("S/16", Path(folder)), make_model("mu/4", Path(folder))
        peers = [name for name in args.peers.split(",") if name]
        found: dict[str, Any] = {"speed": speed(big, args.rounds, args.seconds, peers)}
        found["overload"] = overload(big, found["speed"], args.rounds, args.seconds)
        found["soak"] = asyncio.run(soak(toy, args.soak))
        found["stops"] = [asyncio.run(stop(toy)) for _ in range(args.stops)]
    for part, what in found.items():
        print(part, json.dumps(what), flush=True)
    save({**found, "environment": environment() | {"servers": versions()}}, args.out)


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("h11", "fastapi", "uvicorn", "litserve"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not there"
    return found


# ---- what is asked --------------------------------------------------------------------------


def make_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = vt.create(name, classes=10)
    torch.nn.init.normal_(model.head.weight, std=0.5)  # a fresh head answers the same to everything
    path = folder / f"{name.replace('/', '-')}.safetensors"
    vt.Bundle(model=model).save(path)
    return path


def make_images(count: int, side: int) -> list[bytes]:
    """Different cuts of two photographs."""
    from sklearn.datasets import load_sample_images

    photographs, found = [Image.fromarray(one) for one in load_sample_images().images], []
    for n in range(count):
        left, top = 7 * n % (640 - side), 11 * n % (427 - side)
        file = io.BytesIO()
        photographs[n % 2].crop((left, top, left + side, top + side)).save(file, "JPEG", quality=85)
        found.append(file.getvalue())
    return found


# ---- servers --------------------------------------------------------------------------------


@contextmanager
def serving(name: str, model: Path, *more: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server on a free port, ready; killed at the end where it has not stopped by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*SERVERS[name], str(model)]
    command += ["--port", str(port), *more] if name == "ours" else [str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}{'/readyz' if name == 'ours' else '/'}", process)
        yield port, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it is there, and has no such page
                return
        except OSError:
            pass
        if process.poll() is not None:
            raise SystemExit(f"{address} ended by itself, code {process.returncode}")
        time.sleep(0.2)
    raise SystemExit(f"{address} was not ready in two minutes")


def memory(process: subprocess.Popen[bytes]) -> float:
    """Resident megabytes of a server and of the processes that it has started."""
    return sum(map(resident, tree(process.pid)))


def resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:  # it has just ended
        return 0.0


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [one for child in path.read_text().split() for one in tree(int(child))]
    return found


# ---- speed ----------------------------------------------------------------------------------


def speed(model: Path, rounds: int, seconds: float, peers: list[str]) -> dict[str, Any]:
    """Images per second at 16 clients, and milliseconds for one client alone, by server and for loops."""
    images = make_images(64, 224)
    rate: dict[str, list[float]] = {}
    alone: dict[str, list[float]] = {}
    for _ in range(rounds):
        loops = plain(model, seconds)
        for name in ("in between", "two threads"):
            rate.setdefault(f"loop, {name}", []).append(loops[name])
        alone.setdefault("loop", []).append(loops["alone"])
        for name in ["ours", *peers]:
            bodies = as_bodies(name, images)
            path = "/predict" if name == "litserve" else "/v1/predict"
            with serving(name, model) as (port, _):
                asyncio.run(closed(port, path, bodies, CLIENTS, 2))
                begin = time.perf_counter()
                seen = asyncio.run(closed(port, path, bodies, CLIENTS, seconds))
                rate.setdefault(name, []).append(len(seen.seconds) / (time.perf_counter() - begin))
                idle = asyncio.run(closed(port, path, bodies, 1, seconds / 2))
                if seen.refused or seen.other or idle.other:
                    raise SystemExit(f"{name} did not answer everything: {seen.other}, {len(seen.refused)}")
                alone.setdefault(name, []).append(idle.latency(0.5))
        print({name: round(values[-1], 2) for name, values in rate.items()}, flush=True)
    loop = [max(pair) for pair in zip(rate["loop, in between"], rate["loop, two threads"], strict=True)]
    return {
        "images_per_s": {name: round(statistics.median(values), 2) for name, values in rate.items()},
        "ratio_to_loop": {
            name: round(statistics.median(a / b for a, b in zip(rate[name], loop, strict=True)), 3)
            for name in ["ours", *peers]
        },
        "alone_ms": {name: round(statistics.median(values), 2) for name, values in alone.items()},
        "alone_to_loop": {
            name: round(statistics.median(a / b for a, b in zip(alone[name], alone["loop"], strict=True)), 3)
            for name in ["ours", *peers]
        },
        "kilobytes": round(statistics.mean(map(len, images)) / 1000, 1),
        "rounds": rounds,
        "seconds": seconds,
        "clients": CLIENTS,
    }


def as_bodies(name: str, images: list[bytes]) -> list[Body]:
    if name == "litserve":
        texts = [json.dumps({"image": base64.b64encode(image).decode()}) for image in images]
        return [(text.encode(), "application/json") for text in texts]
    return [(image, "image/jpeg") for image in images]


def plain(model: Path, seconds: float) -> dict[str, float]:
    """The loop, in a process of its own as servers are."""
    command = [sys.executable, "-c", f"from bench.serve import loop; loop({str(model)!r}, {seconds})"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def loop(model: str, seconds: float) -> None:
    keep_freed_memory()  # as our commands do, so that only what a server adds is compared
    images = [io.BytesIO(image) for image in make_images(64, 224)]
    found: dict[str, float] = {}
    for name, workers in (("in between", 0), ("two threads", 2)):
        predict = vt.Predictor(model, batch=BATCH, workers=workers)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{n}.jpg" for n in range(len(images))]
            for path, image in zip(paths, images, strict=True):
                path.write_bytes(image.getvalue())
            predict(paths[:BATCH])
            begin, count = time.perf_counter(), 0
            while (spent := time.perf_counter() - begin) < seconds / 2:
                count += len(predict(paths))
        found[name] = count / spent
    predict, times = vt.Predictor(model), []
    end = time.perf_counter() + seconds / 2
    while time.perf_counter() < end:
        begin = time.perf_counter()
        predict(Image.open(images[len(times) % len(images)]))
        times.append(time.perf_counter() - begin)
    found["alone"] = 1000 * statistics.median(times)
    print(json.dumps(found))


def overload(model: Path, known: dict[str, Any], rounds: int, seconds: float) -> dict[str, Any]:
    """Four times as many requests as can be answered, at random moments, after 16 patient clients."""
    rate = 4 * known["images_per_s"]["ours"]
    bodies = as_bodies("ours", make_images(64, 224))
    goodput: list[float] = []
    grown: list[float] = []
    whole = Seen()
    with serving("ours", model) as (port, process):
        asyncio.run(closed(port, "/v1/predict", bodies, CLIENTS, 2))
        start = memory(process)
        for _ in range(rounds):
            begin = time.perf_counter()
            before = asyncio.run(closed(port, "/v1/predict", bodies, CLIENTS, seconds))
            usual = len(before.seconds) / (time.perf_counter() - begin)  # the last ones end after `seconds`
            begin = time.perf_counter()
            seen = asyncio.run(open_loop(port, "/v1/predict", bodies, rate, seconds))
            goodput.append(len(seen.seconds) / (time.perf_counter() - begin) / usual)
            whole.add(seen)
            grown.append(round(memory(process) - start, 1))
        time.sleep(1)
        after = asyncio.run(closed(port, "/v1/predict", bodies, 1, 3))
    refused = Seen(seconds=whole.refused)
    return {
        "goodput_to_full": round(statistics.median(goodput), 3),
        "goodput_of_rounds": [round(one, 3) for one in goodput],
        "answered": len(whole.seconds),
        "refused": len(whole.refused),
        "other": whole.other,
        "lost": whole.lost,
        "refused_p99_ms": refused.latency(0.99) if whole.refused else None,
        "answered_p99_ms": whole.latency(0.99),
        "grown_mb_by_round": grown,
        "a_second_later_p50_ms": after.latency(0.5),
    }


# ---- mistakes -------------------------------------------------------------------------------


async def soak(model: Path, requests: int) -> dict[str, Any]:
    """8 clients, every answer compared with what the image gives alone; every twentieth is no image."""
    images, bad = make_images(200, 32), (b"not an image", "image/jpeg")
    predict = vt.Predictor(model)
    scores = [predict(Image.open(io.BytesIO(image))).top(10) for image in images]
    seen, left = Seen(), iter(range(requests))

    def right(n: int, answer: dict[str, Any]) -> bool:
        top = {one["label"]: one["score"] for one in answer["predictions"][0]["top"]}
        return all(abs(top[label] - score) < 1e-5 for label, score in scores[n])

    async def one(port: int) -> None:
        client = Client(port, "/v1/predict?top=10")
        for n in left:
            if n % 20 == 19:
                await ask(client, bad, seen)
            else:
                image = n % len(images)
                body = (images[image], "image/jpeg")
                await ask(client, body, seen, lambda answer, n=image: right(n, answer))

    with serving("ours", model) as (port, process):
        warm, left = left, iter(range(min(2000, requests)))
        await asyncio.gather(*(one(port) for _ in range(8)))
        start, seen, left = memory(process), Seen(), warm
        begin = time.perf_counter()
        await asyncio.gather(*(one(port) for _ in range(8)))
        spent, grown = time.perf_counter() - begin, memory(process) - start
    tenth = len(seen.seconds) // 10
    ends = [Seen(seconds=part).latency(0.99) for part in (seen.seconds[:tenth], seen.seconds[-tenth:])]
    return {
        "requests": requests,
        "right": len(seen.seconds) - seen.wrong,
        "wrong": seen.wrong,
        "other": seen.other,
        "requests_per_s": round(requests / spent, 1),
        "grown_mb": round(grown, 1),
        "first_and_last_tenth_p99_ms": ends,
    }


async def stop(model: Path) -> dict[str, Any]:
    """SIGTERM while 8 clients ask without a pause."""
    bodies, count = as_bodies("ours", make_images(16, 32)), [0]
    with serving("ours", model) as (port, process):
        clients = asyncio.create_task(until_gone(port, "/v1/predict", bodies, 8, count))
        await asyncio.sleep(1)
        process.send_signal(signal.SIGTERM)
        begin = time.perf_counter()
        code = await asyncio.to_thread(process.wait, 60)
        spent = time.perf_counter() - begin
        seen = await clients
    return {"answered": count[0], "lost": seen.lost, "code": code, "seconds": round(spent, 2)}


if __name__ == "__main__":
    main()
