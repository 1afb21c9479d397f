"""Graph fallback: the device time of a call that does not fit the launch queue as it is.

Such a call has too many kernels, or it waits for the device. As a CUDA graph it is a single launch.
If needed, what prevents the capture is left out: batches from the host are replaced by batches on
the device, and synchronization is removed. A diagnostic says so. The energy pass and the layers
pass make the same changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

from perfexp.data import Batches
from perfexp.data.synthetic import on_device
from perfexp.devices import Device
from perfexp.errors import Waits
from perfexp.measuring import verdicts
from perfexp.measuring.modes import Step, without_data
from perfexp.measuring.times import Times
from perfexp.models import Session, Unwaiting
from perfexp.records import diagnostics
from perfexp.records.record import Point, Status
from perfexp.timing import collecting

#: Number of batches that replace data from the host; a training would memorize a single one.
_HELD_BATCHES = 8
#: Diagnostic for calls that are fed with such batches.
HELD = diagnostics.make(
    "device_leaves_out", how="its batches are on the device already (data.pin_memory=true may help)"
)
#: Reason and advice for calls without a device time.
TOO_LONG, COMPILE = (
    "a call does not fit the launch queue",
    "use a model with fewer launches (execution=compile)",
)
_SYNCHRONIZES = (
    "the call synchronizes (it reads a value back), so it can be neither queued nor captured"
)
_REMOVE = "remove `.item()`, `.cpu()` or print from the call"


def add_device_time(
    point: Point,
    step: Step,
    batches: Batches,
    session: Session,
    times: Times,
    capture: collecting.Capture,
) -> None:
    """Add the `device` series of a call that did not fit the launch queue, or why there is none.

    An error is recorded in a diagnostic, unless the device is lost.

    Args:
        point: a point with its whole call already timed.
        capture: captures the call as a CUDA graph.
    """
    device = times.device
    try:
        with (
            on_held_batches(step, batches, session) as holds,
            without_waits(step, session, device) as change,
        ):
            changes = [HELD] if holds else []
            if change is not None:
                how = f"one that does not synchronize, {change}"
                changes.append(diagnostics.make("device_leaves_out", how=how))
            times.add_device_time(point, step.call, capture, changes)
    except Waits:
        point.doubts.append(
            diagnostics.make("device_missing", reason=_SYNCHRONIZES, advice=_REMOVE)
        )
    except Exception as error:  # keep the times measured so far
        if device.is_lost():
            raise
        status, text = verdicts.verdict(error, device)
        reason = "the memory is not enough for its graph" if status is Status.OOM else text
        point.doubts.append(
            diagnostics.make("device_missing", reason=f"{TOO_LONG} ({reason})", advice=COMPILE)
        )


@contextmanager
def on_held_batches(step: Step, batches: Batches, session: Session) -> Iterator[bool]:
    """Feed calls with batches on the device while entered.

    Yield True if that is a change, because their own batches come from the host. A few batches are
    copied to the device and take turns.
    """
    if on_device(batches):
        yield False
        return
    usual = step.state.source
    held = [session.copy(usual()) for _ in range(_HELD_BATCHES)]
    step.state.source = cycle(held).__next__
    try:
        yield True
    finally:
        step.state.source = usual


@contextmanager
def without_waits(step: Step, session: Session, device: Device) -> Iterator[str | None]:
    """Remove a call's synchronization while entered, if possible.

    Yield a description of the change; None if the call does not synchronize, or the model offers no
    other way.

    Args:
        step: a step that has been called before.
    """
    if isinstance(session, Unwaiting) and device.waits_inside(without_data(step)):
        with session.without_waits() as change:
            yield change
    else:
        yield None
