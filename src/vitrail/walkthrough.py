"""One picture through the model, stage by stage: what a reader would work out by hand (article 001).

    for stage in walk(model, image):
        print(stage.name, stage.equation, stage.shape, stage.meaning)

The equations are the paper's, as this model's config has them, in plain text: letters side by side
are multiplied (a matrix as a matrix product, a vector entry by entry), `^t` picks a token, `^T` turns
a matrix, `[a; b]` puts one after the other. A letter means what the latest equation says it is, or a
parameter of the part that the stage is named after; in a norm, mu, var and ms (mean square) are each
token's own. R turns by the place of a patch.
tests/test_walk.py reads every equation and compares what comes out with the tensor beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.model import ViT, record
from vitrail.model.position import AddedPosition
from vitrail.model.tokens import PatchTokens, StemTokens, cut

NORMS = {"layer": "LN", "rms": "RMS", "none": ""}
ACTIVATIONS = {
    "gelu": "GELU",
    "gelu-tanh": "GELU_tanh",
    "quick-gelu": "QuickGELU",
    "relu": "ReLU",
    "silu": "SiLU",
}
ROLES = {
    "q": "What each token asks for",
    "k": "What each token answers to",
    "v": "What each token has to tell",
}


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of the forward pass."""

    name: str
    """Where in the model: the name of the tap, if there is one."""
    equation: str
    """What is computed, in the paper's letters."""
    meaning: str
    """The same in a sentence."""
    tensor: Tensor
    """What came out, for this one picture: no batch axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def walk(model: ViT, image: Tensor, *, block: int = 0, head: int = 0, token: int = 0) -> list[Stage]:
    """The forward pass of one picture, (C, H, W) or (1, C, H, W), as a list of stages.

    Args:
        block: which block to show in detail, from 0; the others are one stage each.
        head: which of its heads.
        token: whose norm and whose row of attention weights; 0 is the first of the prefix.
    """
    c = model.config
    _check_number("block", block, c.depth)
    _check_number("head", head, c.heads)
    _check_number("token", token, c.tokens)
    images = _as_batch(image, c)
    names = ["tokens.*", "position", "norm_pre", "embed", "blocks.*.out", "encoded", "pooled", "logits"]
    names += [f"blocks.{block}.{part}" for part in ("*", "attention.*", "mlp.*")]
    names += ["pool.attention.weights", "pool.attention.out"] if c.pool == "attention" else []
    with _evaluating(model), torch.no_grad():
        with record(model, *names) as tape:
            model(images)
        # Parameters have no batch axis; the bias of the scores is the only one on the tape.
        seen = {name: t if name.endswith("attention.bias") else t[0] for name, t in tape.items()}
        steps = _Steps(model, seen, block, head, token)
        steps.embedding(images)
        for index in range(c.depth):
            steps.detail() if index == block else steps.other(index)
        steps.ending()
    return steps.stages


def token_name(config: ViTConfig, token: int) -> str:
    """A token in words: "the class token", "patch 5 (row 1, column 2)"; rows and columns from 0."""
    named = ["the class token"] * config.class_token + ["the distillation token"] * config.distillation_token
    named += [f"register {number}" for number in range(1, config.registers + 1)]
    if token < len(named):
        return named[token]
    patch = token - len(named)
    return f"patch {patch} (row {patch // config.grid[1]}, column {patch % config.grid[1]})"


class _Steps:
    """The stages so far. Each method adds some, and returns what the next equation calls the result."""

    def __init__(self, model: ViT, seen: dict[str, Tensor], block: int, head: int, token: int) -> None:
        self.model, self.config, self.seen = model, model.config, seen
        self.block, self.head, self.token = block, head, token
        self.stages: list[Stage] = []

    def add(self, name: str, equation: str, meaning: str, tensor: Tensor | None = None) -> str:
        tensor = self.seen[name] if tensor is None else tensor
        self.stages.append(Stage(name, equation, meaning, tensor.detach()))
        return equation.partition(" = ")[0]

    def norm(self, name: str, z: str, what: str) -> str:
        """A norm over the last axis; left out where the config has none."""
        if not (norm := NORMS[self.config.norm]):
            return z
        sums = f"g ({z} - mu) / sqrt(var + eps) + b" if norm == "LN" else f"g {z} / sqrt(ms + eps)"
        return self.add(
            name, f"{norm}({z}) = {sums}", f"{what}, each brought to one scale by its own numbers."
        )

    # ---- Eq. 1: from pixels to z_0 ----------------------------------------------------------

    def embedding(self, images: Tensor) -> None:
        c, model = self.config, self.model
        C, (H, W) = c.channels, c.pixels
        self.add("pixels", f"x in R^({C} x {H} x {W})", "The picture: a number for each pixel.", images[0])
        e = self.patches(images)
        z = self.stages[-1].tensor  # (N, D)
        if model.prefix is not None:
            front = ["x_class"] * c.class_token + ["x_dist"] * c.distillation_token
            front += [f"x_reg^{number}" for number in range(1, c.registers + 1)]
            tokens = f"{c.prefix} learned token{'s' if c.prefix > 1 else ''}"
            z = torch.cat([model.prefix, z])  # (T, D)
            e = self.add("prefix", f"u = [{'; '.join(front)}; {e}]", f"{tokens} put before the patches.", z)
        if isinstance(model.position, AddedPosition):
            e = self.add("position", f"s = {e} + E_pos", "Each token is told its place by a row added to it.")
        if c.norm_pre:
            e = self.norm("norm_pre", e, "The tokens")
        meaning = "What the first block is given; dropout changes nothing outside training."
        self.add("embed", f"z_0 = {e}", meaning)

    def patches(self, images: Tensor) -> str:
        """From the picture to one vector for each patch."""
        c, tokens = self.config, self.model.tokens
        x, maps = "x", images
        if isinstance(tokens, StemTokens):
            maps = tokens.stem(images)
            x = self.add("tokens.stem", "m = Stem(x)", "What the convolutions make of the picture.", maps[0])
        assert isinstance(tokens, PatchTokens)
        (h, w), (high, wide) = c.grid, tokens.patch
        meaning = f"{h} x {w} patches of {high} x {wide}, row by row, each laid out as one vector."
        x = self.add("tokens.cut", f"x_p = cut({x})", meaning, cut(maps, tokens.patch)[0])
        if c.embedding_norm in ("before", "both"):
            x = self.norm("tokens.norm_before", x, "The patches")
        e = self.add("tokens.proj", f"e = {x} E + b", "One matrix makes a token of every patch.")
        if c.embedding == "mlp":
            e = self.add("tokens.fc", f"f = GELU({e}) W + b", "A second layer, after a GELU.")
        if c.embedding_norm in ("after", "both"):
            e = self.norm("tokens.norm_after", e, "The tokens of the patches")
        return e

    # ---- Eq. 2 and 3: the blocks ------------------------------------------------------------

    def other(self, index: int) -> None:
        again = index > 0 and self.config.position_at == "every"
        before = f"z_{index} + E_pos" if again else f"z_{index}"
        meaning = f"Block {index}: attention and MLP, as in the block shown in detail."
        self.add(f"blocks.{index}.out", f"z_{index + 1} = Block_{index + 1}({before})", meaning)

    def detail(self) -> None:
        """The chosen block; its kind says where norms and sums stand."""
        at, number = f"blocks.{self.block}", self.block + 1
        z, x = f"z_{self.block}", self.stages[-1].tensor  # (T, D)
        if self.block and self.config.position_at == "every":
            x = self.model.position.again(x)
            z = self.add(f"{at}.position", f"w = {z} + E_pos", "Each token is told its place again.", x)
        attended, thought = self.seen[f"{at}.scale1"], self.seen[f"{at}.scale2"]  # the two branches
        summed = "What attention found is added to what was there."
        middle, end = f"z'_{number}", f"z_{number}"
        match self.config.block:
            case "pre-norm":
                a = self.attention(self.norm1(z, x))
                a = self.add(f"{at}.residual1", f"{middle} = {a} + {z}", summed, x + attended)
                end += f" = {self.mlp(self.norm2(a))} + {a}"
            case "post-norm":
                a, x = self.attention(z), x + attended
                a = self.norm1(self.add(f"{at}.residual1", f"{middle} = {a} + {z}", summed, x), x)
                x = x if self.config.norm == "none" else self.seen[f"{at}.norm1"]
                both = f"r = {self.mlp(a)} + {a}"
                both = self.add(f"{at}.residual2", both, "And so is what the MLP made of it.", x + thought)
                end += f" = {self.norm2(both)}"
            case "res-post-norm":
                a = self.norm1(self.attention(z), attended)
                attended = attended if self.config.norm == "none" else self.seen[f"{at}.norm1"]
                a = self.add(f"{at}.residual1", f"{middle} = {a} + {z}", summed, x + attended)
                end += f" = {self.norm2(self.mlp(a))} + {a}"
            case "parallel":
                a = self.attention(self.norm1(z, x))
                end += f" = {a} + {self.mlp(self.norm2(z))} + {z}"
            case "no-residual":
                a = self.attention(self.norm1(z, x))
                end += f" = {self.mlp(self.norm2(a))}"
        self.add(f"{at}.out", end, f"The tokens after block {self.block}.")

    def norm1(self, z: str, x: Tensor) -> str:
        """The first norm, with the numbers of the chosen token before and after worked out by hand."""
        name, norm, t = f"blocks.{self.block}.norm1", NORMS[self.config.norm], self.token
        if not norm:
            return z
        who, row = token_name(self.config, t), x[t]
        before, after = _moments(f"{z}^t", norm), _moments(f"{norm}({z})^t", norm)
        words = "Mean and variance" if norm == "LN" else "Mean square"
        numbers = moments(row, norm)
        self.add(f"{name}.before", before, f"{words} of {who} (t = {t}) before the norm.", numbers)
        centred, spread = (row - numbers[0], numbers[1]) if norm == "LN" else (row, numbers[0])
        up = f"({z}^t - mu) / sqrt(var + eps)" if norm == "LN" else f"{z}^t / sqrt(ms + eps)"
        standard = centred / (spread + self.config.eps).sqrt()
        self.add(f"{name}.standard", f"n = {up}", f"{who.capitalize()} by its own numbers.", standard)
        z = self.norm(name, z, "All tokens")
        meaning = f"{words} of {who} after the norm, with its learned factors."
        self.add(f"{name}.after", after, meaning, moments(self.seen[name][t], norm))
        return z

    def norm2(self, z: str) -> str:
        return self.norm(f"blocks.{self.block}.norm2", z, "All tokens")

    def attention(self, z: str) -> str:
        """Appendix A of the paper for one head, then all heads together."""
        c, at, head = self.config, f"blocks.{self.block}.attention", self.head
        b = "" if c.qkv_bias == "none" else " + b_qkv"
        fused = "One product makes queries, keys and values of all heads."
        self.add(f"{at}.qkv", f"[q, k, v] = {z} U_qkv{b}", fused)
        for index, letter in enumerate("qkv"):
            self.project(letter, z, (index * c.heads + head) * c.d)
        biased = f"{at}.bias" in self.seen
        if biased:
            kind = "pair of tokens" if c.position == "pairwise" else "distance between tokens"
            table = self.seen[f"{at}.bias"][head].clone()  # a copy: it may be the parameter itself
            self.add(f"{at}.bias", "p = P_head", f"A learned number for each {kind}.", table)
        ways = {"head": "q k^T / sqrt(d)", "width": "q k^T / sqrt(D)", "none": "q k^T"}
        scores = ways[c.scale] if isinstance(c.scale, str) else f"{c.scale} q k^T"
        who = token_name(c, self.token)
        scores, weights, heads = f"S = {scores}{' + p' * biased}", self.seen[f"{at}.weights"], f"{at}.heads"
        self.add(
            f"{at}.scores", scores, "How well each query fits each key.", self.seen[f"{at}.scores"][head]
        )
        self.add(f"{at}.weights", "A = softmax(S)", "Who looks at whom: rows sum to 1.", weights[head])
        row = weights[head, self.token]  # (T)
        self.add(f"{at}.row", "a = A^t", f"Where {who} (t = {self.token}) looks.", row)
        sa = f"SA_{head + 1} = A v"
        self.add(f"{at}.head", sa, "For each token the mean of what it looks at.", self.seen[heads][head])
        joined = self.seen[heads].transpose(0, 1).flatten(1)  # (T, k d)
        parts = [f"SA_{number}" for number in range(1, c.heads + 1)]
        parts = parts if c.heads < 4 else [parts[0], "...", parts[-1]]
        self.add(heads, f"H = [{'; '.join(parts)}]", "All heads side by side.", joined)
        a = self.add(f"{at}.out", "MSA = H U_msa + b_msa", "A matrix mixes the heads, back to width D.")
        return self.scaled("scale1", f"a = {a} lambda")

    def project(self, letter: str, z: str, first: int) -> None:
        """q, k or v of the head: columns of the fused product, then what happens to q and k alone."""
        c = self.config
        bias = c.qkv_bias == "all" or (c.qkv_bias == "no-k" and letter != "k")
        made = f"{z} U_{letter}{f' + b_{letter}' * bias}"
        meaning = f"{ROLES[letter]}: columns {first} to {first + c.d - 1}"
        if letter != "v" and c.qk_norm and c.norm != "none":
            made, meaning = f"{NORMS[c.norm]}({made})", f"{meaning}, normed"
        if letter != "v" and "rotary" in c.position:
            made, meaning = f"R({made})", f"{meaning}, turned by place"
        name = f"blocks.{self.block}.attention.{letter}"
        self.add(name, f"{letter} = {made}", f"{meaning}.", self.seen[name][self.head])

    def mlp(self, z: str) -> str:
        c, at, act = self.config, f"blocks.{self.block}.mlp", ACTIVATIONS[self.config.activation]
        if c.mlp == "gated":
            made = f"{act}({z} W_a + b_a) * ({z} W_b + b_b)"
            self.add(f"{at}.hidden", f"h = {made}", "Each token by itself; one half is a gate for the other.")
        else:
            made = z
            for layer in range(1, c.mlp_hidden + 1):
                made = f"{act}({made} W_{layer} + b_{layer})"
            self.add(f"{at}.hidden", f"h = {made}", "Each token by itself, in a wider space.")
        last = c.mlp_hidden + 1
        m = self.add(f"{at}.out", f"MLP = h W_{last} + b_{last}", "And back to width D.")
        return self.scaled("scale2", f"m = {m} lambda")

    def scaled(self, name: str, equation: str) -> str:
        """LayerScale, where there is one: a branch by its learned factors."""
        if self.config.layer_scale is None:
            return equation.split()[2]
        return self.add(f"blocks.{self.block}.{name}", equation, "A learned factor for each channel.")

    # ---- Eq. 4: from z_L to probabilities ---------------------------------------------------

    def ending(self) -> None:
        c, z = self.config, f"z_{self.config.depth}"
        if c.pool_norm == "before":
            z = self.norm("encoded", z, "The tokens of the last block")
        if c.pool_norm == "after" and c.norm != "none":
            self.pool("pool", "p", z, self.model.pool(self.seen["encoded"][None])[0])
            self.add("pooled", f"y = {NORMS[c.norm]}(p)", "The vector of the picture, brought to one scale.")
        else:
            self.pool("pooled", "y", z, self.seen["pooled"])
        if c.classes == 0:
            return
        act = "tanh" if c.head == "tanh" else ACTIVATIONS[c.activation]
        two = f"{act}(y W_1 + b_1) W_2 + b_2"
        pair = "(y_class W_c + b_c + y_dist W_d + b_d) / 2"
        logits = {"linear": "y W + b", "mlp": two, "tanh": two, "distilled": pair}[c.head]
        self.add("logits", f"o = {logits}", "One number for each class: the higher, the likelier.")
        shares = self.seen["logits"].softmax(dim=-1)
        self.add("probabilities", "P = softmax(o)", "The same as shares of 1.", shares)

    def pool(self, name: str, y: str, z: str, pooled: Tensor) -> str:
        """One vector for the picture, called y, or p where a norm follows."""
        c, last = self.config, self.config.tokens - 1
        found = f"{NORMS[c.norm]}(c)" if c.norm != "none" else "c"
        ways = {
            "class": (f"{z}^0", "The class token speaks for the whole picture."),
            "mean": (f"mean({z}^{c.prefix}, ..., {z}^{last})", "The mean of the patches."),
            "mean-all": (f"mean({z}^0, ..., {z}^{last})", "The mean of all tokens."),
            "flatten": (f"[{z}^{c.prefix}; ...; {z}^{last}]", "All patches in one long row."),
            "attention": (f"MLP({found}) + c", "And what a block's MLP makes of that."),
        }
        made, meaning = ways[c.pool]
        if c.head == "distilled":
            made, meaning = f"[{z}^0; {z}^1]", "Class and distillation token speak for the picture."
        if c.pool == "attention":
            weights, out = (self.seen[f"pool.attention.{part}"] for part in ("weights", "out"))
            looks = "Where a learned query looks, a row for each head."
            self.add("pool.attention.weights", f"A = weights(probe, {z})", looks, weights[:, 0])  # (k, T)
            self.add("pool.attention.out", f"c = MSA(probe, {z})", "What the query finds.", out[0])  # (D)
        return self.add(name, f"{y} = {made}", meaning, pooled)


def moments(row: Tensor, norm: str) -> Tensor:
    """What a norm divides and moves by: (mean, variance) for LN, (mean square) for RMS."""
    if norm == "RMS":
        return row.square().mean()[None]
    mean = row.mean()
    return torch.stack([mean, (row - mean).square().mean()])


def _moments(z: str, norm: str) -> str:
    return f"ms = mean(({z})^2)" if norm == "RMS" else f"mu = mean({z}), var = mean(({z} - mu)^2)"


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and every part back in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_number(name: str, number: int, count: int) -> None:
    if not isinstance(number, int) or number not in range(count):
        raise InputError(
            f"{name} must be a whole number from 0 to {count - 1}.",
            f"{name}={number!r}",
            f"This model has {count} {name}{'s' if count > 1 else ''}, counted from 0.",
        )


def _as_batch(image: Tensor, config: ViTConfig) -> Tensor:
    """One picture as a batch of one; the model itself checks the dtype."""
    shape = (config.channels, *config.pixels)
    if not isinstance(image, Tensor):
        raise InputError("A picture must be a torch tensor.", type(image).__name__, "Use torch.as_tensor.")
    if tuple(image.shape) in (shape, (1, *shape)):
        return image.reshape(1, *shape)
    many = image.ndim == 4 and tuple(image.shape[1:]) == shape
    last = image.ndim == 3 and tuple(image.shape) == (*shape[1:], shape[0])
    do = "Resize the picture to the model's size."
    do = "Pick one of the batch: images[0]." if many else do
    do = "Put the channels first: image.permute(2, 0, 1)." if last else do
    raise InputError(
        f"A walk takes one picture of the shape {shape} that the model was built for.",
        str(tuple(image.shape)),
        do,
    )
