"""algorithm=default: what PyTorch picks, untouched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perfexp.algorithms import Algorithm
from perfexp.models import Session


def open_default(*, name: str = "default", layers: Mapping[str, str] | None = None, **settings: Any) -> Algorithm:
    """Return torch's own convolutions, except for layers that name another algorithm.

    Args:
        name: name of the algorithm in names of files and runs.
        layers: algorithms by layer; see `perfexp.algorithms.forced.Forced`.
        settings: settings of other algorithms, accepted for sweeps over all of them; used only with `layers`.
    """
    if not layers:
        return Default()
    from perfexp.algorithms.forced import Forced

    return Forced(name=name, layers=layers, **settings)


class Default:
    """Leaves every convolution to torch."""

    @contextmanager
    def applied(self, session: Session) -> Iterator[None]:
        """See `Algorithm`."""
        yield
