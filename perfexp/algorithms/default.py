"""algorithm=default: what PyTorch picks, untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perfexp.algorithms import Algorithm, T
from perfexp.models import Session


def open_default(*, name: str = "default", layers: Mapping[str, str] | None = None, **settings: Any) -> Algorithm:
    """Torch's own convolution, but for the layers that are to have another algorithm.

    It takes the settings of the other algorithms, so that a sweep over all of them can have them.

    Args:
        name: of the algorithm, in names of files and runs.
        layers: algorithms by layer; see `perfexp.algorithms.forced.Forced`.
        settings: its other settings, which say nothing where no layer is named.
    """
    if not layers:
        return Default(name=name)
    from perfexp.algorithms.forced import Forced

    return Forced(name=name, layers=layers, **settings)


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

    def launched_share(self) -> None:
        """See `Algorithm`."""

    def output_error(self, inputs: Any) -> None:
        """See `Algorithm`."""
