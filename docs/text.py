"""Measure the text towers and print their table for docs/weights.md: python -m docs.text"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors.torch
import torch
import transformers as hf
from torch import Tensor

from bench.measure import machine
from bench.peers import make_torchvision_importable
from docs.samples import version
from tests.support.text_models import apple_names, noisy, open_clip_model
from vitrail.weights.text.words import load_text

TEXT = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=1, intermediate_size=96)
VISION = dict(**TEXT, patch_size=8, image_size=32)
LENGTH, TEXTS = 16, 16


def samples(seed: int, folder: Path) -> Iterator[tuple[str, str, str, Tensor, Tensor, dict[str, str]]]:
    """Family, whose files, reference, token ids, the reference's vectors, and what its file does not show."""
    torch.manual_seed(seed)
    versions = {name: version(name) for name in ("transformers", "open_clip_torch")}
    for kind, title, size in (
        ("clip", "transformers' CLIP", 600),
        ("siglip", "transformers' SigLIP", 32_000),
        ("siglip", "transformers' SigLIP 2, fixed size", 256_000),
        ("siglip2", "transformers' SigLIP 2 NaFlex", 256_000),
    ):
        more = {
            "vocab_size": size,
            "max_position_embeddings": LENGTH,
            "bos_token_id": 1,
            "eos_token_id": size - 1,
        }
        config, model = {
            "clip": (hf.CLIPConfig, hf.CLIPModel),
            "siglip": (hf.SiglipConfig, hf.SiglipModel),
            "siglip2": (hf.Siglip2Config, hf.Siglip2Model),
        }[kind]
        vision = VISION if kind != "siglip2" else {**TEXT, "patch_size": 8, "num_patches": 16}
        theirs = noisy(model(config(text_config={**TEXT, **more}, vision_config=vision)))
        theirs.save_pretrained(folder)
        tokens = torch.randint(2, size, (TEXTS, LENGTH))
        tokens[:, -1] = size - 1
        vectors = theirs.get_text_features(tokens)
        family = "hf-clip-text" if kind == "clip" else "hf-siglip-text"
        yield (
            *(family, title, versions["transformers"], tokens),
            *(getattr(vectors, "pooler_output", vectors), {}),
        )
    titles = {
        "quick-gelu": "OpenAI's CLIP and OpenCLIP",
        "gelu": "Meta's Perception Encoder core",
        "siglip": "OpenCLIP's SigLIP",
        "custom": "Apple's MobileCLIP-B",
    }
    for kind, title in titles.items():
        theirs = noisy(open_clip_model(kind), 0.05)
        state = apple_names(theirs) if kind == "custom" else theirs.state_dict()
        (folder / "config.json").unlink(missing_ok=True)
        safetensors.torch.save_file(state, folder / "model.safetensors")
        tokens = torch.randint(2, 390, (TEXTS, LENGTH))
        tokens[:, -1] = 399 if kind == "siglip" else 49_407
        given = {"activation": "quick-gelu"} if kind == "quick-gelu" else {}
        family = "mobileclip-text" if kind == "custom" else "clip-text"
        yield family, title, versions["open_clip_torch"], tokens, theirs.encode_text(tokens), given


def main() -> None:
    make_torchvision_importable()
    rows: dict[str, tuple[str, str, float, float]] = {}
    with torch.no_grad(), TemporaryDirectory() as name:
        for seed in range(3):
            for family, title, reference, tokens, expected, given in samples(seed, Path(name)):
                encoder = load_text(name, **given)
                assert encoder.family == family, (encoder.family, family)
                difference = (encoder.tower(tokens) - expected).abs().max().item()
                before = rows.get(title, (family, reference, 0.0, 0.0))
                largest = expected.abs().max().item()
                rows[title] = (*before[:2], max(before[2], difference), max(before[3], largest))
    print("| family | whose text tower | largest difference | largest value | reference |")
    print("|---|---|---|---|---|")
    for title, (family, reference, difference, largest) in rows.items():
        print(f"| `{family}` | {title} | {difference:.1e} | {largest:.1f} | {reference} |")
    versions = ", ".join(map(version, ("torch", "transformers", "open_clip_torch")))
    print(
        f"\nn = 3 random models of each, {TEXTS} texts of random token ids, in float32. "
        f"`python -m docs.text`; {machine().get('cpu', 'one CPU')}; {versions}."
    )


if __name__ == "__main__":
    main()
