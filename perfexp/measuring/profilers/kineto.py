"""Profiles from torch's own profiler, on any device: a trace, operators, memory over time.

The trace opens in https://ui.perfetto.dev, chrome://tracing and TensorBoard. Source:
https://docs.pytorch.org/docs/stable/profiler.html
"""

from __future__ import annotations

import gzip
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfexp.host.files import write_atomically
from perfexp.measuring.profilers import (
    About,
    Marks,
    ProfileLocation,
    Profiler,
    ProfileResult,
    ProfilerFailed,
)
from perfexp.measuring.profilers.tools import has_content, ranked, to_csv

#: File endings. TensorBoard's plug-in finds the trace by its ending.
_TRACE, _OPERATORS, _MEMORY = ".pt.trace.json.gz", "_operators.csv", "_memory.csv"
_TIMES = ("self_cpu_seconds", "cpu_seconds", "self_device_seconds", "device_seconds")
_COLUMNS = ("operator", "calls", *_TIMES, "self_cpu_bytes", "self_device_bytes", "flops")
#: The profiler's names for Python and C functions.
_FUNCTION = re.compile(r"(?P<path>[^<>]+\.py)\(\d+\): ")
_BUILT_IN = re.compile(r"<built-in (?:method|function) (?P<function>\S*?) ?(?:of .*)?>")
#: Python modules and C functions of torch's profiler. A function without a name ends a range.
_PROFILERS = ("torch/profiler/", "torch/autograd/profiler")
_OF_THE_PROFILER = re.compile(
    r"|_record_function_\w+|_(?:en|dis)able_profiler\w*|_prepare_profiler|_add_metadata_json"
)
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True)
class Torch(Profiler):
    """torch.profiler on a few calls after a warm-up (profiler=torch).

    The keys are described in `plan/key_descriptions.yaml`.
    """

    name: str = "torch"
    steps: int = 3
    memory: bool = False
    shapes: bool = True
    stacks: bool = False
    top: int = 20

    #: Results of the profiled calls, in the worker.
    _result = ProfileResult()

    def outputs(self, location: ProfileLocation) -> list[Path]:
        """Return the trace and the table of operators, and of memory if `memory` is set."""
        files = [location.file(_TRACE), location.file(_OPERATORS)]
        if self.memory:
            files.append(location.file(_MEMORY))
        return files

    @contextmanager
    def watching(self, location: ProfileLocation, device: Any) -> Iterator[Marks]:
        """See `Profiler`; at the end, write the trace and the tables of operators and memory."""
        from torch.profiler import ProfilerActivity, profile, record_function

        activities = [ProfilerActivity.CPU]
        if device.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        device.synchronize()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.profiler.*")
            with profile(
                activities=activities,
                record_shapes=self.shapes,
                profile_memory=self.memory,
                with_stack=self.stacks,
                with_flops=self.shapes,
            ) as profiler:
                yield Marks(range=record_function)
                device.synchronize()
            profiler.export_chrome_trace(str(location.file(_TRACE)))
            kernels, operators = list[dict[str, Any]](), list[dict[str, Any]]()
            for average in profiler.key_averages():
                if getattr(average, "is_user_annotation", False) or is_own(str(average.key)):
                    continue
                row = _row(average)
                rows = kernels if row["on_device"] else operators
                rows.append(row)
        self._write_tables(location, kernels, operators)

    def _write_tables(
        self,
        location: ProfileLocation,
        kernels: list[dict[str, Any]],
        operators: list[dict[str, Any]],
    ) -> None:
        """Write the tables of operators and memory, and store the slowest as the result.

        Args:
            kernels: rows of kernels; empty on a CPU.
            operators: rows of operators.
        """
        sorted_by = "self_device_seconds" if kernels else "self_cpu_seconds"
        operators.sort(key=lambda row: -row[sorted_by])
        write_atomically(location.file(_OPERATORS), to_csv(operators, _COLUMNS))
        if self.memory:
            samples = list(memory_of(location.file(_TRACE)))
            columns = ("seconds", "device", "bytes", "allocated_bytes")
            write_atomically(location.file(_MEMORY), to_csv(samples, columns))
        result = ProfileResult(facts={"sorted_by": sorted_by, "operator_names": len(operators)})
        result.facts["operators"] = _ranked(operators, sorted_by)[: self.top]
        result.add_kernels(_ranked(kernels, "self_device_seconds"), self.top)
        self._result = result

    def observations(self) -> dict[str, Any]:
        return self._result.facts

    def collect(
        self, location: ProfileLocation, about: About, said: str, observations: Mapping[str, Any]
    ) -> ProfileResult:
        """See `Profiler`; the worker has sent the facts, so only the files remain to be listed."""
        files = [path.name for path in self.outputs(location) if has_content(path)]
        if location.file(_TRACE).name not in files:
            raise ProfilerFailed("torch's profiler left no trace; see details/run.log.", files)
        return ProfileResult(files=files)


def is_own(name: str) -> bool:
    """Return whether an operator or Python function belongs to perfexp or the profiler.

    Such rows are left out of the tables.

    Args:
        name: name in the profile; a Python function's looks like `torch/_ops.py(1140): name`.
    """
    if (built_in := _BUILT_IN.match(name)) is not None:
        return bool(_OF_THE_PROFILER.fullmatch(built_in["function"]))
    function = _FUNCTION.match(name)
    if function is None:
        return False
    path = Path(function["path"])
    if path.is_absolute():
        return path.is_relative_to(_PACKAGE)
    is_of_perfexp = path.parts[0] == _PACKAGE.name and (_PACKAGE.parent / path).is_file()
    return is_of_perfexp or function["path"].startswith(_PROFILERS)


def memory_of(trace: Path) -> Iterator[dict[str, Any]]:
    """Yield the allocations and frees in a trace.

    Each has `seconds` since the first, `device`, `bytes`, and the memory then in use.
    """
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    samples = [event for event in events if event.get("name") == "[memory]"]
    samples.sort(key=lambda event: event["ts"])
    for event in samples:
        arguments = event["args"]
        kind = (
            "cpu" if arguments.get("Device Type") == 0 else f"device {arguments.get('Device Id')}"
        )
        yield {
            "seconds": (event["ts"] - samples[0]["ts"]) * 1e-6,
            "device": kind,
            "bytes": arguments.get("Bytes"),
            "allocated_bytes": arguments.get("Total Allocated"),
        }


def _row(average: Any) -> dict[str, Any]:
    """Return a row from the profiler's averages, which are in microseconds."""
    return {
        "operator": str(average.key),
        "calls": int(average.count),
        "self_cpu_seconds": average.self_cpu_time_total * 1e-6,
        "cpu_seconds": average.cpu_time_total * 1e-6,
        "self_device_seconds": average.self_device_time_total * 1e-6,
        "device_seconds": average.device_time_total * 1e-6,
        "self_cpu_bytes": int(average.self_cpu_memory_usage),
        "self_device_bytes": int(average.self_device_memory_usage),
        "flops": int(average.flops or 0),
        "on_device": "CUDA" in str(average.device_type),
    }


def _ranked(rows: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """Return totals by name, in order of decreasing time in a column of seconds."""
    return ranked((row["operator"], row["calls"], row[column]) for row in rows)
