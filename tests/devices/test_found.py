"""What torch is asked for its devices, on a scripted one."""

import pytest

from perfexp.devices import cuda, lock
from perfexp.devices.fake import FakeDevice
from perfexp.doctor import detected_devices
from perfexp.host import locks


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A scripted device as the one that torch calls `cuda:0`."""
    scripted = FakeDevice(
        lock_name="GPU-1", tick_seconds=32e-9, record_seconds=2e-6, clock_hertz=[1.98e9]
    )
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    monkeypatch.setattr(cuda, "is_available", lambda index: index == 0)
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: scripted)
    return scripted


def test_clocks_are_told_as_they_were_seen(device):
    told = detected_devices.try_clocks(0)
    assert told == {
        "event_tick_seconds": 32e-9,
        "record_seconds": 2e-6,
        "canary_hertz": 1.98e9,
        "busy": {},
    }
    assert lock.holder("GPU-1") is None


def test_a_device_on_which_another_process_measures_gets_no_work(device):
    with lock.held("GPU-1", wait=False, purpose="/runs/1", waiting=lambda _: None):
        told = detected_devices.try_clocks(0)
    assert "measures /runs/1" in told["not_tried"]
    assert device.now_ns() == 0


def test_a_device_that_is_not_there_is_not_tried(device):
    assert detected_devices.try_clocks(1) == {"not_tried": "torch has no cuda:1"}


def test_what_torch_says_here_is_told():
    assert detected_devices.torch_build()["version"]
    assert isinstance(detected_devices.cuda_devices()["devices"], list)
    assert detected_devices.apple_gpu().keys() == {"available"}
