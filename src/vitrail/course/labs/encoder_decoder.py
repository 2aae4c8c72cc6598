"""Lab `encoder-decoder`: translation with the encoder-decoder of note 003, compared with decoders alone.

Sentences come from a small grammar (grammar.py): English is translated to a made-up language with French
words, another word order, and agreement.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.course.labs.grammar import (
    ARTICLES,
    SOURCE_LENGTH,
    TARGET_LENGTH,
    Sentence,
    SentenceCorpus,
    build_corpus,
)
from vitrail.course.labs.lab import LabResult, LabSize, Verdict
from vitrail.course.labs.training_loop import train_model
from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import Difference
from vitrail.inspect.canvas import FAINT, LINES, new_figure, styled
from vitrail.model import Decoder, DecoderConfig, ViT, generate, record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "encoder-decoder"
TITLE = "translation needs both parts"
NOTE = '003 "But what even are transformers?", the variants'
CLAIM = (
    "Translation models have both parts: an encoder reads the source, and a decoder that attends to it "
    "writes the translation."
)
ACCEPTS = ""

# ---- models ---------------------------------------------------------------------------------


class Translator(nn.Module):
    """A decoder that is given the source in one of three ways.

    `encoder`: cross-attention to the tokens of an encoder. `prefix`: a decoder alone, with the source as a
    prefix of its sequence. `no source`: a decoder that does not get the source.
    """

    def __init__(self, variant: str, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.variant = variant
        has_encoder = variant == "encoder"
        sizes: dict[str, Any] = {"width": width, "heads": 4, "vocabulary": vocabulary}
        self.encoder = ViT(_text_encoder(depth=depth, **sizes)) if has_encoder else None
        self.decoder = Decoder(
            DecoderConfig(
                **sizes,
                depth=depth if has_encoder else 2 * depth,  # the same total number of blocks
                length=TARGET_LENGTH + (SOURCE_LENGTH if variant == "prefix" else 0),
                context_width=width if has_encoder else None,
            )
        )

    def decoder_prefix(self, source: Tensor) -> Tensor:
        """The tokens before the translation: a begin token, (B, 1), or the source and a begin token."""
        begin_token = torch.ones_like(source[:, :1])
        return torch.cat([source, begin_token], dim=1) if self.variant == "prefix" else begin_token

    def context(self, source: Tensor) -> Tensor | None:
        return None if self.encoder is None else self.encoder.encode(source).tokens

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, 8, V) for each word of the translation, given those before it."""
        words = torch.cat([self.decoder_prefix(source), target[:, :-1]], dim=1)
        return self.decoder(words, self.context(source))[:, -TARGET_LENGTH:]

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Greedy decoding, (B, 8)."""
        prefix, context = self.decoder_prefix(source), self.context(source)
        return generate(self.decoder, prefix, TARGET_LENGTH, temperature=0, context=context)[
            :, -TARGET_LENGTH:
        ]


def _text_encoder(*, width: int, depth: int, heads: int, vocabulary: int) -> ViTConfig:
    return ViTConfig(
        width=width,
        depth=depth,
        heads=heads,
        vocabulary=vocabulary,
        input="text",
        patch=1,
        size=SOURCE_LENGTH,
        class_token=False,
        pool="mean",
        classes=0,
    )


VARIANTS = {
    "encoder": "encoder and decoder",
    "prefix": "decoder alone, source as prefix",
    "no source": "decoder without source",
}


# ---- experiment -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TranslationSettings:
    """Size of the models, training, and numbers of sentences."""

    width: int
    depth: int
    steps: int
    batch: int
    lrs: tuple[float, ...]
    seeds: int
    train: int
    held_out: int


SETTINGS = {
    "full": TranslationSettings(64, 2, 300, 64, lrs=(1e-3, 3e-3, 1e-2), seeds=3, train=1_000, held_out=500),
    "small": TranslationSettings(48, 1, 150, 64, lrs=(6e-3,), seeds=2, train=4_000, held_out=100),
}
_MIN_ACCURACY, _MAX_WITHOUT_SOURCE = 0.8, 0.05  # fractions of complete sentences


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    settings = SETTINGS[size]
    corpus = build_corpus(settings.train, settings.held_out)
    scores: dict[str, list[float]] = {}
    best_lrs: dict[str, float] = {}
    models: dict[str, Translator] = {}
    for variant in VARIANTS:
        by_lr = {lr: train_translator(variant, corpus, settings, lr, 0) for lr in settings.lrs}
        first_scores = {lr: sentence_accuracy(model, corpus) for lr, model in by_lr.items()}
        lr = best_lrs[variant] = max(first_scores, key=first_scores.__getitem__)
        models[variant] = by_lr[lr]
        others = [train_translator(variant, corpus, settings, lr, seed) for seed in range(1, settings.seeds)]
        scores[variant] = [first_scores[lr], *(sentence_accuracy(model, corpus) for model in others)]
    aligned = find_aligned_head(models["encoder"], corpus)
    means = {variant: fmean(values) for variant, values in scores.items()}
    sentence = (
        f"Of {settings.held_out} held-out sentences, with {settings.train:,} for training, an encoder and "
        f"decoder translate {means['encoder']:.1%} without an error, including word order and agreement; a "
        f"decoder without the source, {means['no source']:.1%}. A decoder alone with the source as a prefix "
        f"and the same total number of blocks translates {means['prefix']:.1%}. In block {aligned.block} of "
        f"the decoder, head {aligned.head} attends most to the source word of each noun, adjective and verb, "
        f"{aligned.fraction:.0%} of the time. This is a toy problem: {len(corpus.vocabulary)} words, width "
        f"{settings.width}."
    )
    return LabResult(
        number=means["encoder"],
        unit=f"of the held-out sentences translated correctly (source as prefix {means['prefix']:.3f}, "
        f"no source {means['no source']:.3f})",
        n=settings.seeds,
        verdict=decide_verdict(scores),
        sentence=sentence,
        figure=draw(scores, models["encoder"], corpus, aligned),
        interval=confidence_interval(scores["encoder"]),
        numbers={
            "accuracy": scores,
            "intervals": {variant: confidence_interval(values) for variant, values in scores.items()},
            "lrs": best_lrs,
            "alignment": {"block": aligned.block, "head": aligned.head, "fraction": aligned.fraction},
            "parameters": {
                variant: sum(p.numel() for p in model.parameters()) for variant, model in models.items()
            },
        },
    )


def decide_verdict(scores: dict[str, list[float]]) -> Verdict:
    """`scores` are the fractions of correct sentences by variant, for each seed."""
    if fmean(scores["encoder"]) < _MIN_ACCURACY:
        return Verdict("does not hold", "encoder and decoder do not translate")
    if fmean(scores["no source"]) > _MAX_WITHOUT_SOURCE:
        return Verdict("does not hold", "the source is not needed")
    difference = Difference.of(scores["encoder"], scores["prefix"])
    if not difference.significant or difference.mean < 0:
        return Verdict(
            "partly",
            "no encoder is needed: a decoder alone with the source as a prefix is not clearly worse",
        )
    return Verdict("holds")


def train_translator(
    variant: str, corpus: SentenceCorpus, settings: TranslationSettings, lr: float, seed: int
) -> Translator:
    torch.manual_seed(seed)
    model = Translator(variant, len(corpus.vocabulary), settings.width, settings.depth)
    sources, targets = corpus.encode(corpus.train)

    def batch_loss() -> Tensor:
        batch = torch.randint(len(sources), (settings.batch,))
        logits = model(sources[batch], targets[batch])
        return F.cross_entropy(logits.flatten(0, 1), targets[batch].flatten(), ignore_index=0)

    train_model(model, batch_loss, settings.steps, lr)
    return model


def sentence_accuracy(model: Translator, corpus: SentenceCorpus) -> float:
    """The fraction of held-out sentences with every word correct, up to the end token."""
    sources, targets = corpus.encode(corpus.held_out)
    correct = (model.translate(sources) == targets) | (targets == 0)  # tokens after the end are ignored
    return correct.all(dim=1).double().mean().item()


# ---- cross-attention ------------------------------------------------------------------------


@dataclass(frozen=True)
class _AlignedHead:
    """The cross-attention head that attends most often to the translated word."""

    block: int
    head: int
    fraction: float


@torch.no_grad()
def cross_attention_weights(model: Translator, source: Tensor, target: Tensor) -> Tensor:
    """(L, B, k, 8, 7): the attention of each target position to each source position."""
    with record(model, "decoder.blocks.*.cross.weights") as tape:
        model(source, target)
    return torch.stack(list(tape.values()))


def find_aligned_head(model: Translator, corpus: SentenceCorpus) -> _AlignedHead:
    """The best aligned head; articles do not count, as they depend on the article and on the noun."""
    weights = cross_attention_weights(model, *corpus.encode(corpus.held_out)).argmax(dim=-1)  # (L, B, k, 8)
    articles = {word for pair in ARTICLES.values() for word in pair}
    is_aligned = torch.stack(
        [
            weights[:, n, :, t] == origin
            for n, sentence in enumerate(corpus.held_out)
            for t, (word, origin) in enumerate(zip(sentence.target, sentence.origin, strict=True))
            if word not in articles
        ]
    )
    fractions = is_aligned.double().mean(dim=0)  # (L, k)
    block, head = divmod(int(fractions.argmax()), fractions.shape[1])
    return _AlignedHead(block, head, fractions.max().item())


@styled
def draw(
    scores: dict[str, list[float]], model: Translator, corpus: SentenceCorpus, aligned: _AlignedHead
) -> Figure:
    figure = new_figure(7.6, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1])
    for n, values in enumerate(scores.values()):
        left.barh(n, fmean(values), color=LINES[n], alpha=0.85, height=0.6)
        left.plot(values, [n] * len(values), "o", color=FAINT, markersize=4)
    left.set(
        yticks=range(len(VARIANTS)), yticklabels=[name.replace(", ", ",\n") for name in VARIANTS.values()]
    )
    left.set(xlim=(0, 1.03), xlabel="complete sentences correct", title="held-out sentences")
    left.invert_yaxis()
    longest = max(corpus.held_out, key=lambda one: len(set(one.source)))  # the most different words
    weights = cross_attention_weights(model, *corpus.encode([longest]))[aligned.block, 0, aligned.head]
    _draw_alignment(right, longest, weights)
    right.set_title(f"cross-attention, block {aligned.block}, head {aligned.head}")
    return figure


def _draw_alignment(axis: Axes, sentence: Sentence, weights: Tensor) -> None:
    """Attention of target words (rows) to source words (columns); frames mark the translated word."""
    visible = weights[: len(sentence.target), : len(sentence.source)]
    axis.imshow(visible.numpy(), cmap="Blues", vmin=0, vmax=1)
    axis.plot(
        sentence.origin,
        range(len(sentence.origin)),
        "s",
        markersize=15,
        markerfacecolor="none",
        color=LINES[1],
    )
    axis.set_xticks(range(len(sentence.source)), sentence.source, rotation=45, ha="right")
    axis.set_yticks(range(len(sentence.target)), sentence.target)
