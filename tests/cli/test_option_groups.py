"""Options that commands share, as fields of a dataclass; and the commands in panels."""

import re

import typer
from typer.testing import CliRunner

from vitrail.cli import app
from vitrail.cli.option_groups import flatten, options
from vitrail.cli.options import ModelOptions


@options
class Paint:
    color: str = typer.Option("red", help="The color of the wall.")
    coats: int = typer.Option(1, "--times", min=1, help="How often.")


@options
class Gloss(Paint):
    shine: bool = typer.Option(False, "--shine")


def test_the_fields_of_a_dataclass_are_options():
    found = []

    def paint(wall: str, paint: Gloss) -> None:
        found.append((wall, paint))

    one = typer.Typer()
    one.command()(flatten(paint))
    assert CliRunner().invoke(one, ["north", "--times", "2", "--shine"]).exit_code == 0
    assert found == [("north", Gloss(color="red", coats=2, shine=True))]
    assert CliRunner().invoke(one, ["north", "--times", "0"]).exit_code == 2
    assert "The color of the wall." in CliRunner().invoke(one, ["--help"]).output
    assert (Gloss().coats, ModelOptions().device) == (1, "auto")  # without a command, the plain defaults


def test_the_commands_are_in_panels_on_one_screen():
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "NO_COLOR": "1", "TERMINAL_WIDTH": "80"})
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 56
    panels = re.findall(r"╭─ ([\w ]+) ─", done.output)
    assert panels == ["Options", "Everyday", "Train", "Use", "Look inside", "Files", "Learn"]
    names = re.findall(r"^│ ([a-z]+) ", done.output, re.MULTILINE)
    assert names[:5] == ["train", "evaluate", "predict", "inspect", "serve"]
    assert {"lab", "notes", "check", "generate"} <= set(names[names.index("demo") :])
