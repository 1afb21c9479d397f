"""Replays: repeated work on the same addresses is launched as a captured graph.

A call of cuDNN's v7 interface builds a plan, enqueues its kernels one by one and discards the plan.
That takes 24 to 148 µs of host time on an H200. Launching a graph takes 2 to 7 µs for any number of
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from perfexp.convolution.captured import CaptureError, GraphLaunch
from perfexp.convolution.cudnn import CudnnError, capturing, current_stream

#: Maximum number of cached launches, at about 0.1 MB of device memory each. Work on further
#: addresses is enqueued, because evicting launches would cause repeated captures.
_MOST_LAUNCHES = 4096
#: Maximum number of first-time addresses that each `Replays` remembers.
_MOST_ONCE = 256


class Replays:
    """Captured work by address; torch's allocator repeats addresses from model call to model call.

    It is not thread-safe, and need not be: autograd's thread works while its caller waits.

    Args:
        enqueue: puts the work for these addresses on torch's current stream.
    """

    def __init__(self, enqueue: Callable[..., None], device: int) -> None:
        self._enqueue, self._device = enqueue, device
        self._launches: dict[tuple[int, ...], GraphLaunch] = {}
        self._once: dict[tuple[int, ...], None] = {}
        self._possible = True

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Put the work on torch's current stream, as a launch if possible.

        Work is enqueued kernel by kernel if it comes for the first time, can't be captured, or is
        being captured.

        Raises:
            CaptureError: the device failed.
            CudnnError: cuDNN refused.
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

    def _new(self, addresses: tuple[int, ...]) -> GraphLaunch | None:
        _tally.used[self] = None
        if addresses not in self._once:
            if len(self._once) >= _MOST_ONCE:
                self._once.clear()
            self._once[addresses] = None
            return None
        if not self._possible or _tally.kept >= _MOST_LAUNCHES:
            return None
        try:
            made = GraphLaunch(
                partial(self._enqueue, *addresses), torch.device("cuda", self._device)
            )
        # work that can't be enqueued at all raises its error when it is enqueued
        except (CaptureError, CudnnError):
            self._possible = False
            return None
        _tally.kept += 1
        self._launches[addresses] = made
        return made

    def forget(self) -> None:
        """Free all launches."""
        for launch in self._launches.values():
            with suppress(CaptureError):  # a lost device holds nothing
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
    """Enqueue all work in this process kernel by kernel while entered, as torch does, uncounted."""
    global _is_eager
    before, _is_eager = _is_eager, True
    try:
        yield
    finally:
        _is_eager = before


def forget() -> None:
    """Free all launches, because another input size has other addresses."""
    global _tally
    for replays in _tally.used:
        replays.forget()
    _tally = _Tally()


def launched_share() -> float | None:
    """Return the share of work launched as graphs since the last `forget`; None without work."""
    everything = _tally.launched + _tally.enqueued
    return _tally.launched / everything if everything else None
