"""The walk through a decoder: from token indices to the probabilities of the next token.

Self-attention has a causal mask. With an encoder there is cross-attention to its tokens.
"""

from __future__ import annotations

from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model.attention import attention_scale
from vitrail.model.check_input import check_token_ids
from vitrail.model.device import eval_mode
from vitrail.views.walk.block_stages import BlockWalk
from vitrail.views.walk.stage import Stage, check_index, record_activations, token_name
from vitrail_course.decoder import Decoder


def walk_decoder(
    model: Decoder, tokens: Tensor, context: Tensor | None, block: int, head: int, token: int | None
) -> list[Stage]:
    c = model.config
    check_index("block", block, c.depth)
    check_index("head", head, c.heads)
    batch = _as_batch(tokens)
    check_token_ids(batch, c.vocabulary)
    T = batch.shape[1]
    token = T - 1 if token is None else token
    check_index("token", token, T, "this sequence")
    if isinstance(context, Tensor) and context.ndim == 2:
        context = context[None]  # the model checks the rest
    names = ["tokens", "position", "embed", "bridge", "blocks.*.out", "encoded", "logits"]
    parts = ["*", "attention.*", "mlp.*", *(["cross.*"] if c.context_width else [])]
    names += [f"blocks.{block}.{part}" for part in parts]
    with eval_mode(model):
        walk = DecoderWalk(model, record_activations(model, names, batch, context), block, head, token)
        walk.add_embedding(batch[0])
        if context is not None:
            walk.add_context(context[0])
        walk.add_blocks()
        walk.add_prediction()
    return walk.stages


class DecoderWalk(BlockWalk):
    """The stages of a decoder."""

    model: Decoder
    context = ""  # the name of the encoder's tokens in equations, once there are any
    attended = "itself and each earlier token"

    def add_embedding(self, indices: Tensor) -> None:
        self.add_token_indices(indices)
        e = self.add("tokens", "e = E[x]", "The embedding of each token: the row of E with its index.")
        last = len(indices) - 1
        rows = f"0 ... {last}" if last else "0"
        meaning = f"Position embeddings: the first {last + 1} rows of E_pos are added."
        e = self.add("position", f"s = {e} + E_pos[{rows}]", meaning)
        self.add("embed", f"z_0 = {e}", "The input of the first block. Dropout is off in evaluation mode.")

    def add_context(self, context: Tensor) -> None:
        """The encoder's tokens, and a linear layer if their width differs."""
        S, width = context.shape
        meaning = "The output of the encoder: a row for each token."
        self.add("context", f"c in R^({S} x {width})", meaning, context)
        self.context = "c"
        if width != self.config.width:
            meaning = "A linear layer to the width of the decoder, shared by all blocks."
            self.context = self.add("bridge", "c' = c W + b", meaning)

    # ---- where a decoder's block differs ----------------------------------------------------

    def extra_inputs(self) -> str:
        return f", {self.context}" if self.context else ""

    def add_scores(self, at: str) -> str:
        """Self-attention has a causal mask; cross-attention has none."""
        if at.endswith(".cross"):
            return super().add_scores(at)
        q, k, masked = (self.activations[f"{at}.{part}"][self.head] for part in ("q", "k", "scores"))
        products, meaning = attention_scale(self.config) * q @ k.T, "How well each query matches each key."
        s = self.add(f"{at}.products", f"S = {self.product_equation()}", meaning, products)
        meaning = "Causal mask: the scores of later tokens become -inf, and their weights 0."
        return self.add(f"{at}.scores", f"M = mask({s})", meaning, masked)

    def add_cross_attention(self, z: str, x: Tensor) -> str:
        """Queries of the decoder's tokens, keys and values of the encoder's."""
        if not self.context:
            return z
        at = f"blocks.{self.block}"
        normed = self.add_norm(f"{at}.norm_cross", z, "All tokens")
        self.add_projection(f"{at}.cross", "q", normed, "each token")
        for letter in "kv":
            self.add_projection(f"{at}.cross", letter, self.context, "each token of the encoder")
        scores = self.add_scores(f"{at}.cross")
        out = self.add_heads(f"{at}.cross", scores, "CA", "each token of the encoder")
        total = x + self.activations[f"{at}.cross.out"]
        meaning = "Residual connection: the cross-attention output is added to its input."
        return self.add(f"{at}.residual_cross", f"z''_{self.block + 1} = {out} + {z}", meaning, total)

    # ---- from z_L to the next token ---------------------------------------------------------

    def add_prediction(self) -> None:
        z = self.add_norm("encoded", f"z_{self.config.depth}", "The tokens of the last block")
        tied = self.model.config.tied
        meaning = "For each position, the logit of every possible next token"
        meaning += ": the product with its row of E." if tied else "."
        self.add("logits", f"o = {z} E^T" if tied else f"o = {z} W + b", meaning)
        probabilities = self.activations["logits"].softmax(dim=-1)  # (T, V)
        meaning = "Softmax turns the logits into probabilities."
        self.add("probabilities", "P = softmax(o)", meaning, probabilities)
        who = f"{token_name(self.config, self.token)} (t = {self.token})"
        self.add("next", "p = P^t", f"The probabilities of the token after {who}.", probabilities[self.token])


def _as_batch(tokens: Tensor) -> Tensor:
    """One sequence as a batch of one; the model checks its values."""
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens must be a torch tensor, not a {type(tokens).__name__}; use torch.tensor.")
    if tokens.ndim == 1 or (tokens.ndim == 2 and len(tokens) == 1):
        return tokens.reshape(1, -1)
    hint = "select one of the batch: tokens[0]" if tokens.ndim == 2 else "put the indices in one row"
    raise InputError(
        f"walk takes one sequence of token indices, of shape (T,) or (1, T), not {tuple(tokens.shape)}; "
        f"{hint}."
    )
