"""Lab `encoder-decoder`: the grammar, the three variants, and the alignment of cross-attention."""

import json

import pytest
import torch

from vitrail.experiment.trial import one_thread
from vitrail_course.labs import encoder_decoder
from vitrail_course.labs.encoder_decoder import (
    SETTINGS,
    VARIANTS,
    TranslationSettings,
    Translator,
    cross_attention_weights,
    decide_verdict,
    sentence_accuracy,
    train_translator,
)
from vitrail_course.labs.grammar import (
    BEGIN,
    END,
    PAD,
    SOURCE_LENGTH,
    TARGET_LENGTH,
    build_corpus,
    phrases,
    sentences,
)


@pytest.fixture(scope="module")
def corpus():
    return build_corpus(600, 60)


@pytest.fixture(scope="module")
def all_sentences():
    return sentences()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("encoder")
    with one_thread():
        torch.manual_seed(0)
        result = encoder_decoder.run(out, "small")
    assert list(out.iterdir()) == []
    return result


@pytest.mark.slow
def test_small_run(result):
    scores = result.numbers["accuracy by training sentences"][4_000]
    assert list(scores) == list(VARIANTS)
    assert result.n + 1 == SETTINGS["small"].seeds == len(scores["encoder"])
    assert max(scores["no source"]) <= 0.02  # guessing one of a hundred thousand sentences
    assert result.number > 0.5
    assert "nan" not in result.sentence
    json.dumps(result.as_json())
    counts = result.numbers["parameters"].values()
    assert max(counts) < 1.35 * min(counts)  # no variant has many more parameters


def test_verdict_for_every_outcome():
    def verdict(encoder, prefix, without=(0.0, 0.0, 0.0)):
        """The first of four seeds chose the learning rate."""
        scores = {"encoder": encoder, "prefix": prefix, "no source": without}
        arms = {name: [0.5, *by_seed] for name, by_seed in scores.items()}
        return decide_verdict({"accuracy by training sentences": {"200": arms}, "held out": 500})

    good, worse, bad = [0.9, 0.91, 0.92], [0.7, 0.71, 0.72], [0.1, 0.2, 0.15]
    assert verdict(good, worse).word == "holds"
    noisy = verdict(good, [0.2, 0.99, 0.99])
    assert noisy.word == "partly"
    assert "Not clear: an encoder is better" in noisy.condition
    reversed_ = verdict(worse, good).condition.partition("Not true: ")[2]
    assert "an encoder is better than a decoder alone" in reversed_
    assert "Not true: encoder and decoder translate" in verdict(bad, worse).condition
    assert "Not true: a decoder without the source does not" in verdict(good, worse, good).condition


def test_variants_at_the_ceiling_are_not_told_apart():
    """All of 500 sentences, three times: no interval of zero width, and no verdict on the difference."""
    arms = {"encoder": [1.0] * 3, "prefix": [1.0] * 3, "no source": [0.0] * 3}
    verdict = decide_verdict({"accuracy by training sentences": {"1000": arms}, "held out": 500})
    assert verdict.word == "partly"
    assert "(100.0 [99.2, 100.0] %, n = 2, threshold 80 %)" in verdict.condition
    assert (
        "Not true: a decoder alone, with the source as a prefix, does not translate (100.0 ["
        in verdict.condition
    )
    assert "with 1,000 sentences (+0.0 [-0.6, +0.6] points, n = 2: both are above 99%)" in verdict.condition
    assert "(0.0 [0.0, 0.8] %, n = 2, threshold 5 %)" in verdict.condition


# ---- grammar --------------------------------------------------------------------------------


def test_translations(all_sentences):
    by_source = {sentence.source: sentence for sentence in all_sentences}
    assert len(by_source) == len(all_sentences) == len(phrases()) ** 2 * 4 == 102_400

    def logits(source):
        return " ".join(by_source[tuple(source.split())].target)

    assert logits("the small dog saw a black cow") == "le chien petit une vache noire voyait"
    assert logits("some cows heard the dog") == "des vaches le chien entendaient"
    assert logits("a hen followed the green mice") == "une poule les souris vertes suivait"


def test_origins_are_the_translated_words(all_sentences):
    sentence = next(
        sentence for sentence in all_sentences if " ".join(sentence.source) == "the small dog saw a black cow"
    )
    pairs = [(word, sentence.source[out]) for word, out in zip(sentence.target, sentence.origin, strict=True)]
    assert pairs[1:3] == [("chien", "dog"), ("petit", "small")]
    assert pairs[3:] == [("une", "a"), ("vache", "cow"), ("noire", "black"), ("voyait", "saw")]
    assert all(
        len(sentence.origin) == len(sentence.target) == len(sentence.source) for sentence in all_sentences
    )


def test_held_out_sentences_are_not_in_the_training_set(corpus):
    assert not {sentence.source for sentence in corpus.train} & {
        sentence.source for sentence in corpus.held_out
    }
    assert not {sentence.target for sentence in corpus.train} & {
        sentence.target for sentence in corpus.held_out
    }
    words = {word for sentence in corpus.train for word in (*sentence.source, *sentence.target)}
    assert {word for sentence in corpus.held_out for word in (*sentence.source, *sentence.target)} <= words
    assert corpus.vocabulary[:3] == [PAD, BEGIN, END]


def test_encoded_sentences(corpus):
    sources, targets = corpus.encode(corpus.held_out)
    assert sources.shape == (60, SOURCE_LENGTH)
    assert targets.shape == (60, TARGET_LENGTH)
    for sentence, source, target in zip(corpus.held_out, sources.tolist(), targets.tolist(), strict=True):
        assert [corpus.vocabulary[n] for n in source if n] == list(sentence.source)
        assert [corpus.vocabulary[n] for n in target if n] == [*sentence.target, END]


# ---- variants -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_depend_on_the_source_and_not_on_later_words(corpus, variant):
    torch.manual_seed(0)
    model = Translator(variant, len(corpus.vocabulary), 32, 1).eval()
    sources, targets = corpus.encode(corpus.held_out)
    with torch.no_grad():
        logits = model(sources, targets)
        other = model(sources.flip(0), targets)
        later_targets = targets.clone()
        later_targets[:, 4:] = 5
        changed_later = model(sources, later_targets)
    assert logits.shape == (60, TARGET_LENGTH, len(corpus.vocabulary))
    assert torch.equal(logits, other) == (variant == "no source")
    assert torch.equal(logits[:, :5], changed_later[:, :5])  # the logits at 4 depend on the words before it
    assert not torch.equal(logits[:, 5:], changed_later[:, 5:])


def test_greedy_decoding_takes_the_most_likely_words(corpus):
    torch.manual_seed(0)
    for variant in VARIANTS:
        model = Translator(variant, len(corpus.vocabulary), 32, 1).eval()
        sources, _ = corpus.encode(corpus.held_out[:5])
        written = model.translate(sources)
        assert written.shape == (5, TARGET_LENGTH)
        with torch.no_grad():
            assert torch.equal(model(sources, written).argmax(dim=-1), written)


def test_accuracy_counts_all_words_up_to_the_end(corpus, monkeypatch):
    model = Translator("encoder", len(corpus.vocabulary), 32, 1)
    _, targets = corpus.encode(corpus.held_out)
    after = torch.where(targets == 0, 7, targets)  # any tokens after the end
    monkeypatch.setattr(model, "translate", lambda sources: after)
    assert sentence_accuracy(model, corpus) == 1
    wrong = after.clone()
    wrong[0, 2] = 1
    monkeypatch.setattr(model, "translate", lambda sources: wrong)
    assert sentence_accuracy(model, corpus) == pytest.approx(59 / 60)


def test_aligned_head_is_found(corpus, monkeypatch):
    """With constructed weights: head 1 of block 0 attends to every origin, all others to word 0."""
    weights = torch.zeros(2, len(corpus.held_out), 4, TARGET_LENGTH, SOURCE_LENGTH)
    weights[..., 0] = 0.5
    for n, sentence in enumerate(corpus.held_out):
        for t, origin in enumerate(sentence.origin):
            weights[0, n, 1, t, origin] = 0.6
    monkeypatch.setattr(encoder_decoder, "cross_attention_weights", lambda model, source, target: weights)
    result = encoder_decoder.find_aligned_head(None, corpus)
    assert (result.block, result.head, result.fraction) == (0, 1, 1.0)


def test_cross_attention_is_recorded(corpus):
    with one_thread():
        model = train_translator(
            "encoder", corpus, TranslationSettings(32, 2, 2, 16, (1e-3,), 1, (600,), 60), 1e-3, 0
        )
    weights = cross_attention_weights(model, *corpus.encode(corpus.held_out))
    assert weights.shape == (2, 60, 4, TARGET_LENGTH, SOURCE_LENGTH)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(()), atol=1e-5)
