"""Doctor: facts about a machine, and verdicts on whether it can measure.

May import: devices, host, records.
Used by: commands, measuring, run, worker.

They are pure functions of facts, without access to the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

#: `machine` (machine.facts), `survey` (worker_query.survey), `gpu_files` (by name: match, product,
#: power_watts), `locks` (owner or None by device lock name) and `processes` (spread between
#: processes, by class).
Facts = Mapping[str, Any]


class CheckResult(StrEnum):
    """Result of a check; only `fail` prevents measurements on the chosen device."""

    ok = "ok"
    warn = "warn"
    missing = "missing"
    fail = "fail"
    untested = "untested"


@dataclass(frozen=True)
class Finding:
    """A check's verdict, observation and remedy."""

    check: str
    verdict: CheckResult = field(kw_only=True)
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The requested device, for example `gpu=NAME gpu.index=INDEX`.

    Attributes:
        name: name of a file in conf/gpu.
    """

    name: str = "auto"
    index: int = 0


#: Findings from check, observation and remedy: nothing to do; works with restrictions; something
#: optional is missing; measuring does not work; may work but is untested.
ok, warn, missing, fail, untested = (partial(Finding, verdict=verdict) for verdict in CheckResult)


def warn_if(is_wrong: bool, check: str, found: str, remedy: str) -> Finding:
    """Return a finding with a remedy if something is wrong, otherwise without a remedy."""
    if is_wrong:
        return warn(check, found, remedy)
    return ok(check, found)


def part(facts: Facts, name: str) -> Mapping[str, Any]:
    """Return the survey's facts about a part such as `torch` or `cuda`.

    Empty if the survey failed earlier.
    """
    answered: Mapping[str, Any] = facts["survey"]["parts"].get(name, {})
    return answered
