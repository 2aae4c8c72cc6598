"""What the page is told of a model is what the figures of vitrail.views and vt.record say."""

import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import InputError
from vitrail.serve import insight
from vitrail.serve.examples import MAX_EXAMPLES, built_in, from_folder
from vitrail.views import filters, lens, positions, rollout
from vitrail.views.sample import sample_images, sample_model
from vitrail.weights.bundle.bundle import Bundle, Card

SMALL = dict(width=12, depth=3, heads=3, patch=4, size=12, channels=1, classes=5)
CONFIGS = {
    "class token": dict(),
    "oblong": dict(patch=(4, 6), size=(8, 18), channels=3),
    "registers": dict(registers=2, position="learned2d"),
    "distilled": dict(distillation_token=True, head="distilled"),
    "attention pool": dict(class_token=False, pool="attention"),
    "pool and class": dict(pool="attention", registers=1),
    "mean": dict(class_token=False, pool="mean", position="rotary", pool_norm="after"),
    "no residual": dict(block="no-residual"),
    "bias": dict(position="relative", pool="class-mean"),
    "cut off": dict(size=(14, 11), remainder="cut"),
}


def predictor_of(**options):
    config = vt.ViTConfig(**{**SMALL, **options})
    return vt.Predictor(Bundle(model=add_noise(vt.ViT(config)), card=Card(name="small")))


def some_levels(predictor, seed=0):
    config = predictor.config
    shape = (*config.pixels, config.channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def unpacked(found):
    data = np.frombuffer(base64.b64decode(found["data"]), np.dtype(found["dtype"]).newbyteorder("<"))
    return data.reshape(found["shape"])


@pytest.mark.parametrize("name", CONFIGS)
def test_explanation_equals_the_figures(name):
    predictor = predictor_of(**CONFIGS[name])
    levels, model, config = some_levels(predictor), predictor.bundle.model, predictor.config
    images = predictor.preprocess.normalize(levels)[None]
    L, k, T = config.depth, config.heads, config.tokens
    with torch.no_grad(), vt.record(model, "blocks.*.attention.weights") as tape:
        model(images)
    for layer in range(L):
        found = insight.explain(predictor, levels, layer)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        row = tape[f"blocks.{layer}.attention.weights"][0].numpy()  # (k, T, T)
        shown = unpacked(found["attention"]) / 255 * np.array(found["attention"]["row_max"])[..., None]
        assert shown.shape == (k, T, T)
        assert (np.abs(shown - row) <= row.max(axis=-1, keepdims=True) / 255).all()
        assert found["attention"]["note"] is None
        assert (found["layer"], found["layers"], found["heads"]) == (layer, L, k)
    shares = unpacked(found["rollout"])
    assert shares.shape == (L, *config.grid)
    np.testing.assert_allclose(shares[-1], rollout.compute(model, images).maps[0, 0], atol=1e-6)
    seen = lens.compute(model, images)
    assert [one["label"] for one in found["lens"]] == [str(best) for best in seen.top[:, 0]]
    np.testing.assert_allclose([one["score"] for one in found["lens"]], seen.top_probability[:, 0], atol=1e-6)
    assert (found["grid"], found["patch"]) == (list(config.grid), list(config.patch_pixels))
    assert len(found["prefix"]) + config.patches == T


@pytest.mark.parametrize("name", ["class token", "attention pool", "registers", "mean"])
def test_rollout_after_a_layer_equals_a_truncated_model(name):
    predictor = predictor_of(**CONFIGS[name])
    levels, model = some_levels(predictor), predictor.bundle.model
    found = unpacked(insight.explain(predictor, levels)["rollout"])
    for depth in (1, 2):
        shorter = vt.ViT(vt.ViTConfig(**{**SMALL, **CONFIGS[name], "depth": depth})).eval()
        state = model.state_dict()
        shorter.load_state_dict({name: state[name] for name in shorter.state_dict()})
        wanted = rollout.compute(shorter, predictor.preprocess.normalize(levels)[None])
        np.testing.assert_allclose(found[depth - 1], wanted.maps[0, 0], atol=1e-6)


def test_prediction_equals_the_predictor(tmp_path):
    bundle = sample_model()
    metrics = {"temperature": 2.0, "threshold": 0.95}
    predictor = vt.Predictor(
        Bundle(model=bundle.model, preprocess=bundle.preprocess, card=Card(metrics=metrics))
    )
    for pixels in sample_images(6).pixels:
        wanted = predictor(pixels)
        found = insight.explain(predictor, pixels, top=3)
        answer = found["prediction"]
        assert (answer["label"], answer["unsure"], answer["error"]) == (wanted.label, wanted.unsure, None)
        assert answer["score"] == pytest.approx(wanted.score, abs=1e-6)
        assert [one["label"] for one in answer["top"]] == [label for label, _ in wanted.top(3)]
        assert found["lens"][-1]["label"] == wanted.top(1)[0][0]  # also where it does not know
        assert found["lens"][-1]["score"] == pytest.approx(wanted.score, abs=1e-5)


def test_returned_image_is_the_model_input():
    for channels in (1, 3, 4):
        predictor = predictor_of(channels=channels, size=(8, 16))
        levels = some_levels(predictor)
        found = insight.explain(predictor, levels)["image"]
        opened = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["png"]))))
        assert (found["width"], found["height"]) == (16, 8)
        assert np.array_equal(opened.reshape(levels.shape), levels)
    predictor = predictor_of(channels=2)  # no image file has two, an array may
    assert insight.explain(predictor, some_levels(predictor))["image"]["width"] == 12


def test_unknown_layer():
    predictor = predictor_of()
    with pytest.raises(InputError, match="layer must be an integer from 0 to 2"):
        insight.explain(predictor, some_levels(predictor), 3)
    assert insight.explain(predictor, some_levels(predictor))["layer"] == 2


def test_no_hooks_remain():
    predictor = predictor_of(pool="attention")
    insight.explain(predictor, some_levels(predictor))
    model = predictor.bundle.model
    assert not any(module._forward_hooks for module in model.modules())
    assert [block.attention.explicit for block in model.blocks] == [0, 0, 0]
    assert model.pool.attention.explicit == 0


# ---- what a model does not have ------------------------------------------------------------------------


def test_no_lens_without_classes():
    predictor = predictor_of(classes=0)
    found = insight.explain(predictor, some_levels(predictor))
    assert "no head" in found["lens"]["reason"]
    assert found["prediction"] == {
        "name": None, "label": None, "score": None, "unsure": False, "ood": None,
        "ood_score": None, "labels": [], "top": [], "error": None
    }  # fmt: skip


def test_broken_model_is_an_error():
    predictor = predictor_of()
    with torch.no_grad():
        predictor.bundle.model.blocks[0].attention.qkv.weight[:] = float("nan")
    with pytest.raises(InputError, match="must be finite"):
        insight.explain(predictor, some_levels(predictor))


def test_reason_when_there_are_no_attention_weights():
    onnx = SimpleNamespace(bundle=None, config=vt.ViTConfig(**SMALL))
    assert "ONNX" in insight.filters(onnx)["reason"]
    assert "ONNX" in insight.positions(onnx)["reason"]


def test_large_attention_is_averaged_or_refused(monkeypatch):
    predictor = predictor_of()  # 3 heads, 10 tokens
    levels = some_levels(predictor)
    whole = insight.trace(predictor.bundle.model, predictor.preprocess, levels, 1)[0]
    monkeypatch.setattr(insight, "MAX_BYTES", 299)
    found = insight.explain(predictor, levels, 1)["attention"]
    assert found["shape"] == [1, 10, 10]
    assert "mean over 3 heads" in found["note"]
    shown = unpacked(found) / 255 * np.array(found["row_max"])[..., None]
    np.testing.assert_allclose(shown[0], whole.mean(axis=0), atol=1 / 255)
    monkeypatch.setattr(insight, "MAX_BYTES", 80)
    assert "too large" in insight.explain(predictor, levels, 1)["attention"]["reason"]
    assert "too large" in insight.positions(predictor)["reason"]


# ---- the figures of the weights --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["class token", "oblong", "mean", "registers", "bias"])
def test_positions_equal_the_figure(name):
    predictor = predictor_of(**CONFIGS[name])
    found, wanted = insight.positions(predictor), positions.compute(predictor.bundle.model)
    least, most = found["similarity"]["min"], found["similarity"]["max"]
    shown = least + unpacked(found["similarity"]) / 255 * (most - least)
    assert (found["kind"], found["grid"]) == (predictor.config.position, list(wanted.grid))
    assert (least, most) == (-1, 1) or name == "bias"
    flat = wanted.similarity.reshape(-1, *wanted.grid)
    np.testing.assert_allclose(shown, flat, atol=(most - least) / 255)
    assert found["caption"] in positions.caption(wanted)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "options", [dict(channels=1), dict(channels=3), dict(channels=4), dict(embedding="mlp")]
)
def test_filters_equal_the_figure(options):
    predictor = predictor_of(**options)
    found, wanted = insight.filters(predictor), filters.compute(predictor.bundle.model)
    tiles, (least, most) = unpacked(found["tiles"]), (found["tiles"]["min"], found["tiles"]["max"])
    shown = least + tiles / 255 * (most - least)
    if options.get("channels") == 3:
        np.testing.assert_allclose(shown, filters.as_colors(wanted), atol=1 / 255)
    else:
        np.testing.assert_allclose(shown[..., 0], wanted.components.mean(axis=1), atol=(most - least) / 255)
    assert found["variance"] == pytest.approx(list(wanted.explained_variance))
    assert found["patch"] == [4, 4]
    assert found["caption"] == filters.caption(wanted)


def test_reasons_for_missing_positions_and_filters():
    predictor = predictor_of(position="none")
    assert "no position" in insight.positions(predictor)["reason"]
    with torch.no_grad():
        predictor.bundle.model.tokens.proj.weight.fill_(1)
    assert "filters are equal" in insight.filters(predictor)["reason"]


def test_insight_needs_no_matplotlib():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import vitrail as vt\nfrom vitrail.views.sample import sample_model\n"
        "from vitrail.serve import insight\nimport numpy as np\n"
        "one = vt.Predictor(sample_model())\n"
        "insight.explain(one, np.zeros((28, 28, 1), np.uint8))\ninsight.filters(one), insight.positions(one)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- images to begin with --------------------------------------------------------------------------


def opened(example):
    return Image.open(io.BytesIO(example.data))


def test_examples_for_one_channel_are_digits():
    found = built_in(1)
    assert [one.name for one in found] == [f"digit {n}" for n in range(10)]
    predict = vt.Predictor(sample_model())
    answers = [predict(opened(one)).label for one in found]
    assert np.array_equal(np.asarray(opened(found[3])), sample_images(4).pixels[3, ..., 0])
    assert sum(answer == str(n) for n, answer in enumerate(answers)) >= 7


@pytest.mark.parametrize("channels", [3, 4])
def test_color_examples(channels):
    found = built_in(channels)
    assert 4 <= len(found) <= MAX_EXAMPLES
    assert len({one.name for one in found}) == len({one.data for one in found}) == len(found)
    for one in found:
        image = opened(one)
        assert (one.kind, image.format, image.size, image.mode) == (
            "image/jpeg",
            "JPEG",
            (224, 224),
            "RGB",
        )
        assert len(image.getcolors(1 << 20)) > 20


def test_no_examples_for_unusual_channels():
    assert built_in(2) == []


def test_examples_from_a_folder(tmp_path):
    for number in range(30):
        kind = tmp_path / f"class {number // 10}"
        kind.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(kind / f"{number:02}.png")
    found = from_folder(tmp_path)
    assert len(found) == MAX_EXAMPLES
    assert found[0].name == "00.png"
    assert {int(one.name[:2]) // 10 for one in found} == {0, 1, 2}
    assert found[0].data == (tmp_path / "class 0" / "00.png").read_bytes()


def test_formats_unknown_to_browsers_become_png(tmp_path):
    image = Image.effect_noise((20, 10), 50)
    for name in ("a.jpg", "b.tiff", "c.png", "d.bmp"):
        image.save(tmp_path / name)
    (tmp_path / "e.jpg").write_bytes((tmp_path / "c.png").read_bytes())  # content decides
    found = from_folder(tmp_path)
    assert [one.kind for one in found] == ["image/jpeg", *["image/png"] * 4]
    assert found[4].data == found[2].data
    assert np.array_equal(np.asarray(opened(found[1])), np.asarray(image))


def test_example_folder_without_valid_images(tmp_path):
    with pytest.raises(InputError, match="contains no images"):
        from_folder(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        from_folder(tmp_path / "none")
    (tmp_path / "x.png").write_text("<script>alert(1)</script>")
    with pytest.raises(InputError, match=r"x\.png"):
        from_folder(tmp_path)


def test_small_model_gets_digits_without_margin():
    """As the demo's model learned them: with one, half of its 8 x 8 pixels would be empty."""
    inked, framed = (np.asarray(Image.open(io.BytesIO(built_in(1, side)[1].data))) for side in (8, 28))
    assert (inked.shape, framed.shape) == ((20, 20), (28, 28))
    assert np.array_equal(inked, framed[4:24, 4:24])
    assert framed[:4].max() == 0
