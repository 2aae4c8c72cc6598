"""Results at a Python prompt and in a notebook: one short line, and a small table of escaped text."""

import html.parser

import numpy as np
from PIL import Image

import vitrail as vt
from tests.support.models import add_noise
from tests.support.tiny_runs import SETTINGS, train, write_arrays, write_folder

HOSTILE = "<script>alert(1)</script>\n&\x1b[31m"


class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def bundle(classes, labels):
    config = vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=8, channels=3, classes=classes)
    return vt.Bundle(model=add_noise(vt.ViT(config)), labels=labels, card=vt.Card(name=HOSTILE))


def check(result, *texts):
    line, page = repr(result), Tags(result._repr_html_())
    assert len(line) < 600
    assert line.isprintable()
    assert line.startswith(f"<{type(result).__name__} ")
    assert page.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    for text in texts:
        assert text in line
        assert text in page.text


def test_a_bundle_names_a_few_of_a_thousand_labels():
    many = bundle(1000, [f"{HOSTILE} {number}" for number in range(1000)])
    check(many, "1,000: <script>", "width 12, depth 2", "(3, 8, 8)", "parameters")
    assert "\n" not in many._repr_html_()
    check(vt.Bundle(model=bundle(0, None).model), "(3, 8, 8)")


def test_predictions(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    file, missing = tmp_path / "<b>&.png", tmp_path / "<i>.png"
    Image.fromarray(pixels).save(file)
    missing.write_bytes(b"not an image")
    read, failed = vt.Predictor(bundle(3, [HOSTILE, "bee", "cat"]))([file, missing])
    check(read, "<b>&.png", "%", "embedding", "12 numbers")
    assert "array(" not in repr(read)
    check(failed, "<i>.png", "error")
    headless = vt.Predictor(bundle(0, None))(file)
    check(headless, "12 numbers")


def test_an_evaluation(tmp_path):
    write_folder(tmp_path / "data", each=3)
    (tmp_path / "data" / "ant" / "<u>.png").write_bytes(b"not an image")
    result = vt.evaluate(bundle(3, ["ant", "bee", "cat"]), tmp_path / "data")
    check(result, f"{result.metrics.top1:.2%}", "All 10 images", "could not be read")
    check(vt.evaluate(bundle(0, None), tmp_path / "data", probe=["knn"]), "best probe", "knn")


def test_a_run(tmp_path):
    run = train(write_arrays(tmp_path / "data.npz"), out=tmp_path / "<script>run", **SETTINGS)
    check(
        run,
        "<script>run",
        f"{run.best['val_accuracy']:.2%} on 30 held-out images",
        f"{run.best['epoch']} of 3",
    )
