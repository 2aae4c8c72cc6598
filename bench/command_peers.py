"""The peers of bench.commands: complete scripts on timm, as somebody who knows it well writes them.

    python -m bench.command_peers predict photos/ rows.csv --model B/16 --compile
    python -m bench.command_peers train photos/ out/ --from deit_tiny.safetensors --epochs 3

timm's loaders with a worker for each core, which stay over epochs; bf16 on a GPU. Training has the
augmentation, mixing and loss of the recipe it is beside, and evaluates and saves a checkpoint every epoch, as
timm's train.py does.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.peers import PEERS, make_torchvision_importable
from vitrail.model.presets import preset

TASKS = ("predict", "evaluate", "embed", "train")
CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32
TRANSFER_LR = 3e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument("--from", dest="start", type=Path, help="timm's weights, of --model")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256 if CUDA else 32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    make_torchvision_importable()
    {"predict": predict, "evaluate": evaluate, "embed": embed, "train": train}[args.task](args)


def build(args: Any, classes: int) -> nn.Module:
    """A model of timm with random or given weights and a head for these classes."""
    model = PEERS["timm"](preset(args.model, classes=classes, size=args.size))
    if args.start is not None:
        from safetensors.torch import load_file

        state = load_file(args.start)
        if state["head.weight"].shape[0] != classes:
            state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        model.load_state_dict(state, strict=False)
    return model.to("cuda" if CUDA else "cpu")


def loader(args: Any, folder: Path, **training: Any) -> Any:
    """timm's loader of a folder of images."""
    from timm.data import ImageDataset, create_loader

    from vitrail.base.machine import usable_cores

    dataset = ImageDataset(str(folder.parent if folder.is_file() else folder))
    if folder.is_file():
        dataset.reader.samples = dataset.reader.samples[:1]
    return create_loader(
        dataset,
        input_size=(3, args.size, args.size),
        batch_size=args.batch,
        interpolation="bicubic",
        crop_pct=0.875,
        num_workers=usable_cores() if len(dataset) > args.batch else 0,  # for few images they take longer
        pin_memory=CUDA,
        use_prefetcher=CUDA,
        use_multi_epochs_loader=bool(training),
        device=torch.device("cuda" if CUDA else "cpu"),
        **training,
    )


# ---- inference ------------------------------------------------------------------------------


def outputs(args: Any, batches: Any, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What the model gives for each batch, and the labels."""
    model = build(args, classes).to(DTYPE).eval()
    forward = torch.compile(model) if args.compile else model
    with torch.inference_mode():
        for images, labels in batches:
            yield forward(images.to(DTYPE)).float().cpu(), labels.cpu()


def predict(args: Any) -> None:
    """Write the class and the score of every image."""
    batches = loader(args, args.data)
    with args.out.open("w", newline="") as file:
        rows = csv.writer(file)
        names = iter(batches.dataset.filenames())
        for logits, _ in outputs(args, batches, 1000):
            scores, best = logits.softmax(1).max(1)
            rows.writerows(zip(names, best.tolist(), scores.tolist(), strict=False))


def evaluate(args: Any) -> None:
    """Print the accuracy of labeled images."""
    batches = loader(args, args.data)
    correct = [
        logits.argmax(1) == labels
        for logits, labels in outputs(args, batches, len(batches.dataset.reader.class_to_idx))
    ]
    print(f"{torch.cat(correct).float().mean():.4f}")


def embed(args: Any) -> None:
    """Save the pooled vectors of all images."""
    vectors = [vectors for vectors, _ in outputs(args, loader(args, args.data), 0)]
    np.save(args.out, torch.cat(vectors).numpy())


# ---- training -------------------------------------------------------------------------------


def train(args: Any) -> None:
    """Train, evaluate and save a checkpoint every epoch."""
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy

    args.out.mkdir()
    scratch = args.start is None
    augmentation = {"auto_augment": "rand-m3-n2", "re_prob": 0.25} if scratch else {"color_jitter": 0.3}
    batches = loader(args, args.data / "train", is_training=True, **augmentation)
    val = loader(args, args.data / "val")
    classes = len(batches.dataset.reader.class_to_idx)
    model = build(args, classes)
    lr = 5e-4 if scratch else TRANSFER_LR
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, fused=CUDA)
    mix = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=classes) if scratch else None
    criterion = SoftTargetCrossEntropy() if mix else nn.CrossEntropyLoss(label_smoothing=0.1)
    run = torch.compile(model) if args.compile else model
    steps, step = args.epochs * len(batches), 0
    for epoch in range(args.epochs):
        model.train()
        for images, targets in batches:
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            images, targets = mix(images, targets) if mix else (images, targets)
            with torch.autocast("cuda", torch.bfloat16, enabled=CUDA):
                loss = criterion(run(images), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        print(f"epoch {epoch}: {accuracy(run, model, val):.4f}", flush=True)
        state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, args.out / f"checkpoint-{epoch}.pth.tar")


def accuracy(run: Any, model: nn.Module, batches: Any) -> float:
    """The accuracy on a validation set."""
    model.eval()
    correct = []
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=CUDA):
        for images, labels in batches:
            correct.append(run(images).argmax(1) == labels)
    return float(torch.cat(correct).float().mean())


if __name__ == "__main__":
    main()
