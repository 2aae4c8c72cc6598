"""The Vision Transformer in NumPy float64, written from Eq. 1-4 of the paper. No torch.

`weights` maps our parameter names to arrays. Slow and simple on purpose, with loops over patches and heads,
so that every line can be compared with the paper.
"""

import math

import numpy as np

erf = np.vectorize(math.erf)


def layer_norm(z, weight, bias, eps):
    mean = z.mean(axis=-1, keepdims=True)
    variance = ((z - mean) ** 2).mean(axis=-1, keepdims=True)
    return (z - mean) / np.sqrt(variance + eps) * weight + bias


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def patches(image, P, Q):
    """x_p: the image (C, H, W) cut into N flattened patches, row by row."""
    _, H, W = image.shape
    corners = [(i, j) for i in range(0, H, P) for j in range(0, W, Q)]
    return np.stack([image[:, i : i + P, j : j + Q].reshape(-1) for i, j in corners])


def msa(z, w, block, heads):
    """Multi-head self-attention, Appendix A, one head at a time."""
    U_qkv, b_qkv = w[f"{block}.attention.qkv.weight"].T, w[f"{block}.attention.qkv.bias"]
    q, k, v = np.split(z @ U_qkv + b_qkv, 3, axis=-1)
    d = q.shape[-1] // heads
    outputs = []
    for head in range(heads):
        of_head = slice(head * d, (head + 1) * d)
        A = softmax(q[:, of_head] @ k[:, of_head].T / math.sqrt(d))
        outputs.append(A @ v[:, of_head])
    return (
        np.concatenate(outputs, axis=-1) @ w[f"{block}.attention.out.weight"].T
        + w[f"{block}.attention.out.bias"]
    )


def mlp(z, w, block):
    hidden = gelu(z @ w[f"{block}.mlp.fc1.weight"].T + w[f"{block}.mlp.fc1.bias"])
    return hidden @ w[f"{block}.mlp.fc2.weight"].T + w[f"{block}.mlp.fc2.bias"]


def vit(image, w, *, patch, depth, heads, eps=1e-6):
    """The logits (K,) of one image (C, H, W)."""

    def LN(z, name):
        return layer_norm(z, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    E = w["tokens.proj.weight"].reshape(len(w["tokens.proj.weight"]), -1).T
    embedded = patches(image, *patch) @ E + w["tokens.proj.bias"]
    z = np.concatenate([w["prefix"], embedded]) + w["position.table"]  # Eq. 1
    for index in range(depth):
        block = f"blocks.{index}"
        z = msa(LN(z, f"{block}.norm1"), w, block, heads) + z  # Eq. 2
        z = mlp(LN(z, f"{block}.norm2"), w, block) + z  # Eq. 3
    y = LN(z[0], "norm")  # Eq. 4
    return w["head.weight"] @ y + w["head.bias"]
