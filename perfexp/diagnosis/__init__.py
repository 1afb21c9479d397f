"""Diagnosis: what the facts of a machine mean for measuring on it; pure functions, no machine is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: `machine` (machine.facts), `survey` (survey.conduct), `gpu_files` (by name: match, product, power_watts) and `locks`
#: (by the device's lock name: who has it, or None).
Facts = Mapping[str, Any]


class Verdict(StrEnum):
    """What is to be thought of something: only `fail` keeps the chosen device from being measured."""

    ok = "ok"
    warn = "warn"
    missing = "missing"
    fail = "fail"
    untested = "untested"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what was looked at.
        verdict: what is to be thought of it.
        found: what was seen.
        remedy: what to do about it, where something is to be done.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The device that is asked for, as `gpu=NAME gpu.index=INDEX` would.

    Attributes:
        name: of a file of conf/gpu.
        index: number of the device.
    """

    name: str = "auto"
    index: int = 0


def ok(check: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check=check, verdict=Verdict.ok, found=found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Measuring works, but something is not as it should be."""
    return Finding(check=check, verdict=Verdict.warn, found=found, remedy=remedy)


def missing(check: str, found: str, remedy: str) -> Finding:
    """Measuring works without it."""
    return Finding(check=check, verdict=Verdict.missing, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Measuring does not work."""
    return Finding(check=check, verdict=Verdict.fail, found=found, remedy=remedy)


def untested(check: str, found: str, remedy: str = "") -> Finding:
    """It may work; nobody has tried."""
    return Finding(check=check, verdict=Verdict.untested, found=found, remedy=remedy)


def part(facts: Facts, name: str) -> Mapping[str, Any]:
    """What the survey says of a part; nothing where it did not come so far.

    Args:
        facts: all of them.
        name: `torch`, `cuda`, ….
    """
    answered: Mapping[str, Any] = facts["survey"]["parts"].get(name, {})
    return answered
