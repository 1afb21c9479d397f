"""Record sections in their order, for the console, report.md, the HTML page and tracking stores.

A section is a title with a table or lines. `brief` is the console's short answer, `sections` the
full report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from perfexp.comparison import sweep_verdicts
from perfexp.errors import UserError
from perfexp.host import gpu_sheets
from perfexp.host.installation import conf_dir
from perfexp.plan.override_keys import key_of, line_to_type
from perfexp.records import profile_summary, quantities, seeds, sweep_summary, units, wording
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.grid import Commands, Grid, Section
from perfexp.records.record import Record, Status, is_layers
from perfexp.records.remarks import failures, raised_diagnostics, scaling_lines
from perfexp.records.rows import Row
from perfexp.records.subject import label, one_line, varying
from perfexp.report import overview
from perfexp.report.plots import roofline_table
from perfexp.report.tables import convolutions, layer_tables
from perfexp.roofline import of_record

#: Layer limit for a roofline table.
_MOST_LAYERS = 15
#: Larger facts are implausible and shown unformatted.
_MOST = 1e18
#: Formats for facts, by the unit that ends their name.
_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": units.format_bytes,
    "seconds": units.format_seconds,
}
NOT_MEASURED = "not measured"


def brief(analysis: Analysis) -> list[Section]:
    """Return the short answer: figures for one point or a row per point, and extra results.

    The console prints it after a run.
    """
    table, record = analysis.rows, analysis.record
    figures: Grid | list[str]
    if len(table) == 1:
        figures = _figures(table[0], analysis.percentiles)
        shown = "".join(figures)
    else:
        figures = overview.brief_points(table)
        shown = figures.markdown()
    below = [
        sweep_summary.best(_batches(table)),
        *_requested_results(analysis),
        *overview.ranks(record),
    ]
    if any(row.time for row in table):
        signs = []
        if scope := wording.scope(table):
            signs.append(f"± 95 % interval over {scope}")
        if "≈" in shown:
            signs.append("≈ no useful one")
        words = [f"{'; '.join(signs)} (perfexp help ±)"] if signs else []
        if command := wording.continuation(table):
            words.append(f"{command} continues")
        below.append("; ".join(words))
    answer = [Section(analysis.headline, figures), Section("", list(filter(None, below)))]
    return _without_empty([*answer, *_layers(record), *_profile(record)])


def _without_empty(parts: Iterable[Section]) -> list[Section]:
    """Return the sections that have content."""
    return [part for part in parts if part.content]


def _figures(row: Row, percentiles: Iterable[float]) -> list[str]:
    """Return one measurement's figures as lines with aligned titles: times, throughput, energy."""
    if row.status is not Status.OK:  # the reason follows
        return []
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
    if text := wording.figure_text(row, quantities.TOKENS_RATE):
        parts.setdefault("throughput", []).append(text)
    if text := wording.figure_text(row, quantities.PEAK_MEMORY):
        parts.setdefault("throughput", []).append(f"memory {text}")
    if text := wording.figure_text(row, quantities.ENERGY):
        parts["energy"] = [f"{text} per call"]
    titles = [overview.CAPTIONS.get(name, name) for name in parts]
    width = max(map(len, titles), default=0)
    lines = []
    for title, texts in zip(titles, parts.values(), strict=True):
        lines.append(f"{title:<{width}}  {'   '.join(texts)}")
    return lines


def _batches(table: Sequence[Row]) -> list[sweep_summary.Candidate]:
    """Return the rows as candidates if they differ in batch size only, otherwise nothing."""
    candidates = []
    if varying(row.key for row in table) == ("batch_size",):
        for row in table:
            batch = row.key.batch_size
            candidates.append(sweep_summary.Candidate(f"batch {batch}", batch, row))
    return candidates


def _requested_results(analysis: Analysis) -> Iterator[str]:
    """Yield lines on requested results other than times, e.g. epochs and cold starts."""
    to_accuracy = _to_accuracy(analysis)
    yield from to_accuracy
    for point in analysis.record.points:
        if point.epochs and not to_accuracy:
            yield f"epoch {point.epochs[-1].number}: {wording.epoch_text(point.epochs[-1])}"
    for first in analysis.cold_starts:
        yield f"cold start  {wording.first_prediction_text(first).partition(' = ')[0]}"
    if texts := list(dict.fromkeys(filter(None, map(wording.coverage_text, analysis.rows)))):
        yield f"algorithm coverage  {' … '.join(texts)}"
    first_process = [point for point in analysis.record.points if not point.key.replicate]
    for text in convolutions.sentences(
        msgspec.structs.replace(analysis.record, points=first_process)
    ):
        yield text.partition(";")[0]  # the rest explains how it was measured


def sections(analysis: Analysis, *, is_whole: bool = False) -> list[Section]:
    """Return a record's sections, without empty ones.

    report.md, `perfexp show -v` and HTML pages consist of them.

    Args:
        is_whole: whether to include ceilings, environment and command.
    """
    table, record, title = analysis.rows, analysis.record, analysis.headline
    parts = [Section(title, ["nothing was measured"])]
    if table:
        parts = list(_shown(title, overview.points(analysis)))
    diagnostics = list[str]()
    for raised in raised_diagnostics(analysis):
        diagnostics += raised.lines
    parts += [
        Section("time to accuracy", _to_accuracy(analysis)),
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
        Section("diagnostics", diagnostics),
        Section(NOT_MEASURED, failures(record)),
    ]
    if is_whole:
        parts += [
            *_rooflines(record),
            Section("environment", _environment(record)),
            *_again(record),
        ]
    return _without_empty(parts)


def of_sweep(sweep_analysis: SweepAnalysis, *, is_brief: bool = False) -> list[Section]:
    """Return a sweep's sections up to its diagnostics and failures.

    They hold a row per run, verdicts and the best run.
    """
    verdicts = sweep_verdicts.of_sweep(sweep_analysis)
    setting = list(filter(None, [sweep_summary.setting(sweep_analysis.analyses)]))
    parts = [Section(sweep_summary.headline(sweep_analysis.sweep), setting)]
    if sweep_analysis.runs:
        grid = sweep_summary.runs(sweep_analysis, verdicts.title, verdicts.ratios)
        parts.append(Section("", Grid(grid.columns) if is_brief else grid))
    below = [*verdicts.notes, *verdicts.fastest, sweep_summary.best_run(sweep_analysis)]
    return [*parts, Section("", list(filter(None, below)))]


def _shown(title: str, grid: Grid | None, *, is_split: bool = False) -> Iterator[Section]:
    """Yield a table as sections; a table with a single row becomes lines. Nothing for None.

    Args:
        is_split: whether to show figures that all rows share as lines, too.
    """
    if grid is None:
        return
    lines, table = list[str](), grid
    if is_split or len(grid.lines) == 1:
        lines, table = grid.split_common()
    if not table.columns:
        yield Section(title, [*lines, *grid.notes])
    elif lines:
        yield Section(title, lines)
        yield Section("", table)
    else:
        yield Section(title, table)


def _to_accuracy(analysis: Analysis) -> list[str]:
    """Return the times and accuracies of trainings to a target; points are named if they vary."""
    fields, lines = varying(row.key for row in analysis.rows), list[str]()
    for row in analysis.rows:
        for text in seeds.sentences(row):
            lines.append(f"{label(row.key, fields)}: {text}" if fields else text)
    return lines


def _cold_starts(analysis: Analysis) -> list[str]:
    """Return a line for each cold start, with its label unless there is only one."""
    firsts = analysis.cold_starts
    shapes = {(row.key.input_size, row.key.batch_size) for row in analysis.rows}
    texts = []
    for first in firsts:
        text = wording.first_prediction_text(first)
        is_alone = len(shapes) < 2 and len(firsts) == 1
        texts.append(text if is_alone else f"{label(first.key)}: {text}")
    return texts


def _layers(record: Record) -> Iterator[Section]:
    """Yield the table of the longest layers, if layers were profiled."""
    if table := layer_tables.table(record):
        yield Section(f"layers: {table[0]}", table[1])


def _profile(record: Record) -> Iterator[Section]:
    """Yield what profilers found, and commands to profile a marked call, if any did."""
    yield Section("profile", profile_summary.sentences(record))
    for title, grid in profile_summary.tables(record):
        yield Section(title, grid)
    yield Section("to profile the marked call", Commands(profile_summary.commands(record)))


def _rooflines(record: Record) -> Iterator[Section]:
    """Yield the longest layers of each phase with their shares of the ceilings, if known.

    Data sheets in conf/gpu give the ceilings; without them nothing is shown.
    """
    if not any(is_layers(point.key) for point in record.points):
        return
    try:
        rooflines = of_record(record, sheets=gpu_sheets.read([conf_dir()])).values()
    except UserError:
        return
    for roofline in rooflines:
        most = roofline.parts[:_MOST_LAYERS]
        selection = (
            f"the top {len(most)} of {len(roofline.parts)} rows; perfexp roofline DIR draws all"
        )
        grid = roofline_table.grid(roofline, [roofline.total, *most], [selection, *roofline.notes])
        yield Section(f"layers and the ceilings of the device: {roofline.title}", grid)


def _environment(record: Record) -> list[str]:
    """Return how the run ended and the main environment facts; record.json has the rest.

    It is a section of report.md and of MLflow's description.
    """
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
        number = len(ranks.get("devices") or [])
        facts["ranks"] = f"{number} by {ranks.get('backend')}, batch per rank"
        names = []
        for host in map(_mapping, ranks.get("hosts") or ()):
            names.append(str(host.get("node") or host.get("host")))
        facts["nodes"] = ", ".join(names) or None
    for name in ("os", "kernel", "container", "host", "python"):
        facts[name] = environment.get(name)
    git = _mapping(environment.get("git"))
    if git.get("commit"):
        facts["git"] = git["commit"]
        if git.get("dirty"):
            facts["git"] = f"{git['commit']} with uncommitted changes"
    packages = _mapping(environment.get("packages"))
    versions = [f"{name} {version}" for name, version in packages.items()]
    facts["packages"] = ", ".join(versions) or None
    facts |= {"perfexp": record.perfexp_version, "plan": record.plan_hash, "run": record.uid}
    return [f"{name}: {one_line(str(value))}" for name, value in facts.items() if value is not None]


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty mapping for anything else: a record is data."""
    if isinstance(value, Mapping):
        return value
    return {}


def _again(record: Record) -> Iterator[Section]:
    """Yield the command that measures this run alone, into a new folder."""
    words = [word for word in record.command if key_of(word) != "output_dir"]
    if record.sweep:
        words.append("hydra.mode=RUN")  # an experiment file may set a sweep
    if record.plan.get("stage"):
        words.append("stage=null")
    yield to_repeat(line_to_type(words, program=("python", "-m", "perfexp")))


def to_repeat(line: str | None) -> Section:
    """Return the section with the command that measures again.

    Args:
        line: the command; None if it can't be shown.
    """
    content = ["its command can't be shown"] if line is None else Commands([line])
    return Section("to measure it again", content)
