"""From the pixels of a batch to what a step trains on: augmentation, mixing, normalization and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vitrail.data.augment import Augment, augment_batch
from vitrail.data.mixing import Mixing, mix_batch


@dataclass(frozen=True)
class InputPipeline:
    """What happens to the images of a batch before the model sees them; all of it on their device.

    Args:
        labels: (N,) or (N, K), of the whole training set, on the device.
        targets: from the labels of a batch to its targets (B, K).
        size: (height, width) of the model's images.
    """

    augment: Augment
    mixing: Mixing
    labels: Tensor
    targets: Callable[[Tensor], Tensor]
    normalize: Callable[[Tensor], Tensor]
    size: tuple[int, int]
    seed: int

    def __call__(
        self, images: Tensor, indices: Tensor, epoch: int | Tensor, *, mixes: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Augmented and mixed images with values from 0 to 1, the same normalized, and their targets."""
        targets = self.targets(self.labels[indices])
        if images.device.type == "mps":  # it has no float64, in which the random parameters are computed
            indices = indices.cpu()
        x = augment_batch(images, indices, self.augment, seed=self.seed, epoch=epoch, size=self.size)
        if mixes:
            x, targets = mix_batch(x, targets, indices, self.mixing, seed=self.seed, epoch=epoch)
        return x, self.normalize(x), targets
