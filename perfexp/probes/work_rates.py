"""Work rates: a point's analytic work per call, and the rates at which it was done."""

from __future__ import annotations

from collections.abc import Mapping

from perfexp.records import diagnostics
from perfexp.records.point_times import DEVICE_TIMES, first_median, loop_interval
from perfexp.records.record import Metric, Point, Status
from perfexp.work import Work

#: Ratio of two ceilings from which the higher one is worth a note.
_WORTH = 1.5
#: Multiple of a ceiling that no algorithm explains: Winograd's of 3 × 3 kernels save a factor of 4 at most.
_IMPOSSIBLE = 4.0


def add_work_metrics(
    point: Point,
    work: Work,
    peaks: Mapping[str, float | None] | None,
    ceilings: Mapping[str, float] | None = None,
    host_rate: float | None = None,
) -> None:
    """Add the metrics `work/…`, `ceiling/…` and `mfu…`, and their warnings, to a point that has been timed.

    The rate uses device time where there is one. `mfu` (model FLOPs utilization; Chowdhery et al., PaLM, arXiv
    2204.02311, appendix B) is the rate of the loop's contractions divided by the data sheet's peak, which is one of
    contractions. `mfu_of_ceiling` is the same divided by the measured peak.

    Args:
        work: work of one call, with its backward pass in training.
        peaks: FLOP/s of the data sheet by data type, empty if unknown; None for a device without one, and `mfu`.
        ceilings: reached `flops_per_second` and `bytes_per_second`, empty if they failed; None if not requested.
        host_rate: FLOP/s of a matrix product on a CPU, which has no data sheet; None for other devices.

    A call that exceeds a ceiling several times over did not do the model's work: the point has failed.
    """
    point.metrics += [
        Metric(name="work/forward_macs", value=work.macs, unit="1"),
        Metric(name="work/flops", value=work.flops_model, unit="1"),
        Metric(name="work/bytes_min", value=work.bytes_min, unit="bytes"),
        Metric(name="work/activation_bytes", value=work.activation_bytes, unit="bytes"),
        Metric(name="work/parameters", value=work.parameters, unit="1"),
        _rate(point, work),
        *([] if peaks is None else [_mfu(point, work, peaks)]),
    ]
    if ceilings:
        point.metrics += [
            Metric(name="ceiling/flops_per_second", value=ceilings["flops_per_second"], unit="1/s"),
            Metric(name="ceiling/bytes_per_second", value=ceilings["bytes_per_second"], unit="bytes/s"),
            _part(point, work, ceilings["flops_per_second"], "mfu_of_ceiling"),
        ]
    elif ceilings is not None:
        reason = "the device's ceilings could not be measured; see run.log"
        point.metrics.append(Metric(name="mfu_of_ceiling", value=None, unit="1", reason=reason))
    shares = [metric for metric in point.metrics if metric.name in ("mfu", "mfu_of_ceiling")]
    point.doubts += [
        diagnostics.make("above_the_ceiling", metric=metric.name, share=metric.value)
        for metric in shares
        if metric.value is not None and metric.value > 1
    ]
    if host_rate is not None:
        shares.append(_part(point, work, host_rate, "share of a matrix product's rate"))
    for metric in shares:
        if metric.value is not None and metric.value > _IMPOSSIBLE:
            reason = f"impossible: {metric.name} is {metric.value:.3g}, so the timed calls did not do the model's work"
            point.status, point.error = Status.FAILED, reason
    tf32, fp32 = ((peaks or {}).get(kind) for kind in ("tf32", "fp32"))
    if point.key.precision == "fp32" and work.contraction_flops and tf32 and fp32 and tf32 > _WORTH * fp32:
        point.doubts.append(diagnostics.make("tf32_ceiling", ratio=tf32 / fp32))
    if work.is_random:
        point.doubts.append(diagnostics.make("work_random"))
    if work.uncounted:
        point.doubts.append(diagnostics.make("work_uncounted", ops=", ".join(work.uncounted)))


def _rate(point: Point, work: Work) -> Metric:
    seconds = first_median(point, *DEVICE_TIMES, "latency", "throughput")
    value, reason = (None, "nothing was timed") if seconds is None else (work.flops_model / seconds, None)
    return Metric(name="work/flops_per_second", value=value, unit="1/s", reason=reason)


def _mfu(point: Point, work: Work, peaks: Mapping[str, float | None]) -> Metric:
    kind = point.key.precision.removeprefix("amp_")
    if not (peak := peaks.get(kind)):
        reason = (
            f"no file of conf/gpu has this device's peak in {kind}; set probes.ceilings=true to measure what it reaches"
        )
        return Metric(name="mfu", value=None, unit="1", reason=reason)
    return _part(point, work, peak, "mfu")


def _part(point: Point, work: Work, most: float, name: str) -> Metric:
    call = loop_interval(point)
    if call is None:
        return Metric(name=name, value=None, unit="1", reason="nothing was timed")
    return Metric(name=name, value=work.contraction_flops / call.value / most, unit="1")
