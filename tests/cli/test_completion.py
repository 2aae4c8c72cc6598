"""Shell completion: the script for a shell, and the names that complete."""

import os
import subprocess
import sys

import pytest

from vitrail.cli.completion import FIGURES, figure_names
from vitrail.inspect import figures


def complete(*words):
    """What bash would offer for the last of these words."""
    environment = {
        **os.environ,
        "_VITRAIL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'vitrail'; from vitrail.cli import main; main()",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["vitrail", "ins"], ["inspect"]),
        (["vitrail", "train", "--recipe", "mnist-"], ["mnist-weak", "mnist-notes"]),
        (["vitrail", "info", "--family", "torchv"], ["torchvision"]),
    ],
)
def test_names_complete(words, expected):
    assert complete(*words) == expected


def test_figures_complete_after_a_comma():
    assert figure_names("filters,sc") == ["filters,scoring"]
    assert set(FIGURES) == set(figures.FIGURES)
