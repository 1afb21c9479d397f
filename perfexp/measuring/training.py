"""Training results other than times (losses, epoch time), and a model's accuracy.

Used by `procedure` after the timing, and by `epochs` after each epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from perfexp.data import Batches, Data
from perfexp.errors import Unsupported
from perfexp.measuring import verdicts
from perfexp.models import Batch, Session
from perfexp.records import diagnostics
from perfexp.records.quantities import ACCURACY, FIRST_LOSS, LAST_LOSS
from perfexp.records.record import Metric, Point


def add_figures(
    point: Point, *, first_loss: float | None, last_loss: float, steps_per_epoch: int | None
) -> None:
    """Add the first and last step's losses and the seconds per epoch.

    A loss that is infinite or NaN is missing, and the point gets a diagnostic.

    Args:
        first_loss: loss of the point's first step; None if there was none.
        steps_per_epoch: None for endless data.
    """
    not_finite = {}
    for position, name, loss in (("first", FIRST_LOSS, first_loss), ("last", LAST_LOSS, last_loss)):
        is_finite = loss is not None and np.isfinite(loss)
        reason = None if is_finite else f"the loss is {loss}"
        metric = Metric.of(name, loss if is_finite else None, reason=reason)
        point.metrics.append(metric)
        if loss is not None and not is_finite:
            not_finite[position] = loss
    if not_finite:
        position, loss = next(iter(not_finite.items()))
        point.doubts.append(diagnostics.make("not_finite", what=f"the {position} loss is {loss}"))
    point.metrics.append(verdicts.epoch_metric(point, steps_per_epoch))


def can_evaluate(session: Session, data: Data) -> bool:
    """Return whether the data has real labels, as many classes as the model predicts."""
    return data.labelled and data.num_classes == session.num_classes


def no_accuracy(session: Session, data: Data) -> Metric:
    """Return a missing accuracy, for a model with other classes than the labels."""
    reason = (
        f"the model has {session.num_classes} classes, the labels {data.num_classes}; "
        f"set model.num_classes={data.num_classes}"
    )
    return Metric.of(ACCURACY, None, reason=reason)


def add_accuracy(
    point: Point,
    session: Session,
    data: Data,
    opened: Callable[[], AbstractContextManager[Batches]],
    progress: Callable[[str], None],
) -> None:
    """Add the top-1 accuracy over an untimed pass of the evaluation data, or why there is none.

    Args:
        opened: opens the evaluation data.
        progress: called with a status line before the pass.
    """
    if not can_evaluate(session, data):
        point.metrics.append(no_accuracy(session, data))
        return
    progress("accuracy")
    with opened() as batches:
        value = Evaluation(session, batches).accuracy()
        point.metrics.append(Metric.of(ACCURACY, value))


class Evaluation:
    """Untimed passes over the evaluation data, which count correct predictions.

    Args:
        batches: evaluation data, opened by the caller.
        graphs: whether to use a CUDA graph for batches that come in the same tensors each time.
            Without it, many small launches would keep the device waiting. If the capture fails,
            kernels are launched as usual.
    """

    def __init__(self, session: Session, batches: Batches, *, graphs: bool = False) -> None:
        self._session, self._batches, self._can_capture = session, batches, graphs
        #: Batch in the tensors that the graph reads; None without a graph.
        self._captured: Batch | None = None
        self._replay: Callable[[], object] = lambda: None
        #: Correct predictions and predictions of the last replay, which overwrites both.
        self._counts: tuple[Any, Any] = 0, 0

    def accuracy(self) -> float | None:
        """Make a full pass and return the top-1 accuracy, a fraction; None without predictions."""
        correct = total = 0
        with self._session.evaluating():
            for batch in self._batches.epoch():
                correct_in_batch, count = self._count(batch)
                correct, total = correct + correct_in_batch, total + count
        correct, total = int(correct), int(total)
        return correct / total if total else None

    def _count(self, batch: Batch) -> tuple[Any, Any]:
        """Return a batch's numbers of correct predictions and of predictions.

        They may still be on the device; the next replay overwrites them.
        """
        if self._can_capture:
            self._capture(batch)
        if batch is self._captured:
            self._replay()
            return self._counts
        return self._session.correct(self._session.forward(batch.inputs), batch.targets)

    def _capture(self, batch: Batch) -> None:
        """Try once to capture the counting of this batch as a CUDA graph."""
        session, self._can_capture = self._session, False

        def count() -> None:
            self._counts = session.correct(session.forward(batch.inputs), batch.targets)

        try:
            self._replay, self._captured = session.capture(count), batch
        except Unsupported:
            return
        except Exception as error:
            if not session.device.is_out_of_memory(error):
                raise
