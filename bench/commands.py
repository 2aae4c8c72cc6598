"""Commands as users type them, from start to exit, beside the complete script of a peer.

    python -m bench.commands --out bench/results                     # all rows of this machine
    python -m bench.commands --rows predict train --rounds 1 --cold

Every run is a fresh process, and its seconds count from its start to its exit. Ours are the command lines of
the README, without a flag that its main path lacks; theirs are the scripts of `bench.command_peers`, in each
of their modes. The runs of a row take turns. `--cold` starts each with empty caches of compilers, and ours
also without what `vt.accelerate` has measured before; otherwise one untimed turn fills them.

On a GPU the images are those of bench.photos and the model is a B/16; on a CPU ants and bees
(../shared/data/hymenoptera_s160.tar) and DeiT-Ti.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.measure import environment, save
from bench.photos import CLASSES, PHOTOGRAPHS, write_splits

WEIGHTS = PHOTOGRAPHS.parent / "weights" / "deit_tiny_imagenet1k.safetensors"
LAST_WORDS = 600  # characters of the output of a run that failed


@dataclass(frozen=True)
class Row:
    """A task: our command line, and the arguments of `bench.command_peers` for each peer."""

    ours: str
    peers: dict[str, str] = field(default_factory=dict)
    images: str = ""
    """A folder whose images, times `passes`, make the images per second."""
    passes: int = 1


GPU_ROWS = {
    "predict": Row(
        "predict {model} {photos}/train --format csv --out {new}.csv",
        {
            "timm": "predict {photos}/train {new}.csv --model B/16",
            "timm, compiled": "predict {photos}/train {new}.csv --model B/16 --compile",
        },
        "{photos}/train",
    ),
    "evaluate": Row(
        "evaluate {model} {photos}/train",
        {"timm": "evaluate {photos}/train --model B/16"},
        "{photos}/train",
    ),
    "embed": Row(
        "embed {model} {photos}/train --out {new}.safetensors",
        {"timm": "embed {photos}/train {new}.npy --model B/16"},
        "{photos}/train",
    ),
    "train": Row(
        "train {photos} --recipe deit3 --model B/16 --epochs 5 --batch 256 --out {new}",
        {
            "timm": "train {photos} {new} --model B/16 --epochs 5 --batch 256 --size 192",
            "timm, compiled": "train {photos} {new} --model B/16 --epochs 5 --batch 256 --size 192 --compile",
        },
        "{photos}/train",
        5,
    ),
    "first answer": Row("predict {model} {photo}", {"timm": "predict {photo} {new}.csv --model B/16"}),
    "export": Row("export {model} --to onnx --out {new}.onnx"),
}

CPU_ROWS = {
    "fine-tune, 1 epoch": Row(
        "train {photos} --from {weights} --epochs 1 --out {new}",
        {"timm": "train {photos} {new} --from {weights} --epochs 1 --batch 32"},
        "{photos}/train",
    ),
    "fine-tune, 3 epochs": Row(
        "train {photos} --from {weights} --epochs 3 --out {new}",
        {"timm": "train {photos} {new} --from {weights} --epochs 3 --batch 32"},
        "{photos}/train",
        3,
    ),
    "predict": Row(
        "predict {weights} {photos} --format csv --out {new}.csv",
        {"timm": "predict {photos} {new}.csv --from {weights}"},
        "{photos}",
    ),
    "embed": Row(
        "embed {weights} {photos} --out {new}.safetensors",
        {"timm": "embed {photos} {new}.npy --from {weights}"},
        "{photos}",
    ),
    "evaluate": Row("evaluate {model} {photos}", {"timm": "evaluate {photos} --from {weights}"}, "{photos}"),
    "first answer": Row("predict {weights} {photo}", {"timm": "predict {photo} {new}.csv --from {weights}"}),
    "doctor": Row("doctor {photos}", images="{photos}"),
    "info": Row("info {weights}"),
    "help": Row("--help"),
    "export": Row("export {model} --to onnx --out {new}.onnx"),
}


def main() -> None:
    """Run the rows in turns, and save what is known after every turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    on_gpu = torch.cuda.is_available()
    rows = GPU_ROWS if on_gpu else CPU_ROWS
    parser.add_argument("--rows", nargs="*", default=list(rows), choices=list(rows), metavar="ROW")
    parser.add_argument("--only", nargs="*", metavar="WHO", help="vitrail, or a peer; all by default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", type=int, default=11_520, help="images of bench.photos, on a GPU")
    parser.add_argument("--limit", type=int, default=300, help="seconds for a process")
    parser.add_argument("--cold", action="store_true", help="with empty caches of compilers")
    parser.add_argument("--folder", type=Path, help="where images and models are, or go; kept")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paths = prepare(folder, on_gpu, args.train)
        result: dict[str, Any] = {"cold": args.cold, "rows": {}, "environment": environment()}
        for name in args.rows:
            for turn, who, found in take_turns(rows[name], paths, args):
                row = result["rows"].setdefault(name, {}).setdefault(who, {"runs": []})
                row["runs"].append(found)
                row |= summarize(row["runs"], rows[name], paths)
                print(f"{name}, {who}, {turn}: {found}", flush=True)
                if args.out:
                    save(result, args.out / f"commands-{'gpu' if on_gpu else 'cpu'}.json")
        print_table(result["rows"])


def prepare(folder: Path, on_gpu: bool, train: int) -> dict[str, Path]:
    """Make images and model files where they are missing; the paths by their names in the rows."""
    import vitrail as vt
    from vitrail.images.preprocess import Preprocess

    paths = {"photos": folder / "photos", "model": folder / "model.safetensors", "new": folder / "new"}
    paths["weights"] = WEIGHTS
    if not paths["photos"].exists():
        if on_gpu:
            write_splits(paths["photos"], train, train // 9)
        elif PHOTOGRAPHS.exists():
            with tarfile.open(PHOTOGRAPHS) as tar:
                tar.extractall(folder / "archive", filter="data")
            (parent,) = {path.parent for path in (folder / "archive").rglob("train")}
            parent.rename(paths["photos"])
        else:
            sys.exit(f"bench/commands.py needs {PHOTOGRAPHS.name} on a CPU; see its docstring.")
    classes = sorted(path.name for path in next(paths["photos"].glob("train")).iterdir())
    assert not on_gpu or len(classes) == CLASSES
    if not paths["model"].exists():
        torch.manual_seed(0)
        if on_gpu:
            model, how = vt.create("B/16", classes=len(classes)), Preprocess(size=224, resize_to=256)
            torch.nn.init.normal_(model.head.weight, std=0.02)
            vt.Bundle(model=model, preprocess=how, labels=classes).save(paths["model"])
        else:
            vt.load(WEIGHTS, classes=classes, preprocess="deit").save(paths["model"])
    paths["photo"] = min(paths["photos"].rglob("*.jpg"))
    return paths


def take_turns(row: Row, paths: dict[str, Path], args: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Run ours and the peers in turns; before them once untimed, which fills the caches of compilers."""
    commands = {"vitrail": ["-m", "vitrail", *split(row.ours, paths)]}
    for who, line in row.peers.items():
        commands[who] = ["-m", "bench.command_peers", *split(line, paths)]
    commands = {who: command for who, command in commands.items() if not args.only or who in args.only}
    turns = [str(number) for number in range(1, args.rounds + 1)]
    for turn in turns if args.cold else ["untimed", *turns]:
        for who, command in commands.items():
            with tempfile.TemporaryDirectory() as caches:
                found = run(command, args.limit, Path(caches) if args.cold else None)
            for left in paths["new"].parent.glob("new*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            if turn != "untimed" or "failed" in found:
                yield turn, who, found


def split(line: str, paths: dict[str, Path]) -> list[str]:
    """The words of a command line with its paths."""
    return [word.format(**paths) for word in shlex.split(line)]


def run(command: list[str], limit: int, caches: Path | None) -> dict[str, Any]:
    """Run a process to its end: seconds, and the peak memory of it and its children; or why it failed."""
    env = dict(os.environ)
    if caches is not None:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
        env |= {name: str(caches / name) for name in names}
    with tempfile.TemporaryFile("w+") as output:
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, env=env)
        memory = PeakMemory(process.pid)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return {"failed": f"not done after {limit} s", **memory.stop()}
        seconds = time.perf_counter() - begin
        if process.returncode:
            output.seek(0)
            return {"failed": output.read()[-LAST_WORDS:]}
    return {"seconds": round(seconds, 2), **memory.stop()}


class PeakMemory:
    """Watches the memory of a process and its children, and of the GPU, from a thread."""

    def __init__(self, pid: int) -> None:
        self._pid, self._host, self._gpu = pid, 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """The peaks, in GiB."""
        self._ended.set()
        self._thread.join()
        gpu = {"gpu_gib": round(self._gpu / 2**30, 1)} if torch.cuda.is_available() else {}
        return {"host_gib": round(self._host / 2**30, 2), **gpu}

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self._host = max(self._host, sum(map(_proportional_bytes, _with_children(self._pid))))
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                self._gpu = max(self._gpu, total - free)


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except OSError:  # it has ended
            continue
        for child in pids:
            yield from _with_children(int(child))


def _proportional_bytes(pid: int) -> int:
    """The memory of a process, with its part of what it shares with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def summarize(runs: list[dict[str, Any]], row: Row, paths: dict[str, Path]) -> dict[str, float]:
    """The median seconds of the runs that came to an end, and images per second."""
    seconds = [one["seconds"] for one in runs if "seconds" in one]
    if not seconds:
        return {}
    median = statistics.median(seconds)
    if not row.images:
        return {"seconds": median}
    folder = Path(row.images.format(**paths))
    count = sum(1 for _ in folder.rglob("*.jpg")) * row.passes
    return {"seconds": median, "images_per_s": round(count / median, 1)}


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Print the seconds of each row, and how many times as fast ours is as the fastest peer."""
    for name, found in rows.items():
        seconds = {who: one["seconds"] for who, one in found.items() if "seconds" in one}
        peers = [value for who, value in seconds.items() if who != "vitrail"]
        ratio = f"  {min(peers) / seconds['vitrail']:.2f}x" if peers and "vitrail" in seconds else ""
        print(f"{name:<20} " + ", ".join(f"{who} {value:.1f} s" for who, value in seconds.items()) + ratio)


if __name__ == "__main__":
    main()
