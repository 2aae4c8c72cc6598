"""`--quiet`: results and errors, but no progress and no notes."""

import pytest
import torch
from typer.testing import CliRunner

import vitrail as vt
from vitrail.cli import app

COMMANDS = [
    "train",
    "evaluate",
    "predict",
    "inspect",
    "doctor",
    "export",
    "convert",
    "embed",
    "search",
    "probe",
    "pack",
    "sweep",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_with_progress_or_notes_has_the_option(command):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert "--quiet" in result.output


def test_convert_prints_its_table_without_notes(tmp_path):
    torch.manual_seed(0)
    model = vt.create("mu/4", size=8, channels=3, classes=3)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    outputs = []
    for name, more in (("a", []), ("b", ["--quiet"])):
        arguments = ["convert", str(tmp_path / "plain.pth"), str(tmp_path / f"{name}.safetensors"), *more]
        result = CliRunner().invoke(app, [*arguments, "--classes=2"])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    assert "note: " in outputs[0]
    assert "note: " not in outputs[1]
    assert "largest logit difference" in outputs[1]
