"""docs/architecture.md has the rooms as they are, and walks through files that exist."""

import re

from docs import architecture


def test_the_rooms_are_those_of_the_code():
    """`python -m docs.architecture` writes them anew."""
    page = architecture.PAGE.read_text()
    assert architecture.with_part(page, "rooms", architecture.rooms()) == page


def test_every_file_of_a_walk_exists():
    walks = architecture.PAGE.read_text().partition("<!-- walks -->")[2]
    for room, names in re.findall(r"^- `(\w+)`: (.*)$", walks, re.MULTILINE):
        for name in names.split(", "):
            assert (architecture.ROOT / room / f"{name}.py").exists(), (room, name)
    assert all(title in walks for title in architecture.WALKS.values())
