"""Notes: descriptions of a run or a sweep in a tracking store: Markdown of limited length, figures first."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from perfexp.records.record import Record
from perfexp.records.summary import Row
from perfexp.records.sweep_record import Sweep
from perfexp.reports import markdown
from perfexp.summaries import sweep_summary
from perfexp.summaries.grid import escape_markdown
from perfexp.summaries.remarks import raised_diagnostics
from perfexp.summaries.subject import subject
from perfexp.summaries.wording import bare_time, median_text, rate_text
from perfexp.tracking.run_tags import TAG_LENGTH, clean

#: Below a description that nobody has edited; a page of MLflow does not show it.
_MARK = "\n\n<!-- perfexp "
#: Below a table that has lost lines, and the lines that are left to it: head, rule and one more.
_MORE, _LEAST_LINES = "\n… and {} more: see report.md", 3
#: Characters of a word that leave a page of MLflow as wide as the screen, and one character of Markdown.
_WORD, _CHARACTER = 60, re.compile(r"\\.|&\w+;|.")


def of_run(record: Record, known: Sequence[Row], skipped: Mapping[str, str]) -> str:
    """The figures in a line, then the report, and which of the run's files could not be sent.

    Args:
        record: of any run.
        known: its rows.
        skipped: why files are not sent, by their names.
    """
    # the page has the run's name as its title already
    page = markdown.markdown(record).partition("\n")[2].strip("\n")
    missing = [f"- {escape_markdown(f'{path}: {reason}')}" for path, reason in skipped.items()]
    return _signed(
        "\n\n".join(
            [*_head(record, known), page, *(["## Files that were not sent", "\n".join(missing)] if missing else [])]
        )
    )


def of_points(record: Record, known: Sequence[Row]) -> str:
    """The figures of some points of a run in a line; the report is with the run.

    Args:
        record: record of any run.
        known: rows of that record.
    """
    return _signed("\n\n".join([*_head(record, known), f"A part of the run {escape_markdown(record.name)}."]))


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> str:
    """How many runs of a sweep have ended, what they say, and how to measure it again.

    Args:
        sweep: finished or not.
        records: those of its runs, as far as there are any.
    """
    expected = f" of {sweep.jobs}" if sweep.jobs is not None else ""
    failures = [f"- {escape_markdown(line)}" for line in sweep_summary.child_failures(sweep, records)]
    parts = [
        f"{len(sweep.children)}{expected} runs have ended.",
        *([f"{escape_markdown(same)}\n"] if (same := sweep_summary.setting(records)) else []),
        *([sweep_summary.runs(sweep, records).markdown().rstrip("\n")] if sweep.children else []),
        *(["## Not measured", "\n".join(failures)] if failures else []),
        "## To measure it again",
        markdown.code(shlex.join(["python", "-m", "perfexp", *sweep.command])).rstrip("\n"),
    ]
    return _signed("\n\n".join(parts))


def is_unedited(note: str) -> bool:
    """Whether a description is as perfexp wrote it.

    Args:
        note: as it is in the store.
    """
    body, _, mark = note.rpartition(_MARK)
    return bool(mark) and mark.rstrip() == _mark(body)


def _head(record: Record, known: Sequence[Row]) -> list[str]:
    """Headlines, the device, and the codes of errors and warnings."""
    raised = (each.worst for each in raised_diagnostics(record, known))
    codes = ", ".join(worst.code for worst in raised if not worst.is_note) or "none"
    device = subject(record.plan, record.environment).device or "an unknown device"
    return [*_headlines(known), f"On {escape_markdown(device)}. Warnings: {escape_markdown(codes)}."]


def _headlines(known: Sequence[Row]) -> Iterator[str]:
    """For each phase the median with its interval, or the range of the medians."""
    for phase in dict.fromkeys(row.key.phase for row in known):
        rows = [row for row in known if row.key.phase == phase]
        medians = sorted((row.time.median for row in rows if row.time), key=lambda median: median.value)
        if len(rows) == len(medians) == 1:
            text = f"{rows[0].time_kind} p50 {median_text(rows[0])}, {rate_text(rows[0].samples_per_second)} samples/s"
        elif medians:
            kinds = ", ".join(dict.fromkeys(row.time_kind for row in rows if row.time_kind))
            least, most = bare_time(medians[0]), bare_time(medians[-1])
            text = f"{kinds} p50 {least} … {most} at {len(medians)} of {len(rows)} points"
        else:
            text = f"nothing was measured: {', '.join(dict.fromkeys(row.status.value for row in rows))}"
        yield f"**{escape_markdown(phase)}: {escape_markdown(text)}**"


def _signed(text: str) -> str:
    body = fitted(breakable(text), TAG_LENGTH - 50)
    return f"{body}{_MARK}{_mark(body)}"


def _mark(body: str) -> str:
    return f"{hashlib.sha256(body.encode()).hexdigest()[:16]} -->"


def breakable(text: str) -> str:
    """A page in which a browser can break long words; not those of code and tables, whose lines are short already.

    Args:
        text: Markdown.
    """
    return "\n".join(
        line if line.startswith(("|", "    ")) else re.sub(r"\S+", _broken, line) for line in text.split("\n")
    )


def _broken(word: re.Match[str]) -> str:
    """A word with spaces of no width in it, where a browser may break it."""
    characters = _CHARACTER.findall(word[0])
    pieces = (characters[start : start + _WORD] for start in range(0, len(characters), _WORD))
    return "&#8203;".join(map("".join, pieces))


def fitted(text: str, length: int) -> str:
    """A page of limited length: where it is too long, the longest tables lose their last lines and say how many.

    Args:
        text: Markdown.
        length: at most so many characters.
    """
    text = clean(text, len(text) + length)
    blocks = [block.split("\n") for block in text.split("\n\n")]
    tables = [block for block in blocks if block[0].startswith("|")]
    excess, dropped = len(text) - length, [0] * len(tables)
    while excess > 0 and max(map(len, tables), default=0) > _LEAST_LINES:
        longest = max(range(len(tables)), key=lambda index: len(tables[index]))
        excess += 0 if dropped[longest] else len(_MORE) + 3
        excess -= len(tables[longest].pop()) + 1
        dropped[longest] += 1
    for table, count in zip(tables, dropped, strict=True):
        table += [_MORE.format(count)] if count else []
    return clean("\n\n".join("\n".join(block) for block in blocks), length)
