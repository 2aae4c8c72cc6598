"""Surgery: each operation returns a new model and does not modify the old one."""

import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.model import surgery
from vitrail.model.resample import resize_grid

BASE = dict(width=16, depth=2, heads=2, patch=4, size=16, channels=3, classes=5)
ADDED = ["learned", "learned2d", "sincos1d", "sincos2d"]


def build(**fields):
    return add_noise(vt.ViT(vt.ViTConfig(**{**BASE, **fields})))


@pytest.fixture(autouse=True)
def old_model_is_not_modified(monkeypatch):
    """Check after each operation that the old model has the same tensors and config, shared with none."""
    for name in ("resize", "repatch", "reclass", "rechannel", "add_registers", "freeze"):
        operation = getattr(surgery, name)

        def checked(model, *args, operation=operation, **kwargs):
            before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            config, grads = model.config, [p.requires_grad for p in model.parameters()]
            new = operation(model, *args, **kwargs)
            assert new is not model
            assert model.config == config
            assert [p.requires_grad for p in model.parameters()] == grads
            assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
            assert not {t.data_ptr() for t in new.state_dict().values() if t.numel()} & {
                t.data_ptr() for t in model.state_dict().values() if t.numel()
            }
            return new

        monkeypatch.setattr(surgery, name, checked)


@pytest.mark.parametrize("position", [*ADDED, "rotary", "rotary-dinov3", "relative", "none"])
@pytest.mark.parametrize("rows", ["all", "patches"])
def test_resize_to_the_same_and_to_other_sizes(position, rows):
    model = build(position=position, rows=rows)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(surgery.resize(model, 16)(images), model(images))
        assert surgery.resize(model, (24, 12))(torch.randn(2, 3, 24, 12)).shape == (2, 5)
        there_and_back = surgery.resize(surgery.resize(model, 32, antialias=False), 16, antialias=False)
    assert there_and_back.config == model.config


def test_resize_resamples_the_rows_of_patches_only():
    model = build(registers=2)
    new = surgery.resize(model, (8, 24), method="bilinear", antialias=False)
    table, old = new.position.table, model.position.table
    assert torch.equal(table[:3], old[:3])
    expected = resize_grid(old[3:], (4, 4), (2, 6), method="bilinear", antialias=False)
    assert torch.equal(table[3:], expected)
    assert torch.equal(new.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight)


def test_a_relative_table_is_resampled_around_offset_zero():
    model = build(position="relative")
    table = model.blocks[0].attention.bias.table
    new = surgery.resize(model, (24, 32)).blocks[0].attention.bias.table  # 6 x 8 patches
    assert new.shape == (2, 11 * 15 + 3)
    assert torch.equal(new[:, -3:], table[:, -3:])
    smooth = torch.linspace(-1, 1, 7)[:, None].expand(7, 7).flatten()  # grows with rows down
    with torch.no_grad():
        table[:, :49] = smooth
    grown = surgery.resize(model, (24, 32)).blocks[0].attention.bias.table[0, :165].view(11, 15)
    assert grown[5].abs().max() < 1e-5  # offset zero
    assert (grown.diff(dim=0) > 0).all()


@pytest.mark.parametrize("head", ["linear", "tanh", "mlp"])
def test_reclass_replaces_the_head(head):
    model = build(head=head)
    new = surgery.reclass(model, 7)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert (new(images) == 0).all()
        assert torch.equal(new.encode(images).pooled, model.encode(images).pooled)
    assert [name for name in new.state_dict() if name.startswith("head")] == ["head.weight", "head.bias"]
    assert surgery.reclass(model, 0)(images).shape == (2, 16)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7, 13])
def test_rechannel_gives_the_same_logits_for_equal_channels(channels):
    model = build()
    gray = torch.randn(2, 1, 16, 16)
    new = surgery.rechannel(model, channels)
    with torch.no_grad():
        before, after = model(gray.expand(-1, 3, -1, -1)), new(gray.expand(-1, channels, -1, -1))
    assert (after - before).abs().max() < 1e-5


def test_rechannel_from_one():
    model = build(channels=1)
    gray = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        assert (surgery.rechannel(model, 3)(gray.expand(-1, 3, -1, -1)) - model(gray)).abs().max() < 1e-5


def test_repatch_gives_the_same_token_for_an_enlarged_patch():
    half = build(size=4, patch=4)
    small = torch.randn(2, 3, 4, 4)
    large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
    whole = surgery.repatch(half, 8, size=8)
    with torch.no_grad():
        assert (whole.tokens(large) - half.tokens(small)).abs().max() < 1e-4


def test_repatch_in_the_same_image_changes_the_grid():
    model = build(size=32, patch=8)
    assert surgery.repatch(model, 4).config.grid == (8, 8)
    oblong = surgery.repatch(model, (8, 16))
    assert oblong.config.grid == (4, 2)
    assert oblong(torch.randn(1, 3, 32, 32)).shape == (1, 5)


@pytest.mark.parametrize("rows", ["all", "class", "patches"])
def test_registers_are_added_after_the_prefix(rows):
    model = build(rows=rows, registers=1)
    new = surgery.add_registers(model, 3)
    images = torch.randn(2, 3, 16, 16)
    assert new.config.registers == 4
    assert torch.equal(new.prefix[:2], model.prefix)
    assert new.prefix[2:].std() > 0  # equal registers would stay equal
    enc = new.encode(images)
    assert enc.prefix.shape == (2, 5, 16)
    assert new(images).shape == (2, 5)
    with torch.no_grad(), vt.record(new, "embed") as tape:
        new(images)
    assert torch.allclose(tape["embed"][0, 2:5], new.prefix[2:])  # their position rows are zero


def test_registers_without_a_class_token():
    model = build(class_token=False, pool="mean")
    assert surgery.add_registers(model, 2).encode(torch.randn(1, 3, 16, 16)).prefix.shape == (1, 2, 16)


def test_freeze_by_pattern():
    frozen = surgery.freeze(build(), "blocks.*", "tokens.*")
    trainable = [name for name, parameter in frozen.named_parameters() if parameter.requires_grad]
    assert trainable == ["prefix", "position.table", "norm.weight", "norm.bias", "head.weight", "head.bias"]


def test_dtype_and_mode_do_not_change():
    model = build().double().train()
    new = surgery.resize(model, 24)
    assert new.training
    assert new.head.weight.dtype == torch.float64
    assert not surgery.resize(model.eval(), 24).training


@pytest.mark.parametrize(
    ("operation", "fields", "message"),
    [
        (lambda m: surgery.resize(m, 24), dict(position="pairwise"), r"cannot change from 4x4 to 6x6"),
        (lambda m: surgery.resize(m, 24), dict(pool="flatten"), r"cannot change from 16 to 36"),
        (
            lambda m: surgery.add_registers(m, 1),
            dict(position="relative"),
            r"add_registers does not work with position='relative'",
        ),
        (lambda m: surgery.rechannel(m, 1), dict(embedding="conv"), r"rechannel needs .*embedding='conv'"),
        (lambda m: surgery.repatch(m, 8), dict(embedding="conv"), r"repatch needs .*embedding='conv'"),
        (lambda m: surgery.freeze(m, "block.*"), {}, r"'block.\*' matches no parameter"),
    ],
)
def test_invalid_operations(operation, fields, message):
    with pytest.raises(vt.InputError, match=message):
        operation(build(**fields))


def test_resize_checks_the_size():
    with pytest.raises(vt.ConfigError, match="not a multiple of the patch size"):
        surgery.resize(build(), 18)
