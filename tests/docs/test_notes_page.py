"""docs/notes.md is what the labs gave."""

from docs import notes as page
from vitrail_course.labs.lab import LABS, load_results


def test_the_page_is_that_of_the_results():
    """`python -m docs.notes` writes it anew."""
    assert page.page() == page.PAGE.read_text()


def test_every_result_has_an_image():
    names = [result["name"] for result in load_results()]
    assert set(names) <= set(LABS)
    assert {path.stem for path in page.IMAGES.iterdir()} == set(names)
