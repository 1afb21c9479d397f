"""algorithm=default: what PyTorch picks, untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from perfexp.algorithms import T
from perfexp.models import Session


class Default:
    """Leaves every convolution as it is.

    Args:
        name: of the algorithm, in names of files and runs.
    """

    def __init__(self, *, name: str = "default") -> None:
        self.name = name

    @contextmanager
    def applied(self, session: Session) -> Iterator[None]:
        """See `Algorithm`."""
        yield

    def forget(self) -> None:
        """Nothing is remembered."""

    def recount(self) -> None:
        """Nothing is counted."""

    def report(self) -> None:
        """See `Algorithm`; nothing was asked for."""

    def rivals(self) -> tuple[str, ...]:
        """See `Algorithm`."""
        return ()

    def regret(self) -> None:
        """See `Algorithm`; nothing was chosen."""

    def instead(self, rival: str, work: Callable[[], T]) -> T:
        """See `Algorithm`."""
        return work()

    def prove(self, call: Callable[[], Any]) -> bool:
        """See `Algorithm`."""
        return False

    def output_error(self, inputs: Any) -> None:
        """See `Algorithm`."""
