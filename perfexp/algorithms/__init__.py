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
    """What an `algorithm` node of the configuration builds."""

    def applied(self, session: Session) -> AbstractContextManager[AppliedAlgorithm | None]:
        """While entered, the session's model computes its convolutions by this algorithm.

        Gives the applied algorithm, or None where torch's own choice stays: then there is nothing to report.
        """


class AppliedAlgorithm(Protocol):
    """An algorithm that replaces torch's own choice in a model; its name is the value of `algorithm=NAME`."""

    name: str

    def begin_point(self) -> None:
        """Drop everything that the report holds of earlier points."""

    def begin_call(self) -> None:
        """Count from zero; the calls until the report count as one call of the model."""

    def report(self) -> AlgorithmReport:
        """Return the report of the point's convolutions; raises `Unsupported` if none of them ran as requested."""

    def baselines(self) -> tuple[str, ...]:
        """Return the baselines against which the whole model is timed: `default`, torch's choice, or `benchmark`."""

    def run_baseline(self, baseline: str, work: Callable[[], T]) -> T:
        """Run some work while a baseline computes the convolutions, in a thread of the baseline's own."""

    def run_eager(self, work: Callable[[], T]) -> T:
        """Run some work as that of a baseline runs: every pass enqueued kernel by kernel, in a thread of its own."""

    def discard_choices(self) -> None:
        """Forget cached per-layer choices; end to end they were slower than a baseline."""

    def prove(self, call: Callable[[], Any]) -> bool:
        """Add the kernels that an uncaptured call of the model launches to the report, if requested; return whether."""

    def launched_share(self) -> Metric | None:
        """Return the share of cuDNN's passes that were launched as captured; None where there were no such passes."""

    def output_error(self, inputs: Any) -> Metric:
        """Return by how much the model's outputs for these inputs differ from those of the baseline `default`."""
