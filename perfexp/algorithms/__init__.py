"""Algorithm: what the convolutions of a model are computed by."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from perfexp.models import Session


class Backend(StrEnum):
    """Whose code computes: `torch` is ours in torch's operations, `auto` the nearest to the device that there is."""

    auto = "auto"
    torch = "torch"


class OnUnsupported(StrEnum):
    """What becomes of a layer that an algorithm can't compute.

    `error` refuses the run, `fallback` leaves the layer to torch, `skip` makes the point `unsupported`.
    """

    error = "error"
    fallback = "fallback"
    skip = "skip"


class Algorithm(Protocol):
    """What an `algorithm` node of the configuration builds.

    One that replaces something may say what ran, by `forget()` and `report()` as `perfexp.algorithms.forced.Forced`
    has them.
    """

    def applied(self, session: Session) -> AbstractContextManager[None]:
        """While entered, the session's model computes its convolutions by this algorithm; undone on leaving.

        Args:
            session: a loaded model.
        """
