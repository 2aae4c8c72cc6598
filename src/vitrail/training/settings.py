"""Everything a run is, besides its data: plain data that checks itself and travels with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.config import ViTConfig
from vitrail.data.augment import Augment
from vitrail.data.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.fields import Config, choice, declare, is_real, number, rate, show, switch, whole
from vitrail.preprocess import Preprocess

MOST_SEED = 2**63 - 1  # what torch takes
MOST_THREADS = 1024


def part(kind: type[Any], doc: str) -> Any:
    """A config inside a config; a mapping of its fields will do."""

    def check(name: str, value: Any, hint: Any) -> Any:
        if isinstance(value, dict):
            return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in value.items()})
        if not isinstance(value, kind):
            raise ConfigError(
                f"{name} must be {kind.__name__}.", f"{name}={show(value)}", f"Give {kind.__name__}(...)."
            )
        return value

    return declare(doc, check, kind())


def betas(doc: str) -> Any:
    def check(name: str, value: Any, hint: Any) -> tuple[float, ...]:
        good = (
            isinstance(value, (tuple, list))
            and len(value) == 2
            and all(is_real(beta) and 0 <= beta < 1 for beta in value)
        )
        if not good:
            raise ConfigError(
                f"{name} must be two numbers from 0 to 1.", f"{name}={show(value)}", "Such as 0.9, 0.95."
            )
        return tuple(float(beta) for beta in value)

    return declare(doc, check, (0.9, 0.999))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """A run: how long, how fast, how regularised, and what is done to the pictures."""

    # ---- how long
    epochs: int = whole("How many times every picture is seen", most=1_000_000, default=50)
    batch: int = whole("Pictures in one step, over all processes", default=64)
    accumulate: int = whole("Parts that a step is computed in, one after the other", default=1)

    # ---- the optimizer
    optimizer: Literal["adamw", "sgd"] = choice("AdamW, or SGD with momentum", default="adamw")
    lr: float = number("The highest learning rate", "above 0 and at most 100", lambda x: 0 < x <= 100, 1e-3)
    betas: tuple[float, ...] = betas("How long AdamW's two means remember")
    momentum: float = rate("SGD's momentum")
    weight_decay: float = number(
        "Decay of matrices; norms, biases, positions and prefix have none",
        "from 0 to 10",
        lambda x: 0 <= x <= 10,
        0.05,
    )
    schedule: Literal["cosine", "linear", "constant"] = choice(
        "How the rate falls after the warm-up", default="cosine"
    )
    warmup: float = number(
        "Share of the steps over which the rate rises", "from 0 to 1", lambda x: 0 <= x <= 1, 0.1
    )
    last_lr: float = number(
        "The last rate, as a share of the highest", "from 0 to 1", lambda x: 0 <= x <= 1, 0.0
    )
    clip: float = number(
        "The longest that a gradient may be; 0 for no limit", "at least 0", lambda x: x >= 0, 1.0
    )
    ema: float | None = number(
        "How much of itself the mean of the weights keeps at each step; no mean when not given",
        "above 0 and below 1",
        lambda x: 0 < x < 1,
        None,
    )

    # ---- what is learned
    tune: Literal["full", "llrd", "lora", "head", "bias"] = choice(
        "What learns: everything; everything, earlier blocks more slowly; head and updates of low rank to "
        "q, k and v; the head, on a frozen encoder (a linear probe); biases and head",
        default="full",
    )
    layer_decay: float = number(
        "With llrd, each block's rate as a share of the next one's",
        "above 0 and at most 1",
        lambda x: 0 < x <= 1,
        0.75,
    )
    lora_rank: int = whole("With lora, the rank r of each update", default=8)
    lora_alpha: float = number(
        "With lora, updates are multiplied with alpha / r", "above 0", lambda x: x > 0, 16.0
    )
    loss: Literal["cross-entropy", "bce"] = choice(
        "One class or several at a time (bce)", default="cross-entropy"
    )
    smoothing: float = rate("Share of the target that is spread over all classes")
    class_weights: Literal["none", "balanced"] = choice(
        "Whether rare classes count more in the loss", default="none"
    )
    sampling: Literal["shuffle", "balanced"] = choice(
        "Whether every class is seen equally often", default="shuffle"
    )

    # ---- from a teacher
    distill: Literal["none", "hard", "soft"] = choice(
        "What is learned of a teacher: nothing; the class it would name; how sure it is of each. hard "
        "where there is a teacher and nothing is said",
        default="none",
    )
    distill_weight: float = number(
        "The teacher's share of the loss; the labels have the rest",
        "above 0 and at most 1",
        lambda x: 0 < x <= 1,
        0.5,
    )
    distill_temperature: float = number(
        "With soft, what both answers are divided by", "above 0", lambda x: x > 0, 3.0
    )

    # ---- the pictures
    augment: Augment = part(Augment, "How pictures are changed at random")  # noqa: RUF009
    mixing: Mixing = part(Mixing, "How pictures are mixed with each other")  # noqa: RUF009
    calm: float = rate("Share of the last steps without mixing")
    corrupt: Literal["error", "skip", "warn"] = choice(
        "What to do about a file that cannot be read: stop; leave it out, and say how many; or leave it "
        "out and name it",
        default="error",
    )

    # ---- the machine
    seed: int = whole("Where all chance comes from", least=0, most=MOST_SEED, default=0)
    workers: int = whole("Threads that decode files", least=0, most=MOST_THREADS, default=2)
    precision: Literal["auto", "fp32", "bf16"] = choice(
        "bf16 on a GPU that has it, fp32 elsewhere, or as said", default="auto"
    )
    compile: bool = switch("Whether torch.compile makes the model faster first", default=False)

    # ---- the run
    keep: int = whole("Checkpoints that stay", default=2)
    save_every: int = whole("Epochs between checkpoints", default=1)
    evaluate_every: int = whole("Epochs between evaluations", default=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % (2 * self.accumulate) and (self.mixing.mixup or self.mixing.cutmix):
            raise ConfigError(
                "Mixing needs parts of a batch that hold pairs: batch / accumulate must be even.",
                f"batch={self.batch}, accumulate={self.accumulate}",
                "Change batch or accumulate.",
            )
        if self.batch % self.accumulate:
            raise ConfigError(
                "accumulate must divide batch.", f"{self.accumulate} and {self.batch}", "Change one."
            )


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs besides its data."""

    model: ViTConfig
    preprocess: Preprocess
    train: TrainConfig
    scaled: tuple[float, int] | None = None
    """(rate, batch): `lr` is this at this batch, and in proportion at others, unless it is given."""
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model that a weight file's model gets too, such as the size it is fine-tuned at."""
    from_file: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `train` that are others where a weight file is the start: it has learned already."""
    notes: tuple[str, ...] = ()
    """What was decided on the way, a sentence each."""
