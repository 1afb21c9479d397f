"""Sections: the parts of a record in their order, for the console, report.md, the HTML page and the tracking store."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perfexp.comparison import sweep_verdicts
from perfexp.errors import UserError
from perfexp.host import gpu_sheets
from perfexp.host.installation import conf_dir
from perfexp.plots import roofline_table
from perfexp.records import quantities, units
from perfexp.records.cold_starts import first_predictions
from perfexp.records.record import Record, is_layers
from perfexp.records.summary import Row, requested_percentiles, rows
from perfexp.records.sweep_record import Sweep
from perfexp.reports import overview
from perfexp.roofline import of_record
from perfexp.summaries import profile_summary, sweep_summary, wording
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.remarks import failures, raised_diagnostics, scaling_lines
from perfexp.summaries.subject import headline, label, one_line, subject, varying
from perfexp.tables import convolutions, layer_tables

#: Layers of a roofline.
_MOST_LAYERS = 15
#: Texts of facts whose names end in these units, up to a number that no machine has.
_MOST = 1e18
_FORMATS: dict[str, Callable[[float], str]] = {"bytes": units.format_bytes, "seconds": units.format_seconds}
#: Names of the times of one measurement.
_TIMES = {name: time.caption if name.startswith("device") else name for name, time in quantities.TIMES.items()}
NOT_MEASURED = "not measured"


class Commands(tuple[str, ...]):
    """Command lines to copy."""


class Section(NamedTuple):
    """A part of a report: a title, which continues the part before it if empty, and a table or lines."""

    title: str
    content: Grid | Sequence[str]


def brief(record: Record) -> list[Section]:
    """Return the answer: figures in lines, or a row for each of several points, and what was asked for besides."""
    table = rows(record)
    title = headline(subject(record.plan, record.environment), [row.key for row in table])
    sections = [Section(title, _figures(record, table[0]) if len(table) == 1 else _rows(table))]
    below = [sweep_summary.best(_batches(table)), *_asked(record)]
    if "ranks" in record.environment:
        below += [overview.OF_RANKS, *overview.ranks(record)]
    if any(row.time for row in table):
        unfinished = [row for row in table if row.unfinished]
        again = f"; {_CONTINUE[any(row.in_turn for row in unfinished)]} continues" if unfinished else ""
        processes = f"± 95 % interval over {scope}, " if (scope := wording.scope(table)) else ""
        below.append(f"{processes}≈ no interval (perfexp help ±){again}")
    sections += [Section("", list(filter(None, below))), *_layers(record), *_profile(record)]
    return [section for section in sections if section.content]


#: The command that measures what was interrupted, by whether its processes take turns with those of another run.
_CONTINUE = {False: "resume=DIR", True: "repeating perfexp ab with output_dir=DIR"}


def _figures(record: Record, row: Row) -> list[str]:
    """The figures of one measurement, a line each."""
    parts = {name: [wording.interval_or_about(time.median)] for name, time in row.times.items()}
    parts.pop("throughput", None)
    if service := wording.service_time(row):
        asked = [number for number in requested_percentiles(record) if number != 50]
        ends = (f"p{number:g} {wording.interval_or_about(service[1].percentiles[number])}" for number in asked)
        parts.setdefault(service[0], []).extend(ends)
    memory, energy = (wording.find_metric(row, name) for name in (quantities.PEAK_MEMORY, quantities.ENERGY))
    if rate := wording.row_rate_text(row):
        value, _, of_value = rate.partition(" ± ")
        parts["throughput"] = [f"{value} samples/s{f' ± {of_value}' if of_value else ''}"]
    if text := wording.metric_text(memory):
        parts.setdefault("throughput", []).append(f"memory {text}")
    if text := wording.metric_text(energy):
        parts["energy"] = [f"{text} per call"]
    titles = {name: _TIMES.get(name, name) for name in parts}
    width = max(map(len, titles.values()), default=0)
    return [f"{titles[name]:<{width}}  {'   '.join(texts)}" for name, texts in parts.items()]


def _rows(table: Sequence[Row]) -> Grid:
    """A row for each of several points."""
    kinds = wording.time_kinds(table)
    memory = (wording.metric_text(wording.find_metric(row, quantities.PEAK_MEMORY)) for row in table)
    columns = [
        *overview.key_columns(table),
        Column(_TIMES[kinds[0]] if len(kinds) == 1 else "time", map(wording.median_text, table)),
        Column("of", (quantities.time_title(row.time_kind) if len(kinds) > 1 else "" for row in table)),
        Column("samples/s", map(wording.row_rate_text, table), rank=1),
        Column("memory", memory, rank=2),
        Column("remarks", map(overview.remarks, table), prose=True),
    ]
    return Grid(columns).without_empty()


def _batches(table: Sequence[Row]) -> list[sweep_summary.Candidate]:
    """The batch sizes of points that differ in nothing else."""
    if varying(row.key for row in table) != ("batch_size",):
        return []
    return [sweep_summary.Candidate(f"batch {row.key.batch_size}", row.key.batch_size, row) for row in table]


def _asked(record: Record) -> Iterator[str]:
    """Lines on what a run was asked for besides the times."""
    for point in record.points:
        if point.epochs:
            yield f"epoch {point.epochs[-1].number}: {wording.epoch_text(point.epochs[-1])}"
    for first in first_predictions(record):
        yield f"cold start  {wording.first_prediction_text(first).partition(' = ')[0]}"
    coverages = (wording.coverage_text(row) for row in rows(record))
    if texts := list(dict.fromkeys(filter(None, coverages))):
        yield f"algorithm coverage  {' … '.join(texts)}"
    yield from convolutions.sentences(record)


def sections(record: Record, *, is_whole: bool = False) -> list[Section]:
    """Return the parts of a record that say something.

    Args:
        is_whole: whether ceilings, environment and command belong to them.
    """
    table = rows(record)
    title = headline(subject(record.plan, record.environment), [row.key for row in table])
    ranks = [overview.OF_RANKS, *overview.ranks(record)] if "ranks" in record.environment else []
    parts = [
        *_shown(title, overview.points(table, requested_percentiles(record)) if table else None),
        Section("" if table else title, [] if table else ["nothing was measured"]),
        Section("scaling with the input size", scaling_lines(table)),
        Section("convolutions", convolutions.sentences(record)),
        Section("ranks", ranks),
        *_shown("phases", overview.phases(table)),
        *_shown("epochs", overview.epochs(record)),
        Section("cold start", _cold_starts(record, table)),
        *_layers(record),
        *_profile(record),
        *_shown("other metrics", overview.metrics(record, table), is_split=True),
        Section("clock and power under load", overview.loads(record)),
        Section("diagnostics", [line for raised in raised_diagnostics(record, table) for line in raised.lines]),
        Section(NOT_MEASURED, failures(record)),
    ]
    if is_whole:
        parts += [*_rooflines(record), Section("environment", _environment(record)), *_again(record)]
    return [part for part in parts if part.content]


def of_sweep(sweep: Sweep, records: Sequence[Record], *, is_brief: bool = False) -> list[Section]:
    """Return the parts of a sweep before its diagnostics and failures: a row for each run, and the best of them."""
    verdicts = sweep_verdicts.of_sweep(sweep, records)
    setting = list(filter(None, [sweep_summary.setting(records)]))
    parts = [Section(sweep_summary.headline(sweep), setting)]
    if sweep.children:
        grid = sweep_summary.runs(sweep, records, verdicts.title, verdicts.ratios)
        parts.append(Section("", Grid(grid.columns) if is_brief else grid))
    below = [*verdicts.notes, *verdicts.fastest, sweep_summary.best_run(sweep, records)]
    return [*parts, Section("", list(filter(None, below)))]


def _shown(title: str, grid: Grid | None, *, is_split: bool = False) -> Iterator[Section]:
    """A table; the figures of a single row are lines, and so are those that all rows share, if it is split."""
    if grid is None:
        return
    lines, rest = grid.common() if is_split or len(grid.lines) == 1 else ([], grid)
    yield Section(title, lines if rest.columns else [*lines, *grid.notes])
    if rest.columns:
        yield Section("" if lines else title, rest)


def _cold_starts(record: Record, table: Sequence[Row]) -> list[str]:
    firsts = first_predictions(record)
    is_alone = len({(row.key.input_size, row.key.batch_size) for row in table}) < 2
    texts = [(label(first.key), wording.first_prediction_text(first)) for first in firsts]
    return [text if is_alone and len(firsts) == 1 else f"{name}: {text}" for name, text in texts]


def _layers(record: Record) -> Iterator[Section]:
    if table := layer_tables.table(record):
        yield Section(f"layers: {table[0]}", table[1])


def _profile(record: Record) -> Iterator[Section]:
    yield Section("profile", profile_summary.sentences(record))
    for title, grid in profile_summary.tables(record):
        yield Section(title, grid)
    yield Section("to profile the marked call", Commands(profile_summary.commands(record)))


def _rooflines(record: Record) -> Iterator[Section]:
    """The longest layers of each phase with their shares of the ceilings, if those are known."""
    if not any(is_layers(point.key) for point in record.points):
        return
    try:
        rooflines = of_record(record, sheets=gpu_sheets.read([conf_dir()])).values()
    except UserError:
        return
    for roofline in rooflines:
        most = roofline.parts[:_MOST_LAYERS]
        which = f"the top {len(most)} of {len(roofline.parts)} rows; perfexp roofline DIR draws all"
        grid = roofline_table.grid(roofline, [roofline.total, *most], [which, *roofline.notes])
        yield Section(f"layers and the ceilings of the device: {roofline.title}", grid)


def _environment(record: Record) -> list[str]:
    """How the run ended, and the most important facts of the environment; record.json has the rest."""
    environment = record.environment
    facts: dict[str, Any] = {"status": record.status.value, "measured": f"{record.started} to {record.ended}"}
    for name, value in _mapping(environment.get("device")).items():
        words, _, unit = name.rpartition("_")
        if unit in _FORMATS and isinstance(value, int | float) and 0 <= value < _MOST:
            name, value = words, _FORMATS[unit](value)
        if isinstance(value, str | int | float):
            facts[f"device {name.replace('_', ' ')}"] = value
    if ranks := _mapping(environment.get("ranks")):
        facts["ranks"] = f"{len(ranks.get('devices') or [])} by {ranks.get('backend')}, batch per rank"
        names = (_mapping(host) for host in ranks.get("hosts") or ())
        facts["nodes"] = ", ".join(str(host.get("node") or host.get("host")) for host in names) or None
    facts |= {name: environment.get(name) for name in ("os", "kernel", "container", "host", "python")}
    git = _mapping(environment.get("git"))
    if git.get("commit"):
        facts["git"] = f"{git['commit']}{' with uncommitted changes' if git.get('dirty') else ''}"
    packages = _mapping(environment.get("packages"))
    facts["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items()) or None
    facts |= {"perfexp": record.perfexp_version, "plan": record.plan_hash, "run": record.uid}
    return [f"{name}: {one_line(str(value))}" for name, value in facts.items() if value is not None]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _again(record: Record) -> Iterator[Section]:
    """A command that measures the run alone into a new folder."""
    overrides = [text for text in record.command if text.lstrip("+").partition("=")[0] != "output_dir"]
    alone = ["hydra.mode=RUN"] if record.sweep else []  # an experiment file may set a sweep
    elsewhere = ["stage=null"] if record.plan.get("stage") else []
    command = shlex.join(["python", "-m", "perfexp", *overrides, *alone, *elsewhere])
    yield Section("to measure it again", Commands([command]))
