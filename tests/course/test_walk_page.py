"""The page of a walk in a real browser, its equations as MathML, and its numbers."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch

import vitrail as vt
from tests.support.browser import needs_chromium
from tests.support.models import add_noise
from tests.support.read_pages import HOSTILE_NAMES, ParsedPage, check_safe
from vitrail.views.sample import SAMPLE_FILE
from vitrail.views.walk import token_name, walk
from vitrail.views.walk import walk_page as page
from vitrail.views.walk.encoder_stages import Recording
from vitrail.views.walk.mathml import as_mathml, text_with_mathml
from vitrail.views.walk.overview import paper_equations, top_classes
from vitrail.views.walk.stage import finite_or_none, format_number, summarize

FIELDS = dict(depth=3)


def build(image="cat.png", labels=None, **fields):
    """A model, an image, and the page of its walk: block 1, head 1, token 3."""
    model = add_noise(vt.create("mu/8", **{**FIELDS, **fields}))
    pixels = torch.rand(model.config.input_shape)
    recording = Recording(model, pixels, range(model.config.depth))
    facts = {"model": "mu/8", "weights": "Random weights.", "image": image, "block": 1, "head": 1, "token": 3}
    facts["token_name"] = token_name(model.config, 3)
    answer = top_classes(recording.stages(1, 1, 3), labels)
    return model, pixels, page.walk_page(recording, facts, answer)


@pytest.mark.parametrize("fields", [{}, dict(channels=1), dict(embedding="conv", block="post-norm")])
def test_every_stage_of_every_block_and_head_is_on_the_page(fields):
    model, pixels, text = build(**fields)
    read = ParsedPage(text)
    articles = [one for one in read.all("article") if "hidden" not in one]
    stages = [
        stage for stage in walk(model, pixels, block=1, head=1, token=3)
        if not re.match(r"blocks\.[02]\.", stage.name)
    ]  # fmt: skip
    assert len(articles) == len(stages)
    found = {one["alttext"] for one in read.all("math")}
    for block in range(3):
        for head in range(model.config.heads):
            for stage in walk(model, pixels, block=block, head=head, token=3):
                if stage.name.startswith(f"blocks.{block}.") or not stage.name.startswith("blocks."):
                    assert stage.equation in found
                    assert stage.name in read.text
    assert set(paper_equations(model.config).values()) <= found
    assert "count from 0" in read.text
    check_safe(read, script=True)


def test_a_model_with_too_many_weights_shows_one_block(monkeypatch):
    monkeypatch.setattr(page, "_MAX_WEIGHTS", 100)
    _, _, text = build()
    read = ParsedPage(text)
    assert {one.get("data-block") for one in read.all("article")} == {None, "1"}
    assert not read.all("script")
    assert "as chosen by --block, --head and --token" in read.text


def test_pixels_look_as_before_mean_and_std():
    """A black image stays black."""
    shown = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 3)
    preprocess = vt.load(SAMPLE_FILE).preprocess
    normalized = (shown / 255 - preprocess.mean[0]) / preprocess.std[0]
    assert list(page.pixels_image(normalized, preprocess).tobytes()) == [0, 51, 255]
    assert list(page.pixels_image(torch.tensor([[[-1.0, 0.0, 1.0]]]), None).tobytes()) == [0, 128, 255]


def test_maps_with_negative_values_are_white_at_zero():
    image, ends = page._heat_map(torch.tensor([[-1.0, 0.0, 4.0]]), 8)
    assert ends == (-4, 4)
    red, green, blue = image.convert("RGB").getpixel((1, 0))
    assert min(red, green, blue) > 240
    assert page._heat_map(torch.tensor([[0.0, 2.0]]), 8)[1] == (0, 2)
    assert build()[2].count('class="scale signed"') > 10


def test_x_class_and_E_pos_are_shown_alone():
    model, pixels, text = build()
    stages = {stage.name: stage for stage in walk(model, pixels)}
    assert torch.equal(stages["x_class"].tensor, model.prefix)
    assert torch.equal(stages["prefix"].tensor + stages["E_pos"].tensor, stages["position"].tensor)
    assert {"x_class", "E_pos"} <= set(ParsedPage(text).text.split())


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_are_text(name):
    _, _, text = build(name, labels=[name] * 10, classes=10)
    read = ParsedPage(text)
    check_safe(read, script=True)
    assert len(read.all("script")) == 2
    assert "<b>" not in text
    assert "onerror" not in text.replace("onerror=alert(1)&gt;", "")


# ---- in the browser -------------------------------------------------------------------------


def percent(value):
    return f"{100 * float(value):.{1 if value < 0.0995 else 0}f} %"


@needs_chromium
def test_block_head_and_token_are_chosen_in_the_page(browser, tmp_path):
    model, pixels, text = build()
    (tmp_path / "walk.html").write_text(text)
    opened = browser.new_page()
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text))
    opened.goto((tmp_path / "walk.html").as_uri())
    with torch.no_grad(), vt.record(model, "blocks.*.attention.weights", "blocks.*.out") as tape:
        model(pixels[None])
    for block, head, token in [(1, 1, 3), (2, 0, 0), (0, 1, 7)]:
        for name, value in (("block", block), ("head", head), ("token", token)):
            opened.select_option(f"#choose-{name}", str(value))
        row = tape[f"blocks.{block}.attention.weights"][0, head, token]
        found = opened.evaluate("at => window.walk.attention(at)", dict(block=block, head=head, token=token))
        assert torch.allclose(torch.tensor(found), row, atol=1e-4)
        best = 1 + int(row[1:].argmax())
        named = "itself" if best == token else token_name(model.config, best)
        before = "itself" if token == 0 else "the class token"
        words = opened.inner_text("#words")
        assert (
            f"attends to {before} with {percent(row[0])} and to all patches with {percent(row[1:].sum())}. "
            in words
        )
        assert opened.inner_text("#top li >> nth=0").startswith(f"{named}: ")
        shown = opened.evaluate(
            "() => [...document.querySelectorAll('article')].filter(one => one.checkVisibility())"
            ".map(one => [one.querySelector('h3').textContent, one.dataset.head])"
        )
        wanted = [
            stage.name for stage in walk(model, pixels, block=block, head=head, token=token)
            if stage.name.startswith(f"blocks.{block}.") or not stage.name.startswith("blocks.")
        ]  # fmt: skip
        assert [name for name, _ in shown] == wanted
        assert {of for _, of in shown} == {None, str(head)}
    before = tape["blocks.1.out"][0, 0]
    opened.select_option("#choose-block", "2")
    opened.select_option("#choose-token", "0")
    words = opened.inner_text("article[data-block='2'][data-of='norm1.before']")
    assert f"mean {float(before.mean()):.4g}" in words.replace("e-0", "e-")
    image = opened.locator("#map-image")
    box = image.bounding_box()
    image.click(position={"x": box["width"] * 0.9, "y": box["height"] * 0.1})
    assert opened.evaluate("document.getElementById('choose-token').value") == "4"  # the last patch of row 0
    assert errors == []
    opened.close()


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(scheme, browser, tmp_path):
    (tmp_path / "walk.html").write_text(build()[2])
    opened = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    opened.goto((tmp_path / "walk.html").as_uri())
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.locator("article:not([hidden]) mfrac").first.is_visible()  # typeset by the browser
    opened.close()


@needs_chromium
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(class_token=False, pool="mean"), r"attends to all patches with 100 %\."),
        (
            dict(registers=1),
            r"attends to the class token with \S+ %, register 0 with \S+ % and to all patches",
        ),
        (dict(registers=6), r"attends to the 7 tokens before the patches with \S+ % and to all patches"),
    ],
)
def test_the_tokens_before_the_patches_are_named(browser, tmp_path, fields, words):
    (tmp_path / "walk.html").write_text(build(**fields)[2])
    opened = browser.new_page()
    opened.goto((tmp_path / "walk.html").as_uri())
    opened.select_option("#choose-token", "9")
    assert re.search(words, opened.inner_text("#words"))
    opened.close()


# ---- equations ------------------------------------------------------------------------------


def plain(equation):
    """The text of the MathML of an equation, in which fractions have a slash."""
    root = ET.fromstring(as_mathml(equation))
    assert root.attrib["alttext"] == equation
    return "".join(root.itertext())


@pytest.mark.parametrize(
    ("equation", "text"),
    [
        ("A = softmax(q k^T / sqrt(d))", "A=softmax(qk⊤d)"),
        ("z'_1 = MSA + z_0", "z1′=MSA+z0"),
        ("x in R^(3 x 32 x 32)", "x∈ℝ3×32×32"),
        ("q = R(LN(z_0) U_q + b_q)", "q=R(LN(z0)Uq+bq)"),
        ("x in {0, ..., 64}^6", "x∈{0,…,64}6"),
        ("s = e + E_pos[0 ... 4]", "s=e+Epos[0…4]"),
        ("m = a lambda * (h W_a + b_a)", "m=aλ⊙(hWa+ba)"),
        ("mu = mean(z^t), var = mean((z^t - mu)^2)", "μ=mean(zt),σ²=mean((zt−μ)2)"),
        ("H = [SA_0; ...; SA_7]", "H=[SA0;…;SA7]"),
        ("S = 0.3 q k^T + p", "S=0.3qk⊤+p"),
    ],
)
def test_equations_become_mathml(equation, text):
    assert plain(equation) == text


def test_an_exponent_stands_over_the_index():
    x_p, z_L = (as_mathml(text) for text in ("x_p^1", "LN(z_L^0)"))
    assert "<msubsup><mi>x</mi><mi>p</mi><mn>1</mn></msubsup>" in x_p
    assert "<msubsup><mi>z</mi><mi>L</mi><mn>0</mn></msubsup>" in z_L
    assert "<msup>" not in x_p + z_L


def test_fonts_for_equations_are_named():
    assert '"DejaVu Math TeX Gyre", math;' in build()[2]


def test_names_in_text_become_mathml_and_the_rest_stays_text():
    text = text_with_mathml("z_ℓ of <b> & z'_0, not block_0: E_pos.")
    root = ET.fromstring(f"<p>{text}</p>")
    found = [one.attrib["alttext"] for one in root if one.tag.endswith("math")]
    assert found == ["z_ℓ", "z'_0", "E_pos"]
    assert "".join(root.itertext()).startswith("zℓ of <b> & z0′, not ")


def test_the_introduction_has_subscripts():
    intro = re.search(r"<header>.*?</header>", build()[2], re.S)[0]
    assert re.findall(r'alttext="([^"]*)"', intro) == ["z_ℓ", "z_0", "z_1"]
    assert "<msub><mi>z</mi><mi>ℓ</mi></msub>" in intro
    assert "z_" not in re.sub(r"<[^>]*>", "", intro)


@pytest.mark.parametrize("block", ["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"])
@pytest.mark.parametrize("pool", ["class", "mean", "mean-all", "class-mean", "attention", "flatten"])
def test_the_four_equations_are_typeset_for_every_kind_of_model(block, pool):
    config = vt.preset("mu/8", block=block, pool=pool, pool_norm="after" if pool == "mean" else "before")
    equations = paper_equations(config)
    assert sorted(equations) == [1, 2, 3, 4]
    assert all(plain(text) for text in equations.values())


def test_the_four_equations_of_the_paper():
    assert list(paper_equations(vt.preset("B/16")).values()) == [
        "z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos",
        "z'_ℓ = MSA(LN(z_{ℓ−1})) + z_{ℓ−1}",
        "z_ℓ = MLP(LN(z'_ℓ)) + z'_ℓ",
        "y = LN(z_L^0)",
    ]


def test_stages_know_their_equation():
    model = vt.create("mu/8", depth=2, classes=3)
    numbers = {stage.name: stage.number for stage in walk(model, torch.rand(3, 32, 32))}
    assert numbers["pixels"] == numbers["embed"] == 1
    assert numbers["blocks.0.norm1"] == numbers["blocks.0.attention.q"] == numbers["blocks.0.residual1"] == 2
    assert numbers["blocks.0.norm2"] == numbers["blocks.0.out"] == numbers["blocks.1.out"] == 3
    assert numbers["encoded"] == numbers["pooled"] == 4
    assert numbers["logits"] is numbers["probabilities"] is None


# ---- numbers --------------------------------------------------------------------------------


def test_the_answer_is_the_most_likely_classes():
    model = add_noise(vt.create("mu/8", classes=4))
    pixels = torch.rand(3, 32, 32)
    with torch.no_grad():
        scores = model.eval()(pixels[None])[0]
    stages = walk(model, pixels)
    found = top_classes(stages, ["a", "b", "c", "d"], count=2)
    order = scores.argsort(descending=True)[:2]
    assert [label for label, _ in found] == ["abcd"[index] for index in order]
    assert found[0][1] == pytest.approx(float(scores.softmax(0).max()), rel=1e-5)
    sigmoid = top_classes(stages, None, "sigmoid")
    assert sigmoid[0] == (f"class {order[0]}", pytest.approx(float(scores.sigmoid().max()), rel=1e-5))
    assert top_classes(walk(vt.create("mu/8", classes=0), pixels), None) == []


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0.1234567, "0.123"), (-0.000123456, "-1e-04"), (0.0, "0"), (12345.0, "1e+04")],
)
def test_numbers_are_at_most_seven_characters(number, text):
    assert format_number(number) == text


def test_summaries_have_no_nan():
    assert summarize(torch.tensor([1.0, float("nan")])) == dict.fromkeys(("mean", "std", "min", "max"))
    assert summarize(torch.tensor([1.0, 3.0])) == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert finite_or_none([[1.0, float("inf")], [2.0, float("nan")]]) == [[1.0, None], [2.0, None]]
