"""Comparability: classify differing facts between two runs as subject, confounder or neutral.

The subject is what the user varied on purpose, for example the algorithm. A confounder, for example
another power limit, could explain a ratio instead of the subject. It makes figures not comparable,
unless the user accepts it with `--allow`. `judging.compare` asks for the differences between two
runs, and between two points. A place is a dotted path in a record's plan or environment, for
example `device.name`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from perfexp.errors import UserError, did_you_mean
from perfexp.plan.plan_file import changed_sources
from perfexp.records.diagnostics import Severity
from perfexp.records.fact_lookup import fact_at, vendor
from perfexp.records.quantities import ACCURACY, METER_ACCURACY
from perfexp.records.record import Point, Record
from perfexp.records.subject import one_line, subject
from perfexp.records.summary import SINGLES, comparable

#: Values shown for each fact.
_SHOWN = 3
#: Subjects that may differ in addition to another subject.
_INCIDENTAL = {"commit", "code", "board", "seed"}
#: Last parts of places that need no name of their own next to the fact's name: `device A → B`.
_PLAIN = {"name", "kind", "commit", "count", "uuid"}
#: Measures that depend on the host's speed.
_OF_HOST = ("latency", "throughput", "p95")


class Role(StrEnum):
    """Meaning of a differing fact for a comparison."""

    SUBJECT = "subject"  # what the user varied
    CONFOUNDER = "confounder"  # may explain the ratio instead of the subject
    NEUTRAL = "neutral"  # does not change a time


class Difference(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fact that differs between the baseline and another side.

    Attributes:
        key: short name, as for `--allow`.
        role: meaning for the comparison.
        baseline: the baseline's value in words; empty if `other` is a whole statement.
        other: the other side's value in words.
        allowed: whether the user accepts this confounder.
        measures: measures that a confounder affects; empty for all measures.
        help: remedy for a confounder.
    """

    key: str
    role: Role
    baseline: str
    other: str
    allowed: bool = False
    measures: tuple[str, ...] = ()
    help: str = ""

    @property
    def text(self) -> str:
        """Return both values (`precision fp32 → fp16`) or a statement about the difference."""
        if not self.baseline:
            return self.other
        return f"{self.key} {self.baseline} → {self.other}"

    def affects(self, measure: str) -> bool:
        """Return whether this is a confounder for the measure, allowed or not."""
        return self.role is Role.CONFOUNDER and measure in (self.measures or (measure,))


@dataclass(frozen=True)
class _Fact:
    """Group of facts with a common name, as an entry of `FACTS`.

    Attributes:
        role: meaning of a difference in these facts.
        environment: dotted places in a record's environment; unknown values never count as a
            difference.
        plan: dotted places in a record's plan.
        help: remedy for a confounder.
        follows: subjects that change these facts anyway, so that the facts belong to the subject.
        may_be_subject: whether a confounder becomes the subject if the plans differ in it. This
            requires that all other subjects are `_INCIDENTAL`.
        measures: measures that a confounder affects; empty for all measures.
    """

    role: Role
    environment: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    help: str = ""
    follows: tuple[str, ...] = ()
    may_be_subject: bool = False
    measures: tuple[str, ...] = ()


def _subject(*plan: str, environment: tuple[str, ...] = ()) -> _Fact:
    """Return a fact that the user may have varied on purpose, by its places."""
    return _Fact(Role.SUBJECT, environment, plan)


def _setting(name: str, *environment: str, follows: tuple[str, ...] = ()) -> _Fact:
    """Return the fact for a setting `execution.NAME` that the user may have varied on purpose.

    Args:
        environment: places in the environment where the setting shows.
        follows: subjects that change the setting anyway.
    """
    remedy = f"set the same execution.{name} for both"
    return _Fact(
        Role.CONFOUNDER, environment, (f"execution.{name}",), remedy, follows, may_be_subject=True
    )


def _board(remedy: str, *names: str) -> _Fact:
    """Return a fact about a GPU board: a confounder, unless the boards are of different products.

    Args:
        remedy: what to do about a difference.
        names: names of device facts.
    """
    return _Fact(
        Role.CONFOUNDER, tuple(f"device.{name}" for name in names), help=remedy, follows=("device",)
    )


#: Facts by name.
FACTS = {
    "model": _subject("model"),
    "algorithm": _subject("algorithm"),
    "precision": _subject("precision"),
    "execution": _subject(
        "execution.compile", "execution.channels_last", "execution.cuda_graph", "execution.ddp"
    ),
    "training": _subject("mode.train"),
    "device": _subject(environment=("device.name", "device.kind")),
    "board": _subject(environment=("device.uuid",)),
    "gpus": _subject("gpu.count", "gpu.nodes"),
    "driver": _subject(environment=("device.driver",)),
    "torch": _subject(environment=("packages.torch",)),
    "libraries": _subject(
        environment=(
            "device.cuda",
            "device.rocm",
            "device.cudnn",
            "packages.torchvision",
            "packages.triton",
            "python",
        )
    ),
    "commit": _subject(environment=("git.commit", "git.dirty")),
    "code": _subject(),  # the user's own files
    "power_limit": _board(
        "set the same power limit on both (nvidia-smi -pl) and measure again", "power_limit_watts"
    ),
    "clocks": _board(
        "lock the clocks on both sides or on neither, and measure again",
        *("application_clock_hertz", "application_clock_changed", "auto_boost"),
    ),
    "ecc": _board("use the same ECC mode on both (nvidia-smi -e)", "ecc"),
    "mig": _board("measure both on whole boards", "mig"),
    "tf32": _Fact(
        Role.CONFOUNDER,
        ("session.matmul_allow_tf32", "session.cudnn_allow_tf32"),
        help="choose precision=tf32 or precision=fp32 for both",
        follows=("precision",),
    ),
    "cudnn_benchmark": _setting(
        "cudnn_benchmark", "session.cudnn_benchmark", follows=("algorithm",)
    ),
    "deterministic": _setting("deterministic", "session.deterministic"),
    "threads": _setting("threads", "session.threads", follows=("device",)),
    "interop_threads": _setting("interop_threads", "session.interop_threads", follows=("device",)),
    "cpu": _Fact(
        Role.CONFOUNDER,
        ("cpu.name", "cpu.governors"),
        help="measure both with the same CPU and frequency governor",
        follows=("device",),
        measures=_OF_HOST,
    ),
    "data": _Fact(Role.CONFOUNDER, plan=("data",), help="set the same data= for both"),
    "cache": _Fact(Role.CONFOUNDER, plan=("cache",), help="set the same cache= for both"),
    "target": _Fact(
        Role.CONFOUNDER,
        plan=("mode.train.target_accuracy",),
        help="set the same mode.train.target_accuracy for both",
        measures=("time_to_accuracy",),
    ),
    "perfexp": _Fact(
        Role.CONFOUNDER, ("perfexp",), help="measure both with one version of perfexp"
    ),
    "machine": _Fact(
        Role.NEUTRAL, ("host", "os", "kernel", "container", "image.reference", "device.vbios")
    ),
    "seed": _subject("seed"),  # matters for accuracies and losses
    "stopping": _Fact(Role.NEUTRAL, plan=("stopping",)),
    "processes": _Fact(Role.NEUTRAL, plan=("processes",)),
    "percentiles": _Fact(Role.NEUTRAL, plan=("percentiles",)),
    "probes": _Fact(Role.NEUTRAL, plan=("probes",)),
}
#: Confounders that `--allow` accepts; the last five belong to points.
ALLOWABLE = (
    *(key for key, fact in FACTS.items() if fact.role is Role.CONFOUNDER),
    "device_method",
    "rate_method",
    "process_start",
    "meter",
    "diagnostics",
)


def check_allowed(keys: Collection[str]) -> None:
    """Raise UserError for a key that is not a confounder; commands check `--allow` with it."""
    for key in keys:
        if key not in ALLOWABLE:
            text = f"--allow {key}: there is no such confounder. {did_you_mean(key, ALLOWABLE)}"
            raise UserError(text.rstrip())


def differences(baseline: Record, other: Record, allowed: Collection[str] = ()) -> list[Difference]:
    """Return the facts that differ between two runs: the subject first, then confounders.

    Most facts are differences in `FACTS`. Some need both records: the number format of `precision`,
    the user's own source files, and facts that only matter if something else was measured.

    Args:
        allowed: keys of confounders that the user accepts.
    """
    sides = (baseline, other)
    differing = {}
    for key, fact in FACTS.items():
        if texts := _difference(fact, baseline, other):
            differing[key] = texts
    before, after = (subject(record.plan, record.environment).number_format for record in sides)
    # with torch's own flags, the precision depends on the device
    if "precision" in differing or before != after:
        differing["precision"] = before, after
        differing.pop("tf32", None)
    elif texts := _tf32_of_vendors(*sides):
        differing.setdefault("tf32", texts)
    if files := changed_sources(baseline.plan, other.plan):
        text = ", ".join(files[:_SHOWN])
        if len(files) > _SHOWN:
            text += f" and {len(files) - _SHOWN} more"
        verb = "differ" if files[1:] else "differs"
        differing["code"] = "", one_line(f"{text} {verb}")
    if "device" in differing:
        differing.pop("board", None)  # another product is always another board
    if not all(map(_has_training, sides)):
        differing.pop("training", None)  # no training is compared
    roles = {key: FACTS[key].role for key in differing}
    if "seed" in roles and not all(map(_has_accuracy, sides)):
        roles["seed"] = Role.NEUTRAL  # a seed does not change times
    subjects = {key for key, role in roles.items() if role is Role.SUBJECT}
    result = []
    for key, (before, after) in differing.items():
        fact, role = FACTS[key], roles[key]
        # without another subject, a setting that the plans differ in is what the user varied
        if fact.may_be_subject and subjects <= _INCIDENTAL:
            for plan_path in fact.plan:
                if fact_at(baseline.plan, plan_path) != fact_at(other.plan, plan_path):
                    role = Role.SUBJECT
        if subjects & set(fact.follows):
            role = Role.SUBJECT
        if role is Role.CONFOUNDER:
            result.append(_confounder(key, before, after, allowed, fact.measures, fact.help))
        else:
            result.append(Difference(key=key, role=role, baseline=before, other=after))
    return sorted(result, key=lambda difference: list(Role).index(difference.role))


def _has_training(record: Record) -> bool:
    return any(point.key.phase == "train" for point in record.points)


def _has_accuracy(record: Record) -> bool:
    return any(point.metric(ACCURACY) for point in record.points)


def point_differences(
    baseline: tuple[Record, Sequence[Point]],
    other: tuple[Record, Sequence[Point]],
    allowed: Collection[str] = (),
) -> list[Difference]:
    """Return the confounders for a pair of points.

    These cover `device` and rate methods, process start, meters and diagnostics with severity
    `error`. Each affects certain measures only.

    Args:
        baseline: record, and the point in each process that measured it.
        other: the same for the other side.
        allowed: keys of confounders that the user accepts.
    """
    facts = []
    for record, points in (baseline, other):
        methods: dict[str, Any] = {
            "device_method": points[0].facts.get("device_method"),
            "rate_method": _rate_method(record, points),
            "process_start": _process_start(record, points),
            "meter": fact_at(record.environment, "device.uuid"),
        }
        facts.append(methods)
    # two meters matter only if their known errors could explain the difference in energy
    if not _within_meters(baseline[1], other[1]):
        facts[0]["meter"] = None
    # on a CPU, a forked process shares memory with its fork server
    of_start: tuple[str, ...] = _OF_HOST
    if fact_at(baseline[0].environment, "device.kind") == "cpu":
        of_start += ("memory",)
    confounders = []
    for key, measures, remedy in (
        ("device_method", ("device", "cycles"), "set execution.cuda_graph=true for both"),
        (
            "rate_method",
            ("throughput",),
            "time the pipelined loop of both, which cache=flush leaves out",
        ),
        ("process_start", of_start, "set the same process_start= for both"),
        (
            "meter",
            ("energy",),
            "measure the energy of both on one board, since each meter has an error of its own",
        ),
    ):
        before, after = facts[0][key], facts[1][key]
        if None not in (before, after) and before != after:
            confounders.append(_confounder(key, str(before), str(after), allowed, measures, remedy))
    errors, other_errors = _errors(*baseline), _errors(*other)
    for code in errors | other_errors:
        before = errors.get(code, "no such error")
        after = other_errors.get(code, "no such error")
        measures = ("energy",) if code.startswith("meter_") else ()
        confounders.append(
            _confounder("diagnostics", before, after, allowed, measures, f"fix the cause of {code}")
        )
    return confounders


def _process_start(record: Record, points: Sequence[Point]) -> str | None:
    """Describe how a point's processes were started; None in the caller's process.

    Older versions always started fresh processes.
    """
    if record.environment.get("in_process"):
        return None
    methods = {str(point.facts.get("process_start", "fresh")) for point in points}
    return " and ".join(sorted(methods))


def _rate_method(record: Record, points: Sequence[Point]) -> str | None:
    """Describe how a point's rate was timed; None without a rate.

    Also None on a CPU, because its `latency` is the pipelined loop.
    """
    if fact_at(record.environment, "device.kind") == "cpu":
        return None
    if comparable(points, "throughput"):
        return "pipelined calls"
    if comparable(points, "latency"):
        return "calls that each synchronize"
    return None


def _within_meters(*sides: Sequence[Point]) -> bool:
    """Return whether energies differ by no more than two meters' known errors.

    True if the meters' errors are unknown; False if an energy is.
    """
    energies, errors = [], []
    for points in sides:
        energies.append(_first_value(points, SINGLES["energy"]))
        errors.append(_first_value(points, METER_ACCURACY))
    if None in energies:
        return False
    ratio = abs(math.log(energies[0] or 1) - math.log(energies[1] or 1))
    return None in errors or ratio <= sum(math.log1p(error or 0) for error in errors)


def _first_value(points: Sequence[Point], name: str) -> float | None:
    """Return a metric's first value other than 0 in some points; None if there is none."""
    for point in points:
        metric = point.metric(name)
        if metric and metric.value:
            return metric.value
    return None


def _confounder(
    key: str,
    before: str,
    after: str,
    allowed: Collection[str],
    measures: tuple[str, ...],
    remedy: str,
) -> Difference:
    """Return a difference that is a confounder.

    Args:
        before: the baseline's value in words.
        after: the other side's value in words.
        allowed: keys of confounders that the user accepts.
        measures: measures that it affects; empty for all measures.
    """
    return Difference(
        key=key,
        role=Role.CONFOUNDER,
        baseline=before,
        other=after,
        allowed=key in allowed,
        measures=measures,
        help=remedy,
    )


def _errors(record: Record, points: Sequence[Point]) -> dict[str, str]:
    """Return messages of `error` diagnostics of a record and its points, by code."""
    doubts = [*record.doubts]
    for point in points:
        doubts += point.doubts
    return {item.code: one_line(item.message) for item in doubts if item.severity is Severity.ERROR}


def _difference(fact: _Fact, baseline: Record, other: Record) -> tuple[str, str] | None:
    """Return both sides of a differing fact as texts, such as two device names.

    None without a difference. The texts name the places in which the sides differ, three at most,
    unless the fact's own name says enough.
    """
    facts: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    for record in (baseline, other):
        facts.append(
            {fact_path: fact_at(record.environment, fact_path) for fact_path in fact.environment}
        )
        settings.append({})
        for fact_path in fact.plan:
            settings[-1] |= _leaves(fact_at(record.plan, fact_path), fact_path)
    places = []
    for fact_path in fact.environment:
        if (
            None not in (facts[0][fact_path], facts[1][fact_path])
            and facts[0][fact_path] != facts[1][fact_path]
        ):
            places.append(fact_path)
    for fact_path in settings[0] | settings[1]:
        if settings[0].get(fact_path) != settings[1].get(fact_path):
            places.append(fact_path)
    if not places:
        return None
    # a name, such as `model.name`, stands for the settings behind it
    named = [fact_path for fact_path in places if fact_path.endswith(".name")]
    shown_paths = (named or places)[:_SHOWN]
    leaves_shown = {fact_path.rpartition(".")[2] for fact_path in shown_paths}
    every = (*fact.environment, *fact.plan)
    before, after = facts[0] | settings[0], facts[1] | settings[1]
    is_named = (
        len(leaves_shown) > 1
        or not (named or shown_paths[0] in every)  # not `model 0.1`
        or (len(every) > 1 and not leaves_shown & _PLAIN)  # not `libraries 12.8`
        or any(isinstance(before.get(fact_path), bool) for fact_path in shown_paths)  # a switch
    )
    return _text(before, shown_paths, is_named), _text(after, shown_paths, is_named)


def _tf32_of_vendors(*sides: Record) -> tuple[str, str] | None:
    """Describe TF32 on GPUs from two vendors; None otherwise.

    The same setting rounds different operations on each.
    """
    vendors = []
    for side in sides:
        if not any(fact_at(side.environment, fact_path) for fact_path in FACTS["tf32"].environment):
            return None
        vendors.append(vendor(side.environment))
    if vendors[0] == vendors[1]:
        return None
    return f"TF32 of {vendors[0]}", f"TF32 of {vendors[1]}"


def _leaves(value: Any, fact_path: str) -> dict[str, Any]:
    """Return the values below a place in a plan, by place, without implementing classes."""
    if not isinstance(value, Mapping):
        return {fact_path: value}
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        if not str(name).startswith("_"):
            leaves |= _leaves(inner, f"{fact_path}.{name}")
    return leaves


def _text(values: Mapping[str, Any], places: list[str], is_named: bool) -> str:
    """Return one side's values at some places in words, on one line.

    Args:
        is_named: whether each value follows the last part of its place, as in `count 2`.
    """
    words = []
    for fact_path in places:
        value = values.get(fact_path)
        text = str(value)
        if isinstance(value, float):
            text = f"{value:g}"
        elif value is None:
            text = "null"  # as users write it
        elif isinstance(value, bool):
            text = text.lower()
        words.append(f"{fact_path.rpartition('.')[2]} {text}" if is_named else text)
    return one_line(", ".join(dict.fromkeys(words)))
