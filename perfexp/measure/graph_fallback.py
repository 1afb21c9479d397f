"""Unqueued: the device's time of a call that its queue does not take as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

from perfexp.data import Batches
from perfexp.data.rotating import on_device
from perfexp.devices import Device
from perfexp.errors import Waits
from perfexp.measure import verdicts
from perfexp.measure.times import Times
from perfexp.models import Session, Unwaiting
from perfexp.modes import Step, behind_the_data
from perfexp.probes import timing
from perfexp.records import diagnostics
from perfexp.records.record import Point, Status

#: Batches that `device` is measured with where they come from the host: with one, a training would know it by heart.
_HELD_BATCHES = 8


def add_device_time(
    point: Point,
    step: Step,
    batches: Batches,
    *,
    session: Session,
    times: Times,
    capture: timing.Capture,
    several_ranks: bool,
) -> None:
    """Add the series `device` of a call that the device's queue did not take, or the doubt why there is none.

    Args:
        point: whose whole call has been timed.
        step: of it.
        batches: likewise.
        session: that it calls.
        times: takes it.
        capture: makes one launch of the call.
        several_ranks: whether others make the same calls.
    """
    if several_ranks:  # a replay, or a call that is broken off, is nothing that others could follow
        point.doubts.append(diagnostics.make("queue_exceeded", reason="calls of several ranks are not captured"))
        return
    device = times.device
    try:
        with on_held_batches(step, batches, session) as held, without_waits(step, session, device) as changed:
            left_out = [diagnostics.make("data_left_out")] if held else []
            left_out += [] if changed is None else [diagnostics.make("waits_left_out", how=changed)]
            times.device_otherwise(point, step.call, capture, left_out)
    except Waits:
        point.doubts.append(diagnostics.make("synchronising"))
    except Exception as error:
        if device.is_lost():
            raise
        status, text = verdicts.verdict(error, device)  # what has been measured stays, whatever it is
        reason = "the memory is not enough for its graph" if status is Status.OOM else text
        point.doubts.append(diagnostics.make("queue_exceeded", reason=reason))


@contextmanager
def on_held_batches(step: Step, batches: Batches, session: Session) -> Iterator[bool]:
    """While entered, calls take batches that lie on the device, where theirs come from the host; gives whether.

    Args:
        step: of the point.
        batches: likewise.
        session: that it calls.
    """
    if on_device(batches):
        yield False
        return
    usual = step.state.source
    kept = [session.copy(usual()) for _ in range(_HELD_BATCHES)]
    step.state.source = cycle(kept).__next__
    try:
        yield True
    finally:
        step.state.source = usual


@contextmanager
def without_waits(step: Step, session: Session, device: Device) -> Iterator[str | None]:
    """While entered, a call that waits for the device does not, if it can do without; gives how, or None.

    Args:
        step: of the point; has been called before.
        session: that it calls.
        device: that works.
    """
    if isinstance(session, Unwaiting) and device.waits_inside(behind_the_data(step)):
        with session.without_waits() as how:
            yield how
    else:
        yield None
