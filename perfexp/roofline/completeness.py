"""Completeness: whether the ranges of a training step hold its backward pass."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FORWARD = re.compile(r"forward|fwd", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd", re.IGNORECASE)
_TRAINING = re.compile(r"train|backward|bwd|optimi[sz]er", re.IGNORECASE)
#: A backward pass has about twice the kernels of its forward pass; with less than half of them it is not all there.
_LEAST = 0.5
#: Fewer forward kernels say nothing.
_FEW = 5


def missing_backward(launches: Mapping[str, int]) -> str | None:
    """What is missing of a training step, why, and how to catch it; None where nothing looks missing.

    NVTX push/pop ranges belong to the thread that pushed them (NVIDIA, NVTX C API, "Push/Pop ranges"), and autograd
    launches the backward pass from a thread of its own for each device (PyTorch, "Autograd mechanics").

    Args:
        launches: how many kernels each range holds, by its path.
    """
    if not any(_TRAINING.search(path) for path in launches):
        return None
    forward, backward = (_within(launches, name) for name in (_FORWARD, _BACKWARD))
    if forward < _FEW or backward >= _LEAST * forward:
        return None
    seen = "1 kernel" if backward == 1 else f"{backward or 'no'} kernels"
    return (
        f"This training step looks incomplete: {forward} kernels in its forward pass and {seen} in its backward one, "
        "which should have more. Autograd launches the backward pass from another thread, and push/pop ranges belong "
        "to the thread that pushed them, so a filter on such a range leaves it out. Use ranges of the process "
        "(torch.cuda.nvtx.range_start and range_end) or cudaProfilerStart/Stop with ncu --profile-from-start off."
    )


def _within(launches: Mapping[str, int], name: re.Pattern[str]) -> int:
    """Kernels in the outermost ranges of a name."""
    parted = {path: path.rpartition("/") for path in launches}
    return sum(
        count for path, count in launches.items() if name.search(parted[path][2]) and not name.search(parted[path][0])
    )
