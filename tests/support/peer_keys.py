"""The parameter names of timm, transformers and torchvision for ours, and copying weights by them."""

import torch

# Our names and theirs; {i} is the block. A tuple names separate q, k and v.
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


def load_peer_weights(table, theirs, ours):
    """Our model with the state dict of another library; all of its tensors must be used."""
    used, state = set(), {}
    for name, tensor in ours.state_dict().items():
        module, dot, kind = name.rpartition(".") if name not in table else (name, "", "")
        block = next((part for part in module.split(".") if part.isdigit()), "")
        names = table[module.replace(f".{block}.", ".{i}.") if block else module]
        keys = []
        for peer_name in names if isinstance(names, tuple) else (names,):
            keys.append(peer_name.format(i=block) + ("" if peer_name.endswith("_") else dot) + kind)
        used.update(keys)
        state[name] = torch.cat([theirs[key] for key in keys]).reshape(tensor.shape)
    assert set(theirs) == used
    ours.load_state_dict(state)
    return ours.eval()
