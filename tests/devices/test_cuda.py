"""What a CUDA device says of its memory, from what torch and the driver tell."""

from types import SimpleNamespace

import pytest
import torch

from perfexp.devices.cuda import CudaDevice

GIB = 2**30


@pytest.mark.parametrize(
    ("before", "used", "value", "reason"),
    [
        (10 * GIB, 13 * GIB, 3 * GIB, None),
        (10 * GIB, 11 * GIB, None, "another process gave memory of the device back meanwhile"),
        (10 * GIB, 9 * GIB, None, "another process gave memory of the device back meanwhile"),
        (None, 13 * GIB, None, "the driver does not tell the memory in use"),
        (10 * GIB, None, None, "the driver does not tell the memory in use"),
    ],
)
def test_memory_of_the_device_that_is_less_than_torchs_own_is_not_told(monkeypatch, before, used, value, reason):
    for name, told in {"max_memory_allocated": GIB, "max_memory_reserved": 3 * GIB, "memory_reserved": 2 * GIB}.items():
        monkeypatch.setattr(torch.cuda, name, lambda told=told: told)
    device = object.__new__(CudaDevice)
    device._board, device._no_board = SimpleNamespace(used_bytes=lambda: used), None
    device._used_before_bytes, device._flushed = before, None
    peak, reserved, board = device.memory()
    assert (peak.value, reserved.value, board.value, board.reason) == (GIB, 3 * GIB, value, reason)
