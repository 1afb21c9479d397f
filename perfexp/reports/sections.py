"""Record sections in their order, for the console, report.md, the HTML page and tracking stores."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from perfexp.comparison import sweep_verdicts
from perfexp.errors import UserError
from perfexp.host import gpu_sheets
from perfexp.host.installation import conf_dir
from perfexp.plots import roofline_table
from perfexp.records import quantities, units
from perfexp.records.record import Record, is_layers
from perfexp.records.summary import Row
from perfexp.reports import overview
from perfexp.roofline import of_record
from perfexp.summaries import profile_summary, sweep_summary, wording
from perfexp.summaries.analysis import Analysis, SweepAnalysis
from perfexp.summaries.grid import Commands, Grid, Section
from perfexp.summaries.remarks import failures, raised_diagnostics, scaling_lines
from perfexp.summaries.subject import label, one_line, varying
from perfexp.tables import convolutions, layer_tables

#: Layer limit for a roofline table.
_MOST_LAYERS = 15
#: Formats for facts, by the unit that ends their name, up to an implausible value.
_MOST = 1e18
_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": units.format_bytes,
    "seconds": units.format_seconds,
}
NOT_MEASURED = "not measured"


def brief(analysis: Analysis) -> list[Section]:
    """Return the short answer: figures for one point or a row per point, and extra results."""
    table, record = analysis.rows, analysis.record
    figures = (
        _figures(table[0], analysis.percentiles)
        if len(table) == 1
        else overview.brief_points(table)
    )
    below = [sweep_summary.best(_batches(table)), *_asked(analysis), *overview.ranks(record)]
    if any(row.time for row in table):
        continues = f"; {again} continues" if (again := wording.continuation(table)) else ""
        shown = figures.markdown() if isinstance(figures, Grid) else "".join(figures)
        scope = f"± 95 % interval over {of}" if (of := wording.scope(table)) else ""
        signs = "; ".join(filter(None, [scope, "≈ no useful one" if "≈" in shown else ""]))
        below.append(
            f"{signs} (perfexp help ±){continues}" if signs else continues.removeprefix("; ")
        )
    answer = [Section(analysis.headline, figures), Section("", list(filter(None, below)))]
    return [
        section for section in (*answer, *_layers(record), *_profile(record)) if section.content
    ]


def _figures(row: Row, percentiles: Iterable[float]) -> list[str]:
    """Return one measurement's figures, one line each."""
    parts = {name: [wording.interval_or_about(time.median)] for name, time in row.times.items()}
    parts.pop("throughput", None)
    for number in percentiles:
        if row.service_kind and number != 50:
            parts.setdefault(row.service_kind, []).append(
                f"p{number:g} {wording.interval_or_about(row.percentile(number))}"
            )
    if rate := wording.row_rate_text(row):
        value, sign, half_width = rate.partition(" ± ")
        parts["throughput"] = [f"{value} samples/s{sign}{half_width}"]
    if text := wording.figure_text(row, quantities.PEAK_MEMORY):
        parts.setdefault("throughput", []).append(f"memory {text}")
    if text := wording.figure_text(row, quantities.ENERGY):
        parts["energy"] = [f"{text} per call"]
    titles = {name: overview.CAPTIONS.get(name, name) for name in parts}
    width = max(map(len, titles.values()), default=0)
    return [f"{titles[name]:<{width}}  {'   '.join(texts)}" for name, texts in parts.items()]


def _batches(table: Sequence[Row]) -> list[sweep_summary.Candidate]:
    """Return the rows as candidates if they differ in batch size only, otherwise nothing."""
    if varying(row.key for row in table) != ("batch_size",):
        return []
    return [
        sweep_summary.Candidate(f"batch {row.key.batch_size}", row.key.batch_size, row)
        for row in table
    ]


def _asked(analysis: Analysis) -> Iterator[str]:
    """Yield lines on requested results other than times, e.g. epochs and cold starts."""
    for point in analysis.record.points:
        if point.epochs:
            yield f"epoch {point.epochs[-1].number}: {wording.epoch_text(point.epochs[-1])}"
    for first in analysis.cold_starts:
        yield f"cold start  {wording.first_prediction_text(first).partition(' = ')[0]}"
    if texts := list(dict.fromkeys(filter(None, map(wording.coverage_text, analysis.rows)))):
        yield f"algorithm coverage  {' … '.join(texts)}"
    own = [point for point in analysis.record.points if not point.key.replicate]
    for text in convolutions.sentences(msgspec.structs.replace(analysis.record, points=own)):
        yield text.partition(";")[0]  # the rest explains how it was measured


def sections(analysis: Analysis, *, is_whole: bool = False) -> list[Section]:
    """Return a record's sections, without empty ones.

    Args:
        is_whole: whether to include ceilings, environment and command.
    """
    table, record, title = analysis.rows, analysis.record, analysis.headline
    parts = [
        *(
            _shown(title, overview.points(analysis))
            if table
            else [Section(title, ["nothing was measured"])]
        ),
        Section("scaling with the input size", scaling_lines(analysis)),
        Section("convolutions", convolutions.sentences(record)),
        Section("attention", convolutions.attention(record)),
        Section("ranks", overview.ranks(record)),
        *_shown("phases", overview.phases(table)),
        *_shown("epochs", overview.epochs(record)),
        Section("cold start", _cold_starts(analysis)),
        *_layers(record),
        *_profile(record),
        *_shown("other metrics", overview.metrics(analysis), is_split=True),
        Section("clock and power under load", overview.loads(record)),
        Section(
            "diagnostics",
            [line for raised in raised_diagnostics(analysis) for line in raised.lines],
        ),
        Section(NOT_MEASURED, failures(record)),
    ]
    if is_whole:
        parts += [
            *_rooflines(record),
            Section("environment", _environment(record)),
            *_again(record),
        ]
    return [part for part in parts if part.content]


def of_sweep(whole: SweepAnalysis, *, is_brief: bool = False) -> list[Section]:
    """Return a sweep's sections up to its diagnostics and failures.

    They hold a row per run, verdicts and the best run.
    """
    verdicts = sweep_verdicts.of_sweep(whole)
    setting = list(filter(None, [sweep_summary.setting(whole.analyses)]))
    parts = [Section(sweep_summary.headline(whole.sweep), setting)]
    if whole.runs:
        grid = sweep_summary.runs(whole, verdicts.title, verdicts.ratios)
        parts.append(Section("", Grid(grid.columns) if is_brief else grid))
    below = [*verdicts.notes, *verdicts.fastest, sweep_summary.best_run(whole)]
    return [*parts, Section("", list(filter(None, below)))]


def _shown(title: str, grid: Grid | None, *, is_split: bool = False) -> Iterator[Section]:
    """Yield a table as sections. A single row becomes lines.

    Args:
        is_split: whether to show figures that all rows share as lines, too.
    """
    if grid is None:
        return
    lines, rest = grid.common() if is_split or len(grid.lines) == 1 else ([], grid)
    yield Section(title, lines if rest.columns else [*lines, *grid.notes])
    if rest.columns:
        yield Section("" if lines else title, rest)


def _cold_starts(analysis: Analysis) -> list[str]:
    firsts = analysis.cold_starts
    shapes = {(row.key.input_size, row.key.batch_size) for row in analysis.rows}
    texts = [(label(first.key), wording.first_prediction_text(first)) for first in firsts]
    return [
        text if len(shapes) < 2 and len(firsts) == 1 else f"{name}: {text}" for name, text in texts
    ]


def _layers(record: Record) -> Iterator[Section]:
    if table := layer_tables.table(record):
        yield Section(f"layers: {table[0]}", table[1])


def _profile(record: Record) -> Iterator[Section]:
    yield Section("profile", profile_summary.sentences(record))
    for title, grid in profile_summary.tables(record):
        yield Section(title, grid)
    yield Section("to profile the marked call", Commands(profile_summary.commands(record)))


def _rooflines(record: Record) -> Iterator[Section]:
    """Yield the longest layers of each phase with their shares of the ceilings, if known."""
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
    """Return how the run ended and the main environment facts; record.json has the rest."""
    environment = record.environment
    facts: dict[str, Any] = {
        "status": record.status.value,
        "measured": f"{record.started} to {record.ended}",
    }
    for name, value in _mapping(environment.get("device")).items():
        words, _, unit = name.rpartition("_")
        if unit in _FORMATS and isinstance(value, int | float) and 0 <= value < _MOST:
            name, value = words, _FORMATS[unit](value)
        if isinstance(value, str | int | float):
            facts[f"device {name.replace('_', ' ')}"] = value
    if ranks := _mapping(environment.get("ranks")):
        facts["ranks"] = (
            f"{len(ranks.get('devices') or [])} by {ranks.get('backend')}, batch per rank"
        )
        names = (_mapping(host) for host in ranks.get("hosts") or ())
        facts["nodes"] = (
            ", ".join(str(host.get("node") or host.get("host")) for host in names) or None
        )
    facts |= {
        name: environment.get(name) for name in ("os", "kernel", "container", "host", "python")
    }
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
    """Yield the command that measures this run alone, into a new folder."""
    overrides = [
        text for text in record.command if text.lstrip("+").partition("=")[0] != "output_dir"
    ]
    alone = ["hydra.mode=RUN"] if record.sweep else []  # an experiment file may set a sweep
    elsewhere = ["stage=null"] if record.plan.get("stage") else []
    command = shlex.join(["python", "-m", "perfexp", *overrides, *alone, *elsewhere])
    yield Section("to measure it again", Commands([command]))
