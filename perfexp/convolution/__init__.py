"""Convolution: how a model's convolutions are computed, and the proof of it.

`algorithm=NAME` computes all 2-D convolutions by one algorithm, such as `winograd`. A *pass* is a
forward pass, an input gradient or a weight gradient. An *engine* is one implementation of a pass,
such as `cudnn.gemm`. A *problem* is a convolution with its input shape, data type and device.

May import: cost, devices, host, models, records, statistics, timing. Used by: commands, measuring,
perfexp, plan, worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from perfexp.convolution.coverage import AlgorithmReport
from perfexp.models import Session
from perfexp.records.record import Metric

T = TypeVar("T")


class Backend(StrEnum):
    """Implementation of an algorithm: cuDNN, Triton, torch operations, or the first able."""

    auto = "auto"
    cudnn = "cudnn"
    triton = "triton"
    torch = "torch"


class OnUnsupported(StrEnum):
    """Policy for a layer that an algorithm cannot compute.

    `error` refuses the run, `fallback` leaves the layer to torch, `skip` makes the point
    `unsupported`.
    """

    error = "error"
    fallback = "fallback"
    skip = "skip"


class Objective(StrEnum):
    """Quantity that the best algorithm of a layer minimizes."""

    time = "time"


class Algorithm(Protocol):
    """Object built from an `algorithm` node of the configuration.

    The worker applies it to a session.
    """

    def applied(self, session: Session) -> AbstractContextManager[AppliedAlgorithm | None]:
        """Make the session's model compute its convolutions by this algorithm while entered.

        Yields:
            The applied algorithm, or None if torch's own choice stays, which leaves nothing to
                report.
        """


class AppliedAlgorithm(Protocol):
    """An algorithm that replaces torch's own choice, as the measuring procedure uses it.

    A *baseline* is torch itself, which `algorithm=fastest` is compared with.

    Attributes:
        name: NAME in `algorithm=NAME`.
        group: prefix of its metrics: `algorithm`, or `attention` for the backend of attention.
        is_forced: whether it changes anything; otherwise it records what torch chooses.
    """

    name: str
    group: str
    is_forced: bool

    def begin_point(self) -> None:
        """Discard everything recorded for earlier points."""

    def begin_call(self) -> None:
        """Reset the counts; calls until the report count as a single call of the model."""

    def report(self) -> AlgorithmReport:
        """Return the report on the point's convolutions.

        Raises:
            Unsupported: no convolution ran as requested.
        """

    def baselines(self) -> tuple[str, ...]:
        """Return the baselines to time the whole model against; empty if there are none.

        They are `default`, torch's own choice, and on a GPU with cuDNN `benchmark`, torch's search.
        """

    def run_baseline(self, baseline: str, work: Callable[[], T]) -> T:
        """Run work while a baseline computes the convolutions, in the baseline's own thread."""

    def run_eager(self, work: Callable[[], T]) -> T:
        """Run work the way baselines run: kernel by kernel, in its own thread."""

    def discard_choices(self) -> None:
        """Forget cached per-layer choices; end to end they were slower than a baseline."""

    def prove(self, call: Callable[[], Any]) -> bool:
        """Add the kernels that an uncaptured model call launches to the report, if requested.

        Returns:
            Whether a proof was requested.
        """

    def launched_share(self) -> Metric | None:
        """Return the share of cuDNN passes launched as captured; None without cuDNN passes."""

    def output_error(self, inputs: Any) -> Metric | None:
        """Return the error of the model's outputs relative to the `default` baseline, if any."""
