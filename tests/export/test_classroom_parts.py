"""The classroom page opened up: its experiments, one attention weight, LayerNorm and MLP against PyTorch."""

from functools import partial

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.browser import needs_chromium
from tests.support.models import add_noise
from vitrail.exporters.html import stored_model
from vitrail.model import edit, record
from vitrail.views.sample import sample_images, sample_model
from vitrail.weights.bundle.bundle import Bundle, Card

pytestmark = [needs_chromium, pytest.mark.slow]
CLOSE = dict(rtol=1e-4, atol=1e-4)
THREE = sample_images(4).images[3:]  # the digit that the page opens with


@pytest.fixture(scope="module")
def model():
    return stored_model(sample_model())[0]


def run(model, image, *, positions=True, factor=1.0, silenced=()):
    """The logits of PyTorch with the same change."""
    depth = model.config.depth
    edits = {f"blocks.{n}.attention.scores": lambda scores: scores * factor for n in range(depth)}
    for block in {block for block, _ in silenced}:
        gone = torch.tensor([(block, head) in silenced for head in range(model.config.heads)])
        edits[f"blocks.{block}.attention.heads"] = partial(
            torch.Tensor.masked_fill, mask=gone[:, None, None], value=0
        )
    with torch.no_grad(), edit(model, edits):
        table = model.position.table
        kept = table.clone()
        table.mul_(float(positions))
        logits = model(image)[0]
        table.copy_(kept)
    return logits


CHANGES = {
    "no positions": ({"positions": False}, dict(positions=False)),
    "no scale": ({"scale": False}, dict(factor=4.0)),  # heads of 16: the scale is 1/4
    "temperature": ({"temperature": 0.25}, dict(factor=4.0)),
    "cold and unscaled": ({"temperature": 2, "scale": False}, dict(factor=2.0)),
    "one head": ({"silenced": ["1.2"]}, dict(silenced=[(1, 2)])),
    "heads of two blocks": ({"silenced": ["0.0", "0.3", "1.1"]}, dict(silenced=[(0, 0), (0, 3), (1, 1)])),
    "all at once": (
        {"positions": False, "temperature": 3, "silenced": ["0.1"]},
        dict(positions=False, factor=1 / 3, silenced=[(0, 1)]),
    ),
}
FORWARD = """change => {
    const full = { ...NO_CHANGE, ...change, silenced: new Set(change.silenced ?? []) };
    return Array.from(vitrail.forward(vitrail.state.pixels, full).logits);
}"""


@pytest.mark.parametrize("name", CHANGES)
def test_experiments_give_the_logits_of_pytorch(name, sample, model):
    change, ours = CHANGES[name]
    wanted = run(model, THREE, **ours)
    assert not torch.allclose(wanted, run(model, THREE), atol=0.05)  # it changes something
    np.testing.assert_allclose(sample.evaluate(FORWARD, change), wanted, **CLOSE)


def test_shuffled_patches_are_the_same_pixels_elsewhere(sample, model):
    order = np.random.default_rng(0).permutation(49)
    found = sample.evaluate(
        "order => Array.from(vitrail.shufflePatches(vitrail.state.pixels, order))", order.tolist()
    )
    pixels = sample_images(4).pixels[3, ..., 0]
    patches = pixels.reshape(7, 4, 7, 4).transpose(0, 2, 1, 3).reshape(49, 4, 4)
    moved = patches[order].reshape(7, 7, 4, 4).transpose(0, 2, 1, 3).reshape(28, 28)
    np.testing.assert_array_equal(np.array(found).reshape(28, 28), moved)


def test_without_positions_the_order_of_the_patches_does_not_matter(sample):
    sample.check("#no-positions")
    before = sample.evaluate("Array.from(vitrail.state.result.logits)")
    sample.check("#shuffle")
    after = sample.evaluate("Array.from(vitrail.state.result.logits)")
    np.testing.assert_allclose(before, after, atol=1e-4)
    sample.uncheck("#no-positions")
    assert not np.allclose(before, sample.evaluate("Array.from(vitrail.state.result.logits)"), atol=0.1)
    assert "Patches shuffled" in sample.inner_text("#experiment-words")


def test_switches_change_the_page_and_undo_restores_it(sample, model):
    scores = sample.locator("#bars .number").all_inner_texts()
    sample.get_by_role("button", name="Silence head 2 of block 1").click()
    logits = run(model, THREE, silenced=[(1, 2)]).softmax(0)
    words = sample.inner_text("#experiment-words")
    assert "Head 2 of block 1 silenced" in words
    assert f"({100 * logits.max():.0f}%" in words
    assert sample.locator("#bars .number").all_inner_texts() != scores
    assert sample.locator(".was").first.is_visible()  # the mark of the score without the change
    sample.check("#no-scale")
    assert sample.is_visible("#changed")
    sample.click("#changed-reset")
    assert sample.locator("#bars .number").all_inner_texts() == scores
    assert not sample.is_checked("#no-scale")
    assert not sample.is_visible("#changed")
    assert "as it was trained" in sample.inner_text("#experiment-words")


# ---- one weight, LayerNorm, MLP -------------------------------------------------------------------


def test_one_attention_weight_has_the_numbers_of_pytorch(sample, model):
    with torch.no_grad(), record(model, "blocks.0.attention.*") as tape:
        model(THREE)
    block, head, token, key = 0, 3, 5, 17
    q, k, v, scores, weights, heads = (
        tape[f"blocks.0.attention.{name}"][0, head] for name in ("q", "k", "v", "scores", "weights", "heads")
    )
    found = sample.evaluate(
        """at => { const one = weightNumbers(vitrail.state.result, { ...at, change: NO_CHANGE });
            return Object.fromEntries(Object.entries(one).map(([name, value]) =>
                [name, typeof value === "number" ? value : Array.from(value)])); }""",
        dict(block=block, head=head, token=token, key=key),
    )
    wanted = {
        "q": q[token], "k": k[key], "v": v[key], "dot": q[token] @ k[key], "score": scores[token, key],
        "scores": scores[token], "row": weights[token], "weight": weights[token, key],
        "added": weights[token, key] * v[key], "output": heads[token],
    }  # fmt: skip
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, **CLOSE, err_msg=name)
    total = (scores[token] - scores[token].max()).exp().sum()
    assert found["total"] == pytest.approx(float(total), rel=1e-4)


def test_the_steps_of_the_weight_show_its_numbers(sample, model):
    with torch.no_grad(), record(model, "blocks.1.attention.*") as tape:
        model(THREE)
    q, k, weights = (tape[f"blocks.1.attention.{name}"][0, 0] for name in ("q", "k", "weights"))
    key = 1 + 3 * 7 + 3  # the patch in the middle
    dot = float(q[0] @ k[key])
    assert sample.inner_text("#weight-dot").replace("−", "-") == f"{dot:.3g}"
    assert sample.inner_text("#weight-scale") == "divided by √16 = 4"
    assert sample.inner_text("#weight-score").replace("−", "-") == f"{dot / 4:.3g}"
    assert sample.inner_text("#weight-weight") == f"{100 * weights[0, key]:.1f}%"
    sample.locator("#weight-map canvas.patches").focus()
    sample.keyboard.press("ArrowRight")
    assert "to the patch in row 3, column 4" in sample.inner_text("#weight-where")
    assert sample.evaluate("vitrail.state.token") == 0  # the key is another choice
    sample.check("#no-scale")
    assert sample.inner_text("#weight-scale") == "without the scale"
    assert sample.inner_text("#weight-score") == sample.inner_text("#weight-dot")


@pytest.mark.parametrize("norm", ["norm1", "norm2"])
def test_layer_norm_and_mlp_have_the_numbers_of_pytorch(norm, sample, model):
    with torch.no_grad(), record(model, "blocks.0.*", "blocks.0.mlp.*", "blocks.*.out") as tape:
        model(THREE)
    block, token = model.blocks[1], 20
    before = tape["blocks.0.out"][0, token]
    with torch.no_grad():
        if norm == "norm2":
            z = tape["blocks.0.out"]
            before = (z + block.attention(block.norm1(z)))[0, token]
        after = getattr(block, norm)(before)
    found = sample.evaluate(
        """at => { const one = normNumbers(vitrail.state.result, at);
            return { ...one, before: Array.from(one.before), standard: Array.from(one.standard), after: Array.from(one.after) }; }""",
        dict(block=1, token=token, norm=norm),
    )
    np.testing.assert_allclose(found["before"], before, **CLOSE)
    np.testing.assert_allclose(found["after"], after, **CLOSE)
    assert found["mean"] == pytest.approx(float(before.mean()), abs=1e-4)
    assert found["variance"] == pytest.approx(float(before.var(correction=0)), rel=1e-3)
    np.testing.assert_allclose([np.mean(found["standard"]), np.var(found["standard"])], [0, 1], atol=1e-3)
    hidden = sample.evaluate("Array.from(vitrail.state.result.blocks[0].hidden)")
    np.testing.assert_allclose(hidden, tape["blocks.0.mlp.hidden"].flatten(), **CLOSE)


def test_filters_are_the_columns_of_e(sample, model):
    sample.click(".box.filters")
    sample.locator("#filters-sheet").focus()
    sample.keyboard.press("ArrowRight")
    norms = model.tokens.proj.weight.flatten(1).norm(dim=1)
    number = int(norms.argsort(descending=True)[1])
    with torch.no_grad():
        best = int(model.tokens(THREE)[0, :, number].argmax())
    words = sample.inner_text("#filters-words")
    assert words.startswith(f"Filter {number} of 64 (length {norms[number]:.3g})")
    assert f"row {best // 7}, column {best % 7}" in words


def test_the_page_says_whether_its_filters_have_structure(sample, opened):
    words = sample.inner_text("#filters-look")
    assert "have no structure that one could see: the correlation of neighboring pixels is −0.01" in words
    assert "docs/inspect.md shows those of DeiT-Ti" in words
    config = vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=12, channels=1, classes=5)
    edges = add_noise(vt.ViT(config))
    with torch.no_grad():
        edges.tokens.proj.weight.copy_(torch.tensor([1.0, 1.0, -1.0, -1.0]).expand(12, 1, 4, 4))
    words = opened(Bundle(model=edges)).inner_text("#filters-look")
    assert "These filters have structure: the correlation of neighboring pixels is 0.67" in words
    dot = vt.ViTConfig(width=12, depth=1, heads=3, patch=1, size=4, channels=1, classes=5)
    page = opened(Bundle(model=add_noise(vt.ViT(dot))))
    assert page.inner_text("#filters-look") == "A filter of one pixel has no shape."


def test_indices_and_exponents_are_typeset(sample):
    score = sample.inner_text("#weight-score")
    assert sample.locator("#weight-softmax sup").all_inner_texts() == [score, "score"]
    sample.click(".box.norm1")
    sample.evaluate("chooseBlock(1, 'norm1')")
    assert sample.inner_text("#norm-where sub") == "1"
    assert "a row of z1, 64 numbers" in sample.locator("#norm-where").text_content()
    sample.evaluate("chooseBlock(1, 'norm2')")
    assert "a row of z′2, 64 numbers" in sample.locator("#norm-where").text_content()
    assert sample.locator("#boxes sub").all_inner_texts() == ["p", "class", "pos", "0", "2"]
    text = sample.inner_text("body")
    assert not [one for one in ("z_", "z′_", "E_", "e^") if one in text]


# ---- ways through the page ----------------------------------------------------------------------------


def test_every_box_of_the_drawing_opens_in_place(sample):
    boxes = sample.locator("#boxes .box:visible")
    panels = {
        "patches": "tokens",
        "filters": "filters",
        "positions": "positions",
        "norm1": "norm",
        "attention": "attention",
    }
    panels |= {"norm2": "norm", "mlp": "mlp", "rollout": "rollout"}
    for box, panel in panels.items():
        sample.click(f".box.{box}")
        assert sample.locator("#opened > section:visible").evaluate_all(
            "all => all.map((one) => one.id)"
        ) == [panel]
        assert sample.locator(f".box.{box}").get_attribute("aria-expanded") == "true"
    sample.click(".box.block0")
    assert sample.evaluate("vitrail.state.block") == 0
    assert sample.is_visible(".box.block1")
    assert not sample.is_visible(".box.block0")  # it is drawn with all its parts now
    sample.click(".box.mlp")
    assert "In block 0," in sample.inner_text("#mlp-words")
    sample.get_by_role("button", name="LayerNorm before the MLP").click()
    assert sample.locator("#norm").get_by_role("radio", name="before the MLP").is_checked()
    assert "block 0 of 0 to 1" in sample.inner_text("#boxes .title")
    assert boxes.count() == 13


def test_nothing_of_the_drawing_is_cut_off(sample):
    """Wide and narrow, all boxes lie within the drawing, and only frames and edges overlap."""
    for width in (1200, 800, 390):
        sample.set_viewport_size({"width": width, "height": 900})
        sample.wait_for_timeout(100)
        outer = sample.locator("#drawing").bounding_box()
        rects = [one.bounding_box() for one in sample.locator("#boxes .box:visible").all()]
        for one in rects:
            assert outer["x"] - 1 <= one["x"]
            assert one["x"] + one["width"] <= outer["x"] + outer["width"] + 1
            assert one["y"] + one["height"] <= outer["y"] + outer["height"] + 1
        for number, one in enumerate(rects):
            for other in rects[:number]:
                apart = (
                    one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
                    or one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]
                )  # fmt: skip
                assert apart, (width, one, other)


def test_the_drawing_of_a_deep_model_scrolls_to_its_end(opened):
    config = vt.ViTConfig(width=12, depth=9, heads=3, patch=4, size=12, channels=1, classes=5)
    page = opened(Bundle(model=add_noise(vt.ViT(config))), viewport={"width": 700, "height": 900})
    page.locator("#attention").get_by_role("radio", name="7").check()
    page.click(".box.head")
    assert page.is_visible(".box.block8")
    assert page.evaluate("document.documentElement.scrollWidth") <= 700


def test_the_tour_goes_through_every_section_and_leaves_nothing_changed(sample):
    sample.click("#tour-start")
    count = sample.evaluate("TOUR.length")
    seen = []
    for number in range(count):
        assert sample.inner_text("#tour-title").startswith(f"{number + 1} of {count}: ")
        seen.append(sample.locator(".toured").get_attribute("id"))
        sample.click("#tour-next")
    parts = "draw filters tokens norm attention weight mlp answer experiment positions rollout"
    assert seen == parts.split()
    assert not sample.is_visible("#tour")
    assert sample.evaluate("isPlain(vitrail.state)")
    sample.click("#tour-start")
    sample.keyboard.press("Escape")
    assert not sample.is_visible("#tour")
    sample.get_by_role("button", name="Show it: LayerNorm").click()  # the article has the same steps
    assert sample.is_visible("#norm")


def test_the_page_says_how_accurate_its_model_is(sample, opened):
    assert "96.6%" in sample.inner_text("#accuracy")
    config = vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=12, channels=1, classes=5)
    for metrics, words in [({}, "does not say"), ({"accuracy": 0.5}, "50.0%")]:
        page = opened(Bundle(model=add_noise(vt.ViT(config)), card=Card(metrics=metrics)))
        assert words in page.inner_text("#accuracy")
