"""The training loop: model, optimizer and EMA, and the steps taken.

A run is a function of its settings. Interrupted anywhere and resumed, it ends with the same bits (on one kind
of machine), because no random number depends on a generator's history: the order of the images, their
augmentation and dropout are functions of (seed, step, index).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.fast.lora import plain_model, with_lora
from vitrail.fast.parallelism import gather
from vitrail.fast.prepare import prepare
from vitrail.fast.training import TrainingExecution
from vitrail.images.loader import (
    Batch,
    CorruptFiles,
    Reader,
    batch_indices,
    epoch_order,
    start_workers,
    steps_in_epoch,
)
from vitrail.images.order import Order
from vitrail.model import ViT
from vitrail.training.callbacks import Progress
from vitrail.training.captured_step import CapturedStep, CaptureError, StepValues
from vitrail.training.checkpoint import Checkpoint, optimizer_tensors
from vitrail.training.clock import Clock, Interval
from vitrail.training.dropout import DropoutSeeds
from vitrail.training.epoch import LOG_EVERY, LOG_SECONDS, EpochMetrics
from vitrail.training.input_pipeline import build_inputs
from vitrail.training.objective import (
    Student,
    class_weights,
    correct_predictions,
    distillation_loss,
    loss_scale,
    per_image_loss,
)
from vitrail.training.optim import (
    build_optimizer,
    ema_weight,
    freeze,
    lr_at,
    optimizer_step,
    set_lr,
    update_ema,
)
from vitrail.training.parallel import SharedSignal, choose_parallelism, global_batch_size
from vitrail.training.plan.step_mode import StepMode, choose_step_mode
from vitrail.training.run_plan import RunPlan
from vitrail.training.signals import Interrupted
from vitrail.weights.bundle.own_shape import use_native


class Trainer:
    """A model in training. It takes steps; evaluation, files and messages are its caller's.

    Args:
        model: the model to train, which is moved to the device or holds shards; by default the plan's. Its
            executable takes the steps; with tune="lora" it gets the new weights at the end of every epoch.
    """

    def __init__(self, plan: RunPlan, model: ViT | None = None) -> None:
        self.plan, self.model = plan, plan.initial_model() if model is None else model
        self.data, self.compute, self.ranks, self.teacher = plan.data, plan.compute, plan.ranks, plan.teacher
        self.preprocess, self.settings = plan.recipe.preprocess, plan.recipe.train
        self.step = 0
        """The number of steps taken."""
        self.stopped = False
        """Whether `run` ends after this step, although more are planned."""
        self.on_message: Callable[[str], None] = lambda text: None
        """Called with what a user should know."""
        s, device = self.settings, self.compute.device
        self.corrupt = CorruptFiles(s.corrupt)
        """Training images that could not be read."""
        self.batch = global_batch_size(self.data, s, self.ranks)
        self.reading = use_native(self.model, self.preprocess) if s.native else self.preprocess
        """How images are read: in their own shape, or in that of the model."""
        lora = s.tune == "lora"
        self.trained = with_lora(self.model, s.lora_rank, s.lora_alpha, s.seed) if lora else self.model
        """What holds the parameters that are trained: the model, or its twin with LoRA."""
        freeze(self.trained, s)
        self.parallel = choose_parallelism(self.trained, s, self.compute, self.ranks, self.batch)
        self.ema = copy.deepcopy(self.trained).eval().requires_grad_(False) if s.ema else None
        if self.ema is not None:
            self.parallel.place(self.ema, device)
        self.dropout = DropoutSeeds(self.model.config, s, self.ranks, device)
        if not self.parallel.sharded:
            for own in {self.model, self.trained}:
                own.to(device)
        execution = TrainingExecution(
            trained=self.trained,
            rows=self.dropout if self.dropout.alike and self.ranks.count > 1 else None,
            around=Student if self.teacher else None,
            parallel=self.parallel,
            dtype=self.compute.dtype,
        )
        self.executable = prepare(self.model, execution)
        self.executable.say = lambda text: self.on_message(text)
        self.optimizer = build_optimizer(self.trained, s)
        classes = len(self.data.classes)
        self.weights = class_weights(self.data.train, classes, s).to(device)
        self.loss_scale: Tensor | float = 1.0
        self.labels = torch.from_numpy(self.data.train.labels).to(device)
        self.inputs: Callable[..., Any] = build_inputs(self.data, s, self.reading, self.labels)
        self.steps_per_epoch = steps_in_epoch(len(self.data.train), self.batch)
        self.steps = self.steps_per_epoch * s.epochs
        self.metrics = EpochMetrics(self.compute, self.ranks)
        # Small gradients would be zero in fp16, so the loss is multiplied; in other precisions it is not.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.compute.dtype == torch.float16)
        self.clock = Clock(self.batch, len(self.data.eval_split))
        files = [len(split) for split in (self.data.train, self.data.eval_split) if split.paths is not None]
        self.workers = start_workers(s.workers, sum(files), self.reading, device)
        self.names: dict[Tensor, str] = {p: name for name, p in self.trained.named_parameters()}
        self.values = StepValues(0.0, 0, 0.0)
        self.mode: StepMode | None = None
        self.captured: dict[bool, CapturedStep] = {}

    @property
    def averaged_model(self) -> ViT:
        """The model to evaluate: the EMA if there is one. All processes must ask for it."""
        model = self.plain(self.ema or self.trained)
        return model.accept_any_size() if self.settings.native else model

    def plain(self, model: ViT) -> ViT:
        """Return a model without LoRA and shards: a copy if it has any."""
        return plain_model(model) if self.settings.tune == "lora" or self.parallel.sharded else model

    # ---- steps ------------------------------------------------------------------------------

    def run(
        self,
        on_epoch: Callable[[dict[str, Any]], None] = lambda metrics: None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        stop: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Take the remaining steps.

        Args:
            on_epoch: called with the training metrics of every epoch that ends.
            on_progress: called every few steps.
            stop: the number of the signal that asks this process to stop; then Interrupted is raised after
                the current step, or of several processes in all of them after the next one.
        """
        reader = self.reader(self.corrupt)
        self.clock.start(self.step)
        slow, stopping = Interval(LOG_SECONDS), SharedSignal(self.ranks)
        try:
            batches = reader.batches(self.micro_batch_indices())
            while self.step < self.steps and not self.stopped:
                self.take_step(batches)
                ended = self.step % self.steps_per_epoch == 0
                if ended or self.step % LOG_EVERY == 0 or (self.ranks.count == 1 and slow()):
                    self.clock.trained(self.step)
                    on_progress(self._progress())
                if ended:
                    on_epoch(self._end_epoch())
                if number := stopping.exchange(stop() or 0):
                    raise Interrupted(number)
            if number := stopping.collect():
                raise Interrupted(number)
        finally:
            reader.close()

    def reader(self, corrupt: CorruptFiles) -> Reader:
        """A reader of the training images, decoded and cropped as in a step."""
        return Reader(
            self.data.train,
            self.reading,
            augment=self.settings.augment,
            seed=self.settings.seed,
            workers=self.workers,
            corrupt=corrupt,
            device=self.compute.device,
        )

    def micro_batch_indices(self) -> Iterator[tuple[int, Tensor]]:
        """The epoch and the image indices of this process's micro-batches, from the next step to the last."""
        s, epoch = self.settings, -1
        order: Order = torch.empty(0)
        for step in range(self.step, self.steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.order(epoch)
            shard = self.ranks.shard(batch_indices(order, step % self.steps_per_epoch, self.batch))
            for part in shard.chunk(s.accumulate):
                yield epoch, part

    def order(self, epoch: int) -> Order:
        """The indices of all training images, in the order of an epoch."""
        s, train = self.settings, self.data.train
        balanced = self.batch if s.sampling == "balanced" else None
        return epoch_order(train, seed=s.seed, epoch=epoch, balanced_batch=balanced, block=s.shuffle_block)

    def choose_mode(self) -> StepMode:
        """Choose, once, whether to compile the model and to capture the step, and apply it."""
        return self.mode or self.use_mode(self.ranks.from_main(choose_step_mode(self)))

    def use_mode(self, mode: StepMode) -> StepMode:
        """Take all steps in this mode."""
        self.mode = mode
        self.executable.use(
            kernels=mode.kernels,
            compiled=mode.compile,
            bf16_residual=self.compute.residual_bytes(self.settings.residual) == 2,
            recomputed=self.settings.checkpoint_blocks,
        )
        if mode.compile:  # augmentation and mixing, after a call that makes their tables
            arrays, device = self.data.train.images, self.compute.device
            size = self.preprocess.target if arrays is None else arrays.shape[1:3]
            images = torch.zeros(2, self.preprocess.channels, *size, dtype=torch.uint8, device=device)
            self.inputs(images, torch.arange(2, device=device), 0, mixes=True)
            self.inputs = torch.compile(self.inputs)
        return mode

    def take_step(self, batches: Iterator[Batch]) -> None:
        """One optimizer step over its micro-batches; skipped on the device if the gradient is not finite."""
        s = self.settings
        mode = self.mode or self.choose_mode()
        self.dropout.start(self.step)
        self.values = StepValues(
            lr=lr_at(self.step, self.steps, s),
            epoch=self._epoch(),
            ema_weight=ema_weight(self.step, s.ema or 0.0),
        )
        parts = [next(batches) for _ in range(s.accumulate)]
        captured = mode.cuda_graph and not self.executable.watched
        skipped = self._captured_step(parts) if captured else self._compute_step(parts)
        self.metrics.recent.append((self.step, torch.cat([part.indices for part in parts]), skipped))
        self.step += 1

    def _epoch(self) -> int | Tensor:
        """The epoch; a tensor for compiled code, which would be compiled again for another number."""
        epoch = self.step // self.steps_per_epoch
        if self.mode is None or not self.mode.compile or self.mode.cuda_graph:
            return epoch
        return torch.tensor(epoch).to(self.compute.device, non_blocking=True)

    def _captured_step(self, parts: Sequence[Batch]) -> Tensor:
        """The step as one CUDA graph. With mixing and without it are two graphs, one after the other."""
        mixes = self._mixes()
        if mixes not in self.captured:
            self.captured = {mixes: CapturedStep(self._compute_step, self._bind, self.compute.device)}
        values = self.values
        try:
            return self.captured[mixes](parts, values)
        except CaptureError as error:
            self.on_message(f"The steps are not captured as a CUDA graph, because that failed: {error}")
            self.mode = replace(self.choose_mode(), cuda_graph=False)
            self.values = values
            return self._compute_step(parts)

    def _bind(self, values: StepValues) -> None:
        self.values = values

    def _compute_step(self, parts: Sequence[Batch]) -> Tensor:
        """Everything of a step that happens on the device; returns 1 if the step was skipped, or 0."""
        s = self.settings
        self.executable.set_mode(encoder=s.tune != "head")  # no dropout in a frozen encoder
        set_lr(self.optimizer, self.values.lr)
        self.optimizer.zero_grad(set_to_none=True)
        if s.class_weights == "balanced":
            indices = [part.indices.to(self.compute.device, non_blocking=True) for part in parts]
            self.loss_scale = loss_scale(self.labels[torch.cat(indices)], self.weights, s, self.ranks)
        for number, part in enumerate(parts):
            self.dropout.start_next(self.step, number)
            last = number == s.accumulate - 1
            with self.executable.accumulate(last), self.compute.attention():
                self.scaler.scale(self._loss(part) / s.accumulate).backward()
        self.scaler.unscale_(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in trained if p.grad is not None]
        norm = gather(nn.utils.get_total_norm(gradients, foreach=True))  # of the whole model
        nn.utils.clip_grads_with_norm_(trained, s.clip or math.inf, norm, foreach=True)
        skipped = (~norm.isfinite()).float()
        optimizer_step(self.optimizer, skipped)
        self.scaler.update()
        self.metrics.add_step(skipped)
        if self.ema is not None:
            update_ema(self.ema, self.trained, self.values.ema_weight)
        return skipped

    def _loss(self, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch after augmentation and mixing."""
        s, device = self.settings, self.compute.device
        batch = batch.to(device)
        indices, valid = batch.indices, batch.valid
        given = batch.images if batch.shapes is None else batch.unpack()
        images, normalized, targets = self.inputs(given, indices, self.values.epoch, mixes=self._mixes())
        with self.compute.autocast():
            output = self.executable(normalized)
        if self.teacher is None:
            logits = output
            losses = self.loss_scale * per_image_loss(logits, targets, self.weights, s)
        else:
            by_labels, by_teacher = output
            logits = (by_labels + by_teacher) / 2  # the model's prediction at inference
            distillation = distillation_loss(by_teacher, self.teacher(images), s)
            w = s.distill_weight
            losses = self.loss_scale * per_image_loss(by_labels, targets, self.weights, s)
            losses = (1 - w) * losses + w * distillation
        losses = losses * valid
        self.metrics.add_images(losses, correct_predictions(logits, self.labels[indices]), valid)
        return losses.mean()

    def _mixes(self) -> bool:
        """Whether mixup and cutmix are on at this step."""
        return self.step < (1 - self.settings.mixing_off) * self.steps

    # ---- metrics ----------------------------------------------------------------------------

    @property
    def seconds_left(self) -> float | None:
        """The time of the remaining steps and evaluations; None before the first step."""
        return self.clock.seconds_left(self.steps - self.step, self.evaluations_left)

    @property
    def evaluations_left(self) -> int:
        s, epoch = self.settings, self.step // self.steps_per_epoch
        evaluations = s.epochs // s.evaluate_every - epoch // s.evaluate_every
        return evaluations + (s.epochs % s.evaluate_every > 0 and epoch < s.epochs)

    def _progress(self) -> Progress:
        """Read the metrics from the device; raise Diverged if training has diverged."""
        loss, accuracy, _, _ = self.metrics.totals()
        self.metrics.check_divergence(self.data.train.names)
        return Progress(
            step=self.step,
            steps=self.steps,
            epoch=(self.step - 1) // self.steps_per_epoch,
            loss=loss,
            accuracy=accuracy,
            lr=lr_at(self.step - 1, self.steps, self.settings),
            images_per_second=self.clock.images_per_second,
            seconds_left=self.seconds_left,
        )

    def _end_epoch(self) -> dict[str, Any]:
        """The training metrics of the epoch that has ended."""
        self.executable.merge_lora()
        self.corrupt.reasons = self.ranks.union(self.corrupt.reasons)
        loss, accuracy, images, skipped = self.metrics.totals()
        if not images and self.corrupt.reasons:
            name, reason = next(iter(self.corrupt.reasons.items()))
            raise InputError(
                f"none of the training images could be read; {name}: {reason.rstrip('.')}. Check the files."
            )
        self.metrics.start_epoch()
        return {
            "step": self.step,
            "epoch": self.step // self.steps_per_epoch,
            "lr": lr_at(self.step - 1, self.steps, self.settings),
            "loss": loss,
            "accuracy": accuracy,
            "skipped_steps": skipped,
            "corrupt_files": len(self.corrupt.reasons),
        }

    # ---- checkpoints ------------------------------------------------------------------------

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that later steps depend on, not copied."""
        tensors = {
            "model": dict(self.trained.state_dict()),
            "optimizer": optimizer_tensors(self.optimizer, self.names),
        }
        if self.ema is not None:
            tensors["ema"] = dict(self.ema.state_dict())
        return tensors

    def state(self) -> Checkpoint:
        """Everything that later steps depend on. All processes must call it."""
        tensors = {**self._tensors(), "sums": self.metrics.state()}
        state = {"corrupt": self.ranks.union(self.corrupt.reasons), "scaler": self.scaler.state_dict()}
        return Checkpoint(self.step, tensors, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore what `state` returned."""
        self.step = checkpoint.step
        checkpoint.copy_into(self._tensors())
        self.corrupt.reasons = dict(checkpoint.state["corrupt"])
        if scale := checkpoint.state.get("scaler"):  # not if the run had another precision
            self.scaler.load_state_dict(scale)
        self.metrics.restore(checkpoint.tensors["sums"])
