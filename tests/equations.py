"""Reads the equations of a walk as they stand and works them out, from the tensors shown before and the
model's parameters, in fp64."""

import itertools
import math
import re

import torch
import torch.nn.functional as F

import vitrail as vt


class Reader:
    """Works out the right side of an equation, given what its letters are.

    sum = term {(+ | -) term};  term = product {(/ | *) product};  product = factor factor ...
    factor = (number | letter | function(sum, ...) | (sum) | [sum; ...]) {^ (T | t | number)}
    E[x] and E[0 ... 4] are rows of E, read before all else.
    """

    TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e-\d+)?|[A-Za-z_][\w']*|[-+*/^()\[\];,])")

    def __init__(self, text, letters, functions, join):
        self.letters, self.functions, self.join = letters, functions, join
        for number, name in enumerate(sorted((n for n in letters if "(" in n), key=len, reverse=True)):
            text = text.replace(name, f"known_{number}")  # LN(z_0), once shown, is a letter itself
            self.letters = {**self.letters, f"known_{number}": letters[name]}
        text = re.sub(r"(\w+)\^(\d+)([,;]) \.\.\.[,;] \1\^(\d+)", r"rows(\1, \2, \4, '\3')", text)
        text = re.sub(r"rows\((\w+), (\d+), (\d+), '.'\)", self.keep_rows, text)
        text = re.sub(r"(\w+)\[(\w+)(?: \.\.\. (\d+))?\]", self.pick_rows, text)
        self.tokens = self.TOKEN.findall(text)
        assert "".join(self.tokens) == text.replace(" ", ""), text

    def keep_rows(self, found):
        name = f"rows_{found[2]}_{found[3]}"
        self.letters = {**self.letters, name: self.letters[found[1]][int(found[2]) : int(found[3]) + 1]}
        return name

    def pick_rows(self, found):
        table, first, last = found.groups()
        numbers = (
            list(range(int(first), int(last or first) + 1)) if first[0].isdigit() else self.letters[first]
        )
        self.letters = {**self.letters, f"rows_of_{table}": self.letters[table][numbers]}
        return f"rows_of_{table}"

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


def like(model):
    """The config of the model's tokens and blocks; a decoder's are those of a ViT for texts."""
    return model.config.encoder_like if isinstance(model, vt.Decoder) else model.config


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
        spread = (z - mean).square().mean(-1, keepdim=True)
        return {
            "g": module.weight,
            "b": getattr(module, "bias", None),
            "mu": mean,
            "var": spread,
            "ms": square,
        }
    if part == "qkv":
        bias = attention.qkv.bias
        if c.qkv_bias == "no-k":
            bias = torch.cat([b if i != 1 else 0 * b for i, b in enumerate(bias.chunk(3))])
        return {"U_qkv": attention.qkv.weight.T, "b_qkv": bias}
    if part in "qkv":
        return pieces(attention, c, at["head"])
    if name.endswith("attention.bias"):
        return {"P_head": pair_bias(attention, c, at["head"])}
    if name.endswith(("attention.out", "cross.out")) and block:
        letters = "msa" if "attention" in name else "mca"
        return {f"U_{letters}": attention.out.weight.T, f"b_{letters}": attention.out.bias}
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
    if name == "logits" and model.head is None:  # a tied decoder
        return {"E": model.tokens.weight}
    return layer(model.head) if name == "logits" else {}


def functions(model, stage, at):
    """What the functions in a stage's equation are."""
    c, name = like(model), stage.name
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
        def of_a_decoder(z, *context):
            given = {"context": context[0][None]} if context else {}
            return model.blocks[number](z[None], masked(torch.zeros(len(z), len(z))) == 0, **given)[0]

        def of_an_encoder(z):
            return model.blocks[number](z[None], turn=model.position.turn)[0]

        return of_a_decoder if isinstance(model, vt.Decoder) else of_an_encoder

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
        "Spectrogram": lambda x: spectrogram(x, model),
        "mask": masked,
    }


def masked(scores):
    """-inf wherever a row's token would look ahead, pair by pair."""
    out = scores.clone()
    for row, column in itertools.product(*map(range, scores.shape)):
        out[row, column] = -torch.inf if column > row else out[row, column]
    return out


def cut_by_hand(x, model):
    grid, patch = model.config.grid, model.tokens.patch
    places = itertools.product(*map(range, grid))  # the last axis is the quickest
    boxes = (
        [slice(at * side, (at + 1) * side) for at, side in zip(place, patch, strict=True)] for place in places
    )
    return torch.stack([x[(slice(None), *box)].reshape(-1) for box in boxes])


def spectrogram(x, model):
    """Frame by frame, wave by wave: the logarithm of the power, then as a whole of mean 0, variance 1."""
    bins, frames = model.config.pixels
    moments = torch.arange(2 * bins, dtype=torch.float64)
    window = model.tokens.window  # kept in fp32: right to that, and then taken as it is
    assert (window - torch.sin(torch.pi * moments / (2 * bins)) ** 2).abs().max() < 1e-6
    rows = []
    for wave in range(1, bins + 1):
        turns = torch.exp(-2j * torch.pi * wave * moments / (2 * bins)) / math.sqrt(2 * bins)
        powers = [
            ((x[at * bins : (at + 2) * bins] * window) * turns).sum().abs() ** 2 for at in range(frames)
        ]
        rows.append(torch.stack(powers))
    levels = (torch.stack(rows) + 1e-6).log()
    levels = levels - levels.mean()
    return (levels / (levels.square().mean() + 1e-5).sqrt())[None]


def join(stage):
    """[a; b]: tokens under each other, heads and single vectors side by side."""

    def joined(values):
        if stage.name == "prefix":
            return torch.cat([value if value.ndim == 2 else value[None] for value in values])
        if stage.name in ("pool", "pooled"):
            values = [value.flatten() for value in values]
        return torch.cat(values, dim=-1)

    return joined


def start(model, **at):
    """The letters that are known before the first stage."""
    c = like(model)
    known = {"t": at["token"], "d": c.d, "D": c.width, "eps": c.eps}
    if isinstance(model, vt.Decoder):
        return {**known, "E_pos": model.position.table}
    known["E_pos"] = position_rows(model)
    if c.pool == "attention":
        known["probe"] = model.pool.probe
    names = ["x_class"] * c.class_token + ["x_dist"] * c.distillation_token
    known |= {name: model.prefix[row] for row, name in enumerate(names)}
    known["x_reg"] = {number + 1: model.prefix[len(names) + number] for number in range(c.registers)}
    return known


def other_heads(model, stage, shown, at):
    """SA_i, or CA_i, of the heads that are not shown, for [SA_1; ...; SA_k]."""
    c, cross = like(model), stage.name.endswith("cross.heads")
    attention = model.get_submodule(stage.name.removesuffix(".heads"))
    place = (lambda x: turned(model, x)) if "rotary" in c.position else (lambda x: x)
    asks, told = shown["input of q"], shown["input of k"]
    made = {}
    for head in range(c.heads):
        bias = 0.0 if attention.bias is None else pair_bias(attention, c, head)
        if isinstance(model, vt.Decoder) and not cross:
            bias = masked(torch.zeros(len(asks), len(told)))
        out = one_head(attention, c, head, asks, told, scale=scale_of(c), place=place, bias=bias)[1]
        name = f"{'CA' if cross else 'SA'}_{head + 1}"
        made[name] = shown.get(name, out)
    return made


def came(stage, given, shown):
    """Whether the stage is something the model was given; if so, it must be that."""
    letter, found, _ = stage.equation.partition(" in ")
    if not found:
        return False
    assert torch.equal(stage.tensor, given[letter])
    numbers = r"x in \{0, \.\.\., 10\}\^" + str(len(stage.tensor))
    real = re.escape(f"{letter} in R^({' x '.join(map(str, stage.shape))})")
    assert re.fullmatch(real if stage.tensor.is_floating_point() else numbers, stage.equation)
    shown[letter] = stage.tensor
    return True


def worked_out(model, stage, shown, at):
    """The left sides of a stage's equation and what its right sides come to."""
    given = {**shown, **parameters(model, stage, shown, at)}
    made = {}
    first, *rest = stage.equation.split(", var")
    for part in [first, *("var" + part for part in rest)]:
        name, _, right = part.partition(" = ")
        if few := re.fullmatch(r"\[(SA|CA)_1; \.\.\.; \1_(\d+)\]", right):
            right = f"[{'; '.join(f'{few[1]}_{number}' for number in range(1, int(few[2]) + 1))}]"
        if name == "H":
            given |= other_heads(model, stage, shown, at)
        made[name] = Reader(right, given, functions(model, stage, at), join(stage)).read()
        given[name] = made[name]
    return made


def check(model, x, stages, context=None, **at):
    """Each stage from those before it."""
    shown = start(model, **at)
    with torch.no_grad():
        for stage in stages:
            assert not stage.tensor.requires_grad
            if came(stage, {"x": x, "c": context}, shown):
                continue
            assert stage.tensor.dtype == torch.float64
            made = worked_out(model, stage, shown, at)
            (value, *more) = made.values()
            if stage.name.endswith(("norm1.before", "norm1.after")):
                value = torch.stack([value, *more])
            assert value.shape == stage.shape, stage
            off = (value - stage.tensor).abs().masked_fill(value == stage.tensor, 0)  # -inf is -inf
            assert off.max() < 1e-8, (stage.name, stage.equation, off.max())
            for letter, mark in (("q", " U_q"), ("k", " U_k"), ("q", " U_qkv"), ("k", " U_qkv")):
                source = stage.equation.partition(" = ")[2].partition(mark)[0]
                if mark in stage.equation and source in shown:
                    shown[f"input of {letter}"] = shown[source]
            shown |= made if more else dict.fromkeys(made, stage.tensor)
    last = model(x[None], *([] if context is None else [context[None]]))[0]
    if isinstance(model, vt.Decoder):
        last = last[at["token"]]
    assert torch.allclose(stages[-1].tensor, last.softmax(-1) if like(model).classes else last, atol=1e-12)
