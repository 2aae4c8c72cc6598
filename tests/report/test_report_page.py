"""The shell of all pages: it parses, loads nothing, runs nothing, shows text as text, and is written whole."""

import base64
import errno
import os
import re
import resource
import subprocess
import sys

import pytest

from read_pages import EVIL, Read, check_safe
from vitrail import __version__
from vitrail.errors import InputError, MissingExtra
from vitrail.report.page import Figure, Page, Picture, Section, Table, check_extras, render, write_page

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


def page_of(words):
    """These words at every place that takes some."""
    sections = [
        Section(
            word,
            [word],
            [Figure("<svg xmlns='http://www.w3.org/2000/svg'></svg>", word, word, wide=True)],
            [Picture([(PNG, word)], word, [word])],
            [Table(word, [word, word], [[word, word]])],
            [(word, word)],
            [word],
            [word],
            word,
            folded=bool(number % 2),
        )
        for number, word in enumerate(words)
    ]
    word = words[0]
    return Page(word, [word], [(word, word)], sections, word)


def test_text_shows_as_text_wherever_it_stands():
    text = render(page_of(EVIL))
    read = Read(text)
    check_safe(read)
    assert len(read.all("section")) == len(EVIL)
    assert len(read.all("details")) == len(EVIL) // 2
    shown = [word for word in EVIL if word.isprintable()]
    for word in shown:
        assert read.text.count(word) >= 14, word
        assert sum(one.get("alt") == word for one in read.all("img")) == 2
    for word in ("\\u202egpj.exe", "\\x1b[31mred\\x00", "half \\udcff"):
        assert read.text.count(word) >= 14, word
    assert not set("\u202e\x1b\x00") & set(text)
    text.encode()


def test_the_parts_of_a_page():
    read = Read(render(page_of(["one", "two", "three", "four"])))
    assert read.tags[0][0] == "html"
    assert read.tags[0][1]["lang"] == "en"
    assert [len(read.all(tag)) for tag in ("h1", "h2", "caption", "main", "nav")] == [1, 4, 4, 1, 1]
    assert all("alt" in one for one in read.all("img"))
    assert all(one["scope"] == "col" for one in read.all("th"))
    assert [one.get("class") for one in read.all("td")[:2]] == [None, "number"]
    ids = {one["id"] for one in read.all("section")}
    assert {one["href"] for one in read.all("a")} == {f"#{name}" for name in ids}
    assert f"vitrail {__version__}" in read.text
    [style] = [text for text in read.texts if ":root" in text]
    for words in (
        "prefers-color-scheme: dark",
        "max-width: 32rem",
        "@media print",
        "color-scheme: light dark",
    ):
        assert words in style, words
    assert not re.search(r"url\(|@import", style)


def test_pictures_are_in_the_page():
    read = Read(render(page_of(["one"])))
    svg, png = (one["src"] for one in read.all("img"))
    assert base64.b64decode(svg.removeprefix("data:image/svg+xml;base64,")).startswith(b"<svg")
    assert base64.b64decode(png.removeprefix("data:image/png;base64,")) == PNG


def test_an_empty_page():
    read = Read(render(Page("nothing")))
    assert "nothing" in read.text
    assert not read.all("nav")


def test_a_page_is_a_new_file(tmp_path):
    place = tmp_path / "page.html"
    assert write_page(place, page_of(["one"])) == place
    before = place.read_bytes()
    assert before.decode() == render(page_of(["one"]))
    with pytest.raises(
        InputError,
        match=r"^A page is a new file: nothing of yours is overwritten\. Got .*page\.html, which is there already\.",
    ):
        write_page(place, page_of(["two"]))
    assert place.read_bytes() == before
    write_page(place, page_of(["two"]), replace=True)
    assert place.read_bytes() != before
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_no_room_leaves_what_was_there(tmp_path):
    """A file may become no larger than 1 kB, in a child."""
    place = tmp_path / "page.html"
    place.write_text("mine")
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            write_page(place, page_of(["one"]), replace=True)
        except OSError as error:
            code = 0 if error.errno == errno.EFBIG else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert place.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_takes_nothing(tmp_path):
    for folder in (tmp_path / "none", "/proc"):
        with pytest.raises(OSError, match=r"none|/proc"):
            write_page(f"{folder}/page.html", Page("x"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_what_is_missing_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtra, match=rf'needs the package {package}\. .* pip install "vitrail\[inspect\]"'
    ):
        check_extras()


def test_importing_the_room_loads_no_optional_package():
    code = (
        "import sys, vitrail.report.run, vitrail.report.evaluation;"
        "assert not {'matplotlib', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
