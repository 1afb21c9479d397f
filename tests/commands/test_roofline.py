"""`perfexp roofline`: what it writes, where, and how it refuses."""

import errno
import json
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from perfexp import commands
from perfexp.host import gpu_sheets
from perfexp.host.installation import conf_dir
from perfexp.layers import Key as LayerKey
from perfexp.layers import Pass
from perfexp.layers.table import Line, Spread
from perfexp.plots.roofline_plot import caption
from perfexp.records.record import Point, Record, Status, layers_key
from perfexp.roofline import of_record
from perfexp.roofline.peaks import named
from tests.roofline.listings import Kernel, counted, long_form, many, wide_form

HAND = ["--peak-compute", "10", "--peak-bw", "1000"]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "in" / "ncu.csv"
    path.parent.mkdir()
    path.write_text(long_form(many(5)))
    return path


def test_plot_page_and_table_go_beside_the_input(table, capsys):
    assert commands.run(["roofline", str(table), "--gpu", "h100"]) == 0
    kinds = ("png", "svg", "html", "csv")
    assert sorted(path.name for path in table.parent.iterdir()) == sorted(
        ["ncu.csv", *(f"ncu_roofline.{k}" for k in kinds)]
    )
    said = capsys.readouterr().out
    assert "near a memory ceiling" in said
    assert "train_step" in said
    frame = pd.read_csv(table.with_name("ncu_roofline.csv"))
    assert set(frame["level"]) == {"total", "range", "kernel", "launch"}
    assert said.splitlines()[1].split()[:2] == ["no.", "kernel"]
    numbers = [line.split()[0] for line in said.splitlines()[3:12]]
    assert numbers == list(frame[frame["level"].isin(["range", "kernel"])]["number"])


def test_names_that_are_asked_for_are_taken(table, tmp_path, capsys):
    out, summary = tmp_path / "a.png", tmp_path / "b.csv"
    wanted = ["--out", str(out), "--summary", str(summary), "--label", "one step", *HAND]
    assert commands.run(["roofline", str(table), *wanted]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.html",
        "a.png",
        "a.svg",
        "b.csv",
        "in",
    ]
    assert capsys.readouterr().out.startswith("one step\n")


def test_roofline_overwrites_only_with_force_and_never_its_input(table, capsys):
    target = table.with_name("ncu_roofline.png")
    target.write_text("mine")
    assert commands.run(["roofline", str(table), *HAND]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert commands.run(["roofline", str(table), *HAND, "--force"]) == 0
    before = table.read_text()
    assert commands.run(["roofline", str(table), *HAND, "--force", "--summary", str(table)]) == 2
    assert "is the input" in capsys.readouterr().err
    assert table.read_text() == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "whose peak FLOP/s and memory bandwidth"),
        (["--gpu", "h10"], "Did you mean h100"),
        (["--gpu", "auto"], "no data sheet of a GPU 'auto'"),
        (["--peak-compute", "0", "--peak-bw", "300"], "--peak-compute 0: a peak is above zero"),
        (["--peak-compute", "8", "--peak-bw", "-1"], "--peak-bw -1"),
        (["--peak-compute", "8"], "whose peak memory bandwidth"),
        ([*HAND, "--out", "x.pdf"], "the plot is a PNG"),
        ([*HAND, "--out", "gone/x.png"], "There is no folder gone"),
    ],
)
def test_what_can_not_be_is_the_users_error(options, told, table, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.run(["roofline", str(table), *options]) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in table.parent.iterdir()] == ["ncu.csv"]


def test_missing_path_or_folder_without_a_run_is_reported(tmp_path, capsys):
    for place in (tmp_path / "gone.csv", tmp_path / "gone.ncu-rep", tmp_path):
        assert commands.run(["roofline", str(place), *HAND]) == 2
        assert str(place) in capsys.readouterr().err


@pytest.mark.slow
def test_several_inputs_each_have_their_own_files(table, capsys):
    other = table.with_name("other.csv")
    other.write_text(wide_form([counted()]))
    assert commands.run(["roofline", str(table), str(other), *HAND, "--out", "x.png"]) == 2
    assert "there are 2 rooflines" in capsys.readouterr().err
    assert commands.run(["roofline", str(table), str(other), *HAND]) == 0
    assert {"ncu_roofline.png", "other_roofline.png"} <= {
        path.name for path in table.parent.iterdir()
    }


def tool(folder: Path, script: str) -> None:
    folder.mkdir()
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_report_is_exported_by_ncu(tmp_path, monkeypatch):
    report, wide = tmp_path / "train.ncu-rep", tmp_path / "wide.txt"
    report.write_bytes(b"\0report")
    wide.write_text(wide_form([counted(fmas=7)]))
    tool(tmp_path / "bin", f'echo "$@" > {tmp_path}/said; cat {wide}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert commands.run(["roofline", str(report), *HAND]) == 0
    assert (tmp_path / "said").read_text().split() == [
        "--import", str(report), "--csv", "--page", "raw", "--print-units", "base",
    ]  # fmt: skip
    assert pd.read_csv(tmp_path / "train_roofline.csv").iloc[0]["flops"] == 14


def test_report_without_a_working_ncu_says_what_to_do(tmp_path, monkeypatch, capsys):
    report = tmp_path / "train.ncu-rep"
    report.write_bytes(b"\0report")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr("perfexp.diagnosis.environment._TOOLS", {"ncu": ()})
    assert commands.run(["roofline", str(report), *HAND]) == 2
    said = capsys.readouterr().err
    assert "ncu is not installed, neither on the PATH" in said
    assert "ncu --import train.ncu-rep --page raw --csv" in said
    tool(tmp_path / "bin", "echo '==ERROR== Failed to load report file.'; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    assert commands.run(["roofline", str(report), *HAND]) == 2
    assert "Failed to load report file" in capsys.readouterr().err


@pytest.fixture
def run(make_record, leave_run, tmp_path):
    """A run's folder with layers, and with a manifest."""
    facts = {
        "product": "X",
        "peak_flops_per_second": {"fp32": 1e12},
        "memory_bytes_per_second": 1e11,
    }
    record = make_record(plan={"gpu": {"name": "x", "facts": facts}})
    key = LayerKey(path="conv1", call=0, operation=None, kind="Conv2d", which=Pass.forward)
    taken, nothing = (Spread(mean=time, median=time, low=None, high=None) for time in (1e-3, 0.0))
    line = Line(
        key=key,
        kind="Conv2d",
        seconds=taken,
        gap_seconds=nothing,
        share=1.0,
        flops=10**8,
        bytes_min=10**6,
    )
    layers = {
        "layers": {"method": "queue", "call_seconds": [1e-3], "lines": [msgspec.to_builtins(line)]}
    }
    record.points.append(
        Point(key=layers_key(record.points[0].key), status=Status.OK, facts=layers)
    )
    folder = leave_run(record, tmp_path / "run")
    (folder / "manifest.json").write_text(json.dumps({"files": ["record.json"]}))
    return folder


def test_a_runs_layers_are_drawn_with_the_peaks_of_its_plan(run, capsys):
    assert commands.run(["roofline", str(run)]) == 0
    out = capsys.readouterr().out
    assert "analytic" in out
    assert "≈ 100 MFLOP" in out  # by definition
    assert "  1.00 ms" in out
    assert (run / "roofline.png").is_file()
    claimed = json.loads((run / "manifest.json").read_text())["files"]
    assert {"roofline.png", "roofline.svg", "roofline.html", "roofline.csv"} <= set(claimed)


@pytest.mark.slow
def test_roofline_replaces_own_plots_but_no_foreign_file(run, capsys):
    assert commands.run(["roofline", str(run)]) == 0
    before = (run / "roofline.csv").read_text()
    (run / "roofline.csv").write_text("cut off")
    assert commands.run(["roofline", str(run / "record.json")]) == 0
    assert (run / "roofline.csv").read_text() == before
    (run / "manifest.json").write_text(
        json.dumps({"files": ["record.json", "roofline.png", "roofline.svg"]})
    )
    assert commands.run(["roofline", str(run)]) == 2
    assert "roofline.html, " in (printed := capsys.readouterr().err)
    assert "roofline.csv would be overwritten" in printed
    assert "roofline.png" not in printed
    assert commands.run(["roofline", str(run), "--force"]) == 0


def test_an_input_is_kept_whatever_the_manifest_says_of_it(run, capsys):
    source = run / "roofline_net_inference_ncu.csv"
    source.write_text(text := long_form([counted()]))
    (run / "manifest.json").write_text(json.dumps({"files": ["record.json", source.name]}))
    assert commands.run(["roofline", str(source), "--summary", str(source), *HAND]) == 2
    assert "is the input" in capsys.readouterr().err
    assert source.read_text() == text


def test_peaks_of_another_device_are_noted_everywhere(run, tmp_path, capsys):
    assert commands.run(["roofline", str(run), "--gpu", "t4"]) == 0
    told = "The peaks belong to another device than the measured one: data sheet of NVIDIA T4 16GB"
    assert told in capsys.readouterr().out
    assert pd.read_csv(run / "roofline.csv").iloc[0]["notes"].startswith(told)
    [roofline] = of_record(Record.load(run), named("t4", gpu_sheets.read([conf_dir()]))).values()
    assert (
        "peaks: data sheet of NVIDIA T4 16GB, another device than NVIDIA H200"
        in caption(roofline).subtitle
    )


def test_a_file_that_can_not_be_written_is_named(run, monkeypatch, tmp_path, capsys):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("perfexp.plots.roofline_files.write_atomically", full)
    out = tmp_path / "elsewhere.png"
    assert commands.run(["roofline", str(run), "--out", str(out)]) == 2
    assert f"error: {out} can't be written: No space left on device." in capsys.readouterr().err


def test_a_folder_that_can_not_be_written_is_told_in_a_line(run, monkeypatch, capsys):
    def refused(path, content):
        raise OSError(errno.EROFS, "Read-only file system", f"{path.parent}/.{path.name}.x1")

    monkeypatch.setattr("perfexp.records.paths.write_atomically", refused)
    assert commands.run(["roofline", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {run / 'manifest.json'} can't be written: Read-only file system. Choose another"
    )


def test_only_ncu_tables_in_the_manifest_are_drawn(run, tmp_path):
    text = long_form([counted()])
    outside = tmp_path / "outside.csv"
    outside.write_text(text)
    for name in ("train_ncu.csv", "stranger.csv"):
        (run / name).write_text(text)
    (run / "link.csv").symlink_to(outside)
    names = [
        "record.json",
        "train_ncu.csv",
        "link.csv",
        "../outside.csv",
        "resnet50_default_overall.csv",
        "gone.csv",
    ]
    (run / "manifest.json").write_text(json.dumps({"files": names}))
    assert commands.run(["roofline", str(run)]) == 0
    assert sorted(path.name for path in run.glob("*.png")) == [
        "roofline.png",
        "train_ncu_roofline.png",
    ]


def test_a_run_without_layers_or_tables_says_how_to_get_them(
    make_record, leave_run, tmp_path, capsys
):
    assert commands.run(["roofline", str(leave_run(make_record(), tmp_path / "run"))]) == 2
    assert "probes.layers=true" in capsys.readouterr().err


def test_a_gpu_of_ones_own_folder_is_known(table, tmp_path):
    (tmp_path / "mine" / "gpu").mkdir(parents=True)
    text = "facts:\n  product: Z9\n  peak_flops_per_second: {fp32: 1.0e+14}\n  memory_bytes_per_second: 1.0e+13\n"
    (tmp_path / "mine" / "gpu" / "z9.yaml").write_text(text)
    table.write_text(long_form([Kernel(metrics=counted().metrics)]))
    assert (
        commands.run(
            ["roofline", str(table), "--gpu", "z9", "--config-dir", str(tmp_path / "mine")]
        )
        == 0
    )


def test_its_help_does_not_import_what_takes_long():
    script = (
        "import sys; from perfexp import commands; code = commands.run(['roofline', '--help'])\n"
        "assert code == 0 and not {'pandas', 'matplotlib', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
