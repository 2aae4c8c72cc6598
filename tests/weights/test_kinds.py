"""Which state dict of a file is read, and correct descriptions of other files."""

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

from vitrail.base.errors import FileError
from vitrail.cli import app
from vitrail.weights.load import load
from vitrail.weights.readers.files import open_weights, write_safetensors


def test_which_state_dict_of_several(tmp_path):
    """The first of the usual keys, and a note on the others; or the requested one."""
    held = {"student": {"w": torch.ones(1)}, "teacher": {"w": torch.zeros(1)}, "mine": {"v": torch.ones(2)}}
    torch.save(held | {"loss": torch.ones(1)}, tmp_path / "w")
    with open_weights(tmp_path / "w", "student") as file:
        assert (file.wrapper, file.tensor("w").item(), file.others) == ("student", 1, [])
    with open_weights(tmp_path / "w", "mine") as file:
        assert list(file.entries) == ["v"]
    with pytest.raises(FileError, match="no tensors under ema; its keys are: student, teacher, mine, loss"):
        open_weights(tmp_path / "w", "ema")
    torch.save(held, tmp_path / "w")
    with open_weights(tmp_path / "w") as file:
        assert (file.wrapper, file.others) == ("teacher", ["student"])
    write_safetensors(tmp_path / "s", {"w": torch.ones(1)})
    with pytest.raises(FileError, match="Leave out checkpoint_key"):
        open_weights(tmp_path / "s", "model")


USUAL = ["model", "state_dict", "model_state_dict", "model_state", "network", "net", "module", "weights"]
USUAL += ["teacher", "student", "model_ema", "state_dict_ema", "ema", "ema_state_dict"]


@pytest.mark.parametrize("key", USUAL)
def test_the_usual_keys(tmp_path, key):
    torch.save({"epoch": 3, key: {"w": torch.ones(1)}}, tmp_path / "w")
    with open_weights(tmp_path / "w") as file:
        assert (file.wrapper, list(file.entries), file.others) == (key, ["w"], [])


@pytest.mark.parametrize(
    ("key", "read", "note"),
    [
        (None, "model", "under model, model_ema; model was read"),
        ("model_ema", "model_ema", ""),
        ("model", "model", ""),
        ("mine", "mine", ""),
    ],
)
def test_a_model_and_its_average(tmp_path, key, read, note):
    model = VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    held = {}
    for number, name in enumerate(("model_ema", "mine", "model")):
        held[name] = {n: torch.full_like(tensor, number) for n, tensor in model.state_dict().items()}
    torch.save(held | {"epoch": 3, "loss": torch.ones(1)}, tmp_path / "run.pth")
    bundle = load(tmp_path / "run.pth", heads=2, checkpoint_key=key)
    assert bundle.model.head.bias[0] == list(held).index(read)
    assert (
        any(note in one for one in bundle.notes) if note else not any("was read" in n for n in bundle.notes)
    )
    more = ["--set", f"checkpoint_key={key}"] if key else []
    done = CliRunner().invoke(app, ["info", str(tmp_path / "run.pth"), "--set", "heads=2", *more])
    assert done.exit_code == 0, done.output
    assert ("was read" in " ".join(done.stdout.split())) == bool(note)


def test_a_tensor_beside_the_model_is_not_the_weights(tmp_path):
    held = {"model": {"v": torch.ones(1), "w": torch.ones(1)}, "best_accuracy": torch.tensor(0.9)}
    torch.save(held, tmp_path / "w")
    with open_weights(tmp_path / "w") as file:
        assert (file.wrapper, list(file.entries)) == ("model", ["v", "w"])


@pytest.mark.parametrize("length", [2**63 - 1, 2**63 - 16, 2**63 + 0x80, 2**64 - 1, 2**62, 2**40])
def test_a_header_of_impossible_length(tmp_path, length):
    (tmp_path / "w").write_bytes(length.to_bytes(8, "little") + b'{"a":1}')
    with pytest.raises(FileError, match=f"claims a header of {length:,} bytes"):
        open_weights(tmp_path / "w")


@pytest.mark.parametrize("text", ["caf\u00e9, 12 \u20ac\n", "eight...{json}"])
@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_text_is_recognized(tmp_path, text, encoding):
    (tmp_path / "w").write_bytes(text.encode(encoding))
    with pytest.raises(FileError, match="it is text"):
        open_weights(tmp_path / "w")


@pytest.mark.parametrize(
    ("images", "labels"), [("images", "labels"), ("x_train", "y_train"), ("train_images", "train_labels")]
)
def test_data_is_recognized(tmp_path, images, labels):
    arrays = {images: np.zeros((4, 8, 8, 3), np.uint8), labels: np.zeros(4, np.int64)}
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(
        FileError, match=f"holds data .{images} 4x8x8x3 uint8, {labels} 4 int64. and no weights"
    ):
        load(tmp_path / "data.npz")
    np.savez(tmp_path / "data.npz", **arrays | {labels: np.array(["ant", "bee"])})
    with pytest.raises(
        FileError, match=f"{labels} is not an array of plain numbers but of '<U3' .text."
    ) as error:
        load(tmp_path / "data.npz")
    assert "weight file" not in str(error.value)
