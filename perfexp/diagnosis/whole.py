"""All findings of a machine, in reading order."""

from __future__ import annotations

from perfexp.diagnosis import Choice, Facts, Finding, Verdict, devices, host, software


def diagnose(facts: Facts, choice: Choice) -> list[Finding]:
    """All findings, each with a verdict."""
    chosen = devices.choose(facts, choice)
    return [
        *software.findings(facts, choice),
        *devices.findings(facts, choice, chosen),
        *(devices.state_findings(facts, chosen) if chosen.kind == "cuda" else ()),
        *host.instrument_findings(facts),
        *host.findings(facts, chosen),
    ]


def works(findings: list[Finding]) -> bool:
    """Whether everything necessary for measuring is there."""
    return all(finding.verdict is not Verdict.fail for finding in findings)
