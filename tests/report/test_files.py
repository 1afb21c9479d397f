from __future__ import annotations

from pathlib import Path

import pytest

from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.paths import RunPaths
from perfexp.report import run_files
from tests.support.builders import Builder


def test_table_picture_and_report_are_written_and_claimed(build: Builder, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.create()
    artifacts = {
        artifact.path: artifact.kind
        for artifact in run_files.write(Analysis.of(build.sizes()), paths)
    }
    assert artifacts == {
        "resnet50_default_overall.csv": "tables",
        "time.png": "plots",
        "report.md": "report",
    }
    assert set(artifacts) <= set(paths.claimed())
    assert all((tmp_path / name).stat().st_size for name in artifacts)


def test_files_of_the_run_itself_are_named_where_they_are_there(
    build: Builder, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path)
    paths.create()
    for path in (paths.plan, paths.record, paths.log):
        path.write_text("x")
    kinds = {
        artifact.path: artifact.kind
        for artifact in run_files.write(Analysis.of(build.record(build.point())), paths)
    }
    names = ("details/plan.yaml", "record.json", "details/run.log", "details/points.jsonl")
    assert [kinds.get(name) for name in names] == ["config", "data", "logs", None]


def test_run_without_results_has_table_and_report_but_no_plot(
    build: Builder, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path)
    paths.create()
    names = [
        artifact.path
        for artifact in run_files.write(Analysis.of(build.record(build.failed())), paths)
    ]
    assert names == ["resnet50_default_overall.csv", "report.md"]


def test_writing_again_gives_the_same_bytes(build: Builder, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.create()
    contents = []
    for _ in range(2):
        artifacts = run_files.write(Analysis.of(build.record(build.point())), paths)
        contents.append([(tmp_path / artifact.path).read_bytes() for artifact in artifacts])
    assert contents[0] == contents[1]


def test_the_files_of_a_sweep_lie_in_its_folder(build: Builder, tmp_path: Path) -> None:
    sweep, records = build.sweep(
        [{"batch_size": "1"}, {"batch_size": "2"}], [[build.point()], [build.point(batch=2)]]
    )
    (tmp_path / "sweep.json").write_bytes(sweep.to_json())
    names = [
        artifact.path
        for artifact in run_files.write_sweep(SweepAnalysis.of(sweep, records), tmp_path)
    ]
    assert names == ["sweep.json", "sweep.csv", "sweep.png"]


def test_a_folder_that_can_not_be_written_is_an_error(build: Builder, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        run_files.write(Analysis.of(build.record(build.point())), RunPaths(tmp_path / "missing"))
