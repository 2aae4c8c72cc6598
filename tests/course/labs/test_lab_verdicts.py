"""The verdict of each lab for every outcome: which of its statements are true, in order."""

import numpy as np
import pytest

from vitrail_course.labs import (
    activation,
    association,
    attention_distance,
    blocks,
    characters,
    convolution,
    filters,
    heads,
    norms,
    patching,
    permutation,
    pool,
    positions,
    practice,
    recurrent,
    resolution,
    scale,
    subwords,
    tokens,
    translation,
    walk,
)

LOW, MIDDLE, HIGH = [0.5, 0.51, 0.52], [0.6, 0.612, 0.62], [0.7, 0.71, 0.722]
NOISY = [0.3, 0.9, 0.8]


def truth(lab, numbers):
    return [statement.true for statement in lab.decide_verdict(numbers).statements]


def conditions(lab, numbers):
    return [statement.condition for statement in lab.decide_verdict(numbers).statements]


def after_sweep(scores):
    """The first seed chose the learning rate, and is not counted."""
    return {"scores": [0.1, *scores]}


# ---- identities -----------------------------------------------------------------------------


def test_patching():
    numbers = {"float64": 1e-16, "float32": 1e-7, "channels last": 0.9}
    assert truth(patching, numbers) == [True, True]
    assert truth(patching, {**numbers, "float64": 1e-3}) == [False, True]
    assert truth(patching, {**numbers, "float32": 1e-3}) == [True, False]


def test_walk():
    numbers = {"same shapes": True, "corrected": [0.0, 1e-15], "as printed": [0.0, 0.5]}
    assert walk.decide_verdict(numbers).words == {"identity": "partly holds"}
    assert conditions(walk, {**numbers, "as printed": [0.0, 1e-15]}) == [""]
    assert truth(walk, {**numbers, "corrected": [0.0, 0.1]}) == [False]
    assert truth(walk, {**numbers, "same shapes": False}) == [False]


def test_scale():
    def of(head, width, none):
        return truth(
            scale,
            {
                "d": [4, 64],
                "variance of the scores": {"head": head, "width": width},
                "entropy": {"none": none},
            },
        )

    assert of([1.0, 1.0], [1 / 12, 1 / 12], [0.7, 0.1]) == [True, False, True], "as erratum 000.4 says"
    assert of([1.0, 2.0], [1.0, 1.0], [0.7, 0.6]) == [False, True, False]


def test_permutation():
    def of(none, other):
        values = {"none": none, "relative": other}
        return truth(permutation, {k: {"tokens": v, "class token": v} for k, v in values.items()})

    assert of(1e-15, 0.1) == [True, True]
    assert of(0.1, 0.1) == [False, True]
    assert of(1e-15, 0.0) == [True, False]


def test_association():
    good = dict.fromkeys(
        ["one match", "the same with U^T", "the same with a sink", "one match, U not orthogonal"], 1e-6
    ) | {"three matches": 0.0, "none or one match": 0.0, "convolution, none or one": 0.7}
    good["convolution, one match"] = 0.0
    double = {
        "accuracy": {"attention": 1.0, "random directions": 1.0, "convolution": 0.7},
        "error as a count": 0.0,
    }

    def numbers(count_error=0.0, accuracy=None, **changed):
        return {
            "error": good | {name.replace("_", " "): value for name, value in changed.items()},
            "double if": double
            | {"error as a count": count_error, "accuracy": double["accuracy"] | (accuracy or {})},
        }

    assert truth(association, numbers()) == [True] * 5
    assert conditions(association, numbers(three_matches=0.7))[0] == "at most one patch matches"
    assert truth(association, numbers(one_match=0.5))[0] is False
    assert truth(association, numbers(0.6, {"attention": 0.8, "convolution": 1.0}))[2:] == [False] * 3
    assert "orthogonal" in conditions(association, numbers(accuracy={"random directions": 0.7}))[3]
    missing = numbers()
    missing["error"]["convolution, none or one"] = 0.01
    assert truth(association, missing)[1] is False


def test_activation():
    def of(gelu=HIGH, relu=LOW, properties=None, **changed):
        numbers = {
            "differences": {"x Phi(x)": 0.0, "Phi(x)": 7.0, "tanh": 5e-4} | changed,
            "properties": properties or {"gelu is smooth": True},
            "accuracy": {"GELU": after_sweep(gelu), "ReLU": after_sweep(relu)},
            "held out": 360,
        }
        return truth(activation, numbers)

    assert of() == [False, True, True, True]
    assert of(**{"Phi(x)": 0.0, "tanh": 0.1}) == [True, False, True, True]
    assert of(LOW, HIGH, {"gelu is smooth": False}) == [False, True, False, False]
    assert of(gelu=NOISY)[-1] is None


# ---- replications ---------------------------------------------------------------------------


def test_practice():
    def of(start, listed, solution, images=60_000):
        scores = {"start": start, "weight decay": listed, "more training": solution}
        return {"scores": scores, "images": images, "held out": 10_000}

    weak, near, good = [0.93, 0.931, 0.932], [0.979, 0.98, 0.9794], [0.985, 0.9855, 0.986]
    assert truth(practice, of(weak, good, good)) == [True] * 4
    assert truth(practice, of(weak, near, good)) == [True, None, True, True]
    assert truth(practice, of(weak, [0.96, 0.961, 0.962], good))[1] is False
    assert truth(practice, of(good, weak, weak)) == [False] * 4
    assert set(practice.decide_verdict(of(weak, good, good)).words) == {"replication"}
    assert set(practice.decide_verdict(of(weak, good, good, 1_437)).words) == {"toy experiment"}, "not MNIST"


def test_positions():
    def of(
        learned=HIGH, early=(0.0, 0.01, -0.01), late=(0.3, 0.32, 0.31), r=(-0.3, -0.28, -0.29), images=60_000
    ):
        return {
            "arms": {"none": after_sweep(MIDDLE), "learned": after_sweep(learned)},
            "correlation of similarity and distance": {"1": [0.1, 0.1, 0.1], "50": list(r)},
            "adjacent minus other pairs": {"1": list(early), "50": list(late)},
            "held out": 10_000,
            "images": images,
        }

    assert truth(positions, of()) == [True] * 4
    assert (
        truth(positions, of(LOW, (0.5, 0.51, 0.52), (-0.1, -0.11, -0.12), (0.1, 0.12, 0.11))) == [False] * 4
    )
    assert truth(positions, of(late=(-0.9, 0.2, 0.1)))[1] is None
    assert len(truth(positions, of(early=(), late=()))) == 2, "too few patches to compare"
    assert set(positions.decide_verdict(of()).words) == {"replication"}
    assert set(positions.decide_verdict(of(images=10_000)).words) == {"toy experiment"}


def test_characters():
    def of(slide=True, weights=True, leak=0.0, losses=(2.0, 2.01, 2.02), bigram=2.4):
        numbers = {"slide's batch reproduced": slide, "printed attention weights": weights}
        numbers |= {"change of earlier logits": leak, "decoder": list(losses), "bigram": bigram}
        return truth(characters, numbers)

    assert of() == [True] * 4
    assert of(slide=None) == [None, True, True, True]
    assert of(False, False, 1e-9, (2.5, 2.51, 2.52)) == [False] * 4
    assert of(losses=(2.5, 2.6, 2.7), bigram=2.65)[3] is None, "the mean is below, but not clearly"


# ---- toy experiments ------------------------------------------------------------------------


def test_pool():
    def of(mean, at_class_lr):
        arms = {pool.MEAN: after_sweep(mean), pool.CLASS: after_sweep([0.9, 0.91, 0.92])}
        numbers = {"arms": arms, "held out": 10_000}
        return truth(pool, numbers | {"mean pooling at the class token's lr": [0.1, *at_class_lr]})

    same, worse = [0.901, 0.911, 0.921], [0.8, 0.811, 0.82]
    assert of(same, worse) == [True, True]
    assert of(same, same) == [True, None]
    assert of(worse, [0.82, 0.831, 0.84]) == [False, False]
    assert of([0.8, 0.99, 0.9], [0.8, 0.99, 0.9]) == [None, None]


def test_norms():
    plain, learned = {"mean": 0.0, "variance": 1.0}, {"mean": 0.3, "variance": 2.0}
    gone, there = [(1e-9, 1.0), (2e-9, 1.0), (1.5e-9, 1.0)], [(0.5, 1.0), (0.4, 1.0), (0.45, 1.0)]

    def of(no_residual=LOW, no_norm=LOW, gradients=gone, before=plain, after=plain):
        arms = {"pre-norm": HIGH, "no residual": no_residual, "no norm": no_norm}
        return {
            "accuracy": {name: after_sweep(scores) for name, scores in arms.items()},
            "gradient by seed, first and last block": {"no residual": gradients, "neither": gone},
            "mean and variance": {"before gain and bias": before, "after": after},
            "held out": 360,
        }

    assert truth(norms, of()) == [True] * 5
    assert truth(norms, of(gradients=there, no_norm=NOISY)) == [True, False, True, True, None]
    assert conditions(norms, of(after=learned))[3] == "meant before the learned gain and bias"
    better = [0.95, 0.96, 0.97]
    assert truth(norms, of(better, better, there, learned, learned)) == [False, False, True, False, False]


def test_blocks():
    def of(*by_depth):
        accuracy = {
            blocks.shape_name(depth): after_sweep(scores)
            for depth, scores in zip((1, 2, 4), by_depth, strict=True)
        }
        return {"accuracy": accuracy, "depths": [1, 2, 4], "images": 1437, "held out": 360, "epochs": 16}

    assert truth(blocks, of(LOW, MIDDLE, HIGH)) == [True, True]
    assert truth(blocks, of(HIGH, MIDDLE, LOW)) == [False, False]
    assert truth(blocks, of(MIDDLE, [0.5, 0.7, 0.6], [0.5, 0.6, 0.72])) == [None, None]
    [first, _] = blocks.decide_verdict(of(LOW, MIDDLE, HIGH)).statements
    assert first.evidence.startswith("+10.0 ["), "points for each doubling"


SHIFTED = {name: {"1 pixel": 0.0} for name in ("CNN without pooling", "CNN")}
SHIFTED["ViT"] = {"1 pixel": 0.9}
INFLUENCED = {"CNN without pooling": 7, "CNN": 12, "ViT": 16}


def translation_numbers(
    shifted=SHIFTED,
    influenced=INFLUENCED,
    few=(0.3, 0.6),
    everything=(0.9, 0.905),
    hybrid=((0.4, 0.45), (0.6, 0.8), (0.9, 0.902)),
):
    """ViT and CNN with few and all images; ViT and hybrid after 40, 130 and 400 steps."""

    def arms(**means):
        return {
            name: {
                "mean": mean,
                **after_sweep([mean - 0.001, mean, mean + (0.0005 if name == "ViT" else 0.001)]),
            }
            for name, mean in means.items()
        }

    return {
        "change when shifted": shifted,
        "pixels influenced by one pixel": influenced,
        "accuracy by fraction": {
            "0.01": arms(ViT=few[0], CNN=few[1]),
            "1.0": arms(ViT=everything[0], CNN=everything[1]),
        },
        "accuracy by steps": {
            steps: arms(ViT=one[0], hybrid=one[1]) for steps, one in zip((40, 130, 400), hybrid, strict=True)
        },
        "held out": 10_000,
    }


def test_translation():
    verdict = translation.decide_verdict(translation_numbers())
    assert all(statement.true for statement in verdict.statements)
    assert verdict.words == {"identity": "holds", "toy experiment": "seen"}
    texts = [statement.text for statement in verdict.statements]
    assert "a hybrid beats a ViT after 130 steps" in texts, "after 40 steps neither reaches 50 %"
    never = translation_numbers(hybrid=((0.1, 0.1), (0.2, 0.3), (0.3, 0.4)))
    assert len(truth(translation, never)) == 4
    pooled = translation_numbers({**SHIFTED, "CNN": {"1 pixel": 0.8}}, {**INFLUENCED, "CNN": 16})
    assert all("no pooling" in condition for condition in conditions(translation, pooled)[:2])
    wrong = translation_numbers(
        {**SHIFTED, "CNN without pooling": {"1 pixel": 0.9}},
        dict.fromkeys(INFLUENCED, 16),
        (0.6, 0.3),
        (0.5, 0.45),
        ((0.8, 0.45), (0.8, 0.45), (0.8, 0.48)),
    )
    assert truth(translation, wrong) == [False] * 6


def test_convolution():
    def of(content=0.01, **changed):
        values = dict.fromkeys(convolution.ARMS, 0.95) | changed
        near = {arm: [mean, mean + 0.002, mean - 0.001] for arm, mean in values.items()}
        shrunk = [content, content + 0.001, content + 0.002]
        steps = dict.fromkeys(convolution.ARMS, 300)
        return truth(convolution, {"on neighbors": near, "Q K^T after over before": shrunk, "steps": steps})

    assert of() == [True] * 5
    assert of(0.5, **{convolution.PLAIN: 0.28, convolution.LONG: 0.9}) == [True, True, False, None, False]


def test_resolution():
    def of(before, after):
        def arms(scores):
            return {resolution.INTERPOLATED: [0.1, *HIGH], resolution.RANDOM: [0.1, *scores]}

        numbers = {"held out": 360, "before fine-tuning": arms(before), "after fine-tuning": arms(after)}
        return truth(resolution, numbers)

    assert of(LOW, LOW)[1] is True
    assert of(LOW, NOISY)[1] is None
    better = [0.95, 0.96, 0.97]
    assert of(better, better)[1] is False


def test_attention_distance():
    def heads_of(nearest, farthest, slope, n):
        near, far = nearest + n / 1000, farthest - n / 1000
        return [[near + slope * layer, far + slope * layer] for layer in range(3)]

    def of(nearest, farthest, slope, untrained=(0.97, 0.98, 0.0)):
        numbers = {
            "distance": [heads_of(nearest, farthest, slope * (1 + n / 50), n) for n in range(3)],
            "without training": [heads_of(*untrained, n) for n in range(3)],
        }
        return truth(attention_distance, numbers)

    assert of(0.2, 0.95, 0.05) == [True] * 4
    assert of(0.8, 0.85, -0.05) == [False, False, False, True]
    assert of(0.97, 0.98, 0.05)[3] is None, "no further apart than without training"


def test_the_lowest_third_of_the_layers_counts():
    """A local head in layer 1 of 6 is one of the lowest layers, a local head in layer 2 is not."""
    for layer, local in ((1, True), (2, False)):
        values = np.full((3, 6, 2), 0.8) + np.arange(3)[:, None, None] / 1000
        values[:, layer, 0] = 0.2
        numbers = {"distance": values.tolist(), "without training": values.tolist()}
        assert truth(attention_distance, numbers)[1] is local


def test_heads():
    def of(trained, untrained, without, swapped=None):
        def measured(values):
            return [{"disagree": d, "distance": t} for d, t in values]

        numbers = {"trained": measured(trained), "untrained": measured(untrained)}
        numbers |= {"accuracy": [0.9, 0.91], "accuracy without a head": without}
        return truth(heads, numbers | {heads.SWAPPED: swapped or without})

    apart, alike = [(0.8, 0.5), (0.81, 0.51)], [(0.2, 0.1), (0.21, 0.111)]
    assert of(apart, alike, [0.7, 0.712]) == [True] * 4
    assert of(alike, apart, [0.95, 0.961]) == [False] * 4
    assert of(apart, alike, [0.7, 0.712], swapped=[0.9, 0.9101]) == [True, True, True, None]


def test_filters():
    def of(smoothness, needed):
        random = {"random smoothness": [0.0, 0.05, 0.1, -0.05], "random needed": [100, 101, 102, 99]}
        numbers = {"pixels": 768, "filters": 192, "smoothness": smoothness, "needed": needed}
        return filters.decide_verdict(random | numbers).statements

    assert [one.true for one in of(0.6, 20)] == [True, True]
    assert [one.true for one in of(-0.6, 200)] == [False, False]
    assert [one.true for one in of(0.05, 100)] == [None, None], "as random filters may be"
    assert of(0.6, 20)[1].evidence == "20 of 191", "192 filters have 191 components"


def test_subwords():
    numbers = {"words": 1_000, "words of one token": 700, "tokens of an emoji": 4}
    numbers |= {"characters per token": 2.5, "reproduced": True}
    assert truth(subwords, numbers) == [True] * 5
    assert truth(subwords, {**numbers, "words of one token": 100})[0] is False
    assert truth(subwords, {**numbers, "words of one token": 505})[0] is None
    assert truth(subwords, {**numbers, "reproduced": False})[-1] is False


def test_recurrent():
    def of(transformer, lstm):
        seconds = {"cuda": {"Transformer": transformer, "LSTM": lstm}}
        return truth(recurrent, {"device": "cuda", "seconds per step": seconds})

    flat = {"64": [1.0, 1.01, 1.02], "1024": [1.1, 1.12, 1.13]}
    steep = {"64": [1.2, 1.22, 1.21], "1024": [16.0, 16.3, 16.1]}
    assert of(flat, steep) == [True] * 4
    assert of(steep, flat) == [False] * 4
    between = {"64": [1.0, 1.0, 1.0], "1024": [2.0, 4.0, 8.0]}  # the power 0.25 to 0.75
    assert of(between, steep)[2] is None


@pytest.mark.parametrize(("scores", "true"), [([0.8, 0.81], True), ([0.2, 0.21], False), ([0.3, 0.7], None)])
def test_tokens(scores, true):
    assert truth(tokens, {"tokens": {"pixels": after_sweep(scores)}, "held out": 360}) == [true]
