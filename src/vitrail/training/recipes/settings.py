"""TrainConfig, all settings of a run, and Recipe, everything a run needs besides its data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.base.errors import ConfigError, setting, suggest
from vitrail.base.fields import (
    FOREIGN_NAMES,
    Config,
    as_integer,
    as_tuples,
    boolean,
    choice,
    declare,
    documented,
    integer,
    is_real,
    number,
    probability,
    short_repr,
    unknown_field,
)
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.images.holdout import VAL_FRACTION
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import check_workers
from vitrail.model.config import ViTConfig

MAX_SEED = 2**63 - 1  # what torch takes
_MAX_THREADS = 1024
LOGGERS = ("csv", "tensorboard", "mlflow", "wandb")


def _nested(kind: type[Any], doc: str) -> Any:
    """A config inside a config; a mapping of its fields is accepted too."""

    def check(name: str, value: Any, hint: Any) -> Any:
        if isinstance(value, dict):
            return kind(**as_tuples(value))
        if not isinstance(value, kind):
            cls = kind.__name__
            raise ConfigError(
                f"{name} must be {cls}(...) or a mapping of its fields, not {short_repr(value)}."
            )
        return value

    return declare(doc, check, kind())


def _betas(doc: str) -> Any:
    def check(name: str, value: Any, hint: Any) -> tuple[float, ...]:
        is_pair = (
            isinstance(value, (tuple, list))
            and len(value) == 2
            and all(is_real(beta) and 0 <= beta < 1 for beta in value)
        )
        if not is_pair:
            raise ConfigError(
                f"{name} must be two numbers, each at least 0 and below 1, such as 0.9, 0.95, not "
                f"{short_repr(value)}."
            )
        return tuple(float(beta) for beta in value)

    return declare(doc, check, (0.9, 0.999), "two numbers, each at least 0 and below 1")


def _auto_or_boolean(doc: str) -> Any:
    def check(name: str, value: Any, hint: Any) -> Any:
        if value != "auto" and not isinstance(value, bool):
            raise ConfigError(f'{name} must be "auto", True or False, not {short_repr(value)}.')
        return value

    return declare(doc, check, "auto", "`true`, `false`")


def _device(doc: str) -> Any:
    def check(name: str, value: Any, hint: Any) -> str:
        if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?|mps", value):
            return value
        raise ConfigError(f"{name} must be auto, cpu, cuda, cuda:N or mps, not {short_repr(value)}.")

    return declare(doc, check, "auto", "`auto`, `cpu`, `cuda`, `cuda:1`, `mps`")


def _loggers(doc: str) -> Any:
    def check(name: str, value: Any, hint: Any) -> tuple[str, ...]:
        names = value.split(",") if isinstance(value, str) else () if value is None else value
        if not isinstance(names, (tuple, list)):
            raise ConfigError(f"{name} must be names of loggers, such as csv, not {short_repr(value)}.")
        for one in names:
            if one not in LOGGERS:
                raise ConfigError(f"there is no logger {short_repr(one)}. {suggest(str(one), LOGGERS)}")
        return tuple(dict.fromkeys(names))

    return declare(doc, check, (), "names joined by commas: " + ", ".join(f"`{one}`" for one in LOGGERS))


@documented
@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """All settings of a run besides its model, preprocessing and data."""

    # ---- length
    epochs: int = integer("Passes over the training set", most=1_000_000, default=50)
    batch: int = integer("Images per optimizer step, over all processes", default=64)
    patience: int | None = integer(
        "Early stopping: end the run after this many epochs without a better validation accuracy; None "
        "trains to the end. The learning rate schedule is that of all epochs",
        default=None,
    )
    accumulate: int = integer("Micro-batches per step (gradient accumulation)", default=1)

    # ---- optimizer
    optimizer: Literal["adamw", "muon", "sgd"] = choice(
        "AdamW; Muon for the matrices of the blocks, with AdamW for the rest; or SGD with momentum",
        default="adamw",
    )
    lr: float = number("Peak learning rate", "above 0 and at most 100", lambda x: 0 < x <= 100, 1e-3)
    betas: tuple[float, ...] = _betas("Betas of AdamW, also where it is beside Muon")
    momentum: float = probability("Momentum of SGD")
    weight_decay: float = number(
        "Weight decay of matrices and kernels; norms, biases, position embedding and prefix tokens have none",
        "from 0 to 10",
        lambda x: 0 <= x <= 10,
        0.05,
    )
    schedule: Literal["cosine", "linear", "constant"] = choice(
        "Learning rate schedule after the warm-up", default="cosine"
    )
    warmup: float = number(
        "Fraction of the steps with linear warm-up", "from 0 to 1", lambda x: 0 <= x <= 1, 0.1
    )
    last_lr: float = number(
        "Final learning rate, as a fraction of the peak", "from 0 to 1", lambda x: 0 <= x <= 1, 0.0
    )
    clip: float = number(
        "Largest gradient norm (gradient clipping); 0 for no limit", "at least 0", lambda x: x >= 0, 1.0
    )
    ema: float | None = number(
        "Decay of the exponential moving average of the weights; None for no EMA",
        "above 0 and below 1",
        lambda x: 0 < x < 1,
        None,
    )

    # ---- what is trained
    tune: Literal["full", "llrd", "lora", "head", "bias"] = choice(
        "Trained parameters: all; all with layer-wise learning rate decay; low-rank updates of q, k and v "
        "and the head (LoRA); the head on a frozen encoder (linear probe); biases and the head",
        default="full",
    )
    layer_decay: float = number(
        "With llrd, the learning rate of each block as a fraction of the next block's",
        "above 0 and at most 1",
        lambda x: 0 < x <= 1,
        0.75,
    )
    lora_rank: int = integer("With lora, the rank r of each update", default=8)
    lora_alpha: float = number(
        "With lora, each update is multiplied by alpha / r", "above 0", lambda x: x > 0, 16.0
    )

    # ---- loss
    loss: Literal["cross-entropy", "bce"] = choice(
        "Cross-entropy, or binary cross-entropy (for multi-label data)", default="cross-entropy"
    )
    smoothing: float = probability(
        "Label smoothing s: the target of an image's class is 1 - s + s/K and that of the others s/K, with K "
        "classes; in multi-label data 1 - s/2 and s/2"
    )
    class_weights: Literal["none", "balanced"] = choice(
        "Weights of the classes in the loss, which is the weighted mean over the images of a step: equal, or "
        "inversely proportional to frequency",
        default="none",
    )
    sampling: Literal["shuffle", "balanced"] = choice(
        "Order of the images: shuffled, or with all classes equally often in each batch", default="shuffle"
    )
    shuffle_block: int | None = integer(
        "Shuffle blocks of this many consecutive images, and the images of 16 blocks at a time: for shards "
        "on spinning disks and object stores, which then read long runs. None shuffles all images",
        default=None,
    )

    # ---- distillation
    distill: Literal["none", "hard", "soft"] = choice(
        "Distillation from a teacher: none; hard, by its predicted class; soft, by its probabilities. With a "
        "teacher the default is hard",
        default="none",
    )
    distill_weight: float = number(
        "Weight of the distillation loss; the labels have the rest",
        "above 0 and at most 1",
        lambda x: 0 < x <= 1,
        0.5,
    )
    distill_temperature: float = number(
        "With soft distillation, the temperature of both softmaxes", "above 0", lambda x: x > 0, 3.0
    )

    # ---- images
    val_fraction: float = number(
        "Fraction of the images held out for validation, where the data has neither val nor test",
        "above 0 and below 1",
        lambda x: 0 < x < 1,
        VAL_FRACTION,
    )
    split_seed: int = integer(
        "Which images are held out: 0 chooses by their content, another number draws others",
        least=0,
        most=MAX_SEED,
        default=0,
    )
    native: bool = boolean(
        "Whether images of files keep their aspect ratio (NaViT): each is resized to at most as many whole "
        "patches as an image of the model's size has, and those of different shapes share a step without "
        "padding. The model file says so, and predict, evaluate, embed, search and serve follow it. Mixup "
        "and cutmix are off",
        default=False,
    )
    augment: Augment = _nested(Augment, "Data augmentation")  # noqa: RUF009
    mixing: Mixing = _nested(Mixing, "Mixup and cutmix")  # noqa: RUF009
    mixing_off: float = probability("Fraction of the steps, at the end, without mixup and cutmix")
    corrupt: Literal["error", "skip", "warn"] = choice(
        "What to do about a file that cannot be read: stop; skip it and report how many there are; or skip "
        "it and name it",
        default="error",
    )

    # ---- machine
    device: str = _device("Where to compute; auto is a GPU if one can be used, and the CPU otherwise")
    seed: int = integer(
        "Random seed of weights, order, augmentation and dropout", least=0, most=MAX_SEED, default=0
    )
    cache: bool = boolean(
        "Whether to decode and resize image files once, into the cache folder, as vitrail pack does",
        default=False,
    )
    workers: int | Literal["auto"] = declare(
        "Processes that decode files (threads for fewer than 400 images); auto chooses by the cores that "
        "this process may use, 0 decodes in the calling thread",
        lambda name, value, hint: check_workers(value),
        "auto",
        must="an integer from 0 to 1,024",
    )
    threads: int | Literal["auto"] = declare(
        "CPU threads that compute; auto is torch's own number, or fewer where a short rehearsal finds that "
        "clearly faster, and one beside a GPU. The number changes the last bits of a result",
        lambda name, value, hint: value if value == "auto" else as_integer(name, value, 1, _MAX_THREADS),
        "auto",
        must=f"an integer from 1 to {_MAX_THREADS:,}",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = choice(
        "Floating-point format; auto is bf16 on a GPU that supports it, fp16 with loss scaling on older ones "
        "with tensor cores (T4, V100), and fp32 elsewhere",
        default="auto",
    )
    compile: Literal["auto"] | bool = _auto_or_boolean(
        "Whether to compile the model with torch.compile; auto does on a GPU if the run is long enough"
    )
    cuda_graph: Literal["auto"] | bool = _auto_or_boolean(
        "Whether to capture the step as one CUDA graph; auto does on a GPU if it can"
    )
    residual: Literal["fp32", "bf16"] = choice(
        "Floating-point format of the residual stream in mixed precision", default="bf16"
    )
    parallel: Literal["auto", "ddp", "fsdp", "hsdp"] = choice(
        "How several processes share the model: a copy each (ddp); a shard of the weights, gradients and "
        "optimizer each (fsdp); shards within a machine and copies between machines (hsdp). auto is ddp "
        "while that fits in memory",
        default="auto",
    )
    checkpoint_blocks: int = integer(
        "Blocks, from the first, that keep only their input and compute the rest again for the gradient "
        "(activation checkpointing)",
        least=0,
        most=10_000,
        default=0,
    )

    # ---- run directory
    fingerprint: bool = boolean(
        "Whether run and model files record which images were trained on, so that an evaluation can tell",
        default=True,
    )
    log: tuple[str, ...] = _loggers("Loggers that get the rows of metrics.jsonl as well")
    keep: int = integer("Checkpoints to keep", default=2)
    save_every: int = integer("Epochs between checkpoints", default=1)
    evaluate_every: int = integer("Epochs between evaluations", default=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % (2 * self.accumulate) and (self.mixing.mixup or self.mixing.cutmix):
            raise ConfigError(
                f"batch / accumulate must be even with mixup or cutmix, which mix pairs of images; got "
                f"batch={self.batch} and accumulate={self.accumulate}. Change one of them."
            )
        if self.batch % self.accumulate:
            raise ConfigError(
                f"batch must be a multiple of accumulate; got batch={self.batch} and "
                f"accumulate={self.accumulate}. Change one of them."
            )
        self._check_native()

    def _check_native(self) -> None:
        """Images of different shapes cannot be mixed, shown to a teacher, or computed by one fixed graph."""
        excluded = {
            "mixing.mixup": self.mixing.mixup,
            "mixing.cutmix": self.mixing.cutmix,
            "distill": self.distill if self.distill != "none" else None,
            "compile": self.compile is True,
            "cuda_graph": self.cuda_graph is True,
        }
        for name, value in excluded.items():
            if self.native and value:
                raise ConfigError(
                    f"native and {name}={short_repr(value)} exclude each other, because the images of a step "
                    "differ in shape; remove one of the two."
                )


def unknown_setting(name: str) -> str:
    """The message for a name that is not a setting: what it is called here, or where it belongs."""
    own = list(TrainConfig.__dataclass_fields__)
    ours = FOREIGN_NAMES.get(name, name)
    parts: dict[str, type[Any]] = {"model": ViTConfig, "augment": Augment, "mixing": Mixing}
    for part, config in parts.items():
        if ours not in own and ours in config.__dataclass_fields__:
            return (
                f"TrainConfig has no field {name!r}; it is a setting of {part}: "
                f"{setting(f'{part}.{ours}', ...)}."
            )
    return unknown_field("TrainConfig", name, own)


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs besides its data."""

    model: ViTConfig
    preprocess: Preprocess
    train: TrainConfig
    lr_at_batch: tuple[float, int] | None = None
    """(lr, batch): the learning rate is `lr` at this batch size and proportional to it, unless given."""
    model_from_file: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `model` that also apply to the model of a weight file, such as the fine-tuning size."""
    train_from_file: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `train` that differ when the run starts from a weight file."""
    notes: tuple[str, ...] = ()
