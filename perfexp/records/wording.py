"""Wording: figures as words, the same in every report, with the digits that intervals support.

Console, tables, plots and MLflow descriptions call these functions. An interval is a value with the
ends of its 95 % confidence interval; both ends are None if it is unknown. `≈` marks a figure whose
interval is missing or says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter

from perfexp.records import quantities, units
from perfexp.records.cold_starts import AFTERWARDS, FirstPrediction
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.growth import Scaling
from perfexp.records.point_times import interval_of
from perfexp.records.record import Epoch, Metric
from perfexp.records.rows import Row
from perfexp.records.units import pretty
from perfexp.statistics import blockwise, estimators

#: Function that formats a value with a number of significant digits.
Format = Callable[[float, int], str]
#: An exponent with a wider interval is shown as a range.
_WIDE_EXPONENT = 0.3
#: Above this half-width both ends of an interval are shown, since their distances differ; and their
#: digits.
_WIDE, _END_FIGURES = 0.2, 3
#: Above this half-width the ends are shown if one is this many times as far from the figure as the
#: other.
_NOTABLE, _SKEWED = 0.02, 2
#: An interval is uninformative if its ends differ by more than this factor.
_USELESS = 100
#: A constant part below this share of the shortest time is not shown.
_NEGLIGIBLE = 0.005
#: Rounding error for a sum of shares.
_ROUNDING = 1e-9
TOO_FEW = "too few effective samples"
#: Smallest relative half-width shown; narrower intervals are shown with it.
_LEAST_WIDTH = 1e-4


def with_width(interval: estimators.Interval, text: str, ends: str = "") -> str:
    """Return a figure's text with the interval's relative half-width, or `no interval`.

    If the ends differ by more than a factor of 100, the interval is uninformative and the figure is
    shown as `≈`. Comparisons use it for ratios, reports for times and metrics.

    Args:
        text: the figure as text, for example `62.4 ms`.
        ends: both ends of the interval as text, for example `(24 … 51 ms)`. They replace a
            half-width above 20 %, or above 2 % if their distances differ much.
    """
    width = interval.relative_half_width
    if says_nothing(interval):
        return f"≈ {text}"
    if ends and _has_ends(interval):
        return f"{text} ({ends})"
    if width is None:
        return f"{text}, no interval"
    return f"{text} ± {percent(max(width, _LEAST_WIDTH))}"


def says_nothing(interval: estimators.Interval) -> bool:
    """Return whether the ends of an interval differ by more than a factor of 100."""
    return (
        interval.low is not None
        and interval.high is not None
        and 0 < _USELESS * interval.low < interval.high
    )


def range_text(interval: estimators.Interval, shown: Format = units.format_seconds) -> str:
    """Return the ends of an interval, for example `61.9 … 63.0 ms`; empty without an interval.

    A common unit appears once.

    Args:
        shown: formats a value, by default seconds, with a number of significant digits.
    """
    if interval.low is None or interval.high is None:
        return ""
    figures = max(supported_digits(interval), _END_FIGURES)
    low = shown(_to_figures(interval.low, figures), figures)
    high = shown(_to_figures(interval.high, figures), figures)
    number, space, unit = low.rpartition(" ")
    if space and high.endswith(space + unit):
        low = number
    return f"{low} … {high}"


def bare(interval: estimators.Interval, shown: Format = units.format_seconds) -> str:
    """Return a figure without its interval, with the digits that the interval supports.

    Bars in plots and columns without room for intervals show it.
    """
    figures = supported_digits(interval)
    if _has_ends(interval):
        figures = max(figures, _END_FIGURES)
    return shown(_to_figures(interval.value, figures), figures)


def interval_text(interval: estimators.Interval, shown: Format = units.format_seconds) -> str:
    """Return a figure with its interval: `62.4 ms ± 0.8 %`, or `62.4 ms, no interval`.

    Tables and plots show medians this way.
    """
    return with_width(interval, bare(interval, shown), range_text(interval, shown))


def interval_or_about(
    interval: estimators.Interval | None, shown: Format = units.format_seconds
) -> str:
    """Return a figure with its interval: `62.4 ms ± 0.8 %`, or `≈ 62.4 ms` without an interval.

    Empty for None. Columns for percentiles and rates show figures this way.
    """
    if interval is None:
        return ""
    if interval.low is None:
        return f"≈ {bare(interval, shown)}"
    return interval_text(interval, shown)


def rate_text(interval: estimators.Interval | None) -> str:
    """Return a rate without unit, with the digits that its interval supports; empty for None.

    `≈` marks a missing interval. For a rate with its interval see `row_rate_text`.
    """
    if interval is None:
        return ""
    text = bare(interval, units.digits)
    if interval.low is None or says_nothing(interval):
        return f"≈ {text}"
    return text


def row_rate_text(row: Row) -> str:
    """Return a row's rate with its interval: `2400 ± 17 %`, `1300 (650 … 2600)`, or `≈ 2400`."""
    return interval_or_about(row.samples_per_second, units.digits)


def rate_notes(rows: Sequence[Row]) -> list[str]:
    """Return notes below a table with samples/s; empty if there is nothing to note.

    They are about missing intervals, and about means that differ from the medians in the table.
    """
    rates = [rate for row in rows if (rate := row.samples_per_second)]
    notes = []
    if any(rate.low is None for rate in rates):
        notes.append(f"≈ samples/s without an interval: {TOO_FEW}")
    num_differing = 0
    for row in rows:
        # a measured throughput gives the rate; otherwise the latency's mean does
        if row.time_kind == "latency" and "throughput" not in row.times:
            mean, median = row.times["latency"].mean, row.times["latency"].median
            num_differing += mean.low is not None and estimators.differ(mean, median, 0.0)
    if num_differing:
        share_of_points = f" at {num_differing} of {len(rates)} points"
        if num_differing == len(rates) == 1:
            share_of_points = ""
        notes.append(
            "samples/s is by the mean of all calls, which differs from p50 by more than both "
            f"intervals{share_of_points}"
        )
    return notes


def supported_digits(interval: estimators.Interval) -> int:
    """Return the significant digits that an interval supports, two to five; three without one.

    Rounding then moves the figure by up to a sixth of its half-width.
    """
    width = interval.relative_half_width
    if width is None or interval.value == 0:
        return 3
    if width == 0:
        return 4
    size = abs(interval.value)
    first_place = math.floor(math.log10(size))
    # a last digit of up to a third of the half-width is rounded by up to half of that
    last_place = math.floor(math.log10(width * size / 3))
    return min(max(first_place - last_place + 1, 2), 5)


def percent(fraction: float) -> str:
    """Return a fraction as a percentage: `0.8 %`, `12 %`, `0.04 %`, `< 0.01 %`."""
    value = 100 * fraction
    if abs(value) >= 10:
        return f"{value:.0f} %"
    if 0 < abs(value) < 0.005:
        return "< 0.01 %"
    if abs(value) >= 0.1:
        return f"{value:.1f} %"
    return f"{units.digits(value, 1)} %"


def percent_range(fractions: Iterable[float]) -> str:
    """Return the range of one or more fractions in percent: `25 … 50 %`; one value if equal.

    Notes on algorithm coverage over several points use it.
    """
    ascending = sorted(fractions)
    least, most = percent(ascending[0]), percent(ascending[-1])
    if least == most:
        return most
    return f"{least.removesuffix(' %')} … {most}"


def time_kinds(rows: Iterable[Row]) -> list[str]:
    """Return the names of the rows' representative times (`device`, `latency`, …), each once."""
    return list(dict.fromkeys(row.time_kind for row in rows if row.time_kind))


def median_title(kinds: Sequence[str]) -> str:
    """Return the title for a median column, with the name of the time if there is only one.

    Args:
        kinds: names of the points' representative times, from `time_kinds`.
    """
    if len(kinds) == 1:
        return f"{quantities.time_title(kinds[0])} p50"
    return "p50"


def median_text(row: Row) -> str:
    """Return a row's median time with its interval; empty without a time.

    For example: `62.4 ms ± 0.8 %`, or `62.4 ms, no interval`.
    """
    if not row.time:
        return ""
    return interval_text(row.time.median)


def scope(rows: Iterable[Row]) -> str:
    """Return what the rows' intervals cover: `1 process`, `1 to 3 processes`, `2 of 3 processes`.

    The text adds runs if variation between runs is most of an interval. Empty without intervals.
    """
    timed = [row for row in rows if row.time and row.time.median.low is not None]
    counts = {row.processes for row in timed}
    if not counts:
        return ""
    text = str(min(counts))
    if len(counts) > 1:
        text += f" to {max(counts)}"
    planned = max(row.processes + row.unfinished for row in timed)
    noun = "process" if max(counts) == planned == 1 else "processes"
    if any(row.unfinished for row in timed):
        text += f" of {planned}"
    if any(row.figures[row.time_kind or ""].is_of_servers for row in timed):
        noun += " and runs"
    return f"{text} {noun}"


def scope_notes(rows: Sequence[Row]) -> list[str]:
    """Return a note below a table: what its `±` means; empty without intervals."""
    source = scope(rows)
    if not source:
        return []
    if command := continuation(rows):
        source += f" ({command} continues)"
    return [f"± 95 % interval of the mean over processes, from {source}"]


def continuation(rows: Iterable[Row]) -> str:
    """Return the command that continues an interrupted measurement; empty if it is complete.

    It appears in notes below tables and after an interrupted run.
    """
    unfinished = [row for row in rows if row.unfinished]
    if any(row.in_turn for row in unfinished):
        return "repeating perfexp ab with output_dir=DIR"
    if unfinished:
        return "resume=DIR"
    return ""


def codes(diagnostics: Iterable[Diagnostic]) -> list[str]:
    """Return the codes of errors and warnings for a table's remarks, each once, most severe first.

    Notes are left out.
    """
    raised = sorted(diagnostics, key=attrgetter("order"))
    return list(dict.fromkeys(item.code for item in raised if not item.is_note))


def epoch_text(epoch: Epoch) -> str:
    """Return an epoch's figures in a line: `loss 0.412, accuracy 87.20 %, 12,345 samples/s`.

    A training prints it after each epoch.
    """
    parts = ["loss not finite"]
    if epoch.loss is not None:
        parts = [f"loss {epoch.loss:.4g}"]
    if epoch.accuracy is not None:
        parts.append(f"accuracy {100 * epoch.accuracy:.2f} %")
    parts.append(f"{epoch.samples_per_second:,.0f} samples/s")
    return ", ".join(parts)


def shortage(summaries: Sequence[blockwise.Summary], number: float) -> str:
    """Return why a percentile has no interval, for example `7 to 109 of 368 effective samples`.

    The note below the table of points shows it.

    Args:
        summaries: statistics of each point's time.
        number: the percentile, in percent.
    """
    # correlated samples count less: tau of them are worth an independent sample
    counts = [math.floor(summary.n / summary.tau) for summary in summaries]
    least, most = min(counts), max(counts)
    have = str(least)
    if most > least:
        have += f" to {most}"
    return f"{have} of {estimators.samples_needed(number)} effective samples"


def metric_text(metric: Metric | None, basis: estimators.Interval | None = None) -> str:
    """Return a metric with its unit and interval width; empty without a value.

    `≈` marks an estimate.

    Args:
        basis: time or rate that the metric is computed from, which limits its digits; None for an
            independent metric.
    """
    if metric is None or (interval := interval_of(metric)) is None:
        return ""
    figures = max(supported_digits(interval), 3)
    if basis:
        figures = min(supported_digits(basis), 3)
    shown = partial(_with_unit, metric)
    text = shown(interval.value, figures)
    if ends := range_text(interval, shown):
        text = with_width(interval, text, ends)
    if metric.estimated and not text.startswith("≈"):
        return f"≈ {text}"
    return text


def figure_text(row: Row, name: str) -> str:
    """Return a row's metric as text, with the digits of its basis; empty without a value.

    Table cells show it.
    """
    if name == quantities.COVERAGE:
        return coverage_text(row)
    metric = row.metric(name)
    if metric is None:
        return ""
    return metric_text(metric, row.basis(metric))


def _with_unit(metric: Metric, value: float, figures: int) -> str:
    """Return a metric's value, or an end of its interval, in a unit that suits its size.

    Args:
        figures: significant digits for seconds, joules and ratios; counts have up to three.
    """
    quantity = quantities.of(metric)
    if quantity.symbol is not None:
        return pretty(value, quantity.symbol, significant=min(figures, 3)).rstrip()
    if quantity.is_share:
        return percent(value)
    if metric.unit == "seconds":
        return units.format_seconds(value, figures)
    if metric.unit == "bytes":
        return units.format_bytes(value)
    text = units.digits(value, figures)
    symbol = units.SYMBOLS.get(metric.unit, metric.unit)
    if symbol in ("1", ""):
        return text
    return f"{text} {symbol}"


def metric_title(metric: Metric, kinds: Sequence[str] = ()) -> str:
    """Return a metric's title in a table: its heading, or its name without the unit.

    Tables of metrics use it as a column title.

    Args:
        kinds: names of the points' representative times, which work rates are based on.
    """
    return quantities.of(metric).title.replace("{time}", median_title(kinds))


def coverage_text(row: Row) -> str:
    """Return the algorithm coverage and its proof: `100 %, 42 % not observed`; empty if unknown.

    Torch's own choice is not observed, and some cuDNN kernels are not verified. Older records have
    no proof. Table cells and the short answer show it.
    """
    covered, proven = row.value(quantities.COVERAGE), row.value(quantities.PROVEN)
    text, own_choice = metric_text(row.metric(quantities.COVERAGE)), row.own_choice
    if not covered:
        return text
    if proven is None:
        return f"{text}, proof not recorded"
    # the covered share is proven, torch's own choice, or the rest
    unverified = covered - proven - own_choice
    if own_choice > _ROUNDING:
        share = f"{percent(own_choice)} " if covered - own_choice > _ROUNDING else ""
        text += f", {share}not observed"
        if unverified > _ROUNDING:
            text += f", {percent(unverified)} not verified"
        return text
    if unverified <= _ROUNDING:
        return f"{text}, proven"
    if proven:
        return f"{text}, not all verified"
    return f"{text}, not verified"


def first_prediction_text(first: FirstPrediction) -> str:
    """Return a cold start in parts.

    For example: `3.21 s = process 0.30 s + imports 2.50 s + …; then second call 60.0 ms`. Reports
    show it in the section `cold start`.
    """
    parts = {}
    for name, value in first.parts.items():
        parts[name] = f"{name.replace('_', ' ')} {units.format_seconds(value)}"
    after = parts.pop(AFTERWARDS.rpartition("/")[2], "")
    text = units.format_seconds(first.total.value)
    if ends := range_text(first.total):
        text += f" ({ends})"
    text += f" = {' + '.join(parts.values())}"
    if after:
        text += f"; then {after}"
    if first.processes > 1:
        text += f"; medians of {first.processes} processes"
    return text


def scaling_text(scaling: Scaling) -> str:
    """Return a scaling model as text.

    For example, `device ≈ 1.02 ms + 3.7 ms · (pixels / 512²)^1.03 ± 0.04 (…)`. The growing part
    refers to the largest size, since the model says nothing about larger sizes. The text also says
    whether times grow faster or more slowly than the pixels. This needs a small constant part and
    an exponent interval more than 0.1 away from 1. Next to a large constant, the exponent depends
    on how the two parts meet.
    """
    kind = quantities.time_title(scaling.time_kind)
    if scaling.doubt:
        return f"{kind}: growth with the size not determined: {scaling.doubt}"
    fit, smallest, largest = scaling.fit, scaling.keys[0], scaling.key
    sizes = f"{smallest.size_label} to {largest.size_label} only, {len(scaling.keys)} sizes"
    basis = f"({sizes}, scatter {percent(fit.scatter)})"
    constant = units.format_seconds(fit.a)
    if fit.exponent is None:
        return f"{kind} ≈ {constant}, does not grow with the size {basis}"
    height, width = largest.input_size
    unit = f"{height}²" if height == width else f"({height}·{width})"
    law = f"{units.format_seconds(fit.b)} · (pixels / {unit})^{_exponent_text(fit.exponent)}"
    share = fit.a / fit.at(smallest.pixels / largest.pixels)
    if share > _NEGLIGIBLE:
        law = f"the larger of {constant} and {law}" if fit.overlapped else f"{constant} + {law}"
    text = f"{kind} ≈ {law} {basis}"
    if share < 0.5:
        text += _growth_text(fit.exponent)
    return text


def _exponent_text(exponent: estimators.Interval) -> str:
    """Return a scaling exponent: `1.03 ± 0.04`, or with both ends if the interval is wide."""
    assert exponent.low is not None
    assert exponent.high is not None
    half = max(exponent.value - exponent.low, exponent.high - exponent.value)
    if half > _WIDE_EXPONENT:
        return f"{exponent.value:.1f} ({exponent.low:.1f} … {exponent.high:.1f})"
    return f"{exponent.value:.2f} ± {max(half, 0.01):.2f}"


def _growth_text(exponent: estimators.Interval) -> str:
    """Return whether times clearly grow faster or more slowly than the pixels; otherwise empty."""
    if exponent.low is not None and exponent.low > 1.1:
        return ", growing faster than the pixels"
    if exponent.high is not None and exponent.high < 0.9:
        return ", growing more slowly than the pixels"
    return ""


def _to_figures(value: float, figures: int) -> float:
    """Return a value rounded to significant figures, so that formatting cannot change its unit."""
    return float(f"{value:.{figures - 1}e}")


def _has_ends(interval: estimators.Interval) -> bool:
    """Return whether to show both ends, because a half-width would hide where the interval ends."""
    width = interval.relative_half_width
    if interval.low is None or interval.high is None or width is None:
        return False
    nearer, farther = sorted((interval.value - interval.low, interval.high - interval.value))
    return width > _WIDE or (width > _NOTABLE and farther > _SKEWED * nearer)
