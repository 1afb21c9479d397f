"""Replays: work of several kernels that comes again with the same addresses, launched at once.

cuDNN launches each kernel of an algorithm by itself, 4 to 5 µs of the host's time for one on an H200's; a graph of them
all takes 3 µs, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from perfexp.algorithms.captured import CaptureError, Launch
from perfexp.algorithms.cudnn import capturing

#: Sets of addresses that are remembered: layers that are alike have weights, inputs and outputs of their own.
_MOST = 512


class Replays:
    """Work by its addresses. Torch's allocator gives a model's calls the same ones again and again.

    Args:
        enqueue: puts the work on torch's current stream, by its addresses.
        device: a CUDA device.
    """

    def __init__(self, enqueue: Callable[..., None], device: torch.device) -> None:
        self._enqueue, self._device = enqueue, device
        #: None for addresses that have come once
        self._launches: dict[tuple[int, ...], Launch | None] = {}
        self._possible = True

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> bool:
        """Launch the work; false where it has to be enqueued: it is the first time, or somebody captures it.

        Args:
            stream: torch's current one.
            addresses: of everything that the work reads and writes.
        """
        launch = self._launches.get(addresses)
        if launch is None:
            launch = self._new(addresses)
        if launch is None or capturing():
            return False
        launch(stream)
        return True

    def _new(self, addresses: tuple[int, ...]) -> Launch | None:
        """What launches it if it comes for the second time."""
        if addresses not in self._launches:
            if len(self._launches) >= _MOST:
                self._forget()
            self._launches[addresses] = None
        elif self._possible and not capturing():
            try:
                self._launches[addresses] = Launch(partial(self._enqueue, *addresses), self._device)
            except CaptureError:
                self._possible = False
        return self._launches[addresses]

    def _forget(self) -> None:
        for launch in self._launches.values():
            if launch is not None:
                launch.destroy()
        self._launches.clear()
