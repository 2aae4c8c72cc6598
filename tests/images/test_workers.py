"""Worker processes: the same pixels in the same order, and a sentence for every way in which they can end."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny_runs import (
    SETTINGS,
    fingerprints,
    one_thread,
    stopped_and_resumed,
    train,
    write_folder,
)
from vitrail.base.errors import ConfigError, InputError
from vitrail.images import workers as workers_module
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.preprocess import Preprocess
from vitrail.images.worker_process import WorkerError
from vitrail.images.workers import (
    CHUNK,
    Task,
    WorkerPlan,
    Workers,
    check_workers,
    choose_workers,
    in_background,
)

__all__ = ["one_thread"]

SPEC = Preprocess(size=8)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched in /proc")


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images")


@pytest.fixture
def few_are_enough(monkeypatch):
    """Processes for a data set of any size."""
    monkeypatch.setattr(workers_module, "MIN_IMAGES", 1)


@pytest.fixture
def running():
    running = Workers(WorkerPlan("processes", 2, ""))
    yield running
    running.close()


def worker_pids(running):
    return [worker.process.pid for worker in running._processes]


def wait_until_gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.05)


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# ---- results -----------------------------------------------------------------------------------


def test_two_streams_share_the_workers_and_each_gets_its_pixels_in_order(folder, running):
    """Training is not disturbed by an evaluation in the middle of it, and takes up where it was."""
    split = open_dataset(folder).train
    (folder / split.names[5]).write_bytes(b"no image")

    def read(workers):
        corrupt = CorruptFiles("skip")
        reader = Reader(split, SPEC, augment=Augment(crop=0.3), workers=workers, corrupt=corrupt)
        other = Reader(split, SPEC, workers=workers, corrupt=CorruptFiles("skip"))
        everything = []
        requests = ((epoch, part) for epoch in range(2) for part in torch.arange(len(split)).split(21))
        for number, batch in enumerate(reader.batches(requests)):
            everything.append(batch)
            if number in (0, 2):
                everything += other.batches((0, part) for part in torch.arange(len(split)).split(40))
            if number == 3:
                next(other.batches([(0, torch.arange(30))]))  # never finished
        return everything, corrupt.reasons

    (found, reasons), (expected, same_reasons) = read(running), read(0)
    assert reasons == same_reasons
    assert list(reasons) == [split.names[5]]
    for one, other in zip_longest(found, expected):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.valid, other.valid)
    assert running.chunk == CHUNK < 21  # a batch is several tasks


def test_workers_are_light_and_have_one_thread_each(running):
    task = Task(eval, [("sorted(__import__('sys').modules)",), ("__import__('torch').get_num_threads()",)])
    ((modules, threads),) = running.map([task], 1)
    assert "vitrail.images.crop" in modules
    assert not {"vitrail.model", "vitrail.weights", "typer", "matplotlib"} & set(modules)
    assert threads == 1


@pytest.mark.parametrize("image_bytes", [0, 1, 100])
def test_results_of_every_kind_come_back(image_bytes):
    """In shared memory, or through a pipe where they are larger than expected; all can be kept and changed."""
    running = Workers(WorkerPlan("processes", 2, ""), image_bytes=image_bytes)
    block = CHUNK * image_bytes
    try:
        tasks = [Task(np.full, [((number, 40), number, np.uint8)] * 2) for number in range(100)]
        tasks += [Task(np.asfortranarray, [(np.arange(12, dtype=np.uint16).reshape(3, 4),)])]
        tasks += [Task(eval, [("'a reason'",), ("None",), ("(1, [2])",)])]
        *arrays, (turned,), others = running.map(tasks, 1)
        for number, (one, other) in enumerate(arrays):
            assert one.shape == other.shape == (number, 40)
            assert (one == number).all()
            other += 1
            assert (one == number).all()
        assert block == 0 or arrays[0][0].nbytes <= block < arrays[-1][0].nbytes
        assert turned.tolist() == np.arange(12).reshape(3, 4).tolist()
        assert others == ["a reason", None, (1, [2])]
        tasks = [Task(pow, [(number, 2), (number, 3)]) for number in range(40)]
        assert list(running.map(tasks, 1)) == [[n**2, n**3] for n in range(40)]
        assert list(running.map([], 1)) == []
    finally:
        running.close()


def test_an_error_in_a_worker_is_raised_with_its_traceback(running):
    with pytest.raises(ZeroDivisionError) as info:
        list(running.map([Task(divmod, [(1, 0)])], 1))
    assert "In a worker process" in info.value.__notes__[0]
    with pytest.raises(WorkerError, match="no memory left to decode an image; use fewer workers"):
        list(running.map([Task(bytearray, [(2**62,)])], 1))
    assert list(running.map([Task(pow, [(2, 3)])], 1)) == [[8]]


def test_the_global_random_numbers_are_not_touched(running):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(running.map([Task(pow, [(2, 2)])], 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_ends_with_the_same_bits_as_without_workers(folder, few_are_enough, tmp_path):
    train(folder, out=tmp_path / "none", workers=0, **SETTINGS)
    train(folder, out=tmp_path / "two", workers=2, **SETTINGS)
    assert fingerprints(tmp_path / "two") == fingerprints(tmp_path / "none")
    stopped_and_resumed(folder, tmp_path / "again", 4, workers=2, **SETTINGS)
    assert fingerprints(tmp_path / "again") == fingerprints(tmp_path / "none")


def test_a_corrupt_file_ends_a_run_with_its_name(folder, few_are_enough, tmp_path):
    (folder / "bee" / "04.jpg").write_bytes(b"\xff\xd8\xff broken")
    with pytest.raises(InputError, match=r"bee/04.jpg is broken .* corrupt='skip'"):
        train(folder, out=tmp_path / "run", workers=2, **SETTINGS)


# ---- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "cores", "images", "more", "kind", "count"),
    [
        (0, 16, 10_000, {}, "none", 0),
        ("auto", 16, 10_000, {}, "processes", 16),
        ("auto", 128, 10_000, {}, "processes", 32),
        ("auto", 16, 10_000, {"busy": True}, "processes", 4),
        ("auto", 7, 10_000, {"busy": True}, "processes", 1),
        ("auto", 4, 10_000, {"busy": True}, "processes", 1),
        ("auto", 3, 10_000, {"busy": True}, "threads", 2),
        ("auto", 2, 10_000, {}, "threads", 2),
        ("auto", 1, 10_000, {}, "threads", 2),
        ("auto", 16, 399, {}, "threads", 2),
        (3, 2, 10_000, {}, "processes", 3),
        (3, 16, 399, {}, "threads", 3),
    ],
)
def test_workers_are_chosen_by_cores_and_images(requested, cores, images, more, kind, count, monkeypatch):
    monkeypatch.setattr(workers_module, "usable_cores", lambda: cores)
    plan = choose_workers(requested, images, **more)
    assert (plan.kind, plan.count) == (kind, count)
    assert str(plan)


def test_a_small_shared_memory_means_fewer_workers_or_threads(monkeypatch):
    """Docker gives a container 64 MB."""
    image = 224 * 224 * 3
    monkeypatch.setattr(workers_module, "usable_cores", lambda: 16)
    monkeypatch.setattr(workers_module, "shared_memory_free", lambda: 32 * 2**20)
    plan = choose_workers("auto", 10_000, image_bytes=image)
    assert plan.kind == "processes"
    assert 2 <= plan.count < 16
    assert "/dev/shm" in str(plan)
    monkeypatch.setattr(workers_module, "shared_memory_free", lambda: 2**20)
    plan = choose_workers("auto", 10_000, image_bytes=image)
    assert plan.kind == "threads"
    assert "--shm-size" in str(plan)


@pytest.mark.parametrize("value", ["many", -1, 1.5, True, None, 1025])
def test_a_number_of_workers_or_auto(value):
    with pytest.raises(ConfigError, match='workers must be "auto" or an integer from 0 to 1,024, not'):
        check_workers(value)


# ---- ends --------------------------------------------------------------------------------------


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "signal 9.*out of memory.*workers"), (signal.SIGSEGV, "signal 11.*vitrail doctor")],
)
def test_a_killed_worker_is_an_error_and_no_hang(number, words, running):
    results = running.map((Task(time.sleep, [(0.05,)]) for _ in range(10_000)), 1)
    next(results)
    pids = worker_pids(running)
    os.kill(pids[0], number)
    with pytest.raises(WorkerError, match=words):
        list(results)
    running.close()
    wait_until_gone(pids)


@pytest.mark.slow
@LINUX
def test_full_shared_memory_is_an_error_with_advice(running):
    """A bus error, as when the pages of /dev/shm run out; and an error of the allocation itself."""
    results = running.map((Task(time.sleep, [(0.05,)]) for _ in range(10_000)), 1)
    next(results)
    os.kill(worker_pids(running)[0], signal.SIGBUS)
    with pytest.raises(WorkerError, match=r"/dev/shm is full .*--shm-size"):
        list(results)


@LINUX
@pytest.mark.slow
def test_a_real_small_shared_memory(folder, tmp_path):
    """In a name space of its own, where /dev/shm has 128 kB, and the check of its size is switched off."""
    script = tmp_path / "small.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from vitrail.images.loader import Reader
        from vitrail.images.formats.sources import open_dataset
        from vitrail.images.preprocess import Preprocess
        from vitrail.images.workers import WorkerPlan, Workers
        split = open_dataset({str(folder)!r}).train
        running = Workers(WorkerPlan("processes", 2, ""), image_bytes=64 * 64 * 3)
        requests = [(0, torch.arange(len(split))) for _ in range(9)]
        found = list(Reader(split, Preprocess(size=64), workers=running).batches(requests))
        expected = list(Reader(split, Preprocess(size=64)).batches(requests))
        print(all(torch.equal(a.images, b.images) for a, b in zip(found, expected, strict=True)))
        """)
    )
    mount = "mount -t tmpfs -o size=128k tmpfs /dev/shm"
    inner = f"{mount} && exec {sys.executable} {script}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", inner], capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no name space of its own here: {done.stderr.strip()}")
    assert done.stdout == "True\n", done.stderr


# No `if __name__ == "__main__":` here, on purpose.
UNGUARDED = """
import os, sys, torch
from vitrail.images.loader import Reader
from vitrail.images.formats.sources import open_dataset
from vitrail.images import workers
from vitrail.images.preprocess import Preprocess
workers.MIN_IMAGES = 1
print("main", os.getpid(), flush=True)
split = open_dataset(sys.argv[1]).train
reader = Reader(split, Preprocess(size=8), workers=2)
for number, batch in enumerate(reader.batches((0, torch.arange(len(split))) for _ in range(100_000))):
    if number == 3:
        pids = [worker.process.pid for worker in reader.workers._processes]
        print("workers", *pids, flush=True)
"""


@pytest.mark.slow
@LINUX
def test_a_script_without_a_guard_works_and_killed_it_leaves_nothing(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    child = subprocess.Popen(
        [sys.executable, script, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == f"main {child.pid}\n"
        pids = [int(pid) for pid in child.stdout.readline().split()[1:]]
        assert len(pids) == 2
        server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    finally:
        child.send_signal(signal.SIGKILL)
        output, _ = child.communicate()
    wait_until_gone([*pids, server])
    assert output == ""  # the script ran once


@pytest.mark.slow
@LINUX
def test_ctrl_c_saves_a_checkpoint_and_workers_print_nothing(tmp_path):
    """Sent to the whole process group, as a terminal does."""
    folder = write_folder(tmp_path / "images", each=170)
    settings = ["model.width=16", "model.depth=1", "model.heads=2", "model.patch=4", "workers=2"]
    command = [sys.executable, "-m", "vitrail", "train", folder, "--out", tmp_path / "run", "--size", "8"]
    command += ["--epochs", "10000", "--batch", "64", *(word for one in settings for word in ("--set", one))]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        until = time.monotonic() + 90
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert child.poll() is None, child.stdout.read()
            assert time.monotonic() < until
            time.sleep(0.05)
        group = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and in_group(pid, child.pid)]
        assert len(group) >= 4  # the command, the fork server, two workers
        os.killpg(child.pid, signal.SIGINT)
        output, _ = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 130
    assert "2 worker processes (forkserver)" in re.sub(r"\s+", " ", output)
    assert "Traceback" not in output
    assert "Interrupt" not in output
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    wait_until_gone(group)


def in_group(pid, group):
    try:
        return os.getpgid(int(pid)) == group
    except OSError:
        return False


@LINUX
def test_a_batch_is_copied_by_one_thread(tmp_path):
    """A copy by torch starts a thread for each core, which then spins where the workers decode."""
    program = textwrap.dedent("""
        import os, sys
        import torch
        from vitrail.images.loader import Reader
        from vitrail.images.formats.sources import open_dataset
        from vitrail.images.preprocess import Preprocess
        from vitrail.images.workers import WorkerPlan, Workers

        torch.set_num_threads(4)
        split = open_dataset(sys.argv[1]).train
        running = Workers(WorkerPlan("processes", 1, ""), image_bytes=3 * 224 * 224)
        reader = Reader(split, Preprocess(size=224), workers=running)
        requests = [(0, torch.arange(len(split)))] * 2
        before = None
        for batch in reader.batches(requests):
            now = len(os.listdir("/proc/self/task"))
            before = now if before is None else before
            assert batch.images.numel() > 10 * 32768, "torch would use threads for as much"
            assert now == before, (now, before)
        print("threads", now)
        batch.images.clone().add_(1)
        print("with torch", len(os.listdir("/proc/self/task")))
    """)
    folder = write_folder(tmp_path / "images")
    done = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, check=True, timeout=120
    )
    own, with_torch = (int(line.split()[-1]) for line in done.stdout.splitlines())
    assert with_torch >= own + 3, "this test would not notice torch's threads"


def test_in_background_gives_items_in_order_and_closes_the_generator():
    events = []

    def numbers():
        try:
            for number in range(100):
                events.append(number)
                yield number
        finally:
            events.append("closed")

    assert list(in_background(numbers(), 2)) == list(range(100))
    assert events[-1] == "closed"
    events.clear()
    taken = in_background(numbers(), 2)
    assert [next(taken), next(taken)] == [0, 1]
    taken.close()
    assert events[-1] == "closed"
    assert len(events) <= 6, "it is only so far ahead"


def test_in_background_raises_the_error_of_the_generator():
    def failing():
        yield 1
        raise InputError("the disk is gone")

    taken = in_background(failing(), 2)
    assert next(taken) == 1
    with pytest.raises(InputError, match="the disk is gone"):
        next(taken)
