"""A correct solution, as a student would write it. tests/support/mistakes.py puts mistakes into this text."""

import math

import torch
import torch.nn.functional as F


def inside(weights, name):
    start = f"{name}."
    return {key[len(start) :]: tensor for key, tensor in weights.items() if key.startswith(start)}


def patches(images, P):
    B, _, H, W = images.shape
    cut = []
    for row in range(0, H, P):
        for column in range(0, W, P):
            patch = images[:, :, row : row + P, column : column + P]
            cut.append(patch.reshape(B, -1))
    return torch.stack(cut, dim=1)


def positions(count, width):
    table = torch.zeros(count, width)
    for p in range(count):
        for i in range(width // 2):
            angle = p / 10000 ** (2 * i / width)
            table[p, 2 * i] = math.sin(angle)
            table[p, 2 * i + 1] = math.cos(angle)
    return table


def layer_norm(x, weight, bias, eps=1e-6):
    mean = x.mean(dim=-1, keepdim=True)
    variance = x.var(dim=-1, keepdim=True, correction=0)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def attention(q, k, v, mask=None):
    d = q.shape[-1]
    scores = q @ k.mT / math.sqrt(d)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1) @ v


def multi_head_attention(z, weights, heads):
    B, T, D = z.shape
    d = D // heads
    qkv = F.linear(z, weights["qkv.weight"], weights["qkv.bias"])
    q, k, v = qkv.chunk(3, dim=-1)
    q = q.reshape(B, T, heads, d).transpose(1, 2)
    k = k.reshape(B, T, heads, d).transpose(1, 2)
    v = v.reshape(B, T, heads, d).transpose(1, 2)
    out = attention(q, k, v)
    out = out.transpose(1, 2).reshape(B, T, D)
    return F.linear(out, weights["out.weight"], weights["out.bias"])


def mlp(z, weights):
    hidden = F.linear(z, weights["fc1.weight"], weights["fc1.bias"])
    hidden = F.gelu(hidden)
    return F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"])


def block(z, weights, heads):
    normed = layer_norm(z, weights["norm1.weight"], weights["norm1.bias"])
    z1 = multi_head_attention(normed, inside(weights, "attention"), heads) + z
    normed = layer_norm(z1, weights["norm2.weight"], weights["norm2.bias"])
    return mlp(normed, inside(weights, "mlp")) + z1


def vit(images, weights, config):
    E = weights["tokens.proj.weight"].flatten(1).T
    tokens = patches(images, config.patch) @ E + weights["tokens.proj.bias"]
    x_class = weights["prefix"].expand(len(images), 1, -1)
    E_pos = weights["position.table"]
    z = torch.cat([x_class, tokens], dim=1) + E_pos
    for index in range(config.depth):
        z = block(z, inside(weights, f"blocks.{index}"), config.heads)
    y = layer_norm(z, weights["norm.weight"], weights["norm.bias"])[:, 0]
    return F.linear(y, weights["head.weight"], weights["head.bias"])
