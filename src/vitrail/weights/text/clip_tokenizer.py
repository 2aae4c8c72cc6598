"""CLIP's tokenizer: lower-case text to byte pairs (Sennrich et al. 2016), as OpenAI and transformers do it.

A text is cleaned and split into words. The bytes of a word are its first symbols, the last one with `</w>`;
then the pair that comes first in the list of merges is merged, until none is left. Every symbol has an id.

OpenAI's code and OpenCLIP's repair broken encodings (ftfy) and HTML entities first. transformers' composes
characters (NFC) instead, so that ids can differ for unusual text. Both are here; the vocabulary is the same.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitrail.base.errors import FileError, require_extra
from vitrail.base.fields import short_repr

if TYPE_CHECKING:
    from numpy.typing import NDArray

Style = Literal["openai", "transformers"]
END_OF_WORD = "</w>"
SPECIAL = (
    ("<|startoftext|>", "<|endoftext|>"),
    ("<start_of_text>", "<end_of_text>"),
)  # OpenCLIP's are the second
_MERGES = 49_152 - 256 - 2  # of the published vocabulary; its file holds more
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_MAX_WORD = 100_000  # bytes; a longer one is cut, since merging takes quadratic time
_CACHED_WORDS = 100_000


@lru_cache(maxsize=1)
def byte_symbols() -> list[str]:
    """A printable character for each byte: its own where it has one, else one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@dataclass(frozen=True, eq=False)
class ClipTokenizer:
    """Texts to token ids: start, the text's own, end, then zeros.

    Args:
        vocabulary: the id of each symbol.
        merges: pairs of symbols, the first to be merged first.
        style: whose cleaning to follow.
    """

    vocabulary: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    style: Style = "openai"

    def __post_init__(self) -> None:
        missing = [
            symbol
            for byte in byte_symbols()
            for symbol in (byte, byte + END_OF_WORD)
            if symbol not in self.vocabulary
        ]
        missing += [first + second for first, second in self.merges if first + second not in self.vocabulary]
        if missing:
            raise FileError(
                "The vocabulary of a CLIP tokenizer must hold every byte and every merged pair, but has no "
                f"{short_repr(missing[0])}; use the files that were published with the model."
            )
        if self._special is None:
            raise FileError(
                "The vocabulary of a CLIP tokenizer must hold <|startoftext|> and <|endoftext|>; use the "
                "files that were published with the model."
            )

    def __call__(self, texts: Sequence[str], length: int) -> NDArray[np.int64]:
        """Token ids (B, length). A longer text is cut, and its last id is the end token."""
        ids = np.zeros((len(texts), length), np.int64)
        for row, text in enumerate(texts):
            tokens = [self.start, *self.encode(text), self.end][:length]
            tokens[-1] = self.end
            ids[row, : len(tokens)] = tokens
        return ids

    @property
    def start(self) -> int:
        return self.vocabulary[self._names[0]]

    @property
    def end(self) -> int:
        return self.vocabulary[self._names[1]]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start and end."""
        return [id for word in self._words(text) for id in self._encode_word(word)]

    # ---- words ------------------------------------------------------------------------------

    @cached_property
    def _special(self) -> tuple[str, str] | None:
        return next((pair for pair in SPECIAL if set(pair) <= set(self.vocabulary)), None)

    @property
    def _names(self) -> tuple[str, str]:
        assert self._special is not None  # checked on construction
        return self._special

    @cached_property
    def _patterns(self) -> tuple[Any, Any, Any]:
        """For special tokens, for words and special tokens, and for words alone."""
        with require_extra("text"):
            import regex
        start, end = map(regex.escape, self._names)
        words = rf"'s|'t|'re|'ve|'m|'ll|'d|\p{{L}}+|\p{{N}}|[^{_SPACE}\p{{L}}\p{{N}}]+"
        if self.style == "openai":  # as they have it: any \s, and whatever the case
            words = words.replace(_SPACE, r"\s")
            return tuple(
                regex.compile(p, regex.I) for p in (f"{start}|{end}", f"{start}|{end}|{words}", words)
            )
        return tuple(
            regex.compile(pattern) for pattern in (f"{start}|{end}", f"{start}|{end}|{words}", words)
        )

    def _words(self, text: str) -> Iterator[str]:
        """The words of a text; special tokens are words."""
        special, both, alone = self._patterns
        if self.style == "openai":
            yield from both.findall(clean_openai(text))
            return
        at = 0
        for match in special.finditer(text):  # before anything is normalized
            yield from self._normal_words(text[at : match.start()], both, alone)
            yield match[0]
            at = match.end()
        yield from self._normal_words(text[at:], both, alone)

    def _normal_words(self, text: str, both: Any, alone: Any) -> Iterator[str]:
        for word in both.findall(_clean_transformers(text)):
            # What looks like a special token only in lower case is text.
            yield from alone.findall(word) if word in self._names else [word]

    # ---- byte pairs -------------------------------------------------------------------------

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        return {pair: rank for rank, pair in reversed(list(enumerate(self.merges)))}

    @cached_property
    def _encode_word(self) -> Any:
        return lru_cache(maxsize=_CACHED_WORDS)(self._merge)

    def _merge(self, word: str) -> tuple[int, ...]:
        """The ids of a word."""
        if word in self._names:
            return (self.vocabulary[word],)
        names = byte_symbols()
        symbols = [names[byte] for byte in word.encode("utf-8", "surrogatepass")[:_MAX_WORD]]
        symbols[-1] += END_OF_WORD
        ranks, last = self._ranks, len(self.merges)
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: ranks.get(pair, last))
            if best not in ranks:
                break
            symbols = list(_merge_pair(symbols, best))
        return tuple(self.vocabulary[symbol] for symbol in symbols)


def _merge_pair(symbols: Sequence[str], pair: tuple[str, str]) -> Iterator[str]:
    """The symbols with every occurrence of a pair merged, from the left."""
    at = 0
    while at < len(symbols):
        if tuple(symbols[at : at + 2]) == pair:
            yield pair[0] + pair[1]
            at += 2
        else:
            yield symbols[at]
            at += 1


def clean_openai(text: str) -> str:
    """Text with repaired encoding and HTML entities, single spaces, in lower case."""
    return " ".join(repair_text(text).split()).lower()


def repair_text(text: str) -> str:
    """Text with its encoding repaired and HTML entities replaced."""
    with require_extra("text"):
        import ftfy
    return html.unescape(html.unescape(ftfy.fix_text(text)))


def _clean_transformers(text: str) -> str:
    """Text in NFC, with single spaces, each character in lower case (a final sigma is any sigma)."""
    with require_extra("text"):
        import regex
    squeezed = regex.sub(f"[{_SPACE}]+", " ", unicodedata.normalize("NFC", text))
    return "".join(character.lower() for character in squeezed)


def published_vocabulary(lines: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """Vocabulary and merges from the lines of OpenAI's file, whose first is a comment."""
    merges = [tuple(line.split()) for line in lines[1 : _MERGES + 1] if line]
    symbols = sorted(byte_symbols(), key=lambda symbol: (ord(symbol) > 255, ord(symbol)))
    symbols += [symbol + END_OF_WORD for symbol in symbols]
    symbols += ["".join(pair) for pair in merges]
    vocabulary = {name: number for number, name in enumerate([*symbols, *SPECIAL[1]])}
    return vocabulary, merges
