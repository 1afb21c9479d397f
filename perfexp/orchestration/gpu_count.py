"""Cards: how many CUDA devices a job would see here; asked of a process of its own."""

from __future__ import annotations

from functools import cache

from perfexp.errors import PerfexpError
from perfexp.orchestration import capabilities


@cache
def visible() -> int:
    """How many there are, as `CUDA_VISIBLE_DEVICES` leaves them.

    Raises:
        PerfexpError: nobody could say.
    """
    found = capabilities.conduct(None)
    cuda = found["parts"].get("cuda", {})
    if "devices" not in cuda:
        why = cuda.get("error") or (found["failure"] or {}).get("text") or "no answer"
        raise PerfexpError(f"How many cards are visible here is not known: {why}. `perfexp doctor` says more.")
    return len(cuda["devices"])
