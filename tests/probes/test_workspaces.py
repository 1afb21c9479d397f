"""Workspaces of convolutions: measured with a scripted allocator, cached, and found without the device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.devices.cpu import CpuDevice
from perfexp.errors import UserError
from perfexp.models import Execution, Precision
from perfexp.probes import workspaces as module
from perfexp.probes.workspaces import Workspaces, workspace_bytes
from perfexp.records.record import Metric
from perfexp.work.allocations import Allocations
from perfexp.work.operator_calls import Layout, OperatorCall
from perfexp.work.tensors import tensors_in

FP32, H100 = Precision(name="fp32"), "NVIDIA H100 80GB HBM3"


class Allocator(Allocations):
    """Takes workspaces for convolutions, the first time more; one out of memory raises."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.ran = sizes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = super().__torch_dispatch__(func, types, args, kwargs)
        if "convolution" in str(func):
            call = OperatorCall.of(func, args)
            self.ran.append(call)
            size = self.sizes[call.operator]
            if size is None:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 80 GiB")
            first = self.ran.count(call) == 1
            self.add([torch.empty(size + first * 2**20, dtype=torch.uint8)], "workspaces")
        return returned


class Scripted(CpuDevice):
    """The CPU under the name of a GPU, with the memory of the allocator."""

    def __init__(self, allocator, name=H100):
        super().__init__(name=name)
        self.allocator, self.kind, self.starts = allocator, "cuda", 0

    def start(self):
        self.starts += 1

    def reset_peak_memory(self, *, give_back=True):
        self.allocator.restart()

    def memory(self):
        return [
            Metric(name="memory/peak_bytes", value=self.allocator.peak.total_bytes, unit="bytes")
        ]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def calls():
    """The convolutions of a training step, forward and backward."""
    allocations = Allocations()
    with FakeTensorMode():
        inputs = torch.empty(2, 3, 16, 16, requires_grad=True)
        weight = torch.empty(8, 3, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
        with allocations:
            torch.nn.functional.conv2d(inputs, weight, padding=1).sum().backward()
    return list(allocations.peak.convolutions)


def known(device=None, *, precision=FP32, execution=None, **settings):
    return Workspaces(
        precision=precision, execution=execution or Execution(), device=device, **settings
    )


def test_workspace_is_extra_memory_of_the_second_call(calls):
    with Allocator({"convolution": 3 * 2**20, "convolution_backward": 0}) as allocator:
        device = Scripted(allocator)
        assert [workspace_bytes(call, device) for call in calls] == [3 * 2**20, 0]
    assert allocator.ran == [
        call for call in calls for _ in range(2)
    ]  # the same layouts as in the trace
    assert calls[0].arguments[1] == Layout((8, 3, 3, 3), (27, 1, 9, 3), "float32")


def test_workspaces_are_measured_once_and_known_without_a_device(calls):
    sizes = {"convolution": 2**20, "convolution_backward": 2**21}
    with Allocator(sizes) as allocator:
        device = Scripted(allocator)
        found = known(device, start=device.start).of(calls)
        assert found.sizes == dict(zip(calls, sizes.values(), strict=True))
        assert (found.device, found.reason, device.starts) == (H100, None, 1)
        again = known(device, start=device.start).of(calls)
        assert (again.sizes, device.starts, len(allocator.ran)) == (found.sizes, 1, 4)
    assert known(match=r"\bH100 80GB").of(calls) == found
    nothing = {"device": None, "convolutions": 2, "known": 0, "reason": None}
    assert known(match=r"\bH200\b").of(calls).facts() == nothing
    assert known().of(calls).facts() == nothing


@pytest.mark.parametrize(
    ("precision", "execution"),
    [
        (Precision(name="tf32", tf32=True), None),
        (FP32, Execution(cudnn_benchmark=True)),
        (FP32, Execution(deterministic=True)),
    ],
)
def test_other_settings_have_workspaces_of_their_own(calls, precision, execution):
    with Allocator({"convolution": 2**20, "convolution_backward": 2**21}) as allocator:
        known(Scripted(allocator)).of(calls)
    assert not known(match="H100", precision=precision, execution=execution).of(calls).sizes


@pytest.mark.parametrize(
    ("owner", "name"), [(torch.backends.cudnn, "version"), (torch, "__version__")]
)
def test_another_torch_or_cudnn_has_workspaces_of_its_own(calls, monkeypatch, owner, name):
    with Allocator({"convolution": 2**20, "convolution_backward": 2**21}) as allocator:
        known(Scripted(allocator)).of(calls)
    assert known(match="H100").of(calls).sizes
    monkeypatch.setattr(owner, name, (lambda: 91900) if name == "version" else "99.0")
    assert not known(match="H100").of(calls).sizes


def test_workspace_probe_uses_plan_settings_restores_process(calls, monkeypatch):
    seen = []
    monkeypatch.setattr(
        module,
        "workspace_bytes",
        lambda call, device: (
            seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)) or 0
        ),
    )
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    execution = Execution(cudnn_benchmark=True)
    known(CpuDevice(), precision=Precision(name="tf32", tf32=True), execution=execution).of(
        calls[:1]
    )
    known(CpuDevice(), execution=execution).of(calls[:1])
    assert seen == [(True, True), (False, True)]
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) == before


def test_a_call_that_fails_stays_unknown_and_the_others_do_not(calls):
    with Allocator({"convolution": None, "convolution_backward": 512}) as allocator:
        found = known(Scripted(allocator)).of(calls)
        assert found.sizes == {calls[1]: 512}
        reason = "CUDA out of memory. Tried to allocate 80 GiB"
        assert found.facts() == {"device": H100, "convolutions": 2, "known": 1, "reason": reason}
        allocator.sizes["convolution"] = 1024
        assert known(Scripted(allocator)).of(calls).sizes == {
            calls[0]: 1024,
            calls[1]: 512,
        }  # it is tried again


def test_a_device_in_use_leaves_workspaces_unknown(calls):
    starts = []

    def start():
        starts.append(1)
        raise UserError("The device is in use: another process measures.")

    found = known(CpuDevice(name=H100), start=start).of(calls)
    assert found.facts()["reason"] == "The device is in use: another process measures."
    assert not found.sizes
    assert len(starts) == 1


def test_a_device_without_figures_of_its_memory_is_a_reason(calls, monkeypatch):
    device = CpuDevice(name=H100)
    monkeypatch.setattr(
        device,
        "memory",
        lambda: [Metric(name="memory/peak_bytes", value=None, reason="-", unit="")],
    )
    assert known(device).of(calls).reason == f"{H100} does not report its memory"


def test_fp16_autocast_is_measured_in_fp16_despite_a_bf16_trace(monkeypatch):
    layouts = Layout((1, 2), (2, 1), "bfloat16"), Layout((1,), (1,), "float32")
    call = OperatorCall("convolution", (*layouts, None, (1, 1)))
    seen = []
    monkeypatch.setattr(
        module, "workspace_bytes", lambda call, device: seen.append(str(call)) or 512
    )
    half = Precision(name="amp", autocast="float16")
    assert known(CpuDevice(name=H100), precision=half).of([call]).sizes == {call: 512}
    known(CpuDevice(name=H100)).of([call])
    assert seen == [
        "convolution(float16[1, 2] by [2, 1], float32[1] by [1], None, [1, 1])",
        "convolution(bfloat16[1, 2] by [2, 1], float32[1] by [1], None, [1, 1])",
    ]


def test_the_cpu_runs_each_call_twice_and_knows_its_outputs(calls, monkeypatch):
    """The whole path without a script; the resident memory of a process means nothing here."""
    run, shapes = OperatorCall.run, []

    def counted(call, arguments):
        returned = run(call, arguments)
        shapes.append([tuple(one.shape) for one in tensors_in(returned)])
        return returned

    monkeypatch.setattr(OperatorCall, "run", counted)
    for call in calls:
        workspace_bytes(call, CpuDevice())
    assert len(shapes) == 2 * len(calls)
    assert shapes[::2] == shapes[1::2]
    assert all(one for one in shapes)
