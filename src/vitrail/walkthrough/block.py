"""The blocks, Eq. 2 and 3: one of them in detail, the same for encoder and decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.walkthrough.stage import NORMS, Steps, token_name

ACTIVATIONS = {
    "gelu": "GELU",
    "gelu-tanh": "GELU_tanh",
    "quick-gelu": "QuickGELU",
    "relu": "ReLU",
    "silu": "SiLU",
}
ROLES = {"q": "asks for", "k": "answers to", "v": "has to tell"}


class BlockSteps(Steps):
    """What a block does; a decoder's own steps are in the methods that it overrides."""

    whom = "at whom"

    def blocks(self) -> None:
        for index in range(self.config.depth):
            self.detail() if index == self.block else self.other(index)

    def other(self, index: int) -> None:
        again = index > 0 and self.config.position_at == "every"
        before = f"z_{index} + E_pos" if again else f"z_{index}"
        meaning = f"Block {index}: attention and MLP, as in the block shown in detail."
        equation = f"z_{index + 1} = Block_{index + 1}({before}{self.beside()})"
        self.add(f"blocks.{index}.out", equation, meaning)

    def beside(self) -> str:
        """What a block is given besides its tokens."""
        return ""

    def detail(self) -> None:
        """The chosen block; its kind says where norms and sums stand."""
        at, number = f"blocks.{self.block}", self.block + 1
        z, x = f"z_{self.block}", self.seen[f"blocks.{self.block - 1}.out" if self.block else "embed"]
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
                a = self.between(a, x + attended)
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

    def between(self, z: str, x: Tensor) -> str:
        """What comes between attention and MLP: nothing, but for cross-attention."""
        return z

    # ---- the norms --------------------------------------------------------------------------

    def norm1(self, z: str, x: Tensor) -> str:
        """The first norm, with the numbers of the chosen token before and after worked out by hand."""
        name, norm, t = f"blocks.{self.block}.norm1", NORMS[self.config.norm], self.token
        if not norm:
            return z
        who, row = token_name(self.config, t), x[t]
        before, after = moments_equation(f"{z}^t", norm), moments_equation(f"{norm}({z})^t", norm)
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

    # ---- attention --------------------------------------------------------------------------

    def attention(self, z: str) -> str:
        """Appendix A of the paper for one head, then all heads together."""
        at = f"blocks.{self.block}.attention"
        b = "" if self.config.qkv_bias == "none" else " + b_qkv"
        fused = "One product makes queries, keys and values of all heads."
        self.add(f"{at}.qkv", f"[q, k, v] = {z} U_qkv{b}", fused)
        for letter in "qkv":
            self.project(at, letter, z, "each token")
        a = self.heads(at, self.scores(at), "SA", self.whom)
        return self.scaled("scale1", f"a = {a} lambda")

    def project(self, at: str, letter: str, z: str, whose: str) -> None:
        """q, k or v of the head: columns of the fused product, then what happens to q and k alone."""
        c = self.config
        first = ("qkv".index(letter) * c.heads + self.head) * c.d
        bias = c.qkv_bias == "all" or (c.qkv_bias == "no-k" and letter != "k")
        made = f"{z} U_{letter}{f' + b_{letter}' * bias}"
        meaning = f"What {whose} {ROLES[letter]}: columns {first} to {first + c.d - 1}"
        if letter != "v" and c.qk_norm and c.norm != "none":
            made, meaning = f"{NORMS[c.norm]}({made})", f"{meaning}, normed"
        if letter != "v" and "rotary" in c.position:
            made, meaning = f"R({made})", f"{meaning}, turned by place"
        name = f"{at}.{letter}"
        self.add(name, f"{letter} = {made}", f"{meaning}.", self.seen[name][self.head])

    def scores(self, at: str) -> str:
        """How well queries and keys fit, and what a bias adds to that."""
        c, biased = self.config, f"{at}.bias" in self.seen
        if biased:
            kind = "pair of tokens" if c.position == "pairwise" else "distance between tokens"
            table = self.seen[f"{at}.bias"][self.head].clone()  # a copy: it may be the parameter itself
            self.add(f"{at}.bias", "p = P_head", f"A learned number for each {kind}.", table)
        equation, scores = f"S = {self.products()}{' + p' * biased}", self.seen[f"{at}.scores"]
        return self.add(f"{at}.scores", equation, "How well each query fits each key.", scores[self.head])

    def products(self) -> str:
        ways = {"head": "q k^T / sqrt(d)", "width": "q k^T / sqrt(D)", "none": "q k^T"}
        scale = self.config.scale
        return ways[scale] if isinstance(scale, str) else f"{scale} q k^T"

    def heads(self, at: str, scores: str, name: str, whom: str) -> str:
        """From scores to what the head finds, and all heads together: SA and MSA, or CA and MCA."""
        c, weights, found = self.config, self.seen[f"{at}.weights"], self.seen[f"{at}.heads"]
        who = f"{token_name(c, self.token)} (t = {self.token})"
        self.add(
            f"{at}.weights", f"A = softmax({scores})", f"Who looks {whom}: rows sum to 1.", weights[self.head]
        )
        self.add(f"{at}.row", "a = A^t", f"Where {who} looks.", weights[self.head, self.token])  # (T)
        mean = "For each token the mean of what it looks at."
        self.add(f"{at}.head", f"{name}_{self.head + 1} = A v", mean, found[self.head])
        parts = [f"{name}_{number}" for number in range(1, c.heads + 1)]
        parts = parts if c.heads < 4 else [parts[0], "...", parts[-1]]
        joined = found.transpose(0, 1).flatten(1)  # (T, k d)
        self.add(f"{at}.heads", f"H = [{'; '.join(parts)}]", "All heads side by side.", joined)
        all_, mixed = f"M{name}", "A matrix mixes the heads, back to width D."
        return self.add(f"{at}.out", f"{all_} = H U_{all_.lower()} + b_{all_.lower()}", mixed)

    # ---- the MLP ----------------------------------------------------------------------------

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


def moments(row: Tensor, norm: str) -> Tensor:
    """What a norm divides and moves by: (mean, variance) for LN, (mean square) for RMS."""
    if norm == "RMS":
        return row.square().mean()[None]
    mean = row.mean()
    return torch.stack([mean, (row - mean).square().mean()])


def moments_equation(z: str, norm: str) -> str:
    return f"ms = mean(({z})^2)" if norm == "RMS" else f"mu = mean({z}), var = mean(({z} - mu)^2)"
