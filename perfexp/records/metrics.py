"""`perfexp.metric`: add a custom metric of a model, data set or probe to the point that is being measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perfexp.records.record import Metric

_open: list[dict[str, Metric]] = []


def metric(name: str, value: float | None, unit: str = "1") -> None:
    """Add a metric to the point that is being measured, and to the epoch in progress; without a point, do nothing.

    A later value of the same name replaces the earlier one. Prefer calling it from a probe: code in a model's forward
    pass is timed.

    Args:
        name: name of the metric, ending in its unit where it has one (`gradient_norm`, `queue_seconds`).
        unit: SI unit; `1` for a ratio.

    Raises:
        TypeError: the value is not a number.
    """
    if _open:
        plain = getattr(value, "detach", lambda: value)()  # a tensor may belong to a graph
        number = None if plain is None else float(plain)
        for metrics in _open:
            metrics[name] = Metric(name=f"custom/{name}", value=number, unit=unit)


@contextmanager
def collecting() -> Iterator[dict[str, Metric]]:
    """While entered, collect the metrics of `metric` in the dictionary that this yields."""
    metrics: dict[str, Metric] = {}
    _open.append(metrics)
    try:
        yield metrics
    finally:
        _open.pop()  # the innermost one: equal dictionaries are not the same
