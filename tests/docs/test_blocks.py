"""Every Python block in README and docs runs, in the order of its page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def mark(page):
    """Those of training.md train for ten seconds."""
    return pytest.param(page, marks=pytest.mark.slow if page.name == "training.md" else (), id=page.name)


@pytest.mark.parametrize("page", [mark(page) for page in PAGES if blocks(page)])
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_table_of_fields_is_that_of_the_code():
    """`python -m docs.fields` writes it anew."""
    from docs import fields

    assert fields.page() == fields.PAGE.read_text()
