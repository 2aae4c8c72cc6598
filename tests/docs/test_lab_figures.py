"""The figures of the labs in the docs are drawn by today's code from the saved results."""

import numpy as np
import pytest
from PIL import Image

from docs import lab_figures


@pytest.mark.parametrize("name", ["blocks", "pool", "practice", "resolution", "translation"])
def test_a_figure_in_the_docs_is_up_to_date(name, tmp_path):
    lab_figures.redraw(name, tmp_path)
    new, old = (
        np.asarray(Image.open(folder / f"{name}.png").convert("RGB"), dtype=int)
        for folder in (tmp_path, lab_figures.IMAGES)
    )
    assert new.shape == old.shape
    assert np.abs(new - old).mean() < 0.5, f"run python -m docs.lab_figures {name}"
    assert [file.name for file in tmp_path.iterdir()] == [f"{name}.png"]
