"""How a model's convolutions are computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from perfexp.algorithms.coverage import AlgorithmReport
from perfexp.models import Session
from perfexp.records.record import Metric

T = TypeVar("T")


class Backend(StrEnum):
    """Implementation of an algorithm: cuDNN's, perfexp's Triton kernels, torch operations, or the first that can."""

    auto = "auto"
    cudnn = "cudnn"
    triton = "triton"
    torch = "torch"


class OnUnsupported(StrEnum):
    """Policy for a layer that an algorithm cannot compute.

    `error` refuses the run, `fallback` leaves the layer to torch, `skip` makes the point `unsupported`.
    """

    error = "error"
    fallback = "fallback"
    skip = "skip"


class Objective(StrEnum):
    """Quantity that the best algorithm of a layer minimizes."""

    time = "time"


class Algorithm(Protocol):
    """What an `algorithm` node of the configuration builds.

    Attributes:
        name: as in `algorithm=NAME`.
    """

    name: str

    def applied(self, session: Session) -> AbstractContextManager[None]:
        """While entered, the session's model computes its convolutions by this algorithm; undone on leaving.

        Args:
            session: a loaded model.
        """

    def forget(self) -> None:
        """What ran before is no longer in the report: a point begins."""

    def recount(self) -> None:
        """What runs until the report is asked for is one call of the model."""

    def report(self) -> AlgorithmReport | None:
        """What ran since the last `forget`; None where nothing was asked for."""

    def rivals(self) -> tuple[str, ...]:
        """Algorithms against which the whole model is measured in the same run."""

    def regret(self) -> None:
        """What was chosen is not to be chosen again without being tried: as a whole it is slower than a rival."""

    def instead(self, rival: str, work: Callable[[], T]) -> T:
        """Work while a rival computes: `default`, torch's own choice, or `benchmark`, its own search.

        Args:
            rival: one of them.
            work: what to do; in a thread of the rival's own.

        Returns:
            What `work` does.
        """

    def prove(self, call: Callable[[], Any]) -> bool:
        """Look at the kernels that a call launches, if that is asked for; the report has them from then on.

        Args:
            call: of the whole model, as it is timed but for a captured graph.

        Returns:
            Whether it was looked at.
        """

    def launched_share(self) -> Metric | None:
        """Of the passes by cuDNN's name, the share that was launched as captured; None where there were none."""

    def output_error(self, inputs: Any) -> Metric | None:
        """By how much the model's outputs differ from those of `default`; None where nothing was asked for.

        Args:
            inputs: of the model.
        """
