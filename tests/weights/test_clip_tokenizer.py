"""CLIP's tokenizer, id for id, against OpenCLIP's and transformers' own, also on hostile text."""

import gzip
import json
import sys
import unicodedata

import open_clip.tokenizer
import pytest
import torch
import transformers as hf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.text_models import gemma_like, save_clip_tokenizer, tiny_vocabulary
from vitrail.base.errors import FileError, MissingExtra
from vitrail.weights.text.tokenizer import (
    CLIP_FILE,
    ClipTokenizer,
    byte_symbols,
    installed_clip_file,
    open_tokenizer,
)

OPEN_CLIP = open_clip.tokenizer.SimpleTokenizer()
OURS = open_tokenizer({CLIP_FILE: installed_clip_file()}, "openai")
# transformers' tokenizer with the whole published vocabulary, under the names that it uses.
_NAMES = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
VOCABULARY = {_NAMES.get(name, name): number for name, number in OPEN_CLIP.encoder.items()}
MERGES = list(OPEN_CLIP.bpe_ranks)
TRANSFORMERS = hf.CLIPTokenizer(vocab=VOCABULARY, merges=MERGES)
LIKE_TRANSFORMERS = ClipTokenizer(VOCABULARY, MERGES, "transformers")

# Characters that Python's Unicode (14) knows: the libraries have different versions of newer ones.
CHARACTERS = st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="\0").filter(
    lambda c: unicodedata.category(c) != "Cn"
)
PIECES = st.sampled_from(
    [
        *(
            "cat",
            "It's",
            "they'LL",
            "don't",
            "naïve",
            "ﬁne",
            "Straße",
            "ΣΊΣΥΦΟΣ",
            "İstanbul",
            "e\u0301",
            "한국어",
        ),
        *(
            "１２３",
            "x²",
            "½",
            "&amp;amp;",
            "&lt;br&gt;",
            "â€œ",
            "schÃ¶n",
            "\u00a0",
            "\t\n",
            "\u200b",
            "\u3000",
        ),
        *(
            "<|endoftext|>",
            "<|EndOfText|>",
            "<start_of_text>",
            "<|startoftext|>!!",
            "👩‍👩‍👧",
            "🇫🇷",
            "'ſ",
            "''s",
        ),
        *("\u202eabc", "a\u0300\u0301", "ǅ", "\x1c", "\x85", "_under_score_", "---", "…", "\ufeff"),
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(CHARACTERS, max_size=8), st.just(" ")), max_size=8).map("".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TEXTS)
@example("a photo of a cat, isn't it?")
@example("")
def test_same_ids_as_openclip(text):
    expected = OPEN_CLIP([text])
    assert torch.equal(torch.from_numpy(OURS([text], 77)), expected)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TEXTS)
@example("a photo of a cat, isn't it?")
@example("ΟΔΟΣ")
@example("<|ENDOFTEXT|>!!")
def test_same_ids_as_transformers(text):
    expected = TRANSFORMERS(text)["input_ids"]
    assert [LIKE_TRANSFORMERS.start, *LIKE_TRANSFORMERS.encode(text), LIKE_TRANSFORMERS.end] == expected


def test_long_texts_are_cut_and_end_with_the_end_token():
    text = "a very long sentence " * 40
    assert torch.equal(torch.from_numpy(OURS([text, "short"], 77)), OPEN_CLIP([text, "short"]))
    cut = TRANSFORMERS(text, max_length=16, truncation=True)["input_ids"]
    assert LIKE_TRANSFORMERS([text], 16)[0].tolist() == cut


def test_a_text_of_a_million_letters_does_not_take_minutes():
    assert OURS(["a" * 1_000_000], 77)[0, -1] == OURS.end


def test_the_files_of_a_folder(tmp_path):
    vocabulary, merges = save_clip_tokenizer(tmp_path)
    both = {name: (tmp_path / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    theirs = hf.CLIPTokenizer(vocab=vocabulary, merges=merges)
    theirs.save_pretrained(tmp_path / "hf")
    lone = {"tokenizer.json": (tmp_path / "hf" / "tokenizer.json").read_bytes()}
    text = "Photo of a cat's paw 42"
    expected = theirs(text)["input_ids"]
    for files in (both, lone):
        tokenizer = open_tokenizer(files, "transformers")
        assert isinstance(tokenizer, ClipTokenizer)
        assert tokenizer([text], 50)[0, : len(expected)].tolist() == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_another_tokenizer_json_is_run_by_tokenizers(tmp_path, side):
    theirs = gemma_like()
    theirs.padding_side = side
    theirs.save_pretrained(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    texts = ["a CAT of dogs", "é", "long " * 30]
    expected = theirs(texts, padding="max_length", truncation=True, max_length=12)["input_ids"]
    assert open_tokenizer(files, "lower")(texts, 12).tolist() == expected


def test_siglip_has_no_punctuation(tmp_path):
    gemma_like().save_pretrained(tmp_path)
    tokenizer = open_tokenizer({"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}, "letters")
    assert tokenizer(["A cat, of_dogs!"], 12).tolist() == tokenizer(["a cat ofdogs"], 12).tolist()
    tokenizer = open_tokenizer({"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}, "openclip")
    assert tokenizer(["A cat, of_dogs!"], 12).tolist() == tokenizer(["a cat of dogs"], 12).tolist()


def broken(**changes):
    vocabulary, merges = tiny_vocabulary()
    files = {
        "vocab.json": json.dumps(vocabulary).encode(),
        "merges.txt": "\n".join(map(" ".join, merges)).encode(),
    }
    return files | changes


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer is beside its weights"),
        (broken(**{"vocab.json": b"{}"}), "every byte"),
        (broken(**{"vocab.json": b"[1"}), "not valid JSON"),
        (broken(**{"merges.txt": b"\xff"}), "not UTF-8"),
        (broken(**{"merges.txt": b"a b c\n"}), "merges of two symbols"),
        (broken(**{"merges.txt": b"q q\n"}), "every merged pair"),
        ({CLIP_FILE: b"not gzip"}, "is damaged"),
        ({CLIP_FILE: gzip.compress(b"x\na b c\n")}, "two symbols"),
        ({"tokenizer.json": b'{"model": {"type": "nothing"}}'}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b"[]"}, "must be a JSON object"),
    ],
)
def test_broken_files(files, message):
    with pytest.raises(FileError, match=message):
        open_tokenizer(files, "openai")


def test_a_vocabulary_without_special_tokens():
    vocabulary = {
        symbol: n for n, symbol in enumerate([*byte_symbols(), *(f"{s}</w>" for s in byte_symbols())])
    }
    with pytest.raises(FileError, match="startoftext"):
        ClipTokenizer(vocabulary, [])


@pytest.mark.parametrize("package", ["regex", "ftfy", "tokenizers"])
def test_a_missing_package_is_named(monkeypatch, tmp_path, package):
    gemma_like().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    lone = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    files = lone if package == "tokenizers" else {CLIP_FILE: installed_clip_file()}
    with pytest.raises(MissingExtra, match=rf"the package {package}.*vitrail\[text\]"):
        open_tokenizer(files, "openai")(["a cat"], 20)


def test_the_installed_vocabulary_is_found_without_importing_its_package(monkeypatch):
    for name in ("open_clip", "clip"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert installed_clip_file()
    assert "open_clip" not in sys.modules
    monkeypatch.setattr("vitrail.weights.text.tokenizer.find_spec", lambda name: None)
    assert installed_clip_file() is None
