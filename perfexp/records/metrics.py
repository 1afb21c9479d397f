"""perfexp.metric: one's own figures, from a model, a data set or a probe, into the record of the point under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perfexp.records.record import Metric

_open: list[dict[str, Metric]] = []


def metric(name: str, value: float | None, unit: str = "1") -> None:
    """Add a figure to the record of the point that is being measured; outside of one, nothing happens.

    A later value of the same name replaces the earlier one. Call it from a probe rather than from a model's forward
    pass where you can: what a model does in its forward pass is timed.

    Args:
        name: what to call it, best ending in its unit (`gradient_norm`, `queue_seconds`).
        value: a number, or anything that `float` takes; None where it can't be known.
        unit: SI unit; `1` for a ratio.

    Raises:
        TypeError: the value is no number.
    """
    if _open:
        number = None if value is None else float(value)
        _open[-1][name] = Metric(name=f"custom/{name}", value=number, unit=unit)


@contextmanager
def collecting() -> Iterator[dict[str, Metric]]:
    """While entered, `metric` puts its figures into the dictionary that this yields."""
    found: dict[str, Metric] = {}
    _open.append(found)
    try:
        yield found
    finally:
        _open.remove(found)
