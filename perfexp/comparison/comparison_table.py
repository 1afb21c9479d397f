"""Comparison table: a comparison in words, as grids for console and Markdown, and as CSV lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
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
)
from perfexp.comparison.judging import DECISIVE, decisive
from perfexp.comparison.measures import MEASURES
from perfexp.records import units
from perfexp.records.point_times import DEVICE_TIMES, GRAPH
from perfexp.records.quantities import TIMES
from perfexp.statistics import sequential
from perfexp.statistics.distributions import ALPHA
from perfexp.statistics.estimators import Interval
from perfexp.statistics.ratios import LEAST_CLUSTERS, MOST_PROCESSES
from perfexp.summaries.grid import Column, Grid, Section
from perfexp.summaries.wording import TOO_FEW, percent, with_width

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
_READ_LAYERS = "layers of the first process of each side, as profiled, gaps before them included, without intervals"
#: Times whose difference layers can explain; the last that a point has is used.
_EXPLAINED = ("latency", GRAPH, "device")
#: Kernels named for each layer.
_MOST_KERNELS = 3


def title(comparison: Comparison, side: SideFacts) -> str:
    """Return a line that names two sides and the subject of their comparison."""
    baseline = comparison.sides[0]
    subject = [one.text for one in side.differences if one.role is Role.SUBJECT]
    return f"{side.name} against {baseline.name}: {'; '.join(subject) or 'the same subject'}"


def doubts(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return lines that qualify two sides' figures: algorithm coverage and diagnostic codes."""
    sides = (comparison.sides[0], side)
    shares = "; ".join(f"{one.name} {one.coverage}" for one in sides if one.coverage)
    codes = "; ".join(f"{one.name} {', '.join(one.warnings)}" for one in sides if one.warnings)
    return [
        *([f"algorithm coverage, of the convolutions' FLOPs: {shares}"] if shares else []),
        *([f"errors and warnings: {codes} (perfexp show)"] if codes else []),
        *_unexplained(comparison, side),
    ]


def _unexplained(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return a line on points whose layers are left out: profiled and timed calls disagree."""
    points = dict.fromkeys(
        line.point for line in comparison.layers if line.side == side.name and not line.agrees
    )
    if not points:
        return []
    of_all = {line.point for line in comparison.layers if line.side == side.name}
    where = f" at {units.counted(len(points), 'point')} of {len(of_all)}" if len(of_all) > 1 else ""
    return [
        f"layers are not compared{where}: they are shares only, of a profiled call unlike the timed one"
    ]


def header(comparison: Comparison) -> list[str]:
    """Return the lines above all tables: sides, common facts, and the rules for verdicts."""
    lines = [
        f"{side.name}  {side.source}{'  (baseline)' * (not index)}"
        for index, side in enumerate(comparison.sides)
    ]
    measured = [pair for pair in comparison.pairs if pair.low is not None]
    levels = [side.level for side in comparison.sides[1:] if side.level < ALPHA]
    points = dict.fromkeys(pair.point for pair in comparison.pairs)
    has_many = len(points) > 1 or len(comparison.sides) > 2
    rate = (
        f"; false discovery rate {bare(comparison.fdr)} over all pairs of a measure"
        if has_many
        else ""
    )
    intervals = interval_words(min(levels, default=ALPHA)) if measured or levels else "no intervals"
    rule = f"SAME: within ±{bare(comparison.margin)}{rate}; {'; '.join([*_processes(comparison), intervals])}"
    constant = " · ".join(
        filter(None, (comparison.constant, *(points if len(points) == 1 else ())))
    )
    return [*lines, *filter(None, [constant]), rule]


def _processes(comparison: Comparison) -> list[str]:
    """Describe how many processes measured the times, e.g. `3 processes of each side`."""
    counts: dict[str, set[int]] = {}
    for pair in comparison.pairs:
        if MEASURES[pair.measure].is_time:
            for name, count in zip(
                (comparison.sides[0].name, pair.side), pair.processes, strict=True
            ):
                counts.setdefault(name, set()).add(count)
    of_all = set().union(*counts.values())
    if len(of_all) < 2:
        return [f"{_counted(count)} of each side" for count in of_all]
    if any(len(of_side) > 1 for of_side in counts.values()):
        return [f"{min(of_all)} to {max(of_all)} processes of each side and point"]
    return [f"{', '.join(f'{name} {count}' for name, (count,) in counts.items())} processes"]


def _counted(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"


def interval_words(level: float) -> str:
    """Describe interval confidence; all looks at alternating runs share 5 %."""
    if not level:
        return f"no intervals before {sequential.LEAST} processes of each side"
    looks = (
        ""
        if level == ALPHA
        else f", which hold {bare(1 - ALPHA)} of the time however often one looks"
    )
    return f"{confidence(level)} intervals{looks}"


def confidence(level: float) -> str:
    """Return the interval confidence for a level, for example `95 %`."""
    return f"{units.digits(100 * (1 - level)).removesuffix('.0')} %"


def grid(comparison: Comparison, side: SideFacts) -> Grid:
    """Return a side's ratios to the baseline, in document order.

    A point that all pairs share is in the header instead.
    """
    pairs = [pair for pair in comparison.pairs if pair.side == side.name]
    several = len({pair.point for pair in comparison.pairs}) > 1
    further = [str(pair.further_processes or "") for pair in pairs]
    baseline = comparison.sides[0].name
    columns = [
        Column("measure", (pair.measure for pair in pairs), prose=True, is_key=True),
        *(
            [Column("point", (pair.point for pair in pairs), prose=True, is_key=True)]
            if several
            else []
        ),
        Column(
            baseline, (_own(pair.baseline, pair.unit, pair.estimated[0]) for pair in pairs), rank=2
        ),
        Column(
            side.name, (_own(pair.other, pair.unit, pair.estimated[1]) for pair in pairs), rank=1
        ),
        Column(f"{side.name}/{baseline}", map(ratio_of, pairs)),
        Column(
            "verdict",
            map(verdict_of, pairs),
            prose=True,
            styles=[MARKS[pair.verdict][1] for pair in pairs],
        ),
        *([Column("+N", further, rank=3)] if any(further) else []),
    ]
    notes = [
        *_figure_notes(pairs),
        *remedies(side, pairs),
        *_clock_note(pairs),
        *_means(comparison, side),
        *(in_words(one) for one in comparison.devices if one.side == side.name),
    ]
    return Grid(columns, notes)


def _own(value: float, unit: str, is_estimated: bool) -> str:
    return f"{'≈ ' * is_estimated}{figure(value, unit)}"


def _figure_notes(pairs: Sequence[Compared]) -> list[str]:
    """Return notes on how to read the figures next to `perfexp show`."""
    measures, notes = {pair.measure for pair in pairs}, []
    if any(any(pair.estimated) for pair in pairs if pair.measure != "cycles"):
        notes.append(f"≈ estimated, or without an interval: {TOO_FEW}")
    if any(pair.measure == "p95" and max(pair.processes) > 1 for pair in pairs):
        notes.append(
            "p95 is the mean of the processes' own; perfexp show DIR has that of all calls of a run"
        )
    if any(pair.processes == (1, 1) and pair.low is not None for pair in pairs):
        notes.append(
            "one process of each side: a 99 % interval, since either may be far from most others"
        )
    if undefined := dict.fromkeys(pair.measure for pair in pairs if pair.ratio is None):
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
    """Return how often the verdicts on time and cycles agree; empty without cycles."""
    judged = [pair.clock for pair in pairs if pair.clock is not None]
    count = f"{judged.count('')} of {len(judged)} pairs"
    return (
        [f"time and cycles (≈ device time × clock) have the same verdict in {count}"]
        if judged
        else []
    )


def _means(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return a side's geometric means as a line; empty unless there are several pairs."""
    means = [mean for mean in comparison.means if mean.side == side.name]
    if not means:
        return []
    models = max(mean.models for mean in means)
    has_phases = len({one.phase for one in means}) > 1
    texts = []
    for one in means:
        ratio = ratio_text(Interval(value=one.ratio, low=one.low, high=one.high)).removesuffix(
            ", no interval"
        )
        texts.append(f"{f'{one.phase} ' * has_phases}{one.measure} {ratio}")
    few = "" if models >= LEAST_CLUSTERS else f"; no intervals below {LEAST_CLUSTERS} models"
    points = units.counted(max(mean.pairs for mean in means), "point")
    return [
        f"geometric mean over {points} of {units.counted(models, 'model')}: {', '.join(texts)}{few}"
    ]


def in_words(summary: DeviceSummary) -> str:
    """Return a summary as a line; ≈ marks an undecided ratio."""
    texts = []
    for name, word in _DEVICE_RATIOS.items():
        if (value := getattr(summary, name)) is not None:
            texts.append(f"{word} {'≈ ' * (name in summary.undecided)}{value:.3f}")
    if summary.accuracy_difference is not None:
        texts.append(f"accuracy {100 * summary.accuracy_difference:+.2f} percentage points")
    return f"{summary.phase}: {', '.join(texts)}"


def remedies(side: SideFacts, pairs: Sequence[Compared]) -> list[str]:
    """Return remedies for a side's undecided pairs, by reason."""
    undecided = [pair for pair in pairs if pair.verdict is Verdict.UNDECIDED]
    if not undecided:
        return []
    if side.level < ALPHA:
        return [_in_turn(side, pairs)]
    notes = []
    if counts := [
        max(pair.processes) + pair.further_processes for pair in undecided if pair.further_processes
    ]:
        notes.append(
            "+N: N more processes of each side would probably decide; measure both again with "
            f"processes={max(counts)}, enough for the largest N"
        )
    if any(pair.low is not None and not pair.further_processes for pair in undecided):
        notes.append(
            f"UNDECIDED without +N: even {MOST_PROCESSES} processes would not decide, or they do not repeat this "
            "measure; a wider --margin may"
        )
    if any(pair.low is None for pair in undecided):
        notes.append(
            "no interval: a side has one process with too few samples; measure it again with processes=3"
        )
    return notes


def _in_turn(side: SideFacts, pairs: Sequence[Compared]) -> str:
    """Return the remedy for undecided pairs if the processes alternated."""
    fewest = min(min(pair.processes) for pair in pairs if pair.verdict is Verdict.UNDECIDED)
    if fewest >= sequential.MOST:
        return f"UNDECIDED after {sequential.MOST} processes of each side, the most: a wider --margin may decide"
    if fewest < sequential.LEAST:
        return (
            f"UNDECIDED with {_counted(fewest)} of each side: intervals need "
            f"{sequential.LEAST}; repeat perfexp ab with output_dir=DIR and a longer --max-seconds to continue"
        )
    deciding = [] if side.decided_by is None else _deciding(side, pairs)
    names = ", ".join(dict.fromkeys(pair.measure for pair in deciding))
    if deciding and all(pair.verdict is not Verdict.UNDECIDED for pair in deciding):
        return f"UNDECIDED: perfexp ab ended when {names} was decided; {_NEW_RUN}"
    return (
        "UNDECIDED: repeat perfexp ab with output_dir=DIR and a longer --max-seconds, which goes on while "
        f"{names or 'the measure that it decides by (--metric)'} is undecided; {_NEW_RUN}"
    )


def _deciding(side: SideFacts, pairs: Sequence[Compared]) -> list[Compared]:
    """Return the deciding pairs: those that end `perfexp ab`, or the first time.

    Empty if not all of them are in `pairs`.
    """
    if not side.decided_by:
        return decisive([pair for pair in pairs if pair.measure in DECISIVE])
    found = [pair for pair in pairs if pair.measure in side.decided_by]
    return found if {pair.measure for pair in found} == {*side.decided_by} else []


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
    return Interval(
        value=1 / ratio.value, low=ratio.high and 1 / ratio.high, high=ratio.low and 1 / ratio.low
    )


def verdict_of(pair: Compared) -> str:
    """Return a pair's verdict with its symbol."""
    return f"{MARKS[pair.verdict][0]} {pair.word}"


def confounders(side: SideFacts) -> list[str]:
    """Return a line for each confounder of a side, with values and remedy."""
    lines = []
    for one in side.differences:
        if one.role is Role.CONFOUNDER:
            of = f" ({', '.join(one.measures)} only)" if one.measures else ""
            remedy = (
                ", allowed" if one.allowed else f"; {one.help}, or accept it with --allow {one.key}"
            )
            lines.append(f"{one.key}: {one.baseline} → {one.other}{of}{remedy}")
    return lines


def alone(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return points and measures that only this side or only the baseline has."""
    found = [one for one in comparison.alone if side.name in (one.side, one.against)]
    measures = Counter(f"{one.side}: {one.measure}" for one in found if one.measure)
    return [
        *(f"{one.side}: {alone_of(one)}" for one in found if not one.measure),
        *(f"{measure} of {units.counted(count, 'point')}" for measure, count in measures.items()),
    ]


def alone_of(one: Alone) -> str:
    """Describe a point, or a measure at a point, that only one side has."""
    status = f" ({one.against}: {one.status.value})" if one.status else ""
    return f"{one.point}{f', {one.measure}' if one.measure else ''}{status}"


def layers(comparison: Comparison, side: SideFacts, *, has_kernels: bool = False) -> Grid | None:
    """Return the layers that contribute most to a side's differences; None without layers."""
    lines = [line for line in comparison.layers if line.side == side.name and line.agrees]
    lines = sorted(lines, key=lambda line: -abs(line.other_seconds - line.baseline_seconds))[
        :_MOST_LAYERS
    ]
    if not lines:
        return None
    names = {"layer": "layer", "pass": "which", "point": "point"}
    kernels = (
        [_kernels(line.baseline_kernels, line.other_kernels) for line in lines]
        if has_kernels
        else []
    )
    baseline = comparison.sides[0].name
    columns = [
        *(
            Column(title, map(attrgetter(name), lines), prose=True, is_key=True)
            for title, name in names.items()
        ),
        Column(baseline, (figure(line.baseline_seconds, "seconds") for line in lines), rank=2),
        Column(side.name, (figure(line.other_seconds, "seconds") for line in lines), rank=1),
        Column(
            "difference", (_signed(line.other_seconds - line.baseline_seconds) for line in lines)
        ),
        Column("share", (percent(line.share) for line in lines)),
    ]
    for name, texts in zip((baseline, side.name), zip(*kernels, strict=True), strict=False):
        columns.append(Column(f"kernels of {name}", texts, prose=True))
    return Grid(columns, explained(comparison, side))


def _kernels(*sides: Sequence[str]) -> tuple[str, str]:
    """Return a layer's kernels on both sides, in separate cells: narrow tables cut long texts."""
    before, after = (", ".join(own[:_MOST_KERNELS]) or "none" for own in sides)
    return before, "the same" if before == after else after


def explained(comparison: Comparison, side: SideFacts) -> list[str]:
    """Return how to read a side's layers, and how much of the time differences they explain."""
    sums: dict[str, float] = {}
    for line in comparison.layers:
        if line.side == side.name and line.agrees:
            sums[line.point] = (
                sums.get(line.point, 0.0) + line.other_seconds - line.baseline_seconds
            )
    shares = {}
    for measure in _EXPLAINED:
        for pair in comparison.pairs:
            is_explained = pair.point in sums and pair.verdict in _DECIDED
            if (pair.side, pair.measure) == (side.name, measure) and is_explained:
                shares[pair.point] = (sums[pair.point] / (pair.other - pair.baseline), measure)
    return [_READ_LAYERS] * bool(sums) + [
        f"all layers together explain {percent(share)} of the difference of {measure}{f' at {point}' * (len(sums) > 1)}"
        for point, (share, measure) in list(shares.items())[:_MOST_LAYERS]
    ]


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
    return f"largest gain of {len(sides)} sides: {_answer(comparison, min(gains, key=gains.__getitem__))}"


def _deciding_or_first(comparison: Comparison, side: SideFacts) -> list[Compared]:
    """Return the deciding pairs, or the first measure's pairs if the user chose other measures."""
    pairs = [pair for pair in comparison.pairs if pair.side == side.name]
    return _deciding(side, pairs) or [pair for pair in pairs if pair.measure == pairs[0].measure]


def _answer(comparison: Comparison, side: SideFacts) -> str:
    """Summarize in a sentence how a side compares with the baseline."""
    one, deciding = comparison.sides[0].name, _deciding_or_first(comparison, side)
    if not deciding:
        return f"{side.name} and {one} have no figure in common"
    names = ", ".join(dict.fromkeys(_IN_WORDS.get(pair.measure, pair.measure) for pair in deciding))
    if len(deciding) > 1:
        counts = Counter(pair.word.lower() for pair in deciding)
        words = ", ".join(f"{word} at {count}" for word, count in counts.most_common())
        means = [
            mean
            for mean in comparison.means
            if (mean.side, mean.measure) == (side.name, deciding[0].measure)
        ]
        mean = "".join(
            f"; geometric mean {units.digits(mean.ratio)}×" for mean in means if len(means) == 1
        )
        undecided = [pair for pair in deciding if pair.verdict is Verdict.UNDECIDED]
        most = max(undecided, key=lambda pair: pair.further_processes or 0, default=None)
        remedy = f"; {_would_decide(side, most)}" if most else ""
        return (
            f"{side.name} against {one}: {words} of {len(deciding)} points ({names}{mean}){remedy}"
        )
    [pair] = deciding
    others = [each for each in comparison.pairs if each.side == side.name and each is not pair]
    known = []
    for each in others:
        if each.ratio and each.measure != "cycles" and each.verdict in (*_DECIDED, Verdict.SAME):
            known.append(
                f"{each.measure} {'the same' if each.verdict is Verdict.SAME else f'{units.digits(each.ratio)}×'}"
            )
    return "; ".join(filter(None, (_of_pair(comparison, side, pair, names), ", ".join(known))))


def _of_pair(comparison: Comparison, side: SideFacts, pair: Compared, names: str) -> str:
    """Describe the deciding pair's verdict."""
    one, two = comparison.sides[0].name, side.name
    if pair.verdict is Verdict.NOT_COMPARABLE:
        why = [line for line in confounders(side) if line.partition(":")[0] in pair.confounders]
        return f"{two} cannot be compared with {one}: {'; '.join(why)}"
    is_decided = pair.verdict in _DECIDED
    if is_decided and MEASURES[pair.measure].better != "FASTER":
        before, now = (figure(value, pair.unit) for value in (pair.baseline, pair.other))
        return f"{names} of {two} is {pair.word.lower()}: {now} against {before}"
    ratio = time_ratio(pair) if pair.ratio else None
    if is_decided and ratio:
        if pair.verdict is Verdict.BETTER:
            ratio = _inverse(ratio)
        answer = f"{two} is {units.digits(ratio.value)}× {pair.word.lower()} than {one}"
    elif pair.verdict is Verdict.SAME:
        answer = f"{two} and {one} are the same within ±{bare(comparison.margin)}"
    else:
        answer = (
            f"undecided whether {two} is better or worse than {one}: {_would_decide(side, pair)}"
        )
    width = (
        ratio_text(ratio).partition(" ")[2].strip("()") if ratio and ratio.low is not None else ""
    )
    return f"{answer} ({', '.join(filter(None, (width, names)))})"


def _would_decide(side: SideFacts, pair: Compared) -> str:
    """Return the remedy that would probably decide an undecided pair."""
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
    """Return a line per pair, with the names in comparison.json; lists become texts."""
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
    """Yield the header, then the sections of each side (see `of_side`)."""
    yield Section("", header(comparison))
    for side in comparison.sides[1:]:
        yield from of_side(comparison, side, has_kernels=has_kernels)


def of_side(
    comparison: Comparison, side: SideFacts, *, has_kernels: bool = False
) -> Iterator[Section]:
    """Yield a side's title, table, lists and layers; empty parts are left out."""
    yield Section(title(comparison, side), doubts(comparison, side))
    yield Section("", grid(comparison, side))
    parts: dict[str, Grid | list[str] | None] = {
        "time and cycles disagree": [
            f"{pair.point}: {pair.clock}"
            for pair in comparison.pairs
            if pair.side == side.name and pair.clock
        ],
        "what else differs": confounders(side),
        "differs without effect": [
            f"{one.key}: {one.baseline} → {one.other}"
            for one in side.differences
            if one.role is Role.NEUTRAL
        ],
        "only on one side": alone(comparison, side),
        "runs without a record": [
            f"{one.name}: {line}" for one in (comparison.sides[0], side) for line in one.missing
        ],
        "layers that explain the difference": layers(comparison, side, has_kernels=has_kernels),
    }
    yield from (Section(heading, content) for heading, content in parts.items() if content)


def ratio_text(ratio: Interval) -> str:
    """Return a ratio with its interval."""
    ends = " … ".join(units.digits(end) for end in (ratio.low, ratio.high) if end is not None)
    return with_width(
        ratio,
        units.digits(ratio.value, _RATIO_DIGITS if ratio.value >= 1 else _RATIO_DIGITS - 1),
        ends,
    )


def figure(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    if unit in _FORMATS:
        return _FORMATS[unit](value, _DIGITS)
    return units.digits(value, _DIGITS) + unit.removeprefix("samples").removeprefix("1")


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{units.format_seconds(abs(seconds), 3)}"


def bare(fraction: float) -> str:
    """Return a fraction in percent, without superfluous digits."""
    return f"{100 * fraction:g} %"
