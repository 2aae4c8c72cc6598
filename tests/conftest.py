"""What all tests share: a fixed seed, and models whose every parameter matters."""

import os
from collections import Counter

import pytest
import torch

import vitrail as vt
from bench.peers import make_torchvision_importable
from tests.support.browser import CHROMIUM, SWITCHES
from tests.support.models import add_noise

make_torchvision_importable()  # before anything imports timm or transformers

# Judged by the clock: these run when nothing else does.
ALONE = {
    *("test_import", "test_signals", "test_serve_limits", "test_serve_stop", "test_serve_decoders"),
}

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one thread for each
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """Do not import hundreds of other files to find those that run alone."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr.startswith("alone") and is_test and collection_path.stem not in ALONE:
        return True
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)


def pytest_terminal_summary(terminalreporter):
    """Say what was not tested for want of a GPU; `.ci/run` repeats these lines at its end."""
    missing = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        file, reason = report.nodeid.partition("::")[0], str(report.longrepr)
        if file.startswith("tests/gpu/") or ("GPU" in reason and not torch.cuda.is_available()):
            missing[file] += 1
    if missing:
        files = ", ".join(f"{file} {count}" for file, count in sorted(missing.items()))
        terminalreporter.write_line(f"Not tested for want of a GPU: {missing.total()} tests ({files})")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def tiny():
    """A small, oddly shaped model: three heads, two channels, a grid of 3 x 2 oblong patches."""
    config = vt.ViTConfig(width=12, depth=2, heads=3, patch=(4, 6), size=(12, 12), channels=2, classes=5)
    return add_noise(vt.ViT(config))


@pytest.fixture
def images(tiny):
    return torch.randn(4, tiny.config.channels, *tiny.config.pixels)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "CI must have a Chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield browser
        browser.close()
