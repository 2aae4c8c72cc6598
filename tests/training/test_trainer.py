"""Training steps: the loss, the parameter groups, the learning rate, and skipped steps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitrail as vt
from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    file_hashes,
    fingerprints,
    rows,
    stopped_and_resumed,
    train,
    without_dropout,
    write_arrays,
)
from vitrail.base.errors import ConfigError
from vitrail.images.formats.sources import Dataset, open_dataset
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.device import ComputeDevice, choose_device
from vitrail.training import checkpoint
from vitrail.training import input_pipeline as inputs
from vitrail.training import trainer as loop
from vitrail.training.epoch import Diverged, evaluate_epoch
from vitrail.training.optim import build_optimizer, lr_at, parameter_groups, set_lr
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

TINY = dict(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=3)


def build_trainer(data, model=None, **settings):
    data = data if isinstance(data, Dataset) else open_dataset(data)
    torch.manual_seed(0)
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    how = TrainConfig(**{"batch": 16, "epochs": 2, **settings})
    return Trainer(RunPlan(data, Recipe(model or ViTConfig(**TINY), spec, how), choose_device("fp32")))


def copies(model):
    """Copies of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- skipped steps -----------------------------------------------------------------------------


def broken_at(monkeypatch, steps, value=math.inf):
    """Make the loss of these steps NaN or infinite; return the weights before and after each step."""
    seen, take_step, real = {}, Trainer.take_step, loop.per_image_loss
    now = {}

    def per_image_loss(*args):
        losses = real(*args)
        return losses * value if now["step"] in steps else losses

    def step(self, batches):
        now["step"], before = self.step, copies(self.model)
        moments = checkpoint.optimizer_tensors(self.optimizer, self.names)
        before |= {name: value.clone() for name, value in moments.items()}
        take_step(self, batches)
        after = {**copies(self.model), **checkpoint.optimizer_tensors(self.optimizer, self.names)}
        seen[self.step - 1] = (before, {name: value.clone() for name, value in after.items()})

    monkeypatch.setattr(loop, "per_image_loss", per_image_loss)
    monkeypatch.setattr(Trainer, "take_step", step)
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_that_is_not_finite_is_skipped_and_counted(optimizer, value, data, tmp_path, monkeypatch):
    """The first step too, when the optimizer has no state yet; never three in a row."""
    bad = {0, 1, 3, 4, 7, 14}
    seen = broken_at(monkeypatch, bad, value)
    settings = {**SETTINGS, "optimizer": optimizer, "momentum": 0.9}
    train(data, out=tmp_path / "run", **settings)
    for step, (before, after) in seen.items():
        same = {name: torch.equal(before[name], after[name]) for name in before}
        if step in bad:
            assert all(same.values()), (step, [name for name in same if not same[name]])
        else:
            assert not same["head.weight"]
        assert all(value.isfinite().all() for value in after.values())
        assert all(value.abs().max() < 100 for value in after.values())
    assert [row["skipped_steps"] for row in rows(tmp_path / "run")] == [4, 1, 1]
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "run"))


@pytest.mark.parametrize(("bad", "saved"), [({2, 3, 4}, None), ({6, 7, 8}, 5), ({9, 10, 11, 12}, 10)])
def test_three_skipped_steps_in_a_row_end_the_run(bad, saved, data, tmp_path, monkeypatch):
    """Within an epoch of 5 steps, and across the end of one."""
    broken_at(monkeypatch, bad)
    out = tmp_path / "run"
    with pytest.raises(Diverged) as error:
        train(data, out=out, **SETTINGS)
    three = sorted(bad)[:3]
    assert "NaN or infinite 3 times in a row" in str(error.value)
    assert f"at steps {', '.join(map(str, three))}, whose images include train " in str(error.value)
    assert "last checkpoint is unchanged" in str(error.value)
    found, warnings = checkpoint.load_newest(out / "checkpoints")
    assert warnings == {}
    assert (found and found.step) == saved
    assert not found or all(value.isfinite().all() for value in found.tensors["model"].values())
    assert not (out / "last.safetensors").exists()


def test_skipped_steps_are_counted_across_a_restart(data, tmp_path, monkeypatch):
    """Two before it and one after it make three."""
    broken_at(monkeypatch, {5, 6, 7})
    with Signals(7), pytest.raises(loop.Interrupted):
        train(data, out=tmp_path, **SETTINGS)
    before = file_hashes(tmp_path, but=["log.txt"])
    with pytest.raises(Diverged, match="at steps 7"):
        train(data, out=tmp_path, resume=True, **SETTINGS)
    assert file_hashes(tmp_path, but=["log.txt"]) == before


# ---- micro-batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [2, 4])
def test_gradient_accumulation_gives_the_same_loss(accumulate, data, tmp_path):
    for parts in (1, accumulate):
        train(data, out=tmp_path / str(parts), **without_dropout(accumulate=parts))
    for one, other in zip(rows(tmp_path / "1"), rows(tmp_path / str(accumulate)), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-5)


def test_a_batch_larger_than_the_training_set(tmp_path):
    data = write_arrays(tmp_path / "few.npz", count=7, held_out=3)
    train(data, out=tmp_path / "run", **{**SETTINGS, "batch": 64, "accumulate": 1})
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert build_trainer(data, batch=64).batch == 6  # an even number, for pairs


def test_a_batch_that_cannot_be_divided_is_an_error(data, tmp_path):
    with pytest.raises(
        ConfigError, match=r"divisible by processes times accumulate.*pairs.* batch=6, 1 process "
    ):
        build_trainer(
            write_arrays(tmp_path / "few.npz", count=7),
            accumulate=2,
            batch=16,
            mixing=dict(mixup=1.0),
        )
    with pytest.raises(ConfigError, match="batch must be a multiple of accumulate"):
        TrainConfig(batch=16, accumulate=3)
    with pytest.raises(ConfigError, match="batch / accumulate must be even"):
        TrainConfig(batch=6, accumulate=2, mixing=dict(mixup=0.2))


def test_the_first_step_equals_one_by_hand(data):
    """Gradients of the mean loss, clipped, and torch's AdamW with our parameter groups."""
    trainer = build_trainer(data, clip=0.5, lr=0.01, warmup=0.0, weight_decay=0.1)
    split = trainer.data.train
    other = vt.ViT(ViTConfig(**TINY))
    other.load_state_dict(trainer.model.state_dict())
    order = loop.epoch_order(split, seed=0, epoch=0)[:16]
    x = torch.from_numpy(split.images[order.numpy()]).permute(0, 3, 1, 2).float() / 255
    loss = F.cross_entropy(other.train()((x - 0.5) / 0.5), torch.from_numpy(split.labels)[order])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    groups = [
        dict(params=[p for p in other.parameters() if p.ndim >= 2], weight_decay=0.1),
        dict(params=[p for p in other.parameters() if p.ndim < 2], weight_decay=0.0),
    ]
    without_decay = {id(p) for name, p in other.named_parameters() if name.startswith(("position", "prefix"))}
    groups[1]["params"] += [p for p in groups[0]["params"] if id(p) in without_decay]
    groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in without_decay]
    torch.optim.AdamW(groups, lr=0.01).step()
    reader = loop.Reader(split, trainer.preprocess)
    trainer.take_step(reader.batches(trainer.micro_batch_indices()))
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(
            dict(trainer.model.named_parameters())[name], parameter, rtol=1e-4, atol=1e-6
        )
    assert trainer.metrics.sums[0] / 16 == pytest.approx(loss.item(), rel=1e-5)


def test_a_checkpointed_block_is_computed_again_by_the_same_attention_kernels(data, monkeypatch):
    """Torch prefers cuDNN's on an H200; without the context in the backward pass, recomputing failed there."""
    trainer, seen = build_trainer(data, checkpoint_blocks=1), []
    on_gpu = ComputeDevice(torch.device("cuda"), torch.bfloat16, "").attention
    monkeypatch.setattr(ComputeDevice, "attention", lambda device: on_gpu())
    attention = trainer.executable.twin.blocks[0].attention
    forward = attention.forward

    def watched(*args, **more):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(*args, **more)

    attention.forward = watched
    batches = loop.Reader(trainer.data.train, trainer.preprocess).batches(trainer.micro_batch_indices())
    trainer.take_step(batches)
    assert seen == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_ema_of_the_weights(data):
    trainer = build_trainer(data, ema=0.9)
    batches = loop.Reader(trainer.data.train, trainer.preprocess).batches(trainer.micro_batch_indices())
    average = copies(trainer.model)
    for step in range(4):
        trainer.take_step(batches)
        decay = min(0.9, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * p for name, p in copies(trainer.model).items()}
    for name, parameter in trainer.ema.named_parameters():
        torch.testing.assert_close(parameter, average[name], rtol=1e-5, atol=1e-6)
        assert not parameter.requires_grad


# ---- parameter groups and learning rate --------------------------------------------------------


EVERY = dict(
    width=12, depth=3, heads=3, patch=4, size=8, channels=1, classes=3,
    pool="attention", layer_scale=0.1, registers=2, norm_pre=True, qk_norm=True,
)  # fmt: skip


def test_no_weight_decay_on_norms_biases_positions_prefix_probe_and_scales():
    model = vt.ViT(ViTConfig(**EVERY))
    names = {p: name for name, p in model.named_parameters()}
    found = parameter_groups(model, TrainConfig(weight_decay=0.3))
    by_decay = {g["weight_decay"]: {names[p] for p in g["params"]} for g in found}
    assert set(by_decay) == {0.0, 0.3}
    assert sum(len(g["params"]) for g in found) == len(names)
    assert all(name.endswith("weight") and "norm" not in name for name in by_decay[0.3])
    without_decay = ("bias", "norm", "position", "prefix", "probe", "scale")
    assert all(any(word in name for word in without_decay) for name in by_decay[0.0]), by_decay[0.0]
    for word in without_decay:
        assert any(word in name for name in by_decay[0.0]), word
    for start in ("tokens.", "blocks.0.attention.", "blocks.2.mlp.", "pool.", "head."):
        assert any(name.startswith(start) for name in by_decay[0.3]), start


def test_layer_wise_learning_rate_decay():
    model = vt.ViT(ViTConfig(**EVERY))
    factor = {
        name: g["factor"]
        for g in parameter_groups(model, TrainConfig(tune="llrd", layer_decay=0.5))
        for p in g["params"]
        for name, q in model.named_parameters()
        if q is p
    }
    assert len(factor) == len(list(model.parameters()))
    for name, found in factor.items():
        if name.startswith("blocks."):
            expected = 0.5 ** (3 - int(name.split(".")[1]))
        else:
            expected = 0.5**4 if name.startswith(("tokens", "prefix", "position", "norm_pre")) else 1.0
        assert found == expected, name
    assert {0.5**4, 0.5**3, 0.25, 0.5, 1.0} == set(factor.values())


def test_learning_rate_factors_reach_the_optimizer():
    model = vt.ViT(ViTConfig(**EVERY))
    optimizer = build_optimizer(model, TrainConfig(tune="llrd", layer_decay=0.5))
    set_lr(optimizer, 0.8)
    assert {g["lr"] for g in optimizer.param_groups} == {0.8 * 0.5**k for k in range(5)}


@pytest.mark.parametrize(
    ("tune", "is_trained"),
    [
        ("head", lambda name: name.startswith("head.")),
        ("bias", lambda name: name.startswith("head.") or name.endswith(".bias")),
    ],
)
def test_frozen_parameters_do_not_change_by_a_bit(tune, is_trained, data):
    trainer = build_trainer(data, tune=tune, weight_decay=0.5, lr=0.01, ema=0.9)
    first = copies(trainer.model)
    trainer.run()
    last = copies(trainer.model)
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {name for name in first if is_trained(name)}
    for name, parameter in trainer.ema.named_parameters():
        assert torch.equal(parameter, first[name]) == (name not in moved), name
    optimizer = checkpoint.optimizer_tensors(trainer.optimizer, trainer.names)
    assert {key.partition("/")[2] for key in optimizer} == moved


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        (dict(warmup=0.0), {0: 1.0, 50: 0.5, 99: 0.5 - 0.5 * math.cos(math.pi * 0.01)}),
        (dict(warmup=0.1), {0: 1 / 11, 9: 10 / 11, 10: 1.0, 55: 0.5}),
        (dict(warmup=0.0, schedule="linear"), {0: 1.0, 25: 0.75, 99: 0.01}),
        (dict(warmup=0.0, schedule="linear", last_lr=0.2), {0: 1.0, 50: 0.6, 99: 0.208}),
        (dict(warmup=0.0, schedule="constant"), {0: 1.0, 99: 1.0}),
        (dict(warmup=1.0), {0: 1 / 101, 99: 100 / 101}),
    ],
)
def test_the_learning_rate_schedule(settings, factors):
    how = TrainConfig(lr=2.0, **settings)
    for step, factor in factors.items():
        assert lr_at(step, 100, how) == pytest.approx(2 * factor), step
    rates = [lr_at(step, 100, how) for step in range(100)]
    assert max(rates) <= 2.0
    assert min(rates) > 0
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_learning_rate_of_a_run_of_one_step_is_not_zero():
    for warmup in (0.0, 0.5, 1.0):
        assert 0 < lr_at(0, 1, TrainConfig(lr=1.0, warmup=warmup)) <= 1


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs must be"),
        ("lr", -1, "lr must be above 0"),
        ("lr", math.nan, "lr must be above 0"),
        ("betas", (0.9, 1.0), "betas must be two numbers"),
        ("betas", ("a", "b"), "betas must be two numbers"),
        ("warmup", 1.5, "warmup must be from 0 to 1"),
        ("schedule", "cosin", "Did you mean 'cosine'"),
        ("smoothing", 1.0, "smoothing must be"),
        ("augment", 3, "augment must be Augment"),
        ("ema", 1.0, "ema must be above 0 and below 1"),
    ],
)
def test_invalid_settings_are_errors(field, value, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(epoch=3), "Did you mean 'epochs'"),
        (dict(model=dict(deph=1)), "Did you mean 'depth'"),
        (dict(model=5), "model must be a mapping"),
        (dict(augment=dict(flips=0.1)), "Did you mean 'flip'"),
        (dict(seed="x"), "seed must be"),
        (dict(learning_rate=3), "here it is called 'lr'"),
        (dict(model=dict(classes=7)), "the model has 7 classes .* the data 3 classes"),
        (dict(model=dict(channels=3)), "3 channels, and the data"),
        (dict(recipe="smal"), "Did you mean 'small'"),
        (dict(precision="bf16"), "needs a GPU"),
    ],
)
def test_invalid_changes_are_errors(changes, message, data, tmp_path):
    if "precision" in changes and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=message):
        train(data, out=tmp_path / "run", **changes)


def test_balanced_sampling_sees_every_class_equally_often(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.array([0] * 60 + [1] * 15 + [2] * 5)
    np.savez(tmp_path / "data.npz", images=rng.integers(0, 255, (80, 8, 8), dtype=np.uint8), labels=labels)
    trainer = build_trainer(open_dataset(tmp_path / "data.npz"), sampling="balanced", batch=6, epochs=5)
    train = trainer.data.train
    counts, seen = np.zeros(3, int), set()
    for _, indices in trainer.micro_batch_indices():
        some = np.bincount(train.labels[indices.numpy()], minlength=3)
        assert (some == 2).all()
        counts += some
        seen |= set(indices.tolist())
    assert len(set(counts)) == 1
    assert len(seen) > 0.8 * len(train)  # frequent classes take turns from epoch to epoch
    plain = build_trainer(open_dataset(tmp_path / "data.npz"), batch=6, epochs=5)
    first = torch.cat([i for epoch, i in plain.micro_batch_indices() if epoch == 0])
    assert len(first.unique()) == len(first) == 60  # each at most once, in complete batches


def test_mixing_is_off_at_the_end(data, monkeypatch):
    steps = []
    real = inputs.mix_batch
    trainer = build_trainer(data, epochs=2, mixing_off=0.3, mixing=dict(mixup=1.0))
    monkeypatch.setattr(
        inputs, "mix_batch", lambda *args, **how: steps.append(trainer.step) or real(*args, **how)
    )
    trainer.run()
    assert (trainer.steps, steps) == (10, list(range(7)))


# ---- from a weight file ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A timm file and a bundle, for five classes."""
    import safetensors.torch
    from timm.models.vision_transformer import VisionTransformer

    from tests.support.models import add_noise

    folder = tmp_path_factory.mktemp("weights")
    small = dict(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5, in_chans=1)
    theirs = add_noise(VisionTransformer(**small))
    safetensors.torch.save_file(theirs.state_dict(), folder / "timm.safetensors")
    bundle = vt.load(folder / "timm.safetensors", heads=2)
    bundle.save(folder / "ours.safetensors")
    return folder, bundle.model


@pytest.mark.parametrize(("file", "overrides"), [("timm", dict(heads=2)), ("ours", {})])
def test_from_a_weight_file_with_other_classes(file, overrides, weights, data, tmp_path, monkeypatch):
    folder, model = weights
    first = []
    real = Trainer.run
    monkeypatch.setattr(
        Trainer, "run", lambda self, *args: first.append(copies(self.model)) or real(self, *args)
    )
    callback = RecordingCallback()
    settings = dict(epochs=1, batch=16, lr=0.01, callback=callback, model=dict(drop_path=0.2, **overrides))
    run = train(data, out=tmp_path / "run", from_=folder / f"{file}.safetensors", **settings)
    before = copies(model)
    assert {name for name in before if not name.startswith("head.")} == {
        name
        for name in before
        if before[name].shape == first[0][name].shape and torch.equal(before[name], first[0][name])
    }
    assert first[0]["head.weight"].shape == (3, 16)
    assert not first[0]["head.weight"].any()
    assert any("The head for 5 classes was replaced" in note for note in callback.notes)
    assert run.bundle.model.config.drop_path == 0.2
    assert run.bundle.labels == ["0", "1", "2"]
    again = train(out=tmp_path / "run", resume=True)  # the run knows the file
    assert torch.equal(again.bundle.model.head.weight, run.bundle.model.head.weight)
    with pytest.raises(ConfigError, match=r"model\.depth"):
        train(out=tmp_path / "run", resume=True, model=dict(depth=3))


def test_with_the_same_classes_the_head_is_kept(weights, tmp_path, monkeypatch):
    folder, model = weights
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "five.npz",
        images=rng.integers(0, 255, (60, 8, 8), dtype=np.uint8),
        labels=np.arange(60) % 5,
    )
    first = []
    real = Trainer.run
    monkeypatch.setattr(
        Trainer, "run", lambda self, *args: first.append(copies(self.model)) or real(self, *args)
    )
    how = dict(from_=folder / "ours.safetensors", tune="full", epochs=1, batch=16)
    train(tmp_path / "five.npz", out=tmp_path / "run", **how)
    assert all(torch.equal(value, first[0][name]) for name, value in copies(model).items())


def test_a_run_from_a_weight_file_resumes_exactly(weights, data, tmp_path):
    folder, _ = weights
    how = dict(epochs=2, batch=16, from_=folder / "ours.safetensors", tune="llrd")
    train(data, out=tmp_path / "uninterrupted", **how)
    stopped_and_resumed(data, tmp_path / "run", 3, **how)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "uninterrupted")


# ---- evaluation --------------------------------------------------------------------------------


def test_evaluation_equals_torchs(data):
    trainer = build_trainer(data)
    trainer.run()
    found = evaluate_epoch(trainer.model, trainer.data.val, trainer.preprocess, trainer.compute)
    x = torch.from_numpy(trainer.data.val.images).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(trainer.data.val.labels)
    with torch.no_grad():
        logits = trainer.model.eval()((x - 0.5) / 0.5)
    assert found["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found["val_accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_one_process_evaluates_without_a_copy_of_all_logits_on_the_device(data):
    """Nothing comes back from a device without memory."""
    trainer = build_trainer(data)
    elsewhere = replace(trainer.compute, device=torch.device("meta"))
    found = evaluate_epoch(trainer.model, trainer.data.val, trainer.preprocess, elsewhere)
    assert found == evaluate_epoch(trainer.model, trainer.data.val, trainer.preprocess, trainer.compute)


def test_best_is_selected_on_val_and_is_the_last_where_there_is_only_a_test_set(data, tmp_path):
    run = train(data, out=tmp_path / "run", **{**SETTINGS, "epochs": 6, "lr": 0.05})
    scores = [row["val_accuracy"] for row in run.metrics]
    assert run.bundle.card.metrics["accuracy"] == max(scores)
    equal = [row for row in run.metrics if row["val_accuracy"] == max(scores)]
    assert run.bundle.card.metrics["epoch"] == min(equal, key=lambda row: row["val_loss"])["epoch"]
    found = open_dataset(data)
    only = replace(found, val=None, test=found.val)
    run = train(only, out=tmp_path / "other", **SETTINGS)
    ema = checkpoint.load_newest(tmp_path / "other" / "checkpoints")[0].tensors["ema"]
    assert all(torch.equal(value, ema[name]) for name, value in run.bundle.model.state_dict().items())
