"""Algorithm: what the convolutions of a model are computed by."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from perfexp.models import Session


class Algorithm(Protocol):
    """What an `algorithm` node of the configuration builds."""

    def applied(self, session: Session) -> AbstractContextManager[None]:
        """While entered, the session's model computes its convolutions by this algorithm; undone on leaving.

        Args:
            session: a loaded model.
        """
