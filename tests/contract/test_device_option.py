"""Every command that runs a model has --device, and chooses a GPU unless told otherwise."""

import pytest
import typer

from vitrail.cli import app

WITHOUT = {
    "demo": "it shows the same numbers everywhere, so it runs on one thread of the CPU",
    "pack": "it decodes images and runs no model",
    "notes": "it shows the stored results of labs",
    "check": "it compares a student's NumPy or PyTorch code with the oracle, in fp64 on the CPU",
    "info": "it reads the header of a file",
    "plan": "it computes with numbers only",
}
COMMANDS = typer.main.get_command(app).commands
OPTIONS = {name: {one.name: one for one in command.params} for name, command in COMMANDS.items()}


def test_every_other_command_has_a_device():
    assert {name for name, options in OPTIONS.items() if "device" not in options} == set(WITHOUT)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - set(WITHOUT)))
def test_the_device_is_chosen_by_default(name):
    option = OPTIONS[name]["device"]
    assert "auto" in (option.default, option.show_default)  # None is the recipe's own: auto
