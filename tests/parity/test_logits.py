"""The same weights in timm, transformers, torchvision and here give the same logits.

Tiny random models of each library, every parameter shaken, copied over by the tables below. Nothing
is downloaded and nothing is skipped: a peer that does not import is a failure.
"""

import pytest
import torch

import vitrail as vt
from bench.peers import PEERS
from conftest import shake

# Their names for our parameters; {i} is the block. A tuple is q, k and v, kept apart.
TIMM = {
    "prefix": "cls_token",
    "position.table": "pos_embed",
    "tokens.proj": "patch_embed.proj",
    "blocks.{i}.norm1": "blocks.{i}.norm1",
    "blocks.{i}.attention.qkv": "blocks.{i}.attn.qkv",
    "blocks.{i}.attention.out": "blocks.{i}.attn.proj",
    "blocks.{i}.norm2": "blocks.{i}.norm2",
    "blocks.{i}.mlp.fc1": "blocks.{i}.mlp.fc1",
    "blocks.{i}.mlp.fc2": "blocks.{i}.mlp.fc2",
    "norm": "norm",
    "head": "head",
}
TRANSFORMERS = {
    "prefix": "model.vit.embeddings.cls_token",
    "position.table": "model.vit.embeddings.position_embeddings",
    "tokens.proj": "model.vit.embeddings.patch_embeddings.projection",
    "blocks.{i}.norm1": "model.vit.layers.{i}.layernorm_before",
    "blocks.{i}.attention.qkv": tuple(f"model.vit.layers.{{i}}.attention.{x}_proj" for x in "qkv"),
    "blocks.{i}.attention.out": "model.vit.layers.{i}.attention.o_proj",
    "blocks.{i}.norm2": "model.vit.layers.{i}.layernorm_after",
    "blocks.{i}.mlp.fc1": "model.vit.layers.{i}.mlp.fc1",
    "blocks.{i}.mlp.fc2": "model.vit.layers.{i}.mlp.fc2",
    "norm": "model.vit.layernorm",
    "head": "model.classifier",
}
TORCHVISION = {
    "prefix": "class_token",
    "position.table": "encoder.pos_embedding",
    "tokens.proj": "conv_proj",
    "blocks.{i}.norm1": "encoder.layers.encoder_layer_{i}.ln_1",
    "blocks.{i}.attention.qkv": "encoder.layers.encoder_layer_{i}.self_attention.in_proj_",
    "blocks.{i}.attention.out": "encoder.layers.encoder_layer_{i}.self_attention.out_proj",
    "blocks.{i}.norm2": "encoder.layers.encoder_layer_{i}.ln_2",
    "blocks.{i}.mlp.fc1": "encoder.layers.encoder_layer_{i}.mlp.0",
    "blocks.{i}.mlp.fc2": "encoder.layers.encoder_layer_{i}.mlp.3",
    "norm": "encoder.ln",
    "head": "heads.head",
}
# name -> table, LayerNorm eps, whether it takes oblong pictures and other channels
LIBRARIES = {
    "timm": (TIMM, 1e-6, True),
    "transformers": (TRANSFORMERS, 1e-12, True),
    "torchvision": (TORCHVISION, 1e-6, False),
}


def copied(table, theirs, ours):
    """Our model with their weights; every tensor of theirs must have been used."""
    theirs, taken, state = theirs.state_dict(), set(), {}
    for name, tensor in ours.state_dict().items():
        module, dot, kind = name.rpartition(".") if name not in table else (name, "", "")
        block = next((part for part in module.split(".") if part.isdigit()), "")
        places = table[module.replace(f".{block}.", ".{i}.") if block else module]
        keys = []
        for place in places if isinstance(places, tuple) else (places,):
            keys.append(place.format(i=block) + ("" if place.endswith("_") else dot) + kind)
        taken.update(keys)
        state[name] = torch.cat([theirs[key] for key in keys]).reshape(tensor.shape)
    assert set(theirs) == taken
    ours.load_state_dict(state)
    return ours.eval()


@pytest.mark.parametrize("oblong", [False, True], ids=["square", "oblong"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_logits_agree(library, oblong):
    table, eps, flexible = LIBRARIES[library]
    fields = dict(width=48, depth=3, heads=4, mlp_width=96, patch=8, size=32, classes=7, eps=eps)
    if oblong and flexible:
        fields |= dict(size=(16, 48), channels=5)
    elif oblong:
        fields |= dict(patch=4, size=20)  # torchvision: square only, so another square
    config = vt.ViTConfig(**fields)
    theirs = shake(PEERS[library](config))
    ours = copied(table, theirs, vt.ViT(config))
    images = torch.randn(5, config.channels, *config.pixels)
    with torch.no_grad():
        expected, logits = theirs(images), ours(images)
    assert expected.abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-5
    assert torch.equal(logits.argmax(1), expected.argmax(1))
