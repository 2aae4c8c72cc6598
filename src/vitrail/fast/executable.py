"""What computes a model in another way than its own code. The model holds the parameters, unchanged."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vitrail.base.errors import InputError
from vitrail.model import ViT
from vitrail.model.tap import is_watched


class Executable(nn.Module):
    """A module with the forward pass of a model, computed another way (`vitrail.fast.prepare`).

    The model itself is `.model`: for its weights, EMA, evaluation, `vt.record` and `vt.edit`. While something
    watches its activations, the model computes, because they do not all exist elsewhere.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.say: Callable[[str], None] = lambda text: None
        """Called with what a user should know."""
        self._watchable, self._told = list(model.modules()), False

    @property
    def watched(self) -> bool:
        """Whether this thread records or edits activations, so that the model must compute them itself."""
        if not is_watched(self._watchable):
            return False
        if (what := self.why_not_watched()) is not None:
            raise InputError(
                f"Activations of {what} cannot be recorded or edited, because another module computes it; "
                "record those of the trained model, after the epoch."
            )
        if not self._told:
            self.say("Activations are recorded or edited, so the plain model computes meanwhile.")
            self._told = True
        return True

    def why_not_watched(self) -> str | None:
        """What is computed that the model itself cannot compute; None if it can."""
        return None
