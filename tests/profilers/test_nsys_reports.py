"""Reports of nsys: names over versions, and success that is judged by what was written."""

from pathlib import Path

import pytest
from scripted import KERN_SUM, NO_KERNELS, OLD_KERN_SUM, REPORTS

from perfexp.errors import UserError
from perfexp.profilers import Place, ProfilerFailed, reports, tools


def source(folder):
    """What a report is made of; its content is the scripted tool's."""
    path = folder / "x.sqlite"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("asked", "known", "names"),
    [
        ("cuda_gpu_kern_sum", {"cuda_gpu_kern_sum"}, ["cuda_gpu_kern_sum"]),
        ("gpukernsum", {"cuda_gpu_kern_sum"}, ["cuda_gpu_kern_sum"]),
        ("cuda_gpu_kern_sum", {"gpukernsum"}, ["gpukernsum"]),
        ("cuda_gpu_kern_sum:base", {"gpukernsum"}, ["gpukernsum:base"]),
        ("cudaapisum", {"cuda_api_sum"}, ["cuda_api_sum"]),
        ("gpumemtimesum", {"cuda_gpu_mem_time_sum"}, ["cuda_gpu_mem_time_sum"]),
        ("nvtxsum", {"nvtx_sum"}, ["nvtx_sum"]),
        ("nvtx_gpu_proj_sum", {"nvtxgpuproj"}, ["nvtxgpuproj"]),
        ("nvtxgpuproj", {"nvtx_gpu_proj_sum"}, ["nvtx_gpu_proj_sum"]),
        ("apigpusum", set(), ["apigpusum", "cuda_api_gpu_sum"]),
        ("no_such_sum", {"nvtx_sum"}, []),
    ],
)
def test_the_name_that_the_installed_version_knows_is_asked_for(asked, known, names):
    assert reports.names_of(asked, frozenset(known)) == names


def test_an_old_nsys_makes_what_is_asked_for_by_its_new_name(nsys, tmp_path):
    nsys(version="NVIDIA Nsight Systems version 2022.4.2.1", reports={"gpukernsum": OLD_KERN_SUM})
    tool = tools.find("nsys")
    place = Place(folder=tmp_path, stem="train")
    sheets, problems = reports.write(
        tool, source(tmp_path), ["cuda_gpu_kern_sum"], place, lambda path: None
    )
    assert problems == {}
    assert (tmp_path / "train_cuda_gpu_kern_sum.csv").read_text() == OLD_KERN_SUM
    assert reports.kernels(sheets) == [
        {"name": "fprop", "count": 5, "seconds": pytest.approx(5e-6), "share": 1.0},
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("crash", "KeyError"),
        (NO_KERNELS, "does not contain CUDA kernel data"),
        ("Time (%),Total Time (ns),Name\n", "rows"),
    ],
)
def test_report_without_rows_is_a_failure_despite_exit_code_0(nsys, tmp_path, answer, why):
    nsys(reports={"cuda_gpu_kern_sum": answer})
    tool = tools.find("nsys")
    with pytest.raises(ProfilerFailed, match=why) as failure:
        reports.make(tool, source(tmp_path), "cuda_gpu_kern_sum", reports.known(tool))
    assert str(failure.value)


def test_an_unknown_report_is_told_with_its_nearest_names(nsys, tmp_path):
    nsys(reports=REPORTS)
    tool = tools.find("nsys")
    with pytest.raises(ProfilerFailed, match="it has cuda_gpu_kern_sum"):
        reports.make(tool, source(tmp_path), "cuda_gpu_kernel_sum", reports.known(tool))


def test_a_table_is_found_below_what_nsys_says_before_it():
    text = f"Generating SQLite file a.sqlite from a.nsys-rep\nProcessing [a, b, c] with [d.py]... \n\n{KERN_SUM}"
    sheet = reports.read(text)
    assert sheet.header[-1] == "Name"
    assert sheet.column("name") == ["void dgrad2d<float, 3>(float *, int)", "fprop"]
    assert reports.read("nothing at all") is None
    assert reports.read("") is None


@pytest.mark.parametrize("name", ["/tmp/evil.py", "../x", "a b", "Report", "cuda_gpu_kern_sum;ls"])
def test_a_report_is_a_name_and_never_the_path_of_a_script(name):
    with pytest.raises(UserError, match="is not a report"):
        reports.check([name])


def test_several_reports_may_stand_in_one_word():
    assert reports.check(["nvtx_sum,osrt_sum", "nvtx_sum", "cuda_gpu_kern_sum:base"]) == [
        "nvtx_sum",
        "osrt_sum",
        "cuda_gpu_kern_sum:base",
    ]


def test_times_in_other_units_are_understood():
    text = "Time (%),Total Time (ms),Instances,Name\n100.0,2.5,5,fprop\n"
    assert reports.kernels({"cuda_gpu_kern_sum": reports.read(text)})[0][
        "seconds"
    ] == pytest.approx(2.5e-3)


def test_a_profile_and_a_tool_may_be_named_by_relative_paths(nsys, tmp_path, monkeypatch):
    nsys()
    source(tmp_path)
    monkeypatch.chdir(tmp_path)
    tool = tools.find("nsys", "tools/nsys")
    sheet = reports.make(tool, Path("x.sqlite"), "cuda_gpu_kern_sum", reports.known(tool))
    assert len(sheet.rows) == 2


def test_failed_export_leaves_the_earlier_database(nsys, tmp_path):
    tool = nsys(no_export=True)
    profile, target = tmp_path / "x.nsys-rep", tmp_path / "x.sqlite"
    profile.touch()
    target.write_text("before")
    assert reports.export(tools.find("nsys"), profile, target) == "Failed to create output file"
    assert target.read_text() == "before"
    (tmp_path / "after").write_text("after")
    tool.script(version="Version 2025.3.1", reports={}, database=str(tmp_path / "after"))
    assert reports.export(tools.find("nsys"), profile, target) is None
    assert target.read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] in ".x") == [
        "x.nsys-rep",
        "x.sqlite",
    ]
