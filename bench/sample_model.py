"""Train the sample model of photographs: masked patches first, then labels.

    python -m bench.sample_model cifar10.npz photos.safetensors

A small ViT first learns without labels: 60 % of the patches of each image are replaced by one learned vector,
and a linear layer predicts their pixels from the output tokens (SimMIM, Xie et al. 2021). Then it learns the
labels. E and E_pos start small, so that what training puts into them is what one sees. A phase ends after its
steps or its minutes, whichever is first. The file has float16 weights. Prints the test accuracy and the
captions of the three figures of the ViT paper's Fig. 7.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail as vt
from bench.measure import capture
from vitrail.inspect import distance, filters, positions
from vitrail.model import ViT
from vitrail.model.tokens import patchify
from vitrail.weights.bundle import Bundle, Card

_CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_HIDDEN = 0.6  # fraction of the patches
_WARMUP = 0.05  # fraction of each phase
_MEAN, _STD = 0.5, 0.25
_SYNC = 50  # steps between two looks at the clock
Loss = Callable[[Tensor, Tensor], Tensor]


def read_data(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """Training and test images with their labels, and the class names: CIFAR-10 as .npz."""
    arrays = np.load(path)
    return [arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")], _CIFAR10


def new_model(size: tuple[int, int], options: argparse.Namespace) -> ViT:
    """The model before training."""
    config = vt.ViTConfig(
        **{name: getattr(options, name) for name in ("width", "depth", "heads", "patch")},
        size=size,
        classes=len(_CIFAR10),
        drop_path=0.05,
        position_sigma=0.002,
    )
    model = ViT(config)
    with torch.no_grad():
        model.tokens.proj.weight.mul_(0.05)
    return model


class Trainer:
    """One model, its data on the device, and the two phases."""

    def __init__(self, model: ViT, x: np.ndarray, y: np.ndarray, batch: int, device: str) -> None:
        self.model, self.batch, self.device = model.to(device), batch, device
        self.x = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous().to(device)
        self.y = torch.from_numpy(y.astype(np.int64).ravel()).to(device)
        config = model.config
        self.mask_token = nn.Parameter(torch.zeros(config.width, device=device))
        self.decoder = nn.Linear(
            config.width, config.channels * math.prod(config.patch_pixels), device=device
        )
        self.parameters = [*model.parameters(), self.mask_token, *self.decoder.parameters()]

    def augment(self, pixels: Tensor) -> Tensor:
        """Normalized images, flipped, shifted and zoomed at random."""
        x = (pixels.float() / 255 - _MEAN) / _STD
        B = len(x)
        zoom = 0.7 + 0.4 * torch.rand(B, device=x.device)
        flip = (torch.rand(B, device=x.device) < 0.5).float() * 2 - 1
        shift = (torch.rand(B, 2, device=x.device) * 2 - 1) * (0.05 + (1 - zoom).clamp_min(0))[:, None]
        zero = torch.zeros_like(zoom)
        rows = [torch.stack([zoom * flip, zero, shift[:, 0]], 1), torch.stack([zero, zoom, shift[:, 1]], 1)]
        grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    def encode(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """All tokens after the last norm, with the mask token in place of hidden patches."""
        model = self.model
        z = model.tokens(images)  # (B, N, D)
        if hidden is not None:
            z = torch.where(hidden[..., None], self.mask_token.to(z.dtype), z)
        z = torch.cat([model.prefix.to(z.dtype).expand(len(z), -1, -1), z], dim=1)
        z = model.position(z, model.config.grid)
        for block in model.blocks:
            z = block(z)
        return model.norm(z)

    def masked_loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        images, config = self.augment(pixels), self.model.config
        hidden = torch.rand(len(images), config.patches, device=self.device) < _HIDDEN
        guess = self.decoder(self.encode(images, hidden)[:, config.prefix :])
        error = (guess - patchify(images, config.patch_pixels)).square().mean(dim=-1)
        return (error * hidden).sum() / hidden.sum()

    def label_loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy; into each image another one is mixed by a random part (mixup)."""
        images = self.augment(pixels)
        part = 0.5 * torch.rand((), device=images.device)
        mixed = (1 - part) * images + part * images.flip(0)
        scores = self.model.head(self.encode(mixed)[:, 0])
        losses = [F.cross_entropy(scores, y, label_smoothing=0.05) for y in (labels, labels.flip(0))]
        return (1 - part) * losses[0] + part * losses[1]

    def train(self, name: str, loss_of: Loss, lr: float, steps: int, minutes: float) -> None:
        """AdamW with warm-up and cosine decay, over the steps or the minutes, whichever is over first."""
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        on_gpu = self.device == "cuda"
        rate = torch.tensor(0.0, device=self.device)  # a CUDA graph reads it at every step
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)

        def take_step() -> Tensor:
            index = torch.randint(len(self.x), (self.batch,), device=self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=on_gpu):
                loss = loss_of(self.x[index], self.y[index])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
            optimizer.step()
            return loss.detach()

        self.model.train()
        step_once = capture(take_step) if on_gpu else take_step  # steps before the capture have a rate of 0
        start, step, done, loss = time.monotonic(), 0, 0.0, rate
        while done < 1:
            if step % _SYNC == 0:  # the GPU is otherwise hundreds of steps behind the clock
                latest = loss.item()
                elapsed = (time.monotonic() - start) / (60 * minutes)
            if step % 2000 == 0:
                print(f"{name}: step {step}, {time.monotonic() - start:.0f} s, loss {latest:.4f}", flush=True)
            done = max(step / steps, elapsed)
            rate.fill_(lr * min((done + 1e-4) / _WARMUP, 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))))
            loss = step_once()
            step += 1
        print(f"{name}: {step} steps, {time.monotonic() - start:.0f} s, loss {loss.item():.4f}", flush=True)


def accuracy(model: ViT, x: Tensor, y: np.ndarray) -> float:
    device = next(model.parameters()).device
    with torch.no_grad():
        found = torch.cat([model(part.to(device)).argmax(1).cpu() for part in x.split(500)])
    return float((found == torch.from_numpy(y.astype(np.int64).ravel())).float().mean())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="CIFAR-10 as .npz: x_train, y_train, x_test, y_test")
    parser.add_argument("out", type=Path, help="the model file")
    parser.add_argument("--masked-minutes", type=float, default=2.5)
    parser.add_argument("--label-minutes", type=float, default=2.5)
    parser.add_argument("--masked-steps", type=int, default=60_000)
    parser.add_argument("--label-steps", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    (x, y, x_test, y_test), names = read_data(options.data)
    trainer = Trainer(new_model(x.shape[1:3], options), x, y, options.batch, device)
    trainer.train("masked", trainer.masked_loss, 1e-3, options.masked_steps, options.masked_minutes)
    trainer.train("labels", trainer.label_loss, 1e-3, options.label_steps, options.label_minutes)

    model = trainer.model.cpu().eval().half().float()  # the numbers that the file holds
    spec = vt.Preprocess(size=model.config.pixels, mean=(_MEAN,) * 3, std=(_STD,) * 3)
    images = torch.stack([spec.normalize(image) for image in x_test])
    right = accuracy(model.to(device), images, y_test)
    seen = distance.compute(model, images[:256].to(device))
    model = model.cpu()
    print(f"test accuracy {100 * right:.2f} % of {len(images)}", flush=True)
    print(filters.caption(filters.compute(model)))
    print(positions.caption(positions.compute(model)))
    print(distance.caption(seen))
    print("distance by layer and head:\n", np.round(seen.distance.mean / seen.uniform, 2))
    card = Card(
        name="a ViT of ten classes of photographs (CIFAR-10)",
        source=f"python -m bench.sample_model {options.data.name} {options.out.name}",
        license="Apache-2.0",
        metrics={"accuracy": round(right, 4)},
    )
    Bundle(model=model.half(), preprocess=spec, labels=names, card=card).save(options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
