"""A run with a profiler, from the command to the record: real processes, scripted tools, the scripted device."""

import csv
import io
import json
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from scripted import NO_COPIES, NO_KERNELS, REPORTS, VERSION, ncu_csv

from perfexp.cli.composition import compose
from perfexp.errors import Unsupported
from perfexp.plan import config
from perfexp.profilers import refuse_other_devices
from perfexp.profilers.nsys import Nsys
from perfexp.records.record import Status
from perfexp.reports.run_status import seconds_left

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "mode=train", "output_dir=x")
WHOLE_STEP = ncu_csv(["forward", "backward", "backward"], ["fprop", "dgrad", "wgrad"])


def profile_of(record):
    return next(point for point in record.points if point.key.phase.endswith("_profile"))


@pytest.mark.slow
@pytest.mark.always("README: profiler=nsys")
def test_nsys_looks_after_the_timing_and_leaves_its_files(run, nsys):
    tool = nsys()
    code, printed, [record] = run(*FAKE, "profiler=nsys")
    assert (code, record.status) == (0, Status.OK)
    point = profile_of(record)
    assert (point.status, point.error, point.key.phase) == (Status.OK, None, "train_profile")
    names = {artifact.path for artifact in record.artifacts if artifact.kind == "profiles"}
    reports = (
        "cuda_api_gpu_sum",
        "cuda_gpu_kern_sum",
        "cuda_gpu_mem_time_sum",
        "nvtx_gpu_proj_sum",
        "ranges",
    )
    assert names == {"train.nsys-rep", *(f"train_{report}.csv" for report in reports)}
    listed = set(json.loads(Path("x/details/manifest.json").read_text())["files"])
    files = (path for path in Path("x").rglob("*") if path.is_file())
    assert {path.relative_to("x").as_posix() for path in files} <= listed
    facts = point.facts["profile"]
    assert facts["kernels"][0] == {
        "name": "void dgrad2d<float, 3>(float *, int)",
        "count": 6,
        "seconds": pytest.approx(6e-6),
        "share": pytest.approx(0.6),
    }
    assert "nsys 2025.3.1.90 profiled 3 calls after 20 warm-up calls in" in printed
    assert "dgrad2d" in printed
    assert point.series == []
    assert point.wall_seconds > 0
    command = next(call for call in tool.calls if call[0] == "profile")
    assert command[:9] == [
        "profile",
        "--trace=cuda,cudnn,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--kill=none",
        "--cuda-graph-trace=node",
        "--force-overwrite=true",
    ]
    assert command[9] == f"--output={Path('x/.profile/train').absolute()}"
    assert command[11:14] == ["-P", "-m", "perfexp.worker.entry"]
    assert "--profile=0" in command
    log = Path("x/details/run.log").read_text()
    assert log.index("--what=timed") < log.index("--profile=0")


def test_ranges_hold_what_other_threads_launched(run, nsys):
    nsys()
    _, printed, [record] = run(*FAKE, "profiler=nsys")
    ranges = {each["name"]: each for each in profile_of(record).facts["profile"]["ranges"]}
    assert {name: each["kernels"] for name, each in ranges.items()} == {
        "train_step": 5,
        "forward": 2,
        "backward": 3,
    }
    assert ranges["train_step"]["span_seconds"] == pytest.approx(4.8e-6)
    assert ranges["backward"]["busy_seconds"] == pytest.approx(2.4e-6)
    assert (
        "the work of a call spans 4.80 µs on the device under the profiler; without profiling:"
        in printed
    )


@pytest.mark.slow
def test_a_profile_that_is_there_is_not_made_again(run, nsys):
    tool = nsys()
    run(*FAKE, "profiler=nsys")
    points = Path("x/details/points.jsonl").read_bytes()
    run(*FAKE, "profiler=nsys")
    assert sum(call[0] == "profile" for call in tool.calls) == 1
    assert Path("x/details/points.jsonl").read_bytes() == points


@pytest.mark.slow
def test_timed_run_gets_its_profile_later_per_settings(run, nsys):
    tool = nsys()
    _, _, [before] = run(*FAKE)
    _, _, [after] = run(*FAKE, "profiler=nsys")
    assert after.plan_hash == before.plan_hash
    assert after.points[0].series == before.points[0].series
    assert profile_of(after).status is Status.OK
    run(*FAKE, "profiler=nsys", "profiler.steps=2")
    assert sum(call[0] == "profile" for call in tool.calls) == 2
    _, _, [without] = run(*FAKE)
    assert profile_of(without).status is Status.OK
    assert "train.nsys-rep" in {artifact.path for artifact in without.artifacts}


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ({"version": "NVIDIA Nsight Systems version 2020.3.2"}, "too old: at least 2022.4"),
        (
            {"complaint": "Illegal --trace argument 'cudnn'."},
            "nsys left no profile: Illegal --trace argument 'cudnn'.",
        ),
        (
            {"importer": "QdstrmImporter: libdw.so.1: cannot open shared object file"},
            "install libdw1",
        ),
        ({"told": False}, "nsys left a profile, but the worker ended without a result"),
    ],
)
def test_a_failing_nsys_costs_the_profile_only(run, nsys, script, told):
    nsys(**script)
    code, printed, [record] = run(*FAKE, "profiler=nsys")
    assert (code, record.status) == (1, Status.OK)
    assert record.points[0].find_series("device").measured
    point = profile_of(record)
    assert point.status is Status.FAILED
    assert told in point.error
    assert told in printed


def test_unimported_recording_is_kept_for_a_later_import(run, nsys):
    nsys(importer="Importer error status: The importer binary and its dependencies were not found.")
    _, _, [record] = run(*FAKE, "profiler=nsys")
    assert "x/train.qdstrm" in {
        f"x/{artifact.path}" for artifact in record.artifacts if artifact.kind == "profiles"
    }
    assert Path("x/train.qdstrm").is_file()
    assert f"perfexp nsys-stats {Path('x').absolute()}" in profile_of(record).error


@pytest.mark.slow
def test_missing_profiler_is_reported_and_retried_later(run, nsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("perfexp.diagnosis.environment._TOOLS", {"nsys": (), "ncu": ()})
    code, _, [record] = run(*FAKE, "profiler=nsys")
    assert code == 1
    assert "nsys is not installed" in profile_of(record).error
    assert "https://developer.nvidia.com/nsight-systems" in profile_of(record).error
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    tool = nsys()
    _, _, [record] = run(*FAKE, "profiler=nsys", f"profiler.tool={tool.path}")
    assert profile_of(record).status is Status.OK


@pytest.mark.slow
def test_worker_under_the_tool_reports_an_unsupported_device(run, nsys):
    nsys(runs=True)
    code, _, [record] = run(*FAKE, "profiler=nsys")
    point = profile_of(record)
    assert (code, point.status) == (1, Status.UNSUPPORTED)
    assert "use profiler=torch" in point.error


def test_reports_without_rows_are_doubts_and_the_others_stay(run, nsys):
    reports = {
        "cuda_gpu_kern_sum": "crash",
        "nvtx_gpu_proj_sum": NO_KERNELS,
        "cuda_api_gpu_sum": "A,B,C\n1,2,x\n",
    }
    nsys(reports=reports)
    _, _, [record] = run(*FAKE, "profiler=nsys")
    point = profile_of(record)
    assert (point.status, [doubt.code for doubt in point.doubts]) == (
        Status.OK,
        ["profile_incomplete"],
    )
    assert "KeyError" in point.doubts[0].message
    assert "does not contain CUDA kernel data" in point.doubts[0].message
    assert "profile_incomplete" in {doubt.code for doubt in record.points[0].doubts}
    assert not Path("x/train_cuda_gpu_kern_sum.csv").exists()
    assert {kernel["name"] for kernel in point.facts["profile"]["kernels"]} >= {
        "fprop",
        "dgrad",
    }  # by the database


@pytest.mark.parametrize(
    ("fills", "said", "missing"), [(0, NO_COPIES, False), (1, NO_COPIES, True), (0, "crash", True)]
)
def test_a_report_of_copies_is_missing_unless_there_were_none(
    run, nsys, database, fills, said, missing
):
    """An inference copies nothing, and that is an answer; what nsys recorded has to agree."""
    nsys(reports={**REPORTS, "cuda_gpu_mem_time_sum": said})
    with closing(sqlite3.connect(database)) as connection, connection:
        rows = [(5000, 5100, 0)] * fills
        connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (?, ?, ?)", rows)
    code, printed, [record] = run(*FAKE, "profiler=nsys")
    point = profile_of(record)
    assert [doubt.code for doubt in point.doubts] == ["profile_incomplete"] * missing
    assert list(point.facts["profile"]["empty"]) == ["cuda_gpu_mem_time_sum"] * (not missing)
    assert (
        "cuda_gpu_mem_time_sum has no rows: nothing was copied or filled in these calls" in printed
    ) is not missing
    assert code == 0


@pytest.mark.slow
def test_all_points_option_gives_each_point_its_own_profile(run, nsys):
    nsys()
    _, _, [record] = run(*FAKE, "batch_size=[1,2]", "profiler=nsys", "profiler.all_points=true")
    assert {path.name for path in Path("x").glob("*.nsys-rep")} == {
        "train_224_b1.nsys-rep",
        "train_224_b2.nsys-rep",
    }
    assert sum(point.key.phase == "train_profile" for point in record.points) == 2


@pytest.mark.slow
def test_a_sweep_profiles_each_of_its_runs(run, nsys):
    tool = nsys()
    code, printed, records = run(*FAKE, "profiler=nsys", "-m", "batch_size=1,2")
    assert (code, len(records)) == (0, 2)
    assert all(profile_of(record).status is Status.OK for record in records)
    assert sum(call[0] == "profile" for call in tool.calls) == 2
    assert "2 of 2 runs ended\n" in printed


def test_a_call_that_could_not_be_timed_is_not_looked_at(run, nsys):
    tool = nsys()
    code, _, [record] = run(*FAKE, "model.faults.oom=1", "profiler=nsys")
    assert code == 1
    assert "not tried: the call was not timed (oom)" in profile_of(record).error
    assert tool.calls == []


@pytest.mark.slow
def test_ncu_counts_one_whole_step_with_what_the_chip_has(run, ncu):
    tool = ncu()
    code, printed, [record] = run(*FAKE, "profiler=ncu")
    assert code == 0
    point = profile_of(record)
    assert (point.status, point.error, point.doubts) == (Status.OK, None, [])
    facts = point.facts["profile"]
    assert facts["kernels_in"] == {"train_step": 3, "forward": 1, "backward": 2}
    assert [kernel["name"] for kernel in facts["kernels"]] == ["wgrad", "dgrad", "fprop"]
    assert facts["kernel_seconds"] == pytest.approx(6e-6)
    assert {"train.ncu-rep", "train_ncu.csv"} <= {artifact.path for artifact in record.artifacts}
    assert Path("x/train_ncu.csv").read_text().startswith('"ID"')
    drawn = {f"train_ncu_roofline.{kind}" for kind in ("png", "svg", "csv")}
    assert drawn <= {artifact.path for artifact in record.artifacts if artifact.kind == "profiles"}
    assert drawn <= set(json.loads(Path("x/details/manifest.json").read_text())["files"])
    assert "ncu 2025.3.0.0 profiled 1 call after 20 warm-up calls" in printed
    command = next(
        call for call in tool.calls if any(text.startswith("--export=") for text in call)
    )
    for option in (
        "--target-processes=all",
        "--replay-mode=kernel",
        "--clock-control=none",
        "--profile-from-start=off",
        "--nvtx",
    ):
        assert option in command
    metrics = (
        next(text for text in command if text.startswith("--metrics=")).partition("=")[2].split(",")
    )
    assert metrics[0] == "gpu__time_duration.sum"
    assert {
        "dram__bytes_read.sum",
        "dram__bytes_write.sum",
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    } <= set(metrics)
    assert not [
        name for name in metrics if "int8" in name or "sparsity" in name or "pipe_tensor" in name
    ]
    assert not [name for name in metrics if "_hfma_" in name]  # this chip's list has none


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            {
                "report": False,
                "complaint": "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
                "code": 1,
            },
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        (
            {"report": False, "complaint": "==WARNING== No kernels were profiled."},
            "it saw no kernel between",
        ),
        (
            {
                "report": False,
                "complaint": "==ERROR== Profiling failed: driver resource was unavailable.",
            },
            "DCGM",
        ),
        ({"csv": ""}, "ncu can't read train.ncu-rep"),
        ({"csv": '"ID","Kernel Name","x"\n"","","ns"'}, "ncu can't read train.ncu-rep"),
        ({"metrics": []}, "does not list the counters"),
        ({"version": "Version 2019.5.0"}, "too old"),
    ],
)
def test_a_failing_ncu_says_what_to_do(run, ncu, script, told):
    ncu(**script)
    code, _, [record] = run(*FAKE, "profiler=ncu")
    assert (code, profile_of(record).status) == (1, Status.FAILED)
    assert told in profile_of(record).error
    assert record.points[0].find_series("device").measured


@pytest.mark.slow
def test_half_a_step_is_a_doubt(run, ncu):
    ncu(csv=ncu_csv(["forward", "forward", "backward"], ["a", "b", "c"]))
    _, _, [record] = run(*FAKE, "profiler=ncu")
    assert [doubt.code for doubt in profile_of(record).doubts] == ["profile_incomplete"]


@pytest.mark.parametrize("profiler", ["nsys", "ncu", "nvtx"])
def test_a_processor_is_told_before_a_tool_that_would_not_help(run, monkeypatch, profiler):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("perfexp.diagnosis.environment._TOOLS", {"nsys": (), "ncu": ()})
    run(*FAKE)
    environment = json.loads(Path("x/details/environment.json").read_text())
    environment["environment"]["device"] = {"kind": "cpu", "name": "AMD EPYC"}
    Path("x/details/environment.json").write_text(json.dumps(environment))
    code, printed, [record] = run(*FAKE, f"profiler={profiler}")
    point = profile_of(record)
    assert (code, record.status, point.status) == (1, Status.OK, Status.UNSUPPORTED)
    assert "nsys, ncu and NVTX need a CUDA device, not AMD EPYC: use profiler=torch" in point.error
    assert "not installed" not in printed
    assert point.doubts == []


@pytest.mark.parametrize("kind", [{"kind": "cuda", "rocm": "6.4"}, {"kind": "mps"}])
def test_nvidia_tools_refuse_other_gpus_but_not_unknown_ones(kind):
    with pytest.raises(Unsupported, match="use profiler=torch"):
        refuse_other_devices(kind)
    for known in ({}, {"kind": "cuda", "rocm": None}):
        refuse_other_devices(known)


def content_of(folder):
    return {
        path.name: path.read_bytes()
        for path in Path(folder).iterdir()
        if path.name.startswith("train")
    }


def interrupt_when_profiling(tool, times):
    """Send this process SIGINT once the tool has been started so many times for a profile."""

    def send():
        while sum(call[0] == "profile" for call in tool.calls) < times:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.slow
def test_profile_stays_if_its_replacement_is_interrupted(run, nsys, database):
    script = {"version": VERSION, "reports": REPORTS, "database": str(database)}
    tool = nsys()
    _, _, [before] = run(*FAKE, "profiler=nsys")
    files = content_of("x")
    assert "train.nsys-rep" in files
    tool.script(**script, hangs=True)
    thread = interrupt_when_profiling(tool, 2)
    code, _, [record] = run(*FAKE, "profiler=nsys", "profiler.steps=2")
    thread.join()
    assert code == 130
    assert content_of("x") == files
    assert not list(Path("x").glob(".profile"))
    assert profile_of(record).facts == profile_of(before).facts
    tool.script(**script)
    code, _, [record] = run(*FAKE, "profiler=nsys", "profiler.steps=2")
    assert (code, profile_of(record).status) == (0, Status.OK)
    assert profile_of(record).facts["profile"]["settings"]["steps"] == 2
    assert sum(call[0] == "profile" for call in tool.calls) == 3
    assert not list(Path("x").glob(".profile"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ({"complaint": "Illegal --trace argument 'x'."}, "nsys left no profile: Illegal"),
        (
            {"version": "NVIDIA Nsight Systems version 2020.3.2"},
            "too old",
        ),  # before anything is moved aside
    ],
)
def test_profile_stays_if_its_replacement_fails(run, nsys, database, script, told):
    tool = nsys()
    run(*FAKE, "profiler=nsys")
    files = content_of("x")
    tool.script(**{"version": VERSION, "reports": REPORTS, "database": str(database), **script})
    code, _, [record] = run(*FAKE, "profiler=nsys", "profiler.steps=2")
    point = profile_of(record)
    assert (code, point.status) == (1, Status.FAILED)
    assert told in point.error
    assert point.error.endswith("the files of the earlier profile are unchanged")
    assert content_of("x") == files
    assert "train.nsys-rep" in {artifact.path for artifact in record.artifacts}
    lines = Path("x/details/points.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"]["phase"] for line in lines] == ["train", "train_profile"]


@pytest.mark.slow
def test_leftovers_of_a_killed_profiling_pass_are_not_a_profile(run, nsys):
    nsys()
    run(*FAKE, "profiler=nsys")
    files = content_of("x")
    Path("x/.profile").mkdir()
    Path("x/.profile/train_ranges.csv").write_text("half of another")
    run(*FAKE, "profiler=nsys", "profiler.steps=2")
    assert content_of("x").keys() == files.keys()
    assert "half" not in Path("x/train_ranges.csv").read_text()
    assert not list(Path("x").glob(".profile"))


def test_old_profile_is_no_fault_of_a_command_without_profiler(run, nsys):
    nsys(complaint="Illegal")
    assert run(*FAKE, "profiler=nsys")[0] == 1
    assert run(*FAKE)[0] == 0


def test_only_what_is_left_counts_for_how_long_it_may_take():
    plan = config.typed(compose(["model=fake", "gpu=fake", "profiler=nsys", "stopping=brisk"]))
    point = plan.point_seconds
    whole, profile = (seconds_left(keys, point) for keys in (plan.keys(), plan.profile_keys()))
    assert whole > profile == 60.0
    assert seconds_left([*plan.timed_keys(), *plan.profile_keys()], point) == whole
    assert seconds_left(plan.keys(), None) is None
    assert seconds_left(plan.keys(), 2.0) == 68.5
    assert seconds_left([], None) == 0.0


def test_nothing_is_timed_where_a_call_is_marked_for_others(run):
    code, printed, [record] = run(*FAKE, "profiler=nvtx")
    assert [point.key.phase for point in record.points] == ["train_profile"]
    point = profile_of(record)
    assert (code, point.status) == (1, Status.UNSUPPORTED)  # the scripted device has no NVTX
    assert "nsys, ncu and NVTX need a CUDA device" in printed


@pytest.mark.slow
def test_marking_a_call_leaves_the_times_that_are_there(run):
    run(*FAKE)
    _, _, [record] = run(*FAKE, "profiler=nvtx")
    assert [point.key.phase for point in record.points] == ["train", "train_profile"]
    assert record.points[0].series


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("profiler=nsys", "profiler.steps=0"), "profiler.steps=0"),
        (("profiler=nsys", "profiler.trace=[nvtx]"), "add cuda, which the capture range needs"),
        (("profiler=nsys", "profiler.reports=[/tmp/x.py]"), "is not a report of nsys stats"),
        (("profiler=ncu", "profiler.metrics=['a;b']"), "not a counter of ncu"),
        (("profiler=ncu", "profiler.cache_control=some"), "all or none"),
        (("profiler=nvtx", "profiler.step=0"), "profiler.step=0"),
        (("profiler=nsys", "profiler.wamup=3"), "profiler.wamup"),
        (("profiler=nsight",), "nsight"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(run, settings, told):
    code, printed, records = run(*FAKE, *settings)
    assert (code, records) == (2, [])
    assert told in printed


@pytest.mark.slow
def test_hanging_profiler_is_terminated_and_costs_only_a_profile(run, nsys):
    nsys(hangs=True)
    code, printed, [record] = run(*FAKE, "profiler=nsys", "timeout_seconds=5")
    assert (code, record.status) == (1, Status.OK)
    assert record.points[0].find_series("device").measured
    point = profile_of(record)
    assert point.status is Status.TIMEOUT
    assert point.error == (
        "while nsys was writing, the worker sent no progress for 5 s and was terminated (timeout_seconds)"
    )
    assert "sent no progress for 5 s" in printed


@pytest.mark.slow
def test_what_perfexp_did_not_write_is_not_replaced_by_a_profile(run, nsys):
    tool = nsys()
    run(*FAKE)
    mine = Path("x/train_cuda_gpu_kern_sum.csv")
    mine.write_text("mine")
    code, _, [record] = run(*FAKE, "profiler=nsys")
    assert (code, profile_of(record).status) == (1, Status.FAILED)
    assert "train_cuda_gpu_kern_sum.csv would be overwritten" in profile_of(record).error
    assert mine.read_text() == "mine"
    assert mine.name not in json.loads(Path("x/details/manifest.json").read_text())["files"]
    assert not [call for call in tool.calls if call[0] == "profile"]
    mine.unlink()
    _, _, [record] = run(*FAKE, "profiler=nsys")
    assert profile_of(record).status is Status.OK


@pytest.mark.slow
def test_a_folder_in_place_of_a_file_costs_the_profile_only(run, nsys):
    nsys()
    run(*FAKE, "profiler=nsys")
    Path("x/train_ranges.csv").unlink()
    Path("x/train_ranges.csv").mkdir()
    code, printed, [record] = run(*FAKE, "profiler=nsys", "profiler.steps=2")
    point = profile_of(record)
    assert (code, record.status, point.status) == (1, Status.OK, Status.FAILED)
    assert point.error.startswith("Is a directory")
    assert "train_ranges.csv" in point.error
    assert Path("x/fake_default_overall.csv").exists()
    assert "GPU time" in printed
    assert "train_ranges.csv" in printed


def test_tool_that_cannot_start_costs_only_the_profile(run, nsys, monkeypatch):
    nsys()
    monkeypatch.setattr(Nsys, "command", lambda self, place, about: ["/nowhere/nsys"])
    code, printed, [record] = run(*FAKE, "profiler=nsys")
    point = profile_of(record)
    assert (code, record.status, point.status) == (1, Status.OK, Status.FAILED)
    assert "can't be started (/nowhere/nsys)" in point.error
    assert Path("x/fake_default_overall.csv").exists()
    assert "GPU time" in printed


PEAKS = ("+gpu.facts.peak_flops_per_second.fp32=1e12", "+gpu.facts.memory_bytes_per_second=1e11")


def without(text, part):
    """A table of ncu without the columns that have this in their names."""
    rows = list(csv.reader(text.splitlines()))
    kept = [number for number, name in enumerate(rows[0]) if part not in name]
    content = io.StringIO()
    csv.writer(content, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
        [row[i] for i in kept] for row in rows
    )
    return content.getvalue()


@pytest.mark.parametrize(
    ("settings", "script", "remedy"),
    [
        ((), {"metrics": []}, "probes.layers=true"),
        ((), {"csv": without(WHOLE_STEP, "peak_sustained")}, "--gpu NAME"),
        (PEAKS, {"csv": without(WHOLE_STEP, "dram__bytes.sum")}, "profiler.metrics=null"),
    ],
)
def test_a_roofline_that_is_missing_says_how_there_would_be_one(run, ncu, settings, script, remedy):
    ncu(**script)
    _, _, [record] = run(*FAKE, "profiler=ncu", *settings)
    doubts = [doubt for doubt in profile_of(record).doubts if doubt.code == "profile_incomplete"]
    assert [remedy in doubt.help for doubt in doubts] == [True]


@pytest.mark.slow
def test_a_roofline_does_not_replace_what_perfexp_did_not_write(run, ncu):
    ncu()
    Path("x").mkdir()
    Path("x/train_ncu_roofline.png").write_text("mine")
    code, _, [record] = run(*FAKE, "profiler=ncu")
    point = profile_of(record)
    assert (code, point.status) == (0, Status.OK)
    [doubt] = [doubt for doubt in point.doubts if doubt.code == "profile_incomplete"]
    assert (
        "train_ncu_roofline.png would be overwritten, and no manifest says that a run left it"
        in doubt.message
    )
    assert doubt.help == "move it away and repeat the command"
    assert Path("x/train_ncu_roofline.png").read_text() == "mine"
    listed = json.loads(Path("x/details/manifest.json").read_text())["files"]
    assert not [name for name in listed if "roofline" in name]
    Path("x/train_ncu_roofline.png").unlink()
    _, _, [record] = run(*FAKE, "profiler=ncu")
    assert [doubt.code for doubt in profile_of(record).doubts] == []
    assert Path("x/train_ncu_roofline.png").read_bytes().startswith(b"\x89PNG")
