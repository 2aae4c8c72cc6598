"""Lab `characters`: the slide's numbers, no look ahead, and a decoder that knows more than pairs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slide_003 import WHEN, XB, YB
from vitrail.errors import VitrailError
from vitrail.labs import characters
from vitrail.labs.characters import SETTINGS, as_on_the_slide, judge, lessons
from vitrail.labs.text import as_numbers, read
from vitrail.labs.trial import one_thread
from vitrail.model import Decoder, DecoderConfig

SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"
LESS, BETTER = [2.5, 2.6, 2.7], [2.0, 2.01, 2.02]


def run(place, data=None):
    with one_thread():
        torch.manual_seed(0)
        return characters.run(place, "small", data)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    place = tmp_path_factory.mktemp("characters")
    found = run(place)
    assert list(place.iterdir()) == []  # what is written is the frame's to write
    return found


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="needs tinyshakespeare.txt of ../shared/data")
def test_the_slides_rows_come_digit_for_digit():
    text = read(SHAKESPEARE)
    assert (len(text.numbers), len(text.kinds), text.known) == (1_115_394, 65, True)
    xb, yb = characters.first_batch(text.train)
    assert torch.equal(xb, XB)
    assert torch.equal(yb, YB)
    assert lessons(xb, yb)[:14] == WHEN.strip().splitlines()
    assert not as_numbers(text.write(text.numbers[1:]), "one character less").known


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="needs tinyshakespeare.txt of ../shared/data")
def test_the_slides_text_is_judged_by_its_rows(tmp_path, monkeypatch):
    """A decoder that hardly learns: the verdict then says so, and the rows are still the slide's."""
    short = replace(SETTINGS["small"], steps=2, seeds=2, sample=10)
    monkeypatch.setitem(characters.SETTINGS, "small", short)
    found = run(tmp_path, SHAKESPEARE)
    assert "The slide's rows come with its seed, 1337" in found.sentence
    assert found.numbers["xb"] == XB.tolist()
    assert str(found.verdict) == "does not hold: a trained decoder is no better than counts of pairs"
    monkeypatch.setattr(characters, "SEED", 1)
    found = run(tmp_path, SHAKESPEARE)
    assert "do not come" in found.sentence
    assert "not what its seed draws" in found.verdict.condition


def test_the_constants_are_the_slides():
    assert torch.equal(characters.XB, XB)
    assert torch.equal(characters.YB, YB)


def test_a_python_without_sources_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr("vitrail.labs.text.MODULES", ["argparse", "sys"])  # sys has no file
    with pytest.raises(VitrailError, match=r"Got a Python without it .*Give --data a text file"):
        read(None)


def test_small_run(result):
    assert result.n == 3
    low, high = result.interval
    assert low < result.number < high < result.numbers["bigram"] < result.numbers["uniform"]
    assert str(result.verdict).startswith("holds if the slide's rows are left out")
    assert result.sentence.startswith("The source of 9 modules of Python's library, ")
    assert result.numbers["change before"] == 0
    assert len(result.numbers["sample"]) == SETTINGS["small"].sample
    json.dumps(result.as_json())


def test_the_mask_table():
    weights = characters.mask_table()
    assert torch.equal(weights, as_on_the_slide())
    for row in range(8):
        assert weights[row, : row + 1].tolist() == pytest.approx([1 / (row + 1)] * (row + 1))
        assert weights[row, row + 1 :].eq(0).all()


def test_a_look_ahead_would_be_seen(monkeypatch):
    """The measure itself: with a mask that lets the next character through, there is a change."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=9, width=16, depth=1, heads=4, length=8)).eval()
    numbers = torch.randint(9, (64,))
    assert characters.change_before(model, numbers) == 0
    monkeypatch.setattr(
        "vitrail.model.decoder.causal_mask", lambda T, device: torch.ones(T, T, dtype=torch.bool).tril(1)
    )
    assert characters.change_before(model, numbers) > 0


def test_judge_both_ways():
    right, wrong = as_on_the_slide(), torch.full((8, 8), 1 / 8)
    assert str(judge(True, right, 0.0, BETTER, 2.4)) == "holds"
    assert judge(None, right, 0.0, BETTER, 2.4).word == "holds if"
    assert "its seed" in judge(False, right, 0.0, BETTER, 2.4).condition
    assert "table" in judge(True, wrong, 0.0, BETTER, 2.4).condition
    assert "before it" in judge(True, right, 1e-9, BETTER, 2.4).condition
    assert "counts of pairs" in judge(None, right, 0.0, LESS, 2.4).condition
    assert judge(True, right, 0.0, LESS, 2.65).word == "does not hold"  # the mean is below, not surely


def test_counts_of_pairs():
    """After a, b or c alike, and always a after those: ln 2 / 2 nats a character."""
    turning = as_numbers("abac" * 500, "made up")
    assert characters.bigram_loss(turning) == pytest.approx(math.log(2) / 2, abs=0.01)
    assert characters.bigram_loss(as_numbers("abc" * 400, "made up")) < 1e-3  # after, not before


def test_loss_of_a_decoder_that_knows_nothing():
    text = as_numbers("the quick brown fox. " * 60, "made up")
    model = Decoder(DecoderConfig(vocabulary=len(text.kinds), width=16, depth=1, heads=4, length=16)).eval()
    torch.nn.init.zeros_(model.head.weight)
    assert characters.held_out_loss(model, text.held_out) == pytest.approx(math.log(len(text.kinds)))


def test_text_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setitem(characters.SETTINGS, "small", replace(SETTINGS["small"], steps=60, sample=30))
    file = tmp_path / "own.txt"
    file.write_text("schöne Grüße, 5 $ und 世界\n" * 100, encoding="utf-8")
    found = run(tmp_path, file)
    assert found.sentence.startswith("own.txt, 2,500 characters of 19 kinds.")
    found.figure.savefig(tmp_path / "own.png")  # no warning for letters that the font lacks
    assert characters.plain("$世\tx") == "$??x"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"short", "A text must have 1,000 characters or more.* Got 5 of 5 kinds"),
        (b"a" * 2000, "Got 2,000 of 1 kinds"),
        (b"\xff\xfe" * 2000, r"reads a text file in UTF-8. Got .*own.txt \(UnicodeDecodeError\)"),
        (None, r"Got .*own.txt \(FileNotFoundError\). Give --data a text file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, says):
    if content is not None:
        (tmp_path / "own.txt").write_bytes(content)
    with pytest.raises(VitrailError, match=says):
        read(tmp_path / "own.txt")


def test_a_long_text_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.labs.text.MOST", 1500)
    (tmp_path / "long.txt").write_text("abc\n" * 1000)
    text = read(tmp_path / "long.txt")
    assert (len(text.numbers), text.name) == (1500, "long.txt, the first part")
