"""Through a decoder (note 003): token numbers to what comes next, with a mask over what is to come
and, where there is an encoder, a look at its tokens."""

from __future__ import annotations

from torch import Tensor

from vitrail.errors import InputError
from vitrail.model import Decoder
from vitrail.model.attention import scale_of
from vitrail.model.inputs import check_numbers
from vitrail.model.modes import evaluating
from vitrail.walkthrough.block import BlockSteps
from vitrail.walkthrough.stage import Stage, check_number, run, token_name


def walk_decoder(
    model: Decoder, tokens: Tensor, context: Tensor | None, block: int, head: int, token: int | None
) -> list[Stage]:
    c = model.config
    check_number("block", block, c.depth)
    check_number("head", head, c.heads)
    batch = as_batch(tokens)
    check_numbers(batch, c.vocabulary)
    T = batch.shape[1]
    token = T - 1 if token is None else token
    check_number("token", token, T, "This sequence")
    if isinstance(context, Tensor) and context.ndim == 2:
        context = context[None]  # whatever else is wrong with it, the model says
    names = ["tokens", "position", "embed", "bridge", "blocks.*.out", "encoded", "logits"]
    parts = ["*", "attention.*", "mlp.*", *(["cross.*"] if c.context_width else [])]
    names += [f"blocks.{block}.{part}" for part in parts]
    with evaluating(model):
        steps = DecoderSteps(model, run(model, names, batch, context), block, head, token)
        steps.embedding(batch[0])
        if context is not None:
            steps.look(context[0])
        steps.blocks()
        steps.ending()
    return steps.stages


class DecoderSteps(BlockSteps):
    """The steps of a decoder."""

    model: Decoder
    context = ""  # what the equations call the encoder's tokens, once there are any
    whom = "at whom, never ahead"

    def embedding(self, numbers: Tensor) -> None:
        self.numbers(numbers)
        e = self.add("tokens", "e = E[x]", "For each token the row of E with its number.")
        last = len(numbers) - 1
        first = f"0 ... {last}" if last else "0"
        meaning = f"Each token is told its place, by one of the first {last + 1} rows of E_pos added to it."
        e = self.add("position", f"s = {e} + E_pos[{first}]", meaning)
        meaning = "What the first block is given; dropout changes nothing outside training."
        self.add("embed", f"z_0 = {e}", meaning)

    def look(self, context: Tensor) -> None:
        """The encoder's tokens; those of another width come over a bridge."""
        S, width = context.shape
        self.add("context", f"c in R^({S} x {width})", "What an encoder saw: a row for each token.", context)
        self.context = "c"
        if width != self.config.width:
            meaning = "A bridge to the decoder's width, the same for every block."
            self.context = self.add("bridge", "c' = c W + b", meaning)

    # ---- what is a decoder's own in a block -------------------------------------------------

    def beside(self) -> str:
        return f", {self.context}" if self.context else ""

    def scores(self, at: str) -> str:
        """The tokens' own scores are masked; the encoder's tokens are all there to look at."""
        if at.endswith(".cross"):
            return super().scores(at)
        q, k, masked = (self.seen[f"{at}.{part}"][self.head] for part in ("q", "k", "scores"))
        products, meaning = scale_of(self.config) * q @ k.T, "How well each query fits each key."
        s = self.add(f"{at}.products", f"S = {self.products()}", meaning, products)
        meaning = "What comes later is masked: its score is -inf, of which softmax makes 0."
        return self.add(f"{at}.scores", f"M = mask({s})", meaning, masked)

    def between(self, z: str, x: Tensor) -> str:
        """Cross-attention: what the tokens ask for, answered by the encoder's."""
        if not self.context:
            return z
        at = f"blocks.{self.block}"
        asks = self.norm(f"{at}.norm_cross", z, "All tokens")
        self.project(f"{at}.cross", "q", asks, "each token")
        for letter in "kv":
            self.project(f"{at}.cross", letter, self.context, "each token of the encoder")
        found = self.heads(
            f"{at}.cross", self.scores(f"{at}.cross"), "CA", "at which of the encoder's tokens"
        )
        summed, meaning = x + self.seen[f"{at}.cross.out"], "What the encoder had to tell is added as well."
        return self.add(f"{at}.residual_cross", f"z''_{self.block + 1} = {found} + {z}", meaning, summed)

    # ---- from z_L to what comes next --------------------------------------------------------

    def ending(self) -> None:
        z = self.norm("encoded", f"z_{self.config.depth}", "The tokens of the last block")
        tied = self.model.config.tied
        meaning = "For each place a number for each token that may come next"
        meaning += ": how well the row of E fits." if tied else ": the higher, the likelier."
        self.add("logits", f"o = {z} E^T" if tied else f"o = {z} W + b", meaning)
        shares = self.seen["logits"].softmax(dim=-1)  # (T, V)
        self.add("probabilities", "P = softmax(o)", "The same as shares of 1.", shares)
        who = token_name(self.config, self.token)
        self.add("next", "p = P^t", f"What comes after {who} (t = {self.token}).", shares[self.token])


def as_batch(tokens: Tensor) -> Tensor:
    """One sequence as a batch of one; the model's own check is for what is in it."""
    if not isinstance(tokens, Tensor):
        raise InputError("Tokens must be a torch tensor.", type(tokens).__name__, "Use torch.tensor.")
    if tokens.ndim == 1 or (tokens.ndim == 2 and len(tokens) == 1):
        return tokens.reshape(1, -1)
    raise InputError(
        "A walk takes one sequence of token numbers, of the shape (T,) or (1, T).",
        str(tuple(tokens.shape)),
        "Pick one of the batch: tokens[0]." if tokens.ndim == 2 else "Put the numbers in one row.",
    )
