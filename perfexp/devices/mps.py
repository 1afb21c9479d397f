"""Apple's GPU through torch, timed by the host's clock around calls that synchronize."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from perfexp.devices import Event
from perfexp.devices.cpu import CpuDevice, processor_name
from perfexp.devices.meters import DeviceMeters, none_because
from perfexp.errors import DeviceMismatch
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import PEAK_MEMORY
from perfexp.records.record import Metric


class MpsDevice(CpuDevice):
    """The GPU in an Apple chip.

    Recording an event waits for the queue, so the host's clock shows its time.
    """

    kind = "mps"
    identifier: str | None = "mps"
    lock_name: str | None = "mps"

    def __init__(self) -> None:
        super().__init__(name=f"{processor_name()} GPU")
        self._evicting: torch.Tensor | None = None

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        torch.mps.synchronize()

    def completing(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a version of `call` that synchronizes at its end."""

        def completed() -> None:
            call()
            torch.mps.synchronize()

        return completed

    def record(self, event: Event) -> None:
        """Wait for the queue, then set the event's time to now."""
        self.synchronize()
        super().record(event)

    def flush_cache(self) -> None:
        """Enqueue writes to twice the largest cache's size."""
        if self._evicting is None:
            self._evicting = torch.ones(2 * self.cache_bytes // 4, device=self.identifier)
        self._evicting += 1.0

    def reset_peak_memory(self, *, give_back: bool = True) -> None:
        """Free unused memory.

        Torch tracks no peak, so `memory` is the allocator's current memory.
        """
        if give_back:
            self._evicting = None
            gc.collect()
        self.synchronize()
        torch.mps.empty_cache()

    def memory(self) -> list[Metric]:
        """Return the memory that torch has allocated now, instead of a peak."""
        flush_bytes = self._evicting.nbytes if self._evicting is not None else 0
        return [Metric.of(PEAK_MEMORY, torch.mps.driver_allocated_memory() - flush_bytes)]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether the GPU or the host ran out of memory."""
        return "MPS backend out of memory" in str(error) or super().is_out_of_memory(error)

    def meters(self) -> DeviceMeters:
        """Return no meters, with the reason."""
        return none_because("Apple's GPU has none that perfexp reads")

    def doubts(self) -> list[Diagnostic]:
        """Return the diagnostic that this device is untested and has no clock of its own."""
        message = f"{self.name}; each call waits for it, and has no device time"
        return [diagnostics.make("untested", what=message)]


def open_device(**_: Any) -> MpsDevice:
    """Open Apple's GPU; raise `DeviceMismatch` if there is none."""
    if not torch.backends.mps.is_available():
        raise DeviceMismatch(
            f"gpu=mps asks for Apple's GPU; this job runs on: {processor_name()}. Choose gpu=auto."
        )
    return MpsDevice()
