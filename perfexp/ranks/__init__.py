"""Ranks: processes with a card each that make the same calls; the first of them measures, the others follow it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perfexp.models import Sharing
from perfexp.modes import Step
from perfexp.records.record import Key

#: DistributedDataParallel waits for the device in its first ten iterations, of which it keeps statistics, and in every
#: hundredth after them (torch/csrc/distributed/c10d/reducer.hpp); so many calls take it beyond those ten.
SETTLING_CALLS = 12


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of the ranks a process is.

    Attributes:
        number: 0 for the one that measures.
        size: how many there are.
        folder: where their pipes lie.
    """

    number: int
    size: int
    folder: Path

    @property
    def leads(self) -> bool:
        """Whether it measures."""
        return self.number == 0

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}"


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Calls of one rank that followed one another.

    Attributes:
        start_ns: of the first, by the clock that all processes of a host share.
        end_ns: when the device had done the last; equal to the start for a rank that made none.
        error: why they were not all made, where one rank was to do without the others.
    """

    start_ns: int
    end_ns: int
    error: str | None = None


class Crew(Protocol):
    """The other ranks, as the procedure of the first one has them follow.

    Attributes:
        size: ranks, itself included.
    """

    size: int

    def open(self, key: Key) -> None:
        """All prepare the call of a point."""

    def close(self) -> None:
        """All leave the point."""

    def first(self) -> None:
        """The others make a forward pass of a size for the first time, as this one is about to."""

    def joined(self, step: Step) -> Step:
        """The same call, made by all ranks whenever it is made here."""

    def stretch(self, step: Step, calls: int, sharing: Sharing) -> Sequence[Stretch]:
        """All make calls as fast as they can, without hearing of one another; one result of each rank.

        Args:
            step: as it was joined.
            calls: of each rank.
            sharing: what they do together.
        """

    def lost(self) -> bool:
        """Whether another rank is no more: then nothing can be done together."""


class Alone:
    """No other ranks."""

    size = 1

    def open(self, key: Key) -> None:
        """See `Crew`."""

    def close(self) -> None:
        """See `Crew`."""

    def first(self) -> None:
        """See `Crew`."""

    def joined(self, step: Step) -> Step:
        """See `Crew`."""
        return step

    def stretch(self, step: Step, calls: int, sharing: Sharing) -> Sequence[Stretch]:
        """See `Crew`.

        Raises:
            ValueError: always: there is nobody to do anything together with.
        """
        raise ValueError("a stretch is of several ranks")

    def lost(self) -> bool:
        """See `Crew`."""
        return False


@runtime_checkable
class Shareable(Protocol):
    """A session whose training several ranks can share."""

    def share(self, settings: Any) -> dict[str, Any]:
        """Train together with all ranks from now on, each with its part of the batch; returns what is to be recorded.

        Args:
            settings: of the configuration (`execution.ddp`).
        """

    def sharing(self, what: Sharing) -> AbstractContextManager[None]:
        """While entered, this rank shares no more than that.

        Args:
            what: is shared.
        """
