"""perfexp check: compare a new run with a baseline and return an exit code.

perfexp baseline: manage named baselines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands import sides
from perfexp.commands.app import RECORD, Force, Json, Uri, app, echo, emit, one_of
from perfexp.commands.export import Collected
from perfexp.comparison import comparison_table, judging, named_baselines
from perfexp.comparison.document import Compared, Comparison, Verdict, measures_of, with_verdict
from perfexp.comparison.history import history
from perfexp.comparison.measures import MEASURES
from perfexp.comparison.pairing import Side
from perfexp.errors import PerfexpError, UserError
from perfexp.records import units
from perfexp.records.analysis import Analysis
from perfexp.records.grid import Grid, Section, escape_markdown
from perfexp.records.record import USUAL_PRECISION, Record
from perfexp.records.subject import one_line
from perfexp.report import markdown
from perfexp.report.console import Console
from perfexp.report.tables import json_results

#: Measures without `--metric`. Another clock changes cycles without changing the time, and
#: few runs have intervals for whole epochs and cold starts.
_DEFAULT = ",".join(name for name in MEASURES if name not in ("cycles", "epoch", "runtime", "ttfp"))
#: GitHub Actions' variable with the path of the step summary, and the summary's size limit.
_SUMMARY, _MOST_BYTES = "GITHUB_STEP_SUMMARY", 1 << 20


class FailureReason(StrEnum):
    """A reason to fail the check."""

    slower = "slower"
    missing = "missing"
    undecided = "undecided"


New = Annotated[
    str,
    typer.Argument(
        metavar="NEW", help="A run's or a sweep's folder, a record.json, or mlflow:RUN_ID."
    ),
]
Against = Annotated[
    str,
    typer.Option(
        metavar="BASELINE", help="Name of a baseline (perfexp baseline), or a folder as NEW."
    ),
]
FailOn = Annotated[
    str,
    typer.Option(
        metavar="NAME,…",
        help="Of missing, undecided, and slower (worse in any measure), which always fails.",
    ),
]
AllowUndecided = Annotated[
    bool,
    typer.Option(
        "--allow-undecided", help="Pass figures that are worse beyond the margin but undecided."
    ),
]
Earlier = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="DIR",
        help="Also find the commits at which a figure changed, from all runs in and below DIR.",
    ),
]
GitHub = Annotated[
    bool,
    typer.Option("--github", help="For GitHub Actions: annotations, and a summary of the step."),
]


@app.command()
def check(
    new: New,
    against: Against,
    fail_on: FailOn = "slower,missing",
    allow_undecided: AllowUndecided = False,
    margin: sides.Margin = "1%",
    fdr: sides.Fdr = "5%",
    metric: sides.Metrics = None,
    allow: sides.Allow = None,
    earlier: Earlier = None,
    folder: sides.Baselines = None,
    machine: sides.Machine = None,
    uri: Uri = None,
    github: GitHub = False,
    as_json: Json = False,
) -> None:
    """Check a new run against a baseline: print a line for each regression, and set an exit code.

    Exit code 0: nothing is worse. Exit code 1: a figure is worse beyond the margin, or missing.
    Exit code 2: the check has no answer. For example, the runs cannot be compared or have nothing
    in common, or a figure has no interval. A worse figure that is undecided and a wrong command
    give 2, too.

    Without --metric, cycles, epoch, runtime and ttfp are left out. Accuracy is exact: the margin is
    a difference in percentage points.

    With --history, a level that became worse beyond the margin since the baseline fails, too; here
    the margin of accuracy is relative. Older changes are printed only. Each series needs ten
    comparable runs.

    Example: perfexp check outputs/2026-11-28/100000-resnet50-b1 --against main
    """
    try:
        settings = sides.settings(margin, fdr, metric or _DEFAULT, allow)
        reasons = _reasons(fail_on)
        summary = _summary_file() if github else None
        root = folder or named_baselines.default_folder()
        both = list(_sides(new, against, root, machine, uri))
        _refuse_default_precision(*both)
        compared = judging.compare(both, settings)
        changes, short = history(both, _earlier(earlier), settings) if earlier else ([], [])
    except PerfexpError as error:
        if github:
            echo(_annotation(str(error)))
        raise UserError(str(error)) from error  # exit code 1 means a regression
    failed = [*_failed(compared, reasons), *(change.text for change in changes if change.total)]
    other = [change.text for change in changes if not change.total]
    unknown, word, code = short, "failed", 1
    if not failed:
        required = sides.words([metric or ""])
        unknown = [*_unknown(compared, required, allow_undecided=allow_undecided), *short]
        word, code = ("not decided", 2) if unknown else ("passed", 0)
    outcome = f"{word}: {_counts(compared)}, against {against}"
    emit(
        {
            "outcome": word,
            "failed": failed,
            "undecided": unknown,
            "changes": [change._asdict() for change in changes],
            "comparison": json.loads(compared.to_json()),
        },
        [
            *map(one_line, other),
            *(_annotation(line) if github else one_line(line) for line in (*failed, *unknown)),
        ],
        as_json=as_json,
    )
    echo(one_line(outcome), err=True)
    if summary:
        lines = map(escape_markdown, (outcome, *other, *failed, *unknown))
        _append(summary, "\n\n".join([*lines, markdown.comparison(compared)]))
    raise typer.Exit(code)


def _sides(
    new: str, against: str, root: Path, machine: str | None, uri: str | None
) -> Iterator[Side]:
    """Yield the baseline, then the new side.

    A baseline name takes precedence over a folder with the same name.

    Args:
        new: run, sweep or record to check.
        against: name of a baseline, or a folder.
        root: folder of named baselines.
        machine: machine of the baseline; None for the new run's machine.
        uri: tracking store; None for the default.
    """
    records, missing = sides.records(new, uri)
    is_name = Path(against).name == against and not against.startswith(sides.MLFLOW)
    if is_name and (named_baselines.find(root, against) or not Path(against).exists()):
        baseline_folder = sides.baseline(
            root, against, machine or named_baselines.machine_of(records)
        )
        yield Side.of(
            "A", str(baseline_folder), map(Analysis.of, named_baselines.read(baseline_folder))
        )
    else:
        before, lacking = sides.records(against, uri)
        yield Side.of("A", against, map(Analysis.of, before), lacking)
    yield Side.of("B", new, map(Analysis.of, records), missing)


def _earlier(folder: Path) -> Iterator[Side]:
    """Yield the runs in and below a folder, without unreadable and untimed runs.

    Raises:
        UserError: there are none.
    """
    for file in Collected(samples=False).files(folder):
        if file.name == RECORD:
            try:
                yield Side.of("", str(file), [Analysis.of(Record.load(file))])
            except PerfexpError as error:
                echo(f"left out: {error}", err=True)


def _refuse_default_precision(baseline: Side, new: Side) -> None:
    """Raise `UserError` if the new run has the default precision and the baseline has another.

    The precision was probably forgotten.
    """
    before = {measurement.key.precision for measurement in baseline.measurements}
    now = {measurement.key.precision for measurement in new.measurements}
    if now == {USUAL_PRECISION} and len(before) == 1 and before != now:
        named = f"precision={before.pop()}"
        raise UserError(
            f"{baseline.source} was measured with {named}, and {new.source} with PyTorch's "
            f"default: measure it again with {named}."
        )


def _counts(compared: Comparison) -> str:
    """Return the number of figures by verdict, as text for the outcome."""
    words = []
    for verdict in Verdict:
        if pairs := with_verdict(compared.pairs, verdict):
            words.append(f"{len(pairs)} {verdict.value}")
            if verdict is Verdict.UNDECIDED:
                words[-1] += f" ({_places(pairs)})"
    text = ", ".join(words) or "nothing compared"
    return f"{text}, margin ±{comparison_table.bare(compared.margin)}"


def _failed(compared: Comparison, reasons: Collection[str]) -> Iterator[str]:
    """Yield a line for each figure that fails the check."""
    for reason, verdict in (
        (FailureReason.slower, Verdict.WORSE),
        (FailureReason.undecided, Verdict.UNDECIDED),
    ):
        if reason in reasons:
            yield from map(_line, with_verdict(compared.pairs, verdict))
    if FailureReason.missing in reasons:
        baseline, new = compared.sides
        for missing in compared.alone:
            if missing.side == baseline.name:
                yield f"MISSING {comparison_table.alone_of(missing)}"
        yield from map("MISSING {}".format, new.missing)


def _line(pair: Compared) -> str:
    """Return a compared figure in one line: verdict, measure, point, both values and ratio."""
    now = comparison_table.figure(pair.other, pair.unit)
    before = comparison_table.figure(pair.baseline, pair.unit)
    figures = f"{now}, was {before}, ratio {comparison_table.ratio_of(pair)}"
    return f"{comparison_table.verdict_of(pair)} {pair.measure} of {pair.point}: {figures}"


def _unknown(compared: Comparison, required: Sequence[str], *, allow_undecided: bool) -> list[str]:
    """Return why the check has no answer although nothing failed; empty if it has an answer.

    Args:
        required: measures that both sides must have.
        allow_undecided: whether to accept undecided figures that are worse beyond the margin.
    """
    if with_verdict(compared.pairs, Verdict.NOT_COMPARABLE):
        lines = comparison_table.confounders(compared.sides[1])
        return list(map("not comparable: {}".format, lines))
    measured = measures_of(compared.pairs)
    if unmeasured := [name for name in required if name not in measured]:
        return [f"not measured on both sides: {', '.join(unmeasured)}"]
    if not compared.pairs:
        return ["nothing was measured on both sides"]
    undecided = with_verdict(compared.pairs, Verdict.UNDECIDED)
    if unsure := [pair for pair in undecided if pair.low is None]:
        remedy = "measure in several processes (processes=3), or name other measures with --metric"
        return [f"without an interval: {_places(unsure)}; {remedy}"]
    worse = [pair for pair in undecided if _is_worse(pair, compared.margin)]
    if worse and not allow_undecided:
        remedy = "measure in more processes (processes=N), or pass it with --allow-undecided"
        return [f"worse beyond the margin, but undecided: {_places(worse)}; {remedy}"]
    return []


def _places(pairs: Sequence[Compared]) -> str:
    """Return the measures of some pairs with their point counts: `latency of 3 points`."""
    counts = Counter(pair.measure for pair in pairs)
    return ", ".join(f"{name} of {units.counted(count, 'point')}" for name, count in counts.items())


def _is_worse(pair: Compared, margin: float) -> bool:
    """Return whether the figure is worse beyond the margin, ignoring its interval."""
    ratio = pair.ratio or 1.0
    return (ratio if MEASURES[pair.measure].is_better_if_lower else 1 / ratio) > 1 + margin


def _reasons(fail_on: str) -> set[str]:
    """Return the reasons to fail; `slower` is always one.

    Raises:
        UserError: a reason is unknown, or there is none.
    """
    reasons = {one_of("--fail-on", name, list(FailureReason)) for name in sides.words([fail_on])}
    if not reasons:
        raise UserError(f"--fail-on is empty; name some of {', '.join(FailureReason)}.")
    return {FailureReason.slower, *reasons}


def _summary_file() -> Path:
    """Return the file of GitHub's step summary; raise `UserError` outside of GitHub Actions."""
    if not os.environ.get(_SUMMARY):
        raise UserError(
            f"--github: {_SUMMARY} is not set, which GitHub Actions does; "
            "leave out --github elsewhere."
        )
    return Path(os.environ[_SUMMARY])


def _append(file: Path, text: str) -> None:
    """Append text to GitHub's step summary, cut to its limit."""
    try:
        with file.open("ab") as summary:
            summary.write(text.encode()[:_MOST_BYTES] + b"\n")
    except OSError as error:
        raise UserError(f"{_SUMMARY}: {file} can't be written: {error.strerror}.") from error


def _annotation(line: str) -> str:
    """Return a line as an error annotation for GitHub Actions.

    Actions ends it at a line break and reads percent signs as escapes.
    """
    return f"::error title=perfexp check::{one_line(line).replace('%', '%25')}"


class Action(StrEnum):
    """An action on baselines."""

    add = "add"
    list = "list"
    show = "show"
    rm = "rm"


@app.command()
def baseline(
    action: Annotated[
        Action, typer.Argument(metavar="ACTION", help="add NAME DIR, list, show NAME, or rm NAME.")
    ],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a baseline.")] = None,
    source: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="A run's or a sweep's folder, or mlflow:RUN_ID."),
    ] = None,
    folder: sides.Baselines = None,
    machine: sides.Machine = None,
    uri: Uri = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Store copies of records under a name, as baselines for perfexp check.

    Each machine and GPU has its own copy.

    Example: perfexp baseline add main outputs/2026-11-28/100000-resnet50-b1
    """
    root = folder or named_baselines.default_folder()
    if action is Action.list:
        baselines = list(map(_facts, named_baselines.find(root)))
        part: Section | str = f"no baselines in {root}"
        if baselines:
            rows = []
            for facts in baselines:
                row = dict(facts)
                row["first run"] = row.pop("first_run")
                rows.append(row)
            part = Section(str(root), Grid.of_rows(rows))
        emit({"folder": root, "baselines": baselines}, [part], as_json=as_json)
    elif name is None or (source is None) is (action is Action.add):
        raise UserError("Give perfexp baseline add NAME DIR, list, show NAME, or rm NAME.")
    elif source is not None:
        records, missing = sides.records(source, uri)
        for line in missing:
            echo(f"left out, without a record: {line}", err=True)
        baseline_folder = named_baselines.add(root, name, records, machine, force=force)
        emit({"added": baseline_folder}, [f"added {baseline_folder}"], as_json=as_json)
    elif action is Action.show:
        _show(sides.baseline(root, name, machine), as_json=as_json)
    else:
        baseline_folder = sides.baseline(root, name, machine)
        try:
            named_baselines.remove(baseline_folder)
        except OSError as error:
            raise UserError(f"{baseline_folder} can't be removed: {error.strerror}.") from error
        emit({"removed": baseline_folder}, [f"removed {baseline_folder}"], as_json=as_json)


def _show(folder: Path, *, as_json: bool) -> None:
    """Print the records of a baseline."""
    analyses = map(Analysis.of, named_baselines.read(folder))
    runs = [(analysis, folder / str(number)) for number, analysis in enumerate(analyses)]
    if as_json:
        emit(json_results.document([json_results.of_run(*run) for run in runs]), (), as_json=True)
        return
    for run in runs:
        Console().show(*run)


def _facts(folder: Path) -> dict[str, str]:
    """Return date, run count and first run of a baseline as texts, or why it is unreadable."""
    about = {"machine": folder.parent.name, "name": folder.name}
    try:
        records = named_baselines.read(folder)
    except PerfexpError as error:
        unread = {"measured": "", "content": "unreadable", "first_run": one_line(str(error))}
        return about | unread
    about["measured"] = records[0].started[:10]
    about["content"] = units.counted(len(records), "run")
    about["first_run"] = records[0].name
    return about
