"""No telemetry: commands open no connection, and write nothing but their output.

Each runs in a process that the kernel kills when it uses the network (tests/support/no_network.py), with an
empty home folder and an environment that enables telemetry. Of our environment variables only PATH is passed
on: ONNX Runtime sends nothing in a CI system, and the test would pass for that reason.
"""

import ast
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail as vt
from tests.support import no_network
from tests.support.models import add_noise
from vitrail.base import telemetry
from vitrail.base.errors import MissingExtra
from vitrail.cli import app

ROOT = Path(__file__).parents[2]
XDG = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")
ENABLE_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "0",
    "HF_HUB_DISABLE_TELEMETRY": "0",
    "MLFLOW_DISABLE_TELEMETRY": "false",
}
LOOK_UP = "import socket; socket.getaddrinfo('vitrail.invalid', 80)"
PHOTO = "photos/test/cat/0.png"
WAIT = 75  # seconds; without the switch, ONNX Runtime looks up its collector after nine

pytestmark = pytest.mark.skipif(
    (sys.platform != "linux" or platform.machine() not in no_network.NUMBERS) and "CI" not in os.environ,
    reason="the guard needs Linux on x86-64 or arm64, and this is not CI",
)

# Runs several commands, each with the original environment, and writes a line of JSON after each.
COMMANDS = """
import json, os, sys
before = dict(os.environ)
from bench.peers import make_torchvision_importable
from vitrail.cli import app
make_torchvision_importable()  # so that timm and transformers can be imported by `convert`
for words in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update(before)
    code = 0
    try:
        app(words)
    except SystemExit as stop:
        code = stop.code
    hub = sys.modules.get("huggingface_hub.constants")
    with open(sys.argv[2], "a") as report:
        print(json.dumps([words[0], code, hub and hub.HF_HUB_DISABLE_TELEMETRY]), file=report)
"""


class Guard:
    """Runs Python without network and with an empty home folder, and lists what was written there."""

    def __init__(self, folder):
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir(parents=True)
        self.work.mkdir(exist_ok=True)
        folders = {"TMPDIR": self.home / "tmp", **{name: self.home / name.lower() for name in XDG}}
        for folder in folders.values():
            folder.mkdir()
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
        self.env = {name: str(folder) for name, folder in folders.items()} | {
            **{"HOME": str(self.home), "USER": "nobody", "PATH": os.environ["PATH"], "PYTHONPATH": path},
            **{"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **ENABLE_TELEMETRY},
        }

    def start(self, *arguments, **variables):
        """Start Python with these arguments and environment variables, and pipes for its output."""
        command = [sys.executable, no_network.__file__, sys.executable, *map(str, arguments)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, cwd=self.work, env={**self.env, **variables}, **pipes)

    def run(self, *arguments, timeout=300, **variables):
        """Exit code, stdout and stderr of a finished process."""
        with self.start(*arguments, **variables) as child:
            output = child.communicate(timeout=timeout)
        return child.returncode, *output

    def vitrail(self, *arguments):
        """The output of a `vitrail` command, which must succeed."""
        code, out, error = self.run("-m", "vitrail", *arguments)
        assert code == 0, f"{'it used the network' if code == -signal.SIGSYS else code}: {error}"
        return out

    def written(self):
        """Files in the home folder, except matplotlib's font list, and names in the working folder."""
        home = [str(file.relative_to(self.home)) for file in self.home.rglob("*") if not file.is_dir()]
        home = [
            name for name in home if not re.fullmatch(r"xdg_cache_home/matplotlib/fontlist-.*\.json", name)
        ]
        return sorted(home), sorted(file.name for file in self.work.iterdir())


@pytest.fixture
def guard(tmp_path):
    return Guard(tmp_path)


def toy(folder):
    """Write a model of two classes and images of them to a folder."""
    bundle = vt.Bundle(model=add_noise(vt.create("mu/4", classes=2)), labels=["cat", "dog"])
    bundle.save(folder / "toy.safetensors")
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        for label in bundle.labels:
            (folder / "photos" / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (36, 40, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / split / label / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The toy model exported to ONNX by the command, and the guard that it ran under."""
    guard = Guard(tmp_path_factory.mktemp("exported"))
    toy(guard.work)
    guard.vitrail("export", "toy.safetensors", "--to", "onnx", "--out", "toy.onnx")
    return guard


def served(child, photo, seconds=0.0):
    """The status of a prediction after some seconds, and the exit code of the server."""
    address = next(line for line in child.stdout if "http://" in line)
    port = int(address.split("http://")[1].split(":")[1].split()[0].strip("/."))
    time.sleep(seconds)
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/predict", photo.read_bytes(), {"Content-Type": "image/png"})
    status = connection.getresponse().status
    connection.close()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    return status, child.returncode


# ---- the guard itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reach",
    [
        LOOK_UP,
        "import socket; socket.socket().connect(('192.0.2.1', 443))",
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 53))",
        f"import threading; threading.Thread(target=exec, args=({LOOK_UP!r},)).start()",
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {LOOK_UP!r}]))",
    ],
    ids=["look-up", "connect", "datagram", "thread", "child"],
)
def test_the_guard_kills_what_reaches_out(reach, guard):
    assert abs(guard.run("-c", reach)[0]) in (signal.SIGSYS, 256 - signal.SIGSYS)


def test_the_guard_sees_onnxruntime_without_the_switch(guard):
    """Otherwise the tests below would prove nothing."""
    assert guard.run("-c", "import onnxruntime")[0] == 0
    assert any(name.endswith("/deviceid") for name in guard.written()[0])


# ---- the commands --------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands(guard, tmp_path):
    toy(guard.work)
    solution = ROOT / "tests" / "course" / "exercises" / "solution.py"
    model, photos, photo = "toy.safetensors", "photos", PHOTO
    commands = [
        ["info", model],
        ["verify", model],
        ["doctor", photos],
        ["predict", model, photo],
        ["evaluate", model, photos, "--html", "evaluation.html"],
        ["walk", model, photo],
        ["inspect", model, photo, "--out", "figures", "--only", "attention"],
        ["train", photos, "--epochs", "1", "--out", "run", "--log", "mlflow,tensorboard"],
        ["plan"],
        ["pack", photos, "photos.pack"],
        ["sweep", photos, "--trials", "2", "--epochs", "2", "--out", "sweep"],
        ["export", model, "--to", "torch-export"],
        ["export", model, "--to", "html"],
        ["check", str(solution)],
        ["notes"],
        ["lab", "activation", "--small"],
        ["embed", model, photos, "--out", "index.safetensors"],
        ["search", "index.safetensors", photo, "--model", model],
        ["probe", model, photos, "--save", "probe.safetensors"],
        ["lab", "characters", "--small", "--save", "characters.safetensors"],
        ["generate", "characters.safetensors", "the", "--length", "5"],
        ["bench", model, "--precision", "fp32", "--batch", "1"],
        ["convert", model, "hf", "--to", "hf"],
        ["convert", model, "timm", "--to", "timm"],
    ]
    separate = {"serve", "demo"}  # in tests of their own
    registered = {command.callback.__name__ for command in app.registered_commands}
    assert {words[0] for words in commands} | separate == registered
    report = tmp_path / "report"
    code, out, error = guard.run("-c", COMMANDS, json.dumps(commands), report)
    done = [json.loads(line) for line in report.read_text().splitlines()]
    expected = [[words[0], 0, True if words[0] in ("bench", "convert") else None] for words in commands]
    assert [code, done] == [0, expected], error
    assert " ".join(out.split()).count("itself, on the golden inputs") == 2  # so both libraries were loaded
    inputs, outputs = ["photos", "toy.safetensors"], ["classroom.html", "evaluation.html", "figures", "hf"]
    outputs += ["index.safetensors", "probe.safetensors", "characters.safetensors", "lab-characters"]
    outputs += ["lab-activation", "model.pt2", "model.pt2.proof.json", "photos.pack", "run", "sweep", "timm"]
    home, work = guard.written()
    assert work == sorted(inputs + outputs)
    assert set(home) <= {
        "xdg_cache_home/vitrail/fast/fastest.json"
    }  # what `bench` measured, if nothing else ran


def test_export_to_onnx(exported):
    files = ["photos", "toy.onnx", "toy.onnx.proof.json", "toy.safetensors"]
    assert exported.written() == ([], files)


def test_predict_with_onnx(exported, guard):
    rows = guard.vitrail("predict", exported.work / "toy.onnx", exported.work / "photos", "--format", "csv")
    assert rows.count(".png,") == 12
    assert guard.written() == ([], [])


def test_serve_with_onnx(exported, guard):
    with guard.start("-m", "vitrail", "serve", exported.work / "toy.onnx", "--port", "0") as child:
        assert served(child, exported.work / PHOTO) == (200, 0)
    assert guard.written() == ([], [])


@pytest.mark.slow
def test_a_server_that_runs_for_a_while(exported, guard):
    with guard.start("-m", "vitrail", "serve", exported.work / "toy.onnx", "--port", "0") as child:
        assert served(child, exported.work / PHOTO, WAIT) == (200, 0)
    assert guard.written() == ([], [])


@pytest.mark.slow
def test_without_the_switch_onnxruntime_reaches_out(guard):
    code, *_ = guard.run("-c", f"import time, onnxruntime; time.sleep({WAIT})")
    assert code == -signal.SIGSYS


@pytest.mark.slow
def test_demo(guard):
    guard.vitrail("demo", "--epochs", "1")
    assert guard.written() == ([], ["runs"])


# ---- the switches --------------------------------------------------------------------------------


def test_telemetry_is_disabled_in_libraries_that_are_already_imported(monkeypatch):
    from huggingface_hub import constants

    onnxruntime, calls = telemetry.import_onnxruntime(), []
    monkeypatch.setattr(onnxruntime, "disable_telemetry_events", lambda: calls.append(1))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    for name in telemetry.SWITCHES:
        monkeypatch.setenv(name, "0")
    telemetry.import_onnxruntime()
    assert calls == [1]
    assert constants.HF_HUB_DISABLE_TELEMETRY is True
    assert telemetry.SWITCHES.items() <= os.environ.items()


def test_without_onnxruntime_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match=r"vitrail\[export\]"):
        telemetry.import_onnxruntime()


def importers(folder, packages):
    """Our files that import one of these packages, anywhere in the file."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if any(name in text for name in packages) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if packages & {name.split(".")[0] for name in names}:
                yield str(file.relative_to(ROOT))


def test_one_place_imports_onnxruntime():
    folders = ("src", "course", "bench", "docs", "tests")
    files = {name for folder in folders for name in importers(folder, {"onnxruntime"})}
    assert files == {"src/vitrail/base/telemetry.py"}


def test_imports_of_libraries_with_telemetry():
    """A new file must call disable_telemetry first, or be called by one that does; then add it here."""
    reporting = {"huggingface_hub", "hf_xet", "transformers", "timm", "onnxscript", "mlflow", "wandb", "ray"}
    families = {
        f"src/vitrail/weights/families/{name}.py" for name in ("hf", "timm")
    }  # called by convert.compare
    own = {
        "src/vitrail/exporters/onnx.py",
        "src/vitrail/weights/readers/hub.py",
        "src/vitrail/training/loggers.py",
    }
    own |= {"src/vitrail/predict/ray_engine.py", "src/vitrail/evaluation/speed.py"}
    own |= {"src/vitrail/fast/onnx_graph.py"}
    assert set(importers("src", reporting)) == own | families
    assert not set(importers("course", reporting))
    peers = {
        "bench/command_peers.py",
        "bench/folder_peers.py",
        "bench/peers.py",
        "bench/train_peers.py",
        "bench/transfer.py",
        "bench/predict.py",
    }  # they import peers
    assert set(importers("bench", reporting)) == peers


def test_security_page_names_every_switch_and_existing_tests():
    page = (ROOT / "SECURITY.md").read_text()
    assert all(name in page for name in telemetry.SWITCHES)
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).is_file(), (file, test)
