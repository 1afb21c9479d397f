"""Replay work as a captured graph when it returns with the same addresses.

A call of cuDNN's v7 interface builds a plan, enqueues its kernels one by one and discards the plan: 24 to 148 µs of
host time on an H200. Launching a graph of them takes 2 to 7 µs, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from perfexp.algorithms.captured import CaptureError, Launch
from perfexp.algorithms.cudnn import CudnnError, capturing, current_stream

#: Maximum number of cached launches, at about 0.1 MB of device memory each. Further sets of addresses are enqueued,
#: since evicting launches would cause repeated captures.
_MOST_LAUNCHES = 4096
#: Maximum number of remembered first-time addresses of each `Replays`.
_MOST_ONCE = 256


class Replays:
    """Captured work by address; torch's allocator repeats the addresses of a model's calls.

    `enqueue` puts the work on torch's current stream by its addresses. One thread at a time may use it, as one thread
    at a time computes a pass: autograd's thread works while its caller waits.
    """

    def __init__(self, enqueue: Callable[..., None], device: int) -> None:
        self._enqueue, self._device = enqueue, device
        self._launches: dict[tuple[int, ...], Launch] = {}
        self._once: dict[tuple[int, ...], None] = {}
        self._possible = True

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Put the work on torch's current stream; first-time, currently captured and uncapturable work is enqueued.

        It raises `CaptureError` if the device failed, and `CudnnError` if cuDNN refused.
        """
        if _is_eager:
            self._enqueue(*addresses)
            return
        launch = None
        if not capturing():
            launch = self._launches.get(addresses) or self._new(addresses)
        if launch is None:
            _tally.enqueued += 1
            self._enqueue(*addresses)
        else:
            _tally.launched += 1
            launch(current_stream(self._device))

    def _new(self, addresses: tuple[int, ...]) -> Launch | None:
        _tally.used[self] = None
        if addresses not in self._once:
            if len(self._once) >= _MOST_ONCE:
                self._once.clear()
            self._once[addresses] = None
            return None
        if not self._possible or _tally.kept >= _MOST_LAUNCHES:
            return None
        try:
            made = Launch(partial(self._enqueue, *addresses), torch.device("cuda", self._device))
        except (CaptureError, CudnnError):  # what can't be enqueued at all says so when it is
            self._possible = False
            return None
        _tally.kept += 1
        self._launches[addresses] = made
        return made

    def forget(self) -> None:
        """Free all launches."""
        for launch in self._launches.values():
            with suppress(CaptureError):  # a device that is lost holds nothing
                launch.destroy()
        self._launches.clear()
        self._once.clear()
        self._possible = True


class _Tally:
    """Counts of all work since the last `forget`."""

    def __init__(self) -> None:
        self.used: dict[Replays, None] = {}
        self.kept = self.launched = self.enqueued = 0


_tally = _Tally()
_is_eager = False


@contextmanager
def eager() -> Iterator[None]:
    """While entered, all work of this process is enqueued, as torch's own is, and not counted."""
    global _is_eager
    before, _is_eager = _is_eager, True
    try:
        yield
    finally:
        _is_eager = before


def forget() -> None:
    """Free all launches, since another input size has other addresses."""
    global _tally
    for replays in _tally.used:
        replays.forget()
    _tally = _Tally()


def launched_share() -> float | None:
    """Share of the work since the last `forget` that was launched as a graph; None without any work."""
    everything = _tally.launched + _tally.enqueued
    return _tally.launched / everything if everything else None
