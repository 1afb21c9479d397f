"""Settings: the typed keys of each option that selects code, by which a misspelt or mistyped key is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from perfexp.algorithms import Backend, Objective, OnUnsupported
from perfexp.host.gpu_sheets import GpuFacts

#: Marks of fields that a stored command may not set, as they name code or places to write, and of paths of data.
TYPED, PATH = {"typed": True}, {"path": True}


@dataclass(kw_only=True)
class Gpu:
    """The device that is meant. `match` is searched in the name that the driver reports.

    `count` are devices from `index` on, each with a process of its own (a rank) that works on a batch of its own. The
    ranks find one another through `port` of this host, or through one that is free.
    """

    _target_: str = MISSING
    name: str = MISSING
    match: str | None = None
    index: int = 0
    count: int = 1
    port: int | None = None
    facts: GpuFacts = field(default_factory=GpuFacts)


@dataclass(kw_only=True)
class ModeSettings:
    """Which phases are measured, each with the code that makes its calls."""

    name: str = MISSING
    train: Any = None
    inference: Any = None


@dataclass(kw_only=True)
class NsysProfiler:
    """Settings of `perfexp.profilers.nsys.Nsys`."""

    _target_: str = MISSING
    name: str = "nsys"
    warmup: int = 20
    steps: int = 3
    modules: bool = False
    all_points: bool = False
    trace: list[str] = field(default_factory=lambda: ["cuda", "cudnn", "nvtx", "osrt"])
    sample: str = "none"
    cpuctxsw: str = "none"
    reports: list[str] = field(
        default_factory=lambda: ["cuda_api_gpu_sum", "cuda_gpu_kern_sum", "cuda_gpu_mem_time_sum", "nvtx_gpu_proj_sum"],
        metadata=TYPED,
    )
    top: int = 20
    options: list[str] = field(default_factory=list, metadata=TYPED)
    tool: str | None = field(default=None, metadata=TYPED)


@dataclass(kw_only=True)
class NcuProfiler:
    """Settings of `perfexp.profilers.ncu.Ncu`."""

    _target_: str = MISSING
    name: str = "ncu"
    warmup: int = 20
    modules: bool = False
    all_points: bool = False
    metrics: list[str] | None = None
    sections: list[str] = field(default_factory=list)
    cache_control: str = "all"
    top: int = 20
    options: list[str] = field(default_factory=list, metadata=TYPED)
    tool: str | None = field(default=None, metadata=TYPED)


@dataclass(kw_only=True)
class TorchProfiler:
    """Settings of `perfexp.profilers.kineto.Torch`."""

    _target_: str = MISSING
    name: str = "torch"
    warmup: int = 20
    steps: int = 3
    modules: bool = False
    all_points: bool = False
    memory: bool = False
    shapes: bool = True
    stacks: bool = False
    top: int = 20


@dataclass(kw_only=True)
class NvtxProfiler:
    """Settings of `perfexp.profilers.nvtx.Nvtx`."""

    _target_: str = MISSING
    name: str = "nvtx"
    warmup: int = 20
    step: int = 1
    modules: bool = False
    all_points: bool = False


@dataclass(kw_only=True)
class TorchvisionModel:
    """Settings of `perfexp.models.torchvision.Torchvision`."""

    _target_: str = MISSING
    name: str = MISSING
    weights: str | None = field(default=None, metadata=PATH)
    weights_dir: str | None = field(default=None, metadata=PATH)
    num_classes: int | None = None
    frames: int = 16
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class MmsegModel:
    """Settings of `perfexp.models.mmseg.Mmseg`."""

    _target_: str = MISSING
    name: str = MISSING
    config: str = MISSING
    weights: str | None = field(default=None, metadata=PATH)
    weights_dir: str | None = field(default=None, metadata=PATH)
    num_classes: int | None = None
    output: str = "raw"
    optimizer: str = "own"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class FakeFaults:
    """What goes wrong with `perfexp.models.fake.FakeModel`, each for batches of more than so many pixels."""

    oom: int | None = None
    fail: int | None = None
    lost: int | None = None
    hang: int | None = None
    kill: int | None = None
    crash: int | None = None


@dataclass(kw_only=True)
class FakeModelSettings:
    """Settings of `perfexp.models.fake.FakeModel`."""

    _target_: str = MISSING
    name: str = "fake"
    base_seconds: float = 1e-3
    seconds_per_megapixel: float = 0.02
    noise: float = 0.01
    launches: int = 1
    smallest: int = 1
    waits: bool = False
    cold_seconds: float = 0.0
    faults: FakeFaults = field(default_factory=FakeFaults)


@dataclass(kw_only=True)
class ForcedAlgorithm:
    """Settings of `perfexp.algorithms.forced.Forced`. `layers` has no type: a typed mapping takes no new keys."""

    _target_: str = MISSING
    name: str = MISSING
    backend: Backend = Backend.auto
    on_unsupported: OnUnsupported = OnUnsupported.fallback
    workspace_bytes: int | None = None
    backward_data: str | None = None
    backward_filter: str | None = None
    max_error: float | None = None
    objective: Objective = Objective.time
    reuse: bool = True
    cache_dir: str | None = field(default=None, metadata=TYPED)
    verify: bool = False
    layers: Any = None


@dataclass(kw_only=True)
class SyntheticData:
    """Settings of `perfexp.data.synthetic.Synthetic`."""

    _target_: str = MISSING
    num_samples: int | None = None


@dataclass(kw_only=True)
class ImagesData:
    """Settings of `perfexp.data.images.Images`."""

    _target_: str = MISSING
    root: str = field(default=MISSING, metadata=PATH)
    workers: int = 2
    pin_memory: bool = False
    prefetch_factor: int = 2


@dataclass(kw_only=True)
class CityscapesData:
    """Settings of `perfexp.data.cityscapes.Cityscapes`."""

    _target_: str = MISSING
    root: str = field(default=MISSING, metadata=PATH)
    workers: int = 2
    pin_memory: bool = False
    prefetch_factor: int = 2


@dataclass(kw_only=True)
class PrecisionRule:
    """Settings of `perfexp.stopping.Precision`."""

    _target_: str = MISSING
    epsilon: float = 0.01
    max_seconds: float = 5.0
    max_calls: int = 1_000_000
    min_calls: int = 5
    warmup_calls: int = 3
    warmup_seconds: float = 0.5
    min_effective: float = 30.0
    tail_percentile: float = 50.0


@dataclass(kw_only=True)
class FixedRule:
    """Settings of `perfexp.stopping.Fixed`."""

    _target_: str = MISSING
    warmup: int = 10
    measure: int = 20


@dataclass(kw_only=True)
class PointSweep:
    """Settings of `perfexp.sweep.Point`."""

    _target_: str = MISSING
    skip_larger: bool = False


@dataclass(kw_only=True)
class SizesSweep:
    """Settings of `perfexp.sweep.Sizes`."""

    _target_: str = MISSING
    skip_larger: bool = False
    num_sizes: int = 10
    min_size: int = 224
    max_size: int = 512


@dataclass(kw_only=True)
class BatchSweep:
    """Settings of `perfexp.sweep.BatchSizes`."""

    _target_: str = MISSING
    skip_larger: bool = False
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])


@dataclass(kw_only=True)
class MlflowTracking:
    """Settings of `perfexp.tracking.mlflow_sink.MlflowSink`."""

    _target_: str = MISSING
    uri: str | None = None
    experiment: str | None = None
    request_timeout_seconds: int = 10
    deadline_seconds: float = 120.0


#: Where each one is in the configuration: group and name.
SETTINGS: tuple[tuple[str, str, type], ...] = (
    ("schema", "gpu", Gpu),
    ("schema/model", "torchvision", TorchvisionModel),
    ("schema/model", "mmseg", MmsegModel),
    ("schema/model", "fake", FakeModelSettings),
    ("schema/algorithm", "forced", ForcedAlgorithm),
    ("schema/profiler", "nsys", NsysProfiler),
    ("schema/profiler", "ncu", NcuProfiler),
    ("schema/profiler", "torch", TorchProfiler),
    ("schema/profiler", "nvtx", NvtxProfiler),
    ("schema/data", "synthetic", SyntheticData),
    ("schema/data", "images", ImagesData),
    ("schema/data", "cityscapes", CityscapesData),
    ("schema/stopping", "precision", PrecisionRule),
    ("schema/stopping", "fixed", FixedRule),
    ("schema/sweep", "point", PointSweep),
    ("schema/sweep", "sizes", SizesSweep),
    ("schema/sweep", "batch", BatchSweep),
    ("schema/tracking", "mlflow", MlflowTracking),
)
