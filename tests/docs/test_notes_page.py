"""docs/notes.md is what the labs gave."""

from docs import notes as page
from vitrail.course.labs.lab import LABS, load_results


def test_the_page_is_that_of_the_results():
    """`python -m docs.notes` writes it anew."""
    assert page.page() == page.PAGE.read_text()


def test_every_lab_has_a_result_and_a_image():
    assert [result["name"] for result in load_results()] == list(LABS)
    assert {path.stem for path in page.IMAGES.iterdir()} == set(LABS)
