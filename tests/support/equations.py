"""Parse the equations of a walk and evaluate them in float64, from the tensors of earlier stages and the
model's parameters."""

import itertools
import math
import re

import torch
import torch.nn.functional as F

import vitrail as vt
from tests.support.equation_parser import Parser

# ---- letters and functions, computed independently of the model's code ---------------------


def standardize(z, eps, rms):
    if not rms:
        z = z - z.mean(-1, keepdim=True)
    return z / (z.square().mean(-1, keepdim=True) + eps).sqrt()


def like(model):
    """The config of the model's tokens and blocks; a decoder's are those of a ViT for texts."""
    return model.config.as_vit_config if isinstance(model, vt.Decoder) else model.config


def normed(z, module, config):
    if config.norm == "none":
        return z
    return standardize(z, config.eps, config.norm == "rms") * module.weight + getattr(module, "bias", 0)


def coordinates(config, row, column):
    """The coordinates of a patch in its rotary embedding."""
    h, w = config.grid
    match config.position:
        case "rotary-dinov3":
            return tuple(2 * torch.pi * (2 * (i + 0.5) / side - 1) for i, side in ((row, h), (column, w)))
        case "rotary-eva02":
            return row / h * 16, column / w * 16
        case "rotary-pe":  # columns first
            return column + config.class_token, row + config.class_token
    return row, column


def rotate(model, x):
    """Rotary embedding: a pair of channels of a patch as a complex number, times exp(i angle)."""
    config = model.config
    n, half = config.prefix, config.d // 2
    adjacent = config.position in ("rotary-eva02", "rotary-pe")
    frequencies = (10_000.0 if adjacent else 100.0) ** (-torch.arange(half // 2) / (half // 2))
    rotary = model.position
    first, second = (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(half), slice(half, None))
    out = x.clone()
    for patch in range(config.patches):
        one, two = coordinates(config, *divmod(patch, config.grid[1]))
        exact = torch.exp(1j * torch.cat([one * frequencies, two * frequencies]))
        # The model computes its sines in float32: compared to that precision, then used as they are.
        factor = torch.complex(rotary.cos[patch, first], rotary.sin[patch, first])
        assert (factor - exact).abs().max() < 1e-5
        z = torch.complex(x[n + patch, first], x[n + patch, second]) * factor
        out[n + patch, first], out[n + patch, second] = z.real, z.imag
    return out


def head_parameters(attention, config, head):
    """U and b of q, k and v for one head, from the fused matrix."""
    letters = {}
    for index, letter in enumerate("qkv"):
        rows = slice((index * config.heads + head) * config.d, (index * config.heads + head + 1) * config.d)
        letters[f"U_{letter}"] = attention.qkv.weight[rows].T
        without_bias = config.qkv_bias == "none" or (config.qkv_bias == "no-k" and letter == "k")
        letters[f"b_{letter}"] = torch.zeros(config.d) if without_bias else attention.qkv.bias[rows]
    return letters


def pair_bias(attention, config, head):
    """The position bias of each pair of tokens, looked up pair by pair."""
    table = attention.bias.table[head]
    if config.position == "pairwise":
        return table
    (h, w), n, T = config.grid, config.prefix, config.tokens
    out = torch.zeros(T, T)
    for i in range(T):
        for j in range(T):
            if i >= n and j >= n:
                (a, b), (c, d) = divmod(i - n, w), divmod(j - n, w)
                out[i, j] = table[(a - c + h - 1) * (2 * w - 1) + b - d + w - 1]
            else:
                out[i, j] = table[-1] if i < n and j < n else table[-3] if i < n else table[-2]
    return out


def one_head(attention, config, head, z, context, *, scale, position=lambda x: x, bias=0.0):
    """Weights and output of one head, by the formulas of the paper's Appendix A."""
    p = head_parameters(attention, config, head)
    q, k, v = z @ p["U_q"] + p["b_q"], context @ p["U_k"] + p["b_k"], context @ p["U_v"] + p["b_v"]
    if config.qk_norm:
        q, k = normed(q, attention.q_norm, config), normed(k, attention.k_norm, config)
    weights = (scale * position(q) @ position(k).T + bias).softmax(-1)
    return weights, weights @ v


def scale_of(config):
    scales = {"head": config.d**-0.5, "width": config.width**-0.5, "none": 1.0}
    return scales.get(config.scale, config.scale)


ACTIVATIONS = {
    "GELU": F.gelu,
    "GELU_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "QuickGELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": F.relu,
    "SiLU": F.silu,
    "tanh": torch.tanh,
}


def apply_mlp(mlp, config, x):
    names = {
        "gelu": "GELU",
        "gelu-tanh": "GELU_tanh",
        "quick-gelu": "QuickGELU",
        "relu": "ReLU",
        "silu": "SiLU",
    }
    act = ACTIVATIONS[names[config.activation]]
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    if config.mlp == "gated":
        hidden = act(hidden[..., : config.F]) * hidden[..., config.F :]
    else:
        hidden = act(hidden)
        for layer in mlp.middle:
            hidden = act(hidden @ layer.weight.T + layer.bias)
    return hidden @ mlp.fc2.weight.T + mlp.fc2.bias


def position_rows(model):
    """E_pos, with zeros for tokens without a row."""
    c, position = model.config, model.position
    if not hasattr(position, "all_rows"):
        return None
    front = {"all": c.prefix, "class": 1, "patches": 0}[c.rows]
    if c.position in ("learned", "rotary-eva02", "rotary-pe"):
        rows, patches = position.table[:front], position.table[front:]
    elif c.position == "learned2d":
        rows = position.front if front else torch.zeros(0, c.width)
        cells = [divmod(patch, c.grid[1]) for patch in range(c.patches)]
        patches = torch.stack([torch.cat([position.down[r], position.across[s]]) for r, s in cells])
    else:
        rows, patches = position.fixed[:front], position.fixed[front:]
    return torch.cat([rows, torch.zeros(c.prefix - front, c.width), patches])


def layer(module, number=""):
    subscript = f"_{number}" if number else ""
    return {f"W{subscript}": module.weight.T, f"b{subscript}": module.bias}


def parameters(model, stage, shown, at):
    """The parameters in a stage's equation: those of the module that the stage is named after."""
    c, name = like(model), stage.name
    part = name.rpartition(".")[2]
    block = model.blocks[at["block"]] if name.startswith("blocks.") else None
    attention = block and getattr(block, name.split(".")[2], None)
    if name == "tokens":
        return {"E": model.tokens.weight}
    if name == "bridge":
        return layer(model.bridge)
    if name == "tokens.proj":
        proj = model.tokens.proj
        return {"E": proj.weight} if c.input == "text" else {"E": proj.weight.flatten(1).T, "b": proj.bias}
    if name == "tokens.fc":
        return layer(model.tokens.fc)
    if re.match(r"(LN|RMS)\([^()]+\) = g", stage.equation):
        module = model.get_submodule("norm" if name == "encoded" else name)
        z = shown[stage.equation.split("(")[1].split(")")[0]]
        mean, square = z.mean(-1, keepdim=True), z.square().mean(-1, keepdim=True)
        variance = (z - mean).square().mean(-1, keepdim=True)
        return {
            "g": module.weight,
            "b": getattr(module, "bias", None),
            "mu": mean,
            "var": variance,
            "ms": square,
        }
    if part == "qkv":
        bias = attention.qkv.bias
        if c.qkv_bias == "no-k":
            bias = torch.cat([b if i != 1 else 0 * b for i, b in enumerate(bias.chunk(3))])
        return {"U_qkv": attention.qkv.weight.T, "b_qkv": bias}
    if part in "qkv":
        return head_parameters(attention, c, at["head"])
    if name.endswith("attention.bias"):
        return {"P_head": pair_bias(attention, c, at["head"])}
    if name.endswith(("attention.out", "cross.out")) and block:
        letters = "msa" if "attention" in name else "mca"
        return {f"U_{letters}": attention.out.weight.T, f"b_{letters}": attention.out.bias}
    if name.endswith(("mlp.hidden", "mlp.out")):
        if c.mlp == "gated":
            W_a, W_b = block.mlp.fc1.weight.chunk(2)
            b_a, b_b = (None, None) if block.mlp.fc1.bias is None else block.mlp.fc1.bias.chunk(2)
            return {"W_a": W_a.T, "W_b": W_b.T, "b_a": b_a, "b_b": b_b, **layer(block.mlp.fc2, 2)}
        layers = [block.mlp.fc1, *block.mlp.middle, block.mlp.fc2]
        return {k: v for number, module in enumerate(layers, 1) for k, v in layer(module, number).items()}
    if part in ("scale1", "scale2"):
        return {"lambda": getattr(block, part).weight}
    if name == "logits" and c.head == "distilled":
        (W_c, b_c), (W_d, b_d) = ((h.weight.T, h.bias) for h in (model.head.classes, model.head.distillation))
        halves = dict(zip(("y_class", "y_dist"), shown["y"].chunk(2), strict=True))
        return {"W_c": W_c, "b_c": b_c, "W_d": W_d, "b_d": b_d, **halves}
    if name == "logits" and c.head != "linear":
        return {**layer(model.head.fc1, 1), **layer(model.head.fc2, 2)}
    if name == "logits" and model.head is None:  # a tied decoder
        return {"E": model.tokens.weight}
    return layer(model.head) if name == "logits" else {}


def functions(model, stage, at):
    """The functions in a stage's equation."""
    c, name = like(model), stage.name
    module = {"q": "q_norm", "k": "k_norm"}.get(name.rpartition(".")[2])
    if module:
        module = getattr(model.blocks[at["block"]].attention, module)
    elif name.endswith(("attention.out", "mlp.out")) and name.startswith("blocks."):
        module = getattr(model.blocks[at["block"]], name.split(".")[2]).norm
    elif name in ("pool", "pooled"):
        after = stage.equation in ("y = LN(p)", "y = RMS(p)")
        module = model.norm if after else getattr(model.pool, "norm", None)

    def pool_attention(result):
        def attend(probe, tokens):
            heads = [
                one_head(model.pool.attention, c, head, probe, tokens, scale=c.d**-0.5)
                for head in range(c.heads)
            ]
            if result == "weights":
                return torch.cat([weights for weights, _ in heads])
            out = model.pool.attention.out
            return (torch.cat([output for _, output in heads], dim=-1) @ out.weight.T + out.bias)[0]

        return attend

    def block(number):
        def decoder_block(z, *context):
            cross = {"context": context[0][None]} if context else {}
            return model.blocks[number](z[None], masked(torch.zeros(len(z), len(z))) == 0, **cross)[0]

        def encoder_block(z):
            return model.blocks[number](z[None], rotate=model.position.rotation(model.config.grid))[0]

        return decoder_block if isinstance(model, vt.Decoder) else encoder_block

    return {
        **ACTIVATIONS,
        **{f"Block_{number}": block(number) for number in range(c.depth)},
        "LN": lambda x: normed(x, module, c),
        "RMS": lambda x: normed(x, module, c),
        "MLP": lambda x: apply_mlp(model.pool.mlp, c, x),
        "MSA": pool_attention("output"),
        "weights": pool_attention("weights"),
        "R": lambda x: rotate(model, x),
        "sqrt": lambda x: torch.as_tensor(x, dtype=torch.float64).sqrt(),
        "mean": lambda x: x.mean(0),
        "softmax": lambda x: (x - x.logsumexp(-1, keepdim=True)).exp(),
        "sigmoid": lambda x: 1 / (1 + (-x).exp()),
        "cut": lambda x: cut_by_hand(x, model),
        "Stem": lambda x: model.tokens.stem(x[None])[0],
        "Spectrogram": lambda x: spectrogram(x, model),
        "mask": masked,
    }


def masked(scores):
    """-inf wherever a token would attend to a later one, pair by pair."""
    out = scores.clone()
    for row, column in itertools.product(*map(range, scores.shape)):
        out[row, column] = -torch.inf if column > row else out[row, column]
    return out


def cut_by_hand(x, model):
    grid, patch = model.config.grid, model.tokens.patch
    cells = itertools.product(*map(range, grid))  # the last axis varies fastest
    boxes = ([slice(i * side, (i + 1) * side) for i, side in zip(cell, patch, strict=True)] for cell in cells)
    return torch.stack([x[(slice(None), *box)].reshape(-1) for box in boxes])


def spectrogram(x, model):
    """Log power, frame by frame and frequency by frequency, normalized to mean 0 and variance 1."""
    bins, frames = model.config.pixels
    time = torch.arange(2 * bins, dtype=torch.float64)
    window = model.tokens.window  # in float32: compared to that precision, then used as it is
    assert (window - torch.sin(torch.pi * time / (2 * bins)) ** 2).abs().max() < 1e-6
    rows = []
    for frequency in range(1, bins + 1):
        wave = torch.exp(-2j * torch.pi * frequency * time / (2 * bins)) / math.sqrt(2 * bins)
        powers = [((x[i * bins : (i + 2) * bins] * window) * wave).sum().abs() ** 2 for i in range(frames)]
        rows.append(torch.stack(powers))
    power = (torch.stack(rows) + 1e-6).log()
    power = power - power.mean()
    return (power / (power.square().mean() + 1e-5).sqrt())[None]


def join(stage):
    """[a; b]: tokens are stacked, heads and single vectors are concatenated."""

    def joined(values):
        if stage.name == "prefix":
            return torch.cat([value if value.ndim == 2 else value[None] for value in values])
        if stage.name in ("pool", "pooled"):
            values = [value.flatten() for value in values]
        return torch.cat(values, dim=-1)

    return joined


def start(model, **at):
    """The letters that are defined before the first stage."""
    c = like(model)
    letters = {"t": at["token"], "d": c.d, "D": c.width, "eps": c.eps}
    if isinstance(model, vt.Decoder):
        return {**letters, "E_pos": model.position.table}
    letters["E_pos"] = position_rows(model)
    if c.pool == "attention":
        letters["probe"] = model.pool.probe
    names = ["x_class"] * c.class_token + ["x_dist"] * c.distillation_token
    letters |= {name: model.prefix[row] for row, name in enumerate(names)}
    letters["x_reg"] = {number: model.prefix[len(names) + number] for number in range(c.registers)}
    return letters


def other_heads(model, stage, shown, at):
    """SA_i, or CA_i, of the heads that are not shown, for [SA_0; ...; SA_7]."""
    c, cross = like(model), stage.name.endswith("cross.heads")
    attention = model.get_submodule(stage.name.removesuffix(".heads"))
    position = (lambda x: rotate(model, x)) if "rotary" in c.position else (lambda x: x)
    z, context = shown["input of q"], shown["input of k"]
    heads = {}
    for head in range(c.heads):
        bias = 0.0 if attention.bias is None else pair_bias(attention, c, head)
        if isinstance(model, vt.Decoder) and not cross:
            bias = masked(torch.zeros(len(z), len(context)))
        out = one_head(attention, c, head, z, context, scale=scale_of(c), position=position, bias=bias)[1]
        name = f"{'CA' if cross else 'SA'}_{head}"
        heads[name] = shown.get(name, out)
    return heads


def is_input(stage, inputs, shown):
    """Whether the stage shows an input of the model, or x_class or E_pos; if so, it is compared with it."""
    letter, separator, _ = stage.equation.partition(" in ")
    if not separator:
        return False
    parameter = stage.name in ("x_class", "E_pos")
    assert torch.equal(stage.tensor, inputs[stage.name if parameter else letter])
    integers = r"x in \{0, \.\.\., 10\}\^" + str(len(stage.tensor))
    reals = re.escape(f"{letter} in R^({' x '.join(map(str, stage.shape))})")
    assert re.fullmatch(reals if stage.tensor.is_floating_point() else integers, stage.equation)
    if not parameter:  # those are known from the start
        shown[letter] = stage.tensor
    return True


def evaluate(model, stage, shown, at):
    """The left sides of a stage's equation with the values of its right sides."""
    letters = {**shown, **parameters(model, stage, shown, at)}
    values = {}
    first, *rest = stage.equation.split(", var")
    for part in [first, *("var" + part for part in rest)]:
        name, _, right = part.partition(" = ")
        if few := re.fullmatch(r"\[(SA|CA)_0; \.\.\.; \1_(\d+)\]", right):
            right = f"[{'; '.join(f'{few[1]}_{number}' for number in range(int(few[2]) + 1))}]"
        if name == "H":
            letters |= other_heads(model, stage, shown, at)
        values[name] = Parser(right, letters, functions(model, stage, at), join(stage)).evaluate()
        letters[name] = values[name]
    return values


def check(model, x, stages, context=None, last=lambda logits: logits.softmax(-1), **at):
    """Check the tensor of each stage against its equation, evaluated from the stages before it.

    Args:
        last: from logits to the last stage.
    """
    shown = start(model, **at)
    with torch.no_grad():
        for stage in stages:
            assert not stage.tensor.requires_grad
            inputs = {
                "x": x,
                "c": context,
                "x_class": getattr(model, "prefix", None),
                "E_pos": shown.get("E_pos"),
            }
            if is_input(stage, inputs, shown):
                continue
            assert stage.tensor.dtype == torch.float64
            values = evaluate(model, stage, shown, at)
            (value, *more) = values.values()
            if stage.name.endswith(("norm1.before", "norm1.after")):
                value = torch.stack([value, *more])
            assert value.shape == stage.shape, stage
            error = (value - stage.tensor).abs().masked_fill(value == stage.tensor, 0)  # -inf equals -inf
            assert error.max() < 1e-8, (stage.name, stage.equation, error.max())
            for letter, matrix in (("q", " U_q"), ("k", " U_k"), ("q", " U_qkv"), ("k", " U_qkv")):
                source = stage.equation.partition(" = ")[2].partition(matrix)[0]
                if matrix in stage.equation and source in shown:
                    shown[f"input of {letter}"] = shown[source]
            shown |= values if more else dict.fromkeys(values, stage.tensor)
    output = model(x[None], *([] if context is None else [context[None]]))[0]
    if isinstance(model, vt.Decoder):
        output = output[at["token"]]
    assert torch.allclose(stages[-1].tensor, last(output) if like(model).classes else output, atol=1e-12)
