"""Judge from facts whether a machine can measure; pure functions without access to the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

#: `machine` (machine.facts), `survey` (worker_query.survey), `gpu_files` (by name: match, product, power_watts),
#: `locks` (owner or None by the device's lock name) and `processes` (how much figures differ between them, by class).
Facts = Mapping[str, Any]


class Verdict(StrEnum):
    """Judgment of a check; only `fail` prevents measurements on the chosen device."""

    ok = "ok"
    warn = "warn"
    missing = "missing"
    fail = "fail"
    untested = "untested"


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    verdict: Verdict = field(kw_only=True)
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The requested device, as by `gpu=NAME gpu.index=INDEX`; the name is that of a file of conf/gpu."""

    name: str = "auto"
    index: int = 0


#: Findings, from check, observation and remedy: nothing to do, works with restrictions, something optional is missing,
#: measuring does not work, may work but is untested.
ok, warn, missing, fail, untested = (partial(Finding, verdict=verdict) for verdict in Verdict)


def warn_if(is_wrong: bool, check: str, found: str, remedy: str) -> Finding:
    """A finding with a remedy if something is wrong, otherwise without one."""
    return warn(check, found, remedy) if is_wrong else ok(check, found)


def part(facts: Facts, name: str) -> Mapping[str, Any]:
    """The survey's facts of a part (`torch`, `cuda`, …); empty if the survey failed before."""
    answered: Mapping[str, Any] = facts["survey"]["parts"].get(name, {})
    return answered
