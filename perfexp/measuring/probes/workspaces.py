"""Workspaces: memory that cuDNN takes during a convolution, measured on the device and cached.

A traced peak of memory (`worker.peak_memory`) lacks them, because cuDNN chooses its engines and
their workspaces only on the device. An `OperatorCall` is one convolution with its shapes and types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from perfexp.cost.operator_calls import OperatorCall
from perfexp.devices import Device
from perfexp.errors import PerfexpError, Unsupported
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.models import Execution, Precision, tf32
from perfexp.models.torch_settings import apply_settings, unchanged_settings
from perfexp.records.quantities import PEAK_MEMORY

#: Separates device name and call in cache keys.
_SEPARATOR = " | "


@dataclass(frozen=True, kw_only=True)
class WorkspaceSizes:
    """Workspaces of a trace's convolutions, in bytes.

    Attributes:
        device: name of the device that they were measured on; None if none is known.
        sizes: bytes of each known workspace.
        convolutions: number of distinct convolutions in the trace.
        reason: why the first unknown workspace is unknown; None if it was not tried.
    """

    device: str | None
    sizes: Mapping[OperatorCall, int] = field(default_factory=dict)
    convolutions: int
    reason: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return the number of known workspaces and their origin as JSON, for `perfexp predict`."""
        num_known = len(self.sizes)
        return {
            "device": self.device if num_known else None,
            "convolutions": self.convolutions,
            "known": num_known,
            "reason": self.reason,
        }


class Workspaces:
    """Workspaces on a device under given torch settings: from the user's cache, or measured.

    Without the device, only measurements cached by earlier processes with the same torch and cuDNN
    are known.

    Attributes:
        device_name: product name of the device; None if it is neither present nor in the cache.
        memory_bytes: memory size of the device; None if it is not present.

    Args:
        precision: precision of the model; for autocast, a trace has bfloat16 instead of float16.
        device: device to measure on; None if it is not present.
        start: called before the first measurement; it may raise PerfexpError.
        match: regular expression for the product name of an absent device, for example `H200`.
        progress: called with a status line before each measurement.
    """

    def __init__(
        self,
        *,
        precision: Precision,
        execution: Execution,
        device: Device | None,
        match: str | None = None,
        start: Callable[[], None] = lambda: None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._device, self._start, self._progress = device, start, progress
        self._precision = precision
        self._execution = Execution(
            cudnn_benchmark=execution.cudnn_benchmark, deterministic=execution.deterministic
        )
        self._dtypes = {"bfloat16": "float16"} if precision.autocast == "float16" else {}
        self._cache = JsonCache(cache_folder("workspaces"), self._context())
        self.device_name = device.name if device else _cached_name(self._cache.entries(), match)
        self.memory_bytes = device.memory_bytes if device else None
        self._is_started = False
        self._not_started: str | None = None

    def of(self, calls: Collection[OperatorCall]) -> WorkspaceSizes:
        """Return the workspaces of distinct calls, measured if they are not in the cache.

        Calls that fail on the device stay unknown.
        """
        sizes: dict[OperatorCall, int] = {}
        for call in calls if self.device_name else ():
            size = self._cache.find(self._key(call))
            if type(size) is int:
                sizes[call] = size
        missing, reason = [call for call in calls if call not in sizes], None
        if self._device is not None and missing:
            measured, reason = self._measure(missing, self._device)
            self._cache.update({self._key(call): size for call, size in measured.items()})
            sizes |= measured
        return WorkspaceSizes(
            device=self.device_name, sizes=sizes, convolutions=len(calls), reason=reason
        )

    def _measure(
        self, calls: Sequence[OperatorCall], device: Device
    ) -> tuple[dict[OperatorCall, int], str | None]:
        """Measure workspaces; return bytes by call, and why the first failed call failed."""
        if not self._is_started and self._not_started is None:
            try:
                self._start()
                self._is_started = True
            # another process measures, or there is no memory for the context
            except (PerfexpError, RuntimeError) as error:
                self._not_started = _line(error)
        if self._not_started is not None:
            return {}, self._not_started
        sizes, reasons = {}, []
        with unchanged_settings():
            apply_settings(self._execution, self._precision)
            for number, call in enumerate(calls, 1):
                self._progress(f"workspaces of convolutions: {number} of {len(calls)}")
                try:
                    sizes[call] = workspace_bytes(call.with_dtypes(self._dtypes), device)
                except (PerfexpError, RuntimeError, ValueError, TypeError, MemoryError) as error:
                    reasons.append(_line(error))
        return sizes, next(iter(reasons), None)

    def _key(self, call: OperatorCall) -> str:
        """Return the cache key of a call on this device."""
        return f"{self.device_name}{_SEPARATOR}{call.with_dtypes(self._dtypes)}"

    def _context(self) -> dict[str, Any]:
        """Return the versions and settings that workspaces depend on; each has its own cache."""
        return {
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": self._precision.tf32 if self._precision.tf32 is not None else tf32.allowed()[1],
            "cudnn_benchmark": self._execution.cudnn_benchmark,
            "deterministic": self._execution.deterministic,
        }


def workspace_bytes(call: OperatorCall, device: Device) -> int:
    """Return the bytes that an operator takes while it runs, beyond its inputs and outputs.

    The operator runs twice. In the first call libraries initialize themselves and choose kernels,
    and may try kernels with other workspaces. The peak comes from torch's allocator.

    Raises:
        Unsupported: the device does not report its memory.
        RuntimeError: torch failed, for example for lack of memory.
    """
    assert device.identifier is not None
    with torch.no_grad():
        arguments = call.allocated(device.identifier)
        call.run(arguments)
        device.reset_peak_memory(give_back=False)
        outputs = call.run(arguments)
        peak = _peak_bytes(device)
        device.reset_peak_memory(give_back=False)  # resets it to the memory allocated now
        remaining = _peak_bytes(device)
    del outputs
    return max(peak - remaining, 0)


def _peak_bytes(device: Device) -> int:
    """Return the memory peak since the last reset; raise `Unsupported` if it is unknown."""
    value = next((metric.value for metric in device.memory() if metric.name == PEAK_MEMORY), None)
    if value is None:
        raise Unsupported(f"{device.name} does not report its memory")
    return int(value)


def _cached_name(entries: Mapping[str, Any], match: str | None) -> str | None:
    """Return the last device in a cache with a matching product name; None if there is none."""
    if not match:
        return None
    names = [key.partition(_SEPARATOR)[0] for key in entries]
    return next((name for name in reversed(names) if re.search(match, name, re.IGNORECASE)), None)


def _line(error: BaseException) -> str:
    """Return an error's message on a single line, shortened."""
    return " ".join(str(error).split())[:200] or type(error).__name__
