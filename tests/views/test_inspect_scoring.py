"""Deletion and insertion curves, against plain loops and a model with a known best order."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.answer_models import (
    LAYOUTS,
    assert_legible,
    build,
    images_for,
    log_p,
    one_patch_model,
    painted,
)
from vitrail.views import scoring
from vitrail.views.scoring import Scoring


def random_maps(model, count, *names):
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal((count, *model.config.grid)).astype(np.float32) for name in names}


@pytest.mark.parametrize("name", LAYOUTS)
def test_curves_equal_covering_patches_in_a_loop(name):
    model = build(name)
    images = images_for(model)
    maps = random_maps(model, 2, "a")
    N, w = model.config.patches, model.config.grid[1]
    found = scoring.compute(model, images, maps)
    target = model(images).argmax(1)
    points = len(found.fraction) - 1
    for n, image in enumerate(images):
        order = sorted(range(N), key=lambda patch: -maps["a"][n].ravel()[patch])
        deleted, inserted = [], []
        for point in range(points + 1):
            count = round(N * point / points)
            without, only = image, image
            for patch in order[:count]:
                without = painted(without, divmod(patch, w), model.config.patch_pixels)
            for patch in order[count:]:
                only = painted(only, divmod(patch, w), model.config.patch_pixels)
            deleted.append(without)
            inserted.append(only)
        targets = [target[n]] * (points + 1)
        assert found.deletion["a"][n] == pytest.approx(
            log_p(model, torch.stack(deleted), targets).exp(), abs=1e-5
        )
        assert found.insertion["a"][n] == pytest.approx(
            log_p(model, torch.stack(inserted), targets).exp(), abs=1e-5
        )


def test_default_number_of_points_is_28_or_the_number_of_patches():
    for name, steps in (("class token", 9), ("oblong", 28)):
        model = build(name)
        found = scoring.compute(model, images_for(model, 1), random_maps(model, 1, "a"))
        assert len(found.fraction) == steps + 1
        assert (found.fraction[0], found.fraction[-1]) == (0, 1)
        assert found.deletion["a"].shape == (1, steps + 1)


def test_the_true_map_has_the_best_possible_areas():
    model = one_patch_model((1, 2))
    images = torch.full((3, 1, 12, 12), 4.0)
    right = np.zeros((3, 3, 3), np.float32)
    right[:, 1, 2] = 1
    found = scoring.compute(model, images, {"right": right, "wrong": -right, "random": np.zeros_like(right)})
    p = float(torch.sigmoid(torch.tensor(4.0)))
    step = 1 / 9
    deletion, insertion = found.areas(found.deletion), found.areas(found.insertion)
    assert deletion["right"] == pytest.approx([0.5 + (p - 0.5) * step / 2] * 3, abs=1e-5)
    assert insertion["right"] == pytest.approx([p - (p - 0.5) * step / 2] * 3, abs=1e-5)
    assert deletion["wrong"] == pytest.approx(insertion["right"], abs=1e-5)
    assert (deletion["right"] < deletion["random"]).all()
    text = scoring.caption(found)
    assert "(n = 3), right is best in both" in text
    assert "wrong in deletion, wrong in insertion" in text


def test_ties_are_broken_at_random():
    rank = scoring._ranks(np.zeros((50, 4, 4)))
    assert all(sorted(one.ravel()) == list(range(16)) for one in rank)
    assert abs(rank[:, :2].mean() - rank[:, 2:].mean()) < 1  # by rows it would be 8
    assert np.array_equal(scoring._ranks(np.array([[[0.1, 3.0], [2.0, -1.0]]])), [[[2, 0], [1, 3]]])


def test_the_target_is_used():
    model = build()
    images = images_for(model)
    maps = random_maps(model, 2, "a")
    found = scoring.compute(model, images, maps, target=[1, 4])
    assert found.deletion["a"][:, 0] == pytest.approx(log_p(model, images, [1, 4]).exp(), abs=1e-5)
    assert found.insertion["a"][:, 0] == pytest.approx(log_p(model, images * 0, [1, 4]).exp(), abs=1e-5)


def curves(**areas):
    """Flat curves with these areas for each image."""
    return {name: np.repeat(np.array(area)[:, None], 3, axis=1) for name, area in areas.items()}


def make_result(deletion, insertion):
    return Scoring(np.array([0, 0.5, 1]), curves(**deletion), curves(**insertion))


def test_caption_reports_disagreement_and_methods_no_better_than_random():
    random = [0.5, 0.5, 0.5]
    found = make_result(
        dict(one=[0.1, 0.2, 0.3], two=[0.3, 0.4, 0.5], random=random),
        dict(one=[0.4, 0.5, 0.65], two=[0.8, 0.9, 0.7], random=random),
    )
    text = scoring.caption(found)
    assert "The two scores disagree" in text
    assert "one is best in deletion (0.200), two in insertion (0.800)" in text
    error = np.std([0.1, 0.2, 0.3], ddof=1) / 3**0.5
    assert (
        f"one is better by 0.300 ± {error:.3f} in deletion and two by 0.300 ± {error:.3f} in insertion"
        in text
    )
    assert "standard error: one in insertion." in text


def test_caption_of_one_image_and_without_random_maps():
    one = make_result(dict(a=[0.1], random=[0.3]), dict(a=[0.9], random=[0.3]))
    assert "no standard error" in scoring.caption(one)
    assert "nan" not in scoring.caption(one)
    no_random = make_result(dict(a=[0.1]), dict(a=[0.9]))
    assert "Without random maps" in scoring.caption(no_random)
    only = make_result(dict(random=[0.1]), dict(random=[0.9]))
    assert "Only random maps were scored (n = 1)." in scoring.caption(only)
    assert_legible(scoring.draw(one))


def test_figure_is_legible_and_table_holds_the_areas():
    model = build("oblong")
    maps = random_maps(model, 3, *"abcdefg", "random", "a name that is long beyond all measure and reason")
    found = scoring.compute(model, images_for(model, 3), maps)
    figure = scoring.draw(found)
    assert_legible(figure)
    area = np.trapezoid(found.deletion["b"], found.fraction, axis=1)
    words = [text.get_text() for axis in figure.axes for text in axis.get_legend().get_texts()]
    assert f"b: {area.mean():.3f} ± {area.std(ddof=1) / 3**0.5:.3f}" in words
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(styles) == 9
    header, rows = scoring.table(found)
    assert [len(header), *map(len, rows)] == [6] * 10
    assert rows[1][:3] == ["b", 3, pytest.approx(area.mean())]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(maps={}), "no maps to score"),
        (dict(maps={"a": np.zeros((2, 9))}), "(2, 3, 3), but it has shape (2, 9)"),
        (dict(maps={"a": np.full((2, 3, 3), np.nan)}), "it contains NaN or infinity"),
    ],
)
def test_invalid_arguments_are_rejected(change, words):
    model = build()
    fields = dict(maps=random_maps(model, 2, "a")) | change
    with pytest.raises(vt.InputError) as error:
        scoring.compute(model, images_for(model), **fields)
    assert words in str(error.value)
