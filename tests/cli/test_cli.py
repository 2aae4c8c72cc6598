"""The command line: output, files, and errors. `vitrail demo` as the example."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

import vitrail
from tests.support.command import run_command


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, run_command("demo", "--epochs", "2", cwd=folder)


def test_version_and_help(tmp_path):
    assert run_command("--version", cwd=tmp_path).stdout == f"vitrail {vitrail.__version__}\n"
    done = run_command("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout
    assert "nothing is downloaded" in run_command("demo", "-h", cwd=tmp_path).stdout


def test_demo_prints_results_and_saves_files(short_demo):
    folder, done = short_demo
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("1,437", "360", "parameters", "151,114", "CPU", "2 epochs", "held-out digits"):
        assert text in done.stdout
    assert "Correct: the digit" in done.stdout
    assert "Wrong, most confident first" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    image = folder / "runs" / "demo" / "demo.png"
    assert image.read_bytes().startswith(b"\x89PNG")
    for name in ("demo.png", "report.html", "best.safetensors"):
        assert (folder / "runs" / "demo" / name).exists()
        assert f"runs/demo/{name}" in done.stdout


@pytest.mark.slow
def test_demo_is_reproducible(short_demo):
    folder, first = short_demo
    again = run_command("demo", "--epochs", "2", cwd=folder)
    other = run_command("demo", "--epochs", "2", "--seed", "1", cwd=folder)

    def result(done):
        return [line for line in done.stdout.splitlines() if "accuracy" in line]

    assert result(again) == result(first) != result(other)
    assert (folder / "runs" / "demo-2" / "demo.png").exists()  # nothing was overwritten
    assert (folder / "runs" / "demo-3" / "demo.png").exists()


def test_a_folder_with_files_is_refused_before_training(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    done = run_command("demo", "--out", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.match(r"vitrail: --out must name a new or empty folder.* is not empty.*omit --out", done.stderr)
    done = run_command("demo", "--out", "mine.txt", cwd=tmp_path)
    assert (done.returncode, "is not a folder" in done.stderr) == (2, True)
    done = run_command("demo", "--out", "mine.txt/below", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "mine.txt/below: Not a directory." in done.stderr
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
def test_wrong_use_is_exit_code_2_and_one_message(tmp_path, arguments, message):
    done = run_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_message(tmp_path):
    # No file may grow past 8 blocks, as if the disk ended there.
    limits = {"RLIMIT_FSIZE": 8 * 1024}
    done = run_command("demo", "--epochs", "1", "--out", "out", cwd=tmp_path, limits=limits)
    assert done.returncode == 2
    assert re.search("(could not|cannot) be (written|saved)", done.stderr)
    assert "Traceback" not in done.stderr
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left <= {"config.json", "environment.json", "log.txt", "metrics.jsonl", "checkpoints"}


@pytest.mark.slow
def test_interrupting_saves_a_checkpoint_and_prints_how_to_resume(tmp_path):
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
            if "parameters" in line:
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
    done = run_command(*again, cwd=tmp_path)
    assert re.search(r"seed.*\b1\b.*\b0\b|seed.*\b0\b.*\b1\b", done.stderr)  # the resumed run is the demo's


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path):
    command = f"'{sys.executable}' -m vitrail demo --epochs 1 --out out | head -3"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "to read digits" in done.stdout
    assert done.stderr == ""


def test_folder_names_with_markup_and_ascii_terminals(tmp_path):
    done = run_command("demo", "--epochs", "1", "--out", "x[old][/]y", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "x[old][/]y/demo.png" in done.stdout


@pytest.mark.slow
def test_a_folder_that_exists_may_be_another_runs(tmp_path):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert run_command("demo", "--epochs", "1", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["demo", "demo-2"]


def test_a_missing_extra_is_named(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('No module', name='sklearn')")
    done = run_command("demo", "--out", "out", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "sklearn" in done.stderr
    assert 'pip install "vitrail[train]"' in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_bug_is_one_message_and_a_traceback_on_demand(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ValueError('broken')")
    done = run_command("demo", "--out", "a", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert re.fullmatch("vitrail: ValueError: broken. .*bug in vitrail.*VITRAIL_DEBUG=1.*\n", done.stderr)
    done = run_command("demo", "--out", "b", cwd=tmp_path, PYTHONPATH=str(tmp_path), VITRAIL_DEBUG="1")
    assert "Traceback" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_message(tmp_path, buffered):
    """Also if Python would notice only at exit."""
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "vitrail", "notes", "--full"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith("vitrail: No space left on device.")
    assert done.stderr.count("\n") == 1


def test_a_course_of_another_version_does_not_stop_the_other_commands(tmp_path):
    """One whose command imports what this version does not have."""
    info = tmp_path / "other_course-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-course\nVersion: 9\n")
    (info / "entry_points.txt").write_text("[vitrail.commands]\nother = vitrail.no_such_module:other\n")
    done = run_command("--help", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "predict" in done.stdout
    assert "other" not in done.stdout.replace("another", "")
