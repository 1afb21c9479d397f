"""Probes: observe calls in a separate pass after the timing, and add metrics to the point.

The interfaces here are for the user's own probes (`probe` in the configuration). The modules beside
this one measure what perfexp itself adds: energy, ceilings, work rates, workspaces.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from perfexp.devices import Device
from perfexp.measuring.modes import Step
from perfexp.models import Session
from perfexp.records.record import Epoch, Key


@dataclass(frozen=True, kw_only=True)
class ProbeContext:
    """Everything that a probe may inspect.

    Attributes:
        key: the point: phase, input size, batch size, precision, replicate.
        step: the call. After the last call it holds its state (`step.state.outputs`, `.loss`).
        session: the loaded model; a torch model is `session.module`.
        device: device of the calls.
    """

    key: Key
    step: Step
    session: Session | Any
    device: Device


class Probe(Protocol):
    """Object built from an entry of the configuration's `probe` node."""

    def around(self, context: ProbeContext) -> AbstractContextManager[None]:
        """Return a context for a few untimed calls; report with `perfexp.metric`."""


@runtime_checkable
class EpochProbe(Protocol):
    """A probe that also observes each training epoch."""

    def after_epoch(self, context: ProbeContext, epoch: Epoch) -> None:
        """Observe an epoch after its evaluation, untimed; report with `perfexp.metric`."""
