"""The commands info, convert and verify; and hostile files through all three."""

import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from tests.support.command import run_command
from tests.support.hostile import hostile_files
from tests.support.models import add_noise

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)


def vitrail(*arguments, cwd, code=0):
    done = run_command(*arguments, cwd=cwd, columns=100)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A timm file, and the same model as a vitrail file."""
    folder = tmp_path_factory.mktemp("files")
    safetensors.torch.save_file(
        add_noise(VisionTransformer(**SMALL, reg_tokens=1)).state_dict(), folder / "timm.safetensors"
    )
    bundle = vt.load(folder / "timm.safetensors", heads=2)
    bundle.labels, bundle.card = ["ant", "bee", "cat", "dog", "eel"], vt.Card(license="MIT")
    bundle.save(folder / "ours.safetensors")
    return folder


def test_info(folder):
    output = vitrail("info", "timm.safetensors", "--set", "heads=2", cwd=folder).stdout
    for words in (
        "timm: timm's VisionTransformer",
        "width 32, depth 2, 2 heads, MLP 128, /8@32x32",
        "32,453",
        "short side to 35 by bicubic (Pillow)",
        "float32 33",
        "registers 1",
        "published for augreg",
        "exact GELU, eps 1e-6",
    ):
        assert words in output, words


def test_info_of_a_vitrail_file(folder):
    output = vitrail("info", "ours.safetensors", "--check", cwd=folder).stdout
    for words in ("vitrail: a vitrail file", "MIT", "ant, bee, cat, dog, eel", "NaN or infinity"):
        assert words in output
    facts = json.loads(vitrail("info", "ours.safetensors", "--json", cwd=folder).stdout)
    assert facts["parameters"] == 32453
    assert facts["labels"] == ["ant", "bee", "cat", "dog", "eel"]


def test_info_names_published_sizes(tmp_path):
    with torch.device("meta"):
        state = VisionTransformer(num_classes=1000).state_dict()
    small = {name: torch.zeros(tensor.shape, dtype=torch.float16) for name, tensor in state.items()}
    safetensors.torch.save_file(small, tmp_path / "b16.safetensors")
    facts = json.loads(vitrail("info", "b16.safetensors", "--json", cwd=tmp_path).stdout)
    assert facts["model"] == "B/16@224x224"
    assert facts["parameters"] == 86_567_656
    assert facts["notes"][0].startswith("Assumed 12 heads of width 64")


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "npz", "ours"])
def test_info_does_not_import_torch(folder, kind, tmp_path):
    state = VisionTransformer(**SMALL).state_dict()
    if kind == "pickle":
        torch.save(state, tmp_path / "file")
    elif kind == "npz":
        with open(tmp_path / "file", "wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in state.items()})
    else:
        name = "ours.safetensors" if kind == "ours" else "timm.safetensors"
        (tmp_path / "file").write_bytes((folder / name).read_bytes())
    options = [] if kind == "ours" else ["--set", "heads=2"]
    code = (
        "import sys; from vitrail.cli import app\n"
        f"try: app({['info', 'file', '--check', *options]!r})\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("False"), done.stdout + done.stderr
    assert "parameters" in done.stdout


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_check_finds_nan_and_infinity(bad, dtype, tmp_path):
    state = {name: tensor.to(dtype) for name, tensor in VisionTransformer(**SMALL).state_dict().items()}
    state["blocks.1.mlp.fc2.weight"][-1, -1] = bad
    safetensors.torch.save_file(state, tmp_path / "bad.safetensors")
    from typer.testing import CliRunner

    from vitrail.cli import app

    done = CliRunner().invoke(
        app, ["info", str(tmp_path / "bad.safetensors"), "--set", "heads=2", "--check", "--json"]
    )
    assert done.exit_code == 1
    assert json.loads(done.stdout)["NaN or infinity"] == ["blocks.1.mlp.fc2.weight"]


@pytest.mark.slow
def test_convert_prints_a_report(folder, tmp_path):
    from typer.testing import CliRunner  # in this process, where timm can be imported

    from vitrail.cli import app

    files = [str(folder / "ours.safetensors"), str(tmp_path / "out")]
    output = CliRunner().invoke(app, ["convert", *files, "--to", "timm"]).stdout
    assert "timm itself, on the golden inputs" in output
    assert "transformed               2 tensors" in output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    output = vitrail("convert", "out", "again.safetensors", "--classes", "7", cwd=tmp_path).stdout
    assert "note: The head for 5 classes was replaced by a new one for 7, all zero." in output
    assert "The logits agree." in vitrail("verify", "again.safetensors", cwd=tmp_path).stdout


def test_verify_detects_a_changed_file(folder, tmp_path):
    path = tmp_path / "changed.safetensors"
    tensors = safetensors.torch.load_file(folder / "ours.safetensors")
    with safetensors.safe_open(folder / "ours.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors["head.bias"] += 1
    safetensors.torch.save_file(tensors, path, metadata)
    assert "The logits do not agree." in vitrail("verify", path, cwd=tmp_path, code=1).stdout


WRONG = [
    (("info",), "Missing argument"),
    (("info", "nothing.safetensors"), "nothing.safetensors"),
    (("info", "empty"), "neither model.safetensors nor"),
    (("info", "notes.txt"), "notes.txt"),
    (("info", "timm.safetensors"), "number of heads"),
    (("info", "timm.safetensors", "--set", "heads"), "--set takes FIELD=VALUE"),
    (("info", "timm.safetensors", "--set", "haeds=2"), "Did you mean 'heads'?"),
    (("info", "timm.safetensors", "--set", "heads=two"), "heads"),
    (("info", "timm.safetensors", "--set", "heads=2", "--size", "big"), "--size must be a number or HxW"),
    (("info", "timm.safetensors", "--family", "tim"), "Did you mean 'timm'?"),
    (("info", "timm.safetensors", "--keys", "notes.txt"), "not valid JSON"),
    (("info", "timm.safetensors", "--keys", "keys.json"), "A row of keys is"),
    (("convert", "ours.safetensors", "timm.safetensors"), "already exists"),
    (("convert", "ours.safetensors", "out.npz", "--to", "tim"), "not a family that can be written"),
    (("convert", "ours.safetensors", "no/folder/x.safetensors"), "no/folder/x.safetensors"),
    (("convert", "ours.safetensors", "no/folder/x", "--to", "timm"), "cannot be written"),
    (("convert", "ours.safetensors", "x.safetensors", "--size", "30"), "not a multiple of the patch size"),
    (("verify", "timm.safetensors"), "number of heads"),
    (("verify", "mnist.safetensors"), "has no golden inputs"),
    (("verify", "nothing.safetensors"), "nothing.safetensors"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_wrong_use_is_explained(arguments, message, folder, tmp_path):
    for name in ("timm.safetensors", "ours.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    wide = VisionTransformer(**SMALL | dict(embed_dim=128)).state_dict()
    safetensors.torch.save_file(wide, tmp_path / "mnist.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not weights")
    (tmp_path / "keys.json").write_text('[["only one"]]')
    before = sorted(p.name for p in tmp_path.iterdir())
    done = vitrail(*arguments, cwd=tmp_path, code=2)
    assert message in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before


# All hostile files in one process with little memory; a crash or a hang fails the test.
RUN_ALL = """
import io, json, resource, sys, time
from contextlib import redirect_stderr, redirect_stdout
from vitrail import cli
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
def watch(event, arguments):
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        raise SystemExit(99)
sys.addaudithook(watch)
command, files = sys.argv[1], json.loads(sys.argv[2])
for turn, file in enumerate([files[0], *files]):  # the first once more, when all is imported
    more = [file + ".out.safetensors"] if command == "convert" else []
    sys.argv = ["vitrail", command, file, *more]
    output, start = io.StringIO(), time.process_time()
    with redirect_stderr(output), redirect_stdout(output):
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
    if turn:
        print(json.dumps([file, code, output.getvalue(), time.process_time() - start]))
print(json.dumps("torch" in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["info", "convert", "verify"])
def test_hostile_files_are_refused_by_every_command(command, tmp_path):
    files = {name: str(path) for name, path in hostile_files(tmp_path).items()}
    assert len(files) > 100
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, command, json.dumps(list(files.values()))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *rows, loaded_torch = map(json.loads, done.stdout.splitlines())
    assert len(rows) == len(files)
    for file, code, output, seconds in rows:
        assert code == 2, (file, output)
        assert "Traceback" not in output, file
        assert "\x1b" not in output, file
        assert seconds < 3, file  # some 0.3 s on an idle machine
    assert not loaded_torch
    assert not [path for path in tmp_path.rglob("*") if "canary" in path.name or ".out." in path.name]


def test_names_are_escaped(folder, tmp_path):
    state = safetensors.torch.load_file(folder / "timm.safetensors")
    state["\x1b[31mred\u202e<script>"] = torch.zeros(1)
    safetensors.torch.save_file(state, tmp_path / "odd\x1b[2J.safetensors")
    done = vitrail("info", "odd\x1b[2J.safetensors", "--set", "heads=2", cwd=tmp_path, code=2)
    assert "\x1b" not in done.stderr
    assert "\u202e" not in done.stderr
    assert r"odd\x1b[2J" in done.stderr


def test_hostile_labels_are_shown_as_text(folder, tmp_path):
    bundle = vt.load(folder / "ours.safetensors")
    bundle.labels = ["\x1b]0;owned\x07", "[red]x[/red]", "<b>", "\u202eevil", "=1+1"]
    bundle.save(tmp_path / "labels.safetensors")
    done = vitrail("info", "labels.safetensors", cwd=tmp_path)
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert "[red]x[/red]" in done.stdout
