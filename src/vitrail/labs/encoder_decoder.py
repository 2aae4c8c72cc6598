"""Lab `encoder-decoder`: note 003's third kind of transformer translates, and what it needs for it.

Sentences come from a small grammar (grammar.py): English to a made-up language with French words and
another order, in which words agree.
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
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.labs.descent import descend
from vitrail.labs.grammar import ARTICLES, SOURCE, TARGET, Corpus, Sentence, corpus
from vitrail.labs.interval import interval
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import Difference
from vitrail.model import Decoder, DecoderConfig, ViT, generate, record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "encoder-decoder"
NOTE = '003 "But what even are transformers?", the variants'
CLAIM = "Translation models have both halves: an encoder reads, and a decoder that looks at it writes."
TAKES = ""

# ---- three ways to translate ----------------------------------------------------------------


class Translator(nn.Module):
    """A decoder, and what it is told of the source.

    `encoder` and decoder: it looks at an encoder's tokens. `source first`: a decoder alone, given the
    source as the first words of its own sequence. `no source`: a decoder that has to guess.
    """

    def __init__(self, way: str, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.way = way
        looks = way == "encoder"
        sizes: dict[str, Any] = {"width": width, "heads": 4, "vocabulary": vocabulary}
        self.encoder = ViT(text_encoder(depth=depth, **sizes)) if looks else None
        self.decoder = Decoder(
            DecoderConfig(
                **sizes,
                depth=depth if looks else 2 * depth,  # as many blocks in all
                length=TARGET + (SOURCE if way == "source first" else 0),
                context_width=width if looks else None,
            )
        )

    def begun(self, source: Tensor) -> Tensor:
        """What stands before the translation: (B, 1), or the source before it."""
        begin = torch.ones_like(source[:, :1])
        return torch.cat([source, begin], dim=1) if self.way == "source first" else begin

    def context(self, source: Tensor) -> Tensor | None:
        return None if self.encoder is None else self.encoder.encode(source).tokens

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, 8, V) for each word of the translation, given those before it."""
        words = torch.cat([self.begun(source), target[:, :-1]], dim=1)
        return self.decoder(words, self.context(source))[:, -TARGET:]

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """(B, 8), the likeliest word after the likeliest word."""
        begun = self.begun(source)
        return generate(self.decoder, begun, TARGET, temperature=0, context=self.context(source))[:, -TARGET:]


def text_encoder(*, width: int, depth: int, heads: int, vocabulary: int) -> ViTConfig:
    return ViTConfig(
        width=width,
        depth=depth,
        heads=heads,
        vocabulary=vocabulary,
        input="text",
        patch=1,
        size=SOURCE,
        class_token=False,
        pool="mean",
        classes=0,
    )


WAYS = {
    "encoder": "encoder and decoder",
    "source first": "decoder alone, the source first",
    "no source": "decoder without a source",
}


# ---- the experiment -------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How large the models are, how long and from how many sentences they learn."""

    width: int
    depth: int
    steps: int
    batch: int
    rates: tuple[float, ...]
    seeds: int
    train: int
    held_out: int


SETTINGS = {
    "full": Setting(64, 2, 300, 64, rates=(1e-3, 3e-3, 1e-2), seeds=3, train=1_000, held_out=500),
    "small": Setting(48, 1, 150, 64, rates=(6e-3,), seeds=2, train=4_000, held_out=100),
}
RIGHT, GUESSED = 0.8, 0.05  # whole sentences


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    setting = SETTINGS[size]
    texts = corpus(setting.train, setting.held_out)
    scores: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    models: dict[str, Translator] = {}
    for way in WAYS:
        tried = {rate: learn(way, texts, setting, rate, 0) for rate in setting.rates}
        first = {rate: right(model, texts) for rate, model in tried.items()}
        rates[way] = max(first, key=first.__getitem__)
        models[way] = tried[rates[way]]
        others = [learn(way, texts, setting, rates[way], seed) for seed in range(1, setting.seeds)]
        scores[way] = [first[rates[way]], *(right(model, texts) for model in others)]
    found = alignment(models["encoder"], texts)
    mean = {way: fmean(values) for way, values in scores.items()}
    sentence = (
        f"Of {setting.held_out} sentences that were not among the {setting.train:,} to learn from, encoder "
        f"and decoder translate {mean['encoder']:.1%} without a slip, word order and agreement included; a "
        f"decoder that is not shown the source, {mean['no source']:.1%}. A decoder alone with the source as "
        f"its first words, and as many blocks, has {mean['source first']:.1%}. In block {found.block} of the "
        f"decoder, head {found.head} looks most at the very word that nouns, adjectives and verbs are "
        f"translated from, {found.share:.0%} of the time. This is a toy: {len(texts.words)} words, width "
        f"{setting.width}."
    )
    return Result(
        number=mean["encoder"],
        unit=f"of held-out sentences right in every word (source first {mean['source first']:.3f}, "
        f"no source {mean['no source']:.3f})",
        n=setting.seeds,
        verdict=judge(scores),
        sentence=sentence,
        figure=draw(scores, models["encoder"], texts, found),
        interval=interval(scores["encoder"]),
        numbers={
            "right": scores,
            "intervals": {way: interval(values) for way, values in scores.items()},
            "rates": rates,
            "aligned": {"block": found.block, "head": found.head, "share": found.share},
            "parameters": {way: sum(p.numel() for p in model.parameters()) for way, model in models.items()},
        },
    )


def judge(scores: dict[str, list[float]]) -> Verdict:
    """By each way's share of whole sentences, one for each seed."""
    if fmean(scores["encoder"]) < RIGHT:
        return Verdict("does not hold", ": encoder and decoder do not translate")
    if fmean(scores["no source"]) > GUESSED:
        return Verdict("does not hold", ": the source is not needed")
    ahead = Difference.of(scores["encoder"], scores["source first"])
    if not ahead.clear or ahead.mean < 0:
        return Verdict(
            "holds if",
            "it is not taken to say that both are needed: a decoder given the source is not clearly worse",
        )
    return Verdict("holds")


def learn(way: str, texts: Corpus, setting: Setting, rate: float, seed: int) -> Translator:
    torch.manual_seed(seed)
    model = Translator(way, len(texts.words), setting.width, setting.depth)
    sources, targets = texts.numbers(texts.train)

    def loss() -> Tensor:
        some = torch.randint(len(sources), (setting.batch,))
        logits = model(sources[some], targets[some])
        return F.cross_entropy(logits.flatten(0, 1), targets[some].flatten(), ignore_index=0)

    descend(model, loss, setting.steps, rate)
    return model


def right(model: Translator, texts: Corpus) -> float:
    """The share of held-out sentences with every word right, up to the end."""
    sources, targets = texts.numbers(texts.held_out)
    same = (model.translate(sources) == targets) | (targets == 0)  # what is said after the end is not read
    return same.all(dim=1).double().mean().item()


# ---- who looks where ------------------------------------------------------------------------


@dataclass(frozen=True)
class Aligned:
    """The head of cross-attention that follows the words best."""

    block: int
    head: int
    share: float


@torch.no_grad()
def looks(model: Translator, source: Tensor, target: Tensor) -> Tensor:
    """(L, B, k, 8, 7): at each word about to be written, how much each word of the source is looked at."""
    with record(model, "decoder.blocks.*.cross.weights") as tape:
        model(source, target)
    return torch.stack(list(tape.values()))


def alignment(model: Translator, texts: Corpus) -> Aligned:
    """Articles are left out: two words make one, the article and the noun that it agrees with."""
    weights = looks(model, *texts.numbers(texts.held_out)).argmax(dim=-1)  # (L, B, k, 8)
    articles = {word for pair in ARTICLES.values() for word in pair}
    hits = torch.stack(
        [
            weights[:, n, :, t] == origin
            for n, one in enumerate(texts.held_out)
            for t, (word, origin) in enumerate(zip(one.target, one.origin, strict=True))
            if word not in articles
        ]
    )
    shares = hits.double().mean(dim=0)  # (L, k)
    block, head = divmod(int(shares.argmax()), shares.shape[1])
    return Aligned(block, head, shares.max().item())


@in_our_style
def draw(scores: dict[str, list[float]], model: Translator, texts: Corpus, found: Aligned) -> Figure:
    figure = canvas(7.6, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1])
    for n, values in enumerate(scores.values()):
        left.barh(n, fmean(values), color=LINES[n], alpha=0.85, height=0.6)
        left.plot(values, [n] * len(values), "o", color=FAINT, markersize=4)
    left.set(yticks=range(len(WAYS)), yticklabels=[name.replace(", ", ",\n") for name in WAYS.values()])
    left.set(xlim=(0, 1.03), xlabel="whole sentences right", title="sentences never seen")
    left.invert_yaxis()
    longest = max(texts.held_out, key=lambda one: len(set(one.source)))  # no word twice
    draw_alignment(right, longest, looks(model, *texts.numbers([longest]))[found.block, 0, found.head])
    right.set_title(f"cross-attention, block {found.block}, head {found.head}")
    return figure


def draw_alignment(axis: Axes, one: Sentence, weights: Tensor) -> None:
    """Rows are words as they are written, columns the source; a frame marks where each comes from."""
    shown = weights[: len(one.target), : len(one.source)]
    axis.imshow(shown.numpy(), cmap="Blues", vmin=0, vmax=1)
    axis.plot(one.origin, range(len(one.origin)), "s", markersize=15, markerfacecolor="none", color=LINES[1])
    axis.set_xticks(range(len(one.source)), one.source, rotation=45, ha="right")
    axis.set_yticks(range(len(one.target)), one.target)
