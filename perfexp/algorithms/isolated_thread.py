"""Apart: work in a thread of its own, because what cuDNN was seen to do best is kept for each thread.

Torch looks into that memory before it looks whether it is to search (`benchmark`) or to ask the heuristic: whichever of
the two comes first in a thread is what the other one gets there, for the same shape (ATen's Conv_v8.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Apart:
    """A thread that computes as the one that asks it does, backward passes included."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, which is waited for.

        Args:
            work: runs with torch's grad mode and current device of this thread.
        """
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
        """No more work is to come."""
        self._thread.shutdown()
