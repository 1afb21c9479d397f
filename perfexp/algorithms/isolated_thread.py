"""Run work in an isolated thread, because torch caches cuDNN's chosen algorithms per thread.

Torch consults that cache before it searches (`benchmark`) or calls the heuristic: for the same shape, whichever of the
two ran first in a thread decides for both (ATen's Conv_v8.cpp).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Apart:
    """A thread with the caller's grad mode and device; backward passes run in it too."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def __call__(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result or raise its error."""
        inferring, recorded = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> T:
            if device is not None:
                torch.cuda.set_device(device)
            with (
                torch.inference_mode(inferring),
                torch.set_grad_enabled(recorded),
                torch.autograd.set_multithreading_enabled(False),
            ):
                return work()

        return self._thread.submit(run).result()

    def end(self) -> None:
        """Shut the thread down."""
        self._thread.shutdown()


class Threads(defaultdict[str, Apart]):
    """Isolated threads by name, each of which starts with its first work."""

    def __init__(self) -> None:
        super().__init__(Apart)

    def end(self) -> None:
        """Shut all threads down."""
        for thread in self.values():
            thread.end()
        self.clear()
