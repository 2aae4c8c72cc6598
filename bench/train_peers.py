"""The peers of bench.train: timm's loader and loop, and the Trainer of transformers, with our settings."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.peers import PEERS, Logits
from vitrail.base.machine import usable_cores
from vitrail.images.augment.mixing import Mixing
from vitrail.model.config import ViTConfig

BATCH = 256
LR = 5e-4
MIN_AREA, ERASE, SMOOTHING, CLIP = 0.08, 0.25, 0.1, 1.0
MIXING = Mixing(mixup=0.8, cutmix=1.0)
TIMM_POLICY = "rand-m3-n2"  # 3 of 10 is 9 of 30


class Answer(Protocol):
    """Seconds for so many steps of training after `untimed` ones, or for the evaluation of so many images."""

    def __call__(self, task: str, count: int, *, untimed: int) -> float: ...


def timed(step: Callable[[], object], untimed: int, count: int) -> float:
    for _ in range(untimed):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


# ---- timm -----------------------------------------------------------------------------------


def timm_row(config: ViTConfig, folder: Path, *, defaults: bool = False) -> Answer:
    """timm's loader, augmentation, mixing and loss, and the loop of its train.py.

    Args:
        defaults: whether the workers start again with every epoch, as they do by default.
    """
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import dispatch_clip_grad

    model = PEERS["timm"](config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05, fused=True)
    run, criterion = torch.compile(model), SoftTargetCrossEntropy()
    mix = Mixup(
        mixup_alpha=MIXING.mixup,
        cutmix_alpha=MIXING.cutmix,
        label_smoothing=SMOOTHING,
        num_classes=config.classes,
    )
    train = timm_loader(folder, "train", config.pixels[0], persistent=not defaults)
    val = timm_loader(folder, "val", config.pixels[0])
    batches = itertools.chain.from_iterable(itertools.repeat(train))

    def step() -> None:
        images, targets = mix(*next(batches))
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(run(images), targets)
        loss.backward()
        dispatch_clip_grad(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> float:
        begin, correct = time.perf_counter(), torch.zeros((), device="cuda")
        model.eval()
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            for images, targets in val:
                correct += (run(images).argmax(1) == targets).sum()
        model.train()
        correct.item()
        return time.perf_counter() - begin

    model.train()

    def answer(task: str, count: int, *, untimed: int) -> float:
        return timed(step, untimed, count) if task == "train" else evaluate()

    return answer


def timm_loader(folder: Path, split: str, side: int, *, persistent: bool = False) -> Any:
    from timm.data import ImageDataset, create_loader

    training: dict[str, Any] = {
        "is_training": True,
        "scale": (MIN_AREA, 1.0),
        "auto_augment": TIMM_POLICY,
        "re_prob": ERASE,
    }
    return create_loader(
        ImageDataset(str(folder / "files" / split)),
        input_size=(3, side, side),
        batch_size=BATCH,
        interpolation="bilinear",
        num_workers=usable_cores(),
        pin_memory=True,
        use_multi_epochs_loader=persistent,
        **(training if split == "train" else {}),
    )


# ---- transformers ---------------------------------------------------------------------------


def transformers_row(config: ViTConfig, folder: Path) -> Answer:
    """`Trainer.train` in a thread; a callback lets it take only as many steps as it was asked for."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    peer = PEERS["transformers"](config)
    assert isinstance(peer, Logits)
    cores = usable_cores()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=folder),
        max_steps=1_000_000,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        weight_decay=0.05,
        max_grad_norm=CLIP,
        label_smoothing_factor=SMOOTHING,
        optim="adamw_torch_fused",
        bf16=True,
        torch_compile=True,
        dataloader_num_workers=cores,
        dataloader_persistent_workers=True,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tickets: queue.Queue[None] = queue.Queue()
    taken: queue.Queue[None] = queue.Queue()

    class TakeTurns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            tickets.get()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            taken.put(None)

    dataset = TransformersImages(folder / "files" / "train", config.pixels[0])
    trainer = Trainer(
        model=peer.model,
        args=arguments,
        train_dataset=dataset,
        data_collator=collate,
        callbacks=[TakeTurns()],
    )
    threading.Thread(target=train_or_end, args=(trainer.train,), daemon=True).start()

    def steps(count: int) -> None:
        for _ in range(count):  # all at once, so that the trainer waits for nobody between them
            tickets.put(None)
        for _ in range(count):
            taken.get()
        torch.cuda.synchronize()

    def answer(task: str, count: int, *, untimed: int) -> float:
        steps(untimed)
        begin = time.perf_counter()
        steps(count)
        return time.perf_counter() - begin

    return answer


def train_or_end(train: Callable[[], object]) -> None:
    """Train; an error ends the process, or those who wait for the next step would wait for ever."""
    try:
        train()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class TransformersImages(torch.utils.data.Dataset[dict[str, Any]]):
    """A folder of classes as the image classification example of transformers reads it."""

    def __init__(self, folder: Path, side: int) -> None:
        from torchvision import transforms as T
        from torchvision.datasets import ImageFolder
        from transformers import ViTImageProcessor

        processor = ViTImageProcessor(size={"height": side, "width": side})
        steps = [
            T.RandomResizedCrop(side, scale=(MIN_AREA, 1.0)),
            T.RandomHorizontalFlip(),
            T.RandAugment(2, 9),
            T.ToTensor(),
            T.Normalize(processor.image_mean, processor.image_std),
            T.RandomErasing(ERASE),
        ]
        self.images = ImageFolder(str(folder), T.Compose(steps))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels, label = self.images[index]
        return {"pixel_values": pixels, "labels": label}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


PEER_ROWS: dict[str, Callable[[ViTConfig, Path], Answer]] = {
    "timm, files": timm_row,
    "timm, files, its defaults": functools.partial(timm_row, defaults=True),
    "transformers, files": transformers_row,
}
