"""Ranks: processes with a device each that make the same calls.

The first rank measures, and the others follow its control messages. Rank is torch.distributed's
word for a process's number. With a single device, a `ProcessGroup` does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perfexp.measuring.modes import Step
from perfexp.models import Sharing
from perfexp.records.record import Key

#: Calls before DistributedDataParallel stops waiting for the device. It waits in its first ten
#: iterations, to collect statistics, and later in every hundredth
#: (torch/csrc/distributed/c10d/reducer.hpp).
SETTLING_CALLS = 12


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place among all ranks.

    Attributes:
        number: its rank, from 0.
        size: number of ranks on all hosts.
        folder: folder of the pipes between this host's ranks.
        per_host: number of ranks on each host.
    """

    number: int
    size: int
    folder: Path
    per_host: int

    @property
    def local(self) -> int:
        """Return this rank's number on its host, which is also its device's number."""
        return self.number % self.per_host

    @property
    def leads_other_host(self) -> bool:
        """Return whether this is the first rank on a host other than the first rank's host."""
        return self.number > 0 and self.local == 0

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}"


@dataclass(frozen=True, kw_only=True)
class Burst:
    """A rank's back-to-back calls, from the first call's start to the last call's end.

    All processes on a host share a clock, but hosts have different clocks. Times therefore count
    from the first call on the host. The barrier before a burst leaves little time between hosts.
    Without calls, start and end are equal.

    Attributes:
        error: why a rank that shares nothing did not finish its calls.
    """

    start_ns: int
    end_ns: int
    error: str | None = None


class ProcessGroup:
    """All ranks, directed by the first rank while it measures. This class is a single process.

    `Context.group` is either this, or a `control_messages.Leader`.

    Attributes:
        size: number of ranks.
    """

    size = 1

    def open(self, key: Key) -> None:
        """Prepare a point's call on the other ranks."""

    def close(self) -> None:
        """Leave the point on the other ranks."""

    def first(self) -> None:
        """Run the first forward pass at a size on the other ranks.

        This rank is about to do the same.
        """

    def joined(self, step: Step) -> Step:
        """Return a step that all ranks make whenever it is made here."""
        return step

    def burst(self, step: Step, calls: int, sharing: Sharing) -> Sequence[Burst]:
        """Make calls of a joined step on all ranks, as fast as possible; return a result per rank.

        Args:
            sharing: what the ranks share in the burst, for example gradients.

        Raises:
            ValueError: this is a single process.
        """
        raise ValueError("a burst takes several ranks")

    def lost(self) -> bool:
        """Return whether another rank has ended, so that no joint call is possible."""
        return False


@runtime_checkable
class Shareable(Protocol):
    """A session that several ranks can train together."""

    def share(self, settings: Any) -> dict[str, Any]:
        """Train together with all ranks from now on; return the facts to record.

        Args:
            settings: `execution.ddp`.
        """

    def sharing(self, what: Sharing) -> AbstractContextManager[None]:
        """Limit what this rank shares while entered, for example to nothing."""
