"""GPU count: the number of CUDA devices that a job would see here, from a process of its own."""

from __future__ import annotations

from functools import cache

from perfexp.errors import PerfexpError
from perfexp.orchestration import capabilities


@cache
def visible() -> int:
    """Count the devices that `CUDA_VISIBLE_DEVICES` leaves.

    Raises:
        PerfexpError: the number cannot be determined.
    """
    report = capabilities.conduct(None)
    cuda = report["parts"].get("cuda", {})
    if "devices" not in cuda:
        why = cuda.get("error") or (report["failure"] or {}).get("text") or "no answer"
        raise PerfexpError(f"Cannot count the visible GPUs: {why}. Run `perfexp doctor` for details.")
    return len(cuda["devices"])
