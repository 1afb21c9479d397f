"""algorithm=default: PyTorch's own choice, unmodified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perfexp.algorithms import Algorithm, T
from perfexp.models import Session


def open_default(*, name: str = "default", layers: Mapping[str, str] | None = None, **settings: Any) -> Algorithm:
    """Build torch's own convolution, with other algorithms for the layers that name one (see `forced.Forced`).

    All settings of the other algorithms are accepted, so that one sweep can cover them.
    """
    if not layers:
        return Default(name=name)
    from perfexp.algorithms.forced import Forced

    return Forced(name=name, layers=layers, **settings)


class Default:
    """Leaves every convolution as it is."""

    def __init__(self, *, name: str = "default") -> None:
        self.name = name

    @contextmanager
    def applied(self, session: Session) -> Iterator[None]:
        """See `Algorithm`."""
        yield

    def forget(self) -> None:
        """See `Algorithm`; there is no state."""

    def recount(self) -> None:
        """See `Algorithm`; there is no state."""

    def report(self) -> None:
        """See `Algorithm`; there is nothing to report."""

    def rivals(self) -> tuple[str, ...]:
        """See `Algorithm`."""
        return ()

    def regret(self) -> None:
        """See `Algorithm`; there are no choices."""

    def instead(self, rival: str, work: Callable[[], T]) -> T:
        """See `Algorithm`."""
        return work()

    def prove(self, call: Callable[[], Any]) -> bool:
        """See `Algorithm`."""
        return False

    def launched_share(self) -> None:
        """See `Algorithm`."""

    def output_error(self, inputs: Any) -> None:
        """See `Algorithm`."""
