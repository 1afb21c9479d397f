"""Draw all samples of a few points: each time as a strip from zero, and the samples in the order of time."""

from __future__ import annotations

from typing import Any

import numpy

from perfexp.plots.canvas import DARK, caption_of, constrained, matplotlib, plain, style
from perfexp.plots.chart import COLORS, GREY, Strips, Taken, centers, dotted, unit_of
from perfexp.records.units import format_seconds

#: Heights of a strip, of a panel over time, and of what is around them, in inches.
_STRIP, _OVER_TIME, _AROUND = 0.75, 1.6, 1.9
#: Percentile of the samples at which a strip ends; triangles at the edge stand for the others.
_MOST_SHOWN = 98.0
#: Least half-height of the panel over time, in percent of the center.
_LEAST_PERCENT = 2.0
#: Limit on the shown end of the warm-up, as a share of the time after it.
_MOST_WARMUP = 1 / 3
#: Golden ratio, by which samples are spread over the height of their strip: evenly, and always the same.
_SPREAD = 0.618034


def compose(strips: Strips) -> Any:
    """The figure: for each point its times from zero, and below them the representative one over time."""
    counts = [len(taken) for _, taken in strips.points]
    heights = [height for count in counts for height in (_STRIP * count + 0.5, _OVER_TIME)]
    figure = constrained(_AROUND + sum(heights))
    column = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for number, (name, taken) in enumerate(strips.points):
        _strips(column[2 * number], name, taken)
        _over_time(column[2 * number + 1], taken[0])
    caption_of(figure, strips.caption)
    return figure


def _strips(axes: Any, name: str, taken: tuple[Taken, ...]) -> None:
    """One row for each time: its samples, their center with the interval, and the figures at the right."""
    ends = [max(float(numpy.percentile(one.series.measured, _MOST_SHOWN)), one.time.median.value) for one in taken]
    factor, unit = unit_of("seconds", [max(ends)])
    edge = 1.1 * factor * max(ends)
    for position, one in enumerate(taken):
        color, samples = COLORS[position % len(COLORS)], factor * numpy.array(one.series.measured)
        inside = samples <= edge
        heights = position + 0.5 * ((numpy.arange(samples.size) * _SPREAD) % 1 - 0.5)
        axes.plot(samples[inside], heights[inside], ".", color=color, markersize=4, alpha=0.45)
        if beyond := int((~inside).sum()):
            axes.plot([edge] * beyond, heights[~inside], ">", color=color, markersize=5, alpha=0.6, clip_on=False)
        median = one.time.median
        if median.low is not None and median.high is not None:
            low, high = max(median.low, 0.0) * factor, min(median.high * factor, edge)
            axes.fill_betweenx([position - 0.36, position + 0.36], low, high, color="black", alpha=0.25, linewidth=0)
        axes.plot([median.value * factor] * 2, [position - 0.36, position + 0.36], color="black", linewidth=2,
                  linestyle=":" if one.is_dotted else "-")  # fmt: skip
        words = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 12}
        axes.text(1.015, position, plain(one.text), **words)
    axes.set_yticks(range(len(taken)), [f"{one.name}\n{one.meaning}" for one in taken])
    axes.set_ylim(len(taken) - 0.5, -0.5)
    axes.set_xlim(0, edge)
    prefix = f"{plain(name)}: " if name else ""
    meaning = f"black: {centers(taken)}, shaded: its 95 % interval" + (
        f"; dotted, ≈: {about}" if (about := dotted(taken)) else ""
    )
    axes.set_xlabel(f"{prefix}time per call ({unit}); {meaning}")
    style(axes, axis="x")
    axes.tick_params(axis="y", labelsize=12, length=0)


def _over_time(axes: Any, one: Taken) -> None:
    """The samples of one time in percent of their center over the seconds that they took."""
    series, median = one.series, one.time.median.value
    samples = numpy.array(series.samples)
    seconds = numpy.cumsum(samples) * series.calls_per_sample
    percent = (samples / median - 1) * 100
    most = max(_LEAST_PERCENT, 1.2 * float(numpy.percentile(numpy.abs(percent[series.warmup :]), _MOST_SHOWN)))
    start, end = float(seconds[series.warmup - 1]) if series.warmup else 0.0, float(seconds[-1])
    first = max(0.0, start - _MOST_WARMUP * (end - start))
    is_warmup = numpy.arange(samples.size) < series.warmup
    is_shown, is_beyond = seconds >= first, numpy.abs(percent) > most
    for chosen, color in ((is_warmup, GREY), (~is_warmup, COLORS[0])):
        inside = chosen & is_shown & ~is_beyond
        axes.plot(seconds[inside], percent[inside], ".", color=color, markersize=4)
        for marker, side in (("^", 1), ("v", -1)):
            beyond = chosen & is_shown & is_beyond & (side * percent > 0)
            axes.plot(seconds[beyond], [side * most] * int(beyond.sum()), marker, color=color, markersize=5)
    if series.warmup:
        name = f"end of the\n{format_seconds(start, 2)} warm-up" if first else "warm-up"
        axes.axvspan(first, start, color="#d9d9d9", alpha=0.6, linewidth=0, label=f"{name},\nnot counted")
    for number, block in enumerate(series.blocks[1:]):
        label = None if number else "next process"
        axes.axvline(seconds[block - 1], color=DARK, linewidth=1, linestyle="--", label=label)
    if bool((is_shown & is_beyond).any()):
        axes.plot([], [], "^", color=DARK, markersize=5, label="beyond the axis")
    axes.axhline(0, color="black", linewidth=1)
    axes.set_ylim(-1.08 * most, 1.08 * most)
    axes.set_xlim(first, end + 0.01 * (end - first) or None)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g} %" if value else one.center.partition(" ")[0])
    axes.set_xlabel(f"samples of {one.name} against the {one.center}, over the seconds that the calls took")
    style(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9.5, loc="upper left", bbox_to_anchor=(1.005, 1.05), frameon=False)
