"""Lab `encoder-decoder`: translation with the encoder-decoder of note 003, compared with decoders alone.

Sentences come from a small grammar (grammar.py): English is translated to a made-up language with French
words, another word order, and agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.experiment.interval import fraction_interval
from vitrail.experiment.study import edge_note
from vitrail.experiment.trial import ProcessPool
from vitrail.model import Decoder, DecoderConfig, ViT, generate, record
from vitrail.model.config import ViTConfig
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.grammar import (
    ARTICLES,
    SOURCE_LENGTH,
    TARGET_LENGTH,
    Sentence,
    SentenceCorpus,
    build_corpus,
)
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.training_loop import train_model
from vitrail_course.labs.verdict import (
    Statement,
    Verdict,
    arm_reaches,
    compare_arms,
    confirming,
    decide,
    gain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "encoder-decoder"
TITLE = "encoder and decoder translate"
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
    train: tuple[int, ...]
    """Sizes of the training set, ascending: with the fewest sentences no variant translates all of them."""
    held_out: int


SETTINGS = {
    "full": TranslationSettings(
        64, 2, 300, 64, lrs=(1e-3, 3e-3, 1e-2), seeds=3, train=(200, 1_000), held_out=500
    ),
    "small": TranslationSettings(48, 1, 150, 64, lrs=(6e-3,), seeds=2, train=(4_000,), held_out=100),
}
_MIN_ACCURACY, _MAX_WITHOUT_SOURCE = 0.8, 0.05  # fractions of complete sentences
_CEILING = 0.99  # above it two variants cannot be told apart


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    settings = SETTINGS[size]
    corpus = build_corpus(settings.train[-1], settings.held_out)
    with ProcessPool(process_count(size)) as pool:
        trained = {
            count: _train_variants(replace(corpus, train=corpus.train[:count]), settings, pool)
            for count in settings.train
        }
    best = trained[settings.train[-1]]
    model = _build_translator("encoder", corpus, settings)
    model.load_state_dict(best["encoder"].state)
    model.eval()
    aligned = find_aligned_head(model, corpus)
    scores = {count: {name: one.scores for name, one in arms.items()} for count, arms in trained.items()}
    counted = {variant: confirming(values) for variant, values in scores[settings.train[-1]].items()}
    means = {variant: fmean(values) for variant, values in counted.items()}
    return LabResult(
        number=means["encoder"],
        unit=f"of the held-out sentences translated correctly with {settings.train[-1]:,} for training "
        f"(source as prefix {means['prefix']:.3f}, no source {means['no source']:.3f})",
        n=len(counted["encoder"]),
        sentence=summarize(scores, settings, aligned, len(corpus.vocabulary)),
        figure=draw(scores, model, corpus, aligned),
        interval=fraction_interval(counted["encoder"], settings.held_out),
        numbers={
            "accuracy by training sentences": scores,
            "lrs": {count: {name: one.lr for name, one in arms.items()} for count, arms in trained.items()},
            "sweep": {n: {name: one.sweep for name, one in arms.items()} for n, arms in trained.items()},
            "held out": settings.held_out,
            "alignment": {"block": aligned.block, "head": aligned.head, "fraction": aligned.fraction},
            "parameters": {
                variant: sum(p.numel() for p in _build_translator(variant, corpus, settings).parameters())
                for variant in VARIANTS
            },
        },
        warnings=[
            note
            for count, arms in trained.items()
            for name, one in arms.items()
            if name != "no source"  # at 0 with every learning rate
            and fmean(one.scores) < _CEILING
            and (note := edge_note(f"{VARIANTS[name]} with {count:,} sentences", one.lr, settings.lrs))
        ],
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Encoder and decoder must translate and need the source; a decoder alone must not, or must be worse."""
    by_count, sentences = numbers["accuracy by training sentences"], numbers["held out"]
    most = list(by_count)[-1]
    encoder, prefix, without = (by_count[most][name] for name in VARIANTS)
    statements = [
        arm_reaches(
            f"encoder and decoder translate, with {int(most):,} sentences for training",
            encoder,
            sentences,
            _MIN_ACCURACY,
        ),
        _does_not("a decoder without the source does not", without, sentences, _MAX_WITHOUT_SOURCE),
    ]
    alone = "a decoder alone, with the source as a prefix, does not translate"
    statements += [_needs_encoder(n, by_count[n], sentences) for n in by_count]
    return decide([*statements, _does_not(alone, prefix, sentences, _MIN_ACCURACY)])


def _does_not(text: str, scores: Sequence[float], sentences: int, threshold: float) -> Statement:
    """The statement that a variant translates fewer sentences than the threshold."""
    found = arm_reaches(text, scores, sentences, threshold)
    return replace(found, true=None if found.true is None else not found.true)


def _needs_encoder(count: str, scores: Mapping[str, list[float]], sentences: int) -> Statement:
    """The statement that an encoder is better than the source as a prefix of the decoder's sequence."""
    text = "an encoder is better than a decoder alone with the source as a prefix, "
    text += f"with {int(count):,} sentences"
    statement = gain(text, compare_arms(scores["encoder"], scores["prefix"], sentences))
    if min(fmean(scores["encoder"]), fmean(scores["prefix"])) > _CEILING:
        return Statement(text, None, f"{statement.evidence}: both are above {_CEILING:.0%}")
    return statement


@dataclass(frozen=True, eq=False)
class _TrainedVariant:
    """A variant at its best learning rate."""

    lr: float
    scores: list[float]
    """Fractions of complete sentences, for each seed."""
    state: Mapping[str, Tensor]
    """The weights of the first seed."""
    sweep: Mapping[float, float]
    """The score of the first seed at each learning rate."""


_Task = tuple[str, SentenceCorpus, TranslationSettings, float, int]


def _train_variants(
    corpus: SentenceCorpus, settings: TranslationSettings, pool: ProcessPool
) -> dict[str, _TrainedVariant]:
    """Every variant at every learning rate with the first seed, then the other seeds at the best one."""

    def train(keys: list[tuple[str, float, int]]) -> dict[tuple[str, float, int], Any]:
        tasks = [(variant, corpus, settings, lr, seed) for variant, lr, seed in keys]
        return dict(zip(keys, pool.map(_score_translator, tasks), strict=True))

    sweep = train([(variant, lr, 0) for variant in VARIANTS for lr in settings.lrs])
    lrs = {v: max((sweep[v, lr, 0][0], -lr) for lr in settings.lrs)[1] * -1 for v in VARIANTS}
    runs = sweep | train([(v, lrs[v], seed) for v in VARIANTS for seed in range(1, settings.seeds)])
    return {
        v: _TrainedVariant(
            lrs[v],
            [runs[v, lrs[v], seed][0] for seed in range(settings.seeds)],
            sweep[v, lrs[v], 0][1],
            {lr: sweep[v, lr, 0][0] for lr in settings.lrs},
        )
        for v in VARIANTS
    }


def _score_translator(task: _Task) -> tuple[float, Mapping[str, Tensor]]:
    """Accuracy on the held-out sentences, and the weights."""
    model = train_translator(*task)
    return sentence_accuracy(model, task[1]), model.state_dict()


def _build_translator(variant: str, corpus: SentenceCorpus, settings: TranslationSettings) -> Translator:
    return Translator(variant, len(corpus.vocabulary), settings.width, settings.depth)


def train_translator(
    variant: str, corpus: SentenceCorpus, settings: TranslationSettings, lr: float, seed: int
) -> Translator:
    torch.manual_seed(seed)
    model = _build_translator(variant, corpus, settings)
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


def summarize(
    scores: Mapping[int, Mapping[str, list[float]]],
    settings: TranslationSettings,
    aligned: _AlignedHead,
    words: int,
) -> str:
    by_count = "; ".join(
        f"with {count:,} for training, {fmean(one['encoder']):.1%} by an encoder and a decoder and "
        f"{fmean(one['prefix']):.1%} by a decoder alone with the source as a prefix and the same total "
        "number of blocks"
        for count, one in scores.items()
    )
    without = fmean(scores[settings.train[-1]]["no source"])
    return (
        f"Of {settings.held_out} held-out sentences, these are translated without an error, including word "
        f"order and agreement ({settings.seeds} seeds): {by_count}. A decoder without the source translates "
        f"{without:.1%}. In block {aligned.block} of the decoder, head {aligned.head} attends most to the "
        f"source word of each noun, adjective and verb, {aligned.fraction:.0%} of the time. This is a toy "
        f"problem: {words} words, width {settings.width}."
    )


@styled
def draw(
    scores: Mapping[int, Mapping[str, list[float]]],
    model: Translator,
    corpus: SentenceCorpus,
    aligned: _AlignedHead,
) -> Figure:
    figure = new_figure(7.6, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1])
    counts = list(scores)
    for n, (variant, name) in enumerate(VARIANTS.items()):
        means = [fmean(scores[count][variant]) for count in counts]
        left.plot(counts, means, "o-", color=LINES[n], markersize=4, label=name)
        for count in counts:
            values = scores[count][variant]
            left.plot([count] * len(values), values, "o", color=LINES[n], alpha=0.3, markersize=3)
    left.set(xscale="log", ylim=(-0.03, 1.03), xlabel="sentences for training")
    left.set_xticks(counts, [f"{count:,}" for count in counts])
    left.minorticks_off()
    left.set_title("complete held-out sentences correct")
    figure.legend(loc="outside lower left", fontsize=7.5, ncols=3)
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
