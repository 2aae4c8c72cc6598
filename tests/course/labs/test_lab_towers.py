"""Lab `towers`: the contrastive loss, scenes and captions, and the verdict for every outcome."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.base.errors import InputError
from vitrail.experiment.trial import one_thread
from vitrail_course.labs import scenes, towers
from vitrail_course.labs.contrastive import Towers, build_tower, contrastive_loss
from vitrail_course.labs.datasets import load_dataset
from vitrail_course.labs.scenes import (
    SCENES,
    UNSEEN,
    DigitSampler,
    Scene,
    compose_scenes,
    encode_captions,
    scene_digits,
)
from vitrail_course.labs.spoken_digits import Recording, build_dataset

# ---- lab ------------------------------------------------------------------------------------


def test_small_run_without_data(tmp_path):
    with one_thread():
        result = towers.run(tmp_path, "small")
    assert result.n == 2
    assert result.number == np.mean([one["unseen"] for one in result.numbers["captions"]])
    assert result.numbers["chance"] == 1 / 80
    assert not result.numbers["sounds"]
    assert "Sounds were not tested" in result.sentence
    # So small a run is inaccurate, but better than chance for the easiest word, the size.
    assert np.mean([one["parts"][2] for one in result.numbers["captions"]]) > 0.6
    assert len(result.figure.axes) == 5
    assert not list(tmp_path.iterdir())


def test_training_on_sounds():
    """Four tones, early, late or long, for ten digits, in one space with images and captions."""
    early = np.repeat([1.0, 0.01], 2500)
    envelopes = [early, early[::-1], np.ones(5000)]

    def record(index):
        waves = [np.sin(np.arange(5000) * hertz * 2 * np.pi / 8000) for hertz in (200, 600, 1400, 3000)]
        return [Recording(d, "ann", index, waves[d % 4] * envelopes[d // 4]) for d in range(10)]

    recordings = build_dataset("tones", record(0) + record(1), record(2))
    with one_thread():
        result = towers.train_towers(
            towers.TowerTask(load_dataset(None, 400, 100), recordings, "captions", 0, "small")
        )
    assert result.image_by_sound in [n / 10 for n in range(11)], "of ten recordings"
    assert result.caption_by_sound in [n / 10 for n in range(11)]
    assert 0 <= result.sound_by_image <= 1
    assert result.seen > 0, "captions are trained in the same space"


def test_verdict_for_every_outcome():
    def verdict(seen=0.9, unseen=0.9, letters=0.01, sound=None, text=None):
        def results(**means):
            return [{name: mean + step for name, mean in means.items()} for step in (0.0, 0.004, -0.003)]

        sounds = [] if sound is None else results(image_by_sound=sound, caption_by_sound=text)
        counts = {"seen": 1_500, "unseen": 500, "recordings": 300}
        captions, random = results(seen=seen, unseen=unseen), results(unseen=letters)
        return towers.decide_verdict(
            {"captions": captions, "random letters": random, "sounds": sounds, "held out": counts}
        )

    assert verdict().word == "holds"
    assert verdict(sound=0.9, text=0.8).word == "holds"
    poor = verdict(sound=0.9, text=0.2).condition
    assert (
        "Not true: sounds retrieve captions that name it, with which they were never trained (20.0 [" in poor
    )
    by_heart = verdict(unseen=0.01, letters=0.05)
    assert by_heart.word == "partly"
    assert "Not true: images of unseen combinations retrieve theirs (1.0 [" in by_heart.condition
    half = verdict(unseen=0.5)
    assert half.word == "partly", "better than random letters is not enough"
    assert "Not clear: images of unseen combinations retrieve theirs (50.0 [" in half.condition
    assert verdict(seen=0.3, unseen=0.01, letters=0.05).word == "does not hold"


def unit(vectors):
    return F.normalize(vectors, dim=-1)


# ---- loss -----------------------------------------------------------------------------------


def test_with_one_positive_per_row_it_is_the_loss_of_clip():
    a, b, scale = unit(torch.randn(6, 8)), unit(torch.randn(6, 8)), torch.tensor(5.0)
    rows = torch.arange(6)
    logits = scale * a @ b.T
    plain = (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2
    assert torch.allclose(contrastive_loss(a, rows, b, rows, scale), plain, atol=1e-6)


def test_inputs_of_the_same_class_are_not_pushed_apart():
    """With one positive per row, two images of the same caption would be pushed apart."""
    classes, scale = torch.tensor([0, 0, 1, 2]), torch.tensor(100.0)
    a, b = torch.eye(3)[classes].requires_grad_(), torch.eye(3)[classes]
    b[1] = unit(torch.tensor([1.0, 0.1, 0.0]))  # the second's positive is a little off
    contrastive_loss(a, torch.arange(4), b, torch.arange(4), scale).backward()
    pushed, a.grad = a.grad[0, 1].item(), None
    contrastive_loss(a, classes, b, classes, scale).backward()
    assert pushed > 0.1, "gradient descent moves the first away from the second's positive"
    assert a.grad[0, 1] < 0, "gradient descent moves it there"
    # The minimum of the loss is the entropy of the targets, which two rows of four divide.
    best = contrastive_loss(torch.eye(3)[classes], classes, torch.eye(3)[classes], classes, scale)
    assert best == pytest.approx(math.log(2) / 2, abs=1e-4)


def test_unique_captions_and_rows_without_positives():
    a, b = unit(torch.randn(5, 8)), unit(torch.randn(3, 8))
    classes, unique_classes, scale = torch.tensor([4, 4, 7, 9, 9]), torch.tensor([4, 7, 9]), torch.tensor(3.0)
    rows = torch.tensor([0, 0, 1, 2, 2])
    logits = scale * a @ b.T
    positives = F.one_hot(rows, 3).float()
    back = -(positives / positives.sum(0) * logits.T.log_softmax(1).T).sum() / 3
    expected = (F.cross_entropy(logits, rows) + back) / 2
    assert torch.allclose(contrastive_loss(a, classes, b, unique_classes, scale), expected, atol=1e-6)
    alone = contrastive_loss(a, classes, b, torch.tensor([4, 7, 1]), scale)  # 9 has no positive here
    assert alone.isfinite()
    assert contrastive_loss(a, classes, b, torch.tensor([1, 2, 3]), scale) == 0


def test_all_parameters_have_gradients_and_the_temperature_is_bounded():
    towers_model = Towers(
        image=build_tower(8, width=16, depth=1, heads=2, size=8, patch=4, channels=1),
        text=build_tower(8, width=16, depth=1, heads=2, input="text", size=5, patch=1, vocabulary=27),
    )
    classes = torch.arange(4)
    images = towers_model.embed("image", torch.randn(4, 1, 8, 8))
    texts = towers_model.embed("text", torch.randint(27, (4, 5)))
    assert images.norm(dim=-1).tolist() == pytest.approx([1] * 4)
    towers_model.loss(images, classes, texts, classes).backward()
    for name, parameter in towers_model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert towers_model.scale.item() == pytest.approx(1 / 0.07)
    with torch.no_grad():
        towers_model.log_scale.fill_(50.0)
    assert towers_model.scale.item() == 100


# ---- scenes and captions --------------------------------------------------------------------


def test_parts_of_unseen_scenes_are_seen():
    assert len(SCENES) == 80
    assert UNSEEN.sum() == 20
    seen = [scene for scene in SCENES if not scene.is_unseen]
    never = {(scene.digit, scene.position) for scene in SCENES} - {
        (scene.digit, scene.position) for scene in seen
    }
    assert len(never) == 10, "pairs of digit and position"
    assert len({digit for digit, _ in never}) == 10, "one position for every digit"
    assert {scene.position for scene in seen} == {0, 1, 2, 3}
    assert len({(scene.digit, scene.size) for scene in seen}) == 20
    assert len({(scene.position, scene.size) for scene in seen}) == 8
    assert scene_digits(torch.arange(80)).tolist() == [scene.digit for scene in SCENES]


def test_captions_describe_the_scenes():
    assert Scene(7, 0, 0).caption == "a small seven on the left"
    assert Scene(2, 3, 1).caption == "a large two at the bottom"
    assert len({scene.caption for scene in SCENES}) == 80
    numbers = encode_captions(["a zoo", "b"])
    assert numbers.tolist() == [[1, 0, 26, 15, 15], [2, 0, 0, 0, 0]]
    captions = scenes.random_captions()
    assert [len(code) for code in captions] == [len(scene.caption) for scene in SCENES]
    assert len(set(captions)) == 80
    assert captions == scenes.random_captions()


@pytest.mark.parametrize("side", [8, 28])
def test_digit_is_at_the_position_of_the_caption(side):
    images = torch.ones(80, 1, side, side)
    rng = torch.Generator().manual_seed(0)
    small = 8 if side == 8 else 14
    images_ = compose_scenes(images, torch.arange(80), small, rng)
    assert images_.shape == (80, 1, 3 * small, 3 * small)
    middle = (3 * small - 1) / 2
    for scene, image in zip(SCENES, images_[:, 0] > 0, strict=True):
        rows, columns = image.nonzero().T
        assert image.sum() == ((1 + scene.size) * small) ** 2, "the complete digit is inside"
        down, across = rows.double().mean() - middle, columns.double().mean() - middle
        across_word, down_word = [(-1, 0), (1, 0), (0, -1), (0, 1)][scene.position]
        along = across * across_word + down * down_word
        across_ = across * (1 - abs(across_word)) + down * (1 - abs(down_word))
        assert along >= small / 2 - 1 > 1 >= abs(across_)


def test_samples_show_the_requested_digits():
    data = load_dataset(None, 300, 100)
    sampler = DigitSampler(data.train)
    digits = torch.arange(10).repeat(5)
    images = sampler.sample(digits, torch.Generator().manual_seed(0))
    equal = (images[:, None] == sampler.images[None]).flatten(2).all(dim=2)
    assert (sampler.labels[equal.int().argmax(dim=1)] == digits).all()
    assert images.min() == -1
    assert images.max() == 1


def test_other_data_is_rejected(tmp_path):
    color = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=color, y_train=np.arange(12) % 2)
    with pytest.raises(InputError, match=r"the ten digits as gray images.* not 2 classes with 3 channel"):
        towers.run(tmp_path, "small", tmp_path / "own.npz")
    gray = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    labels = np.where(np.arange(40) % 10 == 4, 9, np.arange(40) % 10)
    np.savez(tmp_path / "nine.npz", x_train=gray, y_train=labels)
    with pytest.raises(InputError, match=r"Every digit must occur.* has no 4"):
        towers.run(tmp_path, "small", tmp_path / "nine.npz")
