"""Models on the hub: requests, cache, and error messages.

The hub is a server in a thread. Its client reads its settings at import, so each fetch runs in a process of
its own.
"""

import json
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import vitrail as vt
from tests.support.hub_server import CARD, COMMAND, TOKEN, run_against, serve_hub
from tests.support.models import add_noise
from vitrail.base.errors import FileError, MissingExtra
from vitrail.weights.readers.folder import is_hub_name, license_of, open_model

pytestmark = pytest.mark.slow  # real processes

ASK = """
import json, sys, time
from vitrail.base.errors import VitrailError
from vitrail.weights.readers.hub import fetch_model

time.sleep = lambda seconds: None  # between retries of the client
answers = []
for name, offline in json.loads(sys.argv[1]):
    try:
        path, card = fetch_model(name, offline=offline)
        answers.append([str(path), card])
    except VitrailError as error:
        answers.append(f"{type(error).__name__}: {error}")
assert "torch" not in sys.modules
print(json.dumps(answers))
"""

LOAD = """
import json, sys, torch, vitrail as vt

bundle = vt.load(sys.argv[1])
with torch.no_grad():
    logits = bundle.model(torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32))
vt.convert(sys.argv[1], sys.argv[2], to="vitrail", offline=True)
print(json.dumps([logits.tolist(), bundle.card.license, bundle.card.source]))
"""


@pytest.fixture
def hub():
    with serve_hub() as server:
        yield server


@pytest.fixture
def run(hub, tmp_path):
    """Run Python against the stand-in, with a cache of its own. stderr holds only our messages."""

    def go(code, *arguments, fails=False, **more):
        stdout, stderr = run_against(hub, tmp_path / "hf", code, *arguments, fails=fails, **more)
        assert fails or re.fullmatch(r"(Downloading .* MB of hf:.*, once, into the cache .*\n)*", stderr)
        return re.sub(r"Downloading .*\n", "", stderr) if fails else stdout

    return go


@pytest.fixture
def ask(run):
    """Fetch names; returns a path and card fields for each, or the error message."""

    def go(*names, offline=False, **more):
        return json.loads(run(ASK, json.dumps([(name, offline) for name in names]), **more))

    return go


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    return add_noise(transformers.ViTForImageClassification(config))


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """A typical repository, with code that must not be downloaded."""
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_evil.EvilModel"}
    return {
        "README.md": CARD.encode(),
        "modeling_evil.py": b"raise SystemExit('run')",
        "config.json": json.dumps(config).encode(),
        "preprocessor_config.json": (folder / "preprocessor_config.json").read_bytes(),
        "model.safetensors": (folder / "model.safetensors").read_bytes(),
        "pytorch_model.bin": b"not requested",
        "tf_model.h5": b"not requested",
    }


NEEDED = ["README.md", "config.json", "preprocessor_config.json", "model.safetensors"]


# ---- downloads -----------------------------------------------------------------------------------


def test_a_model_is_fetched_once(hub, run, ask, model, files, tmp_path):
    commit = hub.add("owner/tiny", files)
    logits, license, source = json.loads(run(LOAD, "hf:owner/tiny", str(tmp_path / "own.safetensors")))
    assert hub.requested() == NEEDED  # neither the code nor the pickle
    with torch.no_grad():
        theirs = model(torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)).logits
    torch.testing.assert_close(torch.tensor(logits), theirs, atol=1e-5, rtol=1e-5)
    assert (license, source) == ("apache-2.0", f"hf:owner/tiny@{commit}")
    card = vt.load(tmp_path / "own.safetensors").card
    assert (card.license, card.source) == (license, source)

    hub.log.clear()
    [(folder, _)] = ask("hf:owner/tiny")
    assert Path(folder, "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.requested() == []
    assert hub.requested("HEAD") == ["README.md"]  # to see whether the model has changed


def test_offline_only_the_cache_is_used(hub, ask, files):
    commit = hub.add("owner/tiny", files)
    [missing] = ask("hf:owner/tiny", offline=True)
    assert missing.startswith("FileError: model.safetensors of hf:owner/tiny is not in the cache")
    assert "load it once without offline=True and HF_HUB_OFFLINE" in missing
    assert hub.log == []

    names = ["hf:owner/tiny", f"hf:owner/tiny@{commit}"]
    fetched = ask(*names)
    hub.log.clear()
    for how in ({"offline": True}, {"HF_HUB_OFFLINE": "1"}):
        *cached, missing = ask(*names, "hf:owner/tiny@v1", **how)
        assert cached == fetched
        assert "of hf:owner/tiny@v1 is not in the cache" in missing
    assert hub.log == []


def test_a_revision(hub, ask, files):
    now = hub.add("owner/tiny", files)
    then = hub.add("owner/tiny", {**files, "README.md": b"---\nlicense: mit\n---\n"}, "v1")
    assert now != then
    answers = ask("hf:owner/tiny", "hf:owner/tiny@v1", f"hf:owner/tiny@{then}", "hf:owner/tiny@v2")
    assert [card["source"] for _, card in answers[:3]] == [
        f"hf:owner/tiny@{one}" for one in (now, then, then)
    ]
    assert [card["license"] for _, card in answers[:3]] == ["apache-2.0", "mit", "mit"]
    assert answers[3].startswith("FileError: hf:owner/tiny@v2 has no such revision")


def test_a_pickle_only_if_there_is_nothing_else(hub, ask, model, files, tmp_path):
    torch.save(model.state_dict(), tmp_path / "w.bin")
    old = {"config.json": files["config.json"], "pytorch_model.bin": (tmp_path / "w.bin").read_bytes()}
    hub.add("owner/old", {**old, "x.safetensors": b"of something else"})
    [(folder, card)] = ask("hf:owner/old")
    assert hub.requested() == ["config.json", "pytorch_model.bin"]
    assert "license" not in card  # since there is no README.md
    assert vt.load(folder).model.config.classes == 5


def test_one_file_of_another_name(hub, ask, run, model, tmp_path):
    np.savez(tmp_path / "w.npz", **{name: value.numpy() for name, value in model.state_dict().items()})
    commit = hub.add(
        "owner/many", {"deep/er/w-1.0.npz": (tmp_path / "w.npz").read_bytes(), "b.py": b"", "b.pt": b""}
    )
    unnamed, wrong, (path, card) = ask(
        "hf:owner/many", "hf:owner/many/a.npz", "hf:owner/many/deep/er/w-1.0.npz"
    )
    assert (
        "hf:owner/many has no model.safetensors or pytorch_model.bin, but deep/er/w-1.0.npz, b.pt;" in unnamed
    )
    assert "such as hf:owner/many/deep/er/w-1.0.npz." in unnamed
    assert "hf:owner/many/a.npz has no a.npz, but deep/er/w-1.0.npz" in wrong
    assert hub.requested() == ["deep/er/w-1.0.npz"]
    assert card == {"source": f"hf:owner/many@{commit}/deep/er/w-1.0.npz"}
    assert ask(card["source"], offline=True) == [[path, card]]  # a source is a valid name
    facts = json.loads(
        run(COMMAND, "info", "--json", "--set", "heads=4", card["source"]).removesuffix("False\n")
    )
    assert (facts["source"], facts["classes"]) == (card["source"], 5)


def test_shards(hub, run, ask, model, files):
    state = list(model.state_dict().items())
    halves = {"a.safetensors": dict(state[::2]), "b.safetensors": dict(state[1::2])}
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    shards = {name: safetensors.torch.save(half) for name, half in halves.items()}
    hub.add(
        "owner/two",
        {
            "config.json": files["config.json"],
            "model.safetensors.index.json": json.dumps(index).encode(),
            **shards,
        },
    )
    [(folder, _)] = ask("hf:owner/two")
    assert hub.requested() == [
        "config.json",
        "model.safetensors.index.json",
        "a.safetensors",
        "b.safetensors",
    ]
    hub.log.clear()
    out = run(COMMAND, "info", "--offline", "hf:owner/two")
    assert "hf-vit" in out
    assert out.endswith("False\n")  # torch was not imported
    Path(folder, "b.safetensors").unlink()
    [answer] = ask("hf:owner/two", offline=True)
    assert "b.safetensors of hf:owner/two is not in the cache" in answer
    assert hub.log == []


def test_commands(hub, run, files, tmp_path):
    commit = hub.add("owner/tiny", files)
    out = run(COMMAND, "info", "hf:owner/tiny")
    assert out.endswith("False\n")  # torch was not imported
    assert f"hf:owner/tiny@{commit}" in out.replace("\n", "")
    assert "apache-2.0" in out
    out = str(tmp_path / "out")
    error = run(COMMAND, "convert", "hf:owner/other", out, fails=True)
    assert error.startswith("vitrail: hf:owner/other is not on the hub, or is private;")
    assert "`hf auth login`" in error
    error = run(COMMAND, "convert", "hf:owner/other", out, "--offline", fails=True)
    assert "of hf:owner/other is not in the cache" in error


def test_no_telemetry(hub, ask, files):
    """By default the client fetches a list of coding agents and reports ours; the other storage reports usage."""
    hub.add("owner/tiny", files)
    telemetry = {"HF_HUB_DISABLE_TELEMETRY": "0", "HF_XET_TELEMETRY_ENABLED": "1", "AI_AGENT": "somebody"}
    ask("hf:owner/tiny", **telemetry)
    assert all("/models/owner/tiny" in path or "/resolve/" in path for _, path in hub.log)
    assert not [agent for agent in hub.agents if "torch" in agent or "agent" in agent]

    hub.log.clear()
    hub.add("owner/other", files)
    hub.in_xet = "model.safetensors"
    ask("hf:owner/other", **telemetry)
    stores = {path.split("/")[2] for _, path in hub.log if path.startswith(("/v1/", "/v2/"))}
    assert stores == {"reconstructions"}  # the other client ran, and sent no "telemetry"


# ---- errors --------------------------------------------------------------------------------


def test_refusals_and_a_token(hub, ask, files):
    hub.closed = {
        "owner/a": (401, "GatedRepo"),
        "owner/b": (403, "GatedRepo"),
        "owner/c": (401, ""),
        "owner/d": (403, ""),
    }
    hub.closed["owner/broken"] = 503, ""
    for name in hub.closed:
        hub.add(name, files)
    *closed, broken, none = ask(*(f"hf:{name}" for name in hub.closed), "hf:owner/none", HF_TOKEN=TOKEN)
    for name, answer in zip("abcd", closed, strict=True):
        assert answer.startswith(f"FileError: hf:owner/{name} requires a license or a login;")
    assert "HTTP 503 for README.md of hf:owner/broken; try again later" in broken
    assert "hf:owner/none is not on the hub, or is private" in none
    assert f"Bearer {TOKEN}" in hub.tokens  # the client sent it; `run` checks that no message contains it


def test_no_network(hub, ask):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    [answer] = ask("hf:owner/tiny", HF_ENDPOINT=f"http://127.0.0.1:{port}")
    assert answer.startswith("FileError: The hub cannot be reached for hf:owner/tiny (Connect")
    assert "use only the cache with offline=True" in answer


def test_an_interrupted_download(hub, ask, files, tmp_path):
    hub.add("owner/tiny", files)
    hub.cut = "model.safetensors"
    [answer] = ask("hf:owner/tiny")
    assert answer.startswith("FileError: The download of model.safetensors of hf:owner/tiny is incomplete (")
    assert not list(tmp_path.rglob("model.safetensors"))
    [answer] = ask("hf:owner/tiny", offline=True)
    assert "model.safetensors of hf:owner/tiny is not in the cache" in answer
    hub.cut = ""
    [(folder, _)] = ask("hf:owner/tiny")
    assert Path(folder, "model.safetensors").read_bytes() == files["model.safetensors"]


def test_no_space(hub, run, files):
    hub.add("owner/tiny", files)
    full = (
        "import errno, os, huggingface_hub\n"
        "def download(*args, **more):\n"
        "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "huggingface_hub.hf_hub_download = download\n"
    )
    [answer] = json.loads(run(full + ASK, json.dumps([("hf:owner/tiny", False)])))
    assert "hf:owner/tiny (No space left on device for README.md); free some space" in answer


def test_an_index_that_lists_other_files(hub, ask, run, files):
    def index(name):
        return json.dumps({"weight_map": {"one": name}}).encode()

    for number, name in enumerate(["../evil", "/etc/passwd", "a/b.safetensors", "..\\evil", ""]):
        hub.add(f"owner/evil{number}", {"model.safetensors.index.json": index(name), name: b"evil"})
    answers = ask(*(f"hf:owner/evil{number}" for number in range(5)))
    assert all("must list weight files of its own folder" in answer for answer in answers)
    hub.add("owner/code", {"model.safetensors.index.json": index("evil.py"), "evil.py": b"evil"})
    assert "evil.py cannot be read: No such file" in run(COMMAND, "info", "hf:owner/code", fails=True)
    assert set(hub.requested() + hub.requested("HEAD")) == {"model.safetensors.index.json"}


INVALID_NAMES = [
    *(
        "hf:",
        "hf:a",
        "hf:../x",
        "hf:a/..",
        "hf:./x",
        "hf:a/b/c d",
        "hf:a/b/c",
        "hf:a/b/c.py",
        "hf:/a/b",
        "hf://a/b",
    ),
    *("hf:a/b@", "hf:a/b@..", "hf:a/b@../x", "hf:a/b@-x", "hf:a/b@x y", "hf:a/b@x/../y", "hf:a/b/../c.npz"),
    *(
        "hf:a/b//c.npz",
        "hf:a/b/c.npz\n",
        "hf:a/b\n",
        "hf:a/b?x",
        "hf:a/b#x",
        "hf:a/b%2e",
        "hf:a\\b",
        "hf:a/b/.npz",
    ),
    *(
        "hf:a/ü",
        "hf:a--b/c",
        "hf:a/b..c",
        "hf:a/b.git",
        "hf:-a/b",
        "hf:a/b.",
        "hf:a/" + "b" * 96,
        "hf:a/b@" + "c" * 999,
    ),
]


def test_invalid_names_are_refused_without_a_request(hub, ask):
    answers = ask(*INVALID_NAMES)
    assert all("is not the name of a model on the hub: hf:owner/name" in answer for answer in answers)
    assert answers[5].startswith("FileError: hf:a/b/c d is not the name")
    assert hub.log == []


def test_other_paths_are_not_fetched(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for path in ("x.safetensors", Path("folder"), "./hf:a/b"):
        assert not is_hub_name(path)
    with pytest.raises(FileError, match="hf:a is not the name"):
        open_model(Path("hf:a"))
    with pytest.raises(MissingExtra, match=r'install it with: pip install "vitrail\[hub\]"'):
        open_model(Path("hf:a/b"))


@pytest.mark.parametrize(
    ("text", "license"),
    [
        (CARD, "apache-2.0"),
        ("\ufeff---\r\nlicense: 'cc-by-nc-4.0'  # why\r\n---\r\n", "cc-by-nc-4.0"),
        ("---\nlicense: other\nlicense_name: dinov3-license\n---\n", "dinov3-license"),
        ('---\nlicense_name: "x"\nlicense: mit\n---\n', "mit"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\nother:\n  license: mit\n---\n", None),
        ("---\nlicense:\n---\n", None),
        ("---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ("", None),
    ],
)
def test_license(tmp_path, text, license):
    (tmp_path / "README.md").write_bytes(text.encode())
    assert license_of(tmp_path / "README.md").get("license") == license


def test_license_of_a_file_that_is_not_utf_8(tmp_path):
    (tmp_path / "README.md").write_bytes(b"---\n\xff\xfe\nlicense: mit\n---\n")
    assert license_of(tmp_path / "README.md") == {"license": "mit"}
    assert license_of(tmp_path / "none") == {}
