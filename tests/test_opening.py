"""What a worker does before it measures: in which order the device is locked, waited for and made ready."""

from types import SimpleNamespace

import pytest

from perfexp import opening
from perfexp.config import DeviceLock
from perfexp.devices import lock
from perfexp.devices.fake import FakeDevice
from perfexp.errors import UserError
from perfexp.events import Events


class Noting(FakeDevice):
    """A device that needs a lock, and notes who has it when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.lock_name = "noting"
        self.holders: list[str | None] = []

    def settle(self) -> None:
        self.holders.append(lock.holder(self.lock_name))


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.setattr(lock, "TEMPORARY", tmp_path)
    return Noting()


def entered(device, folder):
    plan, paths = SimpleNamespace(device_lock=DeviceLock.fail), SimpleNamespace(root=folder)
    return opening.alone(plan, paths, device, Events(None))


def test_whoever_had_the_device_is_waited_for_by_the_one_who_has_its_lock(device, tmp_path):
    with entered(device, tmp_path):
        assert device.holders == [lock.holder("noting")]
        assert device.holders[0] is not None


def test_nobody_waits_for_a_device_that_is_refused(device, tmp_path):
    with entered(device, tmp_path), pytest.raises(UserError, match="in use"), entered(device, tmp_path):
        pass
    assert len(device.holders) == 1
