"""`perfexp export`: which runs it finds, what its tables hold, and its exit codes."""

import json
import subprocess
import sys

import jsonschema
import msgspec
import pandas as pd
import pytest

from perfexp import commands
from perfexp.comparison.measures import repeats
from perfexp.measuring.layers import Key as LayerKey
from perfexp.measuring.layers.table import Line, Spread
from perfexp.records.analysis import Analysis
from perfexp.records.record import Metric, Point, Status, SweepMembership, layers_key
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.report.tables import flat


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory of its own: that is where tables go."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_export_has_one_line_per_point_with_its_run_identity(
    make_record, leave_run, tmp_path, here, capsys
):
    first = make_record(uid="first", sizes=(224, 256))
    leave_run(first, tmp_path / "runs" / "a")
    leave_run(make_record(uid="second", phases=("train",)), tmp_path / "runs" / "deep" / "b")
    assert commands.run(["export", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "3 lines of 2 runs",
        f"wrote {here / 'export.csv'}",
        f"wrote {here / 'export.parquet'}",
    ]
    frame = pd.read_parquet(here / "export.parquet")
    assert tuple(frame)[: len(flat.IDENTITY)] == flat.IDENTITY
    assert list(frame["run_uid"]) == ["first", "first", "second"]
    line = frame.iloc[0]
    expected = {
        "folder": (tmp_path / "runs" / "a").as_posix(),
        "host": "node7",
        "device_name": "NVIDIA H200",
        "driver": "580.65",
        "torch": "2.11.0",
        "cudnn": "9.19",
        "git_commit": "0123abcd",
        "git_dirty": False,
        "perfexp_version": "0.1.0",
        "model": "resnet50",
        "phase": "inference",
        "started": pd.Timestamp("2026-03-01T10:00:00Z"),
    }
    assert {name: line[name] for name in expected} == expected


def test_exported_figures_equal_the_run_table_with_units(make_record, leave_run, tmp_path, here):
    record = make_record(sizes=(224, 256), phases=("train", "inference"))
    commands.run(["export", str(leave_run(record, tmp_path / "run"))])
    frame, known = pd.read_parquet(here / "export.parquet"), flat.overall(Analysis.of(record))
    for name in ("mean", "std", "min", "max"):
        assert name not in frame
        assert list(frame[f"{name}_ms"]) == [line[name] for line in known]
    assert list(frame["samples_per_second"]) == [line["samples_per_second"] for line in known]
    assert frame["phase_backward_ms"].isna().tolist() == [False, True, False, True]


def test_mlflow_table_types_numbers_booleans_times_and_nulls(
    make_record, leave_run, tmp_path, here
):
    record = make_record(sizes=(224, 256), failing={256: Status.OOM})
    commands.run(["export", str(leave_run(record, tmp_path / "run"))])
    frame = pd.read_parquet(here / "export.parquet")
    types = {
        name: str(frame[name].dtype)
        for name in ("n", "mean_ms", "git_dirty", "sweep_job", "input_width_pixels")
    }
    assert types == {
        "n": "Int64",
        "mean_ms": "float64",
        "git_dirty": "boolean",
        "sweep_job": "Int64",
        "input_width_pixels": "Int64",
    }
    assert isinstance(frame["started"].dtype, pd.DatetimeTZDtype)
    assert frame.loc[1, ["mean_ms", "n", "time_kind", "sweep_uid"]].isna().all()
    assert list(frame["status"]) == ["ok", "oom"]


def test_csv_and_parquet_hold_the_same(make_record, leave_run, tmp_path, here):
    commands.run(["export", str(leave_run(make_record(sizes=(224, 256)), tmp_path / "run"))])
    frame, table = pd.read_parquet(here / "export.parquet"), pd.read_csv(here / "export.csv")
    assert list(table) == list(frame)
    assert list(table["mean_ms"]) == list(frame["mean_ms"])
    assert list(table["git_dirty"]) == list(frame["git_dirty"])


def test_sizes_that_are_no_squares_have_a_height_and_a_width(
    make_record, leave_run, tmp_path, here
):
    record = make_record()
    record.points[0].key = msgspec.structs.replace(record.points[0].key, input_size=(512, 1024))
    commands.run(["export", str(leave_run(record, tmp_path / "run"))])
    line = pd.read_parquet(here / "export.parquet").iloc[0]
    assert (line["input_size"], line["input_height_pixels"], line["input_width_pixels"]) == (
        "512x1024",
        512,
        1024,
    )


def test_a_run_that_is_found_twice_counts_once_as_it_was_last(
    make_record, leave_run, tmp_path, here
):
    leave_run(make_record(uid="one", sizes=(224, 256)), tmp_path / "runs" / "a")
    earlier = make_record(uid="one", ended="2026-03-01T10:01:00+00:00")
    copied = leave_run(earlier, tmp_path / "runs" / "b")
    assert (
        commands.run(["export", str(tmp_path / "runs"), str(copied), str(copied / "record.json")])
        == 0
    )
    assert len(pd.read_parquet(here / "export.parquet")) == 2


def test_links_and_the_copies_of_a_store_are_not_followed(make_record, leave_run, tmp_path, here):
    leave_run(make_record(uid="mine"), tmp_path / "runs" / "a")
    leave_run(make_record(uid="copy"), tmp_path / "runs" / "mlartifacts" / "a")
    theirs = leave_run(make_record(uid="theirs"), tmp_path / "elsewhere")
    (tmp_path / "runs" / "link").symlink_to(theirs)
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "record.json").symlink_to(theirs / "record.json")
    assert commands.run(["export", str(tmp_path / "runs")]) == 0
    assert list(pd.read_parquet(here / "export.parquet")["run_uid"]) == ["mine"]


@pytest.fixture
def sweep(make_record, leave_run, tmp_path):
    """A sweep whose runs lie beside its folder, as those of a stage do; the last was refused."""
    axes = [
        {"batch_size": "1", "model": "a"},
        {"batch_size": "2", "model": "b"},
        {"batch_size": "4", "model": "=c"},
    ]
    summary = Sweep(uid="s", name="batch_size", started="2026-03-01T10:00:00+00:00", jobs=3)
    for job, values in enumerate(axes):
        error = "there is no such model" if job == 2 else None
        status = Status.FAILED if error else Status.OK
        directory = f"../stage/{job}"
        child = SweepChild(
            job=job, name=f"run{job}", directory=directory, status=status, axes=values, error=error
        )
        summary.children.append(child)
        if not error:
            membership = SweepMembership(uid="s", job=job, jobs=3, axes=values)
            leave_run(make_record(uid=f"run{job}", sweep=membership), tmp_path / "stage" / str(job))
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_bytes(summary.to_json())
    return tmp_path / "sweep"


def test_sweep_rows_have_axes_and_refused_runs_have_reasons(sweep, here):
    assert commands.run(["export", str(sweep)]) == 0
    frame = pd.read_parquet(here / "export.parquet")
    assert list(frame["sweep_job"]) == [0, 1, 2]
    assert list(frame["axis_batch_size"]) == [1, 2, 4]
    assert list(frame["axis_model"]) == ["a", "b", "=c"]
    assert list(frame["status"]) == ["ok", "ok", "failed"]
    assert frame.loc[2, "error"] == "there is no such model"
    assert frame.loc[2, ["run_uid", "mean_ms"]].isna().all()


def test_record_that_does_not_belong_to_the_sweep_is_left_out(
    sweep, make_record, leave_run, tmp_path, here
):
    leave_run(make_record(uid="other"), tmp_path / "stage" / "1")
    assert commands.run(["export", str(sweep)]) == 0
    assert list(pd.read_parquet(here / "export.parquet")["sweep_job"]) == [0, 2]


def test_spreadsheet_formula_is_escaped_only_in_csv(sweep, here):
    commands.run(["export", str(sweep)])
    assert list(pd.read_csv(here / "export.csv")["axis_model"]) == ["a", "b", "'=c"]


def test_a_damaged_record_is_told_and_the_others_are_exported(
    make_record, leave_run, tmp_path, here, capsys
):
    leave_run(make_record(), tmp_path / "runs" / "good")
    bad = leave_run(make_record(uid="bad"), tmp_path / "runs" / "bad")
    (bad / "record.json").write_text("{")
    assert commands.run(["export", str(tmp_path / "runs")]) == 1
    assert f"not exported: {bad / 'record.json'} is not a perfexp record" in capsys.readouterr().err
    assert len(pd.read_parquet(here / "export.parquet")) == 1


def test_nothing_to_export_is_the_users_error(make_record, leave_run, tmp_path, here, capsys):
    good = leave_run(make_record(), tmp_path / "good")
    for wrong in (tmp_path / "gone", here):
        assert commands.run(["export", str(good), str(wrong)]) == 2
        assert "There is no record.json" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_nothing_is_overwritten_unless_it_is_asked_for(
    make_record, leave_run, tmp_path, here, capsys
):
    run = str(leave_run(make_record(), tmp_path / "run"))
    (here / "export.parquet").write_text("mine")
    assert commands.run(["export", run]) == 2
    assert "export.parquet would be overwritten" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["export.parquet"]
    assert commands.run(["export", run, "--force"]) == 0
    assert len(pd.read_parquet(here / "export.parquet")) == 1


def test_missing_folder_is_reported_before_an_existing_export(tmp_path, here, capsys):
    (here / "export.csv").write_text("mine")
    assert commands.run(["export", str(tmp_path / "nowhere")]) == 2
    assert "There is no record.json" in capsys.readouterr().err


def test_one_line_of_one_run_is_said_so(make_record, leave_run, tmp_path, capsys):
    assert commands.run(["export", str(leave_run(make_record(), tmp_path / "run"))]) == 0
    assert capsys.readouterr().out.startswith("1 line of 1 run\n")


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (["--format", "csv"], ["export.csv"]),
        (["--out", "t.parquet"], ["t.parquet"]),
        (["--out", "t", "--format", "parquet"], ["t.parquet"]),
        (["--out", "t.csv", "--format", "both"], ["t.csv", "t.parquet"]),
        (["--out", "t.csv", "--samples"], ["t.csv", "t_samples.csv"]),
    ],
)
def test_the_format_is_what_is_asked_for_or_what_the_name_says(
    options, files, make_record, leave_run, tmp_path, here
):
    assert commands.run(["export", str(leave_run(make_record(), tmp_path / "run")), *options]) == 0
    assert sorted(path.name for path in here.iterdir()) == files


@pytest.mark.parametrize(
    "options", [["--out", "t.xlsx"], ["--out", "t.csv", "--format", "parquet"]]
)
def test_a_name_that_can_not_be_is_the_users_error(
    options, make_record, leave_run, tmp_path, here, capsys
):
    assert commands.run(["export", str(leave_run(make_record(), tmp_path / "run")), *options]) == 2
    assert "--out" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_every_raw_sample_has_a_line(make_record, leave_run, tmp_path, here):
    record = make_record(sizes=(224, 256), phases=("train",))
    assert commands.run(["export", str(leave_run(record, tmp_path / "run")), "--samples"]) == 0
    frame = pd.read_parquet(here / "export_samples.parquet")
    series = [series for point in record.points for series in point.series]
    assert len(frame) == sum(len(one.samples) for one in series)
    one = frame[(frame["input_height_pixels"] == 256) & (frame["series"] == "latency")]
    assert list(one["seconds"]) == record.points[1].series[0].samples
    assert list(one["sample_index"]) == list(range(85))
    assert list(one["is_warmup"]) == [True] * 5 + [False] * 80
    assert set(one["run_uid"]) == {record.uid}
    assert "ttfp/imports" in set(frame["series"])


def test_samples_in_csv_are_the_same_and_defused(make_record, leave_run, tmp_path, here):
    record = make_record(uid="=1+1")
    commands.run(["export", str(leave_run(record, tmp_path / "run")), "--samples"])
    frame, table = (
        pd.read_parquet(here / "export_samples.parquet"),
        pd.read_csv(here / "export_samples.csv"),
    )
    assert list(table["seconds"]) == list(frame["seconds"])
    assert list(table["is_warmup"]) == list(frame["is_warmup"])
    assert set(table["run_uid"]) == {"'=1+1"}


def test_runs_without_a_point_or_a_sample_are_exported_too(make_record, leave_run, tmp_path, here):
    record = make_record(sizes=(), status=Status.KILLED)
    record.points = []
    assert commands.run(["export", str(leave_run(record, tmp_path / "run")), "--samples"]) == 0
    assert list(pd.read_parquet(here / "export.parquet")["status"]) == ["killed"]
    assert len(pd.read_parquet(here / "export_samples.parquet")) == 0


def test_a_metric_does_not_take_the_place_of_a_fact(make_record, leave_run, tmp_path, here):
    record = make_record(metrics=[Metric(name="host", value=1.0, unit="1")])
    commands.run(["export", str(leave_run(record, tmp_path / "run"))])
    assert list(pd.read_parquet(here / "export.parquet")["host"]) == ["node7"]


def test_its_help_does_not_import_pandas():
    script = (
        "import sys; from perfexp import commands; code = commands.run(['export', '--help'])\n"
        "assert code == 0 and not {'pandas', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def with_layers(record, seconds, *, algorithm="default", status=None, ran=None):
    """The record with the layers of its first point: the model, a block, its convolution and its addition.

    Args:
        record: of a run.
        seconds: of the convolution and of the addition.
        algorithm: that was asked for.
        status: of the convolution's pass; None where no algorithm was.
        ran: whose kernels the convolution's were; None where nobody knows.
    """

    def line(path, operation, kind, taken):
        key = LayerKey(path=path, call=0, operation=operation, kind=kind, which="forward")
        nothing = Spread(mean=0.0, median=0.0, low=None, high=None)
        spread = Spread(mean=taken, median=taken, low=None, high=None)
        return msgspec.to_builtins(
            Line(key=key, kind=kind, seconds=spread, gap_seconds=nothing, share=0.5)
        )

    lines = [
        line("", None, "Net", 1e-5),
        line("block", None, "Block", 1e-5),
        line(None, None, "optimizer", 1e-5),
    ]
    lines += [line("block.conv1", None, "Conv2d", seconds[0]), line("block", 0, "add", seconds[1])]
    point = record.points[0]
    facts = {"layers": {"method": "clock", "call_seconds": [1e-3], "lines": lines}}
    record.points.append(Point(key=layers_key(point.key), status=Status.OK, facts=facts))
    record.plan["algorithm"] = {"name": algorithm}
    if ran is not None:
        lines[-2]["ran"] = ran
    if status is not None:
        selected = "default" if status == "fallback" else f"cudnn.{algorithm}"
        passes = [{"which": "forward", "selected": selected, "status": status}]
        point.facts["algorithm"] = {"layers": [{"name": "block.conv1", "passes": passes}]}
    return record


@pytest.fixture
def exported_layers(make_record, leave_run, tmp_path, here):
    """A function that exports runs of some algorithms, named with what `with_layers` takes."""

    def export(**runs):
        for algorithm, (seconds, status, *ran) in runs.items():
            told = {"algorithm": algorithm, "status": status, "ran": ran[0] if ran else None}
            record = with_layers(make_record(uid=algorithm), seconds, **told)
            leave_run(record, tmp_path / "runs" / algorithm)
        assert commands.run(["export", str(tmp_path / "runs"), "--layers"]) == 0
        return pd.read_parquet(here / "export_layers.parquet").set_index(["algorithm", "layer"])

    return export


def test_layers_are_exported_with_the_winner_of_each(exported_layers):
    frame = exported_layers(
        gemm=((2e-3, 1e-3), "ok"), fft=((1e-3, 4e-3), "unproven"), default=((3e-3, 2e-3), None)
    )
    for algorithm, ratio in (("gemm", 2), ("fft", 1), ("default", 3)):
        assert frame.loc[(algorithm, "block.conv1"), "fastest_algorithm"] == "fft"
        assert frame.loc[(algorithm, "block.conv1"), "p50_over_fastest"] == pytest.approx(ratio)
    assert set(frame["run_uid"]) == {"gemm", "fft", "default"}
    assert len(pd.read_csv("export_layers.csv")) == 15


@pytest.mark.parametrize("status", ["fallback", "substituted"])
def test_what_an_algorithm_left_to_another_is_never_the_fastest(status, exported_layers):
    frame = exported_layers(gemm=((1e-3, 1e-3), status), default=((2e-3, 2e-3), None))
    assert set(frame.loc[(slice(None), ["block.conv1", "block.add"]), "fastest_algorithm"]) == {
        "default"
    }
    assert frame.loc["gemm", "p50_over_fastest"].isna().all()


@pytest.mark.parametrize(("ran", "winner"), [("direct", "default"), ("fft or gemm", "gemm")])
def test_layer_with_foreign_kernels_is_never_the_fastest(ran, winner, exported_layers):
    frame = exported_layers(gemm=((1e-3, 1e-3), "ok", ran), default=((2e-3, 2e-3), None))
    assert frame.loc[("gemm", "block.conv1"), "fastest_algorithm"] == winner
    assert frame.loc[("gemm", "block.conv1"), "ran"] == ran


def test_layer_that_no_algorithm_computed_has_no_fastest(exported_layers):
    frame = exported_layers(gemm=((1e-3, 1e-3), "fallback"), fft=((2e-3, 2e-3), "ok"))
    assert frame.loc[("gemm", "block.conv1"), "fastest_algorithm"] == "fft"
    assert frame.loc[(slice(None), "block.add"), "fastest_algorithm"].isna().all()


def test_the_model_and_modules_around_others_have_no_winner(exported_layers):
    frame = exported_layers(gemm=((1e-3, 1e-3), "ok"), default=((2e-3, 2e-3), None))
    assert frame.loc[(slice(None), ["Net", "block", "optimizer"]), "fastest_algorithm"].isna().all()
    assert frame.loc[(slice(None), ["Net", "block", "optimizer"]), "p50_over_fastest"].isna().all()


def test_an_algorithm_that_is_alone_has_not_won(exported_layers):
    frame = exported_layers(gemm=((1e-3, 1e-3), "ok"))
    assert frame["fastest_algorithm"].isna().all()
    assert frame["p50_over_fastest"].isna().all()


def test_runs_without_layers_leave_no_table_of_them_and_say_so(
    make_record, leave_run, tmp_path, here, capsys
):
    assert (
        commands.run(["export", str(leave_run(make_record(), tmp_path / "run")), "--layers"]) == 0
    )
    assert "probes.layers=true" in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["export.csv", "export.parquet"]


def test_folders_of_the_table_are_made(make_record, leave_run, tmp_path, here):
    assert (
        commands.run(
            ["export", str(leave_run(make_record(), tmp_path / "run")), "--out", "a/b/t.csv"]
        )
        == 0
    )
    assert (here / "a" / "b" / "t.csv").is_file()


def test_an_interrupted_run_is_exported_once_it_is_resumed(tmp_path, capsys):
    (tmp_path / "run" / "details").mkdir(parents=True)
    (tmp_path / "run" / "details" / "plan.yaml").write_text("command: [model=fake]\n")
    assert commands.run(["export", str(tmp_path / "run")]) == 2
    assert f"perfexp resume={tmp_path / 'run'} measures the rest" in capsys.readouterr().err


# Dashboards

#: The example in Bencher's reference, and its JSON Schema, https://bencher.dev/docs/reference/bencher-metric-format.
BENCHER_EXAMPLE = {
    "benchmark_name": {
        "latency": {"value": 88.0, "lower_value": 87.42, "upper_value": 88.88},
        "throughput": {"value": 5.55, "lower_value": 3.14, "upper_value": 6.30},
    },
    "/bin/sh -c ./my_build_script.sh": {"build-time": {"value": 87.0}},
    "my_binary": {"file-size": {"value": 42.0}},
}
METRIC = {
    "type": "object",
    "properties": {name: {"type": "number"} for name in ("value", "lower_value", "upper_value")},
    "required": ["value"],
}
BENCHER_SCHEMA = {
    "type": "object",
    "patternProperties": {".+": {"type": "object", "patternProperties": {".+": METRIC}}},
}


#: Example entries of https://github.com/benchmark-action/github-action-benchmark, for its tool customSmallerIsBetter.
ACTION_EXAMPLE = [
    {"name": "My Custom Smaller Is Better Benchmark - CPU Load", "unit": "Percent", "value": 50},
    {
        "name": "My Custom Smaller Is Better Benchmark - Memory Used",
        "unit": "Megabytes",
        "value": 100,
        "range": "3",
        "extra": "Value for Tooltip: 25\nOptional Num #2: 100\nAnything Else!",
    },
]
ACTION_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "unit": {"type": "string"},
            "value": {"type": "number"},
            "range": {"type": "string"},
            "extra": {"type": "string"},
        },
        "required": ["name", "unit", "value"],
        "additionalProperties": False,
    },
}
PLACE = "resnet50 · default · fp32 · eager · NVIDIA H200 · inference · 224 · batch 1"


@pytest.fixture
def exported(make_record, leave_run, tmp_path, here):
    """Export two runs of the same point for a dashboard; the later one counts."""

    def export(form, *options):
        early = make_record(uid="early", ended="2026-03-01T10:01:00+00:00", sizes=(224, 256))
        for point in early.points:
            point.metrics = []
        leave_run(early, tmp_path / "runs" / "b")
        leave_run(make_record(uid="late"), tmp_path / "runs" / "a")
        code = commands.run(["export", str(tmp_path / "runs"), "--format", form, *options])
        [file] = here.iterdir()
        return code, json.loads(file.read_text(encoding="utf-8")), file.name

    return export


def test_bencher_gets_its_format_with_our_intervals(exported, make_record):
    code, document, name = exported("bencher")
    assert (code, name) == (0, "export.json")
    for one in (BENCHER_EXAMPLE, document):
        jsonschema.Draft7Validator(BENCHER_SCHEMA).validate(one)
    assert set(document) == {PLACE, PLACE.replace("224", "256")}
    figures = repeats(Analysis.of(make_record()))
    [latency] = [one["latency"].interval for one in figures.values()]
    found = document[PLACE]["latency"]
    assert found == pytest.approx(
        {
            "value": 1e9 * latency.value,
            "lower_value": 1e9 * latency.low,
            "upper_value": 1e9 * latency.high,
        }
    )
    assert document[PLACE]["memory (bytes)"]["value"] > 1e8
    assert "memory (bytes)" not in document[PLACE.replace("224", "256")]
    assert {"throughput", "p95 (seconds)"} <= document[PLACE].keys()


def test_models_with_one_name_have_their_folders(make_record, leave_run, tmp_path):
    for name in ("narrow", "wide"):
        made = make_record(uid=name)
        made.plan["model"] = {"name": "mine:Net", "width": len(name)}
        leave_run(made, tmp_path / "runs" / name)
    code = commands.run(
        ["export", str(tmp_path / "runs"), "--format", "bencher", "--out", str(tmp_path / "b.json")]
    )
    names = json.loads((tmp_path / "b.json").read_text())
    assert code == 0
    assert {name.rpartition(" · ")[2] for name in names} == {"narrow", "wide"}


def test_the_benchmark_action_gets_what_is_better_if_lower(exported):
    code, entries, name = exported("github-action-benchmark", "--out", "figures.json")
    assert (code, name) == (0, "figures.json")
    for one in (ACTION_EXAMPLE, entries):
        jsonschema.Draft7Validator(ACTION_SCHEMA).validate(one)
    by_name = {one["name"]: one for one in entries}
    assert len(by_name) == len(entries)
    memory = by_name[f"{PLACE} · memory"]
    assert memory["unit"] == "bytes" and memory["value"] > 1e8
    latency = by_name[f"{PLACE} · latency"]
    assert latency["unit"] == "seconds"
    assert 0 < float(latency["range"].removeprefix("± ")) < latency["value"]
    assert latency["extra"] == "processes: 1"
    assert not [name for name in by_name if "throughput" in name or "accuracy" in name]


def test_last_run_of_a_point_replaces_all_its_figures(make_record, leave_run, tmp_path, here):
    """A figure that only an earlier run has, or a point that fails now, keeps no earlier value."""
    first, failed, last = make_record(), make_record(), make_record()
    for number, one in enumerate((first, failed, last)):
        one.uid, one.ended = f"run {number}", f"2030-01-0{number + 1}T00:00:00+00:00"
    failed.points = [
        Point(key=point.key, status=Status.FAILED, error="it broke") for point in first.points
    ]
    last.points[0].metrics.clear()

    def exported(*records):
        for number, one in enumerate(records):
            leave_run(one, tmp_path / "runs" / str(number))
        assert (
            commands.run(["export", str(tmp_path / "runs"), "--format", "bencher", "--force"]) == 0
        )
        return json.loads((here / "export.json").read_text())

    assert "memory (bytes)" in exported(first)[PLACE]
    assert PLACE not in exported(first, failed)
    assert "memory (bytes)" not in exported(first, failed, last)[PLACE]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--out", "t.csv"], "the suffix is .json, or none; not .csv"),
        (["--samples"], "takes neither --samples nor --layers"),
        (["--layers"], "takes neither --samples nor --layers"),
    ],
)
def test_a_dashboard_takes_no_tables(options, reason, make_record, leave_run, tmp_path, capsys):
    run = str(leave_run(make_record(), tmp_path / "run"))
    assert commands.run(["export", run, "--format", "bencher", *options]) == 2
    assert reason in capsys.readouterr().err
