"""Importing is fast, silent and light; and imports inside the package go one way."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vitrail
from docs.architecture import ROOMS

ROOT = Path(vitrail.__file__).parent

PACKAGES = ["paper", *ROOMS, "__main__"]

# Imports upwards, inside a function, each with its reason.
EXCEPTIONS = {
    ("model/vit.py", "weights"): "ViT.from_pretrained is vitrail.load; users expect it on the class.",
    ("images/formats/arrays.py", "weights"): "An .npz of images is read by the safe reader of .npz weights.",
}


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
    """Or, on a slow machine, little more than Typer takes for itself."""

    def seconds(*arguments):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return time.perf_counter() - start

    pairs = [
        (seconds("-m", "vitrail", "--help"), seconds("-c", "import typer.rich_utils, rich.markdown"))
        for _ in range(5)
    ]
    ours, typers = (min(times) for times in zip(*pairs, strict=True))
    assert ours < max(0.5, 2.5 * typers), (ours, typers)


def test_loading_a_model_does_not_load_the_compiler():
    """It takes a second, which every command that loads a model would wait for."""
    code = (
        "import sys, vitrail\n"
        "from vitrail.views.sample import SAMPLE_FILE\n"
        "vitrail.load(SAMPLE_FILE)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = python(code)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_public_names_exist():
    assert set(vitrail.__all__) == set(vitrail._MODULES)
    assert dir(vitrail) == sorted([*vitrail.__all__, "__version__"])
    for name in vitrail.__all__:
        assert getattr(vitrail, name).__name__.split(".")[-1] == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitrail.nothing


def test_names_of_the_course_say_what_to_install():
    code = (
        "import sys, vitrail; sys.modules['vitrail_course'] = None\n"
        "try: vitrail.Decoder\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = python(code)
    expected = "vitrail.Decoder is part of the course; install it with: pip install vitrail-course"
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_no_public_name_is_a_module():
    """Importing a module of that name would replace the function."""
    modules = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    assert not modules & set(vitrail.__all__)


def imports(path):
    """The full names of what a file imports, anywhere in the file, and whether inside a function."""
    package = ["vitrail", *path.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    local = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, node.module] if node.module else above)
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"vitrail.{node.attr}"] if node.value.id == "vitrail" else []  # after `import vitrail`
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        yield from ((name, id(node) in local) for name in names)


def packages(path):
    """The subpackages that a file imports from, without the exceptions."""
    for name, is_local in imports(path):
        first, _, rest = name.partition(".")
        if first == "vitrail" and rest.split(".")[0] not in ("", "__version__"):
            package = rest.split(".")[0]
            package = package if package in PACKAGES else vitrail._MODULES[package].split(".")[1]
            if not is_local or (str(path.relative_to(ROOT)), package) not in EXCEPTIONS:
                yield package


def test_every_form_of_import_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "model" / "x.py"
    file.parent.mkdir()
    file.write_text(
        "from vitrail import ViT\nfrom ..cli import main\nimport vitrail.model.presets\nimport numpy as n\n"
        "def f():\n    import vitrail\n    vitrail.load('x')\n    importlib.import_module('vitrail.serve')\n"
    )
    assert sorted(packages(file)) == ["cli", "model", "model", "serve", "weights"]
    assert ("numpy", False) in list(imports(file))


def test_exceptions_are_needed_and_local(monkeypatch):
    used = {(path, package) for path, _ in EXCEPTIONS for package in packages(ROOT / path)}
    assert not used & set(EXCEPTIONS)
    monkeypatch.setattr(sys.modules[__name__], "EXCEPTIONS", {})
    for path, package in [("model/vit.py", "weights")]:
        assert package in set(packages(ROOT / path))


@pytest.mark.parametrize("path", [*ROOT.rglob("*.py")], ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_the_layers(path):
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    imported = set(packages(path))
    if package != "__init__":  # the lazy public names
        assert imported <= set(PACKAGES[: PACKAGES.index(package) + 1])
    if package == "model":
        others = {name.split(".")[0] for name, _ in imports(path)} - sys.stdlib_module_names
        assert others <= {"torch", "vitrail"}
        assert imported <= {"model", "base"}
    assert "vitrail_course" not in {name.split(".")[0] for name, _ in imports(path)}
