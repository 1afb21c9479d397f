from __future__ import annotations

import io
import shlex
import subprocess

import pytest

from perfexp.records import profile_summary
from perfexp.records.analysis import Analysis
from perfexp.records.diagnostics import Diagnostic, make
from perfexp.records.grid import WIDTH, Column, Grid
from perfexp.records.record import Key, Metric, Point, Status
from perfexp.report import markdown
from perfexp.report.console import Console
from perfexp.report.sections import sections
from tests.support.builders import Builder


def test_it_says_what_was_measured_where_and_by_what(build: Builder) -> None:
    text = markdown.markdown(Analysis.of(build.record(build.point())))
    for part in (
        "resnet50",
        "Example CPU",
        "torch 2.11.0",
        "0123abc with uncommitted changes",
        "ms ± ",
    ):
        assert part in text


@pytest.mark.parametrize(
    "command",
    [
        ["clean", "--yes", "/home"],
        ["model=x", "ui"],
        ["model=a\\'\"; touch x #"],
        ["model=a\u3164b"],
        ["--help"],
    ],
)
def test_a_command_that_is_no_measurement_is_not_shown(command, make_record) -> None:
    text = markdown.markdown(Analysis.of(make_record(command=command)))
    assert "its command can't be shown" in text
    assert command[-1] not in text


_MEASURING = "python -m perfexp model=x"


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        (f"nsys profile --trace=cuda {_MEASURING} 'hydra.mode=RUN x'", True),
        (f"nsys profile --trace=cuda {_MEASURING}; rm -rf x", False),
        (f"nsys profile rm -rf x {_MEASURING}", False),
        ("nsys profile python -c 1", False),
        (f"nsys profile {_MEASURING} clean", False),
        (f"ncu {_MEASURING}", False),
        ("nsys profile 'python", False),
    ],
)
def test_only_a_profilers_command_is_shown_as_one(line, is_shown, make_record) -> None:
    key = Key(phase="inference_profile", input_size=[224, 224], batch_size=1, precision="fp32")
    point = Point(key=key, status=Status.OK)
    point.facts["profile"] = {"profiler": "nvtx", "commands": {"nsys": line}}
    record = make_record()
    record.points.append(point)
    assert profile_summary.commands(record) == [line] * is_shown


def test_percentile_without_an_interval_states_samples_needed(build: Builder) -> None:
    point = build.independent(n=80)
    assert "80 of 368 effective samples" in markdown.markdown(Analysis.of(build.record(point)))


def test_training_shows_its_phases_and_the_share_of_data(build: Builder) -> None:
    text = markdown.markdown(Analysis.of(build.record(build.training(), build.training(batch=2))))
    assert "## Phases\n\n| batch | data | forward | loss | backward | optimizer |" in text
    assert "| batch | data share of means |" in text
    assert "accuracy: the labels are random" in text
    alone = markdown.markdown(Analysis.of(build.record(build.training()))).partition(
        "## Phases\n\n"
    )[2]
    assert alone.startswith("- data: 2")


def test_loaded_clock_and_power_are_medians_over_processes(build: Builder) -> None:
    points = [
        build.point(kinds=("device", "latency"), replicate=replicate) for replicate in range(3)
    ]
    assert "Clock and power" not in markdown.markdown(Analysis.of(build.record(*points)))
    for point, megahertz in zip(points, (1740, 1755, 1770), strict=True):
        point.facts["loaded_sm_clock_hertz"] = {
            "device": [megahertz * 1e6] * 2,
            "device/graph": [1.98e9],
        }
    points[0].facts["loaded_power_watts"] = {"device": [690.0]}
    points[1].facts["loaded_power_watts"] = {"device": [142.0]}
    [short] = [series for series in points[1].series if series.name == "device"]
    short.samples = [seconds / 100 for seconds in short.samples]
    text = (
        markdown.markdown(Analysis.of(build.record(*points)))
        .partition("## Clock and power under load")[2]
        .partition("##")[0]
    )
    assert (
        "- 224 · batch 1 · device: SM clock 1755 MHz (6 readings), power 690 W (1 reading)\n"
        in text
    )
    assert "- 224 · batch 1 · device/graph: SM clock 1980 MHz (3 readings)\n" in text
    assert "no power" not in text
    del points[0].facts["loaded_power_watts"]
    text = (
        markdown.markdown(Analysis.of(build.record(*points)))
        .partition("## Clock and power under load")[2]
        .partition("##")[0]
    )
    assert (
        "SM clock 1755 MHz (6 readings), no power, since the device worked for less than 1 s"
        in text
    )


def test_first_predictions_diagnostics_and_failures_are_reported(build: Builder) -> None:
    doubt = Diagnostic(code="busy_host", message="load average 3.1", help="end other work")
    note = Diagnostic(code="too_few_samples", message="5 samples", help="use more")
    record = build.record(
        build.point(), build.failed(size=512), build.first_prediction(), doubts=[doubt, note]
    )
    text = markdown.markdown(Analysis.of(record))
    assert (
        "3.30 s = process 100 ms + imports 2.50 s + context 10.0 ms + weights 400 ms + first call 290 ms"
        in text
    )
    assert (
        "## Diagnostics\n\n- warning: load average 3.1 (busy\\_host); help: end other work\n"
        in text
    )
    assert "\n- note: 5 samples (too\\_few\\_samples); help: use more\n" in text
    assert "inference · 512 · batch 1 · fp32: oom: no memory left" in text


def test_a_diagnostic_has_a_line_for_each_help_that_it_needs(build: Builder) -> None:
    points = [build.point(size=size) for size in (224, 256, 288)]
    for point, difference, remedy in zip(points, (-0.08, 0.09, 0.43), ("a", "a", "b"), strict=True):
        times = {"profiled_ms": 5.0, "how": "with stamps", "clean_ms": 7.0, "details": ""}
        point.doubts.append(make("layers_disagree", difference=difference, advice=remedy, **times))
    text = markdown.markdown(Analysis.of(build.record(*points)))
    call = "a call takes 5 ms with stamps, 7 ms without profiling"
    first = f"256, the worst of 2 measurements: {call} (+9.0%) (-8.0% to +9.0% over all) (layers\\_disagree); help: a"
    assert f"warning: {first}" in text
    assert f"warning: 288: {call} (+43.0%) (layers\\_disagree); help: b" in text


@pytest.mark.parametrize(
    ("backend", "told"),
    [("nccl", "2 × Example CPU @ 2.00GHz"), ("gloo", "Example CPU @ 2.00GHz (2 ranks)")],
)
def test_devices_and_ranks_that_share_one_are_counted(
    build: Builder, backend: str, told: str
) -> None:
    record = build.record(build.point())
    record.environment = {
        **record.environment,
        "ranks": {"backend": backend, "devices": ["a", "b"]},
    }
    assert told in markdown.markdown(Analysis.of(record))


def test_the_command_can_be_pasted(build: Builder) -> None:
    record = build.record(build.point())
    assert "    python -m perfexp model=resnet50 'input_size=[224,256]'\n" in markdown.markdown(
        Analysis.of(record)
    )


def test_a_long_command_is_narrow_and_still_the_same_to_a_shell() -> None:
    words = [
        "model=resnet50",
        "",
        f"data.root=/{'long/' * 40}",
        "algorithm.layers={conv1:fft, conv2:gemm}",
        "a'b",
        "x" * 68,
    ]
    block = markdown.code(shlex.join(words * 3)).splitlines()
    assert max(map(len, block)) <= WIDTH
    assert all(line.startswith("    ") for line in block)
    script = "\n".join(line[4:] for line in block)
    told = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {script}"], capture_output=True, text=True, check=True
    ).stdout
    assert told.splitlines() == words * 3


def test_unparsable_shell_command_is_shown_quoted() -> None:
    assert markdown.code("nsys 'profile") == "    'nsys '\"'\"'profile'\n"


def test_tables_are_narrow_and_other_figures_have_a_line_each(build: Builder) -> None:
    metrics = [
        Metric(name=f"group{number}/some_long_name", value=number + 0.5, unit="1")
        for number in range(28)
    ]
    text = markdown.markdown(Analysis.of(build.record(build.point(metrics=metrics))))
    assert "- group3/some\\_long\\_name: 3.50\n" in text
    sizes = [
        build.point(size=size, batch=batch, metrics=metrics)
        for size in (224, 256)
        for batch in (1, 8)
    ]
    sizes[0].metrics = [Metric(name="group0/some_long_name", value=7, unit="1")]
    text = markdown.markdown(
        Analysis.of(build.record(*sizes, *(build.training(size=size) for size in (224, 256))))
    )
    assert "| inference | 224 | 1 | 7.00 |" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(line) <= WIDTH, line
            assert line.count(" | ") < 6, line


def test_a_wide_key_takes_the_room_that_narrow_keys_leave() -> None:
    keys = [
        Column(title, [cell], is_key=True)
        for title, cell in (("layer", "layer4.0.conv2"), ("pass", "forward"))
    ]
    columns = [*keys, Column("point", ["batch " + 40 * "9"], is_key=True), Column("share", ["4 %"])]
    assert "| layer4.0.conv2 | forward | batch 999…999999999 | 4 % |" in Grid(columns).markdown()


def test_facts_of_the_device_are_words_with_units(build: Builder) -> None:
    device = {
        "logical_cores": 4,
        "memory_bytes": 2**34,
        "event_tick_seconds": 3.2e-8,
        "cache_bytes": 10**400,
    }
    text = markdown.markdown(
        Analysis.of(build.record(build.point(), environment={"device": device}))
    )
    assert (
        "\n- device logical cores: 4\n- device memory: 16.0 GiB\n- device event tick: 32 ns\n- device cache bytes: 1000"
        in text
    )


@pytest.mark.parametrize("accuracy", [0.05, None])
def test_meter_accuracy_is_stated_once_below_the_energies(
    build: Builder, accuracy: float | None
) -> None:
    points = [build.training(batch=8), build.training(batch=16)]
    for point in points:
        point.metrics.append(
            Metric(name="energy/per_call_joules", value=1.25, unit="joules", low=1.2, high=1.3)
        )
        if accuracy:
            point.metrics.append(Metric(name="energy/meter_accuracy", value=accuracy, unit="1"))
    text = markdown.markdown(Analysis.of(build.record(*points)))
    assert text.count("the scale of the board's meter is known to about ±5.0 %") == (
        1 if accuracy else 0
    )
    assert "meter\\_accuracy" not in text
    assert "1.25 J ± 4.0 %" in text


def test_a_long_name_of_a_layer_loses_its_middle() -> None:
    name = "backbone_" + "x" * 100 + ".conv2"
    column = Column(title="layer", cells=(name,), prose=True, is_key=True)
    head, _, line = (
        Grid(columns=(column, Column(title="p50", cells=("1 ms",)))).markdown().splitlines()
    )
    assert head == "| layer | p50 |"
    assert line.startswith("| backbone\\_xx")
    assert "…" in line
    assert line.endswith("x.conv2 | 1 ms |")
    assert len(line) <= WIDTH


def test_text_from_outside_can_not_become_markup(build: Builder) -> None:
    error = "<img src=x> | [a](http://b) `c`\n# title \x1b[31m"
    line = next(
        line
        for line in markdown.markdown(
            Analysis.of(build.record(build.failed(error=error)))
        ).splitlines()
        if "oom:" in line
    )
    assert "<img" not in line
    assert "\\[a\\](http://b) \\`c\\` \\# title" in line
    assert "\x1b" not in line


def test_a_record_without_points_says_so(build: Builder) -> None:
    assert "nothing was measured" in markdown.markdown(Analysis.of(build.record()))


def test_growth_and_process_sections_appear_only_if_needed(
    build: Builder,
) -> None:
    points = [
        build.point(0.01 * (size / 224) ** 2, size=size, replicate=replicate)
        for size in range(224, 513, 32)
        for replicate in (0, 1, 2)
    ]
    text = markdown.markdown(Analysis.of(build.record(*points)))
    assert "## Scaling with the input size\n\n- latency ≈ " in text
    assert "· (pixels / 512²)^" in text
    assert " spread | processes |\n" in text
    alone = markdown.markdown(Analysis.of(build.record(build.point())))
    assert "Scaling" not in alone
    assert "spread" not in alone


def test_a_time_that_does_not_fit_the_sizes_is_told(build: Builder) -> None:
    points = [
        build.point(0.01 * (size / 224) ** 2 * (1.5 if size == 352 else 1), size=size)
        for size in range(224, 513, 32)
    ]
    text = markdown.markdown(Analysis.of(build.record(*points)))
    assert "note: 352: the time is 1.50 times that of the fit over 10 sizes (tolerated: ±" in text
    assert "(scaling\\_unexpected); help: measure this size" in text


def test_report_has_console_sections_with_plots_below_the_first(
    build: Builder,
) -> None:
    record = build.record(build.point(), build.first_prediction())
    text = markdown.markdown(Analysis.of(record), ["time.png", "a b.png"])
    assert text.startswith(
        "# resnet50 · inference · 224 · batch 1 · fp32 · threads=2 · Example CPU @ 2.00GHz\n\n- latency"
    )
    assert "\n\n![time](time.png)\n![a b](a%20b.png)\n\n## Cold start\n" in text
    assert all(
        f"\n## {section.title.capitalize()}\n" in text
        for section in sections(Analysis.of(record))[1:]
        if section.title
    )
    assert "## Environment\n\n- status: ok\n" in text
    assert "    python -m perfexp model=resnet50 'input_size=[224,256]'\n" in text


def test_the_report_has_every_metric_of_every_point(build: Builder) -> None:
    points = [
        build.point(
            size=size,
            metrics=[
                *(
                    Metric(name=f"group{number}/some_long_name", value=number, unit="1")
                    for number in range(28)
                ),
                *(
                    Metric(name=f"varying/{letter}", value=size + place, unit="1")
                    for place, letter in enumerate("abc")
                ),
                Metric(name="memory/device_bytes", value=size * 2**20, unit="bytes"),
            ],
        )
        for size in range(100, 900, 100)
    ]
    text = markdown.markdown(Analysis.of(build.record(*points))).partition("## Other metrics")[2]
    assert text.startswith("\n\n- group0")
    assert "- group3/some\\_long\\_name: 3.00\n" in text
    assert "| size | varying/a | varying/b | varying/c | memory/device |" in text
    for size in range(100, 900, 100):
        assert f"| {size} | {size} | {size + 1} | {size + 2} | {size} MiB |" in text


def test_a_file_leaves_no_column_out(build: Builder) -> None:
    kinds = ("device", "latency", "throughput")
    doubts = [
        Diagnostic(code=code, message=code)
        for code in ("busy_host", "drift", "phases_disagree", "throttled")
    ]
    points = [
        build.point(0.01 * batch, batch=batch, n=400, kinds=kinds, doubts=doubts)
        for batch in (1, 8)
    ]
    out = io.StringIO()
    Console(out=out, verbose=True).results(Analysis.of(build.record(*points)))
    lines = out.getvalue().splitlines()
    [head] = [line for line in lines if "samples/s" in line and "memory" in line]
    for title in (
        "device p50 ± CI95",
        "latency p50 ± CI95",
        "latency p95",
        "latency p99",
        "remarks",
    ):
        assert title in head
    codes = "busy_host, pace_changed, throttled, drift, device_idle, phases_disagree"
    assert any(line.endswith(codes) for line in lines)
