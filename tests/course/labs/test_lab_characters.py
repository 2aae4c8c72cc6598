"""Lab `characters`: the slide's numbers, the causal mask, and the bigram baseline."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.support.shared_data import shared
from tests.support.slide_003 import WHEN, XB, YB
from vitrail.base.errors import VitrailError
from vitrail.experiment.trial import one_thread
from vitrail_course.decoder import Decoder, DecoderConfig
from vitrail_course.labs import characters
from vitrail_course.labs.characters import SETTINGS, context_lines, slide_mask_weights
from vitrail_course.labs.text import encode_text, read_text

WORSE, BETTER = [2.5, 2.6, 2.7], [2.0, 2.01, 2.02]


def run(out, data=None):
    with one_thread():
        torch.manual_seed(0)
        return characters.run(out, "small", data)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("characters")
    result = run(out)
    assert list(out.iterdir()) == []  # files are written by `perform`
    return result


def test_slide_batch_is_reproduced():
    text = read_text(shared("data/tinyshakespeare.txt"))
    assert (len(text.ids), len(text.vocabulary), text.is_tinyshakespeare) == (1_115_394, 65, True)
    inputs, targets = characters.slide_batch(text.train)
    assert torch.equal(inputs, XB)
    assert torch.equal(targets, YB)
    assert context_lines(inputs, targets)[:14] == WHEN.strip().splitlines()
    assert not encode_text(text.decode(text.ids[1:]), "one character less").is_tinyshakespeare


def test_verdict_on_the_slides_text(tmp_path, monkeypatch):
    """With two steps the decoder is not better than bigrams, but the slide's batch is reproduced."""
    short = replace(SETTINGS["small"], steps=2, sample=10)
    monkeypatch.setitem(characters.SETTINGS, "small", short)
    data = shared("data/tinyshakespeare.txt")
    result = run(tmp_path, data)
    assert result.numbers["xb"] == XB.tolist()
    assert result.numbers["slide's batch reproduced"] is True
    monkeypatch.setattr(characters, "SLIDE_SEED", 1)
    result = run(tmp_path, data)
    assert result.numbers["slide's batch reproduced"] is False


def test_constants_are_those_of_the_slide():
    assert torch.equal(characters.SLIDE_INPUTS, XB)
    assert torch.equal(characters.SLIDE_TARGETS, YB)


def test_python_without_sources(monkeypatch):
    monkeypatch.setattr("vitrail_course.labs.text._MODULES", ["argparse", "sys"])  # sys has no file
    with pytest.raises(VitrailError, match=r"standard library.*--data a text file"):
        read_text(None)


@pytest.mark.slow
def test_small_run(result):
    assert result.n == 3
    low, high = result.interval
    assert low < result.number < high < result.numbers["bigram"] < result.numbers["uniform"]
    assert result.numbers["slide's batch reproduced"] is None
    assert result.setting.startswith("The source of 9 modules of Python's library, ")
    assert result.numbers["change of earlier logits"] == 0
    assert len(result.numbers["sample"]) == SETTINGS["small"].sample
    json.dumps(result.as_json())


def test_mask_weights():
    weights = characters.uniform_mask_weights()
    assert torch.equal(weights, slide_mask_weights())
    for row in range(8):
        assert weights[row, : row + 1].tolist() == pytest.approx([1 / (row + 1)] * (row + 1))
        assert weights[row, row + 1 :].eq(0).all()


def test_a_leaking_mask_is_detected(monkeypatch):
    """With a mask that lets the next character through, earlier logits change."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=9, width=16, depth=1, heads=4, length=8)).eval()
    ids = torch.randint(9, (64,))
    assert characters.measure_future_leak(model, ids) == 0
    monkeypatch.setattr(
        "vitrail_course.decoder.causal_mask", lambda T, device: torch.ones(T, T, dtype=torch.bool).tril(1)
    )
    assert characters.measure_future_leak(model, ids) > 0


def test_bigram_loss():
    """After a, b or c with equal probability, and always a after those: ln 2 / 2 nats per character."""
    alternating = encode_text("abac" * 500, "test")
    assert characters.bigram_loss(alternating) == pytest.approx(math.log(2) / 2, abs=0.01)
    assert characters.bigram_loss(encode_text("abc" * 400, "test")) < 1e-3  # after, not before


def test_loss_of_a_decoder_with_a_zero_head():
    text = encode_text("the quick brown fox. " * 60, "test")
    model = Decoder(
        DecoderConfig(vocabulary=len(text.vocabulary), width=16, depth=1, heads=4, length=16)
    ).eval()
    torch.nn.init.zeros_(model.head.weight)
    assert characters.mean_loss(model, text.eval_split) == pytest.approx(math.log(len(text.vocabulary)))


def test_user_text(tmp_path, monkeypatch):
    monkeypatch.setitem(characters.SETTINGS, "small", replace(SETTINGS["small"], steps=60, sample=30))
    file = tmp_path / "own.txt"
    file.write_text("schöne Grüße, 5 $ und 世界\n" * 100, encoding="utf-8")
    result = run(tmp_path, file)
    assert result.setting.startswith("own.txt, 2,500 characters;")
    result.figure.savefig(tmp_path / "own.png")  # no warning for characters missing in the font
    assert characters.printable_lines("$世\tx") == "$??x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", "at least 1,000 characters.* has 5 characters, 5 different"),
        (b"a" * 2000, "has 2,000 characters, 1 different"),
        (b"\xff\xfe" * 2000, r"text file in UTF-8.*own.txt .*\(UnicodeDecodeError\)"),
        (None, r"own.txt .*\(FileNotFoundError\); pass --data another file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    if content is not None:
        (tmp_path / "own.txt").write_bytes(content)
    with pytest.raises(VitrailError, match=message):
        read_text(tmp_path / "own.txt")


def test_long_text_is_truncated(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail_course.labs.text._MAX_LENGTH", 1500)
    (tmp_path / "long.txt").write_text("abc\n" * 1000)
    text = read_text(tmp_path / "long.txt")
    assert (len(text.ids), text.name) == (1500, "long.txt, the first part")
