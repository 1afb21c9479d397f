"""Replays: work that comes again with the same addresses, launched as it was captured.

A call of cuDNN's v7 interface builds a plan, enqueues its kernels one by one and throws the plan away: 24 to 148 µs of
the host's time on an H200's. A graph of them is launched in 2 to 7 µs, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from perfexp.algorithms.captured import CaptureError, Launch
from perfexp.algorithms.cudnn import CudnnError, capturing, current_stream

#: Launches that are kept in all, at about 0.1 MB of the device's memory each. Where there are more sets of addresses,
#: those that come later are enqueued: making room would mean to capture again and again.
_MOST_LAUNCHES = 4096
#: Addresses that came once and are remembered, of each work.
_MOST_ONCE = 256


class Replays:
    """Work by its addresses. Torch's allocator gives a model's calls the same ones again and again.

    One thread at a time may use it, as one thread at a time computes a pass: autograd's works while its caller waits.

    Args:
        enqueue: puts the work on torch's current stream, by its addresses.
        device: index of a CUDA device.
    """

    def __init__(self, enqueue: Callable[..., None], device: int) -> None:
        self._enqueue, self._device = enqueue, device
        self._launches: dict[tuple[int, ...], Launch] = {}
        self._once: dict[tuple[int, ...], None] = {}
        self._possible = True

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Put the work on torch's current stream; enqueued the first time, and where it is or can't be captured.

        Args:
            addresses: of everything that the work reads and writes.

        Raises:
            CaptureError: the device fails.
            CudnnError: cuDNN refuses.
        """
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
        """What launches it from now on, if it comes for the second time."""
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
        """Give back what it holds."""
        for launch in self._launches.values():
            with suppress(CaptureError):  # a device that is lost holds nothing
                launch.destroy()
        self._launches.clear()
        self._once.clear()
        self._possible = True


class _Tally:
    """What all work together has been and holds since it was last forgotten."""

    def __init__(self) -> None:
        self.used: dict[Replays, None] = {}
        self.kept = self.launched = self.enqueued = 0


_tally = _Tally()


def forget() -> None:
    """Give back what all launches hold: other sizes have other addresses."""
    global _tally
    for replays in _tally.used:
        replays.forget()
    _tally = _Tally()


def launched_share() -> float | None:
    """The share of all work since it was last forgotten that was launched; None where there was none."""
    everything = _tally.launched + _tally.enqueued
    return _tally.launched / everything if everything else None
