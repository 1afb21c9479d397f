"""What is said of a sweep's runs."""

import io
import re
from pathlib import Path

import pytest

from perfexp.records import diagnostics, sweep_summary
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.record import Metric, Point, Status
from perfexp.report.console import Console
from perfexp.report.plots import sweep_plots
from perfexp.report.tables import flat, json_results
from tests.support.builders import Builder


def test_an_interrupted_run_has_neither_ended_nor_failed(build: Builder) -> None:
    axes = [{"batch_size": str(size)} for size in (1, 2, 4)]
    points = [build.point()], [build.failed()], [build.failed(Status.INTERRUPTED)]
    sweep, _ = build.sweep(axes, list(points))
    sweep.jobs = 4
    assert (
        sweep_summary.headline(sweep)
        == "sweep over resnet50 sweep: 2 of 4 runs ended, 1 oom, 1 interrupted"
    )
    sweep.children.pop()
    sweep.jobs = None
    assert sweep_summary.headline(sweep) == "sweep over resnet50 sweep: 2 runs ended, 1 oom"


def test_the_share_that_ran_as_asked_stands_beside_the_times(build: Builder) -> None:
    """Of a run by torch's own choice nothing was asked; a phase is a line of its own, and says what is proven."""

    def point(phase: str, share: float | None) -> Point:
        found = build.point(phase=phase)
        shares = {} if share is None else {"flops": share, "proven": proven[phase] * share}
        found.metrics += [
            Metric(name=f"algorithm/{name}_share", value=value, unit="1")
            for name, value in shares.items()
        ]
        return found

    proven = {"train": 0.0, "inference": 1.0}
    axes = [{"algorithm": name} for name in ("default", "gemm", "fft")]
    shares = (None, None), (1.0, 1.0), (0.19, 0.106)
    runs = [[point("train", one), point("inference", other)] for one, other in shares]
    grid = sweep_summary.runs(SweepAnalysis.of(*build.sweep(axes, runs)))
    cells = {column.title: column.cells for column in grid.columns}
    texts = ((100, "not verified"), (100, "proven"), (19, "not verified"), (11, "proven"))
    assert cells["algorithm coverage"] == (
        "",
        "",
        *(f"{share} %, {about}" for share, about in texts),
    )
    assert cells["phase"] == ("train", "inference") * 3
    assert cells["algorithm"] == ("default", "default", "gemm", "gemm", "fft", "fft")
    assert all(cells["samples/s"]), "of one point each"
    nothing_asked = sweep_summary.runs(SweepAnalysis.of(*build.sweep(axes[:1], runs[:1])))
    assert "algorithm coverage" not in [column.title for column in nothing_asked.columns]


def test_a_coverage_without_a_proof_in_its_record_says_so(build: Builder) -> None:
    """Versions before the proof of algorithms recorded the coverage alone."""
    points = [
        build.point(metrics=[Metric(name="algorithm/flops_share", value=share, unit="1")])
        for share in (1, 0)
    ]
    grid = sweep_summary.runs(
        SweepAnalysis.of(
            *build.sweep([{"algorithm": "gemm"}, {"algorithm": "fft"}], [[one] for one in points])
        )
    )
    cells = {column.title: column.cells for column in grid.columns}
    assert cells["algorithm coverage"] == ("100 %, proof not recorded", "0 %")


def test_processes_that_measured_one_point_say_its_time_together(build: Builder) -> None:
    axes = [{"model": "alexnet"}, {"model": "resnet18"}]
    processes = [
        build.point(seconds, replicate=index, noise=0)
        for index, seconds in enumerate((0.01, 0.0101, 0.0102))
    ]
    sizes = [build.point(0.02, noise=0), build.point(0.021, size=96, noise=0)]
    grid = sweep_summary.runs(SweepAnalysis.of(*build.sweep(axes, [processes, sizes])))
    cells = {column.title: column.cells for column in grid.columns}
    assert cells["latency p50 ± CI95"] == ("10.100 ms ± 0.01 %", "20.000 ms … 21.000 ms")


def test_runs_are_counted_by_the_status_that_they_have(build: Builder) -> None:
    axes = [{"algorithm": name} for name in ("gemm", "fft", "winograd")]
    points = [
        [build.point()],
        [build.failed(Status.UNSUPPORTED)],
        [build.failed(Status.UNSUPPORTED)],
    ]
    sweep, _ = build.sweep(axes, [*points])
    assert (
        sweep_summary.headline(sweep)
        == "sweep over resnet50 sweep: 3 of 3 runs ended, 2 unsupported"
    )


def test_what_all_runs_share_is_said_once(build: Builder) -> None:
    axes = [{"batch_size": "1"}, {"batch_size": "8"}]
    sweep, records = build.sweep(axes, [[build.point(batch=1)], [build.point(batch=8)]])
    same = "resnet50 · default · inference · 224 · fp32 · eager, threads=2"
    assert (
        sweep_summary.setting(list(map(Analysis.of, records))) == f"{same} on Example CPU @ 2.00GHz"
    )
    out = io.StringIO()
    Console(out=out, width=100).show_sweep(SweepAnalysis.of(sweep, records), Path("somewhere"))
    assert f"  {same} on Example CPU @ 2.00GHz" in out.getvalue().splitlines()
    records[1].environment = {"device": {"name": "NVIDIA X"}}
    assert sweep_summary.setting(list(map(Analysis.of, records))) == same
    records[1].plan |= {"algorithm": {"name": "fft"}, "execution": {"compile": "default"}}
    assert (
        sweep_summary.setting(list(map(Analysis.of, records)))
        == "resnet50 · inference · 224 · fp32"
    )
    assert sweep_summary.setting([]) == ""


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        (("decode", "decode"), "resnet50 · default · decode · 224"),
        (("decode", "inference"), "resnet50 · default · 224"),
    ],
)
def test_decoding_is_not_called_inference(
    build: Builder, modes: tuple[str, ...], words: str
) -> None:
    _, records = build.sweep([{"mode": mode} for mode in modes], [[build.point()]] * 2)
    for record, mode in zip(records, modes, strict=True):
        record.plan = record.plan | {"mode": {"name": mode}}
    assert sweep_summary.setting(list(map(Analysis.of, records))).startswith(words)


@pytest.mark.parametrize(
    ("counts", "backend", "words"),
    [
        ((1, 2), "nccl", "NVIDIA X or 2 × NVIDIA X"),
        ((4, 1, 2), "nccl", "NVIDIA X or 2 × NVIDIA X or 4 × NVIDIA X"),
        ((2, 2), "nccl", "2 × NVIDIA X"),
        ((1, 2), "gloo", "NVIDIA X or NVIDIA X (2 ranks)"),
    ],
)
def test_sweep_setting_names_device_counts_and_scope_of_figures(
    build: Builder, counts: tuple[int, ...], backend: str, words: str
) -> None:
    axes = [{"gpu.count": str(count)} for count in counts]
    _, records = build.sweep(axes, [[build.point()] for _ in counts])
    for record, count in zip(records, counts, strict=True):
        ranks = (
            {"ranks": {"devices": [{"name": "NVIDIA X"}] * count, "backend": backend}}
            if count > 1
            else {}
        )
        record.environment = {"device": {"name": "NVIDIA X"}, **ranks}
    assert sweep_summary.setting(list(map(Analysis.of, records))).endswith(
        f" on {words}; batch, times and memory are of one rank, samples/s and time per sample of all"
    )


@pytest.mark.parametrize(("slow_seconds", "raised"), [(0.15, True), (0.0601, False), (0.03, False)])
def test_two_devices_that_are_slower_than_one_are_a_warning(
    build: Builder, tmp_path: Path, slow_seconds: float, raised: bool
) -> None:
    axes = [{"gpu.count": count, "model": model} for model in ("a", "b") for count in ("1", "2")]
    seconds = (0.06, slow_seconds, 0.06, 0.06)
    sweep, records = build.sweep(axes, [[build.point(each, facts={})] for each in seconds])
    found = SweepAnalysis.of(sweep, records).slower
    assert list(found) == ([1] if raised else [])
    plot = sweep_plots.plot(SweepAnalysis.of(sweep, records))
    assert plot is not None
    assert ("multi_gpu_slower" in plot.caption.footer) is raised
    if raised:
        assert found[1].message == "2 devices together reach 0.40 of the samples/s of 1"
        assert (
            sweep_summary.raised(SweepAnalysis.of(sweep, records))[0]
            .lines[0]
            .startswith("warning: run 1 resnet50-1: 2 devices")
        )
        cells = {
            column.title: column.cells
            for column in sweep_summary.runs(SweepAnalysis.of(sweep, records)).columns
        }
        assert cells["remarks"][1] == "multi_gpu_slower"
    runs = json_results.of_sweep(SweepAnalysis.of(sweep, records), tmp_path)["runs"]
    assert ["multi_gpu_slower" in [one["code"] for one in run["diagnostics"]] for run in runs] == [
        False,
        raised,
        False,
        False,
    ]
    for lines in ([run["points"][0] for run in runs], flat.sweep(SweepAnalysis.of(sweep, records))):
        assert ["multi_gpu_slower" in line["doubts"].split(";") for line in lines] == [
            False,
            raised,
            False,
            False,
        ]


def test_scaling_compares_with_fewer_devices_names_worst_point(
    build: Builder,
) -> None:
    axes = [{"gpu.count": count} for count in ("1", "2", "4")]
    points = [
        [build.point(seconds, size=size) for size, seconds in zip((224, 256), times, strict=True)]
        for times in ((0.06, 0.06), (0.03, 0.03), (0.05, 0.1))
    ]
    found = SweepAnalysis.of(*build.sweep(axes, points)).slower
    assert {job: doubt.message for job, doubt in found.items()} == {
        2: "4 devices together reach 0.30 of the samples/s of 2"
    }


@pytest.mark.parametrize(
    ("calls", "scope"),
    [
        ((80, 80), ""),
        ((4, 80), " in these runs (undecided)"),
        ((4, 4), " in these runs (undecided)"),
    ],
)
def test_slower_devices_are_a_fact_only_if_both_have_an_interval(
    build: Builder, calls: tuple[int, int], scope: str
) -> None:
    points = [
        [build.point(seconds, n=n, facts={})]
        for seconds, n in zip((0.06, 0.15), calls, strict=True)
    ]
    found = SweepAnalysis.of(
        *build.sweep([{"gpu.count": "1"}, {"gpu.count": "2"}], [*points])
    ).slower
    assert found[1].message == f"2 devices together reach 0.40 of the samples/s of 1{scope}"


def test_sweep_run_is_one_line_unless_verbose_or_quiet(build: Builder) -> None:
    point = build.point(0.0624, n=400, noise=0.02)
    point.doubts.append(
        diagnostics.make("drift", relative=0.05, changes="the median moved by +5.0%")
    )
    for verbose, quiet in ((False, False), (True, False), (False, True)):
        out = io.StringIO()
        console = Console(out=out, err=io.StringIO(), verbose=verbose, quiet=quiet)
        console.show_in_sweep(
            Analysis.of(build.record(point)), Path("s/0"), number=3, runs=12, name="batch_size=4"
        )
        lines = out.getvalue().splitlines()
        if verbose or quiet:
            assert not lines[0].startswith("[3/12]")
            assert any("s/0" in line for line in lines)
        else:
            [line] = lines
            assert re.fullmatch(
                r"\[3/12\] batch_size=4: latency 62\.\d+ ms ± 0\.\d %, 1[56](\.\d+)? samples/s \(drift\)",
                line,
            )


def test_a_run_of_several_sizes_or_phases_is_a_line_too(build: Builder) -> None:
    sizes = [
        build.point(0.02, noise=0),
        build.point(0.021, size=96, noise=0),
        build.failed(size=512),
    ]
    assert (
        sweep_summary.in_a_line(Analysis.of(build.record(*sizes)))
        == "latency 20.000 ms … 21.000 ms (2 of 3 points, oom)"
    )
    phases = [build.point(0.02, noise=0, phase="train"), build.point(0.01, noise=0)]
    text = sweep_summary.in_a_line(Analysis.of(build.record(*phases)))
    assert re.fullmatch(
        r"train latency 20\.00+ ms .*, [\d.]+ samples/s; inference latency 10\.00+ ms .* samples/s",
        text,
    )
    assert sweep_summary.in_a_line(Analysis.of(build.record(build.failed()))) == "(oom)"


def test_sweep_lists_each_warning_once_with_worst_and_range(
    build: Builder,
) -> None:
    points = [build.point(batch=batch) for batch in (1, 2, 4)]
    for point, share in zip(points, (0.03, -0.08, 0.05), strict=True):
        point.doubts = [
            diagnostics.make("drift", relative=share, changes=f"the median moved by {share:+.1%}"),
            diagnostics.make("below_resolution", call_us=1, overhead_us=1),
        ]
    sweep, records = build.sweep(
        [{"batch_size": str(batch)} for batch in (1, 2, 4)], [[point] for point in points]
    )
    for record in records:
        record.doubts = [diagnostics.make("simulated")]
    raised = sweep_summary.raised(SweepAnalysis.of(sweep, records))
    assert [one.worst.code for one in raised if one.worst.is_note] == ["below_resolution"]
    lines = [line for one in raised if not one.worst.is_note for line in one.lines]
    assert [line.partition(":")[0] for line in lines] == ["warning", "  help"] * 2
    assert lines[0].startswith("warning: scripted device: every time in this record is simulated")
    assert lines[2].startswith("warning: run 1 · 224 · batch 2, the worst of 3 measurements: ")
    assert "(-8.0% to 5.0% over all)" in lines[2].replace("+", "")


def test_memory_and_energy_of_runs_of_one_point_have_columns(build: Builder) -> None:
    point, other = build.point(), build.point(batch=2)
    point.metrics = [
        Metric(name="memory/peak_bytes", value=2.0**20, unit="bytes"),
        Metric(name="energy/per_call_joules", value=1.5, unit="joules"),
    ]
    grid = sweep_summary.runs(
        SweepAnalysis.of(
            *build.sweep([{"batch_size": "1"}, {"batch_size": "2"}], [[point], [other]])
        )
    )
    cells = {column.title: column.cells for column in grid.columns}
    assert (cells["memory"][0], cells["energy/per_call"]) == ("1.00 MiB", ("1.50 J", ""))


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_breaks_no_name_of_a_sweep(
    build: Builder, width: int, is_terminal: bool
) -> None:
    axes = [
        {"model": model, "gpu.count": count}
        for model in ("fastscnn", "ocrnet_hrnetw48")
        for count in ("1", "2")
    ]
    points = [[build.point(seconds, facts={})] for seconds in (0.06, 0.15, 0.06, 0.15)]
    sweep, records = build.sweep(axes, points)
    out = io.StringIO()
    out.isatty = lambda: is_terminal  # type: ignore[method-assign]
    Console(out=out, err=out, width=width).show_sweep(SweepAnalysis.of(sweep, records), None)
    text = re.sub("\x1b\\[[0-9;]*m", "", out.getvalue())
    lines = text[text.index("  run ") :].splitlines()
    assert max(map(len, lines)) <= width
    assert [word for line in lines for word in line.split()].count("ocrnet_hrnetw48") == 2
    assert [line.split()[-1] for line in lines].count("multi_gpu_slower") == 2
