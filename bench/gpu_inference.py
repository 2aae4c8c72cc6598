"""Inference on one GPU: ours beside timm in its best modes, at a large batch and for a single image.

    python -m bench.gpu_inference --size B/16 --out bench/results/inference-gpu-B16.json

Each row is measured in a process of its own, so that one that fails leaves the others. Rows:

timm, timm-max         torch.compile with its defaults, with mode="max-autotune"
timm-reduce            mode="reduce-overhead", for the latency of a single image
ours                   vt.create, compiled with the defaults
bf16, fp8              vt.accelerate; fp8 calibrated on random images (agreement needs a real model)
latency                vt.accelerate(goal="latency"), bf16, batches of 1 and 8

Weights and images are in bf16; exact GELU (timm's and ours) and PyTorch's fused attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.measure import clock, environment, save
from bench.peers import make_torchvision_importable, ours, timm
from vitrail.model.presets import preset

ROWS = ("timm", "timm-max", "timm-reduce", "ours", "bf16", "fp8", "latency")
_MODES = {"timm": None, "timm-max": "max-autotune", "timm-reduce": "reduce-overhead", "ours": None}
_LATENCY = (1, 8)
_LATENCY_RUNS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="B/16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=10, help="forward passes in one timed round")
    parser.add_argument("--rows", default=",".join(row for row in ROWS if row != "timm-max"))
    parser.add_argument("--limit", type=int, default=240, help="seconds for each row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)  # measure this row here and print it
    args = parser.parse_args()
    if args.row:
        print("ROW " + json.dumps(measure(args)))
        return
    if not torch.cuda.is_available():
        sys.exit("bench/gpu_inference.py needs a CUDA device; there is none here.")
    out = args.out or Path(f"bench/results/inference-gpu-{args.size.replace('/', '')}.json")
    result: dict[str, Any] = {
        "size": args.size,
        "batch": args.batch,
        "rows": [],
        "environment": environment(),
    }
    for row in args.rows.split(","):
        result["rows"].append(in_child(row, args))
        save(result, out)
    show(result)


def in_child(row: str, args: Any) -> dict[str, Any]:
    """Measure a row in another process; an error is its result."""
    command = [sys.executable, "-m", "bench.gpu_inference", "--row", row]
    for name in ("size", "batch", "rounds", "repeats"):
        command += [f"--{name}", str(getattr(args, name))]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        found = json.loads(lines[-1][4:]) if lines else {"error": (done.stderr or done.stdout)[-1500:]}
    except subprocess.TimeoutExpired:
        found = {"error": f"took longer than {args.limit} s"}
    found = {"row": row, **found, "total_s": round(time.perf_counter() - begin, 1)}
    print(json.dumps({key: value for key, value in found.items() if key != "choices"}), flush=True)
    return found


def measure(args: Any) -> dict[str, Any]:
    make_torchvision_importable()
    config = preset(args.size)
    torch.manual_seed(0)
    if args.row in _MODES:
        model = (ours if args.row == "ours" else timm)(config).cuda().eval().bfloat16()
        run: Callable[[torch.Tensor], Any] = torch.compile(model, mode=_MODES[args.row])
        if args.row == "timm-reduce":
            return latency(run, config)
        found = throughput(run, config, args)
        return {**found, **(latency(run, config) if args.row == "timm" else {})}
    return accelerated(config, args)


def accelerated(config: Any, args: Any) -> dict[str, Any]:
    """A row of vt.accelerate, with the cosine of its logits to fp32 and what each product took."""
    import vitrail as vt

    model = ours(config).cuda().eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.02)  # it begins with zeros
    images = torch.randn(64, config.channels, *config.pixels, device="cuda")
    goal = "latency" if args.row == "latency" else "throughput"
    precision = "fp8" if args.row == "fp8" else "bf16"
    begin = time.perf_counter()
    how = {"calibrate": images, "min_agreement": 0.0} if precision == "fp8" else {}
    fast = vt.accelerate(model, precision, goal, remember=False, **how)
    ready = time.perf_counter() - begin
    with torch.inference_mode():
        exact, found = model(images).float(), fast(images).float()
    cosine = torch.nn.functional.cosine_similarity(exact, found).mean().item()
    report = fast.report.as_dict()
    rates = latency(fast, config) if args.row == "latency" else throughput(fast, config, args)
    details = getattr(getattr(fast.run, "forward", None), "choices", None)
    choices = {} if details is None else {"choices": details.seconds, "failures": details.failures}
    return {**rates, "cosine": round(cosine, 6), "accelerate_s": round(ready, 1), "report": report, **choices}


@torch.inference_mode()
def throughput(run: Callable[[torch.Tensor], Any], config: Any, args: Any) -> dict[str, Any]:
    images = torch.randn(args.batch, config.channels, *config.pixels, device="cuda").bfloat16()
    for _ in range(3):
        run(images)
    times = [clock(lambda: run(images), args.repeats, torch.cuda.synchronize) for _ in range(args.rounds)]
    rates = sorted(round(args.batch / seconds, 1) for seconds in times)
    return {"images_per_s": statistics.median(rates), "slowest": rates[0], "fastest": rates[-1]}


@torch.inference_mode()
def latency(run: Callable[[torch.Tensor], Any], config: Any) -> dict[str, Any]:
    """Milliseconds from a call to its result, one after the other."""
    found = {}
    for batch in _LATENCY:
        images = torch.randn(batch, config.channels, *config.pixels, device="cuda").bfloat16()
        for _ in range(10):
            run(images)
        times = sorted(
            1000 * clock(lambda images=images: run(images), 1, torch.cuda.synchronize)
            for _ in range(_LATENCY_RUNS)
        )
        found[f"batch {batch}"] = {
            "p50_ms": round(times[len(times) // 2], 3),
            "p99_ms": round(times[int(0.99 * len(times))], 3),
        }
    return {"latency": found}


def show(result: dict[str, Any]) -> None:
    peers = [row["images_per_s"] for row in result["rows"] if "timm" in row["row"] and "images_per_s" in row]
    print(f"{result['size']}, batch {result['batch']}, {result['environment']['commit']}")
    print(f"{'row':12} {'images/s':>9} {'/ timm':>7} {'p50 1':>7} {'p50 8':>7} {'cosine':>8}")
    for row in result["rows"]:
        rate = row.get("images_per_s")
        single, eight = (row.get("latency", {}).get(f"batch {n}", {}).get("p50_ms", "") for n in _LATENCY)
        ratio = f"{rate / max(peers):.2f}" if rate and peers else ""
        line = f"{row['row']:12} {rate or '':>9} {ratio:>7} {single:>7} {eight:>7} {row.get('cosine', ''):>8}"
        print(line + (f"  ERROR {row['error'][-200:]!r}" if "error" in row else ""))
        for name, seconds in sorted(row.get("choices", {}).items()):
            if name.startswith(("product", "attention")):
                times = {way: round(1e6 * one, 1) for way, one in seconds.items() if one}
                print(f"    {name}: {times} us")
        for name, reason in row.get("failures", {}).items():
            print(f"    failed: {name}: {reason[:160]}")


if __name__ == "__main__":
    main()
