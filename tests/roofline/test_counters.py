"""FLOPs and bytes by whichever metrics there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.roofline.counters import count, recorded_peaks, wanted
from perfexp.roofline.listing import Launch
from tests.roofline.listings import operation

TIME = {"gpu__time_duration.sum": 1e-5}


def launch(metrics: dict[str, float], capability: str = "9.0") -> Launch:
    assert all(map(wanted, metrics)), [name for name in metrics if not wanted(name)]
    return Launch(kernel="k", capability=capability, metrics={**TIME, **metrics})


def test_each_precision_has_its_own_flops() -> None:
    names = ("fadd", "fmul", "ffma", "dadd", "dmul", "dfma", "hadd", "hmul", "hfma")
    found = count(launch({operation(name): 10.0**place for place, name in enumerate(names)}))
    assert found.flops == {
        "fp32": 1 + 10 + 2 * 100,
        "fp64": 1e3 + 1e4 + 2 * 1e5,
        "half": 2 * (1e6 + 1e7 + 2 * 1e8),  # packed: each instruction is of two numbers
    }
    assert not found.lacking


def test_rates_per_cycle_are_sums() -> None:
    """What `ncu --set roofline` leaves: counts per cycle, and those of FMA doubled."""
    stem = operation("fadd").removesuffix(".sum")
    metrics = {
        f"{stem}.sum.per_cycle_elapsed": 3.0,
        "derived__smsp__sass_thread_inst_executed_op_ffma_pred_on_x2": 8.0,
        "derived__smsp__sass_thread_inst_executed_op_hfma_pred_on_x4": 4.0,
        "smsp__cycles_elapsed.avg.per_second": 1e9,
        "dram__bytes.sum.per_second": 5e11,
    }
    found = count(launch(metrics))
    assert found.flops == {
        "fp32": pytest.approx(11 * 1e9 * 1e-5),
        "half": pytest.approx(4 * 1e9 * 1e-5),
    }
    assert found.dram_bytes == pytest.approx(5e6)
    assert found.lacking == (operation("fmul"), operation("hadd"), operation("hmul"))


def test_operations_of_tensor_cores_are_counted_once() -> None:
    stem = "sm__ops_path_tensor_src_"
    metrics = {
        f"{stem}fp16.sum": 300.0,
        f"{stem}fp16_dst_fp16.sum": 100.0,
        f"{stem}fp16_dst_fp32.sum": 200.0,
        f"{stem}bf16_dst_fp32.sum": 50.0,
        f"{stem}bf16_dst_fp32_sparsity_off.sum": 50.0,
        f"{stem}tf32_dst_fp32_sparsity_off.sum": 7.0,
        f"{stem}tf32_dst_fp32_sparsity_on.sum": 0.0,
        f"{stem}fp8_dst_fp16.sum": 1.0,
        f"{stem}fp8_dst_fp32.sum": 2.0,
        "sm__inst_executed_pipe_tensor.sum": 99.0,
    }
    found = count(launch(metrics))
    assert found.flops == {"tensor fp16": 300, "tensor bf16": 50, "tensor tf32": 7, "tensor fp8": 3}
    assert not found.estimated
    assert not wanted(f"{stem}int8.sum")


@pytest.mark.parametrize(
    ("capability", "each"), [("7.0", 512), ("7.5", 2048), ("8.0", 4096), ("8.9", 4096)]
)
def test_older_tensor_core_instructions_have_an_estimated_size(capability: str, each: int) -> None:
    found = count(launch({"sm__inst_executed_pipe_tensor.sum": 10.0}, capability))
    assert found.flops == {"tensor": 10 * each}
    assert found.estimated
    kinds = {
        "sm__inst_executed_pipe_tensor_op_hmma.sum": 10.0,
        "sm__inst_executed_pipe_tensor_op_dmma.sum": 1.0,
    }
    assert count(launch(kinds, capability)).flops == {"tensor": 10 * each, "tensor fp64": 512}


def test_instructions_of_unknown_size_are_named_not_guessed() -> None:
    found = count(launch({"sm__inst_executed_pipe_tensor.sum": 10.0}, "9.0"))
    assert found.flops is None
    assert found.lacking == ("sm__ops_path_tensor_src_*.sum",)


def test_reads_and_writes_make_the_bytes() -> None:
    assert (
        count(launch({"dram__bytes_read.sum": 3.0, "dram__bytes_write.sum": 4.0})).dram_bytes == 7
    )
    assert (
        count(launch({"dram__bytes_op_read.sum": 3.0, "dram__bytes_op_write.sum": 4.0})).dram_bytes
        == 7
    )
    assert count(launch({"dram__bytes_read.sum": 3.0})).dram_bytes is None
    assert (
        count(launch({"dram__bytes_read.sum": 3.0, "dram__bytes_op_write.sum": 4.0})).dram_bytes
        is None
    )


def test_time_may_come_from_cycles() -> None:
    metrics = {"sm__cycles_elapsed.avg": 2e4, "sm__cycles_elapsed.avg.per_second": 1e9}
    assert count(Launch(kernel="k", metrics=metrics)).seconds == pytest.approx(2e-5)


def test_peaks_that_ncu_recorded_are_those_of_its_clocks() -> None:
    stem = "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained"
    metrics = {
        stem: 128.0 * 132,
        "sm__cycles_elapsed.avg.per_second": 1.7e9,
        "dram__bytes.sum.peak_sustained": 1280.0,
        "dram__cycles_elapsed.avg.per_second": 2.6e9,
        "lts__t_bytes.sum": 1e7,
        "lts__t_bytes.sum.pct_of_peak_sustained_elapsed": 0.2,
    }
    assert recorded_peaks(launch(metrics)) == {
        "fp32": pytest.approx(2 * 128 * 132 * 1.7e9),
        "dram": pytest.approx(1280 * 2.6e9),
        "l2": pytest.approx(1e7 / 1e-5 / 0.2),
    }


@given(
    st.dictionaries(
        st.sampled_from(["fadd", "fmul", "ffma", "dfma", "hmul"]),
        st.integers(0, 10**15),
        min_size=1,
    )
)
def test_twice_the_instructions_are_twice_the_flops(counts: dict[str, int]) -> None:
    once = count(launch({operation(name): float(value) for name, value in counts.items()})).flops
    twice = count(launch({operation(name): 2.0 * value for name, value in counts.items()})).flops
    assert once is not None
    assert twice == {kind: pytest.approx(2 * value) for kind, value in once.items()}
