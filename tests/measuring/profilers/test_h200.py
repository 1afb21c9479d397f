"""What nsys 2025.3 and ncu 2025.3 wrote on an H200, cut down to a step: read as it is meant.

`resnet18 mode=train batch_size=64` under nsys (one of three steps; only the tables and columns that are read) and under
ncu (a whole step; only the columns that are read), and `model=vgg16` under ncu (the first six kernels and two of the
last; without what it says of the device and its links).
"""

import csv
import gzip
import io
from pathlib import Path

import pytest

from perfexp import roofline
from perfexp.host import gpu_sheets
from perfexp.host.installation import conf_dir
from perfexp.measuring.profilers import nsys, reports
from perfexp.roofline import counters, listing
from perfexp.roofline.peaks import by_hand, of_sheet

HERE = Path(__file__).parent / "h200"
#: Multiply-accumulates of vgg16's first and second convolution at 224 × 224.
FIRST_MACS, SECOND_MACS = 224 * 224 * 64 * 3 * 9, 224 * 224 * 64 * 64 * 9
#: FLOPs of a forward pass of resnet18 at 224 × 224, batch 64, by definition.
FORWARD_FLOPS = 2 * 1.814e9 * 64


def test_a_step_holds_more_backward_kernels_than_forward_ones():
    """Whichever thread launched them: autograd has one of its own, and nsys's own projection does not see it."""
    ranges, work = nsys.project(HERE / "train.sqlite")
    parts = {each["name"]: each for each in ranges}
    assert parts["backward"]["kernels"] > parts["forward"]["kernels"] > 100
    assert parts["optimizer_step"]["kernels"] > 0
    inside = [
        parts[name]["kernels"] for name in ("data", "forward", "loss", "backward", "optimizer_step")
    ]
    assert (
        sum(inside)
        == parts["train_step"]["kernels"]
        == sum(each.kernel is not None for each in work)
    )


def test_the_parts_of_a_step_add_up_to_its_span():
    """What each part's kernels took, with the pauses between, is what the step took: 24.8 ms, timed without it 24.7."""
    parts = {each["name"]: each for each in nsys.project(HERE / "train.sqlite")[0]}
    step = parts["train_step"]
    assert step["span_seconds"] == pytest.approx(24.74e-3, rel=0.02)
    spans = [
        parts[name]["span_seconds"] for name in ("forward", "loss", "backward", "optimizer_step")
    ]
    assert sum(spans) == pytest.approx(step["span_seconds"], rel=0.01)
    assert 0.9 * step["span_seconds"] < step["busy_seconds"] < step["span_seconds"]


def test_the_projection_of_nsys_itself_misses_the_backward_pass():
    """Why perfexp projects by correlation: the range is the process's, the kernels are another thread's."""
    sheet = reports.read((HERE / "train_nvtx_gpu_proj_sum.csv").read_text())
    ours = {each["name"]: each for each in nsys.project(HERE / "train.sqlite")[0]}
    theirs = {
        row["Range"]: row
        for row in csv.DictReader(io.StringIO((HERE / "train_nvtx_gpu_proj_sum.csv").read_text()))
    }
    assert sheet is not None
    assert (
        int(theirs[":backward"]["Total GPU Ops"]) / int(theirs[":backward"]["Range Instances"]) == 1
    )
    assert ours["backward"]["launches"] > 200


def test_kernels_by_nsys_are_ranked_with_their_shares():
    sheet = reports.read((HERE / "train_cuda_gpu_kern_sum.csv").read_text())
    assert sheet is not None
    found = reports.kernels({"cuda_gpu_kern_sum": sheet})
    assert "dgrad_engine" in found[0]["name"]
    assert found[0]["seconds"] == pytest.approx(12502609e-9)
    assert [each["seconds"] for each in found] == sorted(
        (each["seconds"] for each in found), reverse=True
    )


@pytest.fixture
def launches():
    return listing.read(HERE / "inference_ncu.csv", counters.wanted).launches


def test_convolution_flops_are_multiplications_and_additions(launches):
    """cuDNN's implicit GEMM pads what it multiplies: at least twice the multiply-accumulates, and not much more."""
    convolutions = [launch for launch in launches if "fprop_implicit_gemm" in launch.kernel]
    first, second = (counters.count(launch) for launch in convolutions)
    assert 2 * SECOND_MACS <= sum(second.flops.values()) < 1.05 * 2 * SECOND_MACS
    assert sum(first.flops.values()) >= 2 * FIRST_MACS


def test_the_bytes_of_an_activation_are_read_and_written(launches):
    """A rectifier in place on 64 × 224 × 224 float32: 12.8 MB each way through L2 or more; half of it of DRAM."""
    size = 64 * 224 * 224 * 4
    rectifier = counters.count(next(launch for launch in launches if "clamp" in launch.kernel))
    assert 2 * size <= rectifier.l2_bytes < 4 * size
    assert rectifier.dram_bytes == pytest.approx(size, rel=0.05)


def test_constants_that_are_moved_by_half_precision_are_no_flops(launches):
    """The bias is added to 64 × 224 × 224 float32: an FMA for each, and nothing of half precision."""
    bias = counters.count(
        next(launch for launch in launches if "CUDAFunctor_add<float>" in launch.kernel)
    )
    assert bias.flops["fp32"] == 2 * 64 * 224 * 224
    assert bias.flops["half"] == 0
    assert bias.moves == 2 * bias.flops["fp32"]
    found = roofline.of_csv(HERE / "inference_ncu.csv", by_hand(67.0, 4800.0))
    assert any(
        "of half precision in kernels of single precision are left out" in note
        for note in found.notes
    )


@pytest.mark.parametrize(
    ("kernel", "moves"),
    [
        ("void at::vectorized_elementwise_kernel<4, at::CUDAFunctor_add<float>>", True),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x32x8", True),
        ("void cublasGemv<float, __half, float>", False),
        ("void at::vectorized_elementwise_kernel<4, at::CUDAFunctor_add<c10::BFloat16>>", False),
        ("sm80_xmma_gemm_f16f32_f16f32_f32_tn_n_tilesize32x32x8", False),
        ("ampere_fp16_s16816gemm_fp16_64x64", False),
        ("kernel", False),
    ],
)
def test_half_flops_are_moves_only_if_the_kernel_name_says_fp32(kernel, moves):
    """A name that says nothing keeps what was counted."""
    metrics = {
        "smsp__sass_thread_inst_executed_op_hfma_pred_on.sum": 100.0,
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 10.0,
        "gpu__time_duration.sum": 1e-6,
    }
    launch = listing.KernelLaunch(kernel=kernel, capability="9.0", metrics=metrics)
    counted = counters.count(launch)
    assert bool(counted.moves) is moves
    assert bool(counted.flops["half"]) is not moves
    assert counted.flops["fp32"] == 20.0


def test_a_roofline_of_counters_has_every_kernel(launches):
    found = roofline.of_csv(HERE / "inference_ncu.csv", by_hand(67.0, 4800.0))
    assert found.total.load.seconds == pytest.approx(
        sum(counters.count(launch).seconds for launch in launches)
    )
    assert not found.estimated
    assert 0 < found.total.compute_share < 1


@pytest.fixture
def step(tmp_path):
    path = tmp_path / "train_ncu.csv"
    path.write_bytes(gzip.decompress((HERE / "train_ncu.csv.gz").read_bytes()))
    return path


def test_ncu_catches_a_training_step_whole(step):
    """The gradients of inputs and weights, which another thread launches, as nsys saw them: launch for launch."""
    found = roofline.of_csv(step, by_hand(67.0, 4800.0))
    parts = {part.name: part for part in found.ranges}
    by_nsys = {each["name"]: each["kernels"] for each in nsys.project(HERE / "train.sqlite")[0]}
    assert {name: part.load.launches for name, part in parts.items()} == {
        n: k for n, k in by_nsys.items() if k
    }
    names = " ".join(kernel.name for kernel in found.parts)
    assert "dgrad" in names
    assert "wgrad" in names
    assert not any("incomplete" in note for note in found.notes)


def test_fp64_on_cuda_cores_has_its_own_ceiling(step):
    """A transform of Winograd computes in FP64, without matrix units: half of what they do is its roof, as ncu says."""
    sheet = of_sheet(gpu_sheets.read([conf_dir()])["h200"].facts)
    rows = {part.name: part for part in roofline.of_csv(step, sheet).parts}
    [transform] = [row for name, row in rows.items() if "winogradWgradOutput" in name]
    assert transform.load.flops["fp64"] > 0
    assert sheet.of("fp64") == ("fp64_vector", 34e12)
    assert sheet.of("tensor fp64") == ("fp64", 67e12)
    own = counters.recorded_peaks(listing.read(step, counters.wanted).launches[0])
    assert own["fp64_vector"] == pytest.approx(34e12, rel=0.05)


def test_cudnn_transforms_need_fewer_flops_than_the_definition(step):
    """Convolutions by spectra, and weights' gradients by Winograd: never more than the definition's FLOPs."""
    found = roofline.of_csv(step, by_hand(67.0, 4800.0))
    names, parts = (
        " ".join(part.name for part in found.parts),
        {part.name: part for part in found.ranges},
    )
    assert "fft2d" in names
    assert "winograd" in names
    forward = parts["forward"].load.total_flops
    assert 0.5 * FORWARD_FLOPS < forward < FORWARD_FLOPS
    assert parts["backward"].load.total_flops < 2 * FORWARD_FLOPS
