"""Importing is quick, silent and light; and imports inside the package go one way."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vitrail

ROOT = Path(vitrail.__file__).parent

# From the ground up: a room may import from rooms before it, never from one after it.
ROOMS = [
    *(
        "errors",
        "telemetry",
        "fields",
        "config",
        "memory",
        "preprocess",
        "published",
        "presets",
        "model",
        "build",
    ),
    *("weights", "data", "walkthrough", "exercises", "evaluation", "inspect", "predict", "training"),
    *("report", "export", "recipes", "labs", "demo", "serve", "cli", "__main__"),
]


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_import_is_silent_and_does_not_load_torch():
    done = python(
        "import sys; before = set(sys.modules); import vitrail; vitrail.ViTConfig; vitrail.preset('B/16');"
        "heavy = set('torch numpy PIL typer rich matplotlib sklearn'.split());"
        "assert not heavy & set(sys.modules) - before, heavy & set(sys.modules)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_opens_no_socket_and_writes_nothing():
    done = python(
        "import sys\n"
        "def watch(event, args):\n"
        "    writes = event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+')\n"
        "    if writes or event.startswith('socket'):\n"
        "        raise SystemExit(f'{event} {args}')\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(watch)\n"
        "import vitrail\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_takes_less_than_150_ms():
    code = "import time; start = time.perf_counter(); import vitrail; print(time.perf_counter() - start)"
    assert min(float(python(code).stdout) for _ in range(3)) < 0.15


def test_help_takes_less_than_500_ms():
    def seconds():
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "vitrail", "--help"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.5


def test_public_names_are_all_there():
    assert set(vitrail.__all__) == set(vitrail._HOMES) <= set(dir(vitrail))
    for name in vitrail.__all__:
        assert getattr(vitrail, name).__name__.split(".")[-1] == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitrail.nothing


def test_no_public_name_is_a_module_of_its_own():
    """Or importing the module somewhere would put it in the place of the function."""
    modules = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    assert not modules & set(vitrail.__all__)


def imports(path):
    """What a file imports, wherever in the file: full module names."""
    package = ["vitrail", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, node.module] if node.module else above)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def rooms(path):
    """The rooms of this package that a file imports from."""
    for name in imports(path):
        first, _, rest = name.partition(".")
        if first == "vitrail" and rest.split(".")[0] not in ("", "__version__"):
            room = rest.split(".")[0]
            yield room if room in ROOMS else vitrail._HOMES[room].split(".")[1]


def test_the_direction_test_sees_every_form_of_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "model" / "x.py"
    file.parent.mkdir()
    file.write_text(
        "from vitrail import demo, ViT\nfrom ..cli import main\nimport vitrail.presets\nimport numpy as n\n"
    )
    assert list(rooms(file)) == ["demo", "model", "cli", "presets"]
    assert "numpy" in list(imports(file))


@pytest.mark.parametrize("path", [*ROOT.rglob("*.py")], ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room != "__init__":
        assert set(rooms(path)) <= set(ROOMS[: ROOMS.index(room) + 1])
    if room == "model":
        others = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
        assert others <= {"torch", "vitrail"}
        assert set(rooms(path)) <= {"model", "memory", "config", "fields", "errors"}
