"""Probe: something that watches calls in a pass of its own, after the timing, and adds metrics to the point."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from perfexp.devices import Device
from perfexp.models import Session
from perfexp.modes import Step
from perfexp.records.record import Key


@dataclass(frozen=True, kw_only=True)
class ProbeContext:
    """What a probe may look at.

    Attributes:
        key: the point under way.
        step: its call, and the state that the last call left (`step.state.outputs`, `.loss`).
        session: the loaded model; a torch model's module is `session.module`.
        device: where it runs.
    """

    key: Key
    step: Step
    session: Session | Any
    device: Device


class Probe(Protocol):
    """What an entry of the configuration's `probe` node builds."""

    def around(self, context: ProbeContext) -> AbstractContextManager[None]:
        """Entered before a few calls that are not timed, left after them; reports by `perfexp.metric`.

        Args:
            context: what it may look at.
        """
