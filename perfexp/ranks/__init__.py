"""Ranks: processes with a device each that make the same calls; the first measures and the others follow it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perfexp.models import Sharing
from perfexp.modes import Step
from perfexp.records.record import Key

#: Calls that leave behind the iterations in which DistributedDataParallel waits for the device. It does so in its first
#: ten, to collect statistics, and in every hundredth after them (torch/csrc/distributed/c10d/reducer.hpp).
SETTLING_CALLS = 12


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of the ranks a process is, the number of ranks on each host, and the folder of their pipes."""

    number: int
    size: int
    folder: Path
    per_host: int

    @property
    def local(self) -> int:
        """Number of this rank among those of its host, and of its device."""
        return self.number % self.per_host

    @property
    def leads_other_host(self) -> bool:
        """Whether this is the first rank of a host other than the first rank's."""
        return self.number > 0 and self.local == 0

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}"


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Back-to-back calls of one rank, from the start of the first to the end of the last; both are one without calls.

    All processes of a host share the clock. It starts with the first call on the host, since hosts have different ones
    and the barrier before a burst leaves little between them. `error` is why a rank that shares
    nothing did not make all of its calls.
    """

    start_ns: int
    end_ns: int
    error: str | None = None


class ProcessGroup:
    """All ranks, as the first one directs them while it measures; this class is the group of a single process."""

    size = 1

    def open(self, key: Key) -> None:
        """Have all ranks prepare the call of a point."""

    def close(self) -> None:
        """Have all ranks leave the point."""

    def first(self) -> None:
        """Have the others make the first forward pass of a size, as this rank is about to."""

    def joined(self, step: Step) -> Step:
        """Return the same call, made by all ranks whenever it is made here."""
        return step

    def burst(self, step: Step, calls: int, sharing: Sharing) -> Sequence[Burst]:
        """Have all ranks make calls of a joined step, as fast as they can; one result per rank, of two or more."""
        raise ValueError("a burst takes several ranks")

    def lost(self) -> bool:
        """Return whether another rank has ended; then no call can be made together."""
        return False


@runtime_checkable
class Shareable(Protocol):
    """A session that several ranks can train together."""

    def share(self, settings: Any) -> dict[str, Any]:
        """Train together with all ranks from now on, by `execution.ddp`; return the facts to record."""

    def sharing(self, what: Sharing) -> AbstractContextManager[None]:
        """While entered, this rank shares no more than this."""
