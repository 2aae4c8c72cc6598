"""vt.Predictor on an exported file: the predictions of the vitrail file; and files that are refused."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from PIL import Image

import vitrail as vt
from vitrail.base.errors import FileError, InputError
from vitrail.exporters.onnx import write_onnx
from vitrail.predict import Predictor
from vitrail.predict.onnx_file import EXPORT_KEY, MODEL_KEY
from vitrail.views.sample import SAMPLE_FILE, sample_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained, calibrated model as .safetensors and .onnx, and handwritten digits."""
    folder = tmp_path_factory.mktemp("exported")
    bundle = vt.load(SAMPLE_FILE)
    bundle.card = dataclasses.replace(bundle.card, metrics={"temperature": 2.5, "threshold": 0.8})
    bundle.labels = [f"digit {number}" for number in range(10)]
    bundle.save(folder / "model.safetensors")
    write_onnx(bundle, folder / "model.onnx")
    write_onnx(bundle, folder / "resizing.onnx", with_preprocess=True)
    (folder / "digits" / "more").mkdir(parents=True)
    for number, digit in enumerate(sample_images(10).pixels):
        image = Image.fromarray(digit[..., 0])
        larger = image.resize((41 + number, 37), Image.Resampling.BICUBIC) if number % 3 else image
        larger.save(folder / "digits" / ("more" if number > 6 else "") / f"{number}.png")
    (folder / "digits" / "broken.png").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("name", ["model.onnx", "resizing.onnx"])
def test_the_predictions_are_those_of_the_vitrail_file(name, folder):
    theirs = Predictor(folder / name, batch=4)
    ours = Predictor(folder / "model.safetensors", batch=4)
    assert (theirs.config, theirs.scale) == (ours.config, ours.scale)
    assert theirs.card.metrics == ours.card.metrics
    assert theirs.bundle is None
    pairs = list(zip(ours(folder / "digits"), theirs(folder / "digits"), strict=True))
    assert len(pairs) == 11
    for one, two in pairs:
        assert (two.name, two.label, two.unsure) == (one.name, one.label, one.unsure)
        assert (one.error is None) == (two.error is None)
        if one.error is None:
            assert two.score == pytest.approx(one.score, abs=1e-4)
            assert np.abs(two.logits - one.logits).max() < 1e-4
            assert np.abs(two.embedding - one.embedding).max() < 1e-4
            assert [label for label, _ in two.top(3)] == [label for label, _ in one.top(3)]
    assert {one.unsure for one, _ in pairs} == {True, False}  # both cases are covered
    image = Image.open(folder / "digits" / "1.png")
    for given in (image, np.asarray(image)[..., None], [image, image]):
        pairs = [one if isinstance(one, list) else [one] for one in (theirs(given), ours(given))]
        assert [(one.name, one.label) for one in pairs[0]] == [(one.name, one.label) for one in pairs[1]]


def test_unsupported_features_of_an_onnx_file_raise(folder):
    predict = Predictor(folder / "model.onnx")
    with pytest.raises(InputError, match=r"An ONNX file has no weights"):
        predict.explain(folder / "digits" / "1.png")
    with pytest.raises(InputError, match=r"takes no options.*model\.onnx.* size"):
        Predictor(folder / "model.onnx", size=56)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileError, match=r"none\.onnx: No such file"):
        Predictor(tmp_path / "none.onnx")


@pytest.mark.parametrize("name", ["x.pt2", "x.ts", "x.pkl"])
def test_files_with_programs_are_not_opened(name, tmp_path):
    with pytest.raises(FileError, match=r"run any code.*\.safetensors"):
        Predictor(tmp_path / name)


# ---- hostile files ------------------------------------------------------------------------------


def changed(data, change):
    model = onnx.ModelProto.FromString(data)
    change(model)
    return model.SerializeToString()


def set_metadata(model, key, value):
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = value(entry.value)


def described(change):
    """The description changed, as JSON."""

    def value(text):
        found = json.loads(text)
        change(found)
        return json.dumps(found)

    return lambda model: set_metadata(model, MODEL_KEY, value)


def external(model):
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../../etc/passwd"


def external_attribute(model):
    node = onnx.helper.make_node("Constant", [], ["spare"], value=onnx.helper.make_tensor("v", 1, [1], [0.0]))
    node.attribute[0].t.data_location = onnx.TensorProto.EXTERNAL
    model.graph.node.append(node)


def endless(model):
    body = onnx.helper.make_graph([], "body", [], [])
    model.graph.node.append(onnx.helper.make_node("Loop", ["", ""], ["x"], body=body))


def deep(model):
    graph = onnx.helper.make_graph([], "g", [], [])
    for _ in range(8):
        node = onnx.helper.make_node("If", ["c"], ["x"], then_branch=graph, else_branch=graph)
        graph = onnx.helper.make_graph([node], "g", [], [])
    model.graph.node.extend(graph.node)


def unlinked(model):
    model.graph.node[-1].input[0] = "nowhere"


def narrowed(model):
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([2**40, 2**40])


FORGED = {
    "not ours": (lambda m: m.ClearField("metadata_props"), "does not describe a vitrail model"),
    "half ours": (lambda m: m.metadata_props.pop(), "does not describe a vitrail model"),
    "external": (external, "are in another file"),
    "external attribute": (external_attribute, "are in another file"),
    "custom operator": (lambda m: setattr(m.graph.node[0], "domain", "evil"), "custom operators ('evil')"),
    "custom opset": (
        lambda m: m.opset_import.append(onnx.helper.make_opsetid("evil", 1)),
        "custom operators",
    ),
    "function": (lambda m: m.functions.append(onnx.FunctionProto(name="f")), "functions"),
    "loop": (endless, "'Loop' may run for ever"),
    "deep": (deep, "nested too deeply"),
    "no JSON": (lambda m: set_metadata(m, MODEL_KEY, lambda text: text[:-5]), "not valid JSON"),
    "takes what": (lambda m: set_metadata(m, EXPORT_KEY, lambda text: "[" * 100_000), ""),
    "newer": (described(lambda d: d.update(format=99)), "formats up to"),
    "config": (described(lambda d: d["config"].update(width="x" * 500)), "width"),
    "config list": (described(lambda d: d.update(config=[])), "no config"),
    "labels": (described(lambda d: d.update(labels=["\x1b[31m"])), "labels must be"),
    "metrics": (described(lambda d: d["card"].update(metrics=[1])), "metrics"),
    "no preprocessing": (described(lambda d: d.update(preprocess=None)), "no preprocessing"),
    "twice": (lambda m: m.metadata_props.append(m.metadata_props[0]), "twice"),
    "other channels": (
        described(
            lambda d: (d["config"].update(channels=3), d["preprocess"].update(mean=[0.5] * 3, std=[0.5] * 3))
        ),
        "do not match its config",
    ),
    "another input": (lambda m: setattr(m.graph.input[0], "name", "x"), ""),
    "broken graph": (unlinked, "ONNX Runtime reports"),
    "wrong shape": (narrowed, "ONNX Runtime reports"),
    "other classes": (
        described(lambda d: (d["config"].update(classes=7), d.update(labels=None))),
        "its outputs have shapes",
    ),
    "other size": (
        described(lambda d: (d["config"].update(size=[56, 56]), d["preprocess"].update(size=[56, 56]))),
        "ONNX Runtime reports",
    ),
}
CHILD = """
import sys
from vitrail.base.errors import FileError
from vitrail.predict import Predictor
import numpy as np
for path in sys.argv[1:]:
    try:
        predict = Predictor(path, workers=0)
        predict([np.zeros(predict.preprocess.target + (predict.config.channels,), np.uint8)])
        print("no error")
    except FileError as error:
        print("refused", str(error).replace("\\n", " "))
    except BaseException as error:
        print(type(error).__name__, error)
"""


def test_hostile_files_are_refused_without_a_crash(folder, tmp_path):
    """In a child process, whose exit code would show a crash."""
    good = (folder / "model.onnx").read_bytes()
    says = {name: words for name, (_, words) in FORGED.items()}
    files = {name: changed(good, change) for name, (change, _) in FORGED.items()}
    for cut in (0, 1, 7, 100, len(good) // 3, len(good) // 2, len(good) - 1):
        files[f"cut at {cut}"], says[f"cut at {cut}"] = good[:cut], ""
    files["text"], says["text"] = b"hello, this is no model\n", "not an ONNX file"
    files["number"], says["number"] = b"\xff" * 50, "not an ONNX file"
    paths = []
    for name, data in files.items():
        paths.append(tmp_path / f"{name.replace(' ', '_')}.onnx")
        paths[-1].write_bytes(data)
    (tmp_path / "folder.onnx").mkdir()
    os.mkfifo(tmp_path / "pipe.onnx")
    paths += [tmp_path / "folder.onnx", tmp_path / "pipe.onnx", tmp_path / "missing.onnx"]
    words = [*says.values(), "", "a pipe or a device", "No such file"]
    done = subprocess.run([sys.executable, "-c", CHILD, *paths], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths)
    for path, line, word in zip(paths, lines, words, strict=True):
        assert line.startswith("refused"), (path.name, line)
        assert word in line, (path.name, line)
        assert "\x1b" not in line


def test_the_command_accepts_it_and_refuses_explain(folder, tmp_path):
    def predict(*more):
        command = [
            sys.executable,
            "-m",
            "vitrail",
            "predict",
            folder / "model.onnx",
            folder / "digits" / "1.png",
        ]
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)

    done = predict("--format", "jsonl", "--embeddings", tmp_path / "e.npy")
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout)["label"]
        == Predictor(folder / "model.safetensors")(folder / "digits" / "1.png").label
    )
    assert np.load(tmp_path / "e.npy").shape == (1, 64)
    done = predict("--explain", tmp_path / "overlays")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "An ONNX file has no weights" in done.stderr
    assert not (tmp_path / "overlays").exists()
