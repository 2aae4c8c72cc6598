"""The modules that public names had in 0.2 still work for a version, with a warning."""

import importlib
import subprocess
import sys

import pytest

import vitrail
from vitrail.base import moved

PLACES = [(module, name) for module, names in moved._MOVED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), PLACES)
def test_an_old_path_gives_the_public_name_and_a_warning(module, name):
    with pytest.warns(FutureWarning, match=rf"{module}.{name} has moved; use vitrail.{name} "):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(vitrail, name)


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vitrail.nothing")
    for module in moved._MOVED:
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
            _ = importlib.import_module(module).nothing


def test_an_import_statement_of_0_2():
    code = "from vitrail.config import ViTConfig; from vitrail.course.walk import walk; print(ViTConfig.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ViTConfig\n", done.stderr
    assert done.stderr.count("FutureWarning") == 2
