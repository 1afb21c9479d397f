"""Gain of an applied plan: a call of the user's program with the plan and without it, in turns."""

from __future__ import annotations

from perfexp.convolution.applying import Applied
from perfexp.errors import Unsupported
from perfexp.measuring import baselines
from perfexp.statistics.estimators import Interval
from perfexp.timing import collecting


def gain(applied: Applied, call: collecting.Call) -> Interval:
    """Return how much faster a call is with an applied plan, with its 95 % interval.

    >>> import perfexp, torch
    >>> module, images = torch.nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)
    >>> settings = {"gpu": "cpu", "tracking": "none", "stopping": "fixed", "input_size": 8}
    >>> record = perfexp.measure(module, algorithm="gemm", output_dir="run", **settings)
    >>> with perfexp.apply(module, "run") as applied:
    ...     interval = gain(applied, lambda: module(images))
    >>> interval.value > 0
    True

    Args:
        call: function without arguments that calls the module, for example a training step.

    Raises:
        Unsupported: the host keeps the device waiting, so there is no gain to measure.
    """
    applied.device.start()
    compared = baselines.compare(applied, call, applied.device)
    if compared is None or not compared.speedups:
        raise Unsupported(
            "the host keeps the device waiting, so a plan gains nothing: use a larger batch"
        )
    return compared.speedups["default"]
