"""Through a ViT: before its blocks from pixels, frames, samples or numbers to z_0 (Eq. 1), after
them from z_L to probabilities (Eq. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.model import ViT
from vitrail.model.modes import evaluating
from vitrail.model.position import AddedPosition
from vitrail.model.tokens import PatchTokens, SpectrogramTokens, StemTokens, TextTokens, cut
from vitrail.walkthrough.block import ACTIVATIONS, BlockSteps
from vitrail.walkthrough.stage import NORMS, WORDS, Stage, check_number, run


def walk_encoder(model: ViT, x: Tensor, block: int, head: int, token: int) -> list[Stage]:
    c = model.config
    check_number("block", block, c.depth)
    check_number("head", head, c.heads)
    check_number("token", token, c.tokens)
    batch = as_batch(x, c)
    names = ["tokens.*", "position", "norm_pre", "embed", "blocks.*.out", "encoded", "pooled", "logits"]
    names += [f"blocks.{block}.{part}" for part in ("*", "attention.*", "mlp.*")]
    names += ["pool.attention.weights", "pool.attention.out"] if c.pool == "attention" else []
    with evaluating(model):
        steps = EncoderSteps(model, run(model, names, batch), block, head, token)
        steps.embedding(batch)
        steps.blocks()
        steps.ending()
    return steps.stages


class EncoderSteps(BlockSteps):
    """The steps of a ViT."""

    model: ViT

    # ---- Eq. 1: from what came to z_0 -------------------------------------------------------

    def embedding(self, batch: Tensor) -> None:
        c, model = self.config, self.model
        e = self.rows(batch) if isinstance(model.tokens, TextTokens) else self.patches(batch)
        z = self.stages[-1].tensor  # (N, D)
        if model.prefix is not None:
            front = ["x_class"] * c.class_token + ["x_dist"] * c.distillation_token
            front += [f"x_reg^{number}" for number in range(1, c.registers + 1)]
            tokens = f"{c.prefix} learned token{'s' if c.prefix > 1 else ''}"
            meaning = f"{tokens} put before the {WORDS[c.input].pieces}."
            z = torch.cat([model.prefix, z])  # (T, D)
            e = self.add("prefix", f"u = [{'; '.join(front)}; {e}]", meaning, z)
        if isinstance(model.position, AddedPosition):
            e = self.add("position", f"s = {e} + E_pos", "Each token is told its place by a row added to it.")
        if c.norm_pre:
            e = self.norm("norm_pre", e, "The tokens")
        meaning = "What the first block is given; dropout changes nothing outside training."
        self.add("embed", f"z_0 = {e}", meaning)

    def rows(self, batch: Tensor) -> str:
        """From the numbers of a text to one vector for each token."""
        self.numbers(batch[0])
        e = self.add("tokens.proj", "e = E[x]", "For each token the row of E with its number.")
        if self.config.embedding_norm == "after":
            e = self.norm("tokens.norm_after", e, "The tokens")
        return e

    def patches(self, batch: Tensor) -> str:
        """From the picture, video or sound to one vector for each patch."""
        c, words, tokens = self.config, WORDS[self.config.input], self.model.tokens
        assert isinstance(tokens, PatchTokens)
        self.add(words.numbers, f"x in R^({spelled(batch.shape[1:])})", words.meaning, batch[0])
        x, maps = "x", batch
        if isinstance(tokens, StemTokens):
            maps = tokens.stem(batch)
            x = self.add("tokens.stem", "m = Stem(x)", "What the convolutions make of the picture.", maps[0])
        if isinstance(tokens, SpectrogramTokens):
            maps = tokens.spectrogram(batch)
            meaning = "How strong each frequency is at each time: low ones above, time to the right."
            x = self.add("tokens.spectrogram", "m = Spectrogram(x)", meaning, maps[0])
        order = "frame by frame, row by row" if c.input == "video" else "row by row"
        pieces = f"{spelled(c.grid)} {words.pieces} of {spelled(tokens.patch)}"
        meaning = f"{pieces}, {order}, each laid out as one vector."
        x = self.add("tokens.cut", f"x_p = cut({x})", meaning, cut(maps, tokens.patch)[0])
        if c.embedding_norm in ("before", "both"):
            x = self.norm("tokens.norm_before", x, f"The {words.pieces}")
        b = " + b" if c.embedding_bias else ""
        e = self.add("tokens.proj", f"e = {x} E{b}", f"One matrix makes a token of every {words.piece}.")
        if c.embedding == "mlp":
            e = self.add("tokens.fc", f"f = GELU({e}) W + b", "A second layer, after a GELU.")
        if c.embedding_norm in ("after", "both"):
            e = self.norm("tokens.norm_after", e, f"The tokens of the {words.pieces}")
        return e

    # ---- Eq. 4: from z_L to probabilities ---------------------------------------------------

    def ending(self) -> None:
        c, z = self.config, f"z_{self.config.depth}"
        if c.pool_norm == "before":
            z = self.norm("encoded", z, "The tokens of the last block")
        if c.pool_norm == "after" and c.norm != "none":
            self.pool("pool", "p", z, self.model.pool(self.seen["encoded"][None])[0])
            meaning = f"The vector of the {WORDS[c.input].whole}, brought to one scale."
            self.add("pooled", f"y = {NORMS[c.norm]}(p)", meaning)
        else:
            self.pool("pooled", "y", z, self.seen["pooled"])
        if c.classes == 0:
            return
        act = "tanh" if c.head == "tanh" else ACTIVATIONS[c.activation]
        two = f"{act}(y W_1 + b_1) W_2 + b_2"
        pair = "(y_class W_c + b_c + y_dist W_d + b_d) / 2"
        logits = {"linear": f"y W{' + b' * c.head_bias}", "mlp": two, "tanh": two, "distilled": pair}[c.head]
        self.add("logits", f"o = {logits}", "One number for each class: the higher, the likelier.")
        shares = self.seen["logits"].softmax(dim=-1)
        self.add("probabilities", "P = softmax(o)", "The same as shares of 1.", shares)

    def pool(self, name: str, y: str, z: str, pooled: Tensor) -> str:
        """One vector for the whole input, called y, or p where a norm follows."""
        c, last, words = self.config, self.config.tokens - 1, WORDS[self.config.input]
        found = f"{NORMS[c.norm]}(c)" if c.norm != "none" else "c"
        pieces, mean = f"[{z}^{c.prefix}; ...; {z}^{last}]", f"mean({z}^{c.prefix}, ..., {z}^{last})"
        ways = {
            "class": (f"{z}^0", f"The class token speaks for the whole {words.whole}."),
            "mean": (mean, f"The mean of the {words.pieces}."),
            "mean-all": (f"mean({z}^0, ..., {z}^{last})", "The mean of all tokens."),
            "class-mean": (
                f"[{z}^0; {mean}]",
                f"The class token, and the mean of the {words.pieces} after it.",
            ),
            "flatten": (pieces, f"All {words.pieces} in one long row."),
            "attention": (f"MLP({found}) + c", "And what a block's MLP makes of that."),
        }
        made, meaning = ways[c.pool]
        if c.head == "distilled":
            made = f"[{z}^0; {z}^1]"
            meaning = f"Class and distillation token speak for the {words.whole}."
        if c.pool == "attention":
            weights, out = (self.seen[f"pool.attention.{part}"] for part in ("weights", "out"))
            looks = "Where a learned query looks, a row for each head."
            told = pieces if c.prefix else z
            self.add("pool.attention.weights", f"A = weights(probe, {told})", looks, weights[:, 0])  # (k, N)
            self.add("pool.attention.out", f"c = MSA(probe, {told})", "What the query finds.", out[0])  # (D)
        return self.add(name, f"{y} = {made}", meaning, pooled)


# ---- what came ------------------------------------------------------------------------------


def spelled(sides: tuple[int, ...]) -> str:
    return " x ".join(map(str, sides))


def as_batch(x: Tensor, config: ViTConfig) -> Tensor:
    """One input as a batch of one; the model itself checks the dtype."""
    shape, whole = config.input_shape, WORDS[config.input].whole
    if not isinstance(x, Tensor):
        must = f"A {whole} must be a torch tensor."
        raise InputError(must, type(x).__name__, "Use torch.as_tensor.")
    if tuple(x.shape) in (shape, (1, *shape)):
        return x.reshape(1, *shape)
    raise InputError(
        f"A walk takes one {whole} of the shape {shape} that the model was built for.",
        str(tuple(x.shape)),
        shape_advice(tuple(x.shape), config),
    )


def shape_advice(given: tuple[int, ...], config: ViTConfig) -> str:
    """What to do about a wrong shape, for the slips that are common."""
    shape, kind = config.input_shape, config.input
    if given[1:] == shape:
        many = {"picture": "images", "video": "videos", "audio": "sounds", "text": "tokens"}
        return f"Pick one of the batch: {many[kind]}[0]."
    if kind == "picture" and given == (*shape[1:], shape[0]):
        return "Put the channels first: image.permute(2, 0, 1)."
    if kind == "video" and given == (shape[1], shape[0], *shape[2:]):
        return "Put the channels first: video.transpose(0, 1)."
    return {
        "picture": "Resize the picture to the model's size.",
        "video": "Take as many frames as the model was built for, and resize them.",
        "audio": "Cut or pad the sound to that many samples, with one channel.",
        "text": "Cut or pad the tokens to that length.",
    }[kind]
