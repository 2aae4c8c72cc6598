"""The command line: what it says, what it writes, and how it fails."""

import os
import signal
import subprocess
import sys
import time

import pytest

import vitrail


def vitrail_command(*arguments, cwd, **environment):
    """Run the command as a user would, in a terminal 80 columns wide without colour."""
    return subprocess.run(
        [sys.executable, "-m", "vitrail", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, vitrail_command("demo", "--epochs", "2", cwd=folder)


def test_version_and_help(tmp_path):
    assert vitrail_command("--version", cwd=tmp_path).stdout == f"vitrail {vitrail.__version__}\n"
    done = vitrail_command("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout
    assert "nothing is downloaded" in vitrail_command("demo", "-h", cwd=tmp_path).stdout


def test_demo_tells_its_story_and_writes_a_picture(short_demo):
    folder, done = short_demo
    assert (done.returncode, done.stderr) == (0, "")
    for word in (
        "1,437 to learn from, 360 to judge by",
        "parameters",
        "151,114",
        "cpu, ",
        "2/2 epochs",
        "held-out digits",
    ):
        assert word in done.stdout
    assert "Right: the digit, and where the model looked" in done.stdout
    assert "Wrong, the surest first" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    picture = folder / "runs" / "demo" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    for name in ("demo.png", "report.html", "best.safetensors"):
        assert (folder / "runs" / "demo" / name).exists()
        assert f"runs/demo/{name}" in done.stdout


def test_demo_is_the_same_every_time(short_demo):
    folder, first = short_demo
    again = vitrail_command("demo", "--epochs", "2", cwd=folder)
    other = vitrail_command("demo", "--epochs", "2", "--seed", "1", cwd=folder)

    def result(done):
        return [line for line in done.stdout.splitlines() if "result" in line]

    assert result(again) == result(first) != result(other)
    assert (folder / "runs" / "demo-2" / "demo.png").exists()  # and nothing was overwritten
    assert (folder / "runs" / "demo-3" / "demo.png").exists()


def test_a_folder_with_files_is_refused_before_training(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    done = vitrail_command("demo", "--out", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "vitrail: --out must be a new or an empty folder: nothing of yours is overwritten. "
        "Got ., which has files in it. Name another folder, or leave --out away.\n"
    )
    done = vitrail_command("demo", "--out", "mine.txt", cwd=tmp_path)
    assert (done.returncode, "which is a file" in done.stderr) == (2, True)
    done = vitrail_command("demo", "--out", "mine.txt/below", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "The system refused mine.txt/below: Not a directory." in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "No such command 'dmeo'"),
        (["demo", "--epochs", "0"], "should be greater than or equal to 1"),
        (["demo", "--epochs", "many"], "parse string as an integer"),
        (["demo", "--sede", "1"], "No such option: --sede"),
        (["demo", "extra"], "unexpected extra argument"),
    ],
)
def test_wrong_use_is_code_2_and_one_message(tmp_path, arguments, message):
    done = vitrail_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_in_a_sentence(tmp_path):
    # No file may grow past 8 blocks, as if the disk ended there.
    script = f"ulimit -f 8; exec '{sys.executable}' -m vitrail demo --epochs 1 --out out"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "must be written whole" in done.stderr
    assert "Traceback" not in done.stderr
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left <= {"config.json", "environment.json", "log.txt", "metrics.jsonl", "checkpoints"}


def test_interrupting_saves_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "vitrail", "demo", "--out", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run started in the background ignores the signal, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        for line in process.stdout:
            if "device" in line:
                break
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stderr) == (130, "vitrail: Stopped.\n")
    assert "vitrail train digits --recipe digits --epochs 50 --seed 0 --resume --out out" in stdout
    assert list((tmp_path / "out" / "checkpoints").iterdir())
    again = ["train", "digits", "--recipe", "digits", "--seed", "1", "--resume", "--out", "out"]
    done = vitrail_command(*again, cwd=tmp_path)
    assert "seed=1, and 0 in the run" in done.stderr  # it is the demo's run, and no other, that goes on


def test_a_reader_that_goes_away_gets_no_trace(tmp_path):
    command = f"'{sys.executable}' -m vitrail demo --epochs 1 --out out | head -3"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "learns to read digits" in done.stdout
    assert done.stderr == ""


def test_folder_names_are_shown_as_they_are_and_old_terminals_do(tmp_path):
    done = vitrail_command(
        "demo", "--epochs", "1", "--out", "x[old][/]y", cwd=tmp_path, PYTHONIOENCODING="ascii"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "x[old][/]y/demo.png" in done.stdout


def test_an_empty_folder_of_an_earlier_try_is_used_again(tmp_path):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert vitrail_command("demo", "--epochs", "1", cwd=tmp_path).returncode == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]


def test_a_missing_extra_is_named(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('No module', name='sklearn')")
    done = vitrail_command("demo", "--out", "out", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    said = 'the package sklearn. Got a Python without it. Install it with: pip install "vitrail[train]".'
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_bug_of_ours_is_a_sentence_and_a_trace_on_demand(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ValueError('broken')")
    done = vitrail_command("demo", "--out", "a", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert (
        done.stderr == "vitrail: ValueError: broken. This is a bug in vitrail; VITRAIL_DEBUG=1 shows where.\n"
    )
    done = vitrail_command("demo", "--out", "b", cwd=tmp_path, PYTHONPATH=str(tmp_path), VITRAIL_DEBUG="1")
    assert "Traceback" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no file that is always full")
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_cannot_be_written_is_a_sentence(tmp_path, buffered):
    """Also where Python would find out only when it shuts down."""
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "vitrail", "notes", "--markdown"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith("vitrail: The system refused: No space left on device.")
    assert done.stderr.count("\n") == 1
