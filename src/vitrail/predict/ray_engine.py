"""Parts computed by a Ray cluster: the same parts, so that its outputs are exactly once, too.

Each actor opens the model and the list of images by itself, so both must be at the same paths on all
machines, as the folder of the parts. A part in which an actor was killed is not there; the next run makes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.base.errors import require_extra
from vitrail.base.telemetry import disable_telemetry
from vitrail.predict.parts import ImageList, PartOptions, PartResult, Parts, Progress
from vitrail.predict.predictor import Predictor


class PartWorker:
    """What runs in an actor: a predictor and the list of images."""

    def __init__(
        self,
        here: str,
        folder: Path,
        open_model: Callable[[], Predictor],
        inputs: Sequence[str],
        options: PartOptions,
    ) -> None:
        os.chdir(here)  # relative paths are part of the list
        self.parts = Parts(folder, ImageList(inputs), open_model(), options)

    def write(self, number: int) -> int:
        """Write a part; returns the number of its images."""
        self.parts.write([number])
        return self.parts.size([number])


def write_with_ray(
    parts: Parts,
    open_model: partial[Predictor],
    inputs: Sequence[str],
    job: tuple[int, int],
    progress: Progress,
) -> PartResult:
    """Write the parts of one job that are not there yet, by Ray actors.

    A running cluster is used if RAY_ADDRESS names one; otherwise Ray is started on this machine.

    Args:
        open_model: opens the model, given by name, in an actor.
        job: its number, from 1, and how many there are.
    """
    disable_telemetry()
    with require_extra("ray"):
        import ray
        from ray.util import ActorPool

    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    try:
        numbers = parts.numbers(*job)
        waiting = parts.waiting(numbers)
        resources, count = _actors(ray.cluster_resources())
        remote: Any = ray.remote(PartWorker)
        if "num_cpus" in resources:  # one core: it reads images, too
            open_model = partial(open_model, workers=0)
        given = os.getcwd(), parts.folder.absolute(), open_model, list(inputs), parts.options
        actors = [remote.options(**resources).remote(*given) for _ in range(min(count, len(waiting)))]
        done = 0
        with parts.in_use():
            for images in ActorPool(actors).map_unordered(lambda actor, n: actor.write.remote(n), waiting):
                done += images
                progress(done, parts.size(waiting))
        return parts.result(numbers, waiting)
    finally:
        if started:
            ray.shutdown()


def _actors(resources: Mapping[str, float]) -> tuple[dict[str, int], int]:
    """What an actor needs, and how many there are: one for each GPU; without any, for each core but one.

    Ray itself needs a core: two actors on two cores wait for each other for ever.
    """
    if gpus := int(resources.get("GPU", 0)):
        return {"num_gpus": 1}, gpus
    return {"num_cpus": 1}, max(1, int(resources.get("CPU", 1)) - 1)
