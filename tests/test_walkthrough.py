"""The walk: every equation it shows is read as it stands, worked out from the tensors shown before it
and the model's parameters, in fp64, and compared with the tensor shown beside it.
"""

import random
import re

import pytest
import torch
import torch.nn.functional as F

import vitrail as vt
from conftest import shake
from vitrail.walkthrough import Stage, token_name, walk

# T = 6 + prefix and D = 12 are never equal, nor is T a head width: a product that fits in two ways
# would hide a slip.
BASE = dict(width=12, depth=2, heads=3, patch=(4, 8), size=(12, 16), channels=2, classes=5)

CONFIGS = {
    "paper": {},
    "mean pool, no class token": dict(pool="mean", class_token=False),
    "registers, rows class": dict(registers=2, rows="class"),
    "rows patches, norm_pre": dict(registers=1, rows="patches", norm_pre=True),
    "rotary": dict(position="rotary"),
    "rotary-dinov3, qk-norm": dict(position="rotary-dinov3", qk_norm=True, registers=2),
    "relative bias": dict(position="relative", scale="width"),
    "pairwise bias alone": dict(position="pairwise", scale=0.0),
    "positions at every block": dict(position_at="every", position="learned2d"),
    "post-norm": dict(block="post-norm"),
    "res-post-norm": dict(block="res-post-norm", layer_scale=0.1),
    "parallel": dict(block="parallel", scale="none"),
    "no residual": dict(block="no-residual", scale=0.3),
    "gated, layer scale": dict(mlp="gated", activation="silu", layer_scale=0.1),
    "two hidden layers, RMS": dict(mlp_hidden=2, norm="rms", qk_norm=True),
    "no norm": dict(norm="none", block="post-norm"),
    "attention pool": dict(pool="attention", registers=1),
    "attention pool, norm after": dict(pool="attention", pool_norm="after", norm="rms"),
    "flatten": dict(pool="flatten", qkv_bias="no-k"),
    "mean of all, norm after": dict(pool="mean-all", pool_norm="after", qkv_bias="none"),
    "distilled": dict(distillation_token=True, head="distilled", head_width=8),
    "embedding mlp, norms": dict(embedding="mlp", embedding_norm="both", head="mlp"),
    "stem": dict(embedding="conv", head="tanh", activation="quick-gelu"),
    "four heads, no head": dict(heads=4, classes=0, activation="gelu-tanh"),
    "pixels cut off": dict(size=(14, 19), remainder="cut", dropout=0.3, drop_path=0.2, activation="relu"),
}


# ---- reading an equation --------------------------------------------------------------------


class Reader:
    """Works out the right side of an equation, given what its letters are.

    sum = term {(+ | -) term};  term = product {(/ | *) product};  product = factor factor ...
    factor = (number | letter | function(sum, ...) | (sum) | [sum; ...]) {^ (T | t | number)}
    """

    TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e-\d+)?|[A-Za-z_][\w']*|[-+*/^()\[\];,])")

    def __init__(self, text, letters, functions, join):
        self.letters, self.functions, self.join = letters, functions, join
        for number, name in enumerate(sorted((n for n in letters if "(" in n), key=len, reverse=True)):
            text = text.replace(name, f"known_{number}")  # LN(z_0), once shown, is a letter itself
            self.letters = {**self.letters, f"known_{number}": letters[name]}
        text = re.sub(r"(\w+)\^(\d+)([,;]) \.\.\.[,;] \1\^(\d+)", r"rows(\1, \2, \4, '\3')", text)
        text = re.sub(r"rows\((\w+), (\d+), (\d+), '.'\)", self.keep_rows, text)
        self.tokens = self.TOKEN.findall(text)
        assert "".join(self.tokens) == text.replace(" ", ""), text

    def keep_rows(self, found):
        name = f"rows_{found[2]}_{found[3]}"
        self.letters = {**self.letters, name: self.letters[found[1]][int(found[2]) : int(found[3]) + 1]}
        return name

    def read(self):
        value = self.sum()
        assert not self.tokens, self.tokens
        return value

    def take(self, *wanted):
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in wanted else None

    def sum(self):
        value = self.term()
        while sign := self.take("+", "-"):
            value = value + self.term() if sign == "+" else value - self.term()
        return value

    def term(self):
        value = self.product()
        while sign := self.take("/", "*"):
            value = value / self.product() if sign == "/" else value * self.product()
        return value

    def product(self):
        value = self.factor()
        while self.tokens and re.match(r"[\w(\[]", self.tokens[0]):
            other = self.factor()
            matrix = isinstance(value, torch.Tensor) and other.ndim == 2 and value.shape[-1] == len(other)
            value = value @ other if matrix else value * other
        return value

    def listed(self, end, between):
        values = [self.sum()]
        while self.take(between):
            values.append(self.sum())
        assert self.take(end)
        return values

    def factor(self):
        token = self.tokens.pop(0)
        if token == "(":
            (value,) = self.listed(")", ",")
        elif token == "[":
            value = self.join(self.listed("]", ";"))
        elif token in self.functions and self.take("("):
            value = self.functions[token](*self.listed(")", ","))
        else:
            value = float(token) if token[0].isdigit() else self.letters[token]
        while self.take("^"):
            which = self.tokens.pop(0)
            if which == "T":
                value = value.T
            elif which == "2" and not isinstance(value, dict):
                value = value**2
            else:
                value = value[self.letters["t"] if which == "t" else int(which)]
        return value


# ---- what letters and functions are, told apart from the model's own code ------------------


def standard(z, eps, rms):
    if not rms:
        z = z - z.mean(-1, keepdim=True)
    return z / (z.square().mean(-1, keepdim=True) + eps).sqrt()


def normed(z, module, config):
    if config.norm == "none":
        return z
    return standard(z, config.eps, config.norm == "rms") * module.weight + getattr(module, "bias", 0)


def turned(model, x):
    """A pair (i, i + d/2) of a patch's numbers as a complex number, times exp(i angle)."""
    config = model.config
    (h, w), n, half = config.grid, config.prefix, config.d // 2
    rates = 100.0 ** (-torch.arange(half // 2) / (half // 2))
    out = x.clone()
    for patch in range(config.patches):
        row, column = divmod(patch, w)
        if config.position == "rotary-dinov3":
            row, column = (2 * torch.pi * (2 * (at + 0.5) / all_ - 1) for at, all_ in ((row, h), (column, w)))
        exact = torch.exp(1j * torch.cat([row * rates, column * rates]))
        # The model keeps its sines in fp32: right to that, and then taken as they are.
        turn = torch.complex(model.position.cos[patch, :half], model.position.sin[patch, :half])
        assert (turn - exact).abs().max() < 1e-5
        z = torch.complex(x[n + patch, :half], x[n + patch, half:]) * turn
        out[n + patch] = torch.cat([z.real, z.imag])
    return out


def pieces(attention, config, head):
    """U and b of q, k and v for one head, from the fused matrix."""
    made = {}
    for index, letter in enumerate("qkv"):
        rows = slice((index * config.heads + head) * config.d, (index * config.heads + head + 1) * config.d)
        made[f"U_{letter}"] = attention.qkv.weight[rows].T
        bare = config.qkv_bias == "none" or (config.qkv_bias == "no-k" and letter == "k")
        made[f"b_{letter}"] = torch.zeros(config.d) if bare else attention.qkv.bias[rows]
    return made


def pair_bias(attention, config, head):
    """The number added to the score of each pair, looked up pair by pair."""
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


def one_head(attention, config, head, asks, told, *, scale, place=lambda x: x, bias=0.0):
    """Weights and output of one head, by the formulas of the paper's Appendix A."""
    p = pieces(attention, config, head)
    q, k, v = asks @ p["U_q"] + p["b_q"], told @ p["U_k"] + p["b_k"], told @ p["U_v"] + p["b_v"]
    if config.qk_norm:
        q, k = normed(q, attention.q_norm, config), normed(k, attention.k_norm, config)
    weights = (scale * place(q) @ place(k).T + bias).softmax(-1)
    return weights, weights @ v


def scale_of(config):
    numbers = {"head": config.d**-0.5, "width": config.width**-0.5, "none": 1.0}
    return numbers.get(config.scale, config.scale)


ACTIVATIONS = {
    "GELU": F.gelu,
    "GELU_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "QuickGELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": F.relu,
    "SiLU": F.silu,
    "tanh": torch.tanh,
}


def own_mlp(mlp, config, x):
    act = {
        "gelu": "GELU",
        "gelu-tanh": "GELU_tanh",
        "quick-gelu": "QuickGELU",
        "relu": "ReLU",
        "silu": "SiLU",
    }
    act = ACTIVATIONS[act[config.activation]]
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    if config.mlp == "gated":
        hidden = act(hidden[..., : config.F]) * hidden[..., config.F :]
    else:
        hidden = act(hidden)
        for layer in mlp.middle:
            hidden = act(hidden @ layer.weight.T + layer.bias)
    return hidden @ mlp.fc2.weight.T + mlp.fc2.bias


def position_rows(model):
    """E_pos, zeros where a token has no row."""
    c, position = model.config, model.position
    if not hasattr(position, "all_rows"):
        return None
    front = {"all": c.prefix, "class": 1, "patches": 0}[c.rows]
    if c.position == "learned":
        rows, patches = position.table[:front], position.table[front:]
    elif c.position == "learned2d":
        rows = position.front if front else torch.zeros(0, c.width)
        places = [divmod(patch, c.grid[1]) for patch in range(c.patches)]
        patches = torch.stack([torch.cat([position.down[r], position.across[s]]) for r, s in places])
    else:
        rows, patches = position.fixed[:front], position.fixed[front:]
    return torch.cat([rows, torch.zeros(c.prefix - front, c.width), patches])


def layer(module, number=""):
    mark = f"_{number}" if number else ""
    return {f"W{mark}": module.weight.T, f"b{mark}": module.bias}


def parameters(model, stage, shown, at):
    """What the parameters in a stage's equation are: of the part that the stage is named after."""
    c, name = model.config, stage.name
    part = name.rpartition(".")[2]
    block = model.blocks[at["block"]] if name.startswith("blocks.") else None
    if name == "tokens.proj":
        return {"E": model.tokens.proj.weight.flatten(1).T, "b": model.tokens.proj.bias}
    if name == "tokens.fc":
        return layer(model.tokens.fc)
    if re.match(r"(LN|RMS)\([^()]+\) = g", stage.equation):
        module = model.get_submodule("norm" if name == "encoded" else name)
        z = shown[stage.equation.split("(")[1].split(")")[0]]
        mean, square = z.mean(-1, keepdim=True), z.square().mean(-1, keepdim=True)
        spread = (z - mean).square().mean(-1, keepdim=True)
        return {
            "g": module.weight,
            "b": getattr(module, "bias", None),
            "mu": mean,
            "var": spread,
            "ms": square,
        }
    if part == "qkv":
        attention = block.attention
        bias = attention.qkv.bias
        if c.qkv_bias == "no-k":
            bias = torch.cat([b if i != 1 else 0 * b for i, b in enumerate(bias.chunk(3))])
        return {"U_qkv": attention.qkv.weight.T, "b_qkv": bias}
    if part in "qkv":
        return pieces(block.attention, c, at["head"])
    if name.endswith("attention.bias"):
        return {"P_head": pair_bias(block.attention, c, at["head"])}
    if name.endswith("attention.out") and block:
        return {"U_msa": block.attention.out.weight.T, "b_msa": block.attention.out.bias}
    if name.endswith(("mlp.hidden", "mlp.out")):
        if c.mlp == "gated":
            (W_a, W_b), (b_a, b_b) = block.mlp.fc1.weight.chunk(2), block.mlp.fc1.bias.chunk(2)
            return {"W_a": W_a.T, "W_b": W_b.T, "b_a": b_a, "b_b": b_b, **layer(block.mlp.fc2, 2)}
        layers = [block.mlp.fc1, *block.mlp.middle, block.mlp.fc2]
        return {k: v for number, one in enumerate(layers, 1) for k, v in layer(one, number).items()}
    if part in ("scale1", "scale2"):
        return {"lambda": getattr(block, part).weight}
    if name == "logits" and c.head == "distilled":
        (W_c, b_c), (W_d, b_d) = ((h.weight.T, h.bias) for h in (model.head.classes, model.head.distillation))
        halves = dict(zip(("y_class", "y_dist"), shown["y"].chunk(2), strict=True))
        return {"W_c": W_c, "b_c": b_c, "W_d": W_d, "b_d": b_d, **halves}
    if name == "logits" and c.head != "linear":
        return {**layer(model.head.fc1, 1), **layer(model.head.fc2, 2)}
    return layer(model.head) if name == "logits" else {}


def functions(model, stage, at):
    """What the functions in a stage's equation are."""
    c, name = model.config, stage.name
    module = {"q": "q_norm", "k": "k_norm"}.get(name.rpartition(".")[2])
    if module:
        module = getattr(model.blocks[at["block"]].attention, module)
    elif name in ("pool", "pooled"):
        after = stage.equation in ("y = LN(p)", "y = RMS(p)")
        module = model.norm if after else getattr(model.pool, "norm", None)

    def probing(what):
        def looked(probe, tokens):
            both = [
                one_head(model.pool.attention, c, head, probe, tokens, scale=c.d**-0.5)
                for head in range(c.heads)
            ]
            if what == "weights":
                return torch.cat([weights for weights, _ in both])
            out = model.pool.attention.out
            return (torch.cat([head for _, head in both], dim=-1) @ out.weight.T + out.bias)[0]

        return looked

    def block(number):
        return lambda z: model.blocks[number](z[None], turn=model.position.turn)[0]

    return {
        **ACTIVATIONS,
        **{f"Block_{number + 1}": block(number) for number in range(c.depth)},
        "LN": lambda x: normed(x, module, c),
        "RMS": lambda x: normed(x, module, c),
        "MLP": lambda x: own_mlp(model.pool.mlp, c, x),
        "MSA": probing("heads"),
        "weights": probing("weights"),
        "R": lambda x: turned(model, x),
        "sqrt": lambda x: torch.as_tensor(x, dtype=torch.float64).sqrt(),
        "mean": lambda x: x.mean(0),
        "softmax": lambda x: (x - x.logsumexp(-1, keepdim=True)).exp(),
        "cut": lambda x: cut_by_hand(x, model),
        "Stem": lambda x: model.tokens.stem(x[None])[0],
    }


def cut_by_hand(x, model):
    (h, w), (high, wide) = model.config.grid, model.tokens.patch
    return torch.stack(
        [
            x[:, high * r : high * (r + 1), wide * s : wide * (s + 1)].reshape(-1)
            for r in range(h)
            for s in range(w)
        ]
    )


def join(stage):
    """[a; b]: tokens under each other, heads and single vectors side by side."""

    def joined(values):
        if stage.name == "prefix":
            return torch.cat([value if value.ndim == 2 else value[None] for value in values])
        if stage.name.startswith("pool"):
            values = [value.flatten() for value in values]
        return torch.cat(values, dim=-1)

    return joined


def start(model, **at):
    """The letters that are known before the first stage."""
    c = model.config
    known = {"t": at["token"], "d": c.d, "D": c.width, "eps": c.eps, "E_pos": position_rows(model)}
    if c.pool == "attention":
        known["probe"] = model.pool.probe
    names = ["x_class"] * c.class_token + ["x_dist"] * c.distillation_token
    known |= {name: model.prefix[row] for row, name in enumerate(names)}
    known["x_reg"] = {number + 1: model.prefix[len(names) + number] for number in range(c.registers)}
    return known


def other_heads(model, z, shown, at):
    """SA_i of the heads that are not shown, for [SA_1; ...; SA_k]."""
    c, attention = model.config, model.blocks[at["block"]].attention
    place = (lambda x: turned(model, x)) if "rotary" in c.position else (lambda x: x)
    made = {}
    for head in range(c.heads):
        bias = 0.0 if attention.bias is None else pair_bias(attention, c, head)
        out = one_head(attention, c, head, z, z, scale=scale_of(c), place=place, bias=bias)[1]
        made[f"SA_{head + 1}"] = shown.get(f"SA_{head + 1}", out)
    return made


def check(model, image, stages, **at):
    """Each stage from those before it."""
    shown = start(model, **at)
    with torch.no_grad():
        for stage in stages:
            assert stage.tensor.dtype == torch.float64
            assert not stage.tensor.requires_grad
            if stage.name == "pixels":
                assert torch.equal(stage.tensor, image)
                assert stage.equation == f"x in R^({' x '.join(map(str, image.shape))})"
                shown["x"] = stage.tensor
                continue
            given = {**shown, **parameters(model, stage, shown, at)}
            made, left = [], []
            parts = stage.equation.split(", var") if ", var" in stage.equation else [stage.equation]
            for part in [parts[0], *("var" + part for part in parts[1:])]:
                name, _, right = part.partition(" = ")
                if right.startswith("[SA_1; ...; SA_"):
                    names = [f"SA_{number}" for number in range(1, int(right[15:-1]) + 1)]
                    right = f"[{'; '.join(names)}]"
                if name == "H":
                    given |= other_heads(model, shown["input of q, k, v"], shown, at)
                made.append(Reader(right, given, functions(model, stage, at), join(stage)).read())
                given[name] = made[-1]
                left.append(name)
            if stage.name.endswith(("norm1.before", "norm1.after")):
                value = torch.stack(made)
            else:
                (value,) = made
            assert value.shape == stage.shape, stage
            error = (value - stage.tensor).abs().max().item()
            assert error < 1e-8, (stage.name, stage.equation, error)
            if left[0] == "[q, k, v]":
                source = stage.equation.partition(" = ")[2].partition(" U_qkv")[0]
                shown["input of q, k, v"] = shown[source]
            for name, part in zip(left, made, strict=True):
                shown[name] = stage.tensor if len(made) == 1 else part
    last = model(image[None])[0]
    assert torch.allclose(stages[-1].tensor, last.softmax(-1) if model.config.classes else last, atol=1e-12)


def build(fields):
    config = vt.ViTConfig(**{**BASE, **fields})
    model = shake(vt.ViT(config)).double()
    return model, torch.randn(config.channels, *config.pixels, dtype=torch.float64)


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_equation_gives_the_tensor_beside_it(fields):
    model, image = build(fields)
    T, k = model.config.tokens, model.config.heads
    for at in (dict(block=0, head=0, token=0), dict(block=1, head=k - 1, token=T - 2)):
        stages = walk(model, image, **at)
        check(model, image, stages, **at)
        assert len({stage.name for stage in stages}) == len(stages)


CHOICES = {
    "block": ["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"],
    "norm": ["layer", "rms", "none"],
    "scale": ["head", "width", "none", 0.3],
    "position": ["learned", "learned2d", "sincos1d", "sincos2d", "rotary", "pairwise", "relative", "none"],
    "rows": ["all", "class", "patches"],
    "position_at": ["start", "every"],
    "registers": [0, 2],
    "class_token": [True, False],
    "norm_pre": [False, True],
    "embedding": ["linear", "mlp", "conv"],
    "embedding_norm": ["none", "before", "after", "both"],
    "qkv_bias": ["all", "none", "no-k"],
    "qk_norm": [False, True],
    "mlp": ["plain", "gated"],
    "activation": ["gelu", "gelu-tanh", "quick-gelu", "relu", "silu"],
    "mlp_hidden": [1, 2],
    "layer_scale": [None, 0.5],
    "pool": ["class", "mean", "mean-all", "attention", "flatten"],
    "pool_norm": ["before", "after", "none"],
    "head": ["linear", "mlp", "tanh"],
    "head_width": [None, 8],
    "patch_dropout": [0.0, 0.4],
}


@pytest.mark.parametrize("seed", range(24))
def test_and_so_for_any_mixture_of_options(seed):
    chance = random.Random(seed)
    fields = {name: chance.choice(values) for name, values in CHOICES.items()}
    for name in chance.sample(list(fields), len(fields)):  # what clashes goes back to its default
        try:
            vt.ViTConfig(**{**BASE, **fields})
        except vt.ConfigError:
            fields.pop(name)
    model, image = build(fields)
    at = dict(block=seed % 2, head=seed % 3, token=chance.randrange(model.config.tokens))
    check(model, image, walk(model, image, **at), **at)


# ---- article 001 ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def article():
    """The article's ViT-Base, one block of it."""
    model = vt.create("B/16", depth=1, classes=10).eval()
    image = torch.randn(3, 224, 224)
    return model, image, {stage.name: stage for stage in walk(model, image, token=1)}


def test_the_shapes_of_the_article(article):
    _, _, stages = article
    shapes = {
        "pixels": (3, 224, 224),
        "tokens.cut": (196, 768),
        "tokens.proj": (196, 768),
        "prefix": (197, 768),
        "position": (197, 768),
        "blocks.0.attention.q": (197, 64),
        "blocks.0.attention.k": (197, 64),
        "blocks.0.attention.v": (197, 64),
        "blocks.0.attention.scores": (197, 197),
        "blocks.0.attention.weights": (197, 197),
        "blocks.0.attention.row": (197,),
        "blocks.0.attention.head": (197, 64),
        "blocks.0.attention.heads": (197, 768),
        "blocks.0.attention.out": (197, 768),
        "blocks.0.mlp.hidden": (197, 3072),
        "blocks.0.out": (197, 768),
        "encoded": (197, 768),
        "pooled": (768,),
        "logits": (10,),
        "probabilities": (10,),
    }
    assert {name: stages[name].shape for name in shapes} == shapes


def test_its_slips_are_not_ours(article):
    model, _, stages = article
    # The residual is added to the embeddings, not to their norm.
    branch, z = stages["blocks.0.attention.out"].tensor, stages["embed"].tensor
    assert torch.equal(stages["blocks.0.residual1"].tensor, z + branch)
    assert (stages["blocks.0.residual1"].tensor - stages["blocks.0.norm1"].tensor - branch).abs().max() > 0.1
    # Token 0 is the class token, token 1 the first patch.
    assert token_name(model.config, 0) == "the class token"
    assert "patch 0 (row 0, column 0)" in stages["blocks.0.attention.row"].meaning
    assert torch.equal(stages["prefix"].tensor[1:], stages["tokens.proj"].tensor)
    # The norm by hand: standardised it has mean 0 and variance 1.
    unit = stages["blocks.0.norm1.standard"].tensor
    assert abs(unit.mean()) < 1e-5
    assert abs(unit.var(unbiased=False) - 1) < 1e-3
    # Each row of weights sums to 1, and the row shown is the token's.
    weights = stages["blocks.0.attention.weights"].tensor
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    assert torch.equal(weights[1], stages["blocks.0.attention.row"].tensor)


# ---- equations say what the config does -----------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name", "equation"),
    [
        ({}, "blocks.0.attention.q", "q = LN(z_0) U_q + b_q"),
        ({}, "blocks.0.attention.scores", "S = q k^T / sqrt(d)"),
        (dict(scale="width"), "blocks.0.attention.scores", "S = q k^T / sqrt(D)"),
        (dict(scale="none"), "blocks.0.attention.scores", "S = q k^T"),
        (dict(position="relative", scale=0.3), "blocks.0.attention.scores", "S = 0.3 q k^T + p"),
        (dict(qkv_bias="no-k"), "blocks.0.attention.k", "k = LN(z_0) U_k"),
        (dict(position="rotary"), "blocks.0.attention.k", "k = R(LN(z_0) U_k + b_k)"),
        ({}, "blocks.0.residual1", "z'_1 = MSA + z_0"),
        (dict(block="post-norm"), "blocks.0.attention.q", "q = z_0 U_q + b_q"),
        (dict(block="post-norm"), "blocks.0.out", "z_1 = LN(r)"),
        (dict(block="res-post-norm"), "blocks.0.out", "z_1 = LN(MLP) + z'_1"),
        (dict(block="parallel"), "blocks.0.out", "z_1 = MSA + MLP + z_0"),
        (dict(block="no-residual"), "blocks.0.out", "z_1 = MLP"),
        ({}, "blocks.1.out", "z_2 = Block_2(z_1)"),
        (dict(position_at="every"), "blocks.1.out", "z_2 = Block_2(z_1 + E_pos)"),
        (dict(registers=2), "prefix", "u = [x_class; x_reg^1; x_reg^2; e]"),
        (dict(norm="none"), "blocks.0.mlp.hidden", "h = GELU(z'_1 W_1 + b_1)"),
        (dict(norm="none", pool="attention"), "pooled", "y = MLP(c) + c"),
        (dict(pool="mean"), "pooled", "y = mean(LN(z_2)^1, ..., LN(z_2)^6)"),
        ({}, "pooled", "y = LN(z_2)^0"),
    ],
)
def test_an_equation_in_words_of_the_paper(fields, name, equation):
    model, image = build(fields)
    stages = {stage.name: stage for stage in walk(model, image)}
    assert stages[name].equation == equation


def test_stages_that_do_not_apply_are_left_out():
    model, image = build(dict(class_token=False, pool="mean", position="none", norm="none", classes=0))
    names = [stage.name for stage in walk(model, image)]
    assert not {"prefix", "position", "blocks.0.norm1", "blocks.0.norm2", "encoded", "logits"} & set(names)
    assert names[-1] == "pooled"
    model, image = build({})
    assert not [stage.name for stage in walk(model, image) if "bias" in stage.name or "scale" in stage.name]


def test_tokens_have_names():
    config = vt.ViTConfig(**BASE, distillation_token=True, registers=2)
    names = [token_name(config, token) for token in range(6)]
    assert names == [
        "the class token",
        "the distillation token",
        "register 1",
        "register 2",
        "patch 0 (row 0, column 0)",
        "patch 1 (row 0, column 1)",
    ]


# ---- what it does to the model, and what it refuses -----------------------------------------


def test_the_model_is_left_as_it_was():
    model, image = build(dict(dropout=0.5, drop_path=0.5, position="pairwise"))
    model.train()
    model.blocks[1].eval()  # frozen parts stay in their own mode
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, again = walk(model, image), walk(model, image[None])
    assert [module.training for module in model.modules()] == modes
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.tensor, two.tensor), one.name  # no dropout, and one picture with a batch axis
    for stage in first[1:]:
        stage.tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_modes_are_restored_after_an_error():
    model, image = build({})
    model.train()
    with pytest.raises(vt.InputError, match="dtype"):
        walk(model, image.float())
    assert all(module.training for module in model.modules())


def test_a_stage_is_frozen_and_equal_only_to_itself():
    stage = Stage("a", "b", "c", torch.zeros(2, 3))
    assert stage.shape == (2, 3)
    assert stage != Stage("a", "b", "c", stage.tensor)
    with pytest.raises(AttributeError):
        stage.name = "d"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(block=2), "block must be a whole number from 0 to 1. Got block=2. "),
        (dict(block=-1), "block must be a whole number from 0 to 1. Got block=-1. "),
        (dict(head=3), "head must be a whole number from 0 to 2. Got head=3. "),
        (dict(token=7), "token must be a whole number from 0 to 6. Got token=7. "),
        (dict(token=1.0), "token must be a whole number from 0 to 6. Got token=1.0. "),
    ],
)
def test_numbers_out_of_range_are_refused(given, message):
    model, image = build({})
    with pytest.raises(vt.InputError) as caught:
        walk(model, image, **given)
    assert str(caught.value).startswith(message)
    assert "counted from 0." in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((4, 2, 12, 16), "Pick one of the batch: images[0]."),
        ((12, 16, 2), "Put the channels first: image.permute(2, 0, 1)."),
        ((2, 12, 24), "Resize the picture to the model's size."),
        ((12, 16), "Resize the picture to the model's size."),
    ],
)
def test_a_wrong_picture_is_refused(shape, advice):
    model, _ = build({})
    with pytest.raises(vt.InputError) as caught:
        walk(model, torch.zeros(shape, dtype=torch.float64))
    must = "A walk takes one picture of the shape (2, 12, 16) that the model was built for."
    assert str(caught.value) == f"{must} Got {shape}. {advice}"
    with pytest.raises(vt.InputError, match="must be a torch tensor"):
        walk(model, [[0.0]])
