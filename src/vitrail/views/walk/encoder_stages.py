"""The walk through a ViT: from the input to z_0 (Eq. 1), and from z_L to probabilities (Eq. 4)."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.device import eval_mode
from vitrail.model.position import AddedPosition
from vitrail.model.tokens import PatchTokens, StemTokens, patchify
from vitrail.views.walk.block_stages import ACTIVATION_NAMES, BlockWalk
from vitrail.views.walk.stage import NORM_NAMES, Stage, check_index, record_activations
from vitrail.weights.bundle.scores import Activation


class Recording:
    """One forward pass with the activations of some blocks, to show any head and token of them.

    Args:
        activation: how logits become probabilities.
        preprocess: that of the input, to show its pixels; without it, they are taken to be from -1 to 1.
    """

    def __init__(
        self,
        model: ViT,
        x: Tensor,
        blocks: Iterable[int],
        activation: Activation = "softmax",
        preprocess: Preprocess | None = None,
    ) -> None:
        self.activation, self.preprocess = activation, preprocess
        batch, device = _as_batch(x, model.config), next(model.parameters()).device
        names = ["tokens.*", "position", "norm_pre", "embed", "blocks.*.out", "encoded", "pooled", "logits"]
        names += [f"blocks.{block}.{part}" for block in blocks for part in ("*", "attention.*", "mlp.*")]
        names += [f"pool.attention.{part}" for part in ("weights", "out") if model.config.pool == "attention"]
        with eval_mode(model):
            recorded = record_activations(model, names, batch.to(device))
        # The stages are computed from these, and shown, on the CPU.
        self.activations = {name: tensor.cpu() for name, tensor in recorded.items()}
        self.model = model if device.type == "cpu" else copy.deepcopy(model).cpu()
        self.batch = batch.cpu()

    def stages(self, block: int, head: int, token: int) -> list[Stage]:
        """The stages of the whole model, with one of the recorded blocks in detail."""
        c = self.model.config
        check_index("head", head, c.heads)
        check_index("token", token, c.tokens)
        with eval_mode(self.model):
            walk = EncoderWalk(self.model, self.activations, block, head, token)
            walk.add_embedding(self.batch)
            walk.add_blocks()
            walk.add_prediction(self.activation)
        return walk.stages


class EncoderWalk(BlockWalk):
    """The stages of a ViT."""

    model: ViT

    # ---- Eq. 1: from the input to z_0 -------------------------------------------------------

    def add_embedding(self, batch: Tensor) -> None:
        c, model = self.config, self.model
        e = self._add_patch_tokens(batch)
        z = self.stages[-1].tensor  # (N, D)
        if model.prefix is not None:
            prefix = ["x_class"] * c.class_token + ["x_dist"] * c.distillation_token
            prefix += [f"x_reg^{number}" for number in range(c.registers)]
            count = f"{c.prefix} learned token{'s are' if c.prefix > 1 else ' is'}"
            names, shape = "; ".join(prefix), _join_sides(model.prefix.shape)
            alone = names if len(prefix) == 1 else f"[{names}]"
            meaning = "Learned, and the same for every image."
            self.add("x_class", f"{alone} in R^({shape})", meaning, model.prefix.clone())
            z = torch.cat([model.prefix, z])  # (T, D)
            e = self.add("prefix", f"u = [{names}; {e}]", f"{count} prepended to the patches.", z)
        if isinstance(model.position, AddedPosition):
            position, rows = model.position, model.position.all_rows(c.grid).clone()
            meaning = "A row for each token, the same for every image."
            self.add("E_pos", f"E_pos in R^({_join_sides(rows.shape)})", meaning, rows)
            e = self.add("position", position.equation.format(e=e), position.meaning)
        if c.norm_pre:
            e = self.add_norm("norm_pre", e, "The tokens")
        self.add("embed", f"z_0 = {e}", "The input of the first block. Dropout is off in evaluation mode.")

    def _add_patch_tokens(self, batch: Tensor) -> str:
        """From an image to a vector for each patch."""
        c, tokens = self.config, self.model.tokens
        assert isinstance(tokens, PatchTokens)
        meaning = "The image: one value for each channel and pixel."
        self.add("pixels", f"x in R^({_join_sides(batch.shape[1:])})", meaning, batch[0])
        x, maps = "x", batch
        if isinstance(tokens, StemTokens):
            maps = tokens.stem(batch)
            x = self.add("tokens.stem", "m = Stem(x)", "The feature maps of the convolutional stem.", maps[0])
        patches = f"{_join_sides(c.grid)} patches of {_join_sides(tokens.patch)}"
        meaning = f"{patches}, row by row, each flattened to a vector."
        x = self.add("tokens.cut", f"x_p = cut({x})", meaning, patchify(maps, tokens.patch)[0])
        if c.embedding_norm in ("before", "both"):
            x = self.add_norm("tokens.norm_before", x, "The patches")
        b = " + b" if c.embedding_bias else ""
        e = self.add("tokens.proj", f"e = {x} E{b}", "A linear projection turns each patch into a token.")
        if c.embedding == "mlp":
            e = self.add("tokens.fc", f"f = GELU({e}) W + b", "A second linear layer, after a GELU.")
        if c.embedding_norm in ("after", "both"):
            e = self.add_norm("tokens.norm_after", e, "The tokens of the patches")
        return e

    # ---- Eq. 4: from z_L to probabilities ---------------------------------------------------

    def add_prediction(self, activation: Activation) -> None:
        c, z = self.config, f"z_{self.config.depth}"
        if c.pool_norm == "before":
            z = self.add_norm("encoded", z, "The tokens of the last block")
        if c.pool_norm == "after" and c.norm != "none":
            self._add_pool("pool", "p", z, self.model.pool(self.activations["encoded"][None])[0])
            self.add("pooled", f"y = {NORM_NAMES[c.norm]}(p)", "The vector of the image, normalized.")
        else:
            self._add_pool("pooled", "y", z, self.activations["pooled"])
        if c.classes == 0:
            return
        hidden = "tanh" if c.head == "tanh" else ACTIVATION_NAMES[c.activation]
        two = f"{hidden}(y W_1 + b_1) W_2 + b_2"
        pair = "(y_class W_c + b_c + y_dist W_d + b_d) / 2"
        unit = f"u / |u| W_2{' + b_2' * c.head_bias} with u = y{' W_1' if c.head_hidden else ''}"
        one = f"y W{' + b' * c.head_bias}"
        logits = {"linear": one, "mlp": two, "tanh": two, "distilled": pair, "cosine": unit}[c.head]
        self.add("logits", f"o = {logits}", "The logit of each class: the higher, the more likely.")
        logit = self.activations["logits"]
        if activation == "softmax":
            probabilities, meaning = logit.softmax(dim=-1), "Softmax turns the logits into probabilities."
        else:
            probabilities = logit.sigmoid()
            meaning = "Sigmoid turns each logit into a probability of its own; they need not sum to 1."
        self.add("probabilities", f"P = {activation}(o)", meaning, probabilities)

    def _add_pool(self, name: str, y: str, z: str, pooled: Tensor) -> str:
        """One vector for the whole input: y, or p if a norm follows."""
        c, last = self.config, self.config.tokens - 1
        normed = f"{NORM_NAMES[c.norm]}(c)" if c.norm != "none" else "c"
        patches, mean = f"[{z}^{c.prefix}; ...; {z}^{last}]", f"mean({z}^{c.prefix}, ..., {z}^{last})"
        pools = {
            "class": (f"{z}^0", "The class token represents the whole image."),
            "mean": (mean, "The mean of the patches."),
            "mean-all": (f"mean({z}^0, ..., {z}^{last})", "The mean of all tokens."),
            "class-mean": (f"[{z}^0; {mean}]", "The class token and the mean of the patches, concatenated."),
            "flatten": (patches, "All patches, concatenated."),
            "attention": (f"MLP({normed}) + c", "An MLP with a residual connection, as in a block."),
        }
        right, meaning = pools[c.pool]
        if c.head == "distilled":
            right, meaning = f"[{z}^0; {z}^1]", "The class and distillation tokens represent the image."
        if c.pool == "attention":
            weights, out = (self.activations[f"pool.attention.{part}"] for part in ("weights", "out"))
            meaning_weights = "The attention weights of a learned query, a row for each head."
            attended = patches if c.prefix and c.pool_tokens == "patches" else z
            equation = f"A = weights(probe, {attended})"
            self.add("pool.attention.weights", equation, meaning_weights, weights[:, 0])  # (k, N)
            equation = f"c = MSA(probe, {attended})"
            self.add("pool.attention.out", equation, "The attention output of that query.", out[0])  # (D)
        return self.add(name, f"{y} = {right}", meaning, pooled)


# ---- the input ------------------------------------------------------------------------------


def _join_sides(sides: tuple[int, ...]) -> str:
    return " x ".join(map(str, sides))


def _as_batch(x: Tensor, config: ViTConfig) -> Tensor:
    """One image as a batch of one."""
    shape = config.input_shape
    if not isinstance(x, Tensor):
        raise InputError(f"The image must be a torch tensor, not a {type(x).__name__}; use torch.as_tensor.")
    given = tuple(x.shape)
    if given in (shape, (1, *shape)):
        return x.reshape(1, *shape)
    hint = "resize the image"
    if given[1:] == shape:
        hint = "select one of the batch: images[0]"
    elif given == (*shape[1:], shape[0]):
        hint = "put the channels first: image.permute(2, 0, 1)"
    raise InputError(f"walk takes one image of the model's shape {shape}, not {given}; {hint}.")
