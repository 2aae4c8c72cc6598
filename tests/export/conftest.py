"""The classroom page of a model, opened in Chromium."""

import pytest

from tests.support.classroom import WatchedPage
from vitrail.exporters.html import write_classroom
from vitrail.views.sample import sample_model


@pytest.fixture
def opened(browser, tmp_path):
    pages = []

    def open_page(bundle, **options):
        file = tmp_path / f"page-{len(pages)}.html"
        assert write_classroom(bundle, file) == []
        pages.append(WatchedPage(browser, file, **options))
        return pages[-1].page

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def sample_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("classroom") / "sample.html"
    write_classroom(sample_model(), file)
    return file


@pytest.fixture
def sample(browser, sample_file):
    watched = WatchedPage(browser, sample_file)
    yield watched.page
    watched.close()
