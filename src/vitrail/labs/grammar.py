"""Sentences of a small grammar, with their translations: what `encoder-decoder` learns from.

English becomes a made-up language with French words: the verb stands last, the adjective follows its
noun, articles, adjectives and verbs agree. No dictionary of words can do that: what to write depends on
words elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

NOUNS = {  # singular and plural of both, and whether the French is feminine
    "dog": ("dogs", "chien", "chiens", False),
    "cat": ("cats", "chat", "chats", False),
    "bird": ("birds", "oiseau", "oiseaux", False),
    "boy": ("boys", "enfant", "enfants", False),
    "girl": ("girls", "fille", "filles", True),
    "mouse": ("mice", "souris", "souris", True),
    "hen": ("hens", "poule", "poules", True),
    "cow": ("cows", "vache", "vaches", True),
}
ARTICLES = {  # English and whether it is plural: masculine, feminine
    ("the", False): ("le", "la"),
    ("a", False): ("un", "une"),
    ("the", True): ("les", "les"),
    ("some", True): ("des", "des"),
}
ADJECTIVES = {"small": "petit", "tall": "grand", "black": "noir", "green": "vert"}
VERBS = {"saw": "voyai", "found": "trouvai", "heard": "entendai", "followed": "suivai"}

PAD, BEGIN, END = "-", ">", "."
SOURCE, TARGET = 7, 8  # the longest sentence; of the target, with its end


class Sentence(NamedTuple):
    """A sentence, its translation, and for each word of the translation where it comes from."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    origin: tuple[int, ...]


def phrases() -> list[Sentence]:
    """All subjects and objects: an article, perhaps an adjective, a noun."""
    found = []
    for (article, several), adjective, noun in product(ARTICLES, (None, *ADJECTIVES), NOUNS):
        plural, one, many, feminine = NOUNS[noun]
        named, written = (plural, many) if several else (noun, one)
        before = (article,) if adjective is None else (article, adjective)
        after = () if adjective is None else (ADJECTIVES[adjective] + "e" * feminine + "s" * several,)
        origin = (0, len(before), *([1] if adjective else []))
        found.append(
            Sentence((*before, named), (ARTICLES[article, several][feminine], written, *after), origin)
        )
    return found


def sentences() -> list[Sentence]:
    """Every sentence that there is: subject, verb, object; translated, the verb is last and agrees."""
    found = []
    for subject, (verb, stem), thing in product(phrases(), VERBS.items(), phrases()):
        several = subject.target[0] in ("les", "des")
        here = len(subject.source)
        found.append(
            Sentence(
                (*subject.source, verb, *thing.source),
                (*subject.target, *thing.target, stem + ("ent" if several else "t")),
                (*subject.origin, *(here + 1 + place for place in thing.origin), here),
            )
        )
    return found


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sentences to learn from, and others that are not among them."""

    words: list[str]
    train: list[Sentence]
    held_out: list[Sentence]

    def numbers(self, some: list[Sentence]) -> tuple[Tensor, Tensor]:
        """Sources (B, 7) and targets with their end (B, 8), filled up."""
        known = {word: n for n, word in enumerate(self.words)}

        def fill(words: tuple[str, ...], length: int) -> list[int]:
            return [known[word] for word in words] + [0] * (length - len(words))

        sources = [fill(one.source, SOURCE) for one in some]
        targets = [fill((*one.target, END), TARGET) for one in some]
        return torch.tensor(sources), torch.tensor(targets)


def corpus(train: int, held_out: int) -> Corpus:
    every = sentences()
    words = sorted({word for one in every for word in (*one.source, *one.target)})
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [every[n] for n in order[: train + held_out]]
    return Corpus([PAD, BEGIN, END, *words], chosen[:train], chosen[train:])
