"""`vitrail export --to html` as a user runs it, and which models it refuses."""

import json
import os
import re
import sys

import pytest
import torch

import vitrail as vt
from vitrail.cli import main
from vitrail.errors import InputError
from vitrail.export import html
from vitrail.inspect.sample import FILE
from vitrail.weights.bundle import Bundle

SMALL = dict(width=8, depth=1, heads=2, patch=4, size=8, channels=1, classes=3)


@pytest.fixture
def export(tmp_path, monkeypatch, capsys):
    """The command line from within: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vitrail", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


def facts_of(text):
    return json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])


def test_the_command(export, tmp_path):
    assert export(FILE, "--to", "html") == (0, "Written: classroom.html, 0.6 MB. Open it in a browser.\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["classroom.html"]
    text = (tmp_path / "classroom.html").read_text()
    assert facts_of(text)["parameters"] == 105_098
    assert not re.search(r'(?:src|href)="(?!data:|https://arxiv\.org/abs/2010\.11929")', text)


def test_a_file_that_is_there_stays(export, tmp_path):
    (tmp_path / "mine.html").write_text("mine")
    code, said, wrong = export(FILE, "--to", "html", "--out", "mine.html")
    assert (code, said) == (2, "")
    assert wrong == (
        "vitrail: A page is a new file: nothing of yours is overwritten. Got mine.html, which is there already. "
        "Name another file with --out.\n"
    )
    assert (tmp_path / "mine.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "tflite"], "Got 'tflite'. There is: onnx, torch-export, html."),
        (["--to", "html", "--out", "page.txt"], "must end in .html. Got page.txt."),
    ],
)
def test_wrong_use(arguments, words, export, tmp_path):
    code, said, wrong = export(FILE, *arguments)
    assert (code, said) == (2, "")
    assert words in wrong
    assert not [*tmp_path.iterdir()]


REFUSED = [
    dict(position="rotary", width=16),
    dict(position="pairwise"),
    dict(position_at="every"),
    dict(embedding="mlp"),
    dict(embedding_norm="after"),
    dict(norm_pre=True),
    dict(block="post-norm"),
    dict(norm="rms"),
    dict(qk_norm=True),
    dict(activation="silu"),
    dict(mlp="gated"),
    dict(mlp_hidden=2),
    dict(pool="attention"),
    dict(head="tanh"),
    dict(channels=2),
]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: next(iter(change)))
def test_what_the_page_does_not_compute_is_refused_by_name(change, tmp_path):
    field, value = next(iter(change.items()))
    bundle = Bundle(model=vt.ViT(vt.ViTConfig(**{**SMALL, **change})))
    with pytest.raises(InputError, match=rf"computes models with {field} .*Got {field}={value!r}"):
        html.write_classroom(bundle, tmp_path / "page.html")
    assert not [*tmp_path.iterdir()]


def test_other_inputs_are_refused(tmp_path):
    text = vt.ViTConfig(width=8, depth=1, heads=2, input="text", size=6, patch=1, vocabulary=9, classes=3)
    with pytest.raises(InputError, match=r"input 'picture'\. Got input='text'"):
        html.write_classroom(Bundle(model=vt.ViT(text)), tmp_path / "page.html")


def test_every_choice_of_the_config_is_either_computed_or_has_no_part_in_the_answer():
    """A field that somebody adds to the model must be thought of here."""
    shape = {"width", "depth", "heads", "head_width", "mlp_width", "patch", "size", "registers", "classes"}
    exported = {"embedding_bias", "class_token", "distillation_token", "rows", "eps", "scale", "qkv_bias"}
    exported |= {"layer_scale", "pool_norm", "head_bias", "remainder"}
    not_there = {"vocabulary", "head_hidden"}  # of inputs and heads that are refused
    training = {"dropout", "attention_dropout", "patch_dropout", "drop_path", "init", "position_sigma"}
    parts = [set(html.COMPUTED), shape, exported, not_there, training]
    assert set.union(*parts) == set(vt.ViTConfig.__dataclass_fields__)
    assert sum(map(len, parts)) == len(set.union(*parts))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(classes=0), "must have a head. Got classes=0"),
        (dict(size=132), "at most 1,024 tokens. Got 1,090, of size 132x132 in patches of 4x4"),
        (dict(width=512, depth=2), r"at most 6,000,000 parameters. Got 6,3\d\d,\d\d\d"),
    ],
)
def test_models_too_large_or_without_an_answer(change, words, tmp_path):
    bundle = Bundle(model=vt.ViT(vt.ViTConfig(**{**SMALL, **change})))
    with pytest.raises(InputError, match=words):
        html.write_classroom(bundle, tmp_path / "page.html")


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    model = vt.ViT(vt.ViTConfig(**SMALL))
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="infinite or NaN"):
        html.write_classroom(Bundle(model=model), tmp_path / "page.html")


def test_a_large_page_is_written_with_a_word_on_its_size(tmp_path):
    model = vt.ViT(vt.ViTConfig(**{**SMALL, "width": 256, "depth": 2}))
    notes = html.write_classroom(Bundle(model=model), tmp_path / "page.html")
    size = (tmp_path / "page.html").stat().st_size / 1e6
    assert notes == [f"The page has {size:.0f} MB: too large for most mail, and slow to open on a phone."]


def test_without_scikit_learn_the_page_has_no_examples(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    notes = html.write_classroom(vt.load(FILE), tmp_path / "page.html")
    assert len(notes) == 1
    assert notes[0].startswith("The page has no example pictures: This needs the package sklearn")
    assert facts_of((tmp_path / "page.html").read_text())["examples"] == []


def test_half_a_page_is_never_left(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        html.write_classroom(Bundle(model=vt.ViT(vt.ViTConfig(**SMALL))), tmp_path / "page.html")
    assert not [*tmp_path.iterdir()]
