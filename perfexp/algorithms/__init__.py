"""Algorithm: what the convolutions of a model are computed by."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from perfexp.algorithms.report import AlgorithmReport
from perfexp.models import Session


class Backend(StrEnum):
    """Whose code computes: cuDNN's kernels, ours for Triton, ours in torch's operations, or the first that can."""

    auto = "auto"
    cudnn = "cudnn"
    triton = "triton"
    torch = "torch"


class OnUnsupported(StrEnum):
    """What becomes of a layer that an algorithm can't compute.

    `error` refuses the run, `fallback` leaves the layer to torch, `skip` makes the point `unsupported`.
    """

    error = "error"
    fallback = "fallback"
    skip = "skip"


class Algorithm(Protocol):
    """What an `algorithm` node of the configuration builds."""

    def applied(self, session: Session) -> AbstractContextManager[None]:
        """While entered, the session's model computes its convolutions by this algorithm; undone on leaving.

        Args:
            session: a loaded model.
        """

    def forget(self) -> None:
        """What ran before is no longer in the report: a point begins."""

    def report(self) -> AlgorithmReport | None:
        """What ran since the last `forget`; None where nothing was asked for."""
