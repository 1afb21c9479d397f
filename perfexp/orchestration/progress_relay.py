"""Progress relay: pass the events of a worker on to the progress display."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from perfexp.orchestration.preparation import Assignment
from perfexp.records import summary
from perfexp.records.paths import RunPaths
from perfexp.records.record import LARGEST, Key, Point, Status, read_points, without_replicate
from perfexp.reports.progress import Progress
from perfexp.reports.run_status import measured_seconds
from perfexp.summaries.wording import epoch_text, median_text


class ProgressRelay:
    """Listener of a worker's events.

    Args:
        begun: called when the first measurement begins.
        follow: called with the point of a training after each epoch, with that epoch alone.
    """

    def __init__(
        self,
        progress: Progress,
        keys: Sequence[Key],
        left: Sequence[Key],
        assignment: Assignment,
        begun: Callable[[], None],
        follow: Callable[[Point], None] = lambda _: None,
    ) -> None:
        self._progress, self._keys, self._left = progress, list(keys), set(left)
        self._assignment, self._begun, self._follow = assignment, begun, follow
        self._paths = RunPaths(assignment.folder)
        self._count = assignment.plan.epochs or 0
        self._epoch_seconds: list[float] = []
        self._seconds = measured_seconds(read_points(self._paths.points))
        self._estimate()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "point":
            self._begun()
            self._begun = lambda: None
        if "training" in event:
            self._train(msgspec.convert(event["training"], Point))
        if event["event"] == "block":
            show = self._progress.result if event.get("is_result") else self._progress.block
            (self._progress.waiting if event.get("patient") else show)(event["text"])
        if "key" not in event:
            return
        own = msgspec.convert(event["key"], Key)
        key, result = self._planned(own), ""
        if event["event"] == "done":
            self._left.discard(key)
            result = self._result(own)
            self._estimate()
        if key not in self._keys:
            self._progress.block(str(own))
        elif event["event"] == "point":
            self._progress.point(str(own))
            if self._count and key.phase == "train":
                self._epoch_seconds = []
                self._progress.epochs(0, self._count, "", None)
        elif event["event"] == "done":
            self._progress.done(event["status"], result)  # only the display knows why

    def _train(self, training: Point) -> None:
        """Show an epoch that has ended, and have it sent."""
        epoch = training.epochs[-1]
        self._epoch_seconds.append(epoch.total_seconds)
        left_seconds = statistics.mean(self._epoch_seconds) * (self._count - epoch.number)
        self._progress.epochs(epoch.number, self._count, epoch_text(epoch), left_seconds)
        if not training.key.replicate:
            self._follow(training)

    def _planned(self, key: Key) -> Key:
        """The key under which a point was planned: its batch may have been found since."""
        unknown = msgspec.structs.replace(key, batch_size=LARGEST)
        return unknown if key not in self._keys and unknown in self._keys else key

    def _estimate(self) -> None:
        whole = self._assignment.whole
        is_known = self._seconds or not (whole and whole.seconds)  # other runs are a better guide than the plan
        self._progress.remaining(self._assignment.seconds(self._left, self._seconds) if is_known else None)

    def _result(self, key: Key) -> str:
        """The median of a point by all processes so far; empty if it failed."""
        points, planned = read_points(self._paths.points), without_replicate(key)
        self._seconds = measured_seconds(points)
        is_ok = any(one.key == key and one.status is Status.OK for one in points)
        alike = [one for one in points if without_replicate(one.key) == planned]
        return median_text(summary.row(alike, ())) if is_ok else ""
