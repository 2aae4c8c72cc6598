"""Users' key tables: complete or with a family, in the file's own names, with tensors to ignore."""

import json
import re

import pytest
import safetensors.torch
import torch
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner
from vit_pytorch import ViT

import vitrail as vt
from tests.support.bits import same_file
from tests.support.model_files import same_logits
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError, FileError
from vitrail.cli import app
from vitrail.weights.families.keys import REQUIRED, read_table

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
OWN = {  # our names, and names of no family
    "tokens.proj": "stem.conv",
    "blocks.{i}.norm1": "layer.{i}.ln_a",
    "blocks.{i}.attention.qkv": "layer.{i}.mix",
    "blocks.{i}.attention.out": "layer.{i}.join",
    "blocks.{i}.norm2": "layer.{i}.ln_b",
    "blocks.{i}.mlp.fc1": "layer.{i}.up",
    "blocks.{i}.mlp.fc2": "layer.{i}.down",
    "norm": "last",
    "head": "answer",
}
TIMMS = {"stem.conv": "patch_embed.proj", "ln_a": "norm1", "mix": "attn.qkv", "join": "attn.proj"}
TIMMS |= {"ln_b": "norm2", "up": "mlp.fc1", "down": "mlp.fc2", "last": "norm", "answer": "head"}
TABLE = [
    *([f"{theirs}.{kind}", f"{ours}.{kind}"] for ours, theirs in OWN.items() for kind in ("weight", "bias")),
    ["first", "prefix", "tokens"],
    ["positions", "position.table", "lead"],
]


def own_names(state):
    names = {"cls_token": "first", "pos_embed": "positions"}
    renamed = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        block = re.match(r"blocks\.(\d+)\.", name)
        inner = stem.removeprefix(block[0]) if block else stem
        mine = next((own for own, timms in TIMMS.items() if timms == inner), None)
        at = f"layer.{block[1]}.{mine}" if block else mine
        renamed[names.get(name) or f"{at}.{kind}"] = tensor
    return renamed


@pytest.fixture(scope="module")
def theirs():
    return add_noise(VisionTransformer(**SMALL))


@pytest.fixture
def path(theirs, tmp_path):
    safetensors.torch.save_file(own_names(theirs.state_dict()), tmp_path / "own.safetensors")
    return tmp_path / "own.safetensors"


# ---- without a family ----------------------------------------------------------------------------


def test_a_complete_table_needs_no_family(theirs, path, tmp_path):
    bundle = vt.load(path, keys=TABLE, heads=2)
    assert bundle.source.family == "keys"
    same_logits(bundle.model, theirs)
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="keys")
    same_file(path, tmp_path / "back.safetensors")


def test_a_complete_table_on_the_command_line(path, tmp_path):
    (tmp_path / "keys.json").write_text(json.dumps([*TABLE, ["decoder.*", None]]))
    done = CliRunner().invoke(
        app, ["info", str(path), "--keys", str(tmp_path / "keys.json"), "--set", "heads=2", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["family"].startswith("keys")


def test_blocks_may_be_named_one_by_one(theirs, path):
    rows = [
        [str(part).replace("{i}", str(block)) for part in row]
        for row in TABLE
        for block in (range(2) if "{i}" in row[0] else [0])
    ]
    same_logits(vt.load(path, keys=rows, heads=2).model, theirs)


@pytest.mark.parametrize("missing", [*REQUIRED])
def test_the_missing_rows_of_an_incomplete_table_are_named(path, missing):
    rows = [row for row in TABLE if row[1] != missing]
    with pytest.raises(FileError, match=f"no row for {re.escape(missing)}.*or give the family"):
        vt.load(path, keys=rows, heads=2)


def test_rows_for_tensors_that_are_not_in_the_file(path):
    rows = [["stem.kernel", row[1]] if row[1] == "tokens.proj.weight" else row for row in TABLE]
    with pytest.raises(
        FileError, match=r"has stem\.kernel for tokens\.proj\.weight, which is not in the file"
    ):
        vt.load(path, keys=rows, heads=2)
    spare = [*TABLE, ["layer.{i}.gain", "blocks.{i}.scale1.weight"]]
    assert any("layer.{i}.gain" in note for note in vt.load(path, keys=spare, heads=2).notes)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("position.table", "lead"), ("prefix", "tokens"), ("tokens.proj.weight", "patch_planes")],
)
def test_missing_layouts_are_named(theirs, tmp_path, name, layout):
    state = own_names(theirs.state_dict())
    state["stem.conv.weight"] = state["stem.conv.weight"].flatten(1)
    safetensors.torch.save_file(state, tmp_path / "flat.safetensors")
    keys = [[*row, "patch_planes"] if row[1] == "tokens.proj.weight" else row for row in TABLE]
    same_logits(vt.load(tmp_path / "flat.safetensors", keys=keys, heads=2).model, theirs)
    keys = [row[:2] if row[1] == name else row for row in keys]
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} must have . axes.*layout {layout}"):
        vt.load(tmp_path / "flat.safetensors", keys=keys, heads=2)


def test_a_vitrail_file_takes_no_table(path, tmp_path):
    vt.load(path, keys=TABLE, heads=2).save(tmp_path / "ours.safetensors")
    with pytest.raises(ConfigError, match="needs no key table"):
        vt.load(tmp_path / "ours.safetensors", keys=TABLE)


def test_a_table_with_a_family_of_other_shapes(path):
    with pytest.raises(ConfigError, match=r"layer\.0\.mix\.weight has the shape .*an axis for the"):
        vt.load(path, keys=TABLE, family="google")


# ---- in the file's own names --------------------------------------------------------------------


@pytest.fixture
def old(tmp_path):
    """vit-pytorch before version 0.10, whose names are respelled."""
    sizes = dict(
        image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=48, dim_head=16
    )
    state = add_noise(ViT(**sizes)).state_dict()
    spell = {".1.net.0.": ".1.fn.norm.", ".1.net.1.": ".1.fn.fn.net.0.", ".1.net.4.": ".1.fn.fn.net.3."}
    spell |= {".0.norm.": ".0.fn.norm.", ".0.to_qkv.": ".0.fn.fn.to_qkv.", ".0.to_out.": ".0.fn.fn.to_out."}
    spell |= {
        "to_patch_embedding.2": "to_patch_embedding.1",
        "transformer.norm": "mlp_head.0",
        "mlp_head.": "mlp_head.1.",
    }
    old = {}
    for name, tensor in state.items():
        if name.startswith(("to_patch_embedding.1", "to_patch_embedding.3")):
            continue
        new = next((name.replace(a, b) for a, b in spell.items() if a in name), name)
        old[new] = tensor[None] if name in ("cls_token", "pos_embedding") and tensor.ndim == 2 else tensor
    safetensors.torch.save_file(old, tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors", old


def test_a_table_uses_the_names_in_the_file(old, tmp_path):
    path, state = old
    expected = vt.load(path, heads=2, head_width=16)
    assert expected.source.family == "lucidrains-old"
    renamed = {name.replace("fn.fn.net.3", "fn.fn.last"): tensor for name, tensor in state.items()}
    safetensors.torch.save_file(renamed, tmp_path / "renamed.safetensors")
    # Rows for a name that is respelled, and one for an anchor of the family.
    keys = [
        [f"transformer.layers.{{i}}.1.fn.fn.last.{kind}", f"blocks.{{i}}.mlp.fc2.{kind}"]
        for kind in ("weight", "bias")
    ] + [["transformer.layers.{i}.0.fn.norm.weight", "blocks.{i}.norm1.weight"]]
    for family in ("lucidrains-old", None):
        bundle = vt.load(tmp_path / "renamed.safetensors", heads=2, head_width=16, family=family, keys=keys)
        same_logits(bundle.model, expected.model)
        assert not any("no such tensor" in note for note in bundle.notes)
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="lucidrains")
    same_file(tmp_path / "renamed.safetensors", tmp_path / "back.safetensors")


def test_a_row_for_one_tensor_of_a_prefixed_file(theirs, tmp_path):
    """The row has the full name in the file; the family's own names still have a prefix."""
    state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    state["module.stem"] = state.pop("module.patch_embed.proj.weight")
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    bundle = vt.load(tmp_path / "model.safetensors", keys=[("module.stem", "tokens.proj.weight")], heads=2)
    assert bundle.source.family == "timm"
    same_logits(bundle.model, theirs)


# ---- tensors to ignore --------------------------------------------------------------------------


@pytest.fixture
def larger(theirs, tmp_path):
    """An encoder inside a larger file, whose decoder has names like the encoder's."""
    state = theirs.state_dict()
    parts = {f"encoder.{name}": tensor for name, tensor in state.items()}
    parts |= {f"decoder.{name}": torch.full_like(tensor, 7.0) for name, tensor in state.items()}
    parts["temperature"] = torch.ones(1)
    safetensors.torch.save_file(parts, tmp_path / "larger.safetensors")
    return tmp_path / "larger.safetensors"


def test_tensors_to_ignore(theirs, larger, tmp_path):
    with pytest.raises(FileError, match="to ignore them"):
        vt.load(larger, heads=2)
    keys = [("decoder.*", None), ("temperature", None)]
    bundle = vt.load(larger, heads=2, keys=keys)
    same_logits(bundle.model, theirs)
    assert any("33 tensors" in note and "decoder." in note for note in bundle.notes), bundle.notes
    assert bundle.extras == {}
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="timm")
    back = safetensors.torch.load_file(tmp_path / "back.safetensors")
    assert set(back) == {f"encoder.{name}" for name in theirs.state_dict()}


def test_all_other_tensors_can_be_ignored(theirs, tmp_path):
    state = own_names(theirs.state_dict()) | {"text.weight": torch.ones(3), "temperature": torch.ones(1)}
    safetensors.torch.save_file(state, tmp_path / "more.safetensors")
    with pytest.raises(FileError, match=r"unknown tensors: temperature, text\.weight"):
        vt.load(tmp_path / "more.safetensors", keys=TABLE, heads=2)
    same_logits(vt.load(tmp_path / "more.safetensors", keys=[*TABLE, ("*", None)], heads=2).model, theirs)


def test_a_head_can_be_ignored(theirs, tmp_path):
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    bundle = vt.load(tmp_path / "timm.safetensors", keys=[("head.*", None)], heads=2)
    assert bundle.model.config.classes == 0


def test_a_pattern_that_matches_nothing_is_noted(larger):
    keys = [(["decoder.*", "temperature"], None), ("text.*", None)]
    assert any(
        "text.*, which matches no tensor" in note for note in vt.load(larger, heads=2, keys=keys).notes
    )


def test_the_old_name_of_a_layout():
    """Files of version 0.1 store "turned" for "transposed"."""
    assert read_table([("a", "head.weight", "turned")]) == read_table([("a", "head.weight", "transposed")])


@pytest.mark.parametrize("row", [("decoder.*", None, "lead"), ("decoder.{x}", None), (3, None), None])
def test_invalid_rows_to_ignore(row):
    with pytest.raises(ConfigError, match="row of keys"):
        read_table([row])
