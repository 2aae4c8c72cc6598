"""Deletion and insertion curves: against loops, and a model for which the best order is known."""

import numpy as np
import pytest
import torch
from test_inspect_attribution import one_patch_model

import vitrail as vt
from answer_models import LAYOUTS, assert_legible, build, log_p, painted, pictures_for
from vitrail.inspect import scoring
from vitrail.inspect.scoring import Scoring


def random_maps(model, count, *names):
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal((count, *model.config.grid)).astype(np.float32) for name in names}


@pytest.mark.parametrize("name", LAYOUTS)
def test_curves_are_what_painting_patch_after_patch_gives(name):
    model = build(name)
    images = pictures_for(model)
    maps = random_maps(model, 2, "a")
    N, w = model.config.patches, model.config.grid[1]
    found = scoring.compute(model, images, maps, points=min(4, N))
    target = model(images).argmax(1)
    points = len(found.share) - 1
    for n, picture in enumerate(images):
        order = sorted(range(N), key=lambda patch: -maps["a"][n].ravel()[patch])
        gone, back = [], []
        for point in range(points + 1):
            count = round(N * point / points)
            away, rest = picture, picture
            for patch in order[:count]:
                away = painted(away, divmod(patch, w), model.config.patch_pixels)
            for patch in order[count:]:
                rest = painted(rest, divmod(patch, w), model.config.patch_pixels)
            gone.append(away)
            back.append(rest)
        wanted = [target[n]] * (points + 1)
        assert found.deletion["a"][n] == pytest.approx(
            log_p(model, torch.stack(gone), wanted).exp(), abs=1e-5
        )
        assert found.insertion["a"][n] == pytest.approx(
            log_p(model, torch.stack(back), wanted).exp(), abs=1e-5
        )


def test_by_default_there_are_28_steps_or_as_many_as_patches():
    for name, steps in (("class token", 9), ("oblong", 28)):
        model = build(name)
        found = scoring.compute(model, pictures_for(model, 1), random_maps(model, 1, "a"))
        assert len(found.share) == steps + 1
        assert (found.share[0], found.share[-1]) == (0, 1)
        assert found.deletion["a"].shape == (1, steps + 1)


def test_the_true_map_has_the_best_areas_a_model_can_give():
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
    assert "(n = 3) right is to be believed most" in text
    assert "wrong in deletion, wrong in insertion" in text


def test_equal_patches_go_in_no_order_of_their_own():
    rank = scoring._ranks(np.zeros((50, 4, 4)))
    assert all(sorted(one.ravel()) == list(range(16)) for one in rank)
    assert abs(rank[:, :2].mean() - rank[:, 2:].mean()) < 1  # by rows it would be 8
    assert np.array_equal(scoring._ranks(np.array([[[0.1, 3.0], [2.0, -1.0]]])), [[[2, 0], [1, 3]]])


def test_the_target_and_the_baseline_are_those_that_were_asked_for():
    model = build()
    images = pictures_for(model)
    maps = random_maps(model, 2, "a")
    found = scoring.compute(model, images, maps, target=[1, 4], baseline=0.7)
    assert found.deletion["a"][:, 0] == pytest.approx(log_p(model, images, [1, 4]).exp(), abs=1e-5)
    assert found.insertion["a"][:, 0] == pytest.approx(log_p(model, images * 0 + 0.7, [1, 4]).exp(), abs=1e-5)


def curves(**areas):
    """Flat curves with these areas for each picture."""
    made = {name: np.repeat(np.array(area)[:, None], 3, axis=1) for name, area in areas.items()}
    return made


def made_up(deletion, insertion):
    return Scoring(np.array([0, 0.5, 1]), curves(**deletion), curves(**insertion))


def test_the_caption_says_when_the_two_disagree_and_when_it_may_be_chance():
    random = [0.5, 0.5, 0.5]
    found = made_up(
        dict(one=[0.1, 0.2, 0.3], two=[0.3, 0.4, 0.5], random=random),
        dict(one=[0.4, 0.5, 0.65], two=[0.8, 0.9, 0.7], random=random),
    )
    text = scoring.caption(found)
    assert "The two disagree" in text
    assert "by deletion 0.200 one is to be believed most, by insertion 0.800 two" in text
    error = np.std([0.1, 0.2, 0.3], ddof=1) / 3**0.5
    assert (
        f"one is better by 0.300 ± {error:.3f} in deletion and two by 0.300 ± {error:.3f} in insertion"
        in text
    )
    assert "Not better by more than the standard error: one in insertion." in text


def test_the_caption_of_one_picture_and_of_no_yardstick():
    one = made_up(dict(a=[0.1], random=[0.3]), dict(a=[0.9], random=[0.3]))
    assert "One picture has no standard error" in scoring.caption(one)
    assert "nan" not in scoring.caption(one)
    bare = made_up(dict(a=[0.1]), dict(a=[0.9]))
    assert "Without a random map" in scoring.caption(bare)
    only = made_up(dict(random=[0.1]), dict(random=[0.9]))
    assert "Only random maps were scored (n = 1)." in scoring.caption(only)
    assert_legible(scoring.draw(one))


def test_the_figure_is_legible_and_the_table_holds_the_areas():
    model = build("oblong")
    maps = random_maps(model, 3, *"abcdefg", "random", "a name that is long beyond all measure and reason")
    found = scoring.compute(model, pictures_for(model, 3), maps, points=5)
    figure = scoring.draw(found)
    assert_legible(figure)
    area = np.trapezoid(found.deletion["b"], found.share, axis=1)
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
        (dict(maps={}), "There must be maps to score. Got none."),
        (dict(maps={"a": np.zeros((2, 9))}), "each picture and patch, (2, 3, 3). Got a of shape (2, 9)."),
        (dict(maps={"a": np.full((2, 3, 3), np.nan)}), "Got a of shape (2, 3, 3) with NaN or infinity."),
        (dict(points=10), "points must be a number from 1 to 9, the patches. Got 10."),
        (dict(points=0), "Got 0."),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    model = build()
    fields = dict(maps=random_maps(model, 2, "a")) | change
    with pytest.raises(vt.InputError) as error:
        scoring.compute(model, pictures_for(model), **fields)
    assert words in str(error.value)
