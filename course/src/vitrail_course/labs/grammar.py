"""Sentences of a small grammar and their translations: the data of the lab `encoder-decoder`.

English is translated to a made-up language with French words: the verb comes last, adjectives follow their
noun, and articles, adjectives and verbs agree. A word-by-word dictionary is not enough, because each word
depends on words elsewhere in the sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

_NOUNS = {  # English singular: English plural, French singular and plural, whether feminine
    "dog": ("dogs", "chien", "chiens", False),
    "cat": ("cats", "chat", "chats", False),
    "bird": ("birds", "oiseau", "oiseaux", False),
    "boy": ("boys", "enfant", "enfants", False),
    "girl": ("girls", "fille", "filles", True),
    "mouse": ("mice", "souris", "souris", True),
    "hen": ("hens", "poule", "poules", True),
    "cow": ("cows", "vache", "vaches", True),
}
ARTICLES = {  # English, whether plural: masculine and feminine
    ("the", False): ("le", "la"),
    ("a", False): ("un", "une"),
    ("the", True): ("les", "les"),
    ("some", True): ("des", "des"),
}
_ADJECTIVES = {"small": "petit", "tall": "grand", "black": "noir", "green": "vert"}
_VERBS = {"saw": "voyai", "found": "trouvai", "heard": "entendai", "followed": "suivai"}

PAD, BEGIN, END = "-", ">", "."
SOURCE_LENGTH, TARGET_LENGTH = 7, 8  # words of the longest sentence; the target includes its end token


class Sentence(NamedTuple):
    """A sentence, its translation, and the source position of each translated word."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    origin: tuple[int, ...]


def phrases() -> list[Sentence]:
    """All noun phrases: an article, an optional adjective, a noun."""
    result = []
    for (article, is_plural), adjective, noun in product(ARTICLES, (None, *_ADJECTIVES), _NOUNS):
        plural, french_singular, french_plural, feminine = _NOUNS[noun]
        english, french = (plural, french_plural) if is_plural else (noun, french_singular)
        before = (article,) if adjective is None else (article, adjective)
        after = () if adjective is None else (_ADJECTIVES[adjective] + "e" * feminine + "s" * is_plural,)
        origin = (0, len(before), *([1] if adjective else []))
        result.append(
            Sentence((*before, english), (ARTICLES[article, is_plural][feminine], french, *after), origin)
        )
    return result


def sentences() -> list[Sentence]:
    """All sentences: subject, verb, object; in the translation, the verb comes last and agrees."""
    result = []
    for subject, (verb, stem), object_ in product(phrases(), _VERBS.items(), phrases()):
        is_plural = subject.target[0] in ("les", "des")
        verb_position = len(subject.source)
        result.append(
            Sentence(
                (*subject.source, verb, *object_.source),
                (*subject.target, *object_.target, stem + ("ent" if is_plural else "t")),
                (
                    *subject.origin,
                    *(verb_position + 1 + position for position in object_.origin),
                    verb_position,
                ),
            )
        )
    return result


@dataclass(frozen=True, eq=False)
class SentenceCorpus:
    """Disjoint training and held-out sentences."""

    vocabulary: list[str]
    train: list[Sentence]
    held_out: list[Sentence]

    def encode(self, sentences: list[Sentence]) -> tuple[Tensor, Tensor]:
        """Padded token ids of the sources, (B, 7), and of the targets with end token, (B, 8)."""
        ids = {word: n for n, word in enumerate(self.vocabulary)}

        def pad(words: tuple[str, ...], length: int) -> list[int]:
            return [ids[word] for word in words] + [0] * (length - len(words))

        sources = [pad(sentence.source, SOURCE_LENGTH) for sentence in sentences]
        targets = [pad((*sentence.target, END), TARGET_LENGTH) for sentence in sentences]
        return torch.tensor(sources), torch.tensor(targets)


def build_corpus(train: int, held_out: int) -> SentenceCorpus:
    all_sentences = sentences()
    vocabulary = sorted({word for sentence in all_sentences for word in (*sentence.source, *sentence.target)})
    order = torch.randperm(len(all_sentences), generator=torch.Generator().manual_seed(0)).tolist()
    selected = [all_sentences[n] for n in order[: train + held_out]]
    return SentenceCorpus([PAD, BEGIN, END, *vocabulary], selected[:train], selected[train:])
