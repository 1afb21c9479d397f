"""Doctor: facts about a machine, and verdicts on whether it can measure.

May import: devices, host, records.
Used by: commands, measuring, run, worker.

`perfexp doctor` gathers facts (`environment`, and in a worker `detected_devices`: the survey), then
prints a list of `Finding` objects. The modules with verdicts (`software`, `devices`, `whole`) are
pure functions of these facts, without access to the machine, so that a test can pass any facts.
Runs use `environment` alone: its facts are in each record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

#: All facts about a machine: `machine` (environment.machine_facts), `survey` (worker_query.survey:
#: torch and the devices, from a worker), `gpu_files` (by name in conf/gpu: match, product,
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
    """One line of the report.

    Attributes:
        check: name of the check, such as `driver`.
        verdict: result of the check.
        found: observation.
        remedy: advice for the user; empty without a problem.
    """

    check: str
    verdict: CheckResult = field(kw_only=True)
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The requested device: `gpu=NAME gpu.index=INDEX`.

    Attributes:
        name: name of a file in conf/gpu, or `auto`.
        index: number N of the device `cuda:N`.
    """

    name: str = "auto"
    index: int = 0


#: Functions that return a finding, from check, observation and remedy: nothing to do; works with
#: restrictions; something optional is missing; measuring does not work; may work but is untested.
ok, warn, missing, fail, untested = (partial(Finding, verdict=verdict) for verdict in CheckResult)


def warn_if(is_wrong: bool, check: str, found: str, remedy: str) -> Finding:
    """Return a warning with its remedy if something is wrong, otherwise an `ok` without it."""
    if is_wrong:
        return warn(check, found, remedy)
    return ok(check, found)


def part(facts: Facts, name: str) -> Mapping[str, Any]:
    """Return the survey's facts about a part such as `torch` or `cuda`.

    They are empty if the survey failed before that part.
    """
    answered: Mapping[str, Any] = facts["survey"]["parts"].get(name, {})
    return answered
