"""Pages parse, load nothing, run nothing but a search of long tables, escape all text, and are written completely or not at all."""

import base64
import errno
import hashlib
import os
import re
import resource
import subprocess
import sys

import pytest

from tests.support.browser import CHROMIUM, SWITCHES, needs_chromium
from tests.support.read_pages import HOSTILE_NAMES, ParsedPage, check_safe
from vitrail import __version__
from vitrail.base.errors import InputError, MissingExtra
from vitrail.views.html_page import Figure, ImageTile, Page, Section, Table, check_extras, render, write_page

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


def page_of(words):
    """A page with these strings in every field that takes text."""
    sections = [
        Section(
            word,
            [word],
            [Figure("<svg xmlns='http://www.w3.org/2000/svg'></svg>", word, word, wide=True)],
            [ImageTile([(PNG, word)], word, [word])],
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


def test_all_text_is_escaped():
    text = render(page_of(HOSTILE_NAMES))
    read = ParsedPage(text)
    check_safe(read)
    assert len(read.all("section")) == len(HOSTILE_NAMES)
    assert len(read.all("details")) == len(HOSTILE_NAMES) // 2
    shown = [word for word in HOSTILE_NAMES if word.isprintable()]
    for word in shown:
        assert read.text.count(word) >= 14, word
        assert sum(one.get("alt") == word for one in read.all("img")) == 2
    for word in ("\\u202egpj.exe", "\\x1b[31mred\\x00", "half \\udcff"):
        assert read.text.count(word) >= 14, word
    assert not set("\u202e\x1b\x00") & set(text)
    text.encode()


def test_the_parts_of_a_page():
    read = ParsedPage(render(page_of(["one", "two", "three", "four"])))
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


def test_images_are_embedded():
    read = ParsedPage(render(page_of(["one"])))
    svg, png = (one["src"] for one in read.all("img"))
    assert base64.b64decode(svg.removeprefix("data:image/svg+xml;base64,")).startswith(b"<svg")
    assert base64.b64decode(png.removeprefix("data:image/png;base64,")) == PNG


def test_empty_page():
    read = ParsedPage(render(Page("nothing")))
    assert "nothing" in read.text
    assert not read.all("nav")


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "page.html"
    assert write_page(path, page_of(["one"])) == path
    before = path.read_bytes()
    assert before.decode() == render(page_of(["one"]))
    with pytest.raises(
        InputError,
        match=r"page\.html already exists",
    ):
        write_page(path, page_of(["two"]))
    assert path.read_bytes() == before
    write_page(path, page_of(["two"]), overwrite=True)
    assert path.read_bytes() != before
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """In a child process, files are limited to 1 kB."""
    path = tmp_path / "page.html"
    path.write_text("mine")
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            write_page(path, page_of(["one"]), overwrite=True)
        except OSError as error:
            code = 0 if error.errno == errno.EFBIG else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_folders_that_cannot_be_written(tmp_path):
    for folder in (tmp_path / "none", "/proc"):
        with pytest.raises(OSError, match=r"none|/proc"):
            write_page(f"{folder}/page.html", Page("x"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_missing_packages_are_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtra, match=rf'needs the package {package}.* pip install "vitrail\[inspect\]"'
    ):
        check_extras()


def test_importing_reports_loads_no_optional_package():
    code = (
        "import sys, vitrail.views.run_page, vitrail.views.evaluation_page;"
        "assert not {'matplotlib', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def long_table():
    rows = [[f"flower {n}", "<b>rose</b>" if n == 7 else "tulip", 100 - n] for n in range(40)]
    return Page("table", sections=[Section("Long", tables=[Table("t", ["a", "b", "n"], rows, 2, "class")])])


def test_only_a_page_with_a_long_table_has_a_script_and_allows_just_that():
    assert "script" not in render(page_of(["one"]))
    read = ParsedPage(render(long_table()))
    [policy] = [one["content"] for one in read.all("meta") if one.get("http-equiv")]
    [script] = [text for text in read.texts if "querySelectorAll" in text]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


@needs_chromium
def test_a_long_table_is_searched_offline_and_fits_a_phone(tmp_path):
    from playwright.sync_api import sync_playwright

    path = write_page(tmp_path / "page.html", long_table())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        page = browser.new_page(viewport={"width": 390, "height": 700})
        page.goto(path.as_uri())
        assert page.locator("tbody tr:visible").count() == 40
        page.get_by_label("Search for a class").fill("ROSE 7")
        assert page.locator("tbody tr:visible").all_inner_texts() == ["flower 7\t<b>rose</b>\t93"]
        assert "1 of 40 rows" in page.locator(".search").inner_text()
        page.get_by_label("Search for a class").fill("93")  # a number is not a name
        assert page.locator("tbody tr:visible").count() == 0
        page.get_by_label("Search for a class").fill("")
        assert page.locator("tbody tr:visible").count() == 40
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        browser.close()


@needs_chromium
@pytest.mark.parametrize("width", [1200, 390])
def test_tiles_of_one_image_are_even(tmp_path, width):
    """Images of any shape have squares that fill their columns, and the tiles of a row start at one height."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    tiles = []
    for number, sides in enumerate([(160, 90), (40, 160), (24, 24), (160, 120), (90, 160), (160, 160)]):
        Image.new("RGB", sides, (40 * number, 90, 60)).save(tmp_path / "image.png")
        tiles.append(ImageTile([((tmp_path / "image.png").read_bytes(), "")], f"{number}. cosine 0.900"))
    path = write_page(tmp_path / "page.html", Page("p", sections=[Section("Found", images=tiles)]))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        page = browser.new_page(viewport={"width": width, "height": 700})
        page.goto(path.as_uri())
        figures = [one.bounding_box() for one in page.locator(".gallery figure").all()]
        images = [one.bounding_box() for one in page.locator(".gallery img").all()]
        browser.close()
    assert len({round(one["width"]) for one in images}) == 1
    for figure, image in zip(figures, images, strict=True):
        assert image["width"] == pytest.approx(image["height"], abs=1)
        assert image["width"] == pytest.approx(figure["width"], abs=1)
        assert image["y"] == pytest.approx(figure["y"], abs=1)
    columns = len({round(one["x"]) for one in figures})
    assert columns == (2 if width == 390 else 5)


def svg(points):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{points}pt" height="90pt" viewBox="0 0 9 9"></svg>'
    )


@needs_chromium
def test_on_a_phone_figures_shrink_or_scroll_and_tables_break_no_word(tmp_path):
    from playwright.sync_api import sync_playwright

    header = ["true class", "predicted class", "images", "fraction of the true class"]
    section = Section(
        "All",
        figures=[Figure(svg(points), "", wide=True) for points in (200, 400, 700)],
        images=[ImageTile([(PNG, "")], "Predicted: rose", ["test/class 17/photograph_0001.jpg"])],
        tables=[Table("t", header, [["hard-leaved pocket orchid", "bishop of llandaff", 12, "71.4 %"]], 2)],
    )
    path = write_page(tmp_path / "page.html", Page("p", sections=[section]))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        page = browser.new_page(viewport={"width": 390, "height": 700})
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        room = page.locator(".scroll").first.evaluate("box => box.clientWidth")
        small, middle, large = (image.bounding_box()["width"] for image in page.locator(".figures img").all())
        assert small == pytest.approx(200 * 96 / 72, abs=1)  # its own size
        assert middle == pytest.approx(room, abs=1)
        assert large == pytest.approx(34 * 16, abs=1)  # scrolls
        table = page.locator("table").bounding_box()["width"]
        assert table < room + 1  # no word is so long that it must scroll
        cells = page.locator("td:first-child, th").all()
        assert all(cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth") for cell in cells)
        name = page.locator("figcaption span").first
        assert name.inner_text() == "test/class 17/photograph_0001.jpg"
        # A line may end after / and _ and before the ending, rather than within a word.
        assert name.locator("wbr").count() == 4
        browser.close()
