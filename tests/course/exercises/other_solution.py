"""Another correct solution: views, einsum, heads one by one, a convolution, other names."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def patches(images, P):
    windows = images.unfold(2, P, P).unfold(3, P, P)
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)


def positions(count, width):
    positions = torch.arange(count).float().unsqueeze(1)
    frequencies = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    table = torch.zeros(count, width)
    table[:, 0::2] = torch.sin(positions * frequencies)
    table[:, 1::2] = torch.cos(positions * frequencies)
    return table


def layer_norm(x, weight, bias, eps=1e-6):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def attention(q, k, v, mask=None):
    scores = torch.einsum("...td,...sd->...ts", q, k) * q.size(-1) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return F.softmax(scores, -1) @ v


def multi_head_attention(z, weights, heads):
    D = z.shape[-1]
    d = D // heads
    W, b = weights["qkv.weight"], weights["qkv.bias"]
    q, k, v = (z @ W[i * D : (i + 1) * D].T + b[i * D : (i + 1) * D] for i in range(3))
    slices = [slice(head * d, (head + 1) * d) for head in range(heads)]
    results = [attention(q[..., part], k[..., part], v[..., part]) for part in slices]
    last = nn.Linear(D, D)
    last.weight.data, last.bias.data = weights["out.weight"], weights["out.bias"]
    return last(torch.cat(results, -1))


def mlp(z, weights):
    hidden = nn.GELU()(F.linear(z, weights["fc1.weight"], weights["fc1.bias"]))
    return F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"])


def starting(weights, start):
    return {name[len(start) :]: tensor for name, tensor in weights.items() if name.startswith(start)}


def block(z, weights, heads):
    normed = F.layer_norm(z, z.shape[-1:], weights["norm1.weight"], weights["norm1.bias"], 1e-6)
    z1 = z + multi_head_attention(normed, starting(weights, "attention."), heads=heads)
    normed = layer_norm(z1, weights["norm2.weight"], bias=weights["norm2.bias"])
    return z1 + mlp(z=normed, weights=starting(weights, "mlp."))


def vit(images, weights, config):
    kernel, bias = weights["tokens.proj.weight"], weights["tokens.proj.bias"]
    tokens = F.conv2d(images, kernel, bias, stride=config.patch).flatten(2).transpose(1, 2)
    x_class = weights["prefix"].unsqueeze(0).repeat(len(tokens), 1, 1)
    z = torch.cat([x_class, tokens], 1) + weights["position.table"].unsqueeze(0)
    for index in range(config.depth):
        z = block(z, starting(weights, f"blocks.{index}."), config.heads)
    y = layer_norm(z[:, 0], weights["norm.weight"], weights["norm.bias"])
    return y @ weights["head.weight"].T + weights["head.bias"]
