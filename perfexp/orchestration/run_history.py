"""Run history: earlier runs of the same command on this machine, which widen the intervals of the next one."""

from __future__ import annotations

import hashlib
import json

import msgspec

from perfexp.diagnosis import environment
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.plan.plan_file import NOT_MEASURED
from perfexp.records.point_times import summary_of
from perfexp.records.record import EarlierTime, Key, Record
from perfexp.records.summary import centers, rows, series_of_processes

#: Number of runs of a command that are remembered, the newest with other work beside them and without.
_MOST_RUNS = 20
#: Keys of a plan that decide how often its points are measured and what else is measured.
_EXTENT = ("stopping", "replicate", "percentiles", "probes", "probe", "ttfp")
#: Kinds of devices of which a machine has one; others have a UUID.
_SINGLE = ("cpu", "mps")
#: Diagnostics of other work beside a measurement.
_DISTURBED = frozenset({"busy_host", "shared_device", "shared_host", "shared_node", "pace_changed"})


class _Remembered(EarlierTime, kw_only=True):
    """A time of one run, and whether other work disturbed it."""

    disturbed: bool = False


def exchange(record: Record, *, is_own: bool) -> list[EarlierTime]:
    """Return the times of the record's points in earlier runs of its command, and cache those of this run.

    Only a run that was measured here is cached (`is_own`): a folder may be somebody else's.


    A time that other work did not disturb has only earlier ones of which the same is true: how much such work changes
    a time says nothing about runs without it.
    """
    if not ((cache := _cache(record)) and (times := _times(record))):
        return []
    try:
        before = msgspec.convert(cache.entries(), dict[str, list[_Remembered]])
    except msgspec.ValidationError:  # another version of perfexp wrote it
        before = {}
    before.pop(record.uid, None)
    if is_own:
        cache.add(record.uid, msgspec.to_builtins(times))
    kinds: dict[bool, list[str]] = {False: [], True: []}
    for uid, of_run in {**before, record.uid: times}.items():
        kinds[any(time.disturbed for time in of_run)].append(uid)
    cache.remove([uid for uids in kinds.values() for uid in uids[:-_MOST_RUNS]])
    own = {(time.key, time.time): time.disturbed for time in times}
    earlier: dict[tuple[Key, str], EarlierTime] = {}
    for uid, of_run in before.items():
        for time in of_run:
            if time.disturbed and not own.get((time.key, time.time)):
                continue
            same = earlier.setdefault((time.key, time.time), EarlierTime(key=time.key, time=time.time, runs=[]))
            same.runs += time.runs
            same.uids.append(uid)
    return [earlier[place] for time in times if (place := (time.key, time.time)) in earlier]


def _times(record: Record) -> list[_Remembered]:
    disturbed = {
        row.key for row in rows(record) if any(doubt.code in _DISTURBED for doubt in (*row.doubts, *record.doubts))
    }
    return [
        _Remembered(
            key=key, time=name, runs=[centers([summary_of(one, ()) for one in series])], disturbed=key in disturbed
        )
        for key, name, series in series_of_processes(record)
    ]


def _cache(record: Record) -> JsonCache | None:
    """Return the cache of a command; None where its model's code or its device may be another one next time."""
    device = record.environment.get("device", {})
    is_known = device.get("uuid") or device.get("kind") in _SINGLE
    if not is_known or not str(record.plan["model"].get("_target_")).startswith("perfexp."):
        return None
    plan = {key: value for key, value in record.plan.items() if key not in (*NOT_MEASURED, *_EXTENT)}
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
    return JsonCache(cache_folder("runs"), {"plan": digest, **environment.identity(record.environment)})
