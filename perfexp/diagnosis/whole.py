"""Whole: every finding of a machine, in the order in which they are read."""

from __future__ import annotations

from perfexp.diagnosis import (
    Choice,
    Facts,
    Finding,
    Verdict,
    devices,
    gpu,
    host,
    instruments,
    software,
)


def diagnose(facts: Facts, choice: Choice) -> list[Finding]:
    """What was looked at, with a verdict each.

    Args:
        facts: of the machine.
        choice: the device that is asked for.
    """
    chosen = devices.choose(facts, choice)
    return [
        *software.findings(facts, choice),
        *devices.findings(facts, choice, chosen),
        *(gpu.findings(facts, chosen) if chosen.kind == "cuda" else ()),
        *instruments.findings(facts),
        *host.findings(facts, chosen),
    ]


def works(findings: list[Finding]) -> bool:
    """Whether everything that measuring needs is there.

    Args:
        findings: all of them.
    """
    return all(finding.verdict is not Verdict.fail for finding in findings)
