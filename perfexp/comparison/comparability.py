"""Comparability: classify what differs between two runs as their subject, as a confounder, or as neutral."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from perfexp.diagnosis.environment import fact_at
from perfexp.errors import UserError, did_you_mean
from perfexp.records.diagnostics import Severity
from perfexp.records.record import Key, Point, Record
from perfexp.summaries.subject import one_line


class Role(StrEnum):
    """What a differing fact means for a comparison."""

    SUBJECT = "subject"  # what the user varied
    CONFOUNDER = "confounder"  # may explain the ratio instead of the subject
    NEUTRAL = "neutral"  # does not change a time


class Difference(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A fact that differs between the baseline and another side.

    Attributes:
        key: short name, as for `--allow`.
        baseline: value of the baseline, as text.
        other: value of the other side, as text.
        allowed: whether the user accepts this confounder.
        measures: the measures that a confounder affects; empty for all of them.
        help: what to do about a confounder.
    """

    key: str
    role: Role
    baseline: str
    other: str
    allowed: bool = False
    measures: tuple[str, ...] = ()
    help: str = ""

    def prevents(self, measure: str) -> bool:
        """Whether it prevents the comparison of this measure."""
        return self.role is Role.CONFOUNDER and not self.allowed and measure in (self.measures or (measure,))


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A group of facts with one name.

    Attributes:
        role: what a difference means.
        environment: dotted places in a record's environment; an unknown value differs from nothing.
        plan: dotted places in its plan; unknown values count.
        of_device: whether devices of another product have other values anyway; then their difference is the subject.
        may_be_subject: whether a confounder is the subject of runs that differ in nothing else.
        set_by: subject that sets the facts; if it differs, they follow.
        measures: the affected measures; empty for all of them.
        help: what to do about a confounder.
    """

    role: Role
    environment: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    of_device: bool = False
    may_be_subject: bool = False
    set_by: str | None = None
    measures: tuple[str, ...] = ()
    help: str = ""


_HOST_TIMES = ("latency", "throughput", "p95")
#: Values of one fact that are shown.
_SHOWN = 3
#: Facts by name. Settings of an algorithm or a model count with it; where nothing differs, nothing is reported.
FACTS = {
    "model": Fact(role=Role.SUBJECT, plan=("model",)),
    "algorithm": Fact(role=Role.SUBJECT, plan=("algorithm",)),
    "precision": Fact(role=Role.SUBJECT, plan=("precision",)),
    "execution": Fact(
        role=Role.SUBJECT,
        plan=("execution.compile", "execution.channels_last", "execution.cuda_graph", "execution.ddp"),
    ),
    "training": Fact(role=Role.SUBJECT, plan=("mode.train",)),
    "device": Fact(role=Role.SUBJECT, environment=("device.name", "device.kind")),
    "gpus": Fact(role=Role.SUBJECT, plan=("gpu.count",)),
    "driver": Fact(role=Role.SUBJECT, environment=("device.driver",)),
    "torch": Fact(role=Role.SUBJECT, environment=("packages.torch",)),
    "libraries": Fact(
        role=Role.SUBJECT,
        environment=("device.cuda", "device.rocm", "device.cudnn", "packages.torchvision", "packages.triton", "python"),
    ),
    "commit": Fact(role=Role.SUBJECT, environment=("git.commit", "git.dirty")),
    "power_limit": Fact(
        role=Role.CONFOUNDER,
        environment=("device.power_limit_watts",),
        of_device=True,
        help="set the same power limit on both (nvidia-smi -pl, as the machine's administrator) and measure again",
    ),
    "clocks": Fact(
        role=Role.CONFOUNDER,
        environment=("device.application_clock_hertz", "device.application_clock_changed", "device.auto_boost"),
        of_device=True,
        help="lock the clocks on both sides, or on neither, and measure again",
    ),
    "ecc": Fact(
        role=Role.CONFOUNDER,
        environment=("device.ecc",),
        of_device=True,
        help="use the same ECC mode on both (nvidia-smi -e, as the machine's administrator)",
    ),
    "mig": Fact(role=Role.CONFOUNDER, environment=("device.mig",), help="measure both on whole boards"),
    "tf32": Fact(
        role=Role.CONFOUNDER,
        environment=("session.matmul_allow_tf32", "session.cudnn_allow_tf32"),
        set_by="precision",
        help="choose the same precision=tf32 or precision=fp32 for both",
    ),
    "cudnn_benchmark": Fact(
        role=Role.CONFOUNDER,
        environment=("session.cudnn_benchmark",),
        plan=("execution.cudnn_benchmark",),
        set_by="algorithm",
        may_be_subject=True,
        help="set the same execution.cudnn_benchmark for both",
    ),
    "deterministic": Fact(
        role=Role.CONFOUNDER,
        environment=("session.deterministic",),
        plan=("execution.deterministic",),
        may_be_subject=True,
        help="set the same execution.deterministic for both",
    ),
    "threads": Fact(
        role=Role.CONFOUNDER,
        environment=("session.threads", "session.interop_threads"),
        plan=("execution.threads", "execution.interop_threads"),
        of_device=True,
        may_be_subject=True,
        help="set the same execution.threads and execution.interop_threads for both",
    ),
    "cpu": Fact(
        role=Role.CONFOUNDER,
        environment=("cpu.name", "cpu.governors"),
        of_device=True,
        measures=_HOST_TIMES,
        help="measure both on machines with the same CPU and frequency governor",
    ),
    "data": Fact(role=Role.CONFOUNDER, plan=("data",), help="set the same data= for both"),
    "cache": Fact(role=Role.CONFOUNDER, plan=("cache",), help="set the same cache= for both"),
    "perfexp": Fact(
        role=Role.CONFOUNDER,
        environment=("perfexp",),
        help="measure both with the same version of perfexp: versions may time differently",
    ),
    "machine": Fact(
        role=Role.NEUTRAL,
        environment=("host", "os", "kernel", "container", "device.uuid", "device.vbios", "packages.numpy"),
    ),
    "stopping": Fact(role=Role.NEUTRAL, plan=("stopping", "replicate", "percentiles", "probes", "seed")),
}
#: Confounders of a point, which have no place in the environment.
_OF_POINTS = ("device_method", "diagnostics")
#: Confounders that `--allow` accepts.
ALLOWABLE = (*(key for key, fact in FACTS.items() if fact.role is Role.CONFOUNDER), *_OF_POINTS)


def check_allowed(keys: Collection[str]) -> None:
    """Raise UserError for a key that is not a confounder."""
    for key in keys:
        if key not in ALLOWABLE:
            raise UserError(f"--allow {key}: there is no such confounder. {did_you_mean(key, ALLOWABLE)}".rstrip())


def differences(baseline: Record, other: Record, allowed: Collection[str] = ()) -> list[Difference]:
    """Return what differs between two runs, classified; the subject first, then confounders."""
    differing = {key: texts for key, fact in FACTS.items() if (texts := _difference(fact, baseline, other))}
    is_other_device = "device" in differing
    subjects = {key for key in differing if FACTS[key].role is Role.SUBJECT}
    found = []
    for key, (one, two) in differing.items():
        fact = FACTS[key]
        role = fact.role
        if role is Role.CONFOUNDER and ((fact.of_device and is_other_device) or fact.set_by in subjects):
            role = Role.SUBJECT
        # what the user set in the plan, if that is all that differs
        is_set = any(fact_at(baseline.plan, place) != fact_at(other.plan, place) for place in fact.plan)
        if fact.may_be_subject and is_set and not subjects:
            role = Role.SUBJECT
        is_confounder = role is Role.CONFOUNDER
        found.append(
            Difference(
                key=key,
                role=role,
                baseline=one,
                other=two,
                allowed=is_confounder and key in allowed,
                measures=fact.measures if is_confounder else (),
                help=fact.help if is_confounder else "",
            )
        )
    return sorted(found, key=lambda difference: list(Role).index(difference.role))


def point_differences(
    baseline: tuple[Record, Key], other: tuple[Record, Key], allowed: Collection[str] = ()
) -> list[Difference]:
    """Return the confounders of a pair of points: how `device` was timed, and errors of a figure."""
    sides = [_points(*baseline), _points(*other)]
    methods = [side[0].facts.get("device_method") for side in sides]
    found = []
    if None not in methods and methods[0] != methods[1]:
        remedy = "set execution.cuda_graph=true for both; latency and throughput can be compared as they are"
        found.append(("device_method", str(methods[0]), str(methods[1]), ("device",), remedy))
    errors = [dict(_errors(record, points)) for (record, _), points in zip((baseline, other), sides, strict=True)]
    for code in dict.fromkeys((*errors[0], *errors[1])):
        texts = [side.get(code, "no such error") for side in errors]
        measures = ("energy",) if code.startswith("meter_") else ()
        found.append(("diagnostics", *texts, measures, f"fix the cause of {code} and measure again"))  # type: ignore[arg-type]
    return [
        Difference(
            key=key,
            role=Role.CONFOUNDER,
            baseline=one,
            other=two,
            measures=measures,
            help=remedy,
            allowed=key in allowed,
        )
        for key, one, two, measures, remedy in found
    ]


def _points(record: Record, key: Key) -> list[Point]:
    """The results of a point: of its first process, then of the others."""
    same = [point for point in record.points if msgspec.structs.replace(point.key, replicate=0) == key]
    return sorted(same, key=lambda point: point.key.replicate)


def _errors(record: Record, points: list[Point]) -> Iterator[tuple[str, str]]:
    """Codes and messages of the diagnostics of severity `error`."""
    for item in (*record.doubts, *(item for point in points for item in point.doubts)):
        if item.severity is Severity.ERROR:
            yield item.code, one_line(item.message)


def _leaves(value: Any, place: str) -> dict[str, Any]:
    """The values below a place of a plan, without the classes that implement them."""
    if not isinstance(value, Mapping):
        return {place: value}
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        if not str(name).startswith("_"):
            leaves |= _leaves(inner, f"{place}.{name}")
    return leaves


def _difference(fact: Fact, baseline: Record, other: Record) -> tuple[str, str] | None:
    """What differs in a fact, as texts; None without a difference."""
    one, two = (
        {place: fact_at(record.environment, place) for place in fact.environment} for record in (baseline, other)
    )
    places = [place for place in one if None not in (one[place], two[place]) and one[place] != two[place]]
    for values, record in ((one, baseline), (two, other)):
        for place in fact.plan:
            values |= _leaves(fact_at(record.plan, place), place)
    settings = [place for place in one | two if place not in fact.environment]
    places += [place for place in settings if one.get(place) != two.get(place)]
    if not places:
        return None
    named = [place for place in places if place.endswith(".name")]  # a name stands for the settings behind it
    shown = (named or places)[:_SHOWN]
    return _text(one, shown), _text(two, shown)


def _text(values: Mapping[str, Any], places: list[str]) -> str:
    words = []
    for place in places:
        value = values.get(place)
        name = "" if len(places) == 1 else f"{place.rpartition('.')[2]} "
        words.append(f"{name}{value:g}" if isinstance(value, float) else f"{name}{value}")
    return one_line(", ".join(words))
