"""Probe: observes calls in a pass of its own, after the timing, and adds metrics to the point."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from perfexp.devices import Device
from perfexp.models import Session
from perfexp.modes import Step
from perfexp.records.record import Epoch, Key


@dataclass(frozen=True, kw_only=True)
class ProbeContext:
    """What a probe may inspect.

    The step has the state after the last call (`step.state.outputs`, `.loss`); a torch model is `session.module`.
    """

    key: Key
    step: Step
    session: Session | Any
    device: Device


class Probe(Protocol):
    """What an entry of the configuration's `probe` node builds."""

    def around(self, context: ProbeContext) -> AbstractContextManager[None]:
        """Entered before a few calls that are not timed, left after them; reports by `perfexp.metric`."""


@runtime_checkable
class EpochProbe(Protocol):
    """A probe that also observes each epoch of a training."""

    def after_epoch(self, context: ProbeContext, epoch: Epoch) -> None:
        """Called after an epoch and its evaluation, untimed; reports by `perfexp.metric`."""
