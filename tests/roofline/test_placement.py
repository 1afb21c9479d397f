"""Where work stands below the roofs, and what is said of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.cost import Geometry
from perfexp.errors import UserError
from perfexp.host.gpu_sheets import GpuFacts, GpuFile, read
from perfexp.measuring.layers import Key as LayerKey
from perfexp.measuring.layers import Pass
from perfexp.measuring.layers.table import Line, Spread
from perfexp.records.analysis import Analysis
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric, Point, Status, layers_key
from perfexp.report import markdown
from perfexp.roofline import Peaks, Roofline, of_csv, of_listing, of_record, recorded
from perfexp.roofline.counters import wanted
from perfexp.roofline.kernel_names import cut, numbered, short
from perfexp.roofline.listing import parse
from perfexp.roofline.peaks import by_hand, matching, named, of_plan, of_sheet
from perfexp.roofline.placement import Basis, Limit, RooflineRow
from perfexp.roofline.sentences import meaning, missing_backward
from tests.roofline.listings import DRAM, L2, SM, TIME, Kernel, counted, long_form, wide_form

PEAKS = by_hand(10, 1000)
SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "sample_metrics.csv"


def roofline(*kernels: Kernel, peaks: Peaks = PEAKS) -> Roofline:
    return of_listing(parse(long_form(kernels), "ncu.csv", wanted), peaks, "test")


@pytest.mark.parametrize(
    ("us", "fmas", "mbytes", "binds", "words"),
    [
        (100, 10**6, 90, "DRAM", "Memory limits it (90% of DRAM's bandwidth)"),
        (100, 45 * 10**7, 1, "compute", "Compute limits it (90% of compute)"),
        (100, 10**6, 10, "DRAM", "Neither ceiling limits it"),
        (2, 10**6, 0.1, "compute", "A launch takes 2.00 µs"),
        (100, 10**6, 150, "DRAM", "above the ceiling (150% of DRAM)"),
    ],
)
def test_what_holds_a_kernel_back(
    us: float, fmas: int, mbytes: float, binds: str, words: str
) -> None:
    found = roofline(counted(us=us, fmas=fmas, mbytes=mbytes))
    assert found.parts[0].binds == binds
    assert words in meaning(found, found.parts[0])


def test_a_kernel_of_many_launches_is_one_and_each_launch_stays() -> None:
    found = roofline(counted("a", us=10), counted("b", us=15), counted("a", us=30))
    assert [(row.name, row.load.launches, row.time_share) for row in found.parts] == [
        ("a", 2, pytest.approx(40 / 55)),
        ("b", 1, pytest.approx(15 / 55)),
    ]
    assert [row.name for row in found.launches] == ["a", "b", "a"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.floats(1, 1e4), st.integers(0, 10**12), st.floats(1e-3, 1e3)
        ),
        min_size=1,
    )
)
def test_kernels_and_ranges_sum_to_the_whole(launches: list[tuple[str, float, int, float]]) -> None:
    kernels = [
        counted(name, us=round(us, 3), fmas=fmas, mbytes=round(mbytes, 4), stack=("step", name))
        for name, us, fmas, mbytes in launches
    ]
    found = roofline(*kernels)
    inner = [row for row in found.ranges if row.name != "step"]
    for rows in (found.parts, found.launches, inner):
        assert sum(row.load.seconds for row in rows) == pytest.approx(found.total.load.seconds)
        assert sum(row.load.total_flops or 0 for row in rows) == pytest.approx(
            found.total.load.total_flops
        )
        assert sum(row.load.dram_bytes or 0 for row in rows) == pytest.approx(
            found.total.load.dram_bytes
        )
        assert sum(row.time_share for row in rows) == pytest.approx(1)


@given(st.floats(1e-3, 1e5), st.floats(1e-3, 1e3))
def test_the_roof_that_binds_is_the_one_that_intensity_says(intensity: float, share: float) -> None:
    """Left of the ridge memory binds, right of it compute: the same as the greater share."""
    moved = 10**7
    found = roofline(
        counted(us=share * 1e3, fmas=max(round(intensity * moved / 2), 1), mbytes=10)
    ).total
    ridge = 10e12 / 1000e9
    assert found.load.intensity is not None
    if found.load.intensity != pytest.approx(ridge, rel=1e-9):
        assert found.binds == ("DRAM" if found.load.intensity < ridge else "compute")


def test_each_kind_of_flops_has_a_ceiling_and_the_fullest_counts() -> None:
    sheet = Peaks(flops_per_second={"fp32": 1e13, "bf16": 1e14}, dram_bytes_per_second=1e12)
    kernel = counted(us=100, fmas=10**8, mbytes=1)
    kernel.metrics = {
        **kernel.metrics,
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum": ("", "7000000000"),
    }
    total = roofline(kernel, peaks=sheet).total
    assert total.shares["FP32"] == pytest.approx(0.2)
    assert total.shares["BF16 tensor"] == pytest.approx(0.7)
    assert total.compute_share == pytest.approx(0.7)
    assert total.binds == "BF16 tensor"


def test_flops_without_a_known_roof_are_counted_and_told() -> None:
    kernel = counted()
    kernel.metrics = {
        **kernel.metrics,
        "smsp__sass_thread_inst_executed_op_dfma_pred_on.sum": ("inst", "5"),
    }
    found = roofline(
        kernel, peaks=Peaks(flops_per_second={"fp32": 1e13}, dram_bytes_per_second=1e12)
    )
    assert found.total.load.flops is not None
    assert found.total.load.flops["fp64"] == 10
    assert any("No peak is known for fp64" in note for note in found.notes)


def test_the_l2_roof_is_the_one_that_was_measured() -> None:
    kernel = counted(us=100, fmas=10**6, mbytes=10)
    share = ("%", "80")
    l2 = {L2: ("Mbyte", "400"), "lts__t_bytes.sum.pct_of_peak_sustained_elapsed": share}
    kernel.metrics = {**kernel.metrics, **l2}
    listing = parse(long_form([kernel]), "ncu.csv", wanted)
    found = of_listing(listing, PEAKS.or_else(recorded(listing)[0]), "l2")
    assert found.peaks.l2_bytes_per_second == pytest.approx(5e12)
    assert found.parts[0].binds == "L2"
    assert "The L2 cache limits it (80%" in meaning(found, found.parts[0])


@pytest.mark.parametrize(
    ("percent", "warns"),
    [("50", False), ("47", False), ("53", False), ("44", True), ("60", True), ("10", False)],
)
def test_memory_ceiling_contradicted_by_percentages_is_flagged(percent: str, warns: bool) -> None:
    """50 MB in 100 µs are half of 1000 GB/s; a memory that is hardly used tells no peak."""
    busy = counted(us=100, mbytes=50 if percent != "10" else 5)
    busy.metrics = {**busy.metrics, DRAM: ("%", percent)}
    found = [
        note
        for note in roofline(busy).notes
        if note.startswith("The memory ceiling (1.00 TB/s, given by")
    ]
    assert bool(found) == warns
    if percent == "60":
        assert "a peak of 833 GB/s" in found[0]


def test_percentages_become_estimates_and_it_says_what_they_are() -> None:
    found = roofline(Kernel(metrics={TIME: ("us", "10"), SM: ("%", "50"), DRAM: ("%", "20")}))
    assert found.total.load.total_flops == pytest.approx(0.5 * 1e13 * 1e-5)
    assert found.total.load.dram_bytes == pytest.approx(0.2 * 1e12 * 1e-5)
    assert found.estimated
    assert any("sm__throughput is the busiest part of the SM" in note for note in found.notes)
    assert any("Bytes are estimates" in note for note in found.notes)


def test_step_with_a_missing_backward_pass_looks_incomplete() -> None:
    forward = [counted(stack=("train_step", "forward")) for _ in range(10)]
    backward = [counted(stack=("train_step", "backward"))]
    (told, *_) = roofline(*forward, *backward).notes
    assert "10 kernels in its forward pass and 1 kernel in its backward one" in told
    assert "range_start" in told
    assert "cudaProfilerStart" in told
    whole = [counted(spans=("train_step", "backward"))] * 20
    assert not roofline(*forward, *[counted(spans=("train_step", "forward"))] * 10, *whole).notes


@pytest.mark.parametrize(
    ("ranges", "incomplete"),
    [
        ({"train_step": 110, "train_step/forward": 103, "train_step/backward": 1}, True),
        ({"train_step": 110, "train_step/forward": 103}, True),
        ({"train_step": 300, "train_step/forward": 100, "train_step/backward": 190}, False),
        (
            {
                "train_step/forward": 100,
                "train_step/forward/forward_inner": 100,
                "train_step/backward": 60,
            },
            False,
        ),
        ({"inference": 100, "inference/forward": 100}, False),
        ({"train_step/forward": 2, "train_step/backward": 0}, False),
        ({}, False),
    ],
)
def test_only_steps_with_too_little_backward_look_incomplete(
    ranges: dict[str, int], incomplete: bool
) -> None:
    assert (missing_backward(ranges) is not None) == incomplete


def test_names_are_short_and_say_what_is_special() -> None:
    names = {
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int, T2, T3)": (
            "CUDAFunctor_add · vectorized_elementwise_kernel"
        ),
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(P<T1, T2>)": "winogradForwardData4x4",
        "volta_sgemm_128x64_nn": "volta_sgemm_128x64_nn",
        "void (anonymous namespace)::softmax<float>(T2 *)": "softmax",
        "": "",
    }
    assert {name: short(name) for name in names} == names


def parts(*names: str) -> list[tuple[str, str]]:
    """Names and labels of kernels, the first one the slowest."""
    found = roofline(*(counted(name, us=100 - number) for number, name in enumerate(names)))
    return [(row.name, row.label) for row in found.parts]


def test_kernels_with_the_same_short_name_are_numbered() -> None:
    names = (
        "void ns::gemm<float, (int)4, (bool)1>(T1 *)",
        "void ns::gemm<float, (int)8, (bool)1>(T1 *)",
        "copy<int>(T1)",
        "gemm(int)",
    )
    labeled = [(names[0], "gemm"), (names[1], "gemm #2"), (names[2], "copy"), (names[3], "gemm #3")]
    assert parts(*names) == labeled


def test_launches_are_called_as_their_kernels() -> None:
    found = roofline(
        counted("k<(int)1>(T)", us=1), counted("k<(int)2>(T)", us=9), counted("k<(int)1>(T)", us=2)
    )
    assert [row.label for row in found.launches] == ["k #2", "k", "k #2"]


@given(
    st.lists(st.text("k<>(),: 12a", min_size=1, max_size=12), min_size=1, max_size=6, unique=True)
)
def test_no_two_kernels_have_the_same_label(names: list[str]) -> None:
    assert len(set(numbered(map(short, names)))) == len(names)


def test_a_label_that_is_cut_keeps_both_ends() -> None:
    assert cut("multi_tensor_apply_kernel #2", 12) == "multi_…el #2"
    assert cut("gemm<…, 4>", 10) == "gemm<…, 4>"
    assert len(cut("a" * 50 + "<…, 4>", 20)) == 20


def test_roofline_numbers_kernels_and_layers_from_the_slowest() -> None:
    found = roofline(
        counted("a", us=10, stack=("step", "inner")), counted("b", us=15), counted("a", us=30)
    )
    assert [(row.number, row.name) for row in found.parts] == [("1", "a"), ("2", "b")]
    assert [row.number for row in found.launches] == ["1", "2", "1"]
    assert [row.number for row in found.ranges] == ["R1", "R2"]


def test_each_figure_states_whether_it_is_estimated_or_counted() -> None:
    def row(**metrics: tuple[str, str]) -> RooflineRow:
        kernel = counted(us=100, fmas=10**6, mbytes=10)
        kernel.metrics = {**kernel.metrics, **metrics}
        return roofline(kernel).parts[0]

    plain = row()
    assert (plain.load.flops_basis, plain.load.bytes_basis) == (Basis.counted, Basis.counted)
    of_counts = roofline(counted(us=100, fmas=10**6))
    assert "≈" not in meaning(of_counts, of_counts.parts[0])
    share = Kernel(metrics={TIME: ("us", "10"), SM: ("%", "50"), DRAM: ("%", "20")})
    found = roofline(share)
    part = found.parts[0]
    assert (part.load.flops_basis, part.load.bytes_basis) == (Basis.percentage, Basis.percentage)
    assert (part.flops_are_estimated, part.is_estimated("compute")) == (
        True,
        False,
    )  # ncu measured the percentage itself
    assert "≈" not in meaning(found, part)
    assert "≈ marks estimates and figures derived from them; times are measured." in found.notes
    both = roofline(counted(), share)
    assert both.total.load.flops_basis is Basis.mixed
    assert both.total.is_estimated("compute")
    assert "≈" in meaning(both, both.total)


T4 = GpuFile(
    match=r"\bT4\b",
    facts=GpuFacts(
        product="T4",
        peak_flops_per_second={"fp32": 8e12, "fp64": None},
        memory_bytes_per_second=3e11,
    ),
)


def test_peaks_count_in_the_order_hand_name_file() -> None:
    sheet = of_sheet(T4.facts)
    assert by_hand(None, 300).or_else(sheet).dram_bytes_per_second == 3e11
    assert by_hand(None, 200).or_else(sheet).sources == ("given by hand", "data sheet of T4")
    assert by_hand(9, 200).or_else(sheet).sources == ("given by hand",)
    assert matching("Tesla T4", {"t4": T4}) == sheet
    assert matching("Tesla V100", {"t4": T4}) == Peaks()
    assert named("T4", {"t4": T4}) == replace(sheet, match=T4.match)


def test_a_gpu_that_the_file_names_gives_the_peaks(tmp_path: Path) -> None:
    kernel = counted()
    kernel.metrics = {**kernel.metrics, "device__attribute_display_name": ("", "Tesla T4")}
    for number, form in enumerate((long_form, wide_form)):
        path = tmp_path / f"{number}.csv"
        path.write_text(form([kernel]))
        assert of_csv(path, sheets={"t4": T4}).peaks.sources == ("data sheet of T4",)
        with pytest.raises(
            UserError, match="measured on Tesla T4, whose peak FLOP/s and memory bandwidth"
        ):
            of_csv(path)


@pytest.mark.parametrize(
    ("compute", "memory"), [(0, 300), (-1, 300), (8, 0), (8, -5), (float("nan"), 1)]
)
def test_a_peak_is_above_zero(compute: float, memory: float) -> None:
    with pytest.raises(UserError, match="a peak is above zero"):
        by_hand(compute, memory)


def test_own_folder_adds_a_gpu_and_its_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    text = "facts:\n  product: Z9\n  peak_flops_per_second: {fp32: 1.0e+12}\n  memory_bytes_per_second: 1.0e+11\n"
    (tmp_path / "gpu" / "z9.yaml").write_text(text)
    assert named("z9", read([tmp_path])).flops_per_second == {"fp32": 1e12}
    (tmp_path / "gpu" / "bad.yaml").write_text("facts: [")
    with pytest.raises(UserError, match=r"bad\.yaml"):
        read([tmp_path])


def layer(path: str, which: Pass, seconds: float, **work: Any) -> Line:
    key = LayerKey(path=path, call=0, operation=None, kind="Conv2d", which=which)
    spread = Spread(mean=seconds, median=seconds, low=None, high=None)
    nothing = Spread(mean=0.0, median=0.0, low=None, high=None)
    return Line(key=key, kind="Conv2d", seconds=spread, gap_seconds=nothing, share=0.5, **work)


def run_of(make_record, lines: list[Line], *, phase: str = "inference", **fields):
    record = make_record(phases=(phase,), **fields)
    facts = {"layers": {"lines": msgspec.to_builtins(lines)}}
    record.points.append(Point(key=layers_key(record.points[0].key), status=Status.OK, facts=facts))
    return record


SHEET = {
    "product": "X",
    "peak_flops_per_second": {"fp32": 1e12, "tf32": None},
    "memory_bytes_per_second": 1e11,
}


def test_analytic_layer_above_the_ceiling_is_not_an_error(make_record) -> None:
    lines = [
        layer("conv1", Pass.forward, 1e-3, flops=2 * 10**9, bytes_min=10**6),
        layer("conv2", Pass.forward, 1e-3, flops=10**8, bytes_min=9 * 10**7),
        layer("block", Pass.forward, 1e-6),
    ]
    found = of_record(run_of(make_record, lines, plan={"gpu": {"facts": SHEET}}))["inference"]
    above, near = found.parts[:2]
    assert above.shares == {"DRAM": pytest.approx(0.01), "FP32": pytest.approx(2.0)}
    assert "Winograd" in meaning(found, above)
    assert "not an error" in meaning(found, above)
    assert "Memory limits it (≈ 90%" in meaning(found, near)
    assert "It lies above the ceiling (≈ 200% of FP32)" in meaning(found, above)
    assert found.total.load.dram_bytes == 9.1e7
    assert found.analytic
    assert "analytic" in found.notes[0]


@pytest.mark.parametrize(
    ("algorithm", "ran", "limit"),
    [
        ({"name": "winograd_nonfused"}, None, Limit.unclear),
        ({"name": "default"}, None, Limit.unclear),
        ({"name": "benchmark"}, None, Limit.unclear),
        ({"name": "default"}, "fft or fft_tiling", Limit.unclear),
        ({"name": "default"}, "implicit_gemm", Limit.compute),
        ({"name": "implicit_precomp_gemm"}, None, Limit.compute),
        ({"name": "implicit_precomp_gemm", "layers": {"conv1": "winograd"}}, None, Limit.unclear),
    ],
)
def test_flops_that_may_not_have_been_computed_show_no_limit(
    make_record, algorithm, ran, limit
) -> None:
    """A matrix product has the FLOPs of its definition, a convolution those of a direct one."""
    work = {"flops": 9 * 10**8, "bytes_min": 10**6}
    convolution = Geometry(
        in_channels=3, out_channels=8, kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
    )
    lines = [
        layer(
            "conv1",
            Pass.forward,
            3e-3,
            **{**work, "flops": 27 * 10**8},
            convolution=convolution,
            ran=ran,
        ),
        layer("fc", Pass.forward, 1e-3, **work),
    ]
    plan = {"gpu": {"facts": SHEET}, "algorithm": algorithm}
    found = of_record(run_of(make_record, lines, plan=plan))["inference"]
    assert [row.limit for row in found.parts] == [limit, Limit.compute]
    summary, first = meaning(found, found.total), meaning(found, found.parts[0])
    is_unclear = limit is Limit.unclear
    assert ("25% are near a compute ceiling" in summary) is is_unclear
    assert ("75% are of unclear limit (Winograd and FFT multiply less" in summary) is is_unclear
    assert ("only the counters of a profiler show what limits it" in first) is is_unclear
    assert ("Compute limits it" in first) is not is_unclear


@pytest.mark.parametrize(("share", "limit"), [(0.9, Limit.memory), (1.3, Limit.cached)])
def test_layer_beyond_the_memory_ceiling_counts_as_cached(make_record, share, limit) -> None:
    moved = round(share * 1e-3 * SHEET["memory_bytes_per_second"])
    lines = [layer("relu", Pass.forward, 1e-3, flops=1000, bytes_min=moved)]
    found = of_record(run_of(make_record, lines, plan={"gpu": {"facts": SHEET}}))["inference"]
    assert [row.limit for row in found.parts] == [limit]
    assert f"100% are {limit.value}" in meaning(found, found.total)
    assert ("its data stays in a cache" in meaning(found, found.parts[0])) is (
        limit is Limit.cached
    )


def test_analytic_layer_below_its_ceilings_points_to_counters(make_record) -> None:
    line = layer("conv1", Pass.forward, 1e-3, flops=10**8, bytes_min=10**6)
    found = of_record(run_of(make_record, [line], plan={"gpu": {"facts": SHEET}}))["inference"]
    assert "latency" not in meaning(found, found.parts[0])
    assert "only the counters of a profiler show what it waits for (profiler=ncu)" in meaning(
        found, found.parts[0]
    )


def test_layers_that_do_not_close_are_told_first(make_record) -> None:
    line = layer("conv1", Pass.forward, 1e-3, flops=10**8, bytes_min=10**6)
    record = run_of(make_record, [line], plan={"gpu": {"facts": SHEET}})
    record.points[-1].doubts.append(
        Diagnostic(code="layers_disagree", message="4 ms against 2 ms", help="read shares")
    )
    first = of_record(record)["inference"].notes[0]
    assert first == "warning: 4 ms against 2 ms (layers_disagree)"


def test_what_a_backward_pass_moves_is_not_made_up(make_record) -> None:
    lines = [
        layer("conv1", Pass.forward, 1e-3, flops=10**8, bytes_min=10**6),
        layer("conv1", Pass.backward, 2e-3, flops=2 * 10**8),
    ]
    found = of_record(run_of(make_record, lines, phase="train", plan={"gpu": {"facts": SHEET}}))[
        "train"
    ]
    assert [row.load.dram_bytes for row in found.ranges] == [1e6, None]
    assert found.total.load.total_flops == 3e8
    assert found.total.load.intensity is None
    assert any("67% of the time" in note for note in found.notes)
    assert "no place" in meaning(found, found.parts[0])


def test_measured_ceilings_replace_a_missing_data_sheet(make_record) -> None:
    record = run_of(make_record, [layer("conv1", Pass.forward, 1e-3, flops=10**8, bytes_min=10**6)])
    with pytest.raises(
        UserError,
        match=r"measured on NVIDIA H200, whose peak .* gpu/NAME\.yaml.* probes\.ceilings=true",
    ):
        of_record(record)
    record.points[0].metrics += [
        Metric(name="ceiling/flops_per_second", value=2e11, unit="1/s"),
        Metric(name="ceiling/bytes_per_second", value=1e10, unit="bytes/s"),
    ]
    found = of_record(record)["inference"]
    assert found.parts[0].shares == {"DRAM": pytest.approx(0.1), "FP32": pytest.approx(0.5)}
    assert "measured in the run" in found.peaks.sources[0]


def test_peaks_of_another_device_are_labeled_as_such(make_record, tmp_path: Path) -> None:
    line = layer("conv1", Pass.forward, 1e-3, flops=10**8, bytes_min=10**6)
    record = run_of(make_record, [line])  # measured on an NVIDIA H200
    note = of_record(record, named("t4", {"t4": T4}))["inference"].notes[0]
    assert note.startswith(
        "The peaks belong to another device than the measured one: data sheet of T4; measured "
    )
    assert "on NVIDIA H200." in note
    kernel = counted()
    kernel.metrics = {**kernel.metrics, "device__attribute_display_name": ("", "NVIDIA H200")}
    path = tmp_path / "ncu.csv"
    path.write_text(long_form([kernel]))
    assert of_csv(path, named("t4", {"t4": T4})).notes[0] == note
    told = of_csv(path, by_hand(None, 200).or_else(named("t4", {"t4": T4}))).notes[0]
    assert "given by hand, data sheet of T4; measured on NVIDIA H200" in told
    for own in (by_hand(9, 200), by_hand(9, 200).or_else(named("t4", {"t4": T4}))):
        assert not any("another device" in each for each in of_csv(path, own).notes)
    record.environment["device"]["name"] = "Tesla T4"
    assert not any(
        "another device" in each
        for each in of_record(record, named("t4", {"t4": T4}))["inference"].notes
    )


def test_a_cpu_is_not_called_a_gpu(make_record) -> None:
    record = run_of(make_record, [layer("conv1", Pass.forward, 1e-3, flops=10**8, bytes_min=10**6)])
    record.environment["device"] = {"kind": "cpu", "name": "AMD EPYC"}
    with pytest.raises(
        UserError, match=r"Give --peak-compute TFLOP/s and --peak-bw GB/s\. Or .*ceilings"
    ) as error:
        of_record(record)
    assert "--gpu" not in str(error.value)


def test_points_that_are_not_drawn_are_told(make_record) -> None:
    lines = [layer("conv1", Pass.forward, 1e-3, flops=10**8, bytes_min=10**6)]
    record = run_of(make_record, lines, sizes=(64, 128), plan={"gpu": {"facts": SHEET}})
    assert not any("Only the largest" in note for note in of_record(record)["inference"].notes)
    facts = record.points[-1].facts
    record.points.append(Point(key=layers_key(record.points[1].key), status=Status.OK, facts=facts))
    note = of_record(record)["inference"].notes[-1]
    assert note.startswith(
        "Only the largest of 2 points with layers is drawn, 128 batch 1: for 64 batch 1 measure"
    )


def test_a_run_without_layers_says_how_to_get_them(make_record) -> None:
    with pytest.raises(UserError, match=r"probes\.layers=true"):
        of_record(make_record())


@pytest.mark.skipif(not SAMPLE.is_file(), reason="the public sample is not here")
def test_a_public_sample_of_a_t4_is_read_right() -> None:
    found = of_csv(SAMPLE, by_hand(8.1, 300))
    assert found.total.load.launches == 112
    assert len(found.parts) == 24
    assert found.total.load.seconds == pytest.approx(7.4694e-3, rel=1e-4)
    ranges = {row.name: row.load.launches for row in found.ranges}
    assert ranges == {
        "train_step": 112,
        "train_step/forward": 103,
        "train_step/loss": 2,
        "train_step/backward": 1,
        "train_step/optimizer_step": 6,
    }
    assert "looks incomplete" in found.notes[0]
    first = found.launches[0]
    assert first.load.total_flops == pytest.approx(0.5134 * 8.1e12 * 272.26e-6)
    assert first.load.dram_bytes == pytest.approx(0.2790 * 300e9 * 272.26e-6)
    optimizer = found.ranges[-1]
    assert optimizer.binds == "DRAM"
    assert optimizer.share == pytest.approx(0.84, abs=0.005)


def test_report_lists_longest_layers_with_ceiling_shares(
    make_record,
) -> None:
    lines = [
        layer(f"conv{n}", Pass.forward, 1e-3 / (n + 1), flops=10**9, bytes_min=10**6)
        for n in range(20)
    ]
    text = markdown.markdown(
        Analysis.of(run_of(make_record, lines, plan={"gpu": {"facts": SHEET}}))
    )
    section = text.partition("## Layers and the ceilings of the device: ")[2].partition("\n## ")[0]
    assert "\nthe top 15 of 20 rows; perfexp roofline DIR draws all\n" in section
    assert "| of compute | of memory |" in section
    assert re.search(r"conv0 .* ≈ 100\.0% \| ≈ 1\.0% \| FP32", section)
    assert "conv15" not in section
    assert "Winograd and FFT need fewer FLOPs" in " ".join(section.split())
    unknown = run_of(
        make_record, lines, environment={"device": {"kind": "cuda", "name": "Unheard Of"}}
    )
    assert "ceilings of the device" not in markdown.markdown(Analysis.of(unknown))


@pytest.mark.parametrize("peaks", ["fast", {"fp32": "fast"}, {"fp32": 67e12}])
def test_a_data_sheet_of_other_types_in_a_plan_has_no_peaks(peaks: object) -> None:
    known = of_plan(
        {"gpu": {"facts": {"product": "H200", "peak_flops_per_second": peaks}}}
    ).flops_per_second
    assert known == ({"fp32": 67e12} if peaks == {"fp32": 67e12} else {})
