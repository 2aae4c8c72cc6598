"""Shell completion: the script for a shell, and the names that complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.cli.inspect import OF_IMAGES, OF_WEIGHTS, complete_figure
from vitrail.views import figures


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
    assert complete_figure("filters,sc") == ["filters,scoring"]
    assert {*OF_WEIGHTS, *OF_IMAGES} == set(figures.FIGURES)


@pytest.mark.parametrize(
    ("shell", "words"),
    [("bash", "complete -o default -F"), ("zsh", "#compdef vitrail"), ("fish", "complete --command vitrail")],
)
def test_the_script_of_a_shell(shell, words):
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [Path(sys.executable).with_name("vitrail"), "--show-completion", shell]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_a_real_bash_completes_a_recipe():
    script = """source <(vitrail --show-completion)
        COMP_WORDS=(vitrail train --recipe mnist-) COMP_CWORD=3
        $(complete -p vitrail | sed 's/.*-F \\([^ ]*\\) .*/\\1/') vitrail mnist- --recipe
        echo "${COMPREPLY[*]}" """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["mnist-weak", "mnist-notes"], done.stderr
