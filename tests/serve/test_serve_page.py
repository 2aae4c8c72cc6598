"""The page of `vitrail serve` in a real browser, before a real server: its numbers are those of the library."""

import base64
import io
import re
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.browser import needs_chromium
from tests.support.digit_clip import FILE, save_scenes
from tests.support.models import add_noise
from vitrail.serve.app import App
from vitrail.serve.examples import built_in
from vitrail.serve.server import Server, bind
from vitrail.serve.server_settings import ServeConfig
from vitrail.views import positions, rollout
from vitrail.views.sample import sample_images, sample_model
from vitrail.weights.bundle.bundle import Bundle, Card

pytestmark = [needs_chromium, pytest.mark.slow]

PATIENCE = 30  # seconds, for a machine that has other things to do
SMALL = dict(width=12, depth=2, heads=3, patch=8, size=24, channels=3, classes=5)


class Served:
    """A server in a thread of its own."""

    def __init__(self, predictor, *, examples=None, **settings):
        config = ServeConfig(**{"port": 0, "drain": 2.0, "deadline": 60.0, **settings})
        listener = bind(config)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.predictor, self.log = predictor, []
        offered = built_in(predictor.config.channels) if examples is None else examples
        name = predictor.card.name or "small"
        self.app = App({name: predictor}, config, examples=offered, log=self.log.append)

        self.server = Server(self.app, listener)
        self.server.listen()
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def take_places(self, count):
        """Let so many images more, or less, be inside."""

        def change():
            self.app.batcher.in_progress += count

        self.server.loop.call_soon_threadsafe(change)

    def stop(self):
        if self.thread.is_alive():
            self.server.loop.call_soon_threadsafe(self.server.stop)
            self.thread.join(PATIENCE)
        assert not [line for line in self.log if line.startswith("internal error")]


class Watched:
    """A page, with all it asked for and all it complained about."""

    def __init__(self, browser, served, **options):
        self.served = served
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.asked, self.complaints = [], []
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self.refuse)
        self.page.goto(served.address)

    def refuse(self, dialog):
        self.complaints.append(dialog.message)
        dialog.dismiss()  # or the page would wait for ever

    def close(self):
        """Nothing came from elsewhere, no script failed, and the policy had nothing to forbid."""
        self.context.close()
        here = (f"{self.served.address}/", "blob:", "data:")
        assert [url for url in self.asked if not url.startswith(here)] == []
        refused = "Failed to load resource"  # what the browser says of every answer that is an error
        assert [text for text in self.complaints if not text.startswith(refused)] == []


@pytest.fixture(scope="module")
def digits_served():
    served = Served(vt.Predictor(sample_model()))
    yield served
    served.stop()


@pytest.fixture
def sample(browser, digits_served):
    watched = Watched(browser, digits_served)
    wait_until(watched.page, "vitrail.inside !== null")
    yield watched.page
    watched.close()
    assert not any("Failed to load" in text for text in watched.complaints)


@pytest.fixture
def opened(browser):
    """Serve a model and open its page; whatever fails, both are closed in the end."""
    with ExitStack() as stack:

        def open_page(predictor, *, context=None, **settings):
            served = Served(predictor, **settings)
            stack.callback(served.stop)
            watched = Watched(browser, served, **(context or {}))
            stack.callback(watched.close)
            return watched.page, served

        yield open_page


def predictor_of(labels=None, card=None, **options):
    config = vt.ViTConfig(**{**SMALL, **options})
    return vt.Predictor(
        Bundle(model=add_noise(vt.ViT(config)), labels=labels, card=card or Card(name="small"))
    )


def wait_until(page, expression):
    """As page.wait_for_function, which the page's policy does not allow."""
    for _ in range(PATIENCE * 40):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"{expression} did not come true")


def wait_for_answer(page, name):
    """Until what is shown belongs to the image of this name."""
    wait_until(page, f"document.getElementById('image-name').textContent === {name!r}")
    wait_until(page, "!document.body.classList.contains('waiting') && vitrail.inside.result !== null")


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def digit(number):
    return sample_images(10).pixels[number]


def percent(share):
    share = float(share)
    return f"{100 * share:.{1 if share < 0.0995 else 0}f}%"


def check_answer(page, predictor, image):
    wanted = predictor(image)
    assert page.inner_text("#label") == wanted.label
    assert page.inner_text("#score") == percent(wanted.score)
    assert page.locator("#bars .label").all_inner_texts() == [label for label, _ in wanted.top(5)]
    shown = [float(text.rstrip("%")) / 100 for text in page.locator("#bars .number").all_inner_texts()]
    np.testing.assert_allclose(shown, [score for _, score in wanted.top(5)], atol=0.0051)


# ---- ways in which an image arrives -----------------------------------------------------------------

HAND_OVER = """([kind, name, type, text]) => {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), all = new DataTransfer();
    if (name) all.items.add(new File([bytes], name, {type}));
    else all.setData("text/plain", "https://elsewhere.invalid/cat.jpg");
    const event = kind === "drop"
        ? new DragEvent("drop", {dataTransfer: all, bubbles: true, cancelable: true})
        : new ClipboardEvent("paste", {clipboardData: all, bubbles: true, cancelable: true});
    document.getElementById("drop").dispatchEvent(event);
}"""


def hand_over(page, kind, name, data=b"", media="image/png"):
    page.evaluate(HAND_OVER, [kind, name, media, base64.b64encode(data).decode()])


def test_choose_a_file(sample, tmp_path, digits_served):
    (tmp_path / "four.png").write_bytes(png(digit(4)[..., 0]))
    sample.set_input_files("#pick", tmp_path / "four.png")
    wait_for_answer(sample, "four.png")
    check_answer(sample, digits_served.predictor, digit(4))
    wait_until(sample, "!document.getElementById('preview').hidden")
    sample.set_input_files("#pick", tmp_path / "four.png")  # the same again is an answer again
    wait_until(sample, "vitrail.layers.size === 1")


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_drop_and_paste(kind, sample, digits_served):
    hand_over(sample, kind, "six.png", png(digit(6)[..., 0]))
    wait_for_answer(sample, "six.png")
    check_answer(sample, digits_served.predictor, digit(6))


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_dropped_url_is_refused(kind, sample):
    hand_over(sample, kind, None)
    wait_until(sample, "!document.getElementById('trouble').hidden")
    assert "image" in sample.inner_text("#trouble-words")
    assert not sample.is_visible("#again")


def test_examples_by_click(sample, digits_served):
    assert sample.locator("#examples button").count() == 10
    for number in (3, 7):
        sample.locator("#examples button").nth(number).click()
        wait_for_answer(sample, f"digit {number}")
        check_answer(sample, digits_served.predictor, digit(number))
        seen = pixels_of(sample, "vitrail.inside.image.own")
        assert np.array_equal(seen[..., :1], digit(number))  # what the model saw, level by level


def test_classes_by_words(opened, tmp_path):
    """A model with a text tower asks for the classes, and answers as `/v1/predict?labels=` does."""
    page, _ = opened(vt.Predictor(FILE))
    wait_until(page, "vitrail.inside !== null")
    photo = next(save_scenes(tmp_path, 20).glob("seven/*.png"))
    page.set_input_files("#pick", photo)
    wait_until(page, "document.querySelector('#label').textContent === 'No classes yet'")
    page.fill("#words", "two, seven")
    page.click("#words-form button")
    wait_until(page, "document.querySelector('#label').textContent === 'seven'")
    assert page.locator("#bars li").count() == 2
    page.fill("#words", "two")
    page.click("#words-form button")
    wait_until(page, "!document.querySelector('#trouble').hidden")
    assert "2 to 100 different names" in page.inner_text("#trouble-words")


def test_last_image_wins(sample, digits_served):
    for number in (1, 2, 3, 4, 5, 6):
        sample.locator("#examples button").nth(number).click()
    wait_for_answer(sample, "digit 6")
    check_answer(sample, digits_served.predictor, digit(6))


def test_last_image_wins_before_the_model_is_loaded(opened):
    predictor = predictor_of()
    predictor.bundle = None  # as that of an ONNX file
    page, _ = opened(predictor)
    held, asked = [], []
    page.route("**/v1/model", lambda route: held.append(route))
    page.reload()
    wait_until(page, "Boolean(window.vitrail)")
    page.on("request", lambda request: asked.append(request.method))
    images = [np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8) for seed in (0, 1)]
    for number, pixels in enumerate(images):
        hand_over(page, "drop", f"{number}.png", png(pixels))
    held[0].continue_()
    wait_until(page, "document.getElementById('bars').childElementCount === 5")
    check_answer(page, predictor, images[1])
    page.wait_for_timeout(300)
    assert asked.count("POST") == 1


# ---- inside --------------------------------------------------------------------------------------------


@pytest.fixture
def three(sample):
    sample.locator("#examples button").nth(3).click()
    wait_for_answer(sample, "digit 3")
    return sample


def rows_of(number):
    """Attention of the sample model for a digit: (L, k, T, T)."""
    bundle = sample_model()
    with torch.no_grad(), vt.record(bundle.model.eval(), "blocks.*.attention.weights") as tape:
        bundle.model(sample_images(10).images[number : number + 1])
    return np.stack([tape[f"blocks.{layer}.attention.weights"][0].numpy() for layer in range(2)])


def check_row(page, layer, head, token):
    rows = rows_of(3)[layer] if head is None else rows_of(3)[layer, [head]]
    wanted, found = rows[:, token].mean(axis=0), np.array(page.evaluate("Array.from(vitrail.inside.row())"))
    allowed = float(rows[:, token].max()) / 255
    assert (np.abs(found - wanted) <= allowed).all()
    best = int(wanted[1:].argmax())
    words = page.inner_text("#attention-words")
    assert words.startswith(f"In layer {layer + 1}, ")
    place = (
        r"itself \(among the patches\)"
        if best + 1 == token
        else f"row {best // 7 + 1}, column {best % 7 + 1}"
    )
    said = re.search(rf"attends most to .*{place} \(([\d.]+)%\)", words)
    assert said, words
    assert float(said[1]) / 100 == pytest.approx(wanted[1 + best], abs=allowed + 0.005)


def painted(page, name):
    return page.evaluate(f"document.querySelector('#{name}-map canvas').toDataURL()")


def pixels_of(page, canvas):
    """A canvas of the page as levels (H, W, 3)."""
    data = page.evaluate(f"{canvas}.toDataURL()").partition(",")[2]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def test_hover_over_a_patch_shows_its_attention(three):
    check_row(three, 1, None, 0)
    assert "the class token attends most" in three.inner_text("#attention-words")
    before = painted(three, "attention")
    canvas = three.locator("#attention-map canvas.patches")
    size = canvas.bounding_box()
    canvas.hover(position={"x": size["width"] * 3.5 / 7, "y": size["height"] * 2.5 / 7})
    token = 1 + 2 * 7 + 3
    assert three.evaluate("vitrail.inside.token") == token
    assert painted(three, "attention") != before
    check_row(three, 1, None, token)
    assert "the patch in row 3, column 4 attends most" in three.inner_text("#attention-words")
    for head in range(4):
        three.get_by_role("radio", name=str(head + 1), exact=True).check()
        check_row(three, 1, head, token)
    three.locator("#attention-map .chips button").click()
    check_row(three, 1, 3, 0)


def test_colors_match_the_numbers(three):
    """Patch for patch, the map's brightness follows the row of attention."""
    row = rows_of(3)[1, :, 0].mean(axis=0)[1:]
    shown = pixels_of(three, "document.querySelector('#attention-map canvas')")
    places = [
        round(len(shown) * (4 * patch + 2.5) / 28) for patch in range(7)
    ]  # inside a pixel of each patch
    seen = shown[places][:, places].reshape(49, 3)
    image = digit(3)[2::4, 2::4, 0].reshape(49, 1)
    stops = np.array([[10, 10, 60], [120, 20, 110], [235, 90, 50], [255, 235, 120]])
    hue = np.stack([np.interp(3 * row / row.max(), range(4), stops[:, c]) for c in range(3)], axis=1)
    np.testing.assert_allclose(seen, 0.78 * hue + 0.22 * image, atol=8)


def test_slider_selects_a_layer(three):
    before = painted(three, "attention"), painted(three, "rollout")
    asked = []
    three.on("request", lambda request: asked.append(request.url))
    three.locator("#depth").focus()
    three.keyboard.press("ArrowLeft")
    wait_until(three, "vitrail.inside.result.layer === 0")
    assert len(asked) == 1
    assert "v1/explain?layer=0" in asked[0]
    assert three.inner_text("#depth-words") == "layer 1 of 2"
    assert painted(three, "attention") != before[0]
    assert painted(three, "rollout") != before[1]
    check_row(three, 0, None, 0)
    model = sample_model().model.eval()
    with torch.no_grad():
        layer = model.encode(sample_images(4).images[3:], layers=[0]).layers[0]
        scores = model.head(layer.pooled)[0].softmax(dim=0)
    said = three.get_attribute("#depth", "aria-valuetext")
    assert said == f"layer 1 of 2: {int(scores.argmax())}, {percent(scores.max())}"
    three.keyboard.press("ArrowRight")
    wait_until(three, "vitrail.inside.result.layer === 1")
    assert len(asked) == 1  # the first answer is still there
    assert painted(three, "attention") == before[0]
    three.locator("#lens button").first.click()
    wait_until(three, "vitrail.inside.result.layer === 0")


def test_slider_works_while_an_image_is_sent(three):
    held = []
    three.route("**/v1/explain?layer=1*", lambda route: held.append(route))
    three.locator("#examples button").nth(7).click()
    for _ in range(PATIENCE * 40):
        if held:
            break
        three.wait_for_timeout(25)
    three.locator("#lens button").first.click()
    wait_until(three, "vitrail.layers.has(0)")
    held[0].continue_()
    wait_for_answer(three, "digit 7")
    wait_until(three, "vitrail.inside.result.layer === 0")
    assert three.inner_text("#depth-words") == "layer 1 of 2"
    assert three.inner_text("#attention-words").startswith("In layer 1,")


def test_rollout_equals_the_figure(three):
    shares = np.array(three.evaluate("Array.from(vitrail.inside.relevance)")).reshape(2, 7, 7)
    wanted = rollout.compute(sample_model().model, sample_images(4).images[3:]).maps[0, 0]
    np.testing.assert_allclose(shares[1], wanted, atol=1e-6)
    best = int(wanted.argmax())
    words = three.inner_text("#rollout-words")
    assert f"row {best // 7 + 1}, column {best % 7 + 1} contributes most: {percent(wanted.max())}" in words


def test_positions_filters_and_card(sample):
    found = positions.compute(sample_model().model)
    near = found.similarity[24].copy()
    near[24] = -2
    best = int(near.argmax())
    words = (
        f"Row 4, column 4 is most similar to row {best // 7 + 1}, column {best % 7 + 1} ({near[best]:.2f})."
    )
    assert sample.inner_text("#positions-words") == words
    canvas = sample.locator("#positions-map canvas.patches")
    canvas.hover(position={"x": 3, "y": 3})
    assert sample.inner_text("#positions-words").startswith("Row 1, column 1 is most similar to")
    assert sample.locator("#tiles canvas").count() == 16
    assert "64 filters" in sample.inner_text("#filters-caption")
    card = sample.inner_text("#facts")
    for words in ("License\nunknown", "accuracy: 0.9663", "105,098 parameters", "7 × 7 of 4 × 4 pixels"):
        assert words in card
    assert "pixels / 255" in card
    assert "16,777,216 bytes" in card
    assert sample.title() == "mnist: vitrail"


def test_hover_over_positions_updates_the_maps(three):
    three.locator("#positions-map canvas.patches").hover(position={"x": 3, "y": 3})
    assert three.evaluate("vitrail.inside.token") == 1
    check_row(three, 1, None, 1)


# ---- without a mouse, without motion, on a phone ---------------------------------------------------------


def test_keyboard_only(sample):
    names = []
    for _ in range(12):
        sample.keyboard.press("Tab")
        names.append(
            sample.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')")
        )
    assert names[:4] == ["pick", "digit 0", "digit 1", "digit 2"]
    sample.keyboard.press("Shift+Tab")
    sample.keyboard.press("Enter")
    wait_for_answer(sample, names[10])
    sample.locator("#attention-map canvas.patches").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowDown"):
        sample.keyboard.press(key)  # the first one goes to the first patch
    assert "the patch in row 2, column 2 attends most" in sample.inner_text("#attention-words")
    sample.keyboard.press("End")
    sample.keyboard.press("ArrowRight")  # there is nothing further on
    assert "the patch in row 2, column 7 attends most" in sample.inner_text("#attention-words")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert sample.evaluate(outline) == "solid"


def test_accessible_names_and_live_region(three):
    nameless = three.evaluate(
        "() => [...document.querySelectorAll('button, input, canvas, img')].filter(one => one.checkVisibility())"
        ".filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim() || one.alt"
        " || one.closest('button, [aria-hidden]')))"
        ".map(one => one.outerHTML)"
    )
    assert nameless == []
    assert three.get_attribute("#says", "role") == "status"
    assert three.get_attribute("#trouble", "role") == "alert"
    assert three.get_by_role("slider", name="After").count() == 1
    assert three.get_by_role("application", name="Attention. Arrow keys").count() == 1


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_patch_animation_respects_reduced_motion(motion, browser, digits_served):
    watched = Watched(browser, digits_served, reduced_motion=motion)
    page = watched.page
    wait_until(page, "vitrail.inside !== null")
    page.evaluate(
        """() => {
            window.seen = [];
            const paint = vitrail.inside.constructor.prototype.paintCut;
            vitrail.inside.paintCut = function () { seen.push(this.open); return paint.call(this); };
        }"""
    )
    page.locator("#examples button").nth(3).click()
    wait_for_answer(page, "digit 3")
    wait_until(page, "seen.at(-1) === 1")
    openings = page.evaluate("seen")
    assert openings == sorted(openings)
    assert (set(openings) == {1}) == (motion == "reduce")
    watched.close()


def luminance(color):
    parts = np.array([float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]]) / 255
    parts = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(parts @ [0.2126, 0.7152, 0.0722])


CONTRASTS = """() => {
    const ground = (one) => {
        for (; one; one = one.parentElement) {
            const found = getComputedStyle(one).backgroundColor;
            if (found !== "rgba(0, 0, 0, 0)") return found;
        }
    };
    const written = [...document.querySelectorAll("body *")].filter(one => one.checkVisibility()
        && [...one.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()));
    return written.map(one => [one.outerHTML.slice(0, 90), getComputedStyle(one).color, ground(one)]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_layout_and_contrast(scheme, browser, digits_served):
    narrow = dict(viewport={"width": 360, "height": 700}, has_touch=True, color_scheme=scheme)
    watched = Watched(browser, digits_served, **narrow)
    page = watched.page
    wait_until(page, "vitrail.inside !== null")
    hand_over(page, "drop", f"{'long' * 60}.png", png(digit(3)[..., 0]))
    wait_until(page, "vitrail.inside.result !== null")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator("#attention-map canvas.patches").tap(position={"x": 5, "y": 5})
    assert "the patch in row 1, column 1" in page.inner_text("#attention-words")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.05) == (scheme == "dark")
    hand_over(page, "drop", None)
    wait_until(page, "!document.getElementById('trouble').hidden")
    faint = []
    for html, ink, ground in page.evaluate(CONTRASTS):
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        if (light + 0.05) / (dark + 0.05) < 4.5:
            faint.append((html, ink, ground))
    assert faint == []
    watched.close()


# ---- what goes wrong -------------------------------------------------------------------------------------


def trouble(page):
    wait_until(page, "!document.getElementById('trouble').hidden")
    return page.inner_text("#trouble-words")


def test_refused_files(opened):
    page, served = opened(predictor_of(), body=4000, pixels=5000)
    wait_until(page, "vitrail.inside !== null")
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    asked = []
    page.on("request", lambda request: asked.append(request.method))
    hand_over(page, "drop", "large.png", png(noise))
    assert "limit is 0.0 MiB, and “large.png” has" in trouble(page)
    hand_over(page, "drop", "empty.png")
    assert "“empty.png” is empty" in trouble(page)
    assert "POST" not in asked  # neither was sent
    flat = np.zeros((24, 24, 3), np.uint8)
    hand_over(page, "drop", "flat.png", png(flat))
    wait_for_answer(page, "flat.png")
    check_answer(page, served.predictor, flat)
    assert not page.is_visible("#trouble")
    hand_over(page, "drop", "words.png", b"these are words")
    assert "not an image" in trouble(page)
    assert page.inner_text("#label") == "No prediction"  # what stood there was another image's
    assert not page.is_visible("#inside")
    assert not page.is_visible("#again")
    hand_over(page, "drop", "wide.png", png(np.zeros((80, 80, 3), np.uint8)))
    wait_until(page, "document.getElementById('trouble-words').textContent.includes('0.005 megapixels')")


def test_retry_when_the_server_is_busy(opened):
    page, served = opened(predictor_of(), queue=4)
    wait_until(page, "vitrail.inside !== null")
    served.take_places(4)
    page.locator("#examples button").first.click()
    wait_until(page, "document.getElementById('says-words').textContent.includes('busy')")
    served.take_places(-4)
    wait_for_answer(page, "rose window")
    assert not page.is_visible("#trouble")
    served.take_places(4)
    page.locator("#examples button").nth(1).click()
    assert "try again in a moment" in trouble(page)
    served.take_places(-4)
    page.click("#again")
    wait_for_answer(page, "sunset")
    assert not page.is_visible("#trouble")


def test_server_disconnect_and_return(opened):
    predictor = predictor_of()
    page, served = opened(predictor)
    wait_until(page, "vitrail.inside !== null")
    served.stop()
    page.locator("#examples button").first.click()
    assert "does not respond" in trouble(page)
    again = Served(predictor, port=int(served.address.rpartition(":")[2]))
    page.click("#again")
    wait_for_answer(page, "rose window")
    again.stop()


def test_token_is_requested_and_stored_for_the_tab(opened):
    secret = "a-long-enough-secret"
    page, _ = opened(predictor_of(), token=secret)
    for given, shown in (("not the right one at all", True), ("“in clever quotes”", True), (secret, False)):
        wait_until(page, "!document.getElementById('token-form').hidden")
        page.fill("#token", given)
        page.keyboard.press("Enter")
        if shown:
            wait_until(page, "document.getElementById('token-words').textContent.includes('rejected')")
    wait_until(page, "vitrail.inside !== null")
    assert not page.is_visible("#token-form")
    page.locator("#examples button").first.click()  # the examples came with the token, too
    wait_for_answer(page, "rose window")
    page.reload()
    wait_until(page, "vitrail.inside !== null")
    assert not page.is_visible("#token-form")
    assert secret not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")


# ---- other models, and what others wrote -------------------------------------------------------------------

HOSTILE = [
    *("<img src=x onerror=alert(1)>", "\"'><script>alert(2)</script>", "a\u202eb", "שלום", "&lt;"),
    *("very long " * 40, "x" * 3000, "javascript:alert(3)"),
]


def test_labels_and_names_are_escaped(opened):
    card = Card(name="</title><b>x", license="<script>alert(4)</script>", metrics={"<i>accuracy": 0.5})
    predictor = predictor_of(HOSTILE, card, classes=8)
    page, _ = opened(predictor, context={"viewport": {"width": 360, "height": 700}})
    wait_until(page, "vitrail.inside !== null")
    name = "<img src=x onerror=alert(5)>\u202e.png"
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        hand_over(page, "drop", name, png(pixels))
        wait_for_answer(page, r"<img src=x onerror=alert(5)>\u202e.png")
        top = [label.replace("\u202e", r"\u202e") for label, _ in predictor(pixels).top(5)]
        cut = [label if len(label) <= 300 else f"{label[:300]}…" for label in top]
        assert page.locator("#bars .label").all_text_contents() == cut
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for one in ("#lens button", "#bars li", "#headline"):  # long words do not push the rest away
            assert page.locator(one).first.bounding_box()["height"] < 100
    assert page.inner_text("#model-name") == "</title><b>x"
    assert page.title() == "</title><b>x: vitrail"
    card = page.inner_text("#facts")
    assert "<script>alert(4)</script>" in card
    assert "<i>accuracy: 0.5" in card
    assert HOSTILE[0] in card
    assert page.locator("main b, main i:not(.chips i), main script, main a").count() == 0
    assert page.locator("main img:not(#preview, #examples img)").count() == 0
    assert page.evaluate("[...document.querySelectorAll('[style*=url], [onerror]')].length") == 0


def test_unsure_prediction(opened):
    metrics = {"temperature": 1.0, "threshold": 0.999}
    page, served = opened(predictor_of(card=Card(metrics=metrics)))
    page.locator("#examples button").first.click()
    wait_for_answer(page, "rose window")
    wanted = served.predictor(Image.open(io.BytesIO(built_in(3)[0].data)))
    assert wanted.unsure
    assert page.inner_text("#label") == "Not sure"
    assert f"highest score is {percent(wanted.score)}" in page.inner_text("#says-words")
    assert page.locator("#bars .label").all_inner_texts() == [label for label, _ in wanted.top(5)]


def test_model_without_classes_prefix_or_positions(opened):
    page, _ = opened(predictor_of(classes=0, class_token=False, pool="mean", position="none", depth=1))
    page.locator("#examples button").first.click()
    wait_for_answer(page, "rose window")
    assert page.inner_text("#label") == "No classes"
    assert "no classes" in page.inner_text("#model-words")
    assert "no position" in page.inner_text("#no-positions")
    assert "the patch in row 2, column 2 attends most" in page.inner_text("#attention-words")
    assert not page.locator("#attention-map .chips").is_visible()


def test_non_square_images_with_registers(opened):
    page, _ = opened(predictor_of(size=(16, 36), patch=(8, 12), registers=2, pool="attention"))
    page.locator("#examples button").first.click()
    wait_for_answer(page, "rose window")
    assert page.locator("#attention-map .chips button").count() == 3
    canvas = page.locator("#attention-map canvas.patches")
    size = canvas.bounding_box()
    assert size["width"] / size["height"] == pytest.approx(36 / 16, rel=0.02)
    canvas.hover(position={"x": size["width"] * 0.9, "y": size["height"] * 0.9})
    assert "row 2, column 3 attends most" in page.inner_text("#attention-words")


def test_model_without_attention_weights(opened):
    predictor = predictor_of()
    predictor.bundle = None  # as that of an ONNX file
    page, _ = opened(predictor)
    wait_until(page, "document.getElementById('examples').childElementCount === 5")
    page.locator("#examples button").nth(2).click()
    wait_until(page, "document.getElementById('bars').childElementCount === 5")
    check_answer(page, predictor, Image.open(io.BytesIO(built_in(3)[2].data)))
    for name in ("inside", "positions", "filters"):
        assert "ONNX" in page.inner_text(f"#no-{name}")
    assert not page.is_visible(".figures")


def test_content_security_policy(browser, digits_served):
    watched = Watched(browser, digits_served)
    stopped = watched.page.evaluate(
        """async () => {
            const stopped = [];
            document.addEventListener("securitypolicyviolation", event => stopped.push(event.effectiveDirective));
            await fetch("https://elsewhere.invalid/").catch(() => 0);
            const script = document.body.appendChild(document.createElement("script"));
            script.textContent = "window.hit = true";
            const button = document.body.appendChild(document.createElement("button"));
            button.setAttribute("onclick", "window.hit = true");
            button.click();
            await new Promise(done => setTimeout(done, 50));
            return [...stopped, window.hit ?? "no hit"];
        }"""
    )
    assert stopped == ["connect-src", "script-src-elem", "script-src-attr", "no hit"]
    watched.context.close()
