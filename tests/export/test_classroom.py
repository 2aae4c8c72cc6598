"""The classroom page in a real browser: its numbers are those of PyTorch, and its controls work."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.browser import needs_chromium
from tests.support.classroom import WatchedPage
from tests.support.models import add_noise
from vitrail.exporters.html import stored_model
from vitrail.model import record
from vitrail.views import positions, rollout
from vitrail.views.sample import sample_images, sample_model
from vitrail.weights.bundle.bundle import Bundle, Card

pytestmark = [needs_chromium, pytest.mark.slow]


# ---- numbers ---------------------------------------------------------------------------------------

SMALL = dict(width=12, depth=2, heads=3, patch=4, size=12, channels=1, classes=5)
CONFIGS = {
    "class token": dict(patch=(4, 6), size=(12, 12)),
    "mean pool": dict(
        class_token=False, pool="mean", pool_norm="after", position="sincos2d", activation="gelu-tanh",
        qkv_bias="none", layer_scale=0.5, mlp_width=20,
    ),
    "registers": dict(registers=2, rows="class", position="learned2d", activation="relu", qkv_bias="no-k"),
    "not square": dict(
        channels=3, size=(8, 20), patch=(4, 5), head_width=5, head_bias=False, depth=3, position="sincos1d",
        registers=1,
    ),
    "no positions": dict(
        distillation_token=True, pool="mean-all", pool_norm="none", position="none", scale="width",
        embedding_bias=False, eps=1e-3,
    ),
    "pixels cut off": dict(size=(14, 11), remainder="cut", rows="patches"),
}  # fmt: skip

COMPUTE = """pixels => {
    const vit = vitrail.vit, found = vitrail.forward(Uint8Array.from(pixels));
    const tokens = [...Array(vit.T).keys()];
    return {
        logits: Array.from(found.logits), lens: found.lens.map(row => Array.from(row)),
        embedded: Array.from(found.embedded), attention: found.attention.map(block => Array.from(block)),
        z: found.z.map(one => Array.from(one)),
        rollout: Array.from(vit.rollout(found.attention, vit.depth)),
        alike: vit.tensors.position ? tokens.map(token => Array.from(vit.similarity(token))) : null,
    };
}"""


def check_numbers(page, bundle, pixels):
    """All activations that the page computes agree with PyTorch to 1e-4."""
    (model, _), config = stored_model(bundle), bundle.model.config
    image, L, n = bundle.preprocess.normalize(pixels)[None], config.depth, config.prefix
    names = ("blocks.*.attention.weights", "blocks.*.out", "embed")
    with torch.no_grad(), record(model, *names) as tape:
        logits = model(image)[0]
        layers = model.encode(image, layers=range(L)).layers
        lens = [model.head(model.finish(tape["embed"]).pooled)[0]]
        lens += [model.head(layers[i].pooled)[0] for i in range(L)]
        embedded = model.tokens(image)
    weights = torch.stack([tape[f"blocks.{i}.attention.weights"][0] for i in range(L)])
    z = torch.stack([tape["embed"][0], *(tape[f"blocks.{i}.out"][0] for i in range(L))])
    found = page.evaluate(COMPUTE, pixels.flatten().tolist())
    close = dict(rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["logits"], logits, **close)
    np.testing.assert_allclose(found["lens"], torch.stack(lens), **close)
    np.testing.assert_allclose(found["embedded"], embedded.flatten(), **close)
    np.testing.assert_allclose(found["z"], z.flatten(1), **close)
    np.testing.assert_allclose(found["attention"], weights.flatten(1), rtol=0, atol=1e-5)
    theirs, ours = np.array(found["rollout"]), rollout.compute(model, image)
    np.testing.assert_allclose(theirs[n:] / theirs[n:].sum(), ours.maps[0, 0].ravel(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(theirs[:n], ours.prefix[0, 0], rtol=0, atol=1e-5)
    if config.position == "none":
        assert found["alike"] is None
    else:
        same, alike = positions.compute(model), np.array(found["alike"])
        np.testing.assert_allclose(alike[n:, n:], same.similarity, rtol=0, atol=1e-5)
        if same.class_row is not None:
            np.testing.assert_allclose(alike[0, n:], same.class_row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_numbers_are_those_of_pytorch(name, opened):
    config = vt.ViTConfig(**{**SMALL, **CONFIGS[name]})
    bundle = Bundle(model=add_noise(vt.ViT(config)))
    pixels = np.random.default_rng(0).integers(0, 256, (*config.pixels, config.channels), dtype=np.uint8)
    check_numbers(opened(bundle), bundle, pixels)


def test_the_numbers_of_the_sample_model(sample):
    check_numbers(sample, sample_model(), sample_images(3).pixels[2])


def test_half_precision_changes_no_answer_of_the_sample_model(sample):
    """The page has float16 matrices, and the classes of all digits are those of the float32 model."""
    kinds = sample.evaluate("vitrail.vit.tensors && config.tensors.map(([, , kind]) => kind)")
    assert {"f2", "f4"} == set(kinds)
    bundle, digits = sample_model(), sample_images(200)
    stored, half = stored_model(bundle)
    assert half
    with torch.no_grad():
        before, after = bundle.model.eval()(digits.images), stored(digits.images)
    assert before.argmax(1).tolist() == after.argmax(1).tolist()
    assert (before.softmax(1) - after.softmax(1)).abs().max() < 5e-3
    for n in (0, 7):
        logits = sample.evaluate(
            "pixels => Array.from(vitrail.forward(pixels).logits)", digits.pixels[n].flatten().tolist()
        )
        np.testing.assert_allclose(logits, after[n], rtol=1e-4, atol=1e-4)


def test_weights_that_half_precision_would_change_are_stored_as_float32(opened):
    torch.manual_seed(0)
    model = vt.ViT(vt.ViTConfig(**SMALL))
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6  # beyond the largest float16
    bundle = Bundle(model=model)
    stored, half = stored_model(bundle)
    assert not half
    assert torch.equal(stored.head.weight, model.head.weight)
    kinds = opened(bundle).evaluate("config.tensors.map(([, , kind]) => kind)")
    assert set(kinds) == {"f4"}


def test_bars_start_in_line_whatever_the_names(opened):
    labels = ["a", "a very long name of a class", "b", "c", "d"]
    config = vt.ViTConfig(**{**SMALL, "classes": 5})
    page = opened(Bundle(model=add_noise(vt.ViT(config)), labels=labels))
    left = "[...document.querySelectorAll('.bars .track')].map((track) => track.getBoundingClientRect().left)"
    assert len(set(page.evaluate(left))) == 1


def test_the_old_answer_is_removed_if_a_file_cannot_be_read(color, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert "Prediction" in color.locator("#says").inner_text()
    color.set_input_files("#file", tmp_path / "broken.png")
    wait_until(color, "document.getElementById('message').textContent !== ''")
    assert color.locator("#says").inner_text() == ""
    assert not any(text.strip() for text in color.locator(".bars li").all_inner_texts())
    color.locator("#examples button").first.click()
    assert "Prediction" in color.locator("#says").inner_text()
    assert color.locator("#message").inner_text() == ""


def test_erf_is_exact(sample):
    x = torch.linspace(-7, 7, 1401, dtype=torch.float64)
    found = sample.evaluate("xs => xs.map(erf)", x.tolist())
    np.testing.assert_allclose(found, torch.erf(x), rtol=0, atol=2e-12)


def test_preprocessing_is_bit_equal_to_ours(sample):
    pixels = np.arange(784, dtype=np.int64).reshape(28, 28, 1) % 256
    found = sample.evaluate("pixels => Array.from(vitrail.vit.normalize(pixels))", pixels.flatten().tolist())
    wanted = sample_model().preprocess.normalize(pixels.astype(np.uint8))
    assert torch.equal(torch.tensor(found), wanted.flatten())


# ---- a hand on the page ------------------------------------------------------------------------------


def wait_until(page, expression):
    """Like page.wait_for_function, which the page's content security policy forbids."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"{expression} did not come true in 5 seconds")


def draw(page, *points):
    """Draw one stroke through points from 0 to 1."""
    page.locator("#sheet").scroll_into_view_if_needed()
    box = page.locator("#sheet").bounding_box()
    at = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*at[0])
    page.mouse.down()
    for point in at[1:]:
        page.mouse.move(*point, steps=2)
    page.mouse.up()
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def circle(middle=(0.5, 0.5), radius=0.25):
    angles = np.linspace(0, 2 * np.pi, 13)
    return [(middle[0] + 0.8 * radius * np.sin(a), middle[1] - radius * np.cos(a)) for a in angles]


def test_drawn_digits_are_recognized(sample):
    assert sample.inner_text("#says") == "Prediction: 3 (100%)."  # the page opens with an example
    sample.click("#clear")
    assert "empty" in sample.inner_text("#says")
    draw(sample, (0.5, 0.15), (0.48, 0.85))
    assert sample.inner_text("#says").startswith("Prediction: 1 ")
    assert sample.inner_text("#bars .first .label") == "1"
    sample.click("#clear")
    draw(sample, *circle())
    assert sample.inner_text("#says").startswith("Prediction: 0 ")


def test_a_digit_starts_on_an_empty_canvas(sample):
    draw(sample, (0.5, 0.2), (0.5, 0.8))
    ink = np.array(sample.evaluate("Array.from(vitrail.state.pixels)")).reshape(28, 28)
    assert not ink[:, :9].any()
    assert not ink[:, 19:].any()
    assert ink.any()


def test_the_drawing_is_centered_unless_switched_off(sample):
    def middle():
        ink = np.array(sample.evaluate("Array.from(vitrail.state.pixels)")).reshape(28, 28)
        return (ink.sum(axis=1) @ np.arange(28)) / ink.sum(), (ink.sum(axis=0) @ np.arange(28)) / ink.sum()

    draw(sample, *circle((0.25, 0.25), 0.15))
    np.testing.assert_allclose(middle(), 13.5, atol=0.3)
    sample.uncheck("#center")
    np.testing.assert_allclose(middle(), 6.5, atol=1)


def test_examples_are_shown_pixel_by_pixel(sample):
    buttons = sample.locator("#examples button")
    assert buttons.count() == 10
    buttons.nth(7).focus()
    sample.keyboard.press("Enter")
    pixels = sample.evaluate("Array.from(vitrail.state.pixels)")
    assert pixels == sample_images(8).pixels[7].flatten().tolist()


def row_of(block, head, token):
    """The attention of the third example, which the page opens with."""
    model, _ = stored_model(sample_model())
    with torch.no_grad(), record(model, "blocks.*.attention.weights") as tape:
        model(sample_images(4).images[3:])
    return tape[f"blocks.{block}.attention.weights"][0, head, token]


def test_pointing_at_a_patch_shows_its_attention(sample):
    shown = "document.querySelector('#attention-map canvas').toDataURL()"
    canvas = sample.locator("#attention-map canvas.patches")
    before, size = sample.evaluate(shown), canvas.bounding_box()
    canvas.hover(position={"x": size["width"] * 3.5 / 7, "y": size["height"] * 2.5 / 7})
    choices = sample.locator("#attention")
    choices.get_by_role("group", name="Head").get_by_role("radio", name="1").check()
    choices.get_by_role("group", name="Block").get_by_role("radio", name="0").check()
    token = 1 + 2 * 7 + 3
    assert sample.evaluate("vitrail.state.token") == token
    assert sample.evaluate(shown) != before
    row, words = row_of(0, 1, token), sample.inner_text("#attention-words")
    best = int(row[1:].argmax())
    assert words.startswith("In block 0, in head 1, the patch in row 2, column 3 attends most to ")
    assert f"row {best // 7}, column {best % 7} ({percent(row[1:].max())})" in words
    assert (
        f"{percent(row[token])} of its attention goes to itself, {percent(row[0])} goes to the class token"
        in words
    )
    for part, words in [
        ("Patches become tokens, Eq. 1", "#token-words"),
        ("Position embeddings, Eq. 1", "#positions-words"),
    ]:
        sample.get_by_role("button", name=part).click()
        assert "row 2, column 3" in sample.inner_text(words)
        assert not sample.is_visible("#attention")  # one panel is open


def percent(fraction):
    fraction = float(fraction)
    return f"{100 * fraction:.{1 if fraction < 0.0995 else 0}f}%"


def test_the_keyboard_moves_from_patch_to_patch(sample):
    sample.locator("#attention-map canvas.patches").focus()
    assert "the class token attends most" in sample.inner_text("#attention-words")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):  # the first one goes to the first patch
        sample.keyboard.press(key)
    assert "the patch in row 1, column 1 attends most" in sample.inner_text("#attention-words")
    chips = sample.locator("#attention-map").get_by_role("group", name="Prefix tokens")
    chips.get_by_role("button", name="class").click()
    assert "the class token attends most" in sample.inner_text("#attention-words")
    sample.get_by_role("button", name="The learned tokens before the patches, Eq. 1").click()
    assert sample.inner_text("#token-words") == "The class token:"


def test_the_matrix_is_all_of_a_and_chooses_query_and_key(sample):
    sample.locator("#attention").get_by_role("group", name="Head").get_by_role("radio", name="2").check()
    rows = torch.stack([row_of(1, 2, token) for token in range(50)])
    found = sample.evaluate("Array.from(attentionOf(1))")
    np.testing.assert_allclose(np.array(found).reshape(50, 50), rows, rtol=0, atol=1e-5)
    matrix = sample.locator("#matrix")
    size = matrix.bounding_box()
    matrix.click(position={"x": size["width"] * 17.5 / 50, "y": size["height"] * 5.5 / 50})
    assert sample.evaluate("[vitrail.state.token, vitrail.state.key]") == [5, 17]
    assert percent(rows[5, 17]) in sample.inner_text("#matrix-words")
    assert sample.inner_text("#weight-weight") == percent(rows[5, 17])
    for key in ("ArrowDown", "ArrowLeft"):
        sample.keyboard.press(key)
    assert sample.evaluate("[vitrail.state.token, vitrail.state.key]") == [6, 16]


def test_a_number_is_marked_wherever_it_appears(sample):
    sample.locator("#attention").get_by_role("group", name="Head").get_by_role("radio", name="0").check()
    sample.hover("#weight-weight")
    same = sample.locator(".same").all_inner_texts()
    assert len(same) == 3  # beside the matrix, after the softmax, and before v
    assert set(same) == {sample.inner_text("#weight-weight")}
    sample.hover("h1")
    assert sample.locator(".same").count() == 0


def test_a_weight_is_played_and_ends_with_its_numbers(sample):
    dot = sample.inner_text("#weight-dot")
    sample.evaluate("playWeight(0.4)")
    seen = set()
    for _ in range(60):
        seen.add((sample.inner_text("#weight-dot"), sample.inner_text("#weight-bars-words")))
        sample.wait_for_timeout(20)
    assert "Divided by their sum, they are the weights:" in {words for _, words in seen}
    assert sample.inner_text("#weight-dot") == dot
    sample.evaluate("chooseBlock(0)")  # what is being played stops
    assert sample.inner_text("#weight-bars-words") == "The scores of all tokens:"


def test_every_control_has_a_name_and_can_be_focused(sample):
    nameless = sample.evaluate(
        "() => [...document.querySelectorAll('button, input, canvas')].filter(one => one.checkVisibility())"
        ".filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim()"
        " || one.getAttribute('aria-labelledby') || one.closest('button, .legend')))"
        ".map(one => one.outerHTML)"
    )
    assert nameless == []


def test_the_slider_shows_earlier_blocks(sample):
    sample.locator("#depth").focus()
    sample.keyboard.press("ArrowLeft")
    assert sample.inner_text("#depth-words") == "1 of 2 blocks"
    model, _ = stored_model(sample_model())
    with torch.no_grad():
        layer = model.encode(sample_images(4).images[3:], layers=[0]).layers[0]
        scores = model.head(layer.pooled)[0].softmax(dim=0)
    assert sample.locator("#bars .number").all_inner_texts() == [percent(score) for score in scores]
    sample.get_by_role("button", name="Attention rollout").click()
    assert "Through 1 of 2 blocks" in sample.inner_text("#rollout-words")
    sample.locator("#depth").focus()
    sample.keyboard.press("ArrowLeft")
    assert "nothing of the image" in sample.inner_text("#rollout-words")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(scheme, browser, sample_file):
    watched = WatchedPage(
        browser, sample_file, viewport={"width": 360, "height": 700}, has_touch=True, color_scheme=scheme
    )
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert not page.is_visible("#opened > section")
    page.get_by_role("button", name="Attention of this block").tap()  # its panel covers the lower part
    box, panel = (page.locator(one).bounding_box() for one in (".box.attention", "#attention"))
    assert 0 <= box["y"] < panel["y"]
    assert panel["y"] + panel["height"] == pytest.approx(700, abs=1)
    page.locator("#attention-map canvas.patches").tap(position={"x": 5, "y": 5})
    assert "row 0, column 0" in page.inner_text("#attention-words")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Close").tap()
    assert not page.is_visible("#attention")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, paper[4:-1].split(","))) < 64) == (scheme == "dark")
    watched.close()


# ---- what others wrote -------------------------------------------------------------------------------


def test_labels_and_names_are_shown_as_text(opened):
    labels = [
        "<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "{{ weights }}", "a\u202eb",
        "&lt;",
    ]  # fmt: skip
    bundle = Bundle(
        model=add_noise(vt.ViT(vt.ViTConfig(**SMALL))), labels=labels, card=Card(name="</title><b>x")
    )
    page = opened(bundle)
    assert page.locator("#bars .label").all_inner_texts() == [*labels[:3], r"a\u202eb", labels[4]]
    assert page.inner_text("#name") == "</title><b>x"
    assert page.title() == "Inside a Vision Transformer: </title><b>x"
    assert page.locator("img, b, body script:not([id])").count() == 1  # our own script


def test_of_many_classes_the_ten_most_likely_are_listed(opened):
    bundle = Bundle(model=add_noise(vt.ViT(vt.ViTConfig(**{**SMALL, "classes": 30}))))
    page = opened(bundle)
    shown = [int(label) for label in page.locator("#bars .label").all_inner_texts()]
    logits = page.evaluate("Array.from(vitrail.state.result.logits)")
    assert shown == sorted(range(30), key=lambda number: -logits[number])[:10]


def test_the_policy_forbids_the_network(browser, sample_file):
    watched = WatchedPage(browser, sample_file)
    stopped = watched.page.evaluate(
        """async () => {
            const stopped = [];
            document.addEventListener("securitypolicyviolation", event => stopped.push(event.effectiveDirective));
            await fetch("https://vitrail.invalid/").catch(() => 0);
            await new Promise(done => { const image = new Image(); image.onerror = done; image.src = "x.png"; });
            const script = document.body.appendChild(document.createElement("script"));
            script.textContent = "window.hit = true";
            await new Promise(done => setTimeout(done, 50));
            return [...stopped, window.hit ?? "no hit"];
        }"""
    )
    assert stopped == ["connect-src", "img-src", "script-src-elem", "no hit"]
    watched.context.close()


# ---- images in color --------------------------------------------------------------------------------


@pytest.fixture
def color(opened):
    config = vt.ViTConfig(**{**SMALL, "channels": 3, "size": (12, 16)})
    return opened(Bundle(model=add_noise(vt.ViT(config))))


def test_an_image_file_is_drawn_on_the_canvas(color, tmp_path):
    left_red = np.zeros((24, 32, 3), dtype=np.uint8)
    left_red[:, :16, 0], left_red[:, 16:, 2] = 200, 100
    Image.fromarray(left_red).save(tmp_path / "halves.png")
    color.set_input_files("#file", tmp_path / "halves.png")
    wait_until(color, "vitrail.state.pixels[0] === 200")
    pixels = np.array(color.evaluate("Array.from(vitrail.state.pixels)")).reshape(12, 16, 3)
    np.testing.assert_allclose(pixels[:, :7], left_red[::2, ::2][:, :7], atol=2)
    np.testing.assert_allclose(pixels[:, 9:], left_red[::2, ::2][:, 9:], atol=2)
    (tmp_path / "no.png").write_text("no image")
    color.set_input_files("#file", tmp_path / "no.png")
    wait_until(color, "document.getElementById('message').textContent !== ''")
    assert "cannot read this file" in color.inner_text("#message")


def test_an_image_can_be_dropped_and_drawn_on(color):
    color.evaluate(
        """async () => {
            const canvas = new OffscreenCanvas(40, 30), pen = canvas.getContext("2d");
            pen.fillStyle = "rgb(10, 20, 30)";
            pen.fillRect(0, 0, 40, 30);
            const all = new DataTransfer();
            all.items.add(new File([await canvas.convertToBlob()], "x.png", {type: "image/png"}));
            sheet.dispatchEvent(new DragEvent("drop", {dataTransfer: all, cancelable: true}));
        }"""
    )
    wait_until(color, "vitrail.state.pixels.slice(0, 3).join() === '10,20,30'")
    draw(color, (0.2, 6.5 / 12), (0.8, 6.5 / 12))
    pixels = np.array(color.evaluate("Array.from(vitrail.state.pixels)")).reshape(12, 16, 3)
    assert pixels[0, 0].tolist() == [10, 20, 30]
    np.testing.assert_allclose(pixels[6, 8], [0x1D, 0x1D, 0x22], atol=4)


def test_images_keep_their_aspect_ratio_if_the_preprocessing_does(opened):
    from vitrail.images.preprocess import Preprocess

    config = vt.ViTConfig(**{**SMALL, "channels": 3})
    spec = Preprocess(size=12, resize="shortest", resize_to=16)
    page = opened(Bundle(model=add_noise(vt.ViT(config)), preprocess=spec))
    page.evaluate(
        """async () => {
            const canvas = new OffscreenCanvas(64, 32), pen = canvas.getContext("2d");
            pen.fillStyle = "rgb(90, 90, 90)";
            pen.fillRect(18, 2, 28, 28);
            await openImage(await canvas.convertToBlob());
        }"""
    )
    pixels = np.array(page.evaluate("Array.from(vitrail.state.pixels)")).reshape(12, 12, 3)
    assert (pixels == 90).all()  # the center, 24 of 32 pixels high and of 64 wide
