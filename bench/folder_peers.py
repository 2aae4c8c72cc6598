"""The peers of bench.anyfolder: what somebody writes in an hour, for as many seconds as ours took.

    python -m bench.folder_peers cnn SET --seconds 120 --out predictions.npy [--flips]
    python -m bench.folder_peers timm SET --seconds 120 --out predictions.npy --weights deit_tiny.safetensors
    python -m bench.folder_peers sklearn SET --seconds 120 --out predictions.npy

SET has train/CLASS and test/CLASS. The class of each test image is saved, in the order of sorted paths. A
training loop ends when its seconds are over, counted from the start of the process; its learning rate follows
one cosine over them.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

START = time.perf_counter()
LEFT_FOR_TESTING = 0.06  # of the seconds
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=("cnn", "timm", "sklearn"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flips", action="store_true")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weights", type=Path, help="of timm's deit_tiny_patch16_224")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    predicted = {"cnn": cnn, "timm": fine_tune, "sklearn": pixels}[args.peer](args)
    np.save(args.out, predicted)


def paths_and_labels(folder: Path) -> tuple[list[Path], NDArray[np.int64]]:
    """The files of a split in the order of their paths, and the number of each one's class."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    classes = sorted({path.parent.name for path in paths})
    return paths, np.array([classes.index(path.parent.name) for path in paths])


def read(folder: Path, side: int | None) -> tuple[Tensor, NDArray[np.int64]]:
    """All images of a split, (N, C, side, side) uint8, gray where they are; side: their median by default."""
    paths, labels = paths_and_labels(folder)
    if side is None:
        side = int(np.median([min(Image.open(path).size) for path in paths[:64]]))
    mode = "L" if Image.open(paths[0]).mode == "L" else "RGB"
    images = []
    for path in paths:
        image = Image.open(path).convert(mode)
        image = image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC)
        images.append(np.atleast_3d(np.asarray(image)))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), labels


def cnn(args: Any) -> NDArray[np.int64]:
    """Four convolutions, with random shifts by an eighth, and with flips or without."""
    images, labels = read(args.data / "train", None)
    images, side = images.float() / 255, images.shape[-1]
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    layers, channels = [], images.shape[1]
    for width in (32, 64, 128, 160):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2, ceil_mode=True)]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, int(labels.max()) + 1)]
    model = nn.Sequential(*layers, *head)
    pad = max(1, side // 8)

    def augment(x: Tensor) -> Tensor:
        top, left = np.random.default_rng().integers(0, 2 * pad + 1, 2)
        x = F.pad(x, (pad,) * 4)[..., top : top + side, left : left + side]
        return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x) if args.flips else x

    normalize = lambda x: (x - mean) / std  # noqa: E731
    train(model, images, labels, args, lambda x: augment(normalize(x)))
    test = read(args.data / "test", side)[0]
    return predict(model, test, lambda x: normalize(x.float() / 255))


def fine_tune(args: Any) -> NDArray[np.int64]:
    """timm's DeiT-Ti from its weights, at 224 pixels, with flips and small crops."""
    from bench.peers import make_torchvision_importable

    make_torchvision_importable()
    import timm
    from safetensors.torch import load_file

    images, labels = read(args.data / "train", 224)
    model = timm.create_model("deit_tiny_patch16_224", num_classes=int(labels.max()) + 1)
    state = {name: tensor for name, tensor in load_file(args.weights).items() if "head." not in name}
    model.load_state_dict(state, strict=False)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in IMAGENET)

    def normalize(x: Tensor) -> Tensor:
        return (x.expand(-1, 3, -1, -1).float() / 255 - mean) / std

    def augment(x: Tensor) -> Tensor:
        side = int(np.random.default_rng().integers(180, 225))
        top, left = np.random.default_rng().integers(0, 225 - side, 2)
        x = normalize(x)[..., top : top + side, left : left + side]
        x = F.interpolate(x, (224, 224), mode="bilinear", antialias=True)
        return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)

    train(model, images, labels, args, augment)
    return predict(model, read(args.data / "test", 224)[0], normalize)


def train(model: nn.Module, images: Tensor, labels: NDArray[np.int64], args: Any, prepare: Any) -> None:
    """AdamW over the seconds that are left, with one cosine and label smoothing."""
    model.to(DEVICE, memory_format=torch.channels_last)
    targets, batch = torch.from_numpy(labels), min(64 if DEVICE.type == "cpu" else 256, len(labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    begin, end = time.perf_counter(), START + args.seconds * (1 - LEFT_FOR_TESTING)
    steps = 0
    while (now := time.perf_counter()) < end:
        for indices in torch.randperm(len(labels)).split(batch):
            if len(indices) < batch or (now := time.perf_counter()) >= end:
                break
            done = (now - begin) / (end - begin)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, 20 * done) * 0.5 * (1 + math.cos(math.pi * done))
            logits = model(prepare(images[indices]).to(DEVICE))
            loss = F.cross_entropy(logits, targets[indices].to(DEVICE), label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            steps += 1
    print(f"{steps} steps of {batch} images", flush=True)


@torch.inference_mode()
def predict(model: nn.Module, images: Tensor, prepare: Any) -> NDArray[np.int64]:
    model.eval()
    found = [model(prepare(part).to(DEVICE)).argmax(1).cpu() for part in images.split(250)]
    return torch.cat(found).numpy()


def pixels(args: Any) -> NDArray[np.int64]:
    """A support vector machine on the pixels, of at most 5,000 images of at most 32 pixels."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    paths, _ = paths_and_labels(args.data / "train")
    side = min(32, min(Image.open(paths[0]).size))
    images, labels = read(args.data / "train", side)
    chosen = np.random.default_rng(args.seed).permutation(len(labels))[:5000]
    model = make_pipeline(StandardScaler(), SVC(C=10))
    model.fit(images[chosen].flatten(1).numpy(), labels[chosen])
    return model.predict(read(args.data / "test", side)[0].flatten(1).numpy())


if __name__ == "__main__":
    main()
