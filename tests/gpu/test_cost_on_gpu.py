"""The step that `vitrail plan` expects on one H200, beside one that is taken there."""

import pytest
import torch

from bench.measure import clock
from bench.steps import BATCH, large_step
from vitrail.model.presets import preset
from vitrail.training.plan.cost import Cluster, step_cost

H200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
pytestmark = pytest.mark.skipif(not H200, reason="the plan's numbers are those of an H200")


def test_a_step_takes_the_time_and_the_memory_of_the_plan():
    """Of B/16, compiled and captured as `vitrail train` does it; a minute to compile."""
    torch.cuda.reset_peak_memory_stats()
    step = large_step(preset("B/16"), "vitrail, bf16 residual")
    for _ in range(6):
        step()
    seconds = min(clock(step, 10, torch.cuda.synchronize) for _ in range(5))
    cost = step_cost(preset("B/16"), Cluster(), BATCH)
    assert cost.seconds == pytest.approx(seconds, rel=0.15)
    assert cost.memory == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)
