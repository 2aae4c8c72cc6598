"""A text tower's tokenizer, from the files that were published beside the weights.

| files                                          | tokenizer                                    |
|------------------------------------------------|----------------------------------------------|
| vocab.json and merges.txt, or OpenAI's .txt.gz | CLIP's byte pairs (Sennrich et al. 2016)     |
| tokenizer.json whose pairs end in `</w>`       | the same                                     |
| any other tokenizer.json (SigLIP's, Gemma's)   | as it is                                     |

The package `tokenizers` runs all of them. For CLIP, OpenAI's code and OpenCLIP's repair broken encodings
(ftfy) and HTML entities first; transformers' composes characters (NFC) instead, so that ids can differ for
unusual text. Both are here; the vocabulary is the same. Without any file, the vocabulary of CLIP is read from
an installed open_clip. The files are kept with the model and written into a vitrail file, so that one file is
complete.
"""

from __future__ import annotations

import gzip
import html
import io
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitrail.base.errors import FileError, require_extra
from vitrail.base.fields import short_repr
from vitrail.base.safe_files import parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

Style = Literal["openai", "transformers"]
END_OF_WORD = "</w>"
SPECIAL = ("<|startoftext|>", "<|endoftext|>"), ("<start_of_text>", "<end_of_text>")  # the second: OpenCLIP's
_MERGES = 49_152 - 256 - 2  # of the published vocabulary; its file holds more
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"


def byte_symbols() -> list[str]:
    """A printable character for each byte: its own where it has one, else one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class ClipTokenizer:
    """Texts to token ids: start, the text's own, end, then zeros.

    Args:
        vocabulary: the id of each symbol.
        merges: pairs of symbols, the first to be merged first.
        style: whose cleaning to follow.
    """

    def __init__(
        self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], style: Style = "openai"
    ) -> None:
        self.vocabulary, self.style = dict(vocabulary), style
        self.merges = list(dict.fromkeys(merges))
        needed = [symbol + end for symbol in byte_symbols() for end in ("", END_OF_WORD)]
        needed += [symbol for a, b in self.merges for symbol in (a, b, a + b)]
        if missing := [symbol for symbol in needed if symbol not in self.vocabulary]:
            raise FileError(
                "The vocabulary of a CLIP tokenizer must hold every byte and every merged pair, but has no "
                f"{short_repr(missing[0])}; use the files that were published with the model."
            )
        special = next((pair for pair in SPECIAL if set(pair) <= set(self.vocabulary)), None)
        if special is None:
            raise FileError(
                "The vocabulary of a CLIP tokenizer must hold <|startoftext|> and <|endoftext|>; use the "
                "files that were published with the model."
            )
        self.special = special
        self.start, self.end = (self.vocabulary[name] for name in special)

    def __call__(self, texts: Sequence[str], length: int) -> NDArray[np.int64]:
        """Token ids (B, length). A longer text is cut, and its last id is the end token."""
        ids = np.zeros((len(texts), length), np.int64)
        for row, text in enumerate(texts):
            tokens = [self.start, *self.encode(text), self.end][:length]
            tokens[-1] = self.end
            ids[row, : len(tokens)] = tokens
        return ids

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start and end."""
        if self.style == "transformers":
            return self._backend.encode(text).ids
        with require_extra("text"):
            import regex
        # Any case, as OpenAI has it, although the text is in lower case: "ſ" (long s) is an s.
        pattern = rf"{'|'.join(map(regex.escape, self.special))}|{_WORDS}"
        words = regex.findall(pattern, clean_openai(text), regex.IGNORECASE)
        return self._backend.encode(words, is_pretokenized=True).ids

    @cached_property
    def _backend(self) -> Any:
        """Byte pairs of words; for transformers' style, its normalizer and its words as well."""
        with require_extra("text"):
            from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
        backend = Tokenizer(models.BPE(self.vocabulary, self.merges, end_of_word_suffix=END_OF_WORD))
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.style == "transformers")
        backend.pre_tokenizer = as_bytes
        if self.style == "transformers":
            single_spaces = normalizers.Replace(Regex(r"\s+"), " ")
            backend.normalizer = normalizers.Sequence(
                [normalizers.NFC(), single_spaces, normalizers.Lowercase()]
            )
            pattern = "|".join(name.replace("|", r"\|") for name in self.special) + "|" + _WORDS
            words = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in self.special])
        return backend


def clean_openai(text: str) -> str:
    """Text with repaired encoding and HTML entities, single spaces, in lower case."""
    return " ".join(repair_text(text).split()).lower()


def repair_text(text: str) -> str:
    """Text with its encoding repaired and HTML entities replaced."""
    with require_extra("text"):
        import ftfy
    return html.unescape(html.unescape(ftfy.fix_text(text)))


def published_vocabulary(lines: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """Vocabulary and merges from the lines of OpenAI's file, whose first is a comment."""
    merges = [tuple(line.split()) for line in lines[1 : _MERGES + 1] if line]
    symbols = sorted(byte_symbols(), key=lambda symbol: (ord(symbol) > 255, ord(symbol)))
    symbols += [symbol + END_OF_WORD for symbol in symbols]
    symbols += ["".join(pair) for pair in merges]
    vocabulary = {name: number for number, name in enumerate([*symbols, *SPECIAL[1]])}
    return vocabulary, merges


CLIP_FILE = "bpe_simple_vocab_16e6.txt.gz"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", CLIP_FILE)
MAX_BYTES = 100_000_000  # of a tokenizer's file; Gemma's has 34 MB
CLIP_VOCABULARY = 49_408
Clean = Literal["lower", "letters", "openclip"]


def open_tokenizer(files: Mapping[str, bytes], style: Style | Clean) -> ClipTokenizer | JsonTokenizer:
    """The tokenizer in these files.

    Args:
        files: by their names.
        style: whose cleaning of texts to follow: "openai" or "transformers" for CLIP; for others "lower"
            (SigLIP 2), "letters" (SigLIP, which has no punctuation) or "openclip" (OpenCLIP's SigLIP).
    """
    clip_style: Style = style if style in ("openai", "transformers") else "transformers"
    if "tokenizer.json" in files:
        model = _json(files, "tokenizer.json").get("model")
        if isinstance(model, dict) and model.get("end_of_word_suffix") == END_OF_WORD:
            return _clip_tokenizer(model.get("vocab"), model.get("merges"), clip_style)
        return JsonTokenizer(files, style)
    if "vocab.json" in files and "merges.txt" in files:
        lines = _text(files["merges.txt"], "merges.txt").split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        return _clip_tokenizer(_json(files, "vocab.json"), merges, clip_style)
    if CLIP_FILE in files:
        return _clip_tokenizer(*published_vocabulary(_unpack(files[CLIP_FILE])), clip_style)
    raise FileError(
        "The model has a text tower, but no tokenizer is beside its weights: load the folder with its "
        "tokenizer.json, or with vocab.json and merges.txt. CLIP's own is also read from an installed "
        "open_clip_torch."
    )


def installed_clip_file() -> bytes | None:
    """OpenAI's vocabulary from an installed open_clip or clip, which is not imported."""
    for package in ("open_clip", "clip"):
        spec = find_spec(package)
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
        for path in (folder / CLIP_FILE for folder in folders):
            if path.is_file():
                return path.read_bytes()
    return None


# ---- CLIP -----------------------------------------------------------------------------------


def _clip_tokenizer(vocabulary: Any, merges: Any, style: Style) -> ClipTokenizer:
    """A tokenizer from a JSON vocabulary, and from merges as pairs or as lines of two symbols."""
    pairs = merges if isinstance(merges, list) else []
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in pairs]
    valid = isinstance(vocabulary, dict) and all(type(number) is int for number in vocabulary.values())
    if not valid or not pairs or any(len(pair) != 2 for pair in pairs):
        raise FileError(
            "A CLIP tokenizer needs a vocabulary of symbols with their ids, and merges of two symbols each; "
            "use the files that were published with the model."
        )
    return ClipTokenizer(vocabulary, pairs, style)


def _unpack(data: bytes) -> list[str]:
    with gzip.open(io.BytesIO(data)) as file:
        try:
            content = file.read(MAX_BYTES)
        except (OSError, EOFError) as error:
            raise FileError(f"{CLIP_FILE} is damaged ({error}); install open_clip_torch again.") from error
    return _text(content, CLIP_FILE).split("\n")


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{name} is not UTF-8 text; download it again.") from error


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = parse_json(files[name], name) if name in files else {}
    if not isinstance(value, dict):
        raise FileError(f"{name} must be a JSON object, not {type(value).__name__}; download it again.")
    return value


# ---- the package tokenizers -----------------------------------------------------------------


class JsonTokenizer:
    """A tokenizer.json, run by the package `tokenizers`: always padded to the full length, as SigLIP's."""

    def __init__(self, files: Mapping[str, bytes], style: str) -> None:
        with require_extra("text"):
            from tokenizers import Tokenizer as Backend
            from tokenizers import normalizers
        try:
            backend = Backend.from_str(_text(files["tokenizer.json"], "tokenizer.json"))
        except Exception as error:  # the package raises plain Exceptions
            raise FileError(
                f"tokenizer.json cannot be read: {str(error)[:200]}; download it again."
            ) from error
        if style == "lower":
            # As a step of the tokenizer: "<EOS>" in a text must not become the special token.
            steps = [normalizers.Lowercase(), backend.normalizer]
            backend.normalizer = normalizers.Sequence([step for step in steps if step is not None])
        settings = _json(files, "tokenizer_config.json")
        name = settings.get("pad_token")
        name = name.get("content") if isinstance(name, dict) else name
        known = backend.padding["pad_id"] if backend.padding else 0
        number = backend.token_to_id(name) if isinstance(name, str) else known
        self.tokenizer, self.style, self.pad = backend, style, known if number is None else number
        self.side = "left" if settings.get("padding_side") == "left" else "right"

    def __call__(self, texts: Sequence[str], length: int) -> NDArray[np.int64]:
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(direction=self.side, pad_id=self.pad, length=length)
        encoded = self.tokenizer.encode_batch([_clean(text, self.style) for text in texts])
        return np.array([one.ids for one in encoded], np.int64).reshape(len(texts), length)


def _clean(text: str, style: str) -> str:
    """A text as the model's own code cleans it before the tokenizer."""
    if style == "lower":
        return text  # the tokenizer lowers it
    if style == "openclip":
        text = repair_text(text).replace("_", " ")
    without = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(without.split())
