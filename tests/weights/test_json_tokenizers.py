"""Tokenizers of tokenizer.json, trained here: id for id those of transformers, also on hostile text."""

import json
import re
import string

import pytest
import tokenizers as tk
import transformers as hf
from hypothesis import example, given, settings
from hypothesis import strategies as st

import vitrail as vt
from tests.support.hf_models import save_pretrained
from tests.support.text_models import gemma_like
from vitrail.weights.text.tokenizer import JsonTokenizer, open_tokenizer

CORPUS = [
    *("a photo of a cat and a dog", "the quick brown fox jumps over the lazy dog", "two small boats at sea"),
    *("ein Foto von einer Katze", "une photo d'un chat naïf", "фото кошки", "고양이 사진", "一张猫的照片"),
]
LENGTH = 24
PIECES = st.sampled_from(
    [
        *(
            "cat",
            "It's",
            "naïve",
            "ﬁne",
            "Straße",
            "ΣΊΣΥΦΟΣ",
            "İstanbul",
            "e\u0301",
            "한국어",
            "x²",
            "１２３",
        ),
        *("<eos>", "<EOS>", "<pad>", "<Bos>", "<unk>", "</s>", "</S>", "<0x41>", "<0X41>", "▁", "▁▁cat"),
        *("\u00a0", "\t\n", "\u200b", "\u3000", "\x1c", "\x85", "\0", "\ufeff", "\u202eabc", "\U0010ffff"),
        *("👩‍👩‍👧", "🇫🇷", "ǅ", "a\u0300\u0301", "---", "…", "&amp;", "_a_b_", "   ", "\ue000", "\ufffd"),
    ]
)
CHARACTERS = st.characters(exclude_categories=("Cs",))  # lone surrogates are no text
TEXTS = st.lists(st.one_of(PIECES, st.text(CHARACTERS, max_size=8), st.just(" ")), max_size=10).map("".join)
hostile = settings(max_examples=300, deadline=None, derandomize=True)


# ---- byte pairs with a fallback to bytes: Gemma's, of SigLIP 2 --------------------------------


def train_byte_pairs():
    """transformers' tokenizer of SigLIP 2, with merges learned from the corpus."""
    model = tk.Tokenizer(tk.models.BPE(unk_token="<unk>"))
    model.normalizer = tk.normalizers.Replace(" ", "▁")
    model.pre_tokenizer = tk.pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = tk.trainers.BpeTrainer(vocab_size=220, special_tokens=special, show_progress=False)
    model.train_from_iterator(CORPUS, trainer)
    learned = json.loads(model.to_str())["model"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(pair) for pair in learned["merges"]]
    assert len(merges) > 40
    tokenizer = hf.Siglip2Tokenizer(vocab=vocabulary, merges=merges, padding_side="right")
    # The end token after each text, as the published file has it.
    end = tk.processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = end
    return tokenizer


def without_lowercase(content):
    """As the file was published, before transformers wrote the step into it."""
    settings = json.loads(content)
    [_, rest] = settings["normalizer"]["normalizers"]
    return json.dumps({**settings, "normalizer": rest}).encode()


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte-pairs")
    train_byte_pairs().save_pretrained(folder)
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    published = files | {"tokenizer.json": without_lowercase(files["tokenizer.json"])}
    theirs = hf.Siglip2Tokenizer.from_pretrained(folder)
    return theirs, [open_tokenizer(one, "lower") for one in (files, published)]


@hostile
@given(text=TEXTS)
@example(text="")
@example(text="A PHOTO of a cat")
@example(text="<EOS> <eos>")
@example(text="long " * 5_000)
@example(text="x" * 100_000)
def test_byte_pairs_with_byte_fallback(byte_pairs, text):
    theirs, ours = byte_pairs
    expected = theirs(text, padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
    assert len(expected) == LENGTH
    for tokenizer in ours:
        assert tokenizer([text], LENGTH).tolist() == [expected]


def test_unknown_letters_are_bytes(byte_pairs):
    theirs, [ours, _] = byte_pairs
    assert isinstance(ours, JsonTokenizer)
    ids = ours(["ß"], LENGTH)[0].tolist()
    assert theirs.convert_ids_to_tokens(ids[:3]) == ["<0xC3>", "<0x9F>", "<eos>"]


# ---- Unigram: SigLIP's ----------------------------------------------------------------------


def train_unigram():
    """A Unigram of the corpus with SigLIP's special tokens: the end token pads as well."""
    model = tk.Tokenizer(tk.models.Unigram())
    model.normalizer = tk.normalizers.Sequence([tk.normalizers.Nmt(), tk.normalizers.NFKC()])
    model.pre_tokenizer = tk.pre_tokenizers.Metaspace()
    trainer = tk.trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    end = model.token_to_id("</s>")
    model.post_processor = tk.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    names = dict(unk_token="<unk>", eos_token="</s>", pad_token="</s>", padding_side="right")
    return hf.PreTrainedTokenizerFast(tokenizer_object=model, **names)


def canonical(text):
    """What SigLIP's own code does with a text first: lower case, no punctuation, single spaces."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\s+", " ", kept).strip()


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unigram")
    train_unigram().save_pretrained(folder)
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    assert json.loads(files["tokenizer.json"])["model"]["type"] == "Unigram"
    return hf.PreTrainedTokenizerFast.from_pretrained(folder), open_tokenizer(files, "letters")


@hostile
@given(text=TEXTS)
@example(text="")
@example(text="A photo, of_a cat!")
@example(text="</s>cat")
@example(text="long " * 5_000)
@example(text="x" * 100_000)
def test_unigram(unigram, text):
    theirs, ours = unigram
    expected = theirs(canonical(text), padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
    assert ours([text], LENGTH).tolist() == [expected]


def test_a_batch_is_each_text_alone(unigram, byte_pairs):
    texts = ["a photo of a cat", "", "boats " * 40, "고양이"]
    for ours in (unigram[1], byte_pairs[1][0]):
        alone = [ours([text], LENGTH)[0].tolist() for text in texts]
        assert ours(texts, LENGTH).tolist() == alone


# ---- what is no text ------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", " \n", "x" * 10_001, "cat\ud800", 3, None])
def test_what_is_no_text_is_refused(bad, tmp_path):
    tower = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    text = dict(**tower, vocab_size=400, max_position_embeddings=8, bos_token_id=2, eos_token_id=1)
    vision = dict(**tower, patch_size=8, image_size=16)
    model = hf.SiglipModel(hf.SiglipConfig(text_config={**text, "projection_size": 32}, vision_config=vision))
    save_pretrained(model, tmp_path)
    gemma_like().save_pretrained(tmp_path)
    with pytest.raises(vt.InputError, match="A text must be a string of 1 to 10,000 characters"):
        vt.load(tmp_path).text(["a cat", bad])
