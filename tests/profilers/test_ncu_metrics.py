"""Which counters are asked for: those of a roofline that the chip at hand has."""

import pytest
from scripted import METRICS_SM90

from perfexp.profilers import About, Place, ProfilerFailed, tools
from perfexp.profilers.ncu import Ncu, available_counters, roofline_counters

SM75 = [
    "gpu__time_duration",
    "dram__bytes_read",
    "dram__bytes_write",
    "sm__inst_executed_pipe_tensor",
    "lts__t_bytes",
]


def test_tensor_core_operations_are_preferred_to_instructions():
    chosen = roofline_counters(METRICS_SM90)
    tensor = [name for name in chosen if "tensor" in name]
    assert tensor == [
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
        "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
    ]


def test_an_older_chip_counts_instructions():
    chosen = roofline_counters(SM75)
    assert "sm__inst_executed_pipe_tensor.sum" in chosen
    assert {name.partition(".")[0] for name in chosen} <= set(SM75)


def test_a_newer_chip_has_other_names_for_the_same():
    chosen = roofline_counters(
        [
            "gpu__time_duration",
            "dram__bytes_op_read",
            "dram__bytes_op_write",
            "gpu__dram_throughput",
        ]
    )
    assert chosen == [
        "gpu__time_duration.sum",
        "dram__bytes_op_read.sum",
        "dram__bytes_op_write.sum",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ]


def test_the_chip_is_asked_for_by_its_name(ncu):
    tool = ncu()
    found = available_counters(tools.find("ncu"), "9.0")
    assert found == frozenset(METRICS_SM90)
    assert ["--query-metrics", "--chips", "gh100"] in tool.calls


def test_a_chip_that_nobody_knows_is_asked_itself(ncu):
    tool = ncu(metrics=[])
    with pytest.raises(ProfilerFailed, match=r"compute capability 99\.9"):
        available_counters(tools.find("ncu"), "99.9", index=1)
    assert tool.calls[-1] == ["--query-metrics", "--devices", "1"]


def test_counters_that_the_user_names_are_taken_as_they_are(ncu, tmp_path):
    tool = ncu()
    profiler = Ncu(
        metrics=["sm__warps_active.avg", "regex:lts__.*"],
        sections=["Occupancy"],
        cache_control="none",
    )
    command = profiler.command(Place(folder=tmp_path, stem="train"), About(phase="train"))
    assert "--metrics=sm__warps_active.avg,regex:lts__.*" in command
    assert {"--section=Occupancy", "--cache-control=none"} <= set(command)
    assert not [call for call in tool.calls if "--query-metrics" in call]
