"""Parameter-efficient tuning: LoRA, and a linear probe on a frozen encoder."""

import pytest
import safetensors.torch
import torch

import vitrail as vt
from tests.support.models import add_noise
from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    fingerprints,
    rows,
    stopped_and_resumed,
    train,
    without_dropout,
)
from vitrail.base.errors import ConfigError
from vitrail.fast.lora import UPDATE, plain_model, with_lora
from vitrail.images.formats.sources import open_dataset
from vitrail.images.preprocess import Preprocess
from vitrail.model.attention import QKV
from vitrail.model.device import choose_device
from vitrail.training import checkpoint
from vitrail.training.optim import parameter_groups
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

TINY = dict(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=3)
LORA = TrainConfig(tune="lora", lora_rank=3, lora_alpha=6)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A weight file in which no parameter is zero."""
    torch.manual_seed(3)
    file = tmp_path_factory.mktemp("start") / "start.safetensors"
    vt.Bundle(model=add_noise(vt.ViT(vt.ViTConfig(**TINY))), labels=["0", "1", "2"]).save(file)
    return file


def build_trainer(data, **settings):
    torch.manual_seed(0)
    spec = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    drops = settings.pop("drops", {})
    how = TrainConfig(**{"batch": 16, "epochs": 2, "lr": 0.01, **settings})
    model = add_noise(vt.ViT(vt.ViTConfig(**TINY, **drops)))
    return Trainer(RunPlan(open_dataset(data), Recipe(model.config, spec, how), choose_device("fp32")), model)


# ---- LoRA: the update ---------------------------------------------------------------------------


def add_lora(model, settings=LORA):
    return with_lora(model, settings.lora_rank, settings.lora_alpha, settings.seed)


def model_with_lora(**config):
    """A model with LoRA, a copy of it without, and an input."""
    model = add_noise(vt.ViT(vt.ViTConfig(**{**TINY, **config})))
    base = vt.ViT(model.config).eval()
    base.load_state_dict(model.state_dict())
    model = add_lora(model)
    return model, base, torch.randn(4, *model.config.input_shape)


def test_lora_starts_as_the_original_model():
    model, base, x = model_with_lora()
    assert torch.equal(model(x), base(x))
    assert all(
        (type(part.weight), isinstance(part, QKV)) == (torch.Tensor, True)
        for name, part in model.named_modules()
        if name.endswith("qkv")
    )


def test_the_update_is_alpha_over_r_times_B_A_for_each_of_q_k_v():
    model, base, _ = model_with_lora()
    add_noise(model)
    for block, old in zip(model.blocks, base.blocks, strict=True):
        update = block.attention.qkv.parametrizations.weight[0]
        assert (update.A.shape, update.B.shape) == ((3, 3, 16), (3, 16, 3))
        original = block.attention.qkv.parametrizations.weight.original
        assert original.shape == old.attention.qkv.weight.shape
        for which in range(3):
            by_hand = original[16 * which : 16 * which + 16] + 6 / 3 * update.B[which] @ update.A[which]
            found = block.attention.qkv.weight[16 * which : 16 * which + 16]
            torch.testing.assert_close(found, by_hand)


def test_the_initial_values_depend_on_the_seed_alone():
    def first(seed):
        model = vt.ViT(vt.ViTConfig(**TINY))
        torch.rand(seed + 7)  # other random numbers do not matter
        model = add_lora(model, TrainConfig(tune="lora", seed=seed))
        return model.blocks[1].attention.qkv.parametrizations.weight[0].A

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    assert first(0).std().item() == pytest.approx(16**-0.5, rel=0.2)


@pytest.mark.parametrize(
    "config",
    [
        {},
        dict(qkv_bias="no-k", position="rotary", qk_norm=True),
        dict(head_width=4, position="relative", pool="mean"),
        dict(pool="attention", position="sincos2d"),
        dict(distillation_token=True, head="distilled"),
    ],
)
def test_the_merged_model_is_plain_and_has_the_same_logits(config):
    model, base, x = model_with_lora(**config)
    add_noise(model)
    plain = plain_model(model)
    assert list(plain.state_dict()) == list(base.state_dict())
    assert type(plain.blocks[0].attention.qkv) is QKV
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-5)
    assert (plain(x) - base(x)).abs().max() > 0.01
    before = model(x)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert torch.equal(model(x), before)  # it is a copy


# ---- LoRA: a run --------------------------------------------------------------------------------


def test_only_the_updates_and_the_head_are_trained(data):
    trainer = build_trainer(data, tune="lora", ema=0.9, weight_decay=0.5)
    first = {name: p.detach().clone() for name, p in trainer.trained.named_parameters()}
    trainer.run()
    moved = {name for name, p in trainer.trained.named_parameters() if not torch.equal(first[name], p)}
    assert moved == {name for name in first if UPDATE in name or name.startswith("head.")}
    assert len(moved) == 2 * 2 + 2
    assert moved == {n for n, p in trainer.ema.named_parameters() if not torch.equal(first[n], p)}
    tensors = checkpoint.optimizer_tensors(trainer.optimizer, trainer.names)
    assert {key.partition("/")[2] for key in tensors} == moved


def test_the_updates_have_weight_decay(data):
    trainer = build_trainer(data, tune="lora", weight_decay=0.3)
    found = {
        g["weight_decay"]: {trainer.names[p] for p in g["params"]}
        for g in parameter_groups(trainer.trained, LORA)
    }
    assert found[0.0] == {"head.bias"}
    decays = next(names for decay, names in found.items() if decay)
    assert {name.rpartition(".")[2] for name in decays} == {"A", "B", "weight"}


class PlanCallback(RecordingCallback):
    def on_plan(self, plan):
        self.plan = plan


def test_weight_files_of_a_run_are_plain(data, start, tmp_path):
    """They have no LoRA parameters, and the logits of the model in training."""
    callback, out = PlanCallback(), tmp_path / "run"
    train(
        data, out=out, from_=start, tune="lora", lora_rank=2, epochs=3, batch=16, ema=0.9, callback=callback
    )
    # each block's A (3, 2, 16) and B (3, 16, 2), and the head
    assert f", {2 * 192 + 51:,} of them trained" in callback.plan["parameters"]
    saved = checkpoint.load_newest(out / "checkpoints")[0].tensors
    x = torch.randn(5, 1, 8, 8)
    ordinary = list(vt.ViT(vt.ViTConfig(**TINY)).state_dict())
    base = vt.load(start).model
    for file, kind in (("best", "ema"), ("last", "model")):
        keys = safetensors.torch.load_file(out / f"{file}.safetensors")
        assert sorted(
            key for key in keys if not key.startswith(("golden/", "features/", "fingerprint/"))
        ) == sorted(ordinary)
        plain = vt.load(out / f"{file}.safetensors").model
        inside = add_lora(vt.ViT(plain.config).eval(), TrainConfig(tune="lora", lora_rank=2))
        inside.load_state_dict(saved[kind])
        if file == "last":  # best may be of an earlier epoch
            torch.testing.assert_close(plain(x), inside(x), rtol=0, atol=1e-5)
        state, old = plain.state_dict(), base.state_dict()
        moved = {name for name in state if not torch.equal(state[name], old[name])}
        assert moved == {n for n in ordinary if n.endswith("qkv.weight") or n.startswith("head.")}
    assert rows(out)[-1]["loss"] < rows(out)[0]["loss"]
    assert vt.evaluate(out / "last.safetensors", data).metrics.count == 30


@pytest.mark.parametrize("at", [7, "evaluate"])
def test_lora_resumes_exactly(at, data, tmp_path):
    """With EMA, dropout, accumulation and mixing."""
    how = {**SETTINGS, "tune": "lora", "lora_rank": 2, "epochs": 2}
    train(data, out=tmp_path / "uninterrupted", **how)
    stopped_and_resumed(data, tmp_path / "run", at, **how)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    ("field", "value"), [("lora_rank", 0), ("lora_rank", 1.5), ("lora_alpha", 0), ("lora_alpha", "x")]
)
def test_invalid_lora_settings_are_errors(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be"):
        TrainConfig(**{field: value})


# ---- a frozen encoder ---------------------------------------------------------------------------

DROPS = dict(drop_path=0.5, dropout=0.3, attention_dropout=0.3, patch_dropout=0.5)


def test_a_frozen_encoder_has_no_dropout(data):
    """Whatever the model's dropout, the head is trained to the same bits."""
    heads = []
    for drops in ({}, DROPS):
        trainer = build_trainer(data, tune="head", drops=drops)
        first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.run()
        last = dict(trainer.model.named_parameters())
        assert {n for n in first if not torch.equal(first[n], last[n])} == {"head.weight", "head.bias"}
        heads.append(last)
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    loose = build_trainer(data, tune="bias", drops=DROPS)  # an encoder that is trained has dropout
    plain = build_trainer(data, tune="bias")
    for one in (loose, plain):
        one.run()
    assert not torch.equal(loose.model.head.weight, plain.model.head.weight)


def test_a_frozen_encoder_has_no_graph(data):
    trainer = build_trainer(data, tune="head", epochs=1, drops=DROPS)
    seen = []

    def hook(block, inputs, out):
        seen.append((block.training, out.requires_grad))

    trainer.model.blocks[-1].register_forward_hook(hook)
    trainer.run()
    assert seen == [(False, False)] * trainer.steps
    assert trainer.model.head.training


def test_a_linear_probe_resumes_exactly(data, start, tmp_path):
    how = without_dropout(from_=start, tune="head", epochs=2, model=dict(drop_path=0.4))
    train(data, out=tmp_path / "uninterrupted", **how)
    stopped_and_resumed(data, tmp_path / "run", 7, **how)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "uninterrupted")
