"""algorithm=default: PyTorch's own choice, unmodified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perfexp.convolution import Algorithm
from perfexp.models import Session


def open_default(
    *, name: str = "default", layers: Mapping[str, str] | None = None, **settings: Any
) -> Algorithm:
    """Build torch's own convolution, with other algorithms for layers that name one.

    See `forced.Forced`. All settings of other algorithms are accepted, so that a sweep can cover
    them. `conf/algorithm/default.yaml` names this function.
    """
    if not layers:
        return Default()
    from perfexp.convolution.forced import Forced

    return Forced(name=name, layers=layers, **settings)


class Default:
    """Leaves every convolution as it is."""

    @contextmanager
    def applied(self, session: Session) -> Iterator[None]:
        """Change nothing; yield None, which leaves nothing to report."""
        yield
