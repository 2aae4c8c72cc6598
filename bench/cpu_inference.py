"""Inference on this machine's cores: ours as it is and accelerated, beside the peers in eager fp32.

    python -m bench.cpu_inference --size B/16 --out bench/results/inference-cpu-B16.json

All candidates in one process, interleaved round by round; compare the ratios, not the seconds. With
--cpu-time, one thread and the processor's time of this process: for a machine that others use, too. int8 is
calibrated on random images, which is right for speed and says nothing about agreement.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vitrail as vt
from bench.measure import clock, environment, interleave, rates, save
from bench.peers import PEERS, make_torchvision_importable
from vitrail.fast.choices import Choices
from vitrail.fast.inference_routes import Builder
from vitrail.fast.onnx_graph import OnnxForward, build_onnx
from vitrail.model.presets import preset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="B/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--peers", default="timm,transformers,torchvision")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        torch.set_num_threads(1)
    make_torchvision_importable()
    config = preset(args.size)
    torch.manual_seed(0)
    images = torch.randn(args.batch, config.channels, *config.pixels)
    jobs: dict[str, Callable[[], float]] = {}
    for name, run in candidates(config, args.peers.split(",")).items():
        step = functools.partial(forward, run, images)
        step()
        step()
        jobs[name] = functools.partial(processor_time if args.cpu_time else wall_time, step)
    seconds = interleave(jobs, args.rounds)
    found = rates(seconds, args.batch)
    peers = {name: statistics.median(seconds[name]) for name in args.peers.split(",")}
    fastest = min(peers, key=lambda name: peers[name])

    def ratio(name: str, other: str) -> float:
        pairs = zip(seconds[other], seconds[name], strict=True)
        return round(statistics.median(theirs / ours for theirs, ours in pairs), 3)

    rows = [
        {"row": name, **found[name], "to_timm": ratio(name, "timm"), "to_fastest_peer": ratio(name, fastest)}
        for name in jobs
    ]
    result: dict[str, Any] = {"size": args.size, "batch": args.batch, "rounds": args.rounds, "rows": rows}
    result |= {"clock": "processor time of one thread" if args.cpu_time else "wall time"}
    result |= {"fastest_peer": fastest, "environment": environment()}
    print(f"{args.size}, batch {args.batch}: {'row':30} {'images/s':>9} {'/ timm':>7} {'/ fastest peer':>15}")
    for row in rows:
        numbers = f"{row['images_per_s']:9.2f} {row['to_timm']:7.2f} {row['to_fastest_peer']:15.2f}"
        print(f"{'':17}{row['row']:30} {numbers}")
    save(result, args.out or Path(f"bench/results/inference-cpu-{args.size.replace('/', '')}.json"))


def candidates(config: Any, peers: list[str]) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Forward passes by name."""
    found: dict[str, Callable[[torch.Tensor], Any]] = {name: PEERS[name](config).eval() for name in peers}
    model = vt.ViT(config).eval()
    device = torch.device("cpu")
    calibration = torch.randn(8, config.channels, *config.pixels)
    builder = Builder(model, device, "throughput", Choices(device, remember=False), calibration)
    found["ours, PyTorch"] = model
    for precision, graph in (("fp32", build_onnx(model)), ("int8", builder.int8_graph())):
        found[f"ours, ONNX Runtime {precision}"] = OnnxForward(graph)
        found[f"ours, {precision}, an image a thread"] = OnnxForward(graph, one_by_one=True)
    return found


def wall_time(step: Callable[[], Any]) -> float:
    return clock(step, 1, lambda: None)


def processor_time(step: Callable[[], Any]) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def forward(run: Callable[[torch.Tensor], Any], images: torch.Tensor) -> Any:
    with torch.inference_mode():
        return run(images)


if __name__ == "__main__":
    main()
