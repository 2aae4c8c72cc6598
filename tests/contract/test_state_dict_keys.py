"""State-dict keys are a public format: later versions read the files of earlier ones."""

import torch

import vitrail as vt

KEYS = {
    "prefix": (1, 32),
    "tokens.proj.weight": (32, 3, 4, 4),
    "tokens.proj.bias": (32,),
    "position.table": (65, 32),
    "blocks.0.norm1.weight": (32,),
    "blocks.0.norm1.bias": (32,),
    "blocks.0.attention.qkv.weight": (96, 32),
    "blocks.0.attention.qkv.bias": (96,),
    "blocks.0.attention.out.weight": (32, 32),
    "blocks.0.attention.out.bias": (32,),
    "blocks.0.norm2.weight": (32,),
    "blocks.0.norm2.bias": (32,),
    "blocks.0.mlp.fc1.weight": (128, 32),
    "blocks.0.mlp.fc1.bias": (128,),
    "blocks.0.mlp.fc2.weight": (32, 128),
    "blocks.0.mlp.fc2.bias": (32,),
    "norm.weight": (32,),
    "norm.bias": (32,),
    "head.weight": (10, 32),
    "head.bias": (10,),
}


def test_keys_and_shapes():
    with torch.device("meta"):
        state = vt.create("mu/4", classes=10).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == KEYS
