"""Apple's GPU, with a scripted backend: torch's calls for it are counted, and the tensors lie on the CPU."""

import pytest
import torch

import perfexp
from perfexp.devices import mps
from perfexp.errors import DeviceMismatch
from perfexp.plan import prerequisites
from perfexp.probes import timing


@pytest.fixture
def backend(monkeypatch):
    """The calls of the backend in their order."""
    called = []
    monkeypatch.setattr(prerequisites, "SYSTEM", "Darwin")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: called.append("synchronize"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: called.append("empty_cache"))
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 << 20)
    monkeypatch.setattr(mps.MpsDevice, "identifier", "cpu")
    return called


def net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )


def measured(folder, *overrides, **settings):
    return perfexp.measure(
        net(),
        *overrides,
        gpu="mps",
        input_size=16,
        stopping="fixed",
        output_dir=folder,
        tracking="none",
        **settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_mps_call_is_timed_by_latency_without_device_time(backend, tmp_path, mode):
    record = measured(tmp_path / "x", mode=mode, **{"probes.layers": True})
    point = next(one for one in record.points if one.key.is_timed)
    assert {"latency"} == {series.name for series in point.series if "/" not in series.name}
    assert ({series.name for series in point.series} >= {"phase/forward", "phase/backward"}) == (
        mode == "train"
    )
    assert point.metric("memory/peak_bytes").value == 3 << 20
    assert len(backend) > len(point.find_series("latency").samples)
    assert record.environment["device"]["kind"] == "mps"
    assert "untested" in [doubt.code for doubt in record.doubts]
    reasons = [metric.reason for one in record.points for metric in one.metrics]
    assert any("only enqueues" in (reason or "") for reason in reasons)


def test_whole_epochs_are_trained(backend, tmp_path):
    record = measured(
        tmp_path / "x", mode="train", epochs=2, batch_size=2, **{"data.num_samples": 8}
    )
    [point] = [one for one in record.points if one.epochs]
    assert [epoch.number for epoch in point.epochs] == [1, 2]


def test_automatic_mixed_precision_is_left_out_and_told(backend, tmp_path):
    record = measured(tmp_path / "x", precision="amp_bf16")
    [doubt] = [doubt for doubt in record.doubts if doubt.code == "precision_unavailable"]
    assert "autocast is not used" in doubt.message


def test_a_call_ends_when_the_queue_is_empty(backend, monkeypatch):
    clock = iter(range(0, 10**9, 1000))
    device = mps.open_device()
    monkeypatch.setattr(type(device), "now_ns", lambda self: next(clock))
    order = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: order.append("wait"))
    timing.whole_pass(iter([order.append, order.append]).__next__, device)
    assert order == ["wait"] * 5  # before the pass, at each of its three marks, and after it
    start, end = device.new_event(), device.new_event()
    device.record(start)
    device.record(end)
    assert device.elapsed_seconds(start, end) == pytest.approx(1e-6)


def test_without_one_it_is_refused():
    with pytest.raises(DeviceMismatch, match="asks for Apple's GPU"):
        mps.open_device()
