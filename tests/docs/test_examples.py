"""Every example runs as it is, in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTS = {
    "custom_loop.py": "saved digits.safetensors",
    "features.py": "5-NN accuracy",
    "fine_tune.py": "with LoRA",
    "serve_and_call.py": "is predicted as",
    "two_processes.sh": "epoch",
}


def test_every_example_is_listed():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    text = (EXAMPLES / "README.md").read_text()
    assert files == set(PRINTS)
    assert all(f"({name})" in text for name in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name, tmp_path):
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    scripts = Path(sys.executable).parent  # torchrun and vitrail, as in an activated environment
    done = subprocess.run(
        [*command, str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout + done.stderr
