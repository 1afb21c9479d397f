"""Draw all samples of a few points: each time as a strip from zero, and the samples in the order of time."""

from __future__ import annotations

from typing import Any

import numpy

from perfexp.plots.canvas import DARK, caption_of, constrained, matplotlib, plain, style
from perfexp.plots.chart import COLORS, GREY, Strips, Taken, unit_of

#: Heights of a strip, of a panel over time, and of what is around them, in inches.
_STRIP, _OVER_TIME, _AROUND = 0.75, 1.6, 1.9
#: Percentile of the samples at which a strip ends; triangles at the edge stand for the others.
_MOST_SHOWN = 98.0
#: Least half-height of the panel over time, in percent of the median.
_LEAST_PERCENT = 2.0
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
    """One row for each time: its samples, its median with the interval, and the figures at the right."""
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
        is_hollow = median.low is None
        axes.plot([median.value * factor] * 2, [position - 0.36, position + 0.36], color="black", linewidth=2,
                  linestyle=":" if is_hollow else "-")  # fmt: skip
        words = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 12}
        axes.text(1.015, position, plain(one.text), **words)
    axes.set_yticks(range(len(taken)), [f"{one.name}\n{one.meaning}" for one in taken])
    axes.set_ylim(len(taken) - 0.5, -0.5)
    axes.set_xlim(0, edge)
    prefix = f"{plain(name)}: " if name else ""
    meaning = "black: median (dotted without an interval), shaded: its 95 % interval"
    axes.set_xlabel(f"{prefix}time per call ({unit}); {meaning}")
    style(axes, axis="x")
    axes.tick_params(axis="y", labelsize=12, length=0)


def _over_time(axes: Any, one: Taken) -> None:
    """The samples of one time in percent of its median over the seconds that they took."""
    series, median = one.series, one.time.median.value
    samples = numpy.array(series.samples)
    seconds = numpy.cumsum(samples) * series.calls_per_sample
    percent = (samples / median - 1) * 100
    most = max(_LEAST_PERCENT, 1.2 * float(numpy.percentile(numpy.abs(percent[series.warmup :]), _MOST_SHOWN)))
    shown = numpy.clip(percent, -most, most)
    axes.plot(seconds[series.warmup :], shown[series.warmup :], ".", color=COLORS[0], markersize=4)
    if series.warmup:
        axes.plot(seconds[: series.warmup], shown[: series.warmup], ".", color=GREY, markersize=4)
        axes.axvspan(0, seconds[series.warmup - 1], color="#d9d9d9", alpha=0.6, linewidth=0, label="warm-up")
    for number, start in enumerate(series.blocks[1:]):
        label = None if number else "next process"
        axes.axvline(seconds[start - 1], color=DARK, linewidth=1, linestyle="--", label=label)
    axes.axhline(0, color="black", linewidth=1)
    axes.set_ylim(-1.05 * most, 1.05 * most)
    axes.set_xlim(0, float(seconds[-1]) or None)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g} %" if value else "median")
    axes.set_xlabel(f"samples of {one.name} against their median, over the seconds that the calls took")
    style(axes)
    if series.warmup or series.blocks[1:]:
        axes.legend(fontsize=9, loc="upper right", framealpha=0.9)
