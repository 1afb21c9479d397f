"""Work rates: a point's analytic work per call, and the rates achieved.

Work is counted from the model's layers (`perfexp.cost`). A contraction is a matrix product or a
convolution; they do nearly all of the FLOPs, and each number format has its own peak. A rate is
compared with the data sheet's peak and with the measured ceiling. `procedure` adds all of it
last, because rates need every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from perfexp.cost import Work
from perfexp.models import Tokens
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.number_formats import Formats
from perfexp.records.point_times import DEVICE_TIMES, GRAPH, first_median, loop_interval
from perfexp.records.quantities import (
    ACTIVATION_BYTES,
    BYTES_CEILING,
    CACHE_BYTES,
    FLOPS,
    FLOPS_CEILING,
    LEAST_BYTES,
    MACS,
    MBU,
    MFU,
    MFU_OF_CEILING,
    PARAMETERS,
    TOKENS_RATE,
    WORK_RATE,
)
from perfexp.records.races import saving_engines
from perfexp.records.record import Metric, Point, Status

#: Ratio of two ceilings that makes the higher ceiling worth a note.
_WORTH = 1.5
#: Multiple of a ceiling that no algorithm explains: Winograd on 3 × 3 kernels saves at most a
#: factor of 4.
_IMPOSSIBLE = 4.0


def add_work_metrics(
    point: Point,
    work: Work,
    formats: Formats,
    peaks: Mapping[str, float | None] | None,
    ceilings: Mapping[str, float] | None = None,
    host_rate: float | None = None,
) -> None:
    """Add the metrics `work/…`, `ceiling/…` and `mfu…`, with diagnostics, to a timed point.

    The rate uses device time if available. `mfu` is model FLOPs utilization (Chowdhery et al.,
    PaLM, arXiv 2204.02311, appendix B). It is the contraction time at data-sheet peaks, divided by
    the loop time. `mfu_of_ceiling` is the same with measured peaks.

    A call several times faster than a ceiling allows did not do the model's work, so the point
    fails.

    Args:
        work: work per call, with its backward pass in training.
        formats: number formats of the contractions, which have different peaks.
        peaks: data-sheet FLOP/s by number format, empty if unknown. None for a device without a
            data sheet, which gets no `mfu`.
        ceilings: achieved FLOP/s by number format, and `bytes_per_second`. Empty if their
            measurement failed, None if not requested.
        host_rate: FLOP/s of a matrix product on a CPU, which has no data sheet; None for other
            devices.
    """
    point.metrics += [
        Metric.of(MACS, work.macs),
        Metric.of(FLOPS, work.flops_model),
        Metric.of(LEAST_BYTES, work.bytes_min),
        Metric.of(ACTIVATION_BYTES, work.activation_bytes),
        Metric.of(PARAMETERS, work.parameters),
        _rate(point, work),
    ]
    if peaks is not None:
        reason = (
            f"no file of conf/gpu has this device's peak in {' or '.join(dict.fromkeys(formats))}; "
            "set probes.ceilings=true to measure what it reaches"
        )
        least = _least_seconds(work, formats, peaks)
        point.metrics.append(_share_metric(point, least, MFU, reason))
    if ceilings is not None:
        _add_ceilings(point, work, formats, ceilings)
    shares = [metric for metric in point.metrics if metric.name in (MFU, MFU_OF_CEILING)]
    point.doubts += [
        diagnostics.make("above_the_ceiling", metric=metric.name, share=metric.value)
        for metric in shares
        if metric.value is not None and metric.value > 1 and not saving_engines(point)
    ]
    if host_rate is not None:
        shares.append(
            _share_metric(
                point, work.contraction_flops / host_rate, "share of a matrix product's rate"
            )
        )
    # a model that draws numbers may do less work in a timed call than in the counted one
    if not work.is_random:
        _refuse_impossible(point, shares)
    point.doubts += [*_tf32_note(work, formats, peaks or {}), *_count_diagnostics(work)]


def _add_ceilings(
    point: Point, work: Work, formats: Formats, ceilings: Mapping[str, float]
) -> None:
    """Add the device's ceilings, and the share of them that the model reaches, to a point.

    Args:
        ceilings: see `add_work_metrics`; if it is empty, the reason is added.
    """
    if not ceilings:
        reason = "the device's ceilings could not be measured; see details/run.log"
        point.metrics.append(Metric.of(MFU_OF_CEILING, None, reason=reason))
        return
    least = _least_seconds(work, formats, ceilings)
    # a model without contractions has no mix of formats; show the fastest one
    highest = work.contraction_flops / least if least else max(ceilings[name] for name in formats)
    point.metrics += [
        Metric.of(FLOPS_CEILING, highest),
        Metric.of(BYTES_CEILING, ceilings["bytes_per_second"]),
        _share_metric(point, least, MFU_OF_CEILING),
    ]
    point.facts["ceilings"] = dict(ceilings)


def _refuse_impossible(point: Point, shares: Iterable[Metric]) -> None:
    """Set a point to failed if a share of a peak is too large to be true."""
    for metric in shares:
        if metric.value is not None and metric.value > _IMPOSSIBLE:
            reason = (
                f"impossible: {metric.name} is {metric.value:.3g}, so the timed calls did not do "
                "the model's work"
            )
            point.status, point.error = Status.FAILED, reason


def add_token_metrics(
    point: Point, tokens: Tokens, ceilings: Mapping[str, float] | None = None
) -> None:
    """Add tokens/s, and in mode=decode the cache and `mbu`, to a timed point of a language model.

    `mbu` is memory bandwidth utilization: weights and cache are read once per call.

    Args:
        tokens: tokens per call, with bytes of cache and weights in mode=decode.
        ceilings: see `add_work_metrics`.
    """
    call = loop_interval(point)
    missing = "nothing was timed" if call is None else None
    rate = None if call is None else tokens.count / call.value
    point.metrics.append(Metric.of(TOKENS_RATE, rate, reason=missing))
    if tokens.cache_bytes is None or tokens.weight_bytes is None:
        return
    point.metrics.append(Metric.of(CACHE_BYTES, tokens.cache_bytes))
    seconds, share = first_median(point, GRAPH, *DEVICE_TIMES, "latency"), None
    if not ceilings:
        missing = "the device's bandwidth is unknown; probes.ceilings=true measures it"
    elif seconds is not None:
        moved = tokens.weight_bytes + tokens.cache_bytes
        share = moved / seconds / ceilings["bytes_per_second"]
    point.metrics.append(Metric.of(MBU, share, reason=missing))


def _count_diagnostics(work: Work) -> Iterator[Diagnostic]:
    """Yield diagnostics about the count itself, for example an operation without a formula."""
    if work.parameters and not work.flops_model and not work.uncounted:
        yield diagnostics.make(
            "work_uncounted",
            why="by the count, a call computes nothing with the model's parameters",
        )
    if work.is_random:
        yield diagnostics.make(
            "work_uncounted", why="the model skips layers at random, and a single draw was counted"
        )
    if work.uncounted:
        yield diagnostics.make(
            "work_uncounted",
            why=f"no FLOP formula for {', '.join(work.uncounted)}; they are lower bounds",
        )


def _rate(point: Point, work: Work) -> Metric:
    """Return the rate of the model's FLOPs, in FLOP/s of device time if available."""
    seconds = first_median(point, *DEVICE_TIMES, "latency", "throughput")
    if seconds is None:
        return Metric.of(WORK_RATE, None, reason="nothing was timed")
    return Metric.of(WORK_RATE, work.flops_model / seconds)


def _seconds_by_kind(
    work: Work, formats: Formats, rates: Mapping[str, float | None]
) -> tuple[float | None, float | None]:
    """Return the minimum seconds of matrix products and of convolutions, at the given rates.

    None if there is such work and its rate is unknown.

    Args:
        formats: number format of matrix products, then of convolutions.
        rates: FLOP/s by number format.
    """
    amounts = (work.contraction_flops - work.convolution_flops, work.convolution_flops)
    seconds: list[float | None] = []
    for amount, name in zip(amounts, formats, strict=True):
        rate = rates.get(name)
        if rate:
            seconds.append(amount / rate)
        else:
            seconds.append(None if amount else 0.0)
    return seconds[0], seconds[1]


def _least_seconds(work: Work, formats: Formats, rates: Mapping[str, float | None]) -> float | None:
    """Return the minimum seconds of the contractions; None if a rate is unknown."""
    products, convolutions = _seconds_by_kind(work, formats, rates)
    if products is None or convolutions is None:
        return None
    return products + convolutions


def _tf32_note(work: Work, formats: Formats, peaks: Mapping[str, float | None]) -> list[Diagnostic]:
    """Return a note if most of the time goes to fp32 contractions, and TF32 is much faster."""
    tf32, fp32 = (peaks.get(kind) for kind in ("tf32", "fp32"))
    if not (tf32 and fp32 and tf32 > _WORTH * fp32 and work.contraction_flops):
        return []
    seconds = dict.fromkeys(formats, 0.0)
    for kind, least in zip(formats, _seconds_by_kind(work, formats, peaks), strict=True):
        seconds[kind] += least or 0.0
    is_most = seconds.get("fp32", 0.0) > sum(seconds.values()) / 2
    if not is_most:
        return []
    return [diagnostics.make("tf32_ceiling", ratio=tf32 / fp32)]


def _share_metric(point: Point, least_seconds: float | None, name: str, reason: str = "") -> Metric:
    """Return a utilization: the contractions' minimum time over the loop time.

    Args:
        least_seconds: minimum time; None if a rate is unknown.
        reason: why it is unknown.
    """
    call = loop_interval(point)
    if least_seconds is None:
        return Metric.of(name, None, reason=reason)
    if call is None:
        return Metric.of(name, None, reason="nothing was timed")
    return Metric.of(name, least_seconds / call.value)
