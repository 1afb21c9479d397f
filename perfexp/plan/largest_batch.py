"""Search for the largest batch that fits into the device's memory (batch_size=max).

A *trial* measures one batch in its own process; it fits or runs out of memory. All functions are
pure: from the results so far they return the next trial, or the batch that was found, so that a run
can be interrupted and continued at any time. Until then the batch of a point is `LARGEST`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from msgspec.structs import replace

from perfexp.records.quantities import DEVICE_MEMORY, PEAK_MEMORY, RESERVED_MEMORY
from perfexp.records.record import LARGEST, Key, Point, Status, timed_key, trial_key
from perfexp.records.sizes import MOST_SAMPLES

#: Limit on the processes for a search.
MOST_TRIALS = 8
#: First batch to try if nothing is known: some models do not train on a single sample.
SMALLEST = 2
#: Trials within this relative distance from the edge of the memory double the next step.
_NEAR = 0.1
#: First step down from a batch that does not fit, relative to it.
_STEP_DOWN = 0.005
#: Fact name for the trials behind a timed point's batch.
TRIALS = "batch_trials"
#: Statuses of a batch that does not fit. Any other failure ends the search without a batch.
_TOO_LARGE = (Status.OOM, Status.OOM_PREDICTED)
#: Limit on memory sizes, beyond any device.
_MOST_BYTES = 1 << 63


class Trial(NamedTuple):
    """A batch that was tried.

    Attributes:
        fits: whether it fits into the memory.
        used_bytes: memory that its calls used; None if unknown.
    """

    batch_size: int
    fits: bool
    used_bytes: float | None = None


def next_batch(
    trials: Sequence[Trial],
    *,
    start: int,
    capacity_bytes: float | None = None,
    most: int = MOST_TRIALS,
) -> int | None:
    """Return the batch to try next; None if the largest is known, or after `most` trials.

    A line through two batches' used bytes leads to the edge of the memory. From there, steps double
    until they have passed the edge, and bisection finishes the search. If the used bytes are
    unknown, the batch doubles.

    Args:
        trials: trials so far, in order.
        start: first batch to try.
        capacity_bytes: approximate device memory; a wrong value only costs trials.
    """
    fits, fails = bracket(trials)
    if len(trials) >= most or fails - fits <= 1:
        return None
    if not trials:
        return start
    if not fits:
        if len(trials) == 1 or fails == SMALLEST:
            return fails // 2
        return SMALLEST
    lowest, highest = fits + _step(trials, fits), MOST_SAMPLES
    guess = _crossing(trials, capacity_bytes)
    if fails <= MOST_SAMPLES:
        highest = fails - max(1, round(fails * _STEP_DOWN)) * _step(trials, fails)
    if lowest > highest or (guess is None and fails <= MOST_SAMPLES):
        return (fits + fails) // 2
    return min(max(2 * fits if guess is None else guess, lowest), highest)


def bracket(trials: Iterable[Trial]) -> tuple[int, int]:
    """Return the largest batch that fits and the smallest that does not.

    For example, (64, 72) if 64 fits and 72 does not. Without such trials they are 0 and a batch
    beyond the limit.
    """
    trials = list(trials)
    fails = min((trial.batch_size for trial in trials if not trial.fits), default=MOST_SAMPLES + 1)
    fitting = [trial.batch_size for trial in trials if trial.fits and trial.batch_size < fails]
    return max(fitting, default=0), fails


def _step(trials: Iterable[Trial], edge: int) -> int:
    """Return 1, doubled for each further trial near this edge with the same outcome.

    For example, three such trials give 4. Steps thus grow while the search moves in one direction.

    Args:
        edge: batch of the bracket, that fits or does not.
    """
    trials = list(trials)
    outcome = next(trial.fits for trial in trials if trial.batch_size == edge)
    others_near = -1  # without the edge itself
    for trial in trials:
        others_near += trial.fits is outcome and abs(trial.batch_size - edge) <= _NEAR * edge
    return 1 << others_near


def _crossing(trials: Iterable[Trial], capacity_bytes: float | None) -> int | None:
    """Return the batch where the line through two batches reaches the capacity; None if unknown.

    Peak memory is the maximum over straight lines, so the result is exact once both batches lie on
    the last line. If batches are close together, the direction is unreliable. Used bytes are then
    assumed to be proportional to batch size.
    """
    sizes = {trial.batch_size: trial.used_bytes for trial in trials if trial.used_bytes}
    if not capacity_bytes or not sizes:
        return None
    largest = max(sizes)
    used = sizes[largest]
    distant = [batch for batch in sizes if batch <= (1 - _NEAR) * largest]
    if not distant:
        return math.floor(largest * capacity_bytes / used)
    second = max(distant)
    bytes_per_sample = (used - sizes[second]) / (largest - second)
    if bytes_per_sample <= 0:
        return None
    return math.floor(largest + (capacity_bytes - used) / bytes_per_sample)


def resolved(keys: Iterable[Key], results: Collection[Point]) -> list[Key]:
    """Return keys in which the batch that was found replaces `LARGEST`, each once.

    `LARGEST` stays until the search is over.
    """
    largest: dict[Key, int] = {}
    replaced: dict[Key, None] = {}
    for key in keys:
        if key.batch_size == LARGEST:
            search = _search(key)
            if search not in largest:
                largest[search] = _Search(search, results).found
            key = replace(key, batch_size=largest[search])
        replaced[key] = None
    return list(replaced)


def trial_keys(keys: Iterable[Key], results: Collection[Point]) -> list[Key]:
    """Return the next trial for each unfinished search.

    Before any trial its batch is `LARGEST`: the worker chooses the first one from a memory trace.
    """
    trials = []
    for key in dict.fromkeys(_search(key) for key in keys if key.batch_size == LARGEST):
        batch = _Search(key, results).upcoming
        if batch is not None:
            trials.append(trial_key(replace(key, batch_size=batch)))
    return trials


def trials_of(key: Key, results: Collection[Point]) -> list[dict[str, Any]]:
    """Return the trials that found a timed point's batch as facts for its record, in order.

    Empty for a point whose batch was not searched.
    """
    search = _Search(_search(key), results)
    if search.found != key.batch_size:
        return []
    return search.facts


def failures(keys: Iterable[Key], results: Collection[Point]) -> list[Point]:
    """Return results for points whose batch cannot be found.

    A trial failed there for another reason than too little memory.
    """
    points = []
    for key in keys:
        if key.batch_size != LARGEST:
            continue
        timed = replace(key, phase="inference") if key.phase == "ttfp" else timed_key(key)
        search = _Search(_search(timed), results)
        if failed := search.failed:
            point = Point(key=key, status=Status(failed["status"]), error=failed.get("error"))
            if key.is_timed:
                point.facts[TRIALS] = search.facts
            points.append(point)
    return points


def outcomes(facts: Iterable[Mapping[str, Any]]) -> list[Trial]:
    """Return those trials, as facts from a record, that show whether their batch fits.

    The search brackets the largest batch with them.
    """
    trials = []
    for fact in filter(_is_outcome, facts):
        fits, used = fact["status"] == Status.OK, _valid_bytes(fact.get("used_bytes"))
        trials.append(Trial(fact["batch_size"], fits, used))
    return trials


def _search(key: Key) -> Key:
    """Return the key of a search: its points have this key but for batch and replicate."""
    return replace(key, batch_size=LARGEST, replicate=0)


class _Search:
    """The state of one search, from results so far.

    Measurements that ran out of memory count as trials. Results from outside a search are ignored.

    Attributes:
        facts: trials in order, as in a record.

    Args:
        key: key of the search, see `_search`.
    """

    def __init__(self, key: Key, results: Collection[Point]) -> None:
        trials, of_timed_points, too_large = list[Any](), list[Any](), list[Any]()
        self._measured: list[int] = []
        self._capacity: float | None = None
        for point in results:
            if _search(point.key) == trial_key(key):
                trials.append(_fact(point))
                self._capacity = self._capacity or _valid_bytes(point.facts.get("capacity_bytes"))
            elif _search(point.key) == key and isinstance(point.facts.get(TRIALS), list):
                of_timed_points.append(point.facts[TRIALS])
                is_known = _is_batch(point.key.batch_size)
                if is_known and point.status not in _TOO_LARGE:
                    self._measured.append(point.key.batch_size)
                elif is_known and not point.key.replicate:
                    too_large.append(_fact(point))
        # a finished record has no trials, but its timed points name them
        facts = trials or next(iter(of_timed_points), [])
        self.facts = list(filter(_is_fact, [*facts, *too_large]))

    @cached_property
    def _trials(self) -> list[Trial]:
        return outcomes(self.facts)

    @property
    def failed(self) -> dict[str, Any] | None:
        """Return the trial that ended the search without a batch; None if there is none."""
        if self._measured:
            return None
        return next((fact for fact in self.facts if not _is_outcome(fact)), None)

    @property
    def upcoming(self) -> int | None:
        """Return the next batch to try; None if the search is over."""
        if self._measured or self.failed:
            return None
        return next_batch(self._trials, start=LARGEST, capacity_bytes=self._capacity)

    @property
    def found(self) -> int:
        """Return the largest batch that fits, or 1 if none does.

        It is `LARGEST` while unknown, or if a trial failed.
        """
        if self._measured:
            return self._measured[0]
        if self.failed or self.upcoming is not None:
            return LARGEST
        return bracket(self._trials)[0] or 1


def _is_batch(value: object) -> bool:
    """Return whether a value from a record is a possible batch size."""
    return type(value) is int and 1 <= value <= MOST_SAMPLES


def _valid_bytes(value: Any) -> float | None:
    """Return a memory size from a record; None if it is not a possible number."""
    if type(value) in (int, float) and 1 <= value <= _MOST_BYTES:
        return value  # type: ignore[no-any-return]
    return None


def _is_fact(entry: object) -> bool:
    """Return whether an entry from a record, which may be anything, is a valid trial.

    A failed search may have an unknown first batch.
    """
    if not isinstance(entry, dict) or entry.get("status") not in list(Status):
        return False
    batch = entry.get("batch_size")
    is_unknown = type(batch) is int and batch == LARGEST and entry["status"] != Status.OK
    return (is_unknown or _is_batch(batch)) and isinstance(entry.get("error"), str | None)


def _is_outcome(fact: Mapping[str, Any]) -> bool:
    """Return whether a trial shows that its batch fits or does not."""
    return fact["status"] in (Status.OK, *_TOO_LARGE) and fact["batch_size"] != LARGEST


def _used_bytes(point: Point) -> float | None:
    """Return the memory that calls cannot do without, in bytes; None if unknown.

    It is the peak of tensors, and memory outside torch. The allocator reserves more if there is
    more, and releases it when a tensor needs it.
    """
    peak = _metric_bytes(point, PEAK_MEMORY)
    reserved = _metric_bytes(point, RESERVED_MEMORY)
    device = _metric_bytes(point, DEVICE_MEMORY)
    if peak and reserved and device:
        return peak + max(device - reserved, 0.0)
    return peak or device


def _metric_bytes(point: Point, name: str) -> float | None:
    """Return a metric in bytes; None if the point has none."""
    metric = point.metric(name)
    if not metric:
        return None
    return _valid_bytes(metric.value)


def _fact(point: Point) -> dict[str, Any]:
    """Return a trial's result as a fact for a record."""
    fact: dict[str, Any] = {"batch_size": point.key.batch_size, "status": point.status.value}
    if point.status is Status.OK and (used := _used_bytes(point)):
        fact["used_bytes"] = used
    if point.error:
        fact["error"] = point.error
    return fact
