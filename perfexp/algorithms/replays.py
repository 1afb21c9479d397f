"""Replays: work that comes again with the same addresses, launched as it was captured.

A call of cuDNN's v7 interface builds a plan, enqueues its kernels one by one and throws the plan away: 25 to 75 µs of
the host's time on an H200's. A graph of them is launched in 3 to 4 µs, however many they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from perfexp.algorithms.captured import CaptureError, Launch
from perfexp.algorithms.cudnn import CudnnError, capturing

#: Sets of addresses that are remembered; a launch takes about 0.1 MB of the device's memory, and little of the host's.
_MOST = 4096
#: Whose they are, the oldest first.
_remembered: deque[tuple[Replays, tuple[int, ...]]] = deque()


class Replays:
    """Work by its addresses. Torch's allocator gives a model's calls the same ones again and again.

    Args:
        enqueue: puts the work on torch's current stream, by its addresses.
        device: index of a CUDA device.
    """

    def __init__(self, enqueue: Callable[..., None], device: int) -> None:
        self._enqueue, self._device = enqueue, device
        #: None for addresses that have come once
        self._launches: dict[tuple[int, ...], Launch | None] = {}
        self._possible = True

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> bool:
        """Launch the work; false where it has to be enqueued: it is the first time, or somebody captures it.

        Args:
            stream: torch's current one.
            addresses: of everything that the work reads and writes.

        Raises:
            CaptureError: the device fails.
        """
        launch = self._launches.get(addresses)
        if launch is None:
            launch = self._new(addresses)
        if launch is None or capturing():
            return False
        launch(stream)
        return True

    def _new(self, addresses: tuple[int, ...]) -> Launch | None:
        """What launches it from now on, if it comes for the second time."""
        if addresses not in self._launches:
            self._launches[addresses] = None
            _remembered.append((self, addresses))
            if len(_remembered) > _MOST:
                _forget_oldest()
        elif self._possible and not capturing():
            try:
                work = partial(self._enqueue, *addresses)
                self._launches[addresses] = Launch(work, torch.device("cuda", self._device))
            except (CaptureError, CudnnError):  # what can't be enqueued at all says so when it is
                self._possible = False
        return self._launches[addresses]

    def _forget(self, addresses: tuple[int, ...]) -> None:
        launch = self._launches.pop(addresses)
        if launch is not None:
            launch.destroy()


def forget() -> None:
    """Give back what all launches hold: other sizes have other addresses."""
    while _remembered:
        _forget_oldest()


def _forget_oldest() -> None:
    replays, addresses = _remembered.popleft()
    replays._forget(addresses)
