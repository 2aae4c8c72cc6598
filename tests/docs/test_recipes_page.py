"""docs/recipes.md is what the recipes say of themselves."""

from docs import recipes as page
from vitrail.training.recipes import recipes


def test_the_page_is_that_of_the_code():
    """`python -m docs.recipes` writes it anew."""
    assert page.page() == page.PAGE.read_text()


def test_every_recipe_is_there_once():
    text = page.PAGE.read_text()
    for name, function in recipes().items():
        assert text.count(f"| [`{name}`](#{name}) | ") == 1
        assert text.count(f"\n### {name}\n") == 1
        assert (function.__doc__ or "").splitlines()[0] in text


def test_no_figure_without_the_command_that_gave_it():
    assert page.group_of("99 % of them:\n\n    vitrail train digits --seed 0") == "Measured by us"
    assert (
        page.group_of("Published: 99 %, by vitrail train. Not run\nby us.") == "As published, not run by us"
    )
    assert page.group_of("99 % of them.") == page.group_of("vitrail train digits") == "Not measured yet"


def test_one_that_says_nothing_yet():
    def plain(data):
        """Something new.

        More of it.
        """

    assert page.written({"new": plain}) == (
        "## Not measured yet\n\n| recipe | for |\n|---|---|\n| [`new`](#new) | Something new. |\n\n"
        "### new\n\nSomething new.\n\nMore of it."
    )
