"""The transformer blocks, Eq. 2 and 3: one of them in detail, the same for encoder and decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.model.config import POSITIONS
from vitrail.model.position import RotaryPosition
from vitrail.views.walk.stage import NORM_NAMES, Walk, token_name

ACTIVATION_NAMES = {
    "gelu": "GELU",
    "gelu-tanh": "GELU_tanh",
    "quick-gelu": "QuickGELU",
    "relu": "ReLU",
    "silu": "SiLU",
}
_PROJECTIONS = {"q": "query", "k": "key", "v": "value"}


class BlockWalk(Walk):
    """The stages of the blocks. A decoder overrides the methods where it differs."""

    attended = "every token"  # what the attention weights are distributed over

    def add_blocks(self) -> None:
        for index in range(self.config.depth):
            self._add_detailed_block() if index == self.block else self._add_other_block(index)

    def _add_other_block(self, index: int) -> None:
        again = index > 0 and self.config.position_at == "every"
        before = f"z_{index} + E_pos" if again else f"z_{index}"
        meaning = f"Block {index}: attention and MLP, as in the block shown in detail."
        equation = f"z_{index + 1} = Block_{index}({before}{self.extra_inputs()})"
        self.add(f"blocks.{index}.out", equation, meaning)

    def extra_inputs(self) -> str:
        """Inputs of a block besides its tokens, as they appear in its equation."""
        return ""

    def _add_detailed_block(self) -> None:
        """The selected block; the config says where its norms and residual connections are."""
        at, number = f"blocks.{self.block}", self.block + 1
        z = f"z_{self.block}"
        x = self.activations[f"blocks.{self.block - 1}.out" if self.block else "embed"]
        if self.block and self.config.position_at == "every":
            x = self.model.position.before_block(x, self.config.grid)
            z = self.add(f"{at}.position", f"w = {z} + E_pos", "The position embeddings are added again.", x)
        attention_branch, mlp_branch = self.activations[f"{at}.scale1"], self.activations[f"{at}.scale2"]
        residual = "Residual connection: the {} output is added to its input."
        first, second = residual.format("attention"), residual.format("MLP")
        middle, end = f"z'_{number}", f"z_{number}"
        match self.config.block:
            case "pre-norm":
                a = self._add_attention(self._add_norm1(z, x))
                a = self.add(f"{at}.residual1", f"{middle} = {a} + {z}", first, x + attention_branch)
                a = self.add_cross_attention(a, x + attention_branch)
                end += f" = {self._add_mlp(self._add_norm2(a))} + {a}"
            case "post-norm":
                a, x = self._add_attention(z), x + attention_branch
                a = self._add_norm1(self.add(f"{at}.residual1", f"{middle} = {a} + {z}", first, x), x)
                x = x if self.config.norm == "none" else self.activations[f"{at}.norm1"]
                r = f"r = {self._add_mlp(a)} + {a}"
                r = self.add(f"{at}.residual2", r, second, x + mlp_branch)
                end += f" = {self._add_norm2(r)}"
            case "res-post-norm":
                a = self._add_norm1(self._add_attention(z), attention_branch)
                if self.config.norm != "none":
                    attention_branch = self.activations[f"{at}.norm1"]
                a = self.add(f"{at}.residual1", f"{middle} = {a} + {z}", first, x + attention_branch)
                end += f" = {self._add_norm2(self._add_mlp(a))} + {a}"
            case "parallel":
                a = self._add_attention(self._add_norm1(z, x))
                end += f" = {a} + {self._add_mlp(self._add_norm2(z))} + {z}"
            case "no-residual":
                a = self._add_attention(self._add_norm1(z, x))
                end += f" = {self._add_mlp(self._add_norm2(a))}"
        self.add(f"{at}.out", end, f"The output of block {self.block}.")

    def add_cross_attention(self, z: str, x: Tensor) -> str:
        """Cross-attention, between attention and MLP; an encoder has none."""
        return z

    # ---- norms ------------------------------------------------------------------------------

    def _add_norm1(self, z: str, x: Tensor) -> str:
        """The first norm, with the statistics of the selected token before and after it."""
        name, norm, t = f"blocks.{self.block}.norm1", NORM_NAMES[self.config.norm], self.token
        if not norm:
            return z
        who, row = token_name(self.config, t), x[t]
        before, after = _statistics_equation(f"{z}^t", norm), _statistics_equation(f"{norm}({z})^t", norm)
        words = "Mean and variance" if norm == "LN" else "Mean square"
        values = _statistics(row, norm)
        self.add(f"{name}.before", before, f"{words} of {who} (t = {t}) before the norm.", values)
        centered, variance = (row - values[0], values[1]) if norm == "LN" else (row, values[0])
        right = f"({z}^t - mu) / sqrt(var + eps)" if norm == "LN" else f"{z}^t / sqrt(ms + eps)"
        standard = centered / (variance + self.config.eps).sqrt()
        goal = "mean 0 and variance 1" if norm == "LN" else "mean square 1"
        self.add(f"{name}.standard", f"n = {right}", f"{who.capitalize()}, scaled to {goal}.", standard)
        z = self.add_norm(name, z, "All tokens")
        learned = "scale and shift" if norm == "LN" else "scale"
        meaning = f"{words} of {who} after the norm and its learned {learned}."
        self.add(f"{name}.after", after, meaning, _statistics(self.activations[name][t], norm))
        return z

    def _add_norm2(self, z: str) -> str:
        return self.add_norm(f"blocks.{self.block}.norm2", z, "All tokens")

    # ---- attention --------------------------------------------------------------------------

    def _add_attention(self, z: str) -> str:
        """Appendix A of the paper: one head, then all heads."""
        at = f"blocks.{self.block}.attention"
        b = "" if self.config.qkv_bias == "none" else " + b_qkv"
        meaning = "One matrix product computes the queries, keys and values of all heads."
        self.add(f"{at}.qkv", f"[q, k, v] = {z} U_qkv{b}", meaning)
        for letter in "qkv":
            self.add_projection(at, letter, z, "each token")
        a = self.add_heads(at, self.add_scores(at), "SA", self.attended)
        return self._add_layer_scale("scale1", f"a = {a} lambda")

    def add_projection(self, at: str, letter: str, z: str, whose: str) -> None:
        """q, k or v of the head: columns of the fused product, then a norm or rotation of q and k."""
        c = self.config
        first = ("qkv".index(letter) * c.heads + self.head) * c.d
        bias = c.qkv_bias == "all" or (c.qkv_bias == "no-k" and letter != "k")
        right = f"{z} U_{letter}{f' + b_{letter}' * bias}"
        meaning = f"The {_PROJECTIONS[letter]} of {whose}: columns {first} to {first + c.d - 1}"
        if letter != "v" and c.qk_norm and c.norm != "none":
            right, meaning = f"{NORM_NAMES[c.norm]}({right})", f"{meaning}, normalized"
        if letter != "v" and POSITIONS[c.position].kind == "rotary":
            right, meaning = f"R({right})", f"{meaning}, {RotaryPosition.meaning}"
        name = f"{at}.{letter}"
        self.add(name, f"{letter} = {right}", f"{meaning}.", self.activations[name][self.head])

    def add_scores(self, at: str) -> str:
        """The scores of all pairs of tokens, with the position bias if there is one."""
        biased = f"{at}.bias" in self.activations
        if biased:
            table = self.activations[f"{at}.bias"][self.head].clone()  # it may be the parameter itself
            position = self.model.position
            self.add(f"{at}.bias", position.equation, position.meaning, table)
        equation, scores = f"S = {self.product_equation()}{' + p' * biased}", self.activations[f"{at}.scores"]
        return self.add(f"{at}.scores", equation, "How well each query matches each key.", scores[self.head])

    def product_equation(self) -> str:
        products = {"head": "q k^T / sqrt(d)", "width": "q k^T / sqrt(D)", "none": "q k^T"}
        scale = self.config.scale
        return products[scale] if isinstance(scale, str) else f"{scale} q k^T"

    def add_heads(self, at: str, scores: str, name: str, attended: str) -> str:
        """From the scores of one head to the output of all heads: SA and MSA, or CA and MCA."""
        c, weights, heads = self.config, self.activations[f"{at}.weights"], self.activations[f"{at}.heads"]
        who = f"{token_name(c, self.token)} (t = {self.token})"
        meaning = f"Attention weights: how much each token attends to {attended}. Rows sum to 1."
        self.add(f"{at}.weights", f"A = softmax({scores})", meaning, weights[self.head])
        row = weights[self.head, self.token]  # (T)
        self.add(f"{at}.row", "a = A^t", f"The attention weights of {who}.", row)
        mean = "For each token, the weighted mean of the values."
        self.add(f"{at}.head", f"{name}_{self.head} = A v", mean, heads[self.head])
        parts = [f"{name}_{number}" for number in range(c.heads)]
        parts = parts if c.heads < 4 else [parts[0], "...", parts[-1]]
        joined = heads.transpose(0, 1).flatten(1)  # (T, k d)
        self.add(
            f"{at}.heads", f"H = [{'; '.join(parts)}]", "The outputs of all heads, concatenated.", joined
        )
        out, mixed = f"M{name}", "A linear layer mixes the heads and returns to width D."
        normed = self._normed("H", c.attention_norm)
        bias = f" + b_{out.lower()}" * c.linear_bias
        return self.add(f"{at}.out", f"{out} = {normed} U_{out.lower()}{bias}", mixed)

    def _normed(self, z: str, has_norm: bool) -> str:
        norm = NORM_NAMES[self.config.norm]
        return f"{norm}({z})" if has_norm and norm else z

    # ---- the MLP ----------------------------------------------------------------------------

    def _add_mlp(self, z: str) -> str:
        c, at = self.config, f"blocks.{self.block}.mlp"
        activation = ACTIVATION_NAMES[c.activation]
        if c.mlp == "gated":
            a, b = (f"{z} W_{letter}{f' + b_{letter}' * c.linear_bias}" for letter in "ab")
            right = f"{activation}({a}) * ({b})"
            meaning = "Applied to each token separately; one half gates the other."
        else:
            right, meaning = z, "Applied to each token separately, at a larger width."
            for layer in range(1, c.mlp_hidden + 1):
                right = f"{activation}({right} W_{layer}{f' + b_{layer}' * c.linear_bias})"
        self.add(f"{at}.hidden", f"h = {right}", meaning)
        last = c.mlp_hidden + 1
        right = f"{self._normed('h', c.mlp_norm)} W_{last}{f' + b_{last}' * c.linear_bias}"
        m = self.add(f"{at}.out", f"MLP = {right}", "Back to width D.")
        return self._add_layer_scale("scale2", f"m = {m} lambda")

    def _add_layer_scale(self, name: str, equation: str) -> str:
        """LayerScale, if the config has it."""
        if self.config.layer_scale is None:
            return equation.split()[2]
        meaning = "LayerScale: a learned factor for each channel."
        return self.add(f"blocks.{self.block}.{name}", equation, meaning)


def _statistics(row: Tensor, norm: str) -> Tensor:
    """The statistics that a norm uses: (mean, variance) for LN, (mean square) for RMS."""
    if norm == "RMS":
        return row.square().mean()[None]
    mean = row.mean()
    return torch.stack([mean, (row - mean).square().mean()])


def _statistics_equation(z: str, norm: str) -> str:
    return f"ms = mean(({z})^2)" if norm == "RMS" else f"mu = mean({z}), var = mean(({z} - mu)^2)"
