"""Descriptions of runs and sweeps in a tracking store: Markdown of limited length, figures first."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from perfexp.host.credentials import mask
from perfexp.records.record import Record
from perfexp.records.summary import Row
from perfexp.records.sweep_record import Sweep
from perfexp.reports import markdown
from perfexp.summaries import sweep_summary
from perfexp.summaries.grid import escape_markdown
from perfexp.summaries.remarks import raised_diagnostics
from perfexp.summaries.subject import subject
from perfexp.summaries.wording import bare_time, median_text, rate_text

#: MLflow truncates longer tags silently.
TAG_LENGTH = 8_000
_CUT = " … (cut)"
#: Ends a description that nobody has edited; MLflow's pages do not show it.
_MARK = "\n\n<!-- perfexp "
#: Ends a shortened table, which keeps head, rule and one more line.
_MORE, _LEAST_LINES = "\n… and {} more: see report.md", 3
#: Length of a word that fits on a page of MLflow, and one character of Markdown.
_WORD, _CHARACTER = 60, re.compile(r"\\.|&\w+;|.")


def clean(text: str, length: int) -> str:
    """Return a text that every store accepts: without credentials, NUL and lone surrogates, cut to a length."""
    text = mask(text.replace("\0", "").encode(errors="replace").decode())
    return text if len(text) <= length else text[: length - len(_CUT)] + _CUT


def of_run(record: Record, table: Sequence[Row], skipped: Mapping[str, str]) -> str:
    """Describe a run: the figures in a line, the report, and the files that were skipped, with the reasons."""
    # MLflow's page already has the run's name as its title
    page = markdown.markdown(record).partition("\n")[2].strip("\n")
    files = _list("## Files that were not sent", [f"{path}: {reason}" for path, reason in skipped.items()])
    return _signed(*_head(record, table), page, *files)


def _list(title: str, entries: Sequence[str]) -> list[str]:
    return [title, "\n".join(f"- {escape_markdown(entry)}" for entry in entries)] if entries else []


def of_points(record: Record, table: Sequence[Row]) -> str:
    """Describe some points of a run in a line; the report is with the run."""
    return _signed(*_head(record, table), f"A part of the run {escape_markdown(record.name)}.")


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> str:
    """Describe a sweep: how many runs have ended, their results, and the command that repeats it."""
    expected = f" of {sweep.jobs}" if sweep.jobs is not None else ""
    return _signed(
        f"{len(sweep.children)}{expected} runs have ended.",
        *([f"{escape_markdown(same)}\n"] if (same := sweep_summary.setting(records)) else []),
        *([sweep_summary.runs(sweep, records).markdown().rstrip("\n")] if sweep.children else []),
        *_list("## Not measured", sweep_summary.child_failures(sweep, records)),
        "## To measure it again",
        markdown.code(shlex.join(["python", "-m", "perfexp", *sweep.command])).rstrip("\n"),
    )


def is_unedited(note: str) -> bool:
    """Whether the description in a store is as perfexp wrote it."""
    body, _, mark = note.rpartition(_MARK)
    return bool(mark) and mark.rstrip() == _mark(body)


def _head(record: Record, table: Sequence[Row]) -> list[str]:
    """The result, the device, and the codes of errors and warnings."""
    raised = (diagnostic.worst for diagnostic in raised_diagnostics(record, table))
    codes = ", ".join(worst.code for worst in raised if not worst.is_note) or "none"
    device = subject(record.plan, record.environment).device or "an unknown device"
    return [*_headlines(table), f"On {escape_markdown(device)}. Warnings: {escape_markdown(codes)}."]


def _headlines(table: Sequence[Row]) -> Iterator[str]:
    """For each phase the median with its interval, or the range of the medians."""
    for phase in dict.fromkeys(row.key.phase for row in table):
        rows = [row for row in table if row.key.phase == phase]
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


def _signed(*blocks: str) -> str:
    body = fitted(breakable("\n\n".join(blocks)), TAG_LENGTH - 50)
    return f"{body}{_MARK}{_mark(body)}"


def _mark(body: str) -> str:
    return f"{hashlib.sha256(body.encode()).hexdigest()[:16]} -->"


def breakable(text: str) -> str:
    """Let a browser break the long words of a Markdown text; lines of code and tables are short already."""
    lines = text.split("\n")
    return "\n".join(line if line.startswith(("|", "    ")) else re.sub(r"\S+", _broken, line) for line in lines)


def _broken(word: re.Match[str]) -> str:
    """A word with zero-width spaces where a browser may break it."""
    characters = _CHARACTER.findall(word[0])
    pieces = (characters[start : start + _WORD] for start in range(0, len(characters), _WORD))
    return "&#8203;".join(map("".join, pieces))


def fitted(text: str, length: int) -> str:
    """Shorten a Markdown text: the longest tables lose their last lines and give their number, the rest is cut."""
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
