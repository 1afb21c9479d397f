"""`perfexp.metric`: add a custom metric from a model, data set or probe to the current point.

Users call `metric` in their own code. The measuring procedure enters `collecting` around each point
and each epoch, and stores the collected metrics with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perfexp.records.record import Metric

#: Dictionaries of the `collecting` blocks that are entered now, innermost last.
_open: list[dict[str, Metric]] = []


def metric(name: str, value: float | None, unit: str = "1") -> None:
    """Add a metric to the point being measured and to the epoch in progress.

    Without a point, nothing happens. A later value with the same name replaces the earlier value.
    Call it from a probe if you can: code in a model's forward pass is timed.

    >>> with collecting() as metrics:
    ...     metric("queue_seconds", 0.25, "s")
    >>> metrics["queue_seconds"].value
    0.25

    Args:
        name: metric name that ends in its unit, if it has one (`gradient_norm`, `queue_seconds`).
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
    """Yield a dictionary by name that collects the metrics added while it is entered.

    Nested blocks, such as an epoch within a point, all collect a metric.
    """
    metrics: dict[str, Metric] = {}
    _open.append(metrics)
    try:
        yield metrics
    finally:
        _open.pop()  # the innermost: equal dictionaries are not the same object
