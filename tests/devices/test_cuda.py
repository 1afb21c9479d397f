"""What a CUDA device says of its memory and of others on it, from what torch and the driver tell."""

from types import SimpleNamespace

import pytest
import torch

from perfexp.devices import cuda
from perfexp.devices.cuda import CudaDevice

GIB = 2**30
GIVEN_BACK = (
    "another process freed memory of the board during the measurement, which hides the increase"
)


@pytest.mark.parametrize(
    ("before", "used", "value", "reason"),
    [
        (10 * GIB, 13 * GIB, 3 * GIB, None),
        (10 * GIB, 11 * GIB, None, GIVEN_BACK),
        (10 * GIB, 9 * GIB, None, GIVEN_BACK),
        (None, 13 * GIB, None, "the driver does not report the memory in use"),
        (10 * GIB, None, None, "the driver does not report the memory in use"),
    ],
)
def test_device_memory_below_torch_memory_is_not_reported(monkeypatch, before, used, value, reason):
    peak, reserved, board = memory(monkeypatch, before, used)
    assert (peak.value, reserved.value, board.value, board.reason) == (GIB, 3 * GIB, value, reason)


def test_cache_flush_buffer_is_not_counted_as_call_memory(monkeypatch):
    told = memory(monkeypatch, 10 * GIB, 14 * GIB, flushed=SimpleNamespace(nbytes=GIB // 2))
    assert [each.value for each in told] == [GIB // 2, 5 * GIB // 2, 7 * GIB // 2]


def memory(monkeypatch, before, used, flushed=None):
    """What a device says on whose board so much was in use, before and now."""
    for name, told in {
        "max_memory_allocated": GIB,
        "max_memory_reserved": 3 * GIB,
        "memory_reserved": 2 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda told=told: told)
    device = object.__new__(CudaDevice)
    device._board, device._no_board = SimpleNamespace(used_bytes=lambda: used), None
    device._used_before_bytes, device._flushed = before, flushed
    return device.memory()


@pytest.mark.parametrize(
    ("states", "looks", "doubt"),
    [
        ([(0, 0)], 1, None),
        ([(1, 80), (0, 80), (0, 6), (0, 5)], 4, None),
        ([(None, None)], 1, None),
        ([(1, 0)], 4, "1 other process, 0 % busy"),
        ([(2, 91)], 4, "2 other processes, 91 % busy"),
        ([(0, 91)], 4, "no other process, 91 % busy"),
        ([(None, 91)], 4, "91 % busy"),
        ([(1, None)], 4, "1 other process"),
    ],
)
def test_other_device_users_are_waited_for_and_then_reported(monkeypatch, states, looks, doubt):
    seen, now = [], [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)
    )
    monkeypatch.setattr(cuda, "time", clock)
    monkeypatch.setattr(
        cuda, "_SETTLING_SECONDS", 2.5 * cuda._CHECK_SECONDS if len(states) == 1 else 60.0
    )

    def state():
        seen.append(states[min(len(seen), len(states) - 1)])
        return dict(zip(("processes", "utilization_percent"), seen[-1], strict=True))

    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    device = object.__new__(CudaDevice)
    device._board, device._index, device.name = (
        SimpleNamespace(state=state, used_bytes=lambda: GIB),
        0,
        "H200",
    )
    device.settle()
    assert len(seen) == looks
    device.start()
    told = f"H200 before the first measurement: {doubt}"
    assert [each.message for each in device.doubts()] == ([] if doubt is None else [told])


def test_a_device_without_a_board_is_not_waited_for(monkeypatch):
    def sleep(seconds):
        pytest.fail("it was")

    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    device = object.__new__(CudaDevice)
    device._board = None
    device.settle()


@pytest.mark.parametrize("offset_seconds", [0.0, 4e-6])
def test_short_clock_reading_excludes_the_constant_spin_time(monkeypatch, offset_seconds):
    hertz, seconds = 1.98e9, [0.0]
    device = object.__new__(CudaDevice)

    def spin(cycles):
        seconds[0] += cycles / hertz + offset_seconds

    monkeypatch.setattr(cuda, "_spin", spin)
    device.new_event = lambda: SimpleNamespace(seconds=None)
    device.record = lambda event: setattr(event, "seconds", seconds[0])
    device.elapsed_seconds = lambda start, end: end.seconds - start.seconds
    device.synchronize = lambda: None
    readings = device.clock_readings()
    assert readings == pytest.approx((hertz, hertz), rel=1e-6)
    hertz = 1.5e9  # the offset was calibrated at another clock
    assert device.clock_readings() == pytest.approx((hertz, hertz), rel=1e-6)
