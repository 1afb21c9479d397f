"""The configuration's fields as users write them, with their types and defaults.

Hydra validates a composition against `ConfigSchema`. A `Plan` has the same fields with parsed
sizes. `key_descriptions.yaml` has the meaning of each key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from perfexp.devices import Cache
from perfexp.models import Execution, Precision
from perfexp.plan.schema import ModeSettings

#: Version of plan.yaml, raised when its keys change, and the first version that can be continued.
#: History: 1 — without a version; 2 — `format`, with expected.json beside it; 3 — `sources`, and
#: precision=torch as the default; 4 — `process_start`;
#: 5 — `execution.attention`; 6 — `mode.train.target_accuracy`.
FORMAT, FIRST_FORMAT = 6, 2


class DeviceLock(StrEnum):
    """Reaction to another process that measures on the device."""

    wait = "wait"
    fail = "fail"


class ProcessStart(StrEnum):
    """How measuring processes start; if a fork is impossible, each is a new interpreter."""

    forked = "forked"
    fresh = "fresh"


class HostSharing(StrEnum):
    """Other runs on this host at the same time; `hydra/launcher=local` sets it."""

    none = "none"
    turns = "turns"
    together = "together"


@dataclass(kw_only=True)
class Probes:
    """Measurements besides the times."""

    call_times: bool = True
    loaded_clock: bool = True
    work: bool = True
    energy: bool = False
    energy_seconds: float | None = None
    ceilings: bool = False
    layers: bool = False
    scaling: bool = False
    correctness: bool = False


@dataclass(kw_only=True)
class Export:
    """Files for other tools besides a run's own."""

    vendor_json: bool = False


@dataclass(kw_only=True)
class Compare:
    """How the runs of a sweep are compared."""

    baseline: str | None = None


@dataclass(kw_only=True)
class PlanSchema:
    """Run configuration as users write it; nodes that select code have a `_target_`."""

    model: Any = MISSING
    algorithm: Any = MISSING
    gpu: Any = MISSING
    mode: ModeSettings = field(default_factory=ModeSettings)
    profiler: Any = field(
        default_factory=lambda: {
            "_target_": "perfexp.measuring.profilers.NoProfiler",
            "name": "none",
        }
    )
    precision: Precision = MISSING
    execution: Execution = field(default_factory=Execution)
    data: Any = MISSING
    stopping: Any = MISSING
    sweep: Any = MISSING
    tracking: Any = MISSING
    probe: dict[str, Any] = field(default_factory=dict)
    probes: Probes = field(default_factory=Probes)
    export: Export = field(default_factory=Export)
    compare: Compare = field(default_factory=Compare)
    input_size: Any = 224
    batch_size: Any = 1
    percentiles: list[float] = field(default_factory=lambda: [50.0, 95.0, 99.0])
    processes: int | None = None
    cold_start: bool = False
    epochs: int | None = None
    cache: Cache = Cache.warm
    seed: int = 0
    timeout_seconds: float | None = 3600.0
    process_start: ProcessStart = ProcessStart.forked
    device_lock: DeviceLock = DeviceLock.wait
    host_sharing: HostSharing = HostSharing.none
    output_dir: str | None = None
    speed_dir: str | None = None
    stage: str | None = None
    quiet: bool = False
    choices: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    uid: str | None = None
    format: int = FORMAT


@dataclass(kw_only=True)
class ConfigSchema(PlanSchema):
    """Everything that users configure: plan, job cluster, and two keys with earlier names."""

    cluster: Any = field(default_factory=dict)
    replicate: int | None = None
    ttfp: bool | None = None
