"""Zero-shot heads: words baked into an ordinary file, checked on a real tiny CLIP of digit scenes."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn import functional as F
from typer.testing import CliRunner

import vitrail as vt
from tests.support.digit_clip import DIGITS, FILE, save_hf_folder, save_scenes, scenes, towers
from tests.support.scenes import scene_digits
from tests.support.text_models import gemma_like, noisy
from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.predict import Predictor
from vitrail.weights.conversion import interpolate
from vitrail.weights.text.prompts import TEMPLATES, fill_templates, read_prompts


@pytest.fixture(scope="module")
def digits():
    return vt.load(FILE)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return save_scenes(tmp_path_factory.mktemp("scenes"))


def command(*arguments, code=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result


def test_the_digits_are_classified_by_their_names(digits):
    """Chance is 10 %. The names of the classes are all that the head is made of."""
    pixels, chosen = scenes(400, seed=1)
    predictions = Predictor(digits.zero_shot(DIGITS, ["a {}"]), workers=0)(list(pixels))
    right = [
        one.label == DIGITS[d] for one, d in zip(predictions, scene_digits(chosen).tolist(), strict=True)
    ]
    assert np.mean(right) > 0.6


def test_a_baked_head_gives_the_scaled_cosines(digits):
    texts = ["a small seven on the left", "a large two"]
    images = torch.randn(3, 1, 24, 24)
    baked = digits.zero_shot(texts, ["{}"])
    with torch.no_grad():
        expected = digits.text.scale * F.normalize(digits.model(images), dim=-1) @ digits.text(texts).T
        torch.testing.assert_close(baked.model(images), expected, rtol=0, atol=1e-4)
    assert (baked.labels, baked.scores.activation, baked.model.config.head) == (texts, "softmax", "cosine")


def test_templates_are_averaged(digits):
    one, two = (
        digits.zero_shot(DIGITS, [template]).model.head.fc2.weight for template in ("a {}", "a small {}")
    )
    both = digits.zero_shot(DIGITS, ["a {}", "a small {}"]).model.head.fc2.weight
    expected = digits.text.scale * F.normalize(one + two, dim=-1)
    torch.testing.assert_close(both, expected, rtol=0, atol=1e-4)


def test_transformers_reads_the_same_model(tmp_path):
    """The folder that the tiny model was saved as is a CLIP of transformers: same scores."""
    torch.manual_seed(0)
    image, text, _ = towers()
    folder = save_hf_folder(tmp_path / "clip", image, text, torch.tensor(2.0))
    theirs, report = hf.CLIPModel.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    bundle, images, texts = (
        vt.load(folder),
        torch.randn(3, 1, 24, 24),
        ["a small seven", "a large two on the right"],
    )
    with torch.no_grad():
        expected = theirs.eval()(input_ids=bundle.text.tokens(texts), pixel_values=images).logits_per_image
        ours = bundle.zero_shot(texts, ["{}"]).model(images)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_siglip_scores_are_sigmoids(tmp_path):
    """The bias is in the head, and each score is by itself: equal to transformers' logits."""
    torch.manual_seed(0)
    tokenizer = gemma_like()
    text = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40)
    vision = dict(**text, patch_size=8, image_size=32)
    text |= dict(vocab_size=len(tokenizer), max_position_embeddings=12, projection_size=32)
    theirs = noisy(hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=vision)))
    with torch.no_grad():
        theirs.logit_bias.fill_(-3.0)
        theirs.logit_scale.fill_(1.5)
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    baked = vt.load(tmp_path).zero_shot(["cat", "dog of cats"], ["a {}"])
    assert baked.scores.activation == "sigmoid"
    assert "do not add up to 1" in baked.notes[-1]
    images = torch.randn(3, 3, 32, 32)
    ids = tokenizer(["a cat", "a dog of cats"], padding="max_length", max_length=12, return_tensors="pt")[
        "input_ids"
    ]
    with torch.no_grad():
        expected = theirs(input_ids=ids, pixel_values=images).logits_per_image
        torch.testing.assert_close(baked.model(images), expected, rtol=0, atol=1e-5)
    baked.save(tmp_path / "baked.safetensors")
    assert torch.equal(vt.load(tmp_path / "baked.safetensors").model(images), baked.model(images))


# ---- commands -------------------------------------------------------------------------------


def test_predict_with_words(photos):
    rows = command(
        "predict", FILE, photos, "--labels", ",".join(DIGITS), "--prompts", "a {}", "--format", "jsonl"
    )
    lines = [json.loads(line) for line in rows.stdout.splitlines() if line.startswith("{")]
    right = np.mean([line["label"] == line["file"].split("/")[-2] for line in lines])
    assert len(lines) == 120
    assert right > 0.5
    assert "softmax over these classes (CLIP)" in rows.stderr
    quiet = command("predict", FILE, photos / "one", "--labels", "one,two", "--quiet")
    assert "softmax" not in quiet.stderr


def test_walk_with_words(photos):
    image = next((photos / "one").glob("*"))
    done = command("walk", FILE, image, "--labels", "one,two,three")
    answer = done.stdout.partition("The answer")[2]
    assert sorted(line.split()[-1] for line in answer.splitlines() if "%" in line) == ["one", "three", "two"]


def test_one_file_for_evaluate_export_and_training(tmp_path, photos):
    """convert --prompts writes an ordinary file; evaluate, ONNX, verify and training give the same logits."""
    names = tmp_path / "labels.txt"
    names.write_text("\n".join(DIGITS) + "\n")
    baked = tmp_path / "digits.safetensors"
    output = command(
        "convert", FILE, baked, "--prompts", names, "--prompts", "a {}", "--prompts", "a small {}"
    ).output
    assert "10 classes from 20 prompts" in output
    evaluated = json.loads(command("evaluate", baked, photos, "--json", "-").stdout)
    assert evaluated["metrics"]["top1"] > 0.5
    command("verify", baked)
    command("export", baked, "--to", "onnx", "--out", tmp_path / "digits.onnx")
    files = sorted(photos.rglob("*.png"))[:8]
    ours, exported = (
        [one.logits for one in Predictor(path, workers=0)(files)]
        for path in (baked, tmp_path / "digits.onnx")
    )
    np.testing.assert_allclose(ours, exported, rtol=0, atol=1e-4)

    # A subset of the classes keeps its rows and the projection.
    some = vt.load(baked, classes=["seven", "two"])
    assert "rows of 2" in some.notes[-1]
    assert some.model.config.head == "cosine"
    full = vt.load(baked).model
    images = torch.randn(2, 1, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(some.model(images), full(images)[:, [7, 2]], rtol=0, atol=1e-5)


def test_fine_tuning_and_the_way_between(tmp_path, photos):
    """Training starts at the zero-shot head; weights between the two models are written with a table."""
    baked, mixed = tmp_path / "zero.safetensors", tmp_path / "mixed.safetensors"
    vt.load(FILE).zero_shot(DIGITS, ["a {}"]).save(baked)
    start = vt.load(baked)
    run = vt.train(photos, from_=str(baked), out=tmp_path / "run", epochs=1, batch=32)
    tuned = run.bundle
    assert tuned.model.config.head == "cosine"
    assert vt.evaluate(tuned, photos).metrics.top1 > vt.evaluate(start, photos).metrics.top1 - 0.2
    best = tmp_path / "run" / "best.safetensors"
    output = command(
        "convert", baked, mixed, "--toward", best, "--interpolate", 0.25, "--data", photos
    ).output
    assert output.splitlines()[0] == "    t  accuracy"
    assert len([line for line in output.splitlines() if "%" in line]) == 12
    assert " 0.25 " in output
    assert "written" in output
    between = vt.load(mixed).model.state_dict()
    ordered = vt.load(baked, classes=tuned.labels)  # training takes the order of the data
    assert ordered.labels != start.labels
    for name, tensor in ordered.model.state_dict().items():
        expected = 0.75 * tensor + 0.25 * tuned.model.state_dict()[name]
        torch.testing.assert_close(between[name], expected, rtol=0, atol=1e-6)


def test_nothing_lies_between_different_models(tmp_path):
    one = vt.load(FILE).zero_shot(["a", "b"])
    with pytest.raises(InputError, match="different classes"):
        interpolate(one, vt.load(FILE).zero_shot(["b", "c"]), 0.5)
    with pytest.raises(InputError, match="classes is 2 in one and 3 in the other"):
        interpolate(one, vt.load(FILE).zero_shot(["a", "b", "c"]), 0.5)
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="from 0 to 1"):
            interpolate(one, one, bad)
    one.save(tmp_path / "one.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "x"], "--data is for the way between two models; add --toward, or leave it out."),
        (["--interpolate", 0.5], "--interpolate is for the way between two models; add --toward"),
        *(
            (["--toward", FILE, option, value], f"{option} is not for --toward, which takes both models as")
            for option, value in [
                *(("--to", "timm"), ("--labels", "a,b"), ("--prompts", "a {}"), ("--templates", "t.txt")),
                *(("--set", "heads=2"), ("--size", 48), ("--channels", 3), ("--classes", 2)),
                *(("--family", "timm"), ("--keys", "k.json")),
            ]
        ),
    ],
    ids=str,
)
def test_options_that_would_be_ignored_are_refused(tmp_path, arguments, message):
    out = tmp_path / "out.safetensors"
    words = [str(word) for word in ("convert", FILE, out, *arguments)]
    assert message in str(CliRunner().invoke(app, words).exception)
    assert not out.exists()


# ---- prompts --------------------------------------------------------------------------------


def test_prompts_from_files(tmp_path):
    (tmp_path / "names.txt").write_text("\ufeffa cat\n\n guinea_pig \n", "utf-8")
    (tmp_path / "templates.txt").write_text("a {}\nno {}\n")
    prompts = read_prompts(str(tmp_path / "names.txt"), None, tmp_path / "templates.txt")
    assert prompts.labels == ["a cat", "guinea_pig"]
    assert prompts.texts[1] == ["a guinea pig", "no guinea pig"]
    (tmp_path / "texts.json").write_text('{"cat": "a cat", "dog": ["a dog", "a hound"]}')
    assert read_prompts(None, [str(tmp_path / "texts.json")], None).texts == [["a cat"], ["a dog", "a hound"]]
    assert len(fill_templates(["cat", "dog"]).texts[0]) == len(TEMPLATES)
    assert all("{}" in template for template in TEMPLATES)


@pytest.mark.parametrize(
    ("labels", "prompts", "message"),
    [
        (None, ["a {}"], "give labels="),
        ("cat", None, "at least two different classes"),
        ("cat,cat", None, "'cat' twice"),
        ("cat,,dog", None, "at least two different classes"),
        ("cat,dog", ["a photo"], "'a photo' has none"),
        ("cat,dog", ["bad.json"], "leave out one"),
        (None, ["nothing.txt"], "cannot be read"),
        (None, ["nothing.txt", "other.txt"], "takes templates"),
        (None, ["bad.json"], "JSON object of classes"),
        (None, ["empty.json"], "no text for 'cat'"),
        (None, ["binary.txt"], "not a text file"),
        ("missing.txt", None, "there is no file 'missing.txt'; check its path"),
        ("lists/of,names.TXT", None, "there is no file 'lists/of,names.TXT'"),
        ("cat,d\x1bog", None, r"control characters.* not 'd\\x1bog'"),
        ("cat,dog\ufffd", None, r"mark of a wrong encoding.* not 'dog\\ufffd'"),
        ("cat,dog\udcff", None, r"without control characters.* not 'dog\\udcff'"),
        ("control.txt", None, r"without control characters.* not 'd\\x0bog'"),
        ("cat," + "x" * 501, None, "may have 500 characters, and .* has 501; shorten it"),
        (",".join(map(str, range(100_000))), None, "100,000 classes, and the limit is 25,000"),
    ],
)
def test_bad_prompts(tmp_path, monkeypatch, labels, prompts, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('["cat"]')
    (tmp_path / "empty.json").write_text('{"cat": [], "dog": "a dog"}')
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "control.txt").write_bytes(b"cat\r\nd\x0bog\r\n")
    with pytest.raises(InputError, match=message):
        read_prompts(labels, prompts, None)


def test_bad_templates(digits):
    with pytest.raises(InputError, match=r"must contain \{\}"):
        digits.zero_shot(["a", "b"], ["no place"])
    with pytest.raises(InputError, match="list of names"):
        digits.zero_shot("ab")
    baked = digits.zero_shot(["a", "b"])
    with pytest.raises(InputError, match="no text tower"):
        baked.zero_shot(["a", "b"])
    plain = vt.load(FILE, classes=3)
    with pytest.raises(InputError, match="as it was published"):
        plain.zero_shot(["a", "b"])


def test_a_model_without_words(tmp_path, photos):
    vt.Bundle(model=vt.create("mu/4", size=24, channels=1, classes=2)).save(tmp_path / "plain.safetensors")
    result = CliRunner().invoke(
        app, ["predict", str(tmp_path / "plain.safetensors"), str(photos), "--labels", "a,b"]
    )
    assert isinstance(result.exception, InputError)
    assert "no text tower" in str(result.exception)


def test_no_classes_without_words(photos):
    result = CliRunner().invoke(app, ["predict", str(FILE), str(photos)])
    assert "name some with --labels" in str(result.exception)


def test_info_shows_the_text_tower():
    output = " ".join(command("info", FILE).output.split())
    assert "text tower hf-clip-text: width 32, depth 1, 12 of" in output
    assert "with its tokenizer" in output
