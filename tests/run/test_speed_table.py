"""The table of a sweep's trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfexp.records.grid import Grid
from perfexp.records.record import Point, Status
from perfexp.records.summary import row
from perfexp.records.wording import rate_text
from perfexp.run import segmentation_table
from tests.support.builders import ALIKE, Builder


def made(build: Builder, folder: Path, points: list[list[Point] | None]) -> Grid | None:
    axes = [{"model": f"m{job}", "gpu.count": str(job + 1)} for job in range(len(points))]
    sweep, records = build.sweep(axes, points)
    for child, record in zip(
        [c for c, p in zip(sweep.children, points, strict=True) if p], records, strict=True
    ):
        record.plan |= {
            "model": {"name": child.axes["model"]},
            "gpu": {"count": int(child.axes["gpu.count"])},
        }
        (folder / child.directory).mkdir()
    return segmentation_table.trainings(sweep, folder, records)


def cells(grid: Grid | None) -> dict[str, tuple[str, ...]]:
    assert grid is not None
    return {column.title: column.cells for column in grid.columns}


def test_speed_table_has_rates_for_all_gpus_and_per_gpu(build: Builder, tmp_path: Path) -> None:
    found = cells(
        made(build, tmp_path, [[build.training(0.2, batch=2)], [build.training(0.2, batch=2)]])
    )
    assert found["model"] == ("m0", "m1")
    assert found["GPUs"] == ("1", "2")
    assert found["precision"] == ("fp32", "fp32")
    assert found["batch per GPU"] == ("2", "2")
    one, two = (float(cell.split()[0]) for cell in found["images/s ± CI95"])
    assert round(two / one, 2) == 2
    assert all(" ± " in cell and cell.endswith(" %") for cell in found["images/s ± CI95"])
    assert found["per GPU"][0] == found["per GPU"][1]
    assert "remarks" not in found


def test_the_file_is_named_where_it_is_there(build: Builder, tmp_path: Path) -> None:
    sweep, records = build.sweep([{}], [[build.training()]])
    (tmp_path / "0").mkdir()
    assert "speed file" not in cells(segmentation_table.trainings(sweep, tmp_path, records))
    from perfexp.records.paths import RunPaths
    from perfexp.report.tables import speed_files

    speed_files.write(records[0], RunPaths(tmp_path / "0"), on_error=pytest.fail)
    found = cells(segmentation_table.trainings(sweep, tmp_path, records))
    assert found["speed file"] == (str(tmp_path / "0" / "resnet50_sp_bs1_fp32_1_speed.json"),)


def test_failed_runs_have_a_line_with_reason_and_no_figure(build: Builder, tmp_path: Path) -> None:
    found = cells(made(build, tmp_path, [[build.failed(Status.OOM, phase="train")], None]))
    assert found["model"] == ("m0", "m1")
    assert found["GPUs"] == ("1", "2")
    assert found["remarks"] == ("failed: oom: no memory left", "failed: the worker died")
    assert "images/s ± CI95" not in found


def test_too_few_steps_for_an_interval_are_told(build: Builder, tmp_path: Path) -> None:
    found = cells(made(build, tmp_path, [[build.training(n=2)]]))
    assert found["images/s ± CI95"][0].endswith(", no interval")


def test_a_sweep_without_a_training_has_no_table(build: Builder, tmp_path: Path) -> None:
    assert made(build, tmp_path, [[build.point()]]) is None


def test_synthetic_images_are_told_of(build: Builder, tmp_path: Path) -> None:
    sweep, records = build.sweep([{}], [[build.training()]])
    records[0].plan |= {"choices": {"data": "synthetic"}}
    grid = segmentation_table.trainings(sweep, tmp_path, records)
    assert grid is not None
    assert "synthetic" in grid.notes[-1]


def test_the_rate_is_that_of_the_summary(build: Builder, tmp_path: Path) -> None:
    training = build.training()
    found = cells(made(build, tmp_path, [[training]]))
    rate = row([training], known_priors=ALIKE).samples_per_second
    assert rate is not None
    assert found["images/s ± CI95"][0].startswith(f"{rate_text(rate)} ± ")
