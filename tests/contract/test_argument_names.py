"""Messages name arguments as their reader gives them: `--out` to a command, `out=` in Python."""

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vitrail as vt
from vitrail.base.errors import call, command_line_names, option, setting
from vitrail.cli import app

SOURCE = Path(vt.__file__).parent
FRONT = {"cli", "serve", "course"}  # read only by users of the command line
COMMAND = re.compile(r"(vitrail [a-z]+|docker run|torchrun) .*")


@pytest.mark.parametrize(
    ("function", "arguments", "command", "python"),
    [
        (option, ("out",), "--out", "out="),
        (option, ("from", "my weights.npz"), "--from 'my weights.npz'", "from_='my weights.npz'"),
        (option, ("with-preprocess", True), "--with-preprocess", "with_preprocess=True"),
        (option, ("batch", 32), "--batch 32", "batch=32"),
        (option, ("map", {"tabby": "cat"}), "--map tabby=cat", "map={'tabby': 'cat'}"),
        (setting, ("ema", None), "--set ema=none", "ema=None"),
        (setting, ("corrupt", "skip"), "--set corrupt=skip", "corrupt='skip'"),
        (setting, ("model.depth", ...), "--set model.depth=VALUE", "model=dict(depth=...)"),
        (call, ("train", "DATA"), "vitrail train DATA", "vt.train(DATA)"),
    ],
)
def test_the_names_of_an_argument(function, arguments, command, python):
    assert function(*arguments) == python
    with command_line_names():
        assert function(*arguments) == command
    assert function(*arguments) == python


def test_one_error_in_both_ways(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "config.json").write_text("{}")
    (full / "checkpoints").mkdir()
    with pytest.raises(vt.FileError) as error:
        vt.train("digits", out=full, verbose=False, epochs=1)
    python = str(error.value)
    assert python.startswith("out= must be a new or empty folder")
    assert f"vt.train(out='{full}', resume=True)" in python
    done = CliRunner().invoke(app, ["train", "digits", "--out", str(full), "--epochs", "1", "--quiet"])
    command = str(done.exception)
    assert command.startswith("--out must be a new or empty folder")
    assert f"vitrail train --out {full} --resume" in command
    assert option("out") == "out="  # also after a command that failed


def texts(tree):
    """The strings of a module, without docstrings; what is formatted into them appears as {}."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts | docstrings
        ):
            yield node.value


def test_what_python_calls_too_writes_no_option_by_hand():
    found = [
        f"{path.relative_to(SOURCE)}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not FRONT & set(path.relative_to(SOURCE).parts) and path != SOURCE / "base" / "errors.py"
        for text in texts(ast.parse(path.read_text()))
        if " " in text and re.search(r"(^|[ (`])--[a-z]", COMMAND.sub("", text))
    ]
    assert not found, "use errors.option or errors.setting"
