"""Lab `subwords`: tokens of several characters, found by byte pair encoding, compared with characters."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.experiment.interval import wilson_interval
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.text import read_text
from vitrail_course.labs.verdict import EXACT, TOY, Statement, Verdict, format_interval, identity, is_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "subwords"
TITLE = "tokens can be parts of words"
NOTE = '003 "Tokens"'
CLAIM = (
    "Many words map to one token, but some don't: indivisible. Unicode characters like emojis may be "
    "split into many tokens containing the underlying bytes. Sequences of characters commonly found next "
    "to each other may be grouped together."
)
ACCEPTS = "a text file"

_BANANA = "\N{BANANA}"  # the emoji of the slide
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
    }
    return LabResult(
        number=single / len(words),
        unit=f"of the held-out words are one token ({numbers['vocabulary']:,} tokens)",
        n=len(words),
        setting=f"Byte pair encoding with {len(tokenizer.pieces):,} tokens, learned from the first nine "
        "tenths of "
        f"{text.name}.",
        figure=draw(numbers),
        interval=wilson_interval(single / len(words), len(words)),
        numbers=numbers,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    words, single = numbers["words"], numbers["words of one token"]
    bounds = wilson_interval(single / words, words)
    emoji, length = numbers["tokens of an emoji"], numbers["characters per token"]
    return Verdict(
        [
            Statement(
                "many held-out words map to one token",
                TOY,
                is_above(bounds, _MANY),
                format_interval(single / words, bounds, ".3f"),
                f"{_MANY:g}",
                "our reading of many: most",
            ),
            Statement(
                "some do not",
                TOY,
                single < words,
                f"{words - single:,} of {words:,} words",
                "1",
                "the slide's some",
            ),
            Statement(
                "an emoji is split into its bytes",
                TOY,
                emoji > 1,
                f"a banana has {emoji} tokens",
                "2",
                "the slide's many",
            ),
            Statement(
                "characters are grouped",
                TOY,
                length > 1,
                f"{length:.2f} per token",
                "1",
                "tokens of one character",
            ),
            identity(
                "the text can be restored from its tokens",
                numbers["reproduced"],
                "compared byte by byte",
                "equal",
                EXACT,
            ),
        ]
    )


# ---- summary and figure ---------------------------------------------------------------------


@styled
def draw(numbers: Mapping[str, Any]) -> Figure:
    figure = new_figure(6.4, 2.6)
    axis = figure.subplots()
    counts = numbers["words by tokens"]
    axis.bar(list(counts), [value / numbers["words"] for value in counts.values()], color=LINES[0])
    axis.set(xlabel="tokens of a held-out word", ylabel="fraction of the words", ylim=(0, 1))
    longest = "\n".join(numbers["longest tokens"][:6])
    axis.text(
        0.98, 0.95, f"longest tokens\n{longest}", transform=axis.transAxes, ha="right", va="top", fontsize=8
    )
    return figure
