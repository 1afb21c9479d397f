"""What a record is in a tracking store, without one."""

import msgspec
import pytest

from perfexp.records.record import Metric, Status
from perfexp.records.summary import rows
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.summaries.analysis import Analysis
from perfexp.summaries.grid import WIDTH
from perfexp.tables.flat import CHART_POINTS, decimate
from perfexp.tracking import descriptions, payload, store
from tests.conftest import timed_point


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["ok"], "FINISHED"),
        (["oom", "ok", "unsupported", "oom_predicted"], "FINISHED"),
        (["oom", "oom"], "FAILED"),
        (["ok", "failed"], "FAILED"),
        (["ok", "timeout"], "FAILED"),
        ([], "FAILED"),
        (["oom", "ok", "interrupted"], "KILLED"),
        (["failed", "killed"], "KILLED"),
    ],
)
def test_run_is_finished_if_remeasuring_would_show_nothing_new(statuses, expected):
    assert payload.run_status([Status(status) for status in statuses]) == expected


@pytest.mark.parametrize(
    ("children", "ended", "expected"),
    [(1, None, "SCHEDULED"), (1, "2026-03-01T10:00:00+00:00", "KILLED"), (2, None, "FINISHED")],
)
def test_a_sweep_without_all_its_runs_is_not_finished(children, ended, expected):
    known = [
        SweepChild(job=job, name="", directory=str(job), status=Status.OK)
        for job in range(children)
    ]
    sweep = Sweep(
        uid="s", name="s", started="2026-03-01T10:00:00+00:00", ended=ended, jobs=2, children=known
    )
    assert payload.sweep_status(sweep) == expected


def test_decimation_keeps_the_extremes_and_the_order():
    samples = [float(index % 97) for index in range(5_000)]
    samples[1234], samples[4321] = -1.0, 1_000.0
    kept = decimate(samples)
    assert len(kept) <= CHART_POINTS
    assert {(1234, -1.0), (4321, 1_000.0)} <= set(kept)
    assert kept == sorted(kept)
    assert decimate([3.0, 1.0]) == [(0, 3.0), (1, 1.0)]


def test_samples_are_charted_for_a_single_point_only(make_record, tmp_path):
    one, many = (
        payload.of_run(Analysis.of(make_record(sizes=sizes, calls=900)), tmp_path)
        for sizes in ((224,), (224, 256))
    )
    assert 0 < sum(figure.name == "samples/latency_ms" for figure in one.figures) <= CHART_POINTS
    assert not [figure for figure in many.figures if figure.name.startswith("samples/")]


def test_the_times_of_figures_come_from_the_record_alone(make_record, tmp_path):
    first, second = (payload.of_run(Analysis.of(make_record()), tmp_path).figures for _ in range(2))
    assert first == second


def test_a_description_knows_whether_somebody_edited_it(make_record, tmp_path):
    note = payload.of_run(Analysis.of(make_record()), tmp_path).note
    assert store.is_unedited(note)
    assert not store.is_unedited(note.replace("224", "225"))
    assert not store.is_unedited("mine")
    assert not store.is_unedited("")


def test_a_description_starts_with_the_subject_and_the_figures(make_record, tmp_path):
    subject, _, figures = payload.of_run(Analysis.of(make_record()), tmp_path).note.partition(
        "\n\n"
    )
    assert subject.startswith("resnet50 · inference · 224")
    assert figures.startswith("- latency p50 ± CI95: 10.0 ms ±")
    failed = make_record(failing={224: Status.OOM})
    assert (
        payload.of_run(Analysis.of(failed), tmp_path)
        .note.partition("\n\n")[2]
        .startswith("- remarks: oom")
    )


def test_nothing_in_a_description_is_wider_than_a_page(make_record, tmp_path):
    metrics = [
        Metric(name=f"group{number}/some_long_name", value=number, unit="1") for number in range(28)
    ]
    record = make_record(
        sizes=(224, 256), batches=(1, 8), phases=("train", "inference"), metrics=metrics
    )
    record.environment["container"] = f"/{'folder_' * 20}"
    record.command = [f"data.root=/{'folder_' * 20}", *(f"seed={number}" for number in range(40))]
    for line in payload.of_run(Analysis.of(record), tmp_path).note.splitlines():
        if line.startswith(("|", "    ")):
            assert len(line) <= WIDTH, line
        assert max(map(len, line.replace("&#8203;", " ").split()), default=0) <= WIDTH, line


def test_a_long_word_breaks_beside_its_escapes():
    word = "\\_" * 30 + "&lt;" * 90
    broken = descriptions.breakable(word).split("&#8203;")
    assert broken == ["\\_" * 30 + "&lt;" * 30, "&lt;" * 60]


def test_all_tables_of_a_long_description_are_shortened():
    table = "\n".join(["| a |", "|---:|", *(f"| {number:05} |" for number in range(500))])
    text = descriptions.fitted(f"head\n\n{table}\n\n{table}\n\ntail", 3_000)
    assert len(text) <= 3_000
    assert text.count("more: see report.md") == 2
    assert text.endswith("tail")


def test_a_uid_from_a_file_cannot_change_a_query(make_record, tmp_path):
    identity = payload.of_run(Analysis.of(make_record(uid="' or 1=1 --`")), tmp_path).identity
    assert not set("'` ") & set(identity["perfexp.uid"])


def test_a_record_without_anything_is_still_a_run(make_record, tmp_path):
    bare = make_record(
        points=[], status=Status.FAILED, environment={}, plan={}, doubts=[], started="", ended=""
    )
    content = payload.of_run(Analysis.of(bare), tmp_path)
    assert content.status == "FAILED"
    assert content.tags["perfexp.status"] == "failed"


def test_growth_with_the_size_is_a_figure_at_the_largest_size(make_record, tmp_path):
    content = payload.of_run(
        Analysis.of(make_record(sizes=(224, 288, 352, 416, 512), batches=(1, 8))), tmp_path
    )
    names = (
        "exponent",
        "exponent_low",
        "exponent_high",
        "constant_ms",
        "growing_ms",
        "scatter_percent",
    )
    for batch, child in zip((1, 8), content.children[:2], strict=True):
        found = {
            figure.name: figure for figure in child.figures if figure.name.startswith("scaling/")
        }
        assert set(found) == {f"scaling/{name}" for name in names}
        assert found["scaling/exponent"].value == pytest.approx(1, abs=0.01)
        assert found["scaling/exponent"].step == 512
        assert found["scaling/growing_ms"].value == pytest.approx(
            10 * batch * (512 / 224) ** 2, rel=0.02
        )


def test_undetermined_growth_has_only_its_scatter_as_a_figure(make_record, tmp_path):
    content = payload.of_run(Analysis.of(make_record(sizes=(224, 288, 352, 416))), tmp_path)
    found = [figure.name for figure in content.figures if figure.name.startswith("scaling/")]
    assert found == ["scaling/scatter_percent"]
    assert (
        "scaling/growing_ms: 4 sizes are too few (5 at least)"
        in content.tags["perfexp.dropped_metrics"]
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(224, 224)], [0]),
        ([(224, 224), (256, 256)], [224, 256]),
        ([(256, 256), (224, 224)], [256, 224]),
        ([(224, 224), (256, 224)], [0, 1]),
        ([(512, 1024), (256, 512)], [0, 1]),
        ([(224, 224), (256, 256), (224, 224), (256, 256)], [224, 256]),  # of two processes
    ],
)
def test_the_step_is_the_width_in_a_sweep_over_square_sizes_only(
    sizes, expected, make_record, tmp_path
):
    points = [timed_point(size[0], 1, "inference") for size in sizes]
    for index, (point, size) in enumerate(zip(points, sizes, strict=True)):
        point.key = msgspec.structs.replace(
            point.key, input_size=size, replicate=sizes[:index].count(size)
        )
    content = payload.of_run(Analysis.of(make_record(points=points)), tmp_path)
    assert [
        figure.step for figure in content.figures if figure.name == "latency/p50_ms"
    ] == expected


def test_an_exponent_that_there_is_not_is_dropped_and_says_why(make_record, tmp_path):
    points = [timed_point(224, 1, "inference") for _ in range(5)]
    for index, point in enumerate(points):
        point.key = msgspec.structs.replace(point.key, input_size=(224 + 64 * index, 224))
    content = payload.of_run(Analysis.of(make_record(points=points)), tmp_path)
    assert not [figure for figure in content.figures if figure.name == "scaling/exponent"]
    assert (
        "scaling/exponent: the time does not grow with the size"
        in content.tags["perfexp.dropped_metrics"]
    )


def test_the_processes_of_a_point_make_one_figure(make_record, tmp_path):
    points = [timed_point(224, 1, "inference") for _ in range(3)]
    for index, point in enumerate(points):
        point.key = msgspec.structs.replace(point.key, replicate=index)
        point.series[0].samples = [sample * 1.02**index for sample in point.series[0].samples]
    content = payload.of_run(Analysis.of(make_record(points=points)), tmp_path)
    found = {
        figure.name: figure
        for figure in content.figures
        if figure.name.startswith(("latency/", "point/"))
    }
    assert {figure.step for figure in found.values()} == {0}
    assert found["latency/p50_ms"].value == pytest.approx(10 * 1.02, rel=1e-3)
    [row] = rows(make_record(points=points))
    assert found["latency/ci_half_width_percent"].value == 100 * row.time.median.relative_half_width
    assert found["point/spread_percent"].value == pytest.approx(2, abs=0.01)
    assert found["point/processes_count"].value == 3


@pytest.mark.parametrize(("few", "is_sent"), [(224, True), (256, False)])
def test_an_interval_is_sent_if_the_last_size_has_one(few, is_sent, make_record, tmp_path):
    record = make_record(sizes=(224, 256))
    record.points = [
        timed_point(size, 1, "inference", calls=2 if size == few else 80) for size in (224, 256)
    ]
    content = payload.of_run(Analysis.of(record), tmp_path)
    steps = {}
    for figure in content.figures:
        steps.setdefault(figure.name, []).append(figure.step)
    ends = {"latency/ci_low_ms", "latency/ci_high_ms", "latency/ci_half_width_percent"}
    ends |= {"throughput/samples_per_second_low", "throughput/samples_per_second_high"}
    assert steps["latency/p50_ms"] == steps["throughput/samples_per_second"] == [224, 256]
    assert {name: steps.get(name) for name in ends} == dict.fromkeys(
        ends, [256] if is_sent else None
    )
    assert ("latency/ci_low_ms" in content.tags.get("perfexp.dropped_metrics", "")) is not is_sent
