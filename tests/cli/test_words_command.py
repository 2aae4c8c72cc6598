"""`vitrail predict` and `vitrail serve` with classes from words, as commands: scores equal those computed by hand."""

import json

import pytest
import torch
import transformers as hf
from PIL import Image
from torch.nn import functional as F

import vitrail as vt
from tests.support.command import run_command
from tests.support.digit_clip import DIGITS, FILE, save_scenes
from tests.support.serving import Running, form, make_image, serve_command
from tests.support.text_models import gemma_like, noisy

TEMPLATES = ["a {}", "a small {} on the left", "photo of a {}"]
LABELS = ["one", "two", "seven"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return save_scenes(tmp_path_factory.mktemp("scenes"), count=12)


def predict(model, images, *arguments, cwd):
    """All scores of each image by its path, and what was printed on stderr."""
    done = run_command("predict", model, images, *arguments, "--top", 3, "--format", "jsonl", cwd=cwd)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    scores = {row["file"]: {one["label"]: one["score"] for one in row["top"]} for row in rows}
    return scores, " ".join(done.stderr.split())


def pixels_of(bundle, path):
    """A normalized image (1, C, H, W)."""
    return bundle.preprocess(Image.open(path))[None]


def by_hand(bundle, path, labels, templates):
    """Softmax of scale x cosine, with the mean of each class's unit vectors."""
    with torch.no_grad():
        image = F.normalize(bundle.model(pixels_of(bundle, path)), dim=-1)
        rows = []
        for label in labels:
            texts = [template.replace("{}", label) for template in templates]
            rows.append(F.normalize(bundle.text(texts).mean(dim=0), dim=0))
        scores = (bundle.text.scale * image @ torch.stack(rows).T).softmax(dim=-1)[0]
    return dict(zip(labels, scores.tolist(), strict=True))


def test_a_file_of_templates(photos, tmp_path):
    (tmp_path / "templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    words = ["--labels", ",".join(LABELS)]
    scores, said = predict(FILE, photos, *words, "--templates", "templates.txt", cwd=tmp_path)
    bundle = vt.load(FILE)
    assert len(scores) == 12
    for path, found in scores.items():
        assert found == pytest.approx(by_hand(bundle, path, LABELS, TEMPLATES), abs=2e-5)
        assert sum(found.values()) == pytest.approx(1, abs=1e-4)
    assert "3 classes from 9 prompts; scores are a softmax over these classes (CLIP)." in said
    assert "sigmoid" not in said
    default, _ = predict(FILE, photos, *words, cwd=tmp_path)
    far = [abs(default[path][label] - scores[path][label]) for path in scores for label in LABELS]
    assert max(far) > 0.01  # or the file might have been ignored


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a photo\n", "must contain {} in place of the class"),
        (None, "cannot be read"),
        ("\n  \n", "templates.txt is empty; write a template on each line, such as 'a photo of a {}'"),
    ],
)
def test_bad_templates(photos, tmp_path, text, message):
    if text is not None:
        (tmp_path / "templates.txt").write_text(text)
    words = ["--labels", "one,two", "--templates", "templates.txt"]
    done = run_command("predict", FILE, photos, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


def test_a_prompt_without_its_place_for_the_class(photos, tmp_path):
    words = ["--labels", "one,two", "--prompts", "a digit"]
    done = run_command("predict", FILE, photos, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    told = (
        "A prompt needs {} in place of the class, such as 'a photo of a {}', and 'a digit' has none; add it."
    )
    assert told in " ".join(done.stderr.split())


def test_a_siglip_model_says_sigmoid(tmp_path):
    tokenizer = gemma_like()
    text = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40)
    vision = dict(**text, patch_size=8, image_size=32)
    text |= dict(vocab_size=len(tokenizer), max_position_embeddings=12, projection_size=32)
    theirs = noisy(hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=vision)))
    with torch.no_grad():
        theirs.logit_bias.fill_(-1.0)
        theirs.logit_scale.fill_(1.5)
    theirs.save_pretrained(tmp_path / "siglip")
    tokenizer.save_pretrained(tmp_path / "siglip")
    (tmp_path / "photos").mkdir()
    for seed in range(3):
        (tmp_path / "photos" / f"{seed}.png").write_bytes(make_image(seed))
    (tmp_path / "templates.txt").write_text("a {}\n")
    words = ["--labels", "cat,dog of cats,cab", "--templates", "templates.txt"]
    scores, said = predict("siglip", "photos", *words, cwd=tmp_path)
    assert "each score is a sigmoid (SigLIP), and scores do not add up to 1" in said
    assert "softmax" not in said
    labels = ["cat", "dog of cats", "cab"]
    texts = [f"a {label}" for label in labels]
    ids = tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt")["input_ids"]
    bundle = vt.load(tmp_path / "siglip")
    for path, found in scores.items():
        with torch.no_grad():
            pixels = pixels_of(bundle, tmp_path / path)
            logits = theirs(input_ids=ids, pixel_values=pixels).logits_per_image[0]
        assert found == pytest.approx(dict(zip(labels, logits.sigmoid().tolist(), strict=True)), abs=2e-5)
    assert any(abs(sum(found.values()) - 1) > 0.05 for found in scores.values())


def test_serving_a_file_of_baked_prompts(photos, tmp_path):
    """`vitrail convert --prompts labels.txt`: the server's scores are those of vt.Predictor, and of `predict`."""
    (tmp_path / "labels.txt").write_text("\n".join(DIGITS) + "\n")
    done = run_command("convert", FILE, "baked.safetensors", "--prompts", "labels.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted(photos.rglob("*.png"))
    expected = [dict(one.top(10)) for one in vt.Predictor(tmp_path / "baked.safetensors", workers=0)(files)]
    with serve_command(tmp_path / "baked.safetensors") as address:
        server = Running(int(address.rpartition(":")[2]))
        assert server.get("/v1/model")[1]["labels"]["count"] == 10
        body, kind = form(*(path.read_bytes() for path in files), top=10)
        status, said = server.get("/v1/predict", body=body, headers={"Content-Type": kind})
    assert status == 200
    found = [{one["label"]: one["score"] for one in row["top"]} for row in said["predictions"]]
    assert len(found) == len(files) == 12
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    scores, _ = predict(FILE, photos, "--labels", "labels.txt", cwd=tmp_path)
    for path, theirs in zip(map(str, files), expected, strict=True):
        assert scores[path] == pytest.approx({label: theirs[label] for label in scores[path]}, abs=1e-4)
