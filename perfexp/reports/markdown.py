"""The report of a record as a page of Markdown, also for the tracking store's description of a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from perfexp.errors import UserError
from perfexp.host import gpu_sheets
from perfexp.host.installation import conf_dir
from perfexp.plots import roofline_table
from perfexp.records import units
from perfexp.records.cold_starts import first_predictions
from perfexp.records.quantities import time_title
from perfexp.records.record import Record, is_layers
from perfexp.records.summary import Row, requested_percentiles, rows
from perfexp.reports import overview
from perfexp.reports.console import Console, lines_of
from perfexp.roofline import Roofline, of_record
from perfexp.summaries import profile_summary
from perfexp.summaries.grid import Grid, escape_markdown
from perfexp.summaries.remarks import failures, raised_diagnostics, scaling_lines
from perfexp.summaries.subject import distinguishing, label, one_line, shape, subject
from perfexp.summaries.wording import first_prediction_text, time_kinds
from perfexp.tables import convolutions, layer_tables

#: Characters of a line of code, and of one word in it.
_CODE_WIDTH, _LONGEST_WORD = 76, 68
#: Layers of a roofline.
_MOST_LAYERS = 15
#: Texts of facts whose names end in these units, up to a number that no machine has.
_MOST = 1e18
_FORMATS: dict[str, Callable[[float], str]] = {"bytes": units.format_bytes, "seconds": units.format_seconds}

_TIMES = {
    "device": "the time that the device works on one call",
    "device/graph": "the time that the device works on one call which is launched as one CUDA graph",
    "latency": "what one caller waits: call and synchronize",
    "throughput": "wall time per call of the pipelined loop",
}


def markdown(record: Record) -> str:
    """Return the report of a record."""
    about = subject(record.plan, record.environment)
    table = rows(record)
    facts = {
        "algorithm": about.algorithm,
        "precision": about.number_format,
        "execution": about.execution,
        "device": about.device or "unknown",
        **({"size": same} if (same := shape(row.key for row in table)) else {}),
        "status": record.status.value,
        "measured": f"{record.started} to {record.ended}",
    }
    firsts = first_predictions(record)
    fields = distinguishing(first.key for first in firsts)
    cold_starts = (f"{label(first.key, fields)}: {first_prediction_text(first)}" for first in firsts)
    layers = layer_tables.table(record)
    sections = [
        f"# {escape_markdown(about.model)}: {escape_markdown(about.mode)}\n",
        _items(facts),
        *_times(record, table),
        _section("Cold start", _list(cold_starts)),
        _section("Convolutions", _list(convolutions.sentences(record))),
        _section("Ranks", _list(overview.ranks(record))),
        _section("Layers", _titled(*layers) if layers else ""),
        _section("Profile", _profile(record)),
        *_diagnostics(record, table),
        _section("Not measured", _list(failures(record))),
        _section("Environment", _items(_environment(record.environment))),
        _section("To measure it again", _again(record)),
    ]
    return "\n".join(filter(None, sections))


def report(record: Record, plots: Sequence[str] = ()) -> str:
    """Return report.md: the lines of the console, plots, all metrics, notes, environment and command.

    Args:
        plots: names of the files of the plots beside the report.
    """
    about, table = subject(record.plan, record.environment), rows(record)
    status = f"{record.status.value}, measured from {record.started} to {record.ended}"
    others, loads, trained = overview.metrics(record, table), overview.loads(record), overview.epochs(record)
    _, notes = _diagnostics(record, table)
    sections = [
        f"# {escape_markdown(about.model)}: {escape_markdown(about.mode)}\n\n{escape_markdown(status)}\n",
        _fenced(lines_of(lambda console: console.results(record, report="below"))),
        "".join(f"![{escape_markdown(name.partition('.')[0])}]({quote(name)})\n" for name in plots),
        _section("All metrics", _all(others) if others else ""),
        _section("Epochs", trained.markdown() if trained else ""),
        _section("Layers and the ceilings of the device", _rooflines(record)),
        _section("Clock and power under load", loads.markdown() if loads else ""),
        notes,
        f"<details>\n<summary>Environment</summary>\n\n{_items(_environment(record.environment))}\n</details>\n",
        _section("To measure it again", _again(record)),
    ]
    return "\n".join(filter(None, sections))


def _all(metrics: Grid) -> str:
    """The metrics that all points have in common as lines, the others as tables, and the notes."""
    keys = [column for column in metrics.columns if column.is_key]
    figures = [column for column in metrics.columns if not column.is_key]
    common = Grid([*keys, *(column for column in figures if len(set(column.cells)) == 1)])
    rest = [column for column in figures if len(set(column.cells)) > 1]
    tables = Grid([*keys, *rest]).markdown() if rest else ""
    return "\n".join(filter(None, (_list(common.listed()), tables, _list(metrics.notes))))


def _rooflines(record: Record) -> str:
    """The longest layers of each phase with their shares of the ceilings; empty without layers or known ceilings."""
    if not any(is_layers(point.key) for point in record.points):
        return ""
    try:
        rooflines = of_record(record, sheets=gpu_sheets.read([conf_dir()])).values()
    except UserError:
        return ""
    return "\n".join(_fenced(lines_of(partial(_show_roofline, roofline))) for roofline in rooflines)


def _show_roofline(roofline: Roofline, console: Console) -> None:
    most = roofline.parts[:_MOST_LAYERS]
    which = f"the top {len(most)} of {len(roofline.parts)} rows; perfexp roofline DIR draws all"
    table = roofline_table.grid(roofline, [roofline.total, *most], [which, *roofline.notes])
    console.show_grid(roofline.title, table)


def _fenced(lines: Sequence[str]) -> str:
    """Lines as they are, in a fence that is longer than any in them."""
    fence = "`" * max([3, *(len(run) + 1 for line in lines for run in re.findall("`+", line))])
    return "\n".join([f"{fence}text", *lines, fence, ""])


def code(command: str) -> str:
    """Return a command line as a block of code that fits a page and can be pasted into a shell."""
    try:
        words = shlex.split(one_line(command))
    except ValueError:  # a foreign record may hold anything
        words = [one_line(command)]
    lines = [""]
    for word in words:
        # a shell joins the pieces of a word: it removes the backslash and the line break after it
        for index, start in enumerate(range(0, max(len(word), 1), _LONGEST_WORD)):
            piece = shlex.quote(word[start : start + _LONGEST_WORD])
            if index:
                lines[-1] += "\\"
                lines.append(piece)
            elif len(lines[-1]) + len(piece) + len("  \\") > _CODE_WIDTH:
                lines[-1] += " \\"
                lines.append(f"  {piece}")
            else:
                lines[-1] += f" {piece}" if lines[-1] else piece
    return "".join(f"    {line}\n" for line in lines)


def _times(record: Record, table: Sequence[Row]) -> Iterator[str]:
    if not table:
        yield _section("Times", "Nothing was measured.\n")
        return
    meanings = [f"`{time_title(kind)}` is {_TIMES[kind]}." for kind in time_kinds(table)]
    service = "; percentiles are service times" if any("latency" in row.times for row in table) else ""
    intro = " ".join([*meanings, f"Figures are medians (p50) with their 95 % interval{service}."])
    yield _section("Times", f"{intro}\n\n{overview.points(table, requested_percentiles(record)).markdown()}")
    yield _section("Scaling with the input size", _list(scaling_lines(table)))
    across, phases = overview.processes(table), overview.phases(record, table)
    yield _section("Across processes", across.markdown() if across else "")
    yield _section("Phases of a call", phases.markdown() if phases else "")
    trained = overview.epochs(record)
    yield _section("Epochs", trained.markdown() if trained else "")
    loads, others = overview.loads(record), overview.metrics(record, table)
    yield _section("Clock and power under load", loads.markdown() if loads else "")
    yield _section("Other metrics", _list([*others.listed(), *others.notes]) if others else "")


def _titled(title: str, grid: Grid) -> str:
    return f"{escape_markdown(title)}\n\n{grid.markdown()}"


def _profile(record: Record) -> str:
    grids = [_titled(*table) for table in profile_summary.tables(record)]
    commands = "".join(map(code, profile_summary.commands(record)))
    return "\n".join(filter(None, (_list(profile_summary.sentences(record)), *grids, commands)))


def _diagnostics(record: Record, known: Sequence[Row]) -> Iterator[str]:
    """Errors and warnings, then notes; each with its help on the same line."""
    diagnostics = raised_diagnostics(record, known)
    for title, is_note in (("Warnings", False), ("Notes", True)):
        chosen = (raised.lines for raised in diagnostics if raised.worst.is_note is is_note)
        yield _section(title, _list("; ".join(map(str.strip, lines)) for lines in chosen))


def _environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """The most important facts of the environment; record.json has the rest."""
    device, git = environment.get("device"), environment.get("git")
    facts: dict[str, Any] = {}
    if isinstance(device, Mapping):
        for name, value in device.items():
            words, _, unit = name.rpartition("_")
            if unit in _FORMATS and isinstance(value, int | float) and 0 <= value < _MOST:
                name, value = words, _FORMATS[unit](value)
            if isinstance(value, str | int | float):
                facts[f"device {name.replace('_', ' ')}"] = value
    ranks = environment.get("ranks")
    if isinstance(ranks, Mapping):
        facts["ranks"] = f"{len(ranks.get('devices') or [])} by {ranks.get('backend')}, batch per rank"
        if isinstance(hosts := ranks.get("hosts"), list):
            names = (host.get("node") or host.get("host") for host in hosts if isinstance(host, Mapping))
            facts["nodes"] = ", ".join(map(str, names))
    for name in ("os", "kernel", "container", "host", "python"):
        facts[name] = environment.get(name)
    if isinstance(git, Mapping) and git.get("commit"):
        facts["git"] = f"{git['commit']}{' with uncommitted changes' if git.get('dirty') else ''}"
    packages = environment.get("packages")
    if isinstance(packages, Mapping):
        facts["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    return {name: one_line(str(value)) for name, value in facts.items() if value is not None}


def _again(record: Record) -> str:
    """A command that measures the run alone into a new folder, and the ids of the run."""
    overrides = [text for text in record.command if text.lstrip("+").partition("=")[0] != "output_dir"]
    alone = ["hydra.mode=RUN"] if record.sweep else []  # an experiment file may set a sweep
    elsewhere = ["stage=null"] if record.plan.get("stage") else []
    command = shlex.join(["python", "-m", "perfexp", *overrides, *alone, *elsewhere])
    same = {"perfexp": record.perfexp_version, "plan": record.plan_hash, "run": record.uid}
    return f"{code(command)}\n{_items(same)}"


def _items(facts: Mapping[str, str]) -> str:
    return _list(f"{name}: {value}" for name, value in facts.items())


def _list(lines: Iterable[str]) -> str:
    return "".join(f"- {escape_markdown(line)}\n" for line in lines)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""
