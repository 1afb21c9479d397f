"""Notes: what a tracking store shows as the description of a run or a sweep: Markdown of limited length."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from perfexp.record import Record, Sweep
from perfexp.sinks import report, sweeps
from perfexp.sinks.grid import escape_markdown
from perfexp.sinks.labels import TAG_LENGTH, clean
from perfexp.sinks.subject import one_line


def of_run(record: Record, skipped: dict[str, str]) -> str:
    """The report of a run, and which of its files could not be sent.

    Args:
        record: of any run.
        skipped: why files were not sent, by their names.
    """
    missing = [f"- {escape_markdown(f'{path}: {reason}')}" for path, reason in skipped.items()]
    rest = ["", "## Files that were not sent", "", *missing] if missing else []
    return fitted("\n".join([report.markdown(record).rstrip("\n"), *rest]))


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> str:
    """What a sweep varied, how its runs ended, and how to measure it again.

    Args:
        sweep: finished or not.
        records: those of its runs, as far as there are any.
    """
    expected = f" of {sweep.jobs}" if sweep.jobs is not None else ""
    failures = [f"- {escape_markdown(line)}" for line in sweeps.child_failures(sweep, records)]
    lines = [
        f"# {escape_markdown(one_line(sweep.name))}",
        "",
        f"{len(sweep.children)}{expected} runs have ended, the last one {sweep.ended or 'is not known'}.",
        "",
        *([sweeps.runs(sweep, records).markdown()] if sweep.children else []),
        *(["## Failures", "", *failures, ""] if failures else []),
        "## To measure it again",
        "",
        f"    {one_line(shlex.join(['python', '-m', 'perfexp', *sweep.command]))}",
    ]
    return fitted("\n".join(lines))


def fitted(text: str, length: int = TAG_LENGTH) -> str:
    """A page that a tag can hold: where it is too long, tables lose their last lines and say how many.

    Args:
        text: Markdown.
        length: at most so many characters.
    """
    text = clean(text, 10 * len(text) + length)
    blocks = [block.split("\n") for block in text.split("\n\n")]
    dropped = dict.fromkeys(range(len(blocks)), 0)
    excess = len(text) - length
    for index in sorted(dropped, key=lambda index: -len(blocks[index])):
        block = blocks[index]
        while excess > 0 and block[0].startswith("|") and len(block) > 3:
            # the line that says so takes its place once
            excess -= len(block.pop()) + 1 - (0 if dropped[index] else 60)
            dropped[index] += 1
        if dropped[index]:
            block.append(f"\n… {dropped[index]} more: see report.md and the table")
    return clean("\n\n".join("\n".join(block) for block in blocks), length)
