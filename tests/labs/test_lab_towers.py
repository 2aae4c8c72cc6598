"""Lab `towers`: the loss, the pictures and texts it rests on, and that a verdict follows from the numbers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.errors import InputError
from vitrail.labs import scenes, towers
from vitrail.labs.contrast import Towers, build_tower, contrast
from vitrail.labs.given import opened
from vitrail.labs.lab import Verdict
from vitrail.labs.scenes import KINDS, NEW, Drawn, Kind, compose, digit_of, spell
from vitrail.labs.sounds import Recording, as_data
from vitrail.labs.trial import one_thread

# ---- the lab --------------------------------------------------------------------------------


def test_without_data_pictures_and_texts_find_each_other(tmp_path):
    with one_thread():
        found = towers.run(tmp_path, "small")
    assert found.n == 2
    assert found.number == np.mean([one["new"] for one in found.numbers["texts"]])
    assert found.numbers["chance"] == 1 / 80
    assert not found.numbers["sounds"]
    assert "No sound was tried" in found.sentence
    # So small a run is far from good, but it has learned more than chance about the easiest word.
    assert np.mean([one["parts"][2] for one in found.numbers["texts"]]) > 0.6
    assert len(found.figure.axes) == 5
    assert not list(tmp_path.iterdir())


def test_sounds_and_pictures_in_one_space():
    """Four tones, early, late or long, for ten digits: more is learned than chance."""
    early = np.repeat([1.0, 0.01], 2500)
    times = [early, early[::-1], np.ones(5000)]

    def speak(index):
        waves = [np.sin(np.arange(5000) * hertz * 2 * np.pi / 8000) for hertz in (200, 600, 1400, 3000)]
        return [Recording(d, "ann", index, waves[d % 4] * times[d // 4]) for d in range(10)]

    spoken = as_data("tones", speak(0) + speak(1), speak(2))
    with one_thread():
        found = towers.train(towers.Task(opened(None, 400, 100), spoken, "texts", 0, "small"))
    assert found.sound_of_picture > 0.2, "of 100 pictures; one in ten is chance"
    assert found.picture_of_sound in [n / 10 for n in range(11)], "of ten recordings"


def test_the_verdict_follows_from_the_numbers():
    good = {"seen": [0.9, 0.91, 0.92], "new": [0.88, 0.9, 0.91], "codes": [0.01, 0.02, 0.01]}
    assert towers.judge(good, []) == Verdict("holds")
    assert towers.judge(good, [0.9]) == Verdict("holds")
    assert "not sounds (20%)" in towers.judge(good, [0.2]).condition
    worse = {**good, "new": [0.5, 0.52, 0.51]}
    assert towers.judge(worse, []) == Verdict(
        "holds if", "the combination has been seen (91% found; 51% if not)"
    )
    assert towers.judge({**good, "new": good["codes"]}, []).word == "does not hold"
    assert towers.judge({**good, "seen": [0.3, 0.3, 0.3]}, []).word == "does not hold"


def normal(vectors):
    return F.normalize(vectors, dim=-1)


# ---- the loss -------------------------------------------------------------------------------


def test_with_one_partner_each_it_is_clips_loss():
    a, b, scale = normal(torch.randn(6, 8)), normal(torch.randn(6, 8)), torch.tensor(5.0)
    rows = torch.arange(6)
    logits = scale * a @ b.T
    plain = (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2
    assert torch.allclose(contrast(a, rows, b, rows, scale), plain, atol=1e-6)


def test_partners_of_the_same_kind_are_not_pushed_apart():
    """Two pictures of one text, and all where they should be: with one right answer each, they would move."""
    kinds, scale = torch.tensor([0, 0, 1, 2]), torch.tensor(100.0)
    a, b = torch.eye(3)[kinds].requires_grad_(), torch.eye(3)[kinds]
    b[1] = normal(torch.tensor([1.0, 0.1, 0.0]))  # the second's partner is a little off
    contrast(a, torch.arange(4), b, torch.arange(4), scale).backward()
    pushed, a.grad = a.grad[0, 1].item(), None
    contrast(a, kinds, b, kinds, scale).backward()
    assert pushed > 0.1, "descent takes the first away from the second's partner"
    assert a.grad[0, 1] < 0, "descent takes it there"
    # At its best the loss is the entropy of targets that two rows of four share.
    best = contrast(torch.eye(3)[kinds], kinds, torch.eye(3)[kinds], kinds, scale)
    assert best == pytest.approx(math.log(2) / 2, abs=1e-4)


def test_texts_read_once_and_rows_without_a_partner():
    a, b = normal(torch.randn(5, 8)), normal(torch.randn(3, 8))
    kinds, different, scale = torch.tensor([4, 4, 7, 9, 9]), torch.tensor([4, 7, 9]), torch.tensor(3.0)
    rows = torch.tensor([0, 0, 1, 2, 2])
    logits = scale * a @ b.T
    own = F.one_hot(rows, 3).float()
    back = -(own / own.sum(0) * logits.T.log_softmax(1).T).sum() / 3
    expected = (F.cross_entropy(logits, rows) + back) / 2
    assert torch.allclose(contrast(a, kinds, b, different, scale), expected, atol=1e-6)
    alone = contrast(a, kinds, b, torch.tensor([4, 7, 1]), scale)  # 9 has no partner here
    assert alone.isfinite()
    assert contrast(a, kinds, b, torch.tensor([1, 2, 3]), scale) == 0


def test_every_parameter_learns_and_the_temperature_stays_in_bounds():
    both = Towers(
        build_tower(8, width=16, depth=1, heads=2, size=8, patch=4, channels=1),
        build_tower(8, width=16, depth=1, heads=2, input="text", size=5, patch=1, vocabulary=27),
    )
    kinds = torch.arange(4)
    both.loss(torch.randn(4, 1, 8, 8), kinds, torch.randint(27, (4, 5)), kinds).backward()
    for name, parameter in both.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert both.scale.item() == pytest.approx(1 / 0.07)
    with torch.no_grad():
        both.log_scale.fill_(50.0)
    assert both.scale.item() == 100


# ---- pictures and texts ---------------------------------------------------------------------


def test_what_is_never_seen_and_that_its_parts_are():
    assert len(KINDS) == 80
    assert NEW.sum() == 20
    seen = [kind for kind in KINDS if not kind.new]
    never = {(kind.digit, kind.place) for kind in KINDS} - {(kind.digit, kind.place) for kind in seen}
    assert len(never) == 10, "pairs of digit and place"
    assert len({digit for digit, _ in never}) == 10, "one place for every digit"
    assert {kind.place for kind in seen} == {0, 1, 2, 3}
    assert len({(kind.digit, kind.size) for kind in seen}) == 20
    assert len({(kind.place, kind.size) for kind in seen}) == 8
    assert digit_of(torch.arange(80)).tolist() == [kind.digit for kind in KINDS]


def test_texts_say_what_is_shown():
    assert Kind(7, 0, 0).text == "a small seven on the left"
    assert Kind(2, 3, 1).text == "a large two at the bottom"
    assert len({kind.text for kind in KINDS}) == 80
    numbers = spell(["a zoo", "b"])
    assert numbers.tolist() == [[1, 0, 26, 15, 15], [2, 0, 0, 0, 0]]
    codes = scenes.codes()
    assert [len(code) for code in codes] == [len(kind.text) for kind in KINDS]
    assert len(set(codes)) == 80
    assert codes == scenes.codes()


@pytest.mark.parametrize("side", [8, 28])
def test_a_digit_lies_where_the_text_says(side):
    pictures = torch.ones(80, 1, side, side)
    chance = torch.Generator().manual_seed(0)
    small = 8 if side == 8 else 14
    made = compose(pictures, torch.arange(80), small, chance)
    assert made.shape == (80, 1, 3 * small, 3 * small)
    middle = (3 * small - 1) / 2
    for kind, picture in zip(KINDS, made[:, 0] > 0, strict=True):
        rows, columns = picture.nonzero().T
        assert picture.sum() == ((1 + kind.size) * small) ** 2, "the whole digit is on the ground"
        down, across = rows.double().mean() - middle, columns.double().mean() - middle
        across_word, down_word = [(-1, 0), (1, 0), (0, -1), (0, 1)][kind.place]
        main = across * across_word + down * down_word
        other = across * (1 - abs(across_word)) + down * (1 - abs(down_word))
        assert main >= small / 2 - 1 > 1 >= abs(other)


def test_pictures_are_drawn_of_the_digit_asked_for():
    data = opened(None, 300, 100)
    drawn = Drawn(data.train)
    digits = torch.arange(10).repeat(5)
    pictures = drawn.draw(digits, torch.Generator().manual_seed(0))
    alike = (pictures[:, None] == drawn.images[None]).flatten(2).all(dim=2)
    assert (drawn.labels[alike.int().argmax(dim=1)] == digits).all()
    assert pictures.min() == -1
    assert pictures.max() == 1


def test_other_data_is_refused(tmp_path):
    colour = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=colour, y_train=np.arange(12) % 2)
    with pytest.raises(InputError, match=r"the ten digits as grey pictures.* Got 2 classes with 3 channel"):
        towers.run(tmp_path, "small", tmp_path / "own.npz")
    grey = np.zeros((40, 8, 8), dtype=np.uint8)
    labels = np.where(np.arange(40) % 10 == 4, 9, np.arange(40) % 10)
    np.savez(tmp_path / "nine.npz", x_train=grey, y_train=labels)
    with pytest.raises(InputError, match=r"Every digit must be there.* Got none of 4 in one of the two"):
        towers.run(tmp_path, "small", tmp_path / "nine.npz")
