"""`vitrail lab characters --save` and `vitrail generate`: a file, the text it continues, and wrong files."""

import json

import pytest
import torch
from typer.testing import CliRunner

from vitrail.base.errors import FileError, InputError, VitrailError
from vitrail.cli import app
from vitrail.weights.readers.files import write_safetensors
from vitrail_course.character_model import CharacterModel, load_character_model
from vitrail_course.decoder import Decoder, DecoderConfig
from vitrail_course.labs import characters, lab

VOCABULARY = list("\n abcdeROM:")


def build():
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=len(VOCABULARY), width=16, depth=1, heads=2, length=8)
    return CharacterModel(Decoder(config).eval(), VOCABULARY)


@pytest.fixture
def file(tmp_path):
    build().save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_file_and_back(file):
    loaded, original = load_character_model(file), build()
    assert loaded.vocabulary == VOCABULARY
    assert loaded.model.config == original.model.config
    tokens = torch.randint(len(VOCABULARY), (2, 8))
    assert torch.equal(loaded.model(tokens), original.model(tokens))


def test_a_seed_gives_the_same_text_and_others_another(file):
    model = load_character_model(file)
    text = model.continue_text("ROM:", 60, seed=1)
    assert text.startswith("ROM:")
    assert len(text) == 64
    assert text == model.continue_text("ROM:", 60, seed=1)
    assert text != model.continue_text("ROM:", 60, seed=2)
    likely = model.continue_text("a", 10, temperature=0)
    assert likely == model.continue_text("a", 10, temperature=0, seed=5)


def test_prompts_outside_the_vocabulary(file):
    model = load_character_model(file)
    with pytest.raises(InputError, match=r"The prompt has 'X', 'é'; the model knows only .*abcdeROM"):
        model.continue_text("Xaé", 5)
    with pytest.raises(InputError, match="The prompt is empty"):
        model.continue_text("", 5)


def test_wrong_files(tmp_path, file):
    state = build().model.state_dict()
    vitrail = tmp_path / "other.safetensors"
    write_safetensors(vitrail, state)
    with pytest.raises(FileError, match=r"holds no model of characters; make one with `vitrail lab char"):
        load_character_model(vitrail)

    def with_description(description):
        write_safetensors(vitrail, state, {"vitrail-characters": description})
        load_character_model(vitrail)

    config = {"vocabulary": 11, "width": 16, "depth": 1, "heads": 2, "length": 8}
    for description, reason in (
        ("[]", "no config or no vocabulary"),
        ("{", "damaged|JSON"),
        (json.dumps({"config": {**config, "depth": 2}, "vocabulary": VOCABULARY}), "not those of its config"),
        (json.dumps({"config": {**config, "depth": -2}, "vocabulary": VOCABULARY}), "depth"),
        (json.dumps({"config": config, "vocabulary": VOCABULARY[:-1]}), "not 11 different characters"),
        (json.dumps({"config": config, "vocabulary": [*VOCABULARY[:-1], "ab"]}), "not 11 different"),
    ):
        with pytest.raises(FileError, match=reason):
            with_description(description)
    broken = build()
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    broken.save(vitrail)
    with pytest.raises(FileError, match=r"norm\.weight has NaN or infinity"):
        load_character_model(vitrail)
    (tmp_path / "text.safetensors").write_text("no model")
    with pytest.raises(FileError, match="cannot be read"):
        load_character_model(tmp_path / "text.safetensors")
    with pytest.raises(VitrailError, match="safetensors"):
        build().save(tmp_path / "model.pt")


def test_lab_saves_its_model(tmp_path, monkeypatch):
    short = characters._CharacterSettings(16, 1, 8, 3, 6e-3, 0, sample=5)
    monkeypatch.setitem(characters.SETTINGS, "small", short)
    saved = tmp_path / "new.safetensors"
    lab.run_lab("characters", tmp_path / "out", "small", save=saved)
    text = load_character_model(saved).continue_text("def ", 20, seed=0)
    assert text.startswith("def ")
    with pytest.raises(VitrailError, match=r"new\.safetensors"):
        lab.run_lab("characters", tmp_path / "again", "small", save=saved)
    with pytest.raises(InputError, match="The lab scale keeps no model; --save is an option for characters"):
        lab.run_lab("scale", tmp_path / "other", "small", save=tmp_path / "x.safetensors")
    with pytest.raises(VitrailError, match="safetensors"):
        lab.run_lab("characters", tmp_path / "other", "small", save=tmp_path / "x.pt")
    assert not (tmp_path / "other").exists()


def test_generate_command(file):
    done = CliRunner().invoke(app, ["generate", str(file), "ROM:", "--length", "30", "--seed", "1"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("ROM:")
    assert len(done.output) == 4 + 30 + 1
    for options, message in (
        (["--length", "-1"], "--length must be from 0"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--temperature", "-1"], "temperature must be 0"),
    ):
        with pytest.raises(InputError, match=message):
            CliRunner().invoke(app, ["generate", str(file), "a", *options], catch_exceptions=False)
