"""Lab `encoder-decoder`: a grammar that is what it says, three ways to translate, and who looks where."""

import json

import pytest
import torch

from vitrail.labs import encoder_decoder
from vitrail.labs.encoder_decoder import SETTINGS, WAYS, Setting, Translator, judge, learn, looks, right
from vitrail.labs.grammar import BEGIN, END, PAD, SOURCE, TARGET, corpus, phrases, sentences
from vitrail.labs.trial import one_thread


@pytest.fixture(scope="module")
def texts():
    return corpus(600, 60)


@pytest.fixture(scope="module")
def every():
    return sentences()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    place = tmp_path_factory.mktemp("encoder")
    with one_thread():
        torch.manual_seed(0)
        found = encoder_decoder.run(place, "small")
    assert list(place.iterdir()) == []
    return found


def test_small_run(result):
    scores = result.numbers["right"]
    assert list(scores) == list(WAYS)
    assert result.n == SETTINGS["small"].seeds == len(scores["encoder"])
    assert max(scores["no source"]) <= 0.02  # nobody guesses one sentence of a hundred thousand
    assert result.number > 0.5
    assert result.verdict.word in ("holds", "holds if", "does not hold")
    assert "nan" not in result.sentence
    json.dumps(result.as_json())
    spread = result.numbers["parameters"].values()
    assert max(spread) < 1.35 * min(spread)  # no way has many more to learn with


def test_judge_both_ways():
    good, bad = [0.98, 0.99, 1.0], [0.1, 0.2, 0.15]
    worse = [0.9, 0.91, 0.92]
    assert judge({"encoder": good, "source first": good, "no source": [0.0] * 3}).word == "holds if"
    assert str(judge({"encoder": good, "source first": bad, "no source": [0.0] * 3})) == "holds"
    assert str(judge({"encoder": good, "source first": worse, "no source": [0.0] * 3})) == "holds"
    wide = [0.2, 0.99, 0.99]  # worse, but not surely
    assert judge({"encoder": good, "source first": wide, "no source": [0.0] * 3}).word == "holds if"
    assert "do not translate" in str(judge({"encoder": bad, "source first": good, "no source": [0.0] * 3}))
    assert "not needed" in str(judge({"encoder": good, "source first": good, "no source": good}))


# ---- the grammar ----------------------------------------------------------------------------


def test_sentences_are_translated(every):
    known = {one.source: one for one in every}
    assert len(known) == len(every) == len(phrases()) ** 2 * 4 == 102_400

    def said(source):
        return " ".join(known[tuple(source.split())].target)

    assert said("the small dog saw a black cow") == "le chien petit une vache noire voyait"
    assert said("some cows heard the dog") == "des vaches le chien entendaient"
    assert said("a hen followed the green mice") == "une poule les souris vertes suivait"


def test_origins_point_at_the_word_translated(every):
    one = next(one for one in every if " ".join(one.source) == "the small dog saw a black cow")
    pairs = [(word, one.source[place]) for word, place in zip(one.target, one.origin, strict=True)]
    assert pairs[1:3] == [("chien", "dog"), ("petit", "small")]
    assert pairs[3:] == [("une", "a"), ("vache", "cow"), ("noire", "black"), ("voyait", "saw")]
    assert all(len(one.origin) == len(one.target) == len(one.source) for one in every)


def test_what_is_held_out_was_never_seen(texts):
    assert not {one.source for one in texts.train} & {one.source for one in texts.held_out}
    assert not {one.target for one in texts.train} & {one.target for one in texts.held_out}
    words = {word for one in texts.train for word in (*one.source, *one.target)}
    assert {word for one in texts.held_out for word in (*one.source, *one.target)} <= words
    assert texts.words[:3] == [PAD, BEGIN, END]


def test_sentences_as_numbers(texts):
    sources, targets = texts.numbers(texts.held_out)
    assert sources.shape == (60, SOURCE)
    assert targets.shape == (60, TARGET)
    for one, source, target in zip(texts.held_out, sources.tolist(), targets.tolist(), strict=True):
        assert [texts.words[n] for n in source if n] == list(one.source)
        assert [texts.words[n] for n in target if n] == [*one.target, END]


# ---- the three ways -------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_who_is_told_the_source_and_nobody_the_words_to_come(texts, way):
    torch.manual_seed(0)
    model = Translator(way, len(texts.words), 32, 1).eval()
    sources, targets = texts.numbers(texts.held_out)
    with torch.no_grad():
        said = model(sources, targets)
        other = model(sources.flip(0), targets)
        later = targets.clone()
        later[:, 4:] = 5
        ahead = model(sources, later)
    assert said.shape == (60, TARGET, len(texts.words))
    assert torch.equal(said, other) == (way == "no source")
    assert torch.equal(said[:, :5], ahead[:, :5])  # the logits at 4 are of the words before it
    assert not torch.equal(said[:, 5:], ahead[:, 5:])


def test_greedy_words_are_the_likeliest(texts):
    torch.manual_seed(0)
    for way in WAYS:
        model = Translator(way, len(texts.words), 32, 1).eval()
        sources, _ = texts.numbers(texts.held_out[:5])
        written = model.translate(sources)
        assert written.shape == (5, TARGET)
        with torch.no_grad():
            assert torch.equal(model(sources, written).argmax(dim=-1), written)


def test_right_is_every_word_up_to_the_end(texts, monkeypatch):
    model = Translator("encoder", len(texts.words), 32, 1)
    _, targets = texts.numbers(texts.held_out)
    after = torch.where(targets == 0, 7, targets)  # whatever comes after the end
    monkeypatch.setattr(model, "translate", lambda sources: after)
    assert right(model, texts) == 1
    slip = after.clone()
    slip[0, 2] = 1
    monkeypatch.setattr(model, "translate", lambda sources: slip)
    assert right(model, texts) == pytest.approx(59 / 60)


def test_the_head_that_follows_the_words(texts, monkeypatch):
    """Weights made by hand: head 1 of block 0 looks at every word's origin, all others at word 0."""
    weights = torch.zeros(2, len(texts.held_out), 4, TARGET, SOURCE)
    weights[..., 0] = 0.5
    for n, one in enumerate(texts.held_out):
        for t, origin in enumerate(one.origin):
            weights[0, n, 1, t, origin] = 0.6
    monkeypatch.setattr(encoder_decoder, "looks", lambda model, source, target: weights)
    found = encoder_decoder.alignment(None, texts)
    assert (found.block, found.head, found.share) == (0, 1, 1.0)


def test_cross_attention_is_recorded(texts):
    with one_thread():
        model = learn("encoder", texts, Setting(32, 2, 2, 16, (1e-3,), 1, 600, 60), 1e-3, 0)
    weights = looks(model, *texts.numbers(texts.held_out))
    assert weights.shape == (2, 60, 4, TARGET, SOURCE)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(()), atol=1e-5)
