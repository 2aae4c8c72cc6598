"""After an epoch: judge the model, write the numbers down, keep what is worth keeping."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from vitrail.data.loader import Corrupt
from vitrail.data.sources import Dataset, Split
from vitrail.evaluation.forward import outputs_of
from vitrail.model import ViT
from vitrail.training import checkpoint as files
from vitrail.training.listen import Listener
from vitrail.training.loop import Stopped, Trainer
from vitrail.training.lora import merged
from vitrail.weights.bundle import Bundle, Card
from vitrail.weights.load import load


@dataclass
class Keeper:
    """What happens after an epoch: judge, write down, keep."""

    trainer: Trainer
    data: Dataset
    say: Listener
    best: float = -1.0
    told: set[str] = field(default_factory=set)
    """Corrupt files that have been named or counted."""
    held_out: dict[str, str] = field(default_factory=dict)
    """Those among the pictures to judge by."""

    def go_on(self) -> None:
        """From the last whole checkpoint, if there is one."""
        found, warnings = files.load_newest(self.trainer.out / "checkpoints")
        for warning in warnings.values():
            self.say.note(warning)
        self.trainer.damaged = list(warnings)
        if found is None:
            self.say.note("There is no whole checkpoint: it starts at step 0.")
            return
        self.trainer.restore(found)
        self.told = set(self.trainer.corrupt.names)
        scores = [row["val_accuracy"] for row in self.trainer.history if "val_accuracy" in row]
        self.best = max(scores, default=-1.0)
        self.say.note(f"Going on at step {found.step:,} of {self.trainer.steps:,}.")

    def after_epoch(self, epoch: int) -> None:
        t, row = self.trainer, self.trainer.history[-1]
        last = epoch == t.settings.epochs
        if epoch % t.settings.evaluate_every == 0 or last:
            row |= self.judge(self.data.held_out)
        if t.ranks.first:
            lines = "".join(json.dumps(one) + "\n" for one in t.history)
            files.replace_text(t.out / "metrics.jsonl", lines)
            if self.data.val and row.get("val_accuracy", -1.0) > self.best:
                self.best = row["val_accuracy"]
                self.bundle(t.ema or t.model).save(t.out / "best.safetensors")
        self.tell(t.corrupt.names | self.held_out)
        self.say.epoch(row)
        t.pending = False
        if epoch % t.settings.save_every == 0 or last:
            t.save()

    def tell(self, corrupt: dict[str, str]) -> None:
        """Name the files that could not be read, each once; or say how many there are by now."""
        new = {name: reason for name, reason in corrupt.items() if name not in self.told}
        if self.trainer.settings.corrupt == "warn":
            for name, reason in new.items():
                self.say.note(f"{name} could not be read: {reason}")
        elif new:
            count = f"{len(corrupt):,} file{'s' * (len(corrupt) > 1)}"
            self.say.note(f"{count} could not be read so far; --set corrupt=warn names them.")
        self.told |= set(new)

    def judge(self, split: Split) -> dict[str, float]:
        """Loss and accuracy on held-out pictures, the same for any number of processes."""
        t = self.trainer
        model = t.ema or t.model

        def ahead(done: int) -> None:
            if t.signal is not None and t.ranks.count == 1:
                raise Stopped(t.signal)

        corrupt = Corrupt(t.settings.corrupt)
        how: dict[str, Any] = {"rank": t.ranks.rank, "ranks": t.ranks.count, "workers": t.settings.workers}
        with t.machine.computing():
            logits, kept = outputs_of(model, split, t.preprocess, corrupt=corrupt, ahead=ahead, **how)
        self.held_out = t.ranks.union(corrupt.names)
        if logits.shape[1] != len(self.data.classes):  # this process had nothing to judge
            logits = torch.zeros(len(split), len(self.data.classes))
        logits = t.ranks.add(logits.to(t.machine.device)).cpu()
        kept = t.ranks.add(kept.to(t.machine.device)).cpu()
        labels = torch.from_numpy(split.labels)
        if labels.ndim == 2:
            each = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
            right = ((logits > 0) == labels.bool()).float().mean(1)
        else:
            each = F.cross_entropy(logits, labels, reduction="none")
            right = (logits.argmax(1) == labels).float()
        seen = kept.sum().clamp(min=1)
        return {
            "val_loss": ((each * kept).double().sum() / seen).item(),
            "val_accuracy": ((right * kept).double().sum() / seen).item(),
            "val_seen": int(kept.sum()),
        }

    def bundle(self, model: ViT) -> Bundle:
        """A whole model, plain: what LoRA has learned is added into its weights."""
        model = merged(model) if self.trainer.settings.tune == "lora" else model
        rows = [row for row in self.trainer.history if "val_accuracy" in row]
        metrics = {"accuracy": rows[-1]["val_accuracy"]} if rows else {}
        card = Card(name=self.data.name, source=f"trained on {self.data.name}", metrics=metrics)
        spec = self.trainer.preprocess
        return Bundle(model=model, preprocess=spec, labels=list(self.data.classes), card=card)

    def finish(self) -> None:
        """The last weights, and those that were judged best."""
        t = self.trainer
        if t.ranks.first:
            if not self.data.val:  # judged by the test set, which may not choose: the last it is
                self.bundle(t.ema or t.model).save(t.out / "best.safetensors")
            self.bundle(t.model).save(t.out / "last.safetensors")  # with which the run is finished
        t.ranks.wait()

    def judged_best(self) -> Bundle:
        return load(self.trainer.out / "best.safetensors")
