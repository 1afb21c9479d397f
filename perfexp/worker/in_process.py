"""Measurements in the caller's process, for model objects that a fresh process could not have.

`perfexp.measure(module)` of the Python API ends here: no worker is started.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from typing import Any

from perfexp.errors import UserError
from perfexp.models.module import live_model
from perfexp.models.torch_settings import unchanged
from perfexp.plan import config
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.worker import points
from perfexp.worker.workbench import Workbench


def measure_points(
    plan: config.Plan,
    paths: RunPaths,
    model: Callable[..., Any],
    inputs: Any,
    warn: Callable[[str], None],
) -> None:
    """Measure the plan's points, then their layers, unless they have a result already.

    Results go to the run's folder, as from a worker.

    Args:
        model: the caller's model object.
        inputs: the object's inputs; None for images.
        warn: called with the reason for a wait for the device, at once and then every minute.

    Raises:
        UserError: the plan needs several processes.
    """
    if (
        plan.ranks > 1
        or plan.least_processes > 1
        or plan.cold_start
        or plan.profile_keys()
        or plan.seeks_batch
    ):
        raise UserError(
            "an object is measured in one process: leave out gpu.count, processes, cold_start, "
            "profiler and batch_size=max, or pass 'module:name'."
        )
    emit = _WaitWarnings(warn)
    bench = Workbench(plan, paths, emit, partial(live_model, model, plan.model_name, inputs))
    try:
        with (
            paths.log.open("a", encoding="utf-8") as log,
            redirect_stderr(log),  # a worker's tracebacks go to run.log, too
            unchanged(model),
            bench.opened() as procedure,
        ):
            if points.measure_points(procedure, plan, paths, 0, emit):
                points.dissect_points(procedure, plan, paths, 0, emit)
    finally:
        gc.unfreeze()  # the workbench froze the caller's objects


class _WaitWarnings(Events):
    """Events without a parent process: only the reason for a wait is reported to the caller."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(None)
        self._warn = warn

    def __call__(self, event: str, **details: Any) -> None:
        """Warn if the event is about a wait for the device (`patient`); drop all others."""
        if details.get("patient"):
            self._warn(details["text"])
