"""What sinks share, computed from records made by hand."""

import math

import msgspec
import numpy as np
import pytest

from perfexp.comparison import measures
from perfexp.records import diagnostics, growth, summary, units
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Key, Metric, Point, Series, Status, Stop, layers_key
from perfexp.reports import markdown, overview
from perfexp.statistics import estimators
from perfexp.statistics.estimators import Interval
from perfexp.summaries import remarks, wording
from perfexp.summaries.analysis import Analysis

SIZES = range(224, 513, 32)


def point(
    seconds,
    size=224,
    *,
    batch=1,
    replicate=0,
    kind="latency",
    status=Status.OK,
    calls=60,
    noise=0.005,
):
    shape = size if isinstance(size, tuple) else (size, size)
    waves = [seconds * (1 + noise * math.sin(7 * index)) for index in range(calls)]
    stop = Stop(reason="precision", target=0.05, achieved=0.004)
    return Point(
        key=Key(
            phase="inference",
            input_size=shape,
            batch_size=batch,
            precision="fp32",
            replicate=replicate,
        ),
        status=status,
        series=[Series(name=kind, samples=waves, stop=stop)] if status is Status.OK else [],
    )


def proportional(size, factor=1.0):
    return factor * (0.002 + 0.02 * (size / 224) ** 2)


def unexpected(rows):
    """The doubts about growth by their size, with the figure that each begins with."""
    return {
        row.key.size_label: doubt.message.split(" times ")[0].removeprefix("the time is ")
        for row in rows
        for doubt in row.doubts
        if doubt.code == "scaling_unexpected"
    }


def test_each_batch_and_kind_of_time_has_its_own_scaling_model(make_record):
    points = [
        point(proportional(size, batch), size, batch=batch, replicate=replicate)
        for batch in (1, 4)
        for size in SIZES
        for replicate in (0, 1)
    ]
    points += [point(0.001, size, batch=8, kind="device") for size in SIZES]
    points += [point(0.001, size, batch=8, replicate=1, kind="latency") for size in (224, 256, 288)]
    found = growth.scalings(summary.rows(make_record(points=points)))
    names = [(each.time_kind, each.key.batch_size, each.key.replicate) for each in found]
    assert names == [("latency", 1, 0), ("latency", 4, 0), ("device", 8, 0)]
    assert [each.key.size_label for each in found] == ["512"] * 3
    for each in found[:2]:
        assert each.fit.exponent.value == pytest.approx(1, abs=0.02)
        assert each.fit.a == pytest.approx(0.002 * each.key.batch_size, rel=0.1)
        assert each.fit.b == pytest.approx(0.02 * each.key.batch_size * (512 / 224) ** 2, rel=0.05)
    assert found[2].fit.exponent is None


def test_noise_is_not_a_scaling_model(make_record):
    calls = {224: 60, 256: 4, 288: 4, 320: 4, 352: 60}
    noisy = [
        point(0.2 * factor, size)
        for size, factor in zip(SIZES, [1, 2, 0.4, 3, 0.5, 1.8, 0.3], strict=False)
    ]
    short = [point(0.2, size, calls=count) for size, count in calls.items()]
    for points, reason in (
        (noisy, "the times scatter by "),
        (short, "3 of 5 medians have no interval"),
    ):
        (line,) = remarks.scaling_lines(Analysis.of(make_record(points=points)))
        assert line.startswith(f"latency: growth with the size not determined: {reason}")
    assert not growth.scalings(
        summary.rows(make_record(points=[point(0.2, size) for size in SIZES]))
    )[0].doubt


def test_sizes_that_are_not_square_count_by_their_pixels(make_record):
    shapes = [(256, 128), (224, 224), (256, 512), (512, 1024), (128, 2048), (640, 640)]
    points = [point(1e-7 * height * width, (height, width)) for height, width in shapes]
    analysis = Analysis.of(make_record(points=points))
    (found,) = analysis.scalings
    [line] = remarks.scaling_lines(analysis)
    assert "(pixels / (512·1024))^" in line
    assert "(256x128 to 512x1024 only, 6 sizes" in line
    assert found.fit.exponent.value == pytest.approx(1, abs=0.01)
    assert found.key.size_label == "512x1024"
    assert [key.pixels for key in found.keys] == sorted(height * width for height, width in shapes)


def test_points_that_failed_and_too_few_sizes_make_no_law(make_record):
    points = [point(proportional(size), size) for size in (224, 256, 288)]
    points += [point(0, size, status=Status.OOM) for size in (512, 544)]
    assert growth.scalings(summary.rows(make_record(points=points))) == []
    assert growth.scalings([]) == []


@pytest.mark.parametrize("factor", [1.5, 0.8])
def test_a_time_far_from_the_others_is_in_doubt_and_no_other_is(make_record, factor):
    points = [point(proportional(size, factor if size == 352 else 1), size) for size in SIZES]
    assert unexpected(summary.rows(make_record(points=points))) == {"352": f"{factor:.2f}"}


def test_unmarked_falling_times_fall_by_less_than_a_tenth(make_record):
    rows = summary.rows(make_record(points=[point(0.02 * 224 / size, size) for size in SIZES]))
    left = [row.time.median.value for row in rows if row.key.size_label not in unexpected(rows)]
    assert 2 <= len(left) < len(rows)
    assert min(left) >= 0.9 * max(left)


def test_of_two_sizes_the_smaller_one_is_odd_if_it_takes_longer(make_record):
    points = [point(0.020, 224), point(0.015, 448)]
    rows = summary.rows(make_record(points=points))
    assert unexpected(rows) == {"224": "1.33"}
    (doubt,) = [doubt for doubt in rows[0].doubts if doubt.code == "scaling_unexpected"]
    assert (
        doubt.message == "the time is 1.33 times that of the larger size 448, beyond both intervals"
    )
    assert doubt.help


#: `device` of ResNet-50 in milliseconds by size, of an H100: 200 is slow, and 190 and 210 are not.
H100 = {
    160: 2.58,
    170: 2.68,
    180: 2.78,
    190: 2.90,
    200: 3.33,
    210: 2.98,
    220: 3.02,
    230: 3.08,
    240: 3.08,
    250: 3.21,
}


def test_slow_size_is_marked_and_faster_larger_ones_are_not(make_record):
    points = [point(1e-3 * ms, size, kind="device") for size, ms in H100.items()]
    assert list(unexpected(summary.rows(make_record(points=points)))) == ["200"]


def test_too_fast_size_is_marked_and_smaller_ones_are_not(make_record):
    points = [point(1e-3 * (ms if size != 200 else 2.1), size) for size, ms in H100.items()]
    assert list(unexpected(summary.rows(make_record(points=points)))) == ["200"]


def test_odd_size_is_explained_by_its_memory_and_kernels(make_record):
    points = [point(1e-3 * ms, size, kind="device") for size, ms in H100.items()]
    for each in list(points):
        odd = each.key.input_size[0] == 200
        peak = (750 if odd else 250) * 2**20
        each.metrics.append(Metric(name="memory/peak_bytes", value=peak, unit="bytes"))
        lines = [{"kernels": {"fft_tile" if odd else "gemm": 2.0, "relu": 1.0}}]
        points.append(
            Point(key=layers_key(each.key), status=Status.OK, facts={"layers": {"lines": lines}})
        )
    (row,) = [
        row for row in summary.rows(make_record(points=points)) if row.key.size_label == "200"
    ]
    (message,) = [doubt.message for doubt in row.doubts if doubt.code == "scaling_unexpected"]
    assert "its peak memory is 750 MiB, 250 MiB beside it" in message
    assert message.endswith("it launches kernels that its neighbors do not: fft_tile")


def test_a_batch_with_a_lower_rate_than_a_smaller_one_is_named(make_record):
    seconds = {1: 0.010, 8: 0.020, 32: 0.060, 64: 0.160}  # 100, 400, 533 and 400 samples/s
    rows = summary.rows(
        make_record(points=[point(value, batch=batch) for batch, value in seconds.items()])
    )
    found = {
        row.key.batch_size: doubt
        for row in rows
        for doubt in row.doubts
        if doubt.code == "rate_falls"
    }
    assert list(found) == [64]
    assert found[64].message == "reaches 0.75 of the samples/s of batch 32, which is smaller"
    assert "batch_size=32" in found[64].help


def test_falling_rate_needs_intervals_and_recommends_the_best(make_record):
    seconds = {1: 0.010, 8: 0.160, 32: 0.060}  # 100, 50 and 533 samples/s
    for calls, expected in ((60, {8: "batch_size=32"}), (4, {})):
        points = [point(value, batch=batch, calls=calls) for batch, value in seconds.items()]
        doubts = {
            row.key.batch_size: row.doubts for row in summary.rows(make_record(points=points))
        }
        falling = {
            batch: doubt
            for batch, of in doubts.items()
            for doubt in of
            if doubt.code == "rate_falls"
        }
        assert falling.keys() == expected.keys()
        assert all(expected[batch] in doubt.help for batch, doubt in falling.items())


def test_small_dips_and_falls_within_intervals_are_not_flagged(make_record):
    dips = [point(0.01 * (1.04 if size % 64 else 0.96), size) for size in SIZES]
    assert not unexpected(summary.rows(make_record(points=dips)))
    wide = [point(0.020, 224, calls=12, noise=0.4), point(0.016, 448, calls=12, noise=0.4)]
    assert not unexpected(summary.rows(make_record(points=wide)))
    without = [point(0.020, 224, calls=4), point(0.015, 448, calls=4)]
    assert not unexpected(summary.rows(make_record(points=without)))


def test_curves_of_any_honest_kind_are_no_reason_for_doubt(make_record):
    rng = np.random.default_rng(5)
    stairs = rng.uniform(0.95, 1.05, len(SIZES))
    curves = {
        "proportional": [proportional(size) for size in SIZES],
        "flat": [0.004 for _ in SIZES],
        "flat, then proportional": [max(0.004, 1e-3 * (size / 224) ** 2.0 * 2) for size in SIZES],
        "stairs": [proportional(size) * stair for size, stair in zip(SIZES, stairs, strict=True)],
        "flat stairs": [0.004 * stair for stair in stairs],
    }
    for name, times in curves.items():
        points = [point(seconds, size) for seconds, size in zip(times, SIZES, strict=True)]
        assert not unexpected(summary.rows(make_record(points=points))), name


def test_rows_notice_another_error(make_record):
    record = make_record(points=[point(0.01, status=Status.FAILED)])
    assert [row.error for row in summary.rows(record)] == [None]
    record.points[0].error = "no space left"
    assert [row.error for row in summary.rows(record)] == ["no space left"]


@pytest.mark.parametrize("seconds", [(0.0,), (0.0, 0.0, 0.0)])
def test_times_of_0_have_no_rate(make_record, seconds):
    """A clock that stands still."""
    record = make_record(
        points=[point(one, replicate=number) for number, one in enumerate(seconds)]
    )
    [row] = summary.rows(record)
    assert (row.time.median.value, row.samples_per_second) == (0.0, None)
    assert measures.repeats(Analysis.of(record)) == {row.key: {}}
    assert "latency" in markdown.markdown(Analysis.of(record))


def test_a_median_of_0_leaves_the_other_figures(make_record):
    measured = point(0.01)
    measured.series[0].samples[:40] = [0.0] * 40
    [found] = measures.repeats(Analysis.of(make_record(points=[measured]))).values()
    assert found.keys() == {"p95", "throughput"}


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (
            (0.010, 0.010, 0.200),
            "a process took 20 times as long as the others: 200 ms per call in process 3, 10.0 ms",
        ),
        (
            (0.004, 0.010, 0.010),
            "a process took 0.4 times as long as the others: 4.00 ms per call in process 1, 10.0",
        ),
        (
            (0.010, 0.016),
            "a process took 1.6 times as long as the others: 16.0 ms per call in process 2, 10.0 ms",
        ),
    ],
)
def test_a_process_far_from_the_others_is_named_in_a_warning(make_record, seconds, message):
    points = [point(each, replicate=replicate) for replicate, each in enumerate(seconds)]
    (row,) = summary.rows(make_record(points=points))
    (doubt,) = row.doubts
    assert (doubt.code, doubt.is_note) == ("process_apart", False)
    assert doubt.message.startswith(message)
    assert "processes=N" in doubt.help


def test_a_process_is_not_apart_from_others_that_are_apart(make_record):
    medians = (0.055, 0.025, 0.899, 0.029, 0.871, 0.879, 0.030)
    points = [point(each, replicate=replicate) for replicate, each in enumerate(medians)]
    (row,) = summary.rows(make_record(points=points))
    assert [doubt.code for doubt in row.doubts] == ["processes_differ"]
    assert "899 ms" in row.doubts[0].message


def test_processes_that_differ_a_little_are_noted(make_record):
    points = [
        point(each, replicate=replicate) for replicate, each in enumerate((0.010, 0.011, 0.014))
    ]
    (row,) = summary.rows(make_record(points=points))
    assert [(doubt.code, doubt.is_note) for doubt in row.doubts] == [("processes_differ", True)]


def test_rates_of_work_are_those_of_the_times_beside_them(make_record):
    points = [
        point(seconds, replicate=replicate)
        for replicate, seconds in enumerate((0.010, 0.020, 0.020))
    ]
    points[0].metrics += [
        Metric(name="work/flops_per_second", value=1e9 / 0.010, unit="1/s"),
        Metric(name="mfu", value=0.5, unit="1"),
        Metric(name="work/flops", value=1e9, unit="1"),
    ]
    [row] = summary.rows(make_record(points=points))
    rate, share, flops = (metric.value for metric in row.metrics)
    assert rate == pytest.approx(1e9 / row.time.median.value, rel=1e-3)
    assert share == pytest.approx(0.5 * 0.010 / row.time.mean.value, rel=1e-3)
    assert flops == 1e9


def test_different_times_of_the_same_point_are_not_mixed(make_record):
    points = [point(0.01, kind="device"), point(0.02, kind="latency", replicate=1)]
    [row] = summary.rows(make_record(points=points))
    assert (row.time_kind, row.processes, list(row.times)) == ("device", 1, ["device"])


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("fixed", "stopping.measure"),
        ("max_seconds", "stopping.max_seconds"),
        ("max_calls", "stopping.max_calls"),
    ],
)
def test_too_few_samples_are_remedied_by_what_ended_the_block(make_record, reason, says):
    record = make_record(calls=2)
    for point in record.points:
        for series in point.series:
            series.stop = Stop(reason=reason, target=0.01, achieved=None)
    [row] = summary.rows(record)
    assert says in next(doubt.help for doubt in row.doubts if doubt.code == "too_few_samples")


@pytest.mark.parametrize(
    ("reason", "noise", "few"),
    [("max_seconds", 0.001, False), ("max_seconds", 0.008, True), ("precision", 0.008, False)],
)
def test_few_sample_interval_counts_three_times_as_wide(reason, noise, few):
    """Of what time cut short the correlation is not known well."""
    samples = (1 + noise * np.random.default_rng(1).standard_normal(16)).tolist()
    achieved = estimators.median_interval(samples).relative_half_width
    assert achieved < 0.01
    stop = Stop(reason=reason, target=0.01, achieved=achieved)
    timed = point(0.01)
    timed.series = [Series(name="device", samples=samples, stop=stop)]
    found = [
        doubt.message for doubt in summary.row([timed]).doubts if doubt.code == "too_few_samples"
    ]
    assert bool(found) == few
    assert all("several times too narrow" in detail for detail in found)


@pytest.mark.parametrize(
    ("wall", "metrics", "words"),
    [
        (
            0.015625,
            {"loop/host_seconds": 0.012},
            "the device idles 36% of the loop; the host needs 77% to issue the calls: neither sets the pace alone",
        ),
        (
            0.015625,
            {"data_share": 0.3, "loop/host_seconds": 0.012},
            "the device idles 36% of the loop; loading takes 30% of a call",
        ),
        (
            0.015625,
            {},
            "the device idles 36% of the loop; the host's time to issue the calls is unknown",
        ),
        (
            0.015625,
            {"loop/host_seconds": 0.0145},
            "the device idles 36% of the loop; the host needs 93% to issue the calls: it sets the pace",
        ),
        (
            0.015625,
            {"loop/host_seconds": 0.0266},
            "the device idles 36% of the loop; issuing the calls took 1.7 times the loop's time when it was measured",
        ),
        (0.012, {"loop/host_seconds": 0.011}, None),
    ],
)
def test_idle_device_in_the_loop_is_reported_with_its_cause(make_record, wall, metrics, words):
    measured = point(0.01, kind="device", noise=0)
    measured.series += point(wall, kind="throughput", noise=0).series
    measured.metrics = [Metric(name=name, value=value, unit="1") for name, value in metrics.items()]
    found = [doubt for row in summary.rows(make_record(points=[measured])) for doubt in row.doubts]
    assert [doubt.code for doubt in found] == (["device_idle"] if words else [])
    assert not words or words in found[0].message


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (2075.0, 2974.0, "2400 ± 18 %"),
        (1000.0, 6000.0, "2440 (1000 … 6000)"),
        (810.4, 7488.0, "2440 (810 … 7490)"),
        (2440.0, 2450.0, "2445 ± 0.2 %"),
        (None, None, "≈ 2440"),
    ],
)
def test_a_rate_has_its_interval(low, high, text):
    assert (
        wording.interval_or_about(Interval(value=2445.0, low=low, high=high), units.digits) == text
    )


@pytest.mark.parametrize(("pipelined", "is_said"), [(0.0108, False), (0.0115, True)])
def test_loop_slower_than_waiting_calls_is_a_change_of_pace(make_record, pipelined, is_said):
    measured = point(0.01, kind="latency", noise=0)
    measured.series += point(pipelined, kind="throughput", noise=0).series
    found = [doubt for row in summary.rows(make_record(points=[measured])) for doubt in row.doubts]
    assert ("pace_changed" in [doubt.code for doubt in found]) is is_said
    assert not is_said or "11.5 ms in the pipelined loop, but 10 ms" in found[-1].message


@pytest.mark.parametrize(
    ("loading", "words"),
    [
        (0.0, "the host needs 100% to issue the calls: it sets the pace"),
        (0.6, "loading takes 60% of a call"),
    ],
)
def test_loop_with_an_idle_device_has_one_diagnostic_with_cause(make_record, loading, words):
    measured = point(0.01, kind="device")
    measured.series += point(0.02, kind="throughput").series
    shares = {"data_share": (loading, "1"), "loop/host_seconds": (0.0202, "seconds")}
    measured.metrics = [
        Metric(name=name, value=value, unit=unit) for name, (value, unit) in shares.items()
    ]
    old = {
        "code": "launch_bound",
        "detail": "the device is busy 50% of the loop",
        "remedy": "a larger batch",
    }
    measured.doubts = [msgspec.convert(old, Diagnostic)]
    [doubt] = [
        doubt for row in summary.rows(make_record(points=[measured])) for doubt in row.doubts
    ]
    assert doubt.code == "device_idle"
    assert doubt.message.endswith(words)


@pytest.mark.parametrize("code", [None, "device_idle"])
def test_speedup_of_an_idle_device_is_named_device_speedup(make_record, code):
    measured = point(0.01, kind="device")
    measured.metrics = [Metric(name="algorithm/speedup_over_default", value=1.2, unit="1")]
    measured.doubts = (
        [diagnostics.make(code, idle=0.5, of_mean="", cause="launches", advice="larger batch_size")]
        if code
        else []
    )
    record = make_record(points=[measured])
    notes = overview.metrics(Analysis.of(record)).notes
    assert any("a loop that leaves it idle gains less" in note for note in notes) is (
        code is not None
    )
    assert not any("first process" in note for note in notes)
    other = point(0.0101, kind="device", replicate=1)
    several = make_record(points=[measured, other])
    assert any("first process" in note for note in overview.metrics(Analysis.of(several)).notes)


def raced(default, **facts):
    """What a process has of a layer that it raced: torch's choice takes so many times as long as the chosen engine."""
    times = {
        name: {"seconds": seconds, "seconds_low": 0.999 * seconds, "seconds_high": 1.001 * seconds}
        for name, seconds in (("cudnn.fft", 1.0), ("default", default))
    }
    seconds = {name: time["seconds"] for name, time in times.items()}
    race = {
        "which": "forward",
        "selected": "cudnn.fft",
        "launching": "captured",
        "seconds": seconds,
    }
    return {
        "layers": [{"name": "conv", "passes": [{**race, "races": {"captured": times}, **facts}]}]
    }


def of_processes(workspaces, promised, **facts):
    """A point by `fastest` of several processes, of which the first alone compares the whole model."""
    points = [point(0.01, kind="device", replicate=number) for number in range(len(workspaces))]
    for one, workspace, ratio in zip(points, workspaces, promised, strict=True):
        one.metrics = [Metric(name="algorithm/workspace_peak_bytes", value=workspace, unit="bytes")]
        one.facts["algorithm"] = raced(ratio, **(facts if one.key.replicate else {}))
    for name, value in (("speedup", 1.1), ("promised_speedup", promised[0])):
        metric = Metric(
            name=f"algorithm/{name}_over_default", value=value, low=value, high=value, unit="1"
        )
        points[0].metrics.append(metric)
    return points


def test_cycles_are_those_of_the_device_time_of_all_processes(make_record):
    points = of_processes([3.0, 3.0], [1.2, 1.2])
    for point, cycles in zip(points, (4e6, 9e6), strict=True):
        point.metrics.append(
            Metric(name="device/cycles_per_call", value=cycles, unit="1", estimated=True)
        )
    [row] = summary.rows(make_record(points=points))
    assert row.metric("device/cycles_per_call").value == pytest.approx(6e6)


def test_workspace_and_promised_speedups_cover_all_processes(make_record):
    record = make_record(points=of_processes([None, 3.0, 7.0], [1.2, 1.3, 1.25]))
    rows = summary.rows(record)
    value = {metric.name.removeprefix("algorithm/"): metric for metric in rows[0].metrics}
    assert value["workspace_peak_bytes"].value == 7.0
    assert value["speedup_over_default"].value == 1.1
    promised = value["promised_speedup_over_default"]
    assert promised.value == pytest.approx((1.2 * 1.3 * 1.25) ** (1 / 3))
    assert promised.low < 1.2 < 1.3 < promised.high
    [note] = [
        note for note in overview.metrics(Analysis.of(record)).notes if "first process" in note
    ]
    assert note.startswith("speedups, but for the promised ones, are of the first process")


def test_cached_race_in_other_processes_counts_once(make_record):
    [row] = summary.rows(
        make_record(points=of_processes([3.0, 3.0], [1.2, 1.2], kept_since="2026-01-01"))
    )
    promised = row.metric("algorithm/promised_speedup_over_default")
    assert (promised.value, promised.low, promised.high) == (1.2, 1.2, 1.2)


def test_model_speedups_are_pooled_if_every_process_has_them(make_record):
    points = of_processes([3.0, 3.0], [1.2, 1.3])
    points[1].metrics.append(Metric(name="algorithm/speedup_over_default", value=1.2, unit="1"))
    record = make_record(points=points)
    rows = summary.rows(record)
    speedup = rows[0].metric("algorithm/speedup_over_default")
    assert speedup.value == pytest.approx((1.1 * 1.2) ** 0.5)
    assert not any("first process" in note for note in overview.metrics(Analysis.of(record)).notes)


def test_promised_speedups_are_not_excepted_where_there_are_none(make_record):
    """Of two speedups each process has the first, and one process the second."""
    names = ("algorithm/speedup_over_default", "algorithm/captured_speedup_over_default")
    points = [point(0.01, replicate=number) for number in range(2)]
    for number, each in enumerate(points):
        each.metrics += [Metric(name=name, value=1.1, unit="1") for name in names[: 2 - number]]
    record = make_record(points=points)
    [note] = [
        note for note in overview.metrics(Analysis.of(record)).notes if "first process" in note
    ]
    assert "promised" not in note


def test_a_speedup_that_is_missing_is_of_no_process(make_record):
    points = [point(0.01, replicate=number) for number in range(2)]
    points[0].metrics.append(
        Metric(name="algorithm/speedup_over_default", value=None, unit="1", reason="no time")
    )
    record = make_record(points=points)
    assert not any("first process" in note for note in overview.metrics(Analysis.of(record)).notes)


@pytest.mark.parametrize(
    ("value", "width", "text"), [(1.0425, 0.0008, "1.0425 ± 0.08 %"), (1.0425, 0.2, "1.04 ± 19 %")]
)
def test_a_metric_has_the_digits_that_its_interval_supports(value, width, text):
    metric = Metric(
        name="algorithm/speedup_over_default",
        value=value,
        low=value - width,
        high=value + width,
        unit="1",
    )
    assert wording.metric_text(metric) == text


@pytest.mark.parametrize(
    ("facts", "is_raised"),
    [
        ({}, True),
        ({"clock_hertz": {"device": [1.98e9, 1.46e9]}, "clock_noise": {"device": 0.0005}}, True),
        ({"clock_hertz": {"device": [1.98e9, 1.46e9]}, "clock_noise": {"device": 0.055}}, False),
    ],
)
def test_a_stored_clock_warning_is_judged_again_by_its_readings(make_record, facts, is_raised):
    points = [point(0.01, kind="device"), point(0.01, kind="device", replicate=1)]
    points[1].facts = facts
    points[1].doubts = [
        diagnostics.make(
            "clock_moved", change=0.26, states="1979 MHz after 89%, 1458 MHz after 11%"
        )
    ]
    [row] = summary.rows(make_record(points=points))
    assert [doubt.code for doubt in row.doubts if doubt.code == "clock_moved"] == [
        "clock_moved"
    ] * is_raised
