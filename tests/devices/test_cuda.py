"""What a CUDA device says of its memory, from what torch and the driver tell."""

from types import SimpleNamespace

import pytest
import torch

from perfexp.devices.cuda import CudaDevice

GIB = 2**30
GIVEN_BACK = "less than torch's own: another process must have given memory back meanwhile"


@pytest.mark.parametrize(
    ("before", "used", "value", "reason"),
    [
        (10 * GIB, 13 * GIB, 3 * GIB, None),
        (10 * GIB, 11 * GIB, None, GIVEN_BACK),
        (10 * GIB, 9 * GIB, None, GIVEN_BACK),
        (None, 13 * GIB, None, "the driver does not tell the memory in use"),
        (10 * GIB, None, None, "the driver does not tell the memory in use"),
    ],
)
def test_memory_of_the_device_that_is_less_than_torchs_own_is_not_told(monkeypatch, before, used, value, reason):
    peak, reserved, board = memory(monkeypatch, before, used)
    assert (peak.value, reserved.value, board.value, board.reason) == (GIB, 3 * GIB, value, reason)


def test_the_buffer_that_flushes_the_cache_is_no_memory_of_the_call(monkeypatch):
    told = memory(monkeypatch, 10 * GIB, 14 * GIB, flushed=SimpleNamespace(nbytes=GIB // 2))
    assert [each.value for each in told] == [GIB // 2, 5 * GIB // 2, 7 * GIB // 2]


def memory(monkeypatch, before, used, flushed=None):
    """What a device says on whose board so much was in use, before and now."""
    for name, told in {"max_memory_allocated": GIB, "max_memory_reserved": 3 * GIB, "memory_reserved": 2 * GIB}.items():
        monkeypatch.setattr(torch.cuda, name, lambda told=told: told)
    device = object.__new__(CudaDevice)
    device._board, device._no_board = SimpleNamespace(used_bytes=lambda: used), None
    device._used_before_bytes, device._flushed = before, flushed
    return device.memory()
