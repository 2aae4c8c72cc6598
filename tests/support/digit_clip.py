"""A real, tiny CLIP: digit scenes and captions in one space, in CLIP's format.

`python -m tests.support.digit_clip OUT.safetensors` trained tests/weights/digit-clip.safetensors: 24 pixel
scenes of scikit-learn's digits (small or large, at one of four positions), with captions that may leave out
size or position. The training set of the digits is used; tests classify scenes of the held-out digits.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import vitrail as vt
from tests.support.scenes import SCENES, DigitSampler, compose_scenes, scene_digits, small_digit_side
from tests.support.text_models import save_clip_tokenizer, tiny_vocabulary
from vitrail.model.text_tower import TextConfig, TextTower
from vitrail.weights.families.hf_clip import CLIP
from vitrail.weights.families.text_towers import HF_CLIP
from vitrail.weights.families.to_family import plan_rows, write_state
from vitrail.weights.text.tokenizer import ClipTokenizer
from vitrail_course.labs.datasets import load_dataset

FILE = Path(__file__).parents[1] / "weights" / "digit-clip.safetensors"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = [*DIGITS, "small", "large", "on", "the", "left", "right", "at", "top", "bottom", "photo", "of"]
LENGTH, SPACE, WIDTH = 12, 24, 32


def scenes(count, seed, *, train=False):
    """Pixels (N, 24, 24) of random scenes, and their digits; of held-out digits unless `train`."""
    data = load_dataset(None, 6_000, 2_000)
    split = data.train if train else data.eval_split
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(SCENES), (count,), generator=rng)
    images = compose_scenes(
        DigitSampler(split).sample(scene_digits(chosen), rng), chosen, small_digit_side(data.train), rng
    )
    pixels = ((images[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
    return pixels, chosen


def save_scenes(folder, count=120, seed=7):
    """A folder of PNG files, one folder per digit; returns it."""
    pixels, chosen = scenes(count, seed)
    for number, (image, digit) in enumerate(zip(pixels, scene_digits(chosen).tolist(), strict=True)):
        target = folder / DIGITS[digit]
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target / f"{number:04}.png")
    return folder


# ---- training -------------------------------------------------------------------------------


def captions():
    """Five kinds of captions; in each kind, one caption is true of a scene: its texts, and which one that is."""
    kinds = []
    for pattern in ("{s} {d} {p}", "{d} {p}", "{s} {d}", "{d}", "photo of a {d}"):
        parts = [scene.caption.removeprefix("a ").split(maxsplit=2) for scene in SCENES]
        texts = [f"a {pattern.format(s=size, d=digit, p=place)}" for size, digit, place in parts]
        unique = list(dict.fromkeys(texts))
        kinds.append((unique, torch.tensor([unique.index(text) for text in texts])))
    return kinds


def towers():
    vocabulary, merges = tiny_vocabulary(WORDS)
    image = vt.ViT(
        vt.ViTConfig(
            width=WIDTH, depth=2, heads=2, patch=4, size=24, channels=1, classes=SPACE, head_bias=False,
            embedding_bias=False, norm_pre=True, pool_norm="after", eps=1e-5, activation="quick-gelu",
        )
    )  # fmt: skip
    text = TextTower(
        TextConfig(
            vocabulary=len(vocabulary), width=WIDTH, depth=1, heads=2, length=LENGTH, projection=SPACE,
            activation="quick-gelu", end=len(vocabulary) - 1,
        )
    )  # fmt: skip
    for head in (image.head, text.head):
        nn.init.normal_(head.weight, std=WIDTH**-0.5)
    nn.init.normal_(text.tokens.weight, std=0.5)
    return image, text, ClipTokenizer(vocabulary, merges, "transformers")


def train(steps=1_500, batch=128, seed=0):
    torch.manual_seed(seed)
    image, text, tokenizer = towers()
    kinds = [(torch.from_numpy(tokenizer(texts, LENGTH)), true) for texts, true in captions()]
    pixels, chosen = scenes(8_000, seed, train=True)
    inputs = torch.from_numpy(pixels)[:, None].float() / 127.5 - 1
    scale = nn.Parameter(torch.tensor(2.66))
    parameters = [*image.parameters(), *text.parameters(), scale]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    rng = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rows = torch.randint(len(inputs), (batch,), generator=rng)
        factor = scale.exp().clamp(max=100) * F.normalize(image(inputs[rows]), dim=-1)
        losses = [
            F.cross_entropy(factor @ F.normalize(text(ids), dim=-1).T, true[chosen[rows]])
            for ids, true in kinds
        ]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(step, [round(x.item(), 2) for x in losses], flush=True)
    return image.eval(), text.eval(), scale.detach().clamp(max=4.6)


# ---- CLIP's format --------------------------------------------------------------------------


def save_hf_folder(folder, image, text, scale):
    """model.safetensors, config.json and the tokenizer, as transformers' CLIPModel reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {"w": "", "p": "vision_model."}
    rows, left = plan_rows(CLIP, image.state_dict(), image.config, places)
    text_rows, text_left = plan_rows(HF_CLIP.family, text.state_dict(), text.config.as_vit_config, places)
    assert not left, left
    assert not text_left, text_left
    state = write_state(rows, image.state_dict(), image.config)
    state |= write_state(text_rows, text.state_dict(), text.config.as_vit_config)
    state = {name: tensor.detach().half() for name, tensor in {**state, "logit_scale": scale}.items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    shared = {"num_attention_heads": 2, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    config = {
        "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": SPACE,
        "vision_config": {
            **shared, "model_type": "clip_vision_model", "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
            "num_hidden_layers": 2, "image_size": 24, "patch_size": 4, "num_channels": 1, "projection_dim": SPACE,
        },
        "text_config": {
            **shared, "model_type": "clip_text_model", "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
            "num_hidden_layers": 1, "vocab_size": text.config.vocabulary, "max_position_embeddings": LENGTH,
            "projection_dim": SPACE, "bos_token_id": text.config.vocabulary - 2,
            "eos_token_id": text.config.vocabulary - 1,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    preprocess = {
        "do_resize": True, "size": {"height": 24, "width": 24}, "resample": 2, "do_center_crop": False,
        "do_normalize": True, "image_mean": [0.5], "image_std": [0.5], "do_rescale": True,
        "rescale_factor": 1 / 255, "image_processor_type": "ViTImageProcessor",
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocess))
    save_clip_tokenizer(folder, WORDS)
    return folder


def accuracy(bundle):
    """Of the ten digits by their names, on 1,000 scenes of held-out digits."""
    pixels, chosen = scenes(1_000, 1)
    classifier = bundle.zero_shot(DIGITS, ["a {}"])
    images = torch.stack([bundle.preprocess.normalize(image[:, :, None]) for image in pixels])
    with torch.no_grad():
        predicted = classifier.model(images).argmax(dim=1)
    return float(np.mean((predicted == scene_digits(chosen)).numpy()))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m tests.support.digit_clip OUT.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        bundle = vt.load(save_hf_folder(Path(folder) / "clip", *train()))
        print(f"accuracy {accuracy(bundle):.3f}")
        bundle.save(sys.argv[1])
