"""The Triton kernels compute what torch's convolution does: run by Triton's interpreter, and compiled for two GPUs.

Nobody else in this process is to have an interpreted Triton: `TestInterpreted` runs in a process of its own, which
`test_in_the_interpreter` starts.
"""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv2d, pad

from perfexp.convolution import kernels
from perfexp.convolution.backends import Kernels
from perfexp.convolution.engines import Engines
from perfexp.convolution.kernels import launch
from perfexp.convolution.portable.geometry import Convolution
from perfexp.devices.fake import FakeDevice

INTERPRETED = kernels.interpreted()
#: Before any kernel was run.
IMPORTED = "triton" in sys.modules

#: Bounds of the relative L2 error by data type; docs/results/algorithm-errors.json has them and what was seen.
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
NAMES = pytest.mark.parametrize("name", ["direct", "winograd"])
FEW = settings(
    max_examples=4,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

#: Data type, capability, whether tf32 is allowed, and whether channels lie last.
COMPILED = [
    (torch.float32, 90, False, False),
    (torch.float32, 90, True, True),
    (torch.float16, 90, False, True),
    (torch.bfloat16, 90, False, False),
    (torch.float64, 90, False, False),
    (torch.float32, 80, False, True),
    (torch.float16, 80, False, False),
]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def compute(name, *arguments):
    return kernels.ALGORITHMS[name](*arguments)


def reference(inputs, weight, convolution):
    """By torch, in float64 and differentiable."""
    padded = pad(inputs.double(), convolution.padding)
    return conv2d(
        padded,
        weight.double(),
        None,
        convolution.stride,
        0,
        convolution.dilation,
        convolution.groups,
    )


def error(found, true):
    return float((found.double() - true).norm() / (true.norm() + 1e-30))


def tensors(convolution, shape=(2, 9, 8), dtype=torch.float32, *, last=False):
    """Inputs of a batch, height and width, and weights; the same numbers every time."""
    generator = torch.Generator().manual_seed(sum(shape))
    batch, height, width = shape
    sizes = (batch, convolution.in_channels, height, width), (
        convolution.out_channels, convolution.in_group, *convolution.kernel,
    )  # fmt: skip
    inputs, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes
    )
    return (inputs.to(memory_format=torch.channels_last) if last else inputs), weight


@st.composite
def convolutions(draw, name):
    """A convolution, and batch, height and width of inputs that it fits into."""
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    in_group, out_group = (
        draw(st.sampled_from((1, 2, 5, 8, 17))),
        draw(st.sampled_from((1, 3, 4, 18))),
    )
    kernel, stride, dilation = (3, 3), (1, 1), (1, 1)
    if name == "direct":
        kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
        stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    convolution = Convolution(
        in_channels=groups * in_group,
        out_channels=groups * out_group,
        kernel=kernel,
        stride=stride,
        padding=draw(st.tuples(*[st.integers(0, 3)] * 4)),
        dilation=dilation,
        groups=groups,
    )
    left, right, top, bottom = convolution.padding
    least = (
        dilation[0] * (kernel[0] - 1) + 1 - top - bottom,
        dilation[1] * (kernel[1] - 1) + 1 - left - right,
    )
    size = [max(1, each) + draw(st.integers(0, 8)) for each in least]
    return convolution, (draw(st.integers(1, 3)), *size)


THREE = Convolution(in_channels=4, out_channels=6, kernel=(3, 3), padding=(1, 1, 1, 1), groups=2)
UNEVEN = replace(THREE, padding=(0, 2, 1, 0))


# --- what needs no kernel ---------------------------------------------------------------------------------------------


def test_they_say_why_they_can_not_run(monkeypatch):
    monkeypatch.setattr(kernels.util, "find_spec", lambda name: None)
    assert kernels.available() == "triton is not installed"
    monkeypatch.setattr(kernels.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels.metadata, "version", lambda name: "3.1.0")
    assert kernels.available() == "Triton is 3.1, older than 3.3"
    monkeypatch.setattr(kernels.metadata, "version", lambda name: "3.6.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.available(torch.device("cpu")) == "the device is cpu, not cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.available() == "there is no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert (
        kernels.available(torch.device("cuda"))
        == "the device has compute capability 7.5, not 8.0 or higher"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels.available() is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(torch.device("cpu")) is None


def test_they_say_what_they_can_not_compute():
    odd = replace(THREE, kernel=(5, 3), stride=(2, 1))
    assert Kernels(name="direct").rejects(odd, torch.bfloat16) is None
    assert Kernels(name="direct").rejects(odd, torch.int32) == "the data type is int32"
    assert Kernels(name="winograd").rejects(UNEVEN, torch.float16) is None
    assert Kernels(name="winograd").rejects(odd, torch.float16) == "the kernel is 5×3, not 3×3"
    assert (
        Kernels(name="winograd").rejects(replace(THREE, stride=(2, 1)), torch.float16)
        == "the stride is 2×1, not 1"
    )


@NAMES
@pytest.mark.skipif(INTERPRETED, reason="there is an interpreter")
def test_without_an_interpreter_a_cpu_is_refused(name):
    with pytest.raises(
        ValueError, match=f"The kernel of {name} can't compute this convolution: .*"
    ):
        compute(name, *tensors(THREE), THREE)


def test_first_plan_wins_unless_another_is_clearly_faster(monkeypatch):
    seconds = {
        "first": 1.0,
        "same": 0.97,
        "faster": 0.5,
        "broken": ValueError("too much shared memory"),
    }

    def timed(plan, inputs, weight):
        if isinstance(seconds[plan], Exception):
            raise seconds[plan]
        return seconds[plan]

    monkeypatch.setattr(launch, "_seconds", timed)
    assert launch.fastest(["first", "same"], None, None) == "first"
    assert launch.fastest(["broken", "first", "faster"], None, None) == "faster"
    with pytest.raises(ValueError, match="shared"):
        launch.fastest(["broken"], None, None)


def test_plans_are_timed_on_the_device_without_host_waits(monkeypatch):
    """The host takes longer to launch a plan than the device to run it."""
    device = FakeDevice(enqueue_seconds=50e-6)
    monkeypatch.setattr(launch, "_device", lambda index: device)
    inputs = SimpleNamespace(device=SimpleNamespace(index=0))
    short, long = (lambda *_, seconds=seconds: device.launch(seconds) for seconds in (10e-6, 11e-6))
    assert launch._seconds(short, inputs, None) == pytest.approx(10e-6, rel=0.01)
    assert launch.fastest([long, short], inputs, None) is short


def test_the_fastest_plan_is_timed_once_for_all_processes(monkeypatch, tmp_path):
    timed = []

    def plans_of(*warps):
        return [SimpleNamespace(launch=SimpleNamespace(constants=(), warps=one)) for one in warps]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def chosen(shape, *warps, software=("H200", "2.11")):
        def last():
            timed.append(plans)
            return plans[-1]

        choices, plans = launch.Choices(software), plans_of(*warps)  # as a new process
        stored, before = choices.fastest(shape, plans, None), len(timed)
        found = choices.fastest(shape, plans, last)
        assert stored is (None if len(timed) > before else found)
        return found.launch.warps, choices.path

    assert chosen("a", 2, 4)[0] == chosen("a", 2, 4)[0] == 4
    assert len(timed) == 1
    chosen("b", 2, 4)
    chosen("a", 4, 8)
    _, path = chosen("a", 2, 4, software=("H100", "2.11"))
    assert len(timed) == 4
    path.write_bytes(b'\xff\n[1]\n["a", "x"]\n["a", Infinity]\n' + path.read_bytes()[:-5])
    assert chosen("a", 2, 4, software=("H100", "2.11"))[0] == 4
    assert len(timed) == 5


@pytest.mark.parametrize("capturing", [False, True])
def test_a_capture_takes_a_stored_plan_or_the_first(monkeypatch, tmp_path, capturing):
    inputs = weight = SimpleNamespace(device=torch.device("cuda", 0))
    first, second = (SimpleNamespace(launch=SimpleNamespace(constants=(), warps=n)) for n in (2, 4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(kernels, "fastest", lambda plans, *_: plans[-1])
    monkeypatch.setattr(kernels, "_plans", {})

    def chosen():
        kernels._choices.cache_clear()
        return kernels._choose("shape", inputs, weight, [first, second])

    assert chosen() is (first if capturing else second)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert chosen() is second
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen() is second
    kernels._choices.cache_clear()


def test_later_launches_are_of_what_the_first_compiled():
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: (
                calls.append((grid, arguments, options)) or Compiled()
            )

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: calls.append((grid, arguments))

    once = launch.Launch(
        kernel=Kernel(), grid=(3, 2, 1), numbers=(5, 7), constants=(True,), warps=8
    )
    once("x", "y")
    once("z", "y")
    assert calls == [
        (
            (3, 2, 1),
            ("x", "y", 5, 7, True),
            {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True},
        ),
        ((3, 2, 1), ("z", "y", 5, 7, True)),
    ]


# --- compiled ---------------------------------------------------------------------------------------------------------


class NoDriver:
    """Of a GPU that is not here."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("dtype", "capability", "tf32", "last"), COMPILED, ids=str)
def test_kernels_compile_for_gpus_and_keep_sums_in_registers(
    dtype, capability, tf32, last, monkeypatch, tmp_path
):
    from triton import knobs
    from triton.runtime import driver

    found = set()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDriver(capability))
    for name, convolution, batch in (
        ("direct", replace(THREE, in_channels=64, out_channels=128, groups=1), 64),
        ("direct", replace(THREE, in_channels=64, out_channels=128, groups=1), 1),
        ("direct", replace(THREE, in_channels=64, out_channels=64, groups=64), 1),
        ("winograd", replace(THREE, in_channels=64, out_channels=64, groups=1), 1),
        ("winograd", replace(THREE, in_channels=64, out_channels=16, groups=1), 1),
    ):
        for each in launches(name, convolution, batch, dtype, tf32, last):
            kernel = each[0].run(*each[1:-2], grid=each[-2], warmup=True, **each[-1])
            found.add(each[0].__name__)
            assert kernel.metadata.shared <= 99 * 1024, "more than an RTX GPU has"
            disassembler = (
                Path(sys.modules["triton"].__file__).parent / "backends/nvidia/bin/cuobjdump"
            )
            if disassembler.exists():
                assert stack_bytes(kernel, disassembler) <= 64, "more than a few addresses"
    assert found == {"packed", "convolved", "convolved_by_channel", "transformed"}
    assert not knobs.runtime.interpret


def launches(name, convolution, batch, dtype, tf32, last):
    """Kernel and arguments of everything that may be launched for images of 56 × 56 on a GPU of 132 processors."""
    inputs, weight = tensors(convolution, (batch, 56, 56), dtype, last=last)
    outputs = torch.empty(batch, convolution.out_channels, 56, 56, dtype=dtype)
    outputs = outputs.to(memory_format=torch.channels_last) if last else outputs
    problem = launch.TensorConvolution(
        convolution=convolution, dtype=dtype, inputs=launch.Layout.of(inputs), weight=launch.Layout.of(weight),
        outputs=launch.Layout.of(outputs), last=last, processors=132, tf32=tf32,
    )  # fmt: skip
    kernels = importlib.import_module(f"perfexp.convolution.kernels.{name}_kernels")
    for recipe in kernels.plans(problem):
        steps = [(recipe.launch, (inputs, weight, outputs))]
        if recipe.prepare is not None:
            prepared = torch.empty(recipe.size, dtype=recipe.dtype)
            steps = [
                (recipe.prepare, (weight, prepared)),
                (recipe.launch, (inputs, prepared, outputs)),
            ]
        for step, arguments in steps:
            yield (step._kernel, *arguments, *step._rest, step._grid, step._options)


def stack_bytes(kernel, disassembler):
    """Memory of a thread for what its registers do not hold."""
    path = Path(
        next(path for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    )
    told = subprocess.run(
        [disassembler, "--dump-resource-usage", path], capture_output=True, text=True, check=True
    )
    return int(re.search(r"STACK:(\d+)", told.stdout)[1])


# --- interpreted ------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the other process")
def test_in_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    command.append(f"{__file__}::TestInterpreted")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[3]
    told = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
    assert re.search(r"\d\d passed", told.stdout), told.stdout


@pytest.fixture
def numpy_of_today(monkeypatch):
    """Triton 3.6 makes an index of an array of one number, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.mark.usefixtures("numpy_of_today")
class TestInterpreted:
    __test__ = INTERPRETED

    def test_triton_is_imported_with_the_first_computation(self):
        assert not IMPORTED

    @NAMES
    @DTYPES
    @FEW
    @given(data=st.data())
    def test_every_plan_computes_the_definition(self, name, dtype, data):
        convolution, shape = data.draw(convolutions(name))
        inputs, weight = tensors(convolution, shape, dtype, last=data.draw(st.booleans()))
        true = reference(inputs, weight, convolution)
        for plan in kernels.plans(name, inputs, weight, convolution):
            found = plan(inputs, weight)
            assert (found.shape, found.dtype) == (true.shape, dtype)
            assert error(found, true) <= BOUNDS[dtype]

    @NAMES
    def test_a_wrong_kernel_would_be_noticed(self, name):
        inputs, weight = tensors(UNEVEN)
        found = compute(name, inputs, weight, UNEVEN)
        assert error(found, reference(inputs, weight, UNEVEN)) <= BOUNDS[torch.float32]
        wrong = (
            (inputs, weight.flip(2), UNEVEN),
            (inputs, weight.flip(3), UNEVEN),
            (inputs, weight.transpose(2, 3), UNEVEN),
            (inputs, weight.flip(0), UNEVEN),
            (inputs, weight.flip(1), UNEVEN),
            (inputs.flip(1), weight, UNEVEN),
            (inputs.flip(0), weight, UNEVEN),
            (inputs, weight, replace(UNEVEN, padding=(2, 0, 1, 0))),
            (inputs, weight, replace(UNEVEN, padding=(0, 2, 0, 1))),
        )
        for each in wrong:
            assert error(found, reference(*each)) > 0.1

    @NAMES
    @pytest.mark.parametrize("last", [False, True])
    def test_tensors_may_lie_in_memory_as_they_like(self, name, last):
        inputs, weight = tensors(UNEVEN, (2, 16, 18), last=last)
        odd = inputs[:, :, ::2, 1::3]
        assert (
            error(compute(name, odd, weight, UNEVEN), reference(odd, weight, UNEVEN))
            <= BOUNDS[torch.float32]
        )
        turned = weight.transpose(2, 3)
        assert (
            error(compute(name, odd, turned, UNEVEN), reference(odd, turned, UNEVEN))
            <= BOUNDS[torch.float32]
        )
        same = inputs[:, :1].expand(-1, 4, -1, -1)
        assert (
            error(compute(name, same, weight, UNEVEN), reference(same, weight, UNEVEN))
            <= BOUNDS[torch.float32]
        )

    @NAMES
    @pytest.mark.parametrize(
        "convolution", [THREE, replace(UNEVEN, in_channels=4, out_channels=4, groups=4)]
    )
    def test_elements_may_be_counted_in_64_bits(self, name, convolution, monkeypatch):
        monkeypatch.setattr(launch, "INT32", 0)
        inputs, weight = tensors(convolution)
        for plan in kernels.plans(name, inputs, weight, convolution):
            assert True in plan.launch.constants
            assert (
                error(plan(inputs, weight), reference(inputs, weight, convolution))
                <= BOUNDS[torch.float32]
            )

    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("out_group", [1, 4, 40, 300])
    def test_every_tiling_of_direct_computes_the_definition(self, out_group, last, monkeypatch):
        from perfexp.convolution.kernels import direct_kernels

        convolution = Convolution(
            in_channels=32, out_channels=2 * out_group, kernel=(1, 2), groups=2
        )
        inputs, weight = tensors(convolution, (1, 3, 4), last=last)
        for tiling in direct_kernels._TILINGS[last]:
            monkeypatch.setitem(direct_kernels._TILINGS, last, (tiling,) * 4)
            (plan,) = kernels.plans("direct", inputs, weight, convolution)
            assert (
                error(plan(inputs, weight), reference(inputs, weight, convolution))
                <= BOUNDS[torch.float32]
            )

    @NAMES
    @pytest.mark.parametrize("convolution", [THREE, UNEVEN])
    @pytest.mark.parametrize(
        ("dtype", "wanted"),
        [
            (torch.float32, (True, True)),
            (torch.float32, (True, False)),
            (torch.float32, (False, True)),
            (torch.bfloat16, (True, True)),
        ],
        ids=str,
    )
    def test_gradients_are_those_of_the_definition(self, name, convolution, dtype, wanted):
        given = tensors(convolution, dtype=dtype)
        leaves = [
            tensor.clone().requires_grad_(want) for tensor, want in zip(given, wanted, strict=True)
        ]
        doubles = [
            tensor.double().requires_grad_(want) for tensor, want in zip(given, wanted, strict=True)
        ]
        engines = Engines(f"triton.{name}", f"triton.{name}", "default")
        outputs, true = (
            engines.compute(convolution, *leaves, None),
            reference(*doubles, convolution),
        )
        gradient = torch.randn(true.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        outputs.backward(gradient)
        true.backward(gradient.double())
        assert error(outputs.detach(), true.detach()) <= BOUNDS[dtype]
        for leaf, double, want in zip(leaves, doubles, wanted, strict=True):
            assert (leaf.grad is not None) == want
            if want:
                assert leaf.grad.dtype == dtype
                assert error(leaf.grad, double.grad) <= BOUNDS[dtype]

    @NAMES
    def test_an_empty_batch_and_a_misfit(self, name):
        inputs, weight = tensors(THREE)
        assert compute(name, inputs[:0], weight, THREE).shape == (0, 6, 9, 8)
        with pytest.raises(ValueError, match="does not fit"):
            compute(name, inputs[:, :, :1], weight, replace(THREE, padding=(0, 0, 0, 0)))
        with pytest.raises(ValueError, match=r"weights torch\.float64"):
            compute(name, inputs, weight.double(), THREE)
