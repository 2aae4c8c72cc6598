"""The published table: as the notes print it, with a source for every row, and ours beside it."""

import json
import re
from pathlib import Path

import pytest

from vitrail.labs import table
from vitrail.labs.table import PUBLISHED, markdown, rows, show
from vitrail.presets import preset

NOTES = Path(__file__).parents[3] / "shared" / "notes"


@pytest.fixture(scope="module")
def found():
    return {row.name: row for row in rows()}


def note(number):
    files = sorted(NOTES.glob(f"{number}_*.txt"))
    if not files:
        pytest.skip("needs the notes of ../shared/notes")
    return files[0].read_text(encoding="utf-8")


def printed(number):
    """The table of results as a note prints it: a row's name and its cells."""
    lines = note(number).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("\tOurs-JFT"))
    plain = [re.sub(r"</?b>|\$|\*", "", line).replace("\\pm", "±") for line in lines[first + 1 : first + 9]]
    return {cells[0]: cells[1:] for cells in (line.split("\t") for line in plain)}


@pytest.mark.parametrize(("number", "columns"), [("002", 5), ("003", 4)])
def test_results_are_as_the_notes_print_them(found, number, columns):
    """003 leaves out the last column, and 002 writes Real for ReaL, as the notes field says."""
    there = printed(number)
    assert len(there) == 8
    for name, cells in there.items():
        row = found[name.replace("Real", "ReaL")]
        ours = list(row.published.values())
        assert len(ours) == 5
        assert ours[:columns] == [re.sub(r"\s*±\s*", " ± ", cell).replace("—", "-").strip() for cell in cells]
    assert "Noisy Student" in " ".join(table.general())


@pytest.mark.parametrize("number", ["000", "002"])
def test_sizes_are_as_the_notes_print_them(found, number):
    lines = [line.split("\t") for line in note(number).splitlines() if re.match(r"ViT-\w+\t", line)]
    assert {name: cells for name, *cells in lines} == {
        row.name: list(row.published.values()) for row in found.values() if row.table == "sizes"
    }


def test_every_row_has_a_source_and_says_where_it_is_printed(found):
    assert len(found) == 11
    for row in found.values():
        assert re.fullmatch(r"Dosovitskiy et al. 2020, arXiv 2010.11929, Table [12]", row.source)
        assert row.source.endswith("2" if row.table == "results" else "1")
        assert row.printed
        assert all(re.match(r'00[0-4] "', where) for where in row.printed)
        assert row.ours
        assert row.reason.endswith(".")


@pytest.mark.parametrize(
    ("name", "size", "ours"),
    [("ViT-Base", "B/16", "86.6M"), ("ViT-Large", "L/16", "304.3M"), ("ViT-Huge", "H/14", "632.0M")],
)
def test_sizes_beside_ours(found, name, size, ours):
    row, config = found[name], preset(size)
    assert row.ours == ours
    assert [int(n) for n in list(row.published.values())[:4]] == [
        config.depth,
        config.width,
        config.F,
        config.heads,
    ]


def test_large_is_said_to_be_another_count(found):
    row = found["ViT-Large"]
    assert row.published["parameters"] == "307M"
    assert "304,326,632" in row.reason
    assert "303,301,632" in row.reason
    assert "304 million" in row.note
    assert round(table.count("L/32") / 1e6) == 307  # as the note says


def test_cifar10_is_what_the_recipe_says(found, monkeypatch):
    row = found["CIFAR-10"]
    assert f"{row.ours} % of the 10,000 test pictures" in table.docstring("cifar10-small")
    assert 90 < float(row.ours.split()[0]) < 100
    assert "pre-trained" in row.reason
    said = "First. 94.1, 94.2 and 94.3 % of the 10,000 test pictures (seeds 0 to 2), in 9 min"
    monkeypatch.setattr(table, "docstring", lambda recipe: said)
    assert table.our_result({"name": "CIFAR-10"})[0] == "94.1, 94.2 and 94.3"
    assert "(seeds 0 to 2)" in table.our_result({"name": "CIFAR-10"})[1]
    monkeypatch.setattr(table, "docstring", lambda recipe: "Not run by us.")
    assert table.our_result({"name": "CIFAR-10"}) == ("-", table.NOT_RUN)


def test_a_dash_has_a_reason(found):
    dashes = [row.name for row in found.values() if row.ours == "-"]
    assert len(dashes) == 7
    assert "64 pixels" in found["Oxford Flowers-102"].reason
    text = markdown()
    for name in dashes:
        assert re.search(rf"^\| {re.escape(name)} \|.*\| - \|$", text, re.MULTILINE)
        assert re.search(rf"^- Ours, .*{re.escape(name)}.*: (not run|none)", text, re.MULTILINE)


def test_as_markdown():
    lines = [line for line in markdown().splitlines() if line.startswith("|")]
    results = lines[: 2 + 8]
    assert {line.count("|") for line in results} == {8}
    assert {line.count("|") for line in lines[10:]} == {8}
    assert len(lines) == 10 + 2 + 3
    assert results[0] == (
        "| test, % right | H/14, JFT | L/16, JFT | L/16, ImageNet-21k | BiT-L, ResNet152x4 | "
        "Noisy Student, EfficientNet-L2 | ours |"
    )


@pytest.mark.parametrize("wide", ["70", "160"])
def test_on_a_terminal(capsys, monkeypatch, wide):
    monkeypatch.setenv("COLUMNS", wide)
    show()
    said = capsys.readouterr().out
    for word in ("88.55", "0.68k", "304.3M", "Source: Dosovitskiy", "307 is the count of L/32"):
        assert word in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= int(wide)


def test_the_file_is_plain_data():
    known = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert set(known) == {"results", "sizes", "notes"}
    assert all({"name", "published", "source", "printed", "note"} <= set(row) for row in known["results"])
