"""docs/notes.md is what the labs gave."""

from statistics import fmean

from docs import notes as page
from vitrail_course.labs.lab import LABS, load_results


def test_the_page_is_that_of_the_results():
    """`python -m docs.notes` writes it anew."""
    assert page.page() == page.PAGE.read_text()


def test_every_result_has_an_image():
    names = [result["name"] for result in load_results()]
    assert set(names) <= set(LABS)
    assert {path.stem for path in page.IMAGES.iterdir()} == set(names)


def test_the_text_after_the_labs_has_the_numbers_of_towers():
    [towers] = [result for result in load_results() if result["name"] == "towers"]
    text = page.PAGE.read_text().split(page.END)[1]
    for name in ("seen", "unseen"):
        mean = fmean(one[name] for one in towers["numbers"]["captions"])
        assert f"{100 * mean:.1f} %" in text
