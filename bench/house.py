"""How large the house is: lines, edges between rooms, file names, and the files that a real run goes through.

python -m bench.house            # all of it; some three minutes on two cores
python -m bench.house --static   # without the runs, two seconds
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLKIT = ROOT / "src" / "vitrail"
COURSE = ROOT / "course" / "src"
RUNS = ("predict", "run", "step", "load")


def room_of(path: Path) -> str:
    """The top-level room of a file; a module beside the rooms is a room."""
    return path.relative_to(TOOLKIT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """The rooms a file imports from, lazily or for types alone included; a public name counts as its room."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "vitrail" and rest:
                yield rest.split(".")[0]


def edges() -> set[tuple[str, str]]:
    """The pairs of rooms of which the first imports the second."""
    rooms = {room_of(path) for path in TOOLKIT.rglob("*.py")} - {"__init__", "__main__"}
    pairs = {(room_of(path), room) for path in TOOLKIT.rglob("*.py") for room in imported_rooms(path)}
    return {(room, other) for room, other in pairs if room in rooms and other in rooms and room != other}


def count_lines(folder: Path) -> int:
    """The lines of all Python files below a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def repeated_names() -> list[str]:
    """File names that more than one package of the toolkit has."""
    names = Counter(path.name for path in TOOLKIT.rglob("*.py") if not path.name.startswith("__"))
    return sorted(name for name, times in names.items() if times > 1)


def print_static() -> None:
    """Print what can be counted without running anything."""
    print(f"toolkit: {count_lines(TOOLKIT)} lines in {len(list(TOOLKIT.rglob('*.py')))} files")
    for room in sorted(path for path in TOOLKIT.iterdir() if (path / "__init__.py").exists()):
        print(f"  {room.name}: {count_lines(room)} lines in {len(list(room.rglob('*.py')))} files")
    print(f"course: {count_lines(COURSE)} lines")
    print(f"edges between rooms: {len(edges())}")
    print(f"file names that occur twice: {', '.join(repeated_names()) or 'none'}")
    long = {path: len(path.read_text().splitlines()) for path in TOOLKIT.rglob("*.py")}
    print(f"files over 400 lines: {sum(lines > 400 for lines in long.values())}")


def job(name: str, folder: Path) -> Callable[[int], None]:
    """The run called `name`, on data that is made in `folder`; its argument tells its outputs apart."""
    import numpy as np
    from PIL import Image

    import vitrail as vt

    rng = np.random.default_rng(0)
    for path in (f"{split}/{label}" for split in ("train", "val") for label in "ab"):
        (folder / "data" / path).mkdir(parents=True)
        for index in range(10):
            image = Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8))
            image.save(folder / "data" / path / f"{index}.png")
    own, other = folder / "own.safetensors", folder / "timm.safetensors"
    vt.Bundle(model=vt.create("mu/4", size=32, classes=2)).save(own)

    def predict(turn: int) -> None:
        from vitrail.cli import main

        out = str(folder / f"{turn}.csv")
        options = ["--out", out, "--format", "csv", "-q"]
        sys.argv = ["vitrail", "predict", str(own), str(folder / "data"), *options]
        with contextlib.suppress(SystemExit):
            main()

    def train(turn: int) -> None:
        vt.train(folder / "data", out=folder / f"run{turn}", epochs=1, verbose=False)

    def load(turn: int) -> None:
        if turn == 0:
            vt.convert(own, other, to="timm")
        vt.load(other, heads=4)

    return {"predict": predict, "run": train, "step": train, "load": load}[name]


@contextlib.contextmanager
def watch_steps(tracing: threading.Event) -> Iterator[None]:
    """Trace only while the trainer takes a step."""
    from vitrail.training.trainer import Trainer

    take_step = Trainer.take_step

    def watched(*arguments: Any) -> None:
        tracing.set()
        try:
            take_step(*arguments)
        finally:
            tracing.clear()

    tracing.clear()
    Trainer.take_step = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.take_step = take_step  # type: ignore[method-assign]


def trace(name: str) -> set[tuple[str, int]]:
    """The functions of the toolkit that a second run calls, by file and first line; imports are over."""
    called: set[tuple[str, int]] = set()
    tracing = threading.Event()
    tracing.set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if not tracing.is_set():
            return
        code = frame.f_code
        is_function = bool(code.co_flags & 1)  # CO_OPTIMIZED: not the body of a module or a class
        if event == "call" and is_function and code.co_filename.startswith(str(TOOLKIT)):
            called.add((code.co_filename, code.co_firstlineno))

    with tempfile.TemporaryDirectory() as folder:
        run = job(name, Path(folder))
        run(0)
        with watch_steps(tracing) if name == "step" else contextlib.nullcontext():
            sys.setprofile(profile)
            threading.setprofile(profile)
            try:
                run(1)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return called


def main() -> None:
    """Print the counts, and what each run goes through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--static", action="store_true", help="only what needs no run")
    parser.add_argument("--files", choices=RUNS, help="list the files of one run")
    options = parser.parse_args()
    if options.files:
        files = {file for file, _ in trace(options.files)}
        print("\n".join(sorted(str(Path(file).relative_to(TOOLKIT)) for file in files)))
        return
    print_static()
    for name in () if options.static else RUNS:
        called = trace(name)
        print(f"{name}: {len(called)} functions in {len({file for file, _ in called})} files")


if __name__ == "__main__":
    main()
