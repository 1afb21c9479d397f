"""Comparison table: a comparison in words, as grids for console and Markdown, and as CSV lines.

Everything here is a pure function of a `Comparison`. `sections` yields the whole report, side by
side; `conclusion` is its sentence; `csv_lines` are the pairs. A `Grid` is a table with notes below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import msgspec

from perfexp.comparison.comparability import Role
from perfexp.comparison.document import (
    Alone,
    Compared,
    Comparison,
    DeviceSummary,
    SideFacts,
    Verdict,
    measures_of,
    with_verdict,
)
from perfexp.comparison.judging import DECISIVE, decisive
from perfexp.comparison.measures import MEASURES
from perfexp.records import units
from perfexp.records.grid import Column, Grid, Section
from perfexp.records.point_times import DEVICE_TIMES, GRAPH
from perfexp.records.quantities import TIMES
from perfexp.records.wording import TOO_FEW, percent, with_width
from perfexp.statistics import sequential
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.estimators import Interval
from perfexp.statistics.ratios import LEAST_CLUSTERS, MOST_PROCESSES

#: Deciding times as words in a sentence.
_IN_WORDS = {name: TIMES[name].caption for name in DEVICE_TIMES} | {"throughput": "time per sample"}
#: Verdicts with a direction.
_DECIDED = (Verdict.BETTER, Verdict.WORSE)
#: Ratios between two devices, in words.
_DEVICE_RATIOS = {
    "speedup": "speedup",
    "throughput_ratio": "throughput ratio",
    "memory_efficiency": "memory efficiency (samples/s per byte of peak memory)",
}
#: Advice if another measure should decide.
_NEW_RUN = (
    "for a verdict on another measure start a new perfexp ab with --metric NAME in a new folder"
)
#: Symbol for each verdict, since color alone does not show it, and its terminal style as a rich
#: name.
MARKS = {
    Verdict.BETTER: ("▲", "green"),
    Verdict.WORSE: ("▼", "red"),
    Verdict.SAME: ("=", "blue"),
    Verdict.UNDECIDED: ("?", "yellow"),
    Verdict.NOT_COMPARABLE: ("✕", "magenta"),
}
#: Formats of a figure by its unit, given the value and the number of digits.
_FORMATS: dict[str, Callable[[float, int], str]] = {
    "seconds": units.format_seconds,
    "bytes": lambda value, _: units.format_bytes(value),
    "joules": lambda value, digits: f"{units.digits(value, digits)} J",
    "cycles": lambda value, digits: f"{units.digits(1e-6 * value, digits)} M",
}
#: Above this interval width, no useful margin gives a verdict.
_ROUGH = 0.2
#: Digits of a figure, and of a ratio.
_DIGITS, _RATIO_DIGITS = 4, 4
#: Layers in a report; comparison.json has all.
_MOST_LAYERS = 10
#: How to read layer figures.
_READ_LAYERS = (
    "layers of the first process of each side, as profiled, gaps before them included, without "
    "intervals"
)
#: Times whose difference layers can explain; the last that a point has is used.
_EXPLAINED = ("latency", GRAPH, "device")
#: Kernels named for each layer.
_MOST_KERNELS = 3


def title(comparison: Comparison, side: SideFacts) -> str:
    """Return a line that names two sides and the subject of their comparison."""
    baseline = comparison.sides[0]
    subject = [item.text for item in side.differences if item.role is Role.SUBJECT]
    return f"{side.name} against {baseline.name}: {'; '.join(subject) or 'the same subject'}"


def doubts(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return lines that qualify two sides' figures: algorithm coverage and diagnostic codes."""
    shares, codes, lines = [], [], []
    for facts in (comparison.sides[0], side):
        if facts.coverage:
            shares.append(f"{facts.name} {facts.coverage}")
        if facts.warnings:
            codes.append(f"{facts.name} {', '.join(facts.warnings)}")
    if shares:
        lines.append(f"algorithm coverage, of the convolutions' FLOPs: {'; '.join(shares)}")
    if codes:
        lines.append(f"errors and warnings: {'; '.join(codes)} (perfexp show)")
    return lines + _unexplained(comparison, side)


def _unexplained(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return a line on points with layers that disagree with the timed call; empty without any."""
    points: dict[str, bool] = {}
    for line in comparison.layers:
        if line.side == side.name:
            points[line.point] = points.get(line.point, True) and line.agrees
    count = list(points.values()).count(False)
    if not count:
        return []
    share_of_points = (
        f" at {units.counted(count, 'point')} of {len(points)}" if len(points) > 1 else ""
    )
    return [
        f"layers are not compared{share_of_points}: they are shares only, of a profiled call "
        "unlike the timed one"
    ]


def header(comparison: Comparison) -> list[str]:
    """Return the lines above all tables: sides, common facts, and the rules for verdicts."""
    lines = [f"{side.name}  {side.source}" for side in comparison.sides]
    lines[0] += "  (baseline)"
    level = min([ALPHA, *(side.level for side in comparison.sides[1:])])
    points, is_measured = dict[str, None](), level < ALPHA
    for pair in comparison.pairs:
        points[pair.point] = None
        is_measured = is_measured or pair.low is not None
    constant = [comparison.constant]
    if len(points) == 1:
        constant += points
    if any(constant):
        lines.append(" · ".join(filter(None, constant)))
    rules = [f"SAME means within ±{bare(comparison.margin)}"]
    if len(points) > 1 or len(comparison.sides) > 2:
        fdr = bare(comparison.fdr)
        rules.append(f"false discovery rate {fdr} over all pairs of a measure")
    rules += _processes(comparison)
    rules.append(interval_words(level) if is_measured else "no intervals")
    return [*lines, "; ".join(rules)]


def _processes(comparison: Comparison) -> list[str]:
    """Describe how many processes measured the times, e.g. `3 processes of each side`."""
    counts: dict[str, set[int]] = {}  # numbers of processes that occur, by side
    for pair in comparison.pairs:
        if MEASURES[pair.measure].is_time:
            names = comparison.sides[0].name, pair.side
            for name, count in zip(names, pair.processes, strict=True):
                counts.setdefault(name, set()).add(count)
    of_all = set().union(*counts.values())
    if len(of_all) < 2:
        return [f"{_counted(count)} of each side" for count in of_all]
    if any(len(of_side) > 1 for of_side in counts.values()):
        return [f"{min(of_all)} to {max(of_all)} processes of each side and point"]
    return [f"{', '.join(f'{name} {count}' for name, (count,) in counts.items())} processes"]


def _counted(processes: int) -> str:
    """Return a number of processes in words."""
    if processes == 1:
        return "1 process"
    return f"{processes} processes"


def interval_words(level: float) -> str:
    """Describe the intervals' confidence.

    Args:
        level: error probability of an interval; 5 %, or less if processes alternated, because all
            looks then share 5 %. It is 0 before the first look.
    """
    if not level:
        return f"no intervals before {sequential.LEAST} processes of each side"
    text = f"{confidence(level)} intervals"
    if level != ALPHA:
        text += f", which hold {bare(1 - ALPHA)} of the time however often one looks"
    return text


def confidence(level: float) -> str:
    """Return the confidence of intervals with an error probability, for example `95 %` for 0.05."""
    return f"{units.digits(100 * (1 - level)).removesuffix('.0')} %"


def grid(comparison: Comparison, side: SideFacts) -> Grid:
    """Return the table of a side's ratios to the baseline, in document order, with its notes.

    A column that would say the same for all pairs is left out: the point is in the header then.
    """
    pairs = comparison.of_side(side.name)
    baseline = comparison.sides[0].name
    columns = [
        Column("measure", prose=True, is_key=True),
        Column("point", prose=True, is_key=True),
        Column(baseline, rank=2),
        Column(side.name, rank=1),
        Column(f"{side.name}/{baseline}"),
        Column("verdict", prose=True, styles=[MARKS[pair.verdict][1] for pair in pairs]),
        Column("+N", rank=3),
    ]
    cells = []
    for pair in pairs:
        before = _own(pair.baseline, pair.unit, pair.estimated[0])
        after = _own(pair.other, pair.unit, pair.estimated[1])
        further = str(pair.further_processes or "")
        cells.append(
            (pair.measure, pair.point, before, after, ratio_of(pair), verdict_of(pair), further)
        )
    notes = _figure_notes(pairs) + remedies(side, pairs)
    notes += _clock_note(pairs) + _means(comparison, side)
    for summary in comparison.devices:
        if summary.side == side.name:
            notes.append(in_words(summary))
    Grid.of_cells(columns, cells)  # fills the columns
    if not any(pair.further_processes for pair in pairs):
        columns.pop()
    if len({pair.point for pair in comparison.pairs}) < 2:
        del columns[1]
    return Grid(columns, notes)


def _own(value: float, unit: str, is_estimated: bool) -> str:
    """Return a side's figure with its unit; ≈ marks an estimate."""
    text = figure(value, unit)
    if is_estimated:
        return f"≈ {text}"
    return text


def _figure_notes(pairs: Sequence[Compared]) -> list[str]:
    """Return notes below the table on how to read the figures, as far as they occur."""
    measures, undefined, notes = set(), dict[str, None](), []
    is_estimate = is_mean = is_alone = False
    for pair in pairs:
        measures.add(pair.measure)
        is_estimate = is_estimate or (pair.measure != "cycles" and any(pair.estimated))
        is_mean = is_mean or (pair.measure == "p95" and max(pair.processes) > 1)
        is_alone = is_alone or (pair.processes == (1, 1) and pair.low is not None)
        if pair.ratio is None:
            undefined[pair.measure] = None
    if is_estimate:
        notes.append(f"≈ estimated, or without an interval: {TOO_FEW}")
    if is_mean:
        notes.append(
            "p95 is the mean of the processes' own; perfexp show DIR has that of all calls of a run"
        )
    if is_alone:
        notes.append(
            "one process of each side: a 99 % interval, since either may be far from most others"
        )
    if undefined:
        names = ", ".join(undefined)
        notes.append(
            f"the ratio of {names} is undefined where a figure is 0; so is the mean of such ratios"
        )
    if "memory" in measures:
        notes.append(
            "memory is of the timed calls; the first ones may take more (perfexp show DIR)"
        )
    if "energy" in measures:
        loop = "of a loop of calls back to back, in which a device may wait for the host"
        notes.append(f"energy is energy/per_image of perfexp show: {loop}")
    return notes


def _clock_note(pairs: Sequence[Compared]) -> list[str]:
    """Return a note on how often the verdicts on time and cycles agree; empty without cycles."""
    judged = [pair.clock for pair in pairs if pair.clock is not None]
    if not judged:
        return []
    count = f"{judged.count('')} of {len(judged)} pairs"
    return [f"time and cycles (≈ device time × clock) have the same verdict in {count}"]


def _means(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return a side's geometric means as a line; empty unless there are several pairs."""
    texts, points, models = [], 0, 0
    phases = {mean.phase for mean in comparison.means if mean.side == side.name}
    for mean in comparison.means:
        if mean.side == side.name:
            points, models = max(points, mean.pairs), max(models, mean.models)
            ratio = ratio_text(Interval(value=mean.ratio, low=mean.low, high=mean.high))
            text = f"{mean.measure} {ratio.removesuffix(', no interval')}"
            texts.append(f"{mean.phase} {text}" if len(phases) > 1 else text)
    if not texts:
        return []
    scope = f"{units.counted(points, 'point')} of {units.counted(models, 'model')}"
    line = f"geometric mean over {scope}: {', '.join(texts)}"
    if models < LEAST_CLUSTERS:
        line += f"; no intervals below {LEAST_CLUSTERS} models"
    return [line]


def in_words(summary: DeviceSummary) -> str:
    """Return the summary of a device's phase as a line; ≈ marks an undecided ratio."""
    texts = []
    for name, word in _DEVICE_RATIOS.items():
        if (value := getattr(summary, name)) is not None:
            mark = "≈ " if name in summary.undecided else ""
            texts.append(f"{word} {mark}{value:.3f}")
    if summary.accuracy_difference is not None:
        texts.append(f"accuracy {100 * summary.accuracy_difference:+.2f} percentage points")
    return f"{summary.phase}: {', '.join(texts)}"


def remedies(side: SideFacts, pairs: Sequence[Compared]) -> list[str]:
    """Return notes on what would decide a side's undecided pairs; empty if all are decided."""
    undecided = with_verdict(pairs, Verdict.UNDECIDED)
    if not undecided:
        return []
    if side.level < ALPHA:
        return [_in_turn(side, pairs)]
    notes, enough, is_hopeless, has_none = [], 0, False, False
    for pair in undecided:
        if pair.further_processes:
            enough = max(enough, max(pair.processes) + pair.further_processes)
        has_none = has_none or pair.low is None
        is_hopeless = is_hopeless or (pair.low is not None and not pair.further_processes)
    if enough:
        notes.append(
            "+N: N more processes of each side would probably decide; measure both again with "
            f"processes={enough}, enough for the largest N"
        )
    if is_hopeless:
        notes.append(
            f"UNDECIDED without +N: even {MOST_PROCESSES} processes would not decide, or they do "
            "not repeat this measure; a wider --margin may"
        )
    if has_none:
        notes.append(
            "no interval: a side has one process with too few samples; measure it again with "
            "processes=3"
        )
    return notes


def _in_turn(side: SideFacts, pairs: Sequence[Compared]) -> str:
    """Return the remedy for undecided pairs if the processes alternated (`perfexp ab`)."""
    fewest = min(min(pair.processes) for pair in with_verdict(pairs, Verdict.UNDECIDED))
    if fewest >= sequential.MOST:
        return (
            f"UNDECIDED after {sequential.MOST} processes of each side, the most: a wider "
            "--margin may decide"
        )
    if fewest < sequential.LEAST:
        return (
            f"UNDECIDED with {_counted(fewest)} of each side: intervals need {sequential.LEAST}; "
            "repeat perfexp ab with output_dir=DIR and a longer --max-seconds to continue"
        )
    deciding = [] if side.decided_by is None else _deciding(side, pairs)
    names = ", ".join(measures_of(deciding))
    if deciding and not with_verdict(deciding, Verdict.UNDECIDED):
        return f"UNDECIDED: perfexp ab ended when {names} was decided; {_NEW_RUN}"
    return (
        "UNDECIDED: repeat perfexp ab with output_dir=DIR and a longer --max-seconds, which goes "
        f"on while {names or 'the measure that it decides by (--metric)'} is undecided; {_NEW_RUN}"
    )


def _deciding(side: SideFacts, pairs: Sequence[Compared]) -> list[Compared]:
    """Return the pairs that decide which side is better.

    These are the pairs with the measures that end `perfexp ab`, or by default each point's first
    time. The result is empty if `pairs` lacks one of those measures.
    """
    wanted = side.decided_by or DECISIVE
    deciding = [pair for pair in pairs if pair.measure in wanted]
    if not side.decided_by:
        return decisive(deciding)
    if not set(wanted).issubset(measures_of(deciding)):
        return []
    return deciding


def ratio_of(pair: Compared) -> str:
    """Return a pair's ratio with its interval, in words."""
    if pair.ratio is None:
        return "undefined"
    return ratio_text(Interval(value=pair.ratio, low=pair.low, high=pair.high))


def time_ratio(pair: Compared) -> Interval:
    """Return a pair's time ratio, with its interval if known; a rate's ratio is inverted."""
    ratio = Interval(value=pair.other / pair.baseline, low=pair.low, high=pair.high)
    if MEASURES[pair.measure].is_better_if_lower:
        return ratio
    return _inverse(ratio)


def _inverse(ratio: Interval) -> Interval:
    """Return 1 / ratio, with the ends of its interval exchanged."""
    return Interval(
        value=1 / ratio.value, low=ratio.high and 1 / ratio.high, high=ratio.low and 1 / ratio.low
    )


def verdict_of(pair: Compared) -> str:
    """Return a pair's verdict with its symbol."""
    return f"{MARKS[pair.verdict][0]} {pair.word}"


def confounders(side: SideFacts) -> list[str]:
    """Return a line for each confounder of a side, with values and remedy."""
    lines = []
    for item in side.differences:
        if item.role is Role.CONFOUNDER:
            line = f"{item.key}: {item.baseline} → {item.other}"
            if item.measures:
                line += f" ({', '.join(item.measures)} only)"
            if item.allowed:
                line += ", allowed"
            else:
                line += f"; {item.help}, or accept it with --allow {item.key}"
            lines.append(line)
    return lines


def alone(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return a line for each point and measure that only this side or only the baseline has."""
    lines, measures = [], Counter[str]()
    for item in comparison.alone:
        if side.name not in (item.side, item.against):
            continue
        if item.measure:
            measures[f"{item.side}: {item.measure}"] += 1
        else:
            lines.append(f"{item.side}: {alone_of(item)}")
    for measure, count in measures.items():
        line = f"{measure} of {units.counted(count, 'point')}"
        if measure.endswith(" time_to_accuracy"):
            line += "; on the other side not every seed reached the target"
        lines.append(line)
    return lines


def alone_of(alone: Alone) -> str:
    """Describe a point, or a measure at a point, that only one side has."""
    text = alone.point
    if alone.measure:
        text += f", {alone.measure}"
    if alone.status:
        text += f" ({alone.against}: {alone.status.value})"
    return text


def layers(comparison: Comparison, side: SideFacts, *, has_kernels: bool = False) -> Grid | None:
    """Return a table of the layers that contribute most to a side's differences.

    None without layers that agree with the timed calls.

    Args:
        has_kernels: whether the table names the layers' kernels.
    """
    lines = [line for line in comparison.layers if line.side == side.name and line.agrees]
    lines.sort(key=lambda line: -abs(line.other_seconds - line.baseline_seconds))
    if not lines:
        return None
    names = (comparison.sides[0].name, side.name)
    columns = [
        Column("layer", prose=True, is_key=True),
        Column("pass", prose=True, is_key=True),
        Column("point", prose=True, is_key=True),
        Column(names[0], rank=2),
        Column(names[1], rank=1),
        Column("difference"),
        Column("share"),
    ]
    if has_kernels:
        columns += [Column(f"kernels of {name}", prose=True) for name in names]
    cells = []
    for line in lines[:_MOST_LAYERS]:
        before, after = line.baseline_seconds, line.other_seconds
        row = [line.layer, line.which, line.point]
        row += [figure(before, "seconds"), figure(after, "seconds")]
        row += [_signed(after - before), percent(line.share)]
        if has_kernels:
            row += _kernels(line.baseline_kernels, line.other_kernels)
        cells.append(row)
    return Grid.of_cells(columns, cells, explained(comparison, side))


def _kernels(*sides: Sequence[str]) -> tuple[str, str]:
    """Return a layer's kernels on both sides, in separate cells: narrow tables cut long texts."""
    before, after = (", ".join(kernels[:_MOST_KERNELS]) or "none" for kernels in sides)
    return before, "the same" if before == after else after


def explained(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return notes on how to read a side's layers, and how much of the difference they explain.

    Empty without layers.
    """
    sums: dict[str, float] = {}
    for line in comparison.layers:
        if line.side == side.name and line.agrees:
            difference = line.other_seconds - line.baseline_seconds
            sums[line.point] = sums.get(line.point, 0.0) + difference
    shares = {}
    for measure in _EXPLAINED:
        for pair in comparison.of_side(side.name):
            is_explained = pair.point in sums and pair.verdict in _DECIDED
            if pair.measure == measure and is_explained:
                shares[pair.point] = (sums[pair.point] / (pair.other - pair.baseline), measure)
    lines = [_READ_LAYERS] if sums else []
    for point, (share, measure) in list(shares.items())[:_MOST_LAYERS]:
        at_point = f" at {point}" if len(sums) > 1 else ""
        lines.append(
            f"all layers together explain {percent(share)} of the difference of {measure}{at_point}"
        )
    return lines


def conclusion(comparison: Comparison) -> str:
    """Answer in a sentence which side is faster, and by how much.

    With several sides, name the side that gains most.
    """
    baseline, *sides = comparison.sides
    if len(sides) == 1:
        return _answer(comparison, sides[0])
    gains = {}
    for side in sides:
        deciding = _deciding_or_first(comparison, side)
        if deciding and all(pair.verdict is Verdict.BETTER and pair.ratio for pair in deciding):
            gains[side] = geometric_mean(time_ratio(pair).value for pair in deciding)
    if not gains:
        return (
            f"none of {len(sides)} sides is shown to be better than {baseline.name} at all points"
        )
    answer = _answer(comparison, min(gains, key=gains.__getitem__))
    return f"largest gain of {len(sides)} sides: {answer}"


def _deciding_or_first(comparison: Comparison, side: SideFacts) -> list[Compared]:
    """Return the deciding pairs, or the first measure's pairs if the user chose other measures."""
    pairs = comparison.of_side(side.name)
    return _deciding(side, pairs) or [pair for pair in pairs if pair.measure == pairs[0].measure]


def _answer(comparison: Comparison, side: SideFacts) -> str:
    """Summarize in a sentence how a side compares with the baseline.

    Several deciding pairs are counted by verdict. A single pair is followed by the other measures.
    """
    baseline, deciding = comparison.sides[0].name, _deciding_or_first(comparison, side)
    if not deciding:
        return f"{side.name} and {baseline} have no figure in common"
    names = ", ".join(dict.fromkeys(_IN_WORDS.get(pair.measure, pair.measure) for pair in deciding))
    if len(deciding) > 1:
        counts = Counter(pair.word.lower() for pair in deciding)
        words = ", ".join(f"{word} at {count}" for word, count in counts.most_common())
        means = []
        for mean in comparison.means:
            if (mean.side, mean.measure) == (side.name, deciding[0].measure):
                means.append(mean.ratio)
        if len(means) == 1:
            names += f"; geometric mean {units.digits(means[0])}×"
        text = f"{side.name} against {baseline}: {words} of {len(deciding)} points ({names})"
        if undecided := with_verdict(deciding, Verdict.UNDECIDED):
            most = max(undecided, key=lambda pair: pair.further_processes or 0)
            text += f"; {_would_decide(side, most)}"
        return text
    [pair] = deciding
    other_measures = []
    for other in comparison.of_side(side.name):
        if other is pair or other.measure == "cycles" or not other.ratio:
            continue
        if other.verdict is Verdict.SAME:
            other_measures.append(f"{other.measure} the same")
        elif other.verdict in _DECIDED:
            other_measures.append(f"{other.measure} {units.digits(other.ratio)}×")
    verdict = _of_pair(comparison, side, pair, names)
    return "; ".join(filter(None, (verdict, ", ".join(other_measures))))


def _of_pair(comparison: Comparison, side: SideFacts, pair: Compared, names: str) -> str:
    """Describe the verdict of a single deciding pair, for example `B is 1.3× faster than A`.

    Args:
        names: the deciding measure in words.
    """
    baseline_name, side_name = comparison.sides[0].name, side.name
    if pair.verdict is Verdict.NOT_COMPARABLE:
        why = [line for line in confounders(side) if line.partition(":")[0] in pair.confounders]
        return f"{side_name} cannot be compared with {baseline_name}: {'; '.join(why)}"
    is_decided = pair.verdict in _DECIDED
    if is_decided and MEASURES[pair.measure].better != "FASTER":
        before, now = figure(pair.baseline, pair.unit), figure(pair.other, pair.unit)
        return f"{names} of {side_name} is {pair.word.lower()}: {now} against {before}"
    ratio = time_ratio(pair) if pair.ratio else None
    if is_decided and ratio:
        if pair.verdict is Verdict.BETTER:
            ratio = _inverse(ratio)
        answer = (
            f"{side_name} is {units.digits(ratio.value)}× {pair.word.lower()} than {baseline_name}"
        )
    elif pair.verdict is Verdict.SAME:
        answer = f"{side_name} and {baseline_name} are the same within ±{bare(comparison.margin)}"
    else:
        answer = (
            f"undecided whether {side_name} is better or worse than {baseline_name}: "
            f"{_would_decide(side, pair)}"
        )
    if ratio and ratio.low is not None and ratio.high is not None:
        text = ratio_text(ratio)
        width = text.partition(" ")[2].strip("()")
        if text.startswith("≈"):  # a claim needs its interval, however wide
            width = f"{units.digits(ratio.low)} … {units.digits(ratio.high)}"
        names = ", ".join(filter(None, (width, names)))
    return f"{answer} ({names})"


def _would_decide(side: SideFacts, pair: Compared) -> str:
    """Return what would probably decide an undecided pair, as the end of a sentence."""
    if side.level < ALPHA and min(pair.processes) < sequential.MOST:
        return "repeat perfexp ab with output_dir=DIR and a longer --max-seconds"
    if pair.further_processes:
        return f"measure both again with processes={max(pair.processes) + pair.further_processes}"
    if pair.low is None or pair.high is None:
        return "measure both again with processes=3"
    if pair.high - pair.low > _ROUGH:
        return "measure both in turn, with no other work on the machine (perfexp ab)"
    return "a wider --margin may decide"


def csv_lines(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a line per pair for a CSV file, with the names in comparison.json.

    The key's fields become columns, pairs of values become two columns, and lists become texts.
    """
    lines = []
    for pair in comparison.pairs:
        line = msgspec.to_builtins(pair)
        line["processes"], line["other_processes"] = pair.processes
        line["estimated"], line["other_estimated"] = pair.estimated
        line |= line.pop("key") | {"input_size": pair.key.size_label}
        line["confounders"] = ";".join(pair.confounders)
        lines.append(line)
    return lines


def sections(comparison: Comparison, *, has_kernels: bool = False) -> Iterator[Section]:
    """Yield the whole report: the header, then the sections of each side (see `of_side`)."""
    yield Section("", header(comparison))
    for side in comparison.sides[1:]:
        yield from of_side(comparison, side, has_kernels=has_kernels)


def of_side(
    comparison: Comparison, side: SideFacts, *, has_kernels: bool = False
) -> Iterator[Section]:
    """Yield a side's title, table, lists and layers; empty parts are left out.

    Args:
        has_kernels: whether the table of layers names their kernels.
    """
    yield Section(title(comparison, side), doubts(comparison, side))
    yield Section("", grid(comparison, side))
    clocks, neutral, missing = [], [], []
    for pair in comparison.of_side(side.name):
        if pair.clock:
            clocks.append(f"{pair.point}: {pair.clock}")
    for item in side.differences:
        if item.role is Role.NEUTRAL:
            neutral.append(f"{item.key}: {item.baseline} → {item.other}")
    for facts in (comparison.sides[0], side):
        missing += [f"{facts.name}: {line}" for line in facts.missing]
    parts: dict[str, Grid | list[str] | None] = {
        "time and cycles disagree": clocks,
        "what else differs": confounders(side),
        "differs without effect": neutral,
        "only on one side": alone(comparison, side),
        "runs without a record": missing,
        "layers that explain the difference": layers(comparison, side, has_kernels=has_kernels),
    }
    for heading, content in parts.items():
        if content:
            yield Section(heading, content)


def ratio_text(ratio: Interval) -> str:
    """Return a ratio with its interval in words, for example `1.302 ± 0.8 %`."""
    digits = _RATIO_DIGITS if ratio.value >= 1 else _RATIO_DIGITS - 1
    ends = " … ".join(units.digits(end) for end in (ratio.low, ratio.high) if end is not None)
    return with_width(ratio, units.digits(ratio.value, digits), ends)


def figure(value: float, unit: str) -> str:
    """Return a figure with its unit, formatted for reports, for example `12.3 ms`."""
    if unit in _FORMATS:
        return _FORMATS[unit](value, _DIGITS)
    return units.digits(value, _DIGITS) + unit.removeprefix("samples").removeprefix("1")


def _signed(seconds: float) -> str:
    """Return a time difference with its sign and unit."""
    return f"{'+' if seconds > 0 else '-'}{units.format_seconds(abs(seconds), 3)}"


def bare(fraction: float) -> str:
    """Return a fraction in percent, without superfluous digits."""
    return f"{100 * fraction:g} %"
