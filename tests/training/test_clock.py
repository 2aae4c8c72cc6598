"""Time in messages and metrics: of an epoch, images per second, and what is left."""

import re
from datetime import datetime

import pytest

from tests.support.tiny_runs import SETTINGS, rows, stopped_and_resumed, train, write_arrays
from vitrail.training import callbacks as log_module
from vitrail.training import clock as clock_module
from vitrail.training import console_lines as console
from vitrail.training.callbacks import Progress, epoch_line, progress_line
from vitrail.training.clock import TIME_COLUMNS, Clock, Interval, format_seconds


@pytest.fixture
def passing(monkeypatch):
    """A clock that the test moves: passing(3) lets three seconds pass."""
    now = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def test_the_time_left_is_planned_again(passing):
    clock = Clock(images=10, eval_images=30)
    clock.start(0)
    assert clock.seconds_left(100, 1) is None
    passing(20)
    clock.trained(10)  # 2 s a step
    assert clock.images_per_second == 5
    assert clock.seconds_left(90, 2) == pytest.approx(180 + 2 * 2 / 3 * 3)  # an evaluation is guessed
    passing(7)
    clock.evaluated()
    assert clock.seconds_left(90, 2) == 180 + 14
    for step in range(20, 420, 10):  # the machine becomes four times as fast
        passing(5)
        clock.trained(step)
    assert clock.seconds_left(90, 0) == pytest.approx(45)


def test_an_epoch_is_measured_with_and_without_its_evaluation(passing):
    clock = Clock(images=10, eval_images=30)
    clock.epoch_seconds = 5.0  # before an interruption
    clock.start(0)
    passing(20)
    clock.trained(10)
    assert clock.end_training() == 5.0
    passing(7)
    clock.evaluated()
    time, seconds = clock.end_epoch()
    assert seconds == 32.0
    datetime.strptime(time, "%Y-%m-%dT%H:%M:%SZ")
    passing(40)
    clock.trained(20)
    assert (clock.end_training(), clock.end_epoch()[1]) == (2.5, 40.0)


def test_metrics_have_the_time(tmp_path):
    data = write_arrays(tmp_path / "data.npz")
    stopped_and_resumed(data, tmp_path / "run", 7, **SETTINGS)
    found = rows(tmp_path / "run")
    for row in found:
        assert set(TIME_COLUMNS) <= set(row)
        assert row["seconds"] > 0
        assert row["images_per_second"] > 0
    assert found[0]["seconds_left"] > 0
    assert found[-1]["seconds_left"] == 0
    assert [row["time"] for row in found] == sorted(row["time"] for row in found)
    stopped_and_resumed(data, tmp_path / "evaluating", "evaluate", **SETTINGS)
    assert all(row["images_per_second"] > 0 for row in rows(tmp_path / "evaluating"))


def test_lines_fit_in_80_columns():
    row = dict(epoch=100, loss=12.345, accuracy=0.5678, val_loss=1.234, val_accuracy=0.99)
    assert epoch_line(row) == "epoch 100  loss 12.345, accuracy 56.78%  held out 1.234, 99.00%"
    assert len(epoch_line({**row, "seconds": 41.2, "seconds_left": 495.0})) <= 84
    progress = Progress(1200, 77700, 2, 1.5, 0.5, 1e-3, 34.6, 500.0)
    assert progress_line(progress) == (
        "step 1,200 of 77,700, epoch 3: loss 1.500, accuracy 50.0%, 35 images/s, 8.3 min left"
    )
    assert [format_seconds(s) for s in (0.2, 89.4, 90, 116, 144, 599, 700, 7200)] == [
        *("1 s", "89 s", "1.5 min", "1.9 min", "2.4 min", "10.0 min", "12 min", "2.0 h")
    ]


def test_without_a_terminal_a_line_now_and_then(tmp_path, monkeypatch, capsys):
    data = write_arrays(tmp_path / "data.npz")
    for module, seconds in ((console, 0.0), (log_module, 0.0)):
        name = "_LINE_SECONDS" if module is console else "_PROGRESS_SECONDS"
        monkeypatch.setattr(module, name, seconds)
    with console.ConsoleCallback() as callback:
        train(data, out=tmp_path / "run", callback=callback, **SETTINGS)
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"step \d", line)]
    assert len(lines) == 3  # after each epoch of five steps; none of ten within one
    assert re.fullmatch(r"step 5 of 15, epoch 1: loss .+, accuracy .+%, .+ images/s, .+ left", lines[0])
    assert (tmp_path / "run" / "log.txt").read_text().count(" step 5 of 15, epoch 1: ") == 1
    with console.ConsoleCallback(brief=True) as callback:
        train(data, out=tmp_path / "brief", callback=callback, **SETTINGS)
    assert "step 5" not in capsys.readouterr().out


def test_lines_are_half_a_minute_apart(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: now[0])
    due, times = Interval(30), []
    for now[0] in range(0, 100, 7):
        times += [now[0]] * due()
    assert times == [35, 70]
