"""How we time: all candidates in one process, interleaved round by round, medians compared.

A machine that slows down for a second then slows everyone, and ratios hold where seconds do not.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def interleave(jobs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every job once per round, in another order each time (what a job leaves in the caches
    meets each neighbor equally often); seconds by name."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    order, chance = list(jobs), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            seconds[name].append(jobs[name]())
    return seconds


def clock(step: Callable[[], Any], repeats: int, sync: Callable[[], None]) -> float:
    """Seconds for one step, over `repeats` of them."""
    sync()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    sync()
    return (time.perf_counter() - begin) / repeats


def rates(seconds: dict[str, list[float]], images: int) -> dict[str, dict[str, float]]:
    """Images per second: the median round, and the slowest and fastest."""
    return {
        name: {
            "images_per_s": round(images / statistics.median(times), 2),
            "slowest": round(images / max(times), 2),
            "fastest": round(images / min(times), 2),
        }
        for name, times in seconds.items()
    }


def environment() -> dict[str, Any]:
    """What a number depends on: machine, versions, commit, command."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("timm", "transformers", "torchvision", "triton"):
        try:
            versions[name] = __import__(name).__version__
        except Exception as error:  # a peer that does not import is part of the result
            versions[name] = f"not there: {error}"
    here = Path(__file__).parent.parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return {
        "machine": machine(),
        "versions": versions,
        "commit": git.stdout.strip() or "unknown",
        "command": shlex.join(
            ["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *without_paths(sys.argv[1:])]
        ),
        "date": time.strftime("%Y-%m-%d"),
    }


def without_paths(arguments: list[str]) -> list[str]:
    """The arguments but for where data comes from and results go: these are nobody else's paths."""
    for option in ("--out", "--folder", "--model", "--npz"):
        if option in arguments:
            place = arguments.index(option)
            arguments = arguments[:place] + arguments[place + 2 :]
    return arguments


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        found["cpu"] = models[0] if models else "unknown"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


def capture(step: Callable[[], T]) -> Callable[[], T]:
    """A step as one CUDA graph: warm up on another stream, record, replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = step()

    def replay(tensors: Callable[[], T] = step) -> T:  # the graph does not keep what the step reads
        graph.replay()
        return result

    return replay
