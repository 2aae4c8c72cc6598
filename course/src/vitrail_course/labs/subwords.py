"""Lab `subwords`: tokens of several characters, found by byte pair encoding, compared with characters."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.experiment.interval import confidence_interval, wilson_interval
from vitrail.experiment.trial import map_in_processes
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.decoder import Decoder, DecoderConfig
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.text import CharacterText, next_character_batch, read_text
from vitrail_course.labs.training_loop import train_model
from vitrail_course.labs.verdict import Statement, Verdict, decide, fact, format_interval, is_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "subwords"
TITLE = "tokens can be parts of words"
NOTE = '003 "Tokens"'
CLAIM = (
    "A token of a text can be a character, a part of a word or a word. Many words map to one token, but some "
    "do not; a character such as an emoji may be split into its bytes; characters that often occur together "
    "are grouped."
)
ACCEPTS = "a text file"

_BANANA = "\N{BANANA}"  # the emoji of the slide
_BATCH = 32
_MANY = 0.5  # fraction of the held-out words that are many
_MERGES = {"full": 960, "small": 60}


# ---- byte pair encoding ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenizer:
    """Byte pair encoding (Sennrich et al. 2016), of bytes: token ids 0 to 255 are single bytes."""

    merges: dict[tuple[int, int], int]
    """The token that replaces a pair of tokens, in the order in which they were learned."""
    pieces: list[bytes]
    """The bytes of each token."""

    def encode_word(self, word: str) -> list[int]:
        ids = list(word.encode())
        while len(ids) > 1:
            pairs = list(pairwise(ids))
            best = min(pairs, key=lambda pair: self.merges.get(pair, len(self.pieces)))
            if best not in self.merges:
                break
            ids = merge_pair(ids, best, self.merges[best])
        return ids

    def encode(self, text: str) -> list[int]:
        cache = {word: self.encode_word(word) for word in set(split_words(text))}
        return [token for word in split_words(text) for token in cache[word]]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in ids).decode(errors="replace")


def split_words(text: str) -> list[str]:
    """Words with the space before them, numbers, and everything else; tokens do not cross their borders."""
    return re.findall(r" ?[^\W\d]+| ?\d+| ?[^\w\s]+|\s+", text)


def train_tokenizer(text: str, merges: int) -> Tokenizer:
    """Merge the most frequent pair of tokens, again and again; only words that have the pair change."""
    counts = Counter(split_words(text))
    words = {word: list(word.encode()) for word in counts}
    tokenizer = Tokenizer({}, [bytes([byte]) for byte in range(256)])
    pairs: Counter[tuple[int, int]] = Counter()
    words_with: defaultdict[tuple[int, int], set[str]] = defaultdict(set)

    def count_pairs(word: str, sign: int) -> None:
        for pair in pairwise(words[word]):
            pairs[pair] += sign * counts[word]
            words_with[pair].add(word)

    for word in words:
        count_pairs(word, 1)
    for _ in range(merges):
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=(0, 0))
        if pairs[best] < 1:
            break
        token = len(tokenizer.pieces)
        tokenizer.merges[best] = token
        tokenizer.pieces.append(tokenizer.pieces[best[0]] + tokenizer.pieces[best[1]])
        for word in words_with.pop(best):
            count_pairs(word, -1)
            words[word] = merge_pair(words[word], best, token)
            count_pairs(word, 1)
        del pairs[best]
    return tokenizer


def merge_pair(ids: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """The ids with each occurrence of the pair replaced."""
    result: list[int] = []
    for number in ids:
        if result and (result[-1], number) == pair:
            result[-1] = token
        else:
            result.append(number)
    return result


# ---- experiment -----------------------------------------------------------------------------


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    text = read_text(data)
    train, held_out = (text.decode(ids) for ids in (text.train, text.eval_split))
    if size == "small":
        train, held_out = train[:20_000], held_out[:4_000]
    tokenizer = train_tokenizer(train, _MERGES[size])
    seen = set(split_words(train))
    words = [word for word in split_words(held_out) if word.strip().isalpha()]
    single = sum(len(tokenizer.encode_word(word)) == 1 for word in words)
    lengths = Counter(len(tokenizer.encode_word(word)) for word in words)
    losses = _compare_losses(tokenizer, train, held_out, size)
    numbers = {
        "words": len(words),
        "words of one token": single,
        "words by tokens": {str(count): lengths[count] for count in sorted(lengths)},
        "words not in the training text": sum(word not in seen for word in words),
        "tokens of an emoji": len(tokenizer.encode_word(_BANANA)),
        "characters per token": len(held_out) / len(tokenizer.encode(held_out)),
        "vocabulary": len(tokenizer.pieces),
        "reproduced": tokenizer.decode(tokenizer.encode(held_out + _BANANA)) == held_out + _BANANA,
        "longest tokens": [
            piece.decode(errors="replace").strip()
            for piece in sorted(tokenizer.pieces, key=len, reverse=True)
            if piece.strip().isalpha()
        ][:12],
        "nats per character": losses,
    }
    return LabResult(
        number=single / len(words),
        unit=f"of the held-out words are one token ({numbers['vocabulary']:,} tokens)",
        n=len(words),
        sentence=summarize(numbers, text),
        figure=draw(numbers),
        interval=wilson_interval(single / len(words), len(words)),
        numbers=numbers,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    words, single = numbers["words"], numbers["words of one token"]
    bounds = wilson_interval(single / words, words)
    emoji, length = numbers["tokens of an emoji"], numbers["characters per token"]
    return decide(
        [
            Statement(
                "many words map to one token",
                is_above(bounds, _MANY),
                f"{format_interval(single / words, bounds, '.3f')} of the held-out words, "
                f"threshold {_MANY:g}",
            ),
            fact(
                "some words do not map to one token", single < words, f"{words - single:,} of {words:,} words"
            ),
            fact("an emoji is split into its bytes", emoji > 1, f"{emoji} tokens"),
            fact("characters are grouped", length > 1, f"{length:.2f} characters per token"),
            fact("the text can be restored from its tokens", numbers["reproduced"], "compared byte by byte"),
        ]
    )


@dataclass(frozen=True, eq=False)
class _DecoderTask:
    """A decoder to train on token ids."""

    train: Tensor
    held_out: Tensor
    characters: int
    """The number of held-out characters, which both kinds of tokens are measured by."""
    vocabulary: int
    seed: int
    size: LabSize


def _compare_losses(tokenizer: Tokenizer, train: str, held_out: str, size: LabSize) -> dict[str, list[float]]:
    """Nats per held-out character of decoders of both kinds of tokens, after as many steps."""
    alphabet = {character: n for n, character in enumerate(sorted(set(train + held_out)))}
    ids = {
        "characters": ([[alphabet[c] for c in part] for part in (train, held_out)], len(alphabet)),
        "sub-words": ([tokenizer.encode(part) for part in (train, held_out)], len(tokenizer.pieces)),
    }
    seeds = range(2 if size == "small" else 3)
    tasks = [
        _DecoderTask(torch.tensor(first), torch.tensor(rest), len(held_out), vocabulary, seed, size)
        for (first, rest), vocabulary in ids.values()
        for seed in seeds
    ]
    losses = map_in_processes(_train_decoder, tasks, process_count(size))
    return {name: losses[n * len(seeds) : (n + 1) * len(seeds)] for n, name in enumerate(ids)}


def _train_decoder(task: _DecoderTask) -> float:
    width, depth, length, steps = (16, 1, 8, 10) if task.size == "small" else (64, 2, 32, 600)
    torch.manual_seed(task.seed)
    model = Decoder(
        DecoderConfig(vocabulary=task.vocabulary, width=width, depth=depth, heads=4, length=length)
    )

    def batch_loss() -> Tensor:
        starts = torch.randint(len(task.train) - length, (_BATCH,))
        x, y = next_character_batch(task.train, starts, length)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    train_model(model, batch_loss, steps, 3e-3)
    x, y = next_character_batch(task.held_out, torch.arange(0, len(task.held_out) - length, length), length)
    with torch.no_grad():
        per_token = [
            F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum").item()
            for a, b in zip(x.split(128), y.split(128), strict=True)
        ]
    return sum(per_token) / y.numel() * len(task.held_out) / task.characters


# ---- summary and figure ---------------------------------------------------------------------


def summarize(numbers: Mapping[str, Any], text: CharacterText) -> str:
    losses = numbers["nats per character"]
    longest = ", ".join(f"`{piece}`" for piece in numbers["longest tokens"][:6])
    return (
        f"Byte pair encoding with {numbers['vocabulary']:,} tokens, learned from {text.name}: "
        f"{numbers['words of one token'] / numbers['words']:.1%} of the {numbers['words']:,} held-out words "
        f"are one token; {numbers['words not in the training text']:,} words do not occur in the training "
        f"text and are encoded all the same. A token has {numbers['characters per token']:.2f} characters "
        f"in the mean; the longest are {longest}. The slide's banana has {numbers['tokens of an emoji']} "
        "tokens, its bytes. Decoding gives the text back exactly. Decoders of width 64 with a context of 32 "
        f"tokens reach {fmean(losses['sub-words']):.2f} nats per held-out character on sub-words and "
        f"{fmean(losses['characters']):.2f} on characters after as many steps, at one learning rate: 32 "
        "sub-words are more text than 32 characters."
    )


@styled
def draw(numbers: Mapping[str, Any]) -> Figure:
    figure = new_figure(7.6, 2.8)
    left, right = figure.subplots(1, 2)
    counts = numbers["words by tokens"]
    left.bar(list(counts), [value / numbers["words"] for value in counts.values()], color=LINES[0])
    left.set(xlabel="tokens of a held-out word", ylabel="fraction of the words", ylim=(0, 1))
    for n, values in enumerate(numbers["nats per character"].values()):
        right.plot(values, [n] * len(values), "o", color=LINES[n], alpha=0.4, markersize=5)
        right.plot([fmean(values)], [n], "|", color=LINES[n], markersize=14, markeredgewidth=2)
        if (bounds := confidence_interval(values)) is not None:
            right.plot(bounds, [n, n], color=LINES[n], linewidth=2)
    right.set(yticks=[0, 1], yticklabels=list(numbers["nats per character"]), ylim=(1.5, -0.5))
    right.set(xlabel="nats per held-out character")
    right.set_title(f"decoder, {len(next(iter(numbers['nats per character'].values())))} seeds", loc="left")
    return figure
