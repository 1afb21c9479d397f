"""Judge from facts whether a machine can measure; pure functions without access to the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: `machine` (machine.facts), `survey` (capabilities.conduct), `gpu_files` (by name: match, product, power_watts) and
#: `locks` (owner or None by the device's lock name).
Facts = Mapping[str, Any]


class Verdict(StrEnum):
    """Judgment of a check; only `fail` prevents measurements on the chosen device."""

    ok = "ok"
    warn = "warn"
    missing = "missing"
    fail = "fail"
    untested = "untested"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The requested device, as by `gpu=NAME gpu.index=INDEX`.

    Attributes:
        name: name of a file of conf/gpu.
    """

    name: str = "auto"
    index: int = 0


def ok(check: str, found: str) -> Finding:
    """A finding that needs no action."""
    return Finding(check=check, verdict=Verdict.ok, found=found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """A finding that measuring works with restrictions."""
    return Finding(check=check, verdict=Verdict.warn, found=found, remedy=remedy)


def missing(check: str, found: str, remedy: str) -> Finding:
    """A finding that something optional is missing."""
    return Finding(check=check, verdict=Verdict.missing, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """A finding that measuring does not work."""
    return Finding(check=check, verdict=Verdict.fail, found=found, remedy=remedy)


def untested(check: str, found: str, remedy: str = "") -> Finding:
    """A finding that measuring may work but is untested."""
    return Finding(check=check, verdict=Verdict.untested, found=found, remedy=remedy)


def part(facts: Facts, name: str) -> Mapping[str, Any]:
    """The survey's facts of a part (`torch`, `cuda`, …); empty if the survey failed before."""
    answered: Mapping[str, Any] = facts["survey"]["parts"].get(name, {})
    return answered
