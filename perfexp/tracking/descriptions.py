"""Descriptions of runs and sweeps in a tracking store: parameters, tags, and Markdown of limited length."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perfexp.comparison import sweep_verdicts
from perfexp.diagnosis.environment import fact_at
from perfexp.host.credentials import mask
from perfexp.host.files import safe_name
from perfexp.records.quantities import time_title
from perfexp.records.record import Record
from perfexp.records.summary import Row
from perfexp.records.sweep_record import Sweep
from perfexp.reports import markdown
from perfexp.summaries import sweep_summary
from perfexp.summaries.grid import escape_markdown
from perfexp.summaries.remarks import raised_diagnostics
from perfexp.summaries.subject import subject
from perfexp.summaries.wording import bare, median_text, row_rate_text

#: Databases refuse longer names; MLflow truncates longer parameters and tags silently.
NAME_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 6_000, 8_000
#: Characters that names in MLflow cannot have.
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-.: ]+")
#: Tags of facts, and their places in the environment; the first place with a value counts.
_FACTS = {
    "driver": ("device.driver", "device.driver_version"),
    "cuda": ("device.cuda", "torch.cuda"),
    "cudnn": ("device.cudnn", "torch.cudnn"),
    "rocm": ("device.rocm", "torch.rocm"),
    "torch": ("packages.torch",),
    "python": ("python",),
    "host": ("host",),
    "mlflow.user": ("user",),
    "mlflow.source.git.commit": ("git.commit",),
}
#: Beginnings of tags, and tags, that a user's own ones cannot have.
_RESERVED, _TAKEN = ("mlflow.", "perfexp."), (*_FACTS, "gpu", "cpu")
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


def safe_uid(text: str) -> str:
    """A uid that is safe in a query; it comes from a file that anybody may have written."""
    return safe_name(text)[:NAME_LENGTH]


def metric_part(text: str) -> str:
    """A part of a metric's name; a slash in it would open another group."""
    return allowed(text.replace("/", "."))


def allowed(text: str) -> str:
    """Return a text in the characters of MLflow's names."""
    return _FORBIDDEN.sub("_", text).strip(" .") or "unnamed"


def point_tags(record: Record, table: Sequence[Row], notes: Mapping[str, str]) -> dict[str, str]:
    """Tags for some points of a run: how they ended, their diagnostics, `notes` on their metrics, and the machine."""
    statuses = Counter(row.status.value for row in table)
    facts = {
        "perfexp.points": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "perfexp.doubts": ", ".join(raised.worst.code for raised in raised_diagnostics(record, table)),
        **notes,
        "mlflow.source.name": "perfexp",
        **{name: fact(record.environment, name) for name in _FACTS},
        **own_tags(record.plan),
    }
    is_cpu = _first(record.environment, ["device.kind"]) == "cpu"
    facts["cpu" if is_cpu else "gpu"] = _first(record.environment, ["device.name"])
    if record.sweep:
        facts |= {"perfexp.sweep": safe_uid(record.sweep.uid), "perfexp.job": str(record.sweep.job)}
    return tags(facts)


def own_tags(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return `tracking.tags` of a plan; a record may come from anywhere, so that names are checked again."""
    tracking = plan.get("tracking")
    own = tracking.get("tags") if isinstance(tracking, Mapping) else None
    texts = {str(name): str(text) for name, text in own.items() if text is not None} if isinstance(own, Mapping) else {}
    return {name[:NAME_LENGTH]: text for name, text in texts.items() if tag_fault(name) is None}


def sweep_tags(first: Record) -> dict[str, str]:
    """Return the tags that a sweep has of its first run: the user, the commit, and the user's own ones."""
    facts = {name: fact(first.environment, name) for name in _FACTS if name.startswith("mlflow.")}
    return facts | own_tags(first.plan)


def tag_fault(name: str) -> str | None:
    """Why a user's tag cannot have this name; None if it can."""
    if name.startswith(_RESERVED) or name in _TAKEN:
        return "perfexp and MLflow set tags of this name"
    return None if name == allowed(name) else "use letters, digits, spaces and _-.:"


def tags(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts as tags; one without text is left out."""
    return {name: clean(text, TAG_LENGTH) for name, text in texts.items() if text}


def reasons(by_name: Mapping[str, str]) -> str:
    """Join reasons with the names that they belong to."""
    return "; ".join(f"{name}: {reason}" for name, reason in by_name.items())


def fact(environment: dict[str, Any], name: str) -> str:
    """Return the fact of an environment that a tag shows; empty if it is unknown."""
    return _first(environment, _FACTS[name])


def _first(environment: dict[str, Any], places: Iterable[str]) -> str:
    facts = (fact_at(environment, place) for place in places)
    return next((str(text) for text in facts if isinstance(text, (str, int, float))), "")


def of_user(plan: Mapping[str, Any]) -> list[str]:
    """Return `tracking.description` of a plan as a paragraph, if there is one."""
    tracking = plan.get("tracking")
    text = tracking.get("description") if isinstance(tracking, Mapping) else None
    return [escape_markdown(str(text))] if text else []


def of_run(record: Record, table: Sequence[Row], skipped: Mapping[str, str]) -> str:
    """Describe a run: the figures in a line, the report, and the files that were skipped, with the reasons."""
    # MLflow's page already has the run's name as its title
    page = markdown.markdown(record).removeprefix("# ").strip("\n")
    files = _list("## Files that were not sent", [f"{path}: {reason}" for path, reason in skipped.items()])
    return _signed(*of_user(record.plan), *_head(record, table), page, *files)


def _list(title: str, entries: Sequence[str]) -> list[str]:
    return [title, "\n".join(f"- {escape_markdown(entry)}" for entry in entries)] if entries else []


def of_points(record: Record, table: Sequence[Row]) -> str:
    """Describe some points of a run in a line; the report is with the run."""
    return _signed(*_head(record, table), f"A part of the run {escape_markdown(record.name)}.")


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> str:
    """Describe a sweep: how many runs have ended, their results, and the command that repeats it."""
    expected = f" of {sweep.jobs}" if sweep.jobs is not None else ""
    verdicts = sweep_verdicts.of_sweep(sweep, records)
    table = sweep_summary.runs(sweep, records, verdicts.title, verdicts.ratios).markdown().rstrip("\n")
    return _signed(
        *(of_user(records[0].plan) if records else ()),
        f"{len(sweep.children)}{expected} runs have ended.",
        *([f"{escape_markdown(same)}\n"] if (same := sweep_summary.setting(records)) else []),
        *([table] if sweep.children else []),
        *verdicts.notes,
        *verdicts.fastest,
        *_list("## Not measured", sweep_summary.child_failures(sweep, records)),
        "## To measure it again",
        markdown.code(shlex.join(["python", "-m", "perfexp", *sweep.command])).rstrip("\n"),
    )


def is_unedited(note: str) -> bool:
    """Whether the description in a store is as perfexp wrote it."""
    body, _, mark = note.rpartition(_MARK)
    return bool(mark) and mark.rstrip() == _mark(body)


def _head(record: Record, table: Sequence[Row]) -> list[str]:
    raised = (diagnostic.worst for diagnostic in raised_diagnostics(record, table))
    codes = ", ".join(worst.code for worst in raised if not worst.is_note) or "none"
    device = subject(record.plan, record.environment).device or "an unknown device"
    return [*_headlines(table), f"On {escape_markdown(device)}. Warnings: {escape_markdown(codes)}."]


def _headlines(table: Sequence[Row]) -> Iterator[str]:
    for phase in dict.fromkeys(row.key.phase for row in table):
        rows = [row for row in table if row.key.phase == phase]
        timed = sorted((row.time.median.value, place) for place, row in enumerate(rows) if row.time)
        if len(rows) == len(timed) == 1:
            text = f"{time_title(rows[0].time_kind)} p50 {median_text(rows[0])}, {row_rate_text(rows[0])} samples/s"
        elif timed:
            kinds = ", ".join(dict.fromkeys(time_title(row.time_kind) for row in rows if row.time_kind))
            least, most = (_bare(rows[place]) for _, place in (timed[0], timed[-1]))
            text = f"{kinds} p50 {least} … {most} at {len(timed)} of {len(rows)} points"
        else:
            text = f"nothing was measured: {', '.join(dict.fromkeys(row.status.value for row in rows))}"
        yield f"**{escape_markdown(phase)}: {escape_markdown(text)}**"


def _bare(row: Row) -> str:
    """The time of a row without its interval, `≈` before it if that is missing."""
    return f"{'≈ ' * (row.time.median.low is None)}{bare(row.time.median)}" if row.time else ""


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
