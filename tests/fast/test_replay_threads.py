"""Several threads replay one CUDA graph: a stand-in has its buffers and takes its time."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vitrail.fast.cuda_graph import MAX_SHAPES, Replay

THREADS, CALLS = 4, 50


class StandIn:
    """Reads `buffer` and writes `both`, in steps between which other threads run."""

    def __init__(self, buffer, both):
        self.buffer, self.both = buffer, both

    def replay(self):
        time.sleep(0)
        pooled = self.buffer.flatten(1).mean(1, keepdim=True)
        time.sleep(1e-4)
        self.both.copy_(torch.cat([pooled, 2 * pooled], dim=1))
        time.sleep(1e-4)


class ReplayOnCPU(Replay):
    """All but the graph is the real one."""

    captures = 0

    def _capture(self, images):
        self.captures += 1
        time.sleep(1e-3)
        buffer, both = torch.empty_like(images), torch.empty(len(images), 2)
        return StandIn(buffer, both), buffer, both, 1


@pytest.fixture
def replay():
    def forward(images):
        pooled = images.flatten(1).mean(1, keepdim=True)
        return pooled, 2 * pooled

    return ReplayOnCPU(forward)


def wrong_answers(replay, shapes):
    """Of calls from several threads, each with numbers of its own."""

    def call(thread):
        wrong = 0
        for number in range(CALLS):
            value = float(thread * CALLS + number)
            pooled, logits = replay(torch.full(shapes[number % len(shapes)], value))
            wrong += not (bool((pooled == value).all()) and bool((logits == 2 * value).all()))
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(call, range(THREADS)))


def test_each_thread_gets_its_own_answer(replay):
    assert wrong_answers(replay, [(2, 3, 4, 4)]) == 0
    assert replay.captures == 1


def test_shapes_are_captured_once_and_only_so_many(replay):
    shapes = [(count + 1, 3, 2, 2) for count in range(MAX_SHAPES + 2)]
    assert wrong_answers(replay, shapes) == 0
    assert replay.captures == len(replay.graphs) == MAX_SHAPES
