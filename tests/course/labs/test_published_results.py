"""The published results: as printed in the lecture notes, with sources, and compared with ours."""

import json
import re

import pytest

from tests.support.shared_data import shared
from vitrail.model.presets import preset
from vitrail_course.labs import published_results
from vitrail_course.labs.published_results import (
    PUBLISHED,
    load_published_rows,
    print_published,
)


@pytest.fixture(scope="module")
def rows_by_name():
    return {
        row["name"]: row | {"table": table}
        for table in ("results", "sizes")
        for row in load_published_rows(table)
    }


def read_note(number):
    [file] = shared("notes").glob(f"{number}_*.txt")
    return file.read_text(encoding="utf-8")


def printed_results(number):
    """The table of results in a note: the name of each row and its cells."""
    lines = read_note(number).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("\tOurs-JFT"))
    plain = [re.sub(r"</?b>|\$|\*", "", line).replace("\\pm", "±") for line in lines[first + 1 : first + 9]]
    return {cells[0]: cells[1:] for cells in (line.split("\t") for line in plain)}


@pytest.mark.parametrize(("number", "columns"), [("002", 5), ("003", 4)])
def test_results_are_as_printed(rows_by_name, number, columns):
    """003 omits the last column, and 002 prints Real for ReaL."""
    printed = printed_results(number)
    assert len(printed) == 8
    for name, cells in printed.items():
        row = rows_by_name[name.replace("Real", "ReaL")]
        ours = list(row["published"].values())
        assert len(ours) == 5
        assert ours[:columns] == [re.sub(r"\s*±\s*", " ± ", cell).replace("—", "-").strip() for cell in cells]
    assert "Noisy Student" in " ".join(json.loads(PUBLISHED.read_text())["notes"])


@pytest.mark.parametrize("number", ["000", "002"])
def test_sizes_are_as_printed(rows_by_name, number):
    lines = [line.split("\t") for line in read_note(number).splitlines() if re.match(r"ViT-\w+\t", line)]
    assert {name: cells for name, *cells in lines} == {
        row["name"]: list(row["published"].values())
        for row in rows_by_name.values()
        if row["table"] == "sizes"
    }


def test_every_row_has_a_source_and_the_slides_that_print_it(rows_by_name):
    assert len(rows_by_name) == 11
    for row in rows_by_name.values():
        assert re.fullmatch(r"Dosovitskiy et al. 2020, arXiv 2010.11929, Table [12]", row["source"])
        assert row["source"].endswith("2" if row["table"] == "results" else "1")
        assert row["printed"]
        assert all(re.match(r'00[0-4] "', where) for where in row["printed"])
        assert row["ours"]
        assert row["reason"].endswith(".")


@pytest.mark.parametrize(
    ("name", "size", "ours"),
    [("ViT-Base", "B/16", "86.6M"), ("ViT-Large", "L/16", "304.3M"), ("ViT-Huge", "H/14", "632.0M")],
)
def test_sizes_equal_ours(rows_by_name, name, size, ours):
    row, config = rows_by_name[name], preset(size)
    assert row["ours"] == ours
    assert [int(n) for n in list(row["published"].values())[:4]] == [
        config.depth,
        config.width,
        config.F,
        config.heads,
    ]


def test_the_size_of_large_is_explained(rows_by_name):
    row = rows_by_name["ViT-Large"]
    assert row["published"]["parameters"] == "307M"
    assert "304,326,632" in row["reason"]
    assert "303,301,632" in row["reason"]
    assert "304 million" in row["note"]
    assert round(published_results.count_parameters("L/32") / 1e6) == 307  # as in the footnote


def test_cifar10_is_the_result_of_the_recipe(rows_by_name, monkeypatch):
    row = rows_by_name["CIFAR-10"]
    assert f"{row['ours']} % of the 10,000 test images" in published_results.recipe_docstring("cifar10-small")
    assert 90 < float(row["ours"].split()[0].rstrip(",")) < 100
    assert "pre-trained" in row["reason"]
    text = "First. 94.1, 94.2 and 94.3 % of the 10,000 test images (seeds 0 to 2), in 9 min"
    monkeypatch.setattr(published_results, "recipe_docstring", lambda recipe: text)
    assert published_results.find_our_accuracy({"name": "CIFAR-10"})[0] == "94.1, 94.2 and 94.3"
    assert "(seeds 0 to 2)" in published_results.find_our_accuracy({"name": "CIFAR-10"})[1]
    monkeypatch.setattr(published_results, "recipe_docstring", lambda recipe: "Not run.")
    assert published_results.find_our_accuracy({"name": "CIFAR-10"}) == ("-", published_results.NOT_RUN)


def test_every_dash_has_a_reason(rows_by_name):
    dashes = [row["name"] for row in rows_by_name.values() if row["ours"] == "-"]
    assert len(dashes) == 7
    assert "64 pixels" in rows_by_name["Oxford Flowers-102"]["reason"]
    assert all(re.match("not (run|comparable)", rows_by_name[name]["reason"]) for name in dashes)


@pytest.mark.parametrize("columns", ["70", "160"])
def test_terminal_output(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    print_published()
    text = capsys.readouterr().out
    for word in ("88.55", "0.68k", "304.3M", "Source: Dosovitskiy", "307 million is the number for L/32"):
        assert word in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= int(columns)


def test_fields_of_the_json_file():
    content = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert set(content) == {"results", "sizes", "notes"}
    assert all({"name", "published", "source", "printed", "note"} <= set(row) for row in content["results"])
