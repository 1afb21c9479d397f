"""Quantities: name, unit, title, format and meaning of each metric and time, in reference order.

This is the registry: the code that measures a metric, all reports, CSV files, MLflow and the
reference page take names and titles from here. Constants hold names (`ENERGY`), `of(metric)`
returns the entry.
"""

from __future__ import annotations

from enum import Enum, auto
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

#: Wildcard in the name of a family of quantities. It stands for a rank, meter or baseline.
ANY = "*"


class Pooled(Enum):
    """How figures from the processes that measured a point are combined (`summary`)."""

    FIRST = auto()
    LARGEST = auto()
    MEDIAN = auto()
    GEOMETRIC_MEAN = auto()
    #: Mean with an interval over processes, if every process has a value.
    SPEEDUP = auto()
    #: First process's value, scaled to the median time (or the mean loop time) of all processes.
    BY_TIME = auto()
    BY_RATE = auto()


#: Figures computed from a time or a rate, with the same relative uncertainty.
FOLLOWING = (Pooled.BY_TIME, Pooled.BY_RATE)


class Quantity(NamedTuple):
    """One metric, or a family of metrics with a wildcard (`ANY`) in the name.

    Attributes:
        name: name that ends in the unit.
        unit: SI unit; `1` for a ratio or a count.
        meaning: one sentence for the reference.
        heading: column title in tables; by default the name without its unit. `{time}` stands for
            the points' median time.
        symbol: unit of a count in tables; None for the symbol of `unit`.
        is_share: whether it is shown in percent.
        is_apart: whether it has its own column, sentence or note, instead of a place in the list of
            metrics.
        is_charted: whether MLflow charts it.
        pooled: how figures from several processes are combined.
        csv: column name for other tools; by default the name.
        note: line below a table that shows it, with `{precision}`.
    """

    name: str
    unit: str
    meaning: str
    heading: str = ""
    symbol: str | None = None
    is_share: bool = False
    is_apart: bool = False
    is_charted: bool = True
    pooled: Pooled = Pooled.FIRST
    csv: str = ""
    note: str = ""

    @property
    def title(self) -> str:
        """Return the column title: the heading, or the name without its unit."""
        return self.heading or self.name.removesuffix(f"_{self.unit}")

    @property
    def column(self) -> str:
        """Return the column name in CSV files and tidy tables.

        Names of metrics have a slash, which column names avoid.
        """
        return self.csv or self.name.replace("/", "_")


class Time(NamedTuple):
    """Time of a call: a series with samples in seconds.

    Attributes:
        title: name in tables and texts.
        caption: explanation in plots.
        meaning: sentence for the reference.
    """

    title: str
    caption: str
    meaning: str


#: Times by series name.
TIMES = {
    "latency": Time("latency", "one caller waits", "Time from the call until its result is there"),
    "throughput": Time(
        "pipelined",
        "pipelined loop",
        "Wall time per call in a pipelined loop; a CPU has none, its `latency` is the same loop",
    ),
    "device": Time("device", "GPU time", "Time that the device works on a call; a CPU has none"),
    "device/graph": Time(
        "device/graph",
        "GPU time as a graph",
        "The same with the call launched as one CUDA graph",
    ),
}


def time_title(kind: str | None) -> str:
    """Return a time's name for tables, texts and plots; empty for None."""
    if kind in TIMES:
        return TIMES[kind].title
    return kind or ""


#: Units that end a name.
_AT_END = ("bytes", "joules", "seconds", "watts")
#: Quantities by name, in reference order.
QUANTITIES: dict[str, Quantity] = {}


def _quantity(name: str, meaning: str, *, unit: str = "", **further: Any) -> str:
    """Declare a quantity and return its name.

    Args:
        unit: unit, if the name does not end in it; by default `1`, a ratio or count.
        further: other fields of the `Quantity`.
    """
    end = name.replace("/", "_").rpartition("_")[2]
    own_unit = unit or (end if end in _AT_END else "1")
    QUANTITIES[name] = Quantity(name, own_unit, meaning, **further)
    return name


EPOCH_SECONDS = _quantity(
    "epoch_seconds", "Time per epoch; extrapolated (estimated) without `epochs`"
)
RUNTIME = _quantity("total_runtime_seconds", "Time for all epochs")
DATA_SHARE = _quantity("data_share", "Mean data phase over the mean sum of phases", is_apart=True)
PHASES = _quantity(
    "phases_over_whole",
    "Phases together over the whole step: `device` with data on a GPU",
    is_apart=True,
)
HOST_SECONDS = _quantity("loop/host_seconds", "Host time to launch a call", pooled=Pooled.MEDIAN)
CYCLES = _quantity(
    "device/cycles_per_call",
    "`device` times an NVIDIA board's SM clock under load; a lasting clock change does not affect "
    "it (estimated)",
    is_charted=False,
    pooled=Pooled.GEOMETRIC_MEAN,
)

GRAPH_SECONDS = _quantity(
    "device/graph_seconds", "Always null, with the reason why the call has no `device/graph` time"
)
FINITE = _quantity(
    "outputs_finite", "Always null, with the reason why the outputs could not be checked"
)

FIRST_LOSS = _quantity("train/loss_first", "Loss in the first timed step")
LAST_LOSS = _quantity("train/loss_last", "Loss in the last timed step")
ACCURACY = _quantity(
    "accuracy",
    "Top-1 accuracy, or share of correct pixels; with `epochs=N` from the last evaluation, mean "
    "over seeds",
    is_share=True,
)
BEST_ACCURACY = _quantity(
    "train/accuracy_best", "Highest accuracy in all evaluations", is_share=True
)
TARGET_ACCURACY = _quantity(
    "train/target_accuracy", "`mode.train.target_accuracy`", is_apart=True, is_share=True
)
TIME_TO_ACCURACY = _quantity(
    "time_to_accuracy_seconds",
    "Training passes until an evaluation reaches `mode.train.target_accuracy`: median over seeds, "
    "infinite for a seed that never does",
    is_apart=True,
)
REACHED_SHARE = _quantity(
    "train/reached_share",
    "Share of seeds that reach it, with the Clopper-Pearson interval",
    is_apart=True,
    is_share=True,
)
TARGET_P = _quantity(
    "train/target_p",
    "One-sided p-value for a mean accuracy above it, by Student's t",
    is_apart=True,
)
EVALUATION_SECONDS = _quantity("train/evaluation_seconds", "Time for all evaluations")
CHECKPOINT_SECONDS = _quantity("train/checkpoint_seconds", "Time for writing checkpoints")

PEAK_MEMORY = _quantity(
    "memory/peak_bytes",
    "Peak during the timed calls. CPU: the process's resident memory. CUDA: peak allocated by "
    "torch. Mean over processes",
    is_apart=True,
    pooled=Pooled.GEOMETRIC_MEAN,
)
FIRST_MEMORY = _quantity(
    "memory/warmup_peak_bytes",
    "Peak during the first calls, which choose kernels, compile, and create optimizer state",
)
RESERVED_MEMORY = _quantity(
    "memory/reserved_peak_bytes", "CUDA: peak reserved by torch's allocator"
)
DEVICE_MEMORY = _quantity(
    "memory/device_bytes",
    "CUDA: memory in use on the board, less what was in use before the process",
)
FITTING_BATCH = _quantity("batch_that_fits", "After out of memory: a batch size that would fit")
TOO_LARGE = _quantity(
    "largest_batch/too_large", "With `batch_size=max`: smallest batch that did not fit"
)
TRIED_BATCHES = _quantity("largest_batch/trials_count", "Batches that were tried for it")

COMPILE_SECONDS = _quantity("compile/seconds", "Time in torch.compile, forward and backward")
GRAPHS = _quantity("compile/graphs", "Graphs")
GRAPH_BREAKS = _quantity(
    "compile/graph_breaks", "Places where the compiler left the model's code to Python"
)
RECOMPILATIONS = _quantity(
    "compile/recompilations",
    "Graphs that replaced another one for the same code, for example for another shape",
)

OUTPUT_ERROR = _quantity(
    "correctness/relative_error",
    "L2 norm of the difference between all outputs and the copy's, relative to the copy's",
)
AGREEMENT = _quantity(
    "correctness/argmax_agreement", "Share of samples (pixels) with the same most likely class"
)

MACS = _quantity("work/forward_macs", "Multiply-accumulates in the forward pass", symbol="MAC")
FLOPS = _quantity("work/flops", "FLOPs per call, backward pass included in training", symbol="FLOP")
LEAST_BYTES = _quantity(
    "work/bytes_min",
    "Bytes when each layer reads inputs and weights and writes outputs once",
    unit="bytes",
)
ACTIVATION_BYTES = _quantity("work/activation_bytes", "Bytes in activations")
PARAMETERS = _quantity("work/parameters", "Number of parameters", symbol="")
WORK_RATE = _quantity(
    "work/flops_per_second",
    "FLOPs over `device`; over `latency` on a CPU",
    heading="FLOP/s at {time}",
    symbol="FLOP/s",
    unit="1/s",
    pooled=Pooled.BY_TIME,
)
MFU = _quantity(
    "mfu",
    "Contractions' FLOP/s in the pipelined loop, over the data sheet's peak for the precision: 2 "
    "per MAC, 6 in a training step. With `precision=torch` convolutions and products have peaks "
    "of their own",
    heading="MFU at samples/s",
    is_share=True,
    pooled=Pooled.BY_RATE,
    note="MFU is of the data sheet's peak {precision}",
)
TOKENS_RATE = _quantity(
    "tokens_per_second",
    "Tokens per call over the mean time of a pipelined call",
    unit="tokens/s",
    is_apart=True,
    pooled=Pooled.BY_RATE,
)
CACHE_BYTES = _quantity("memory/cache_bytes", "`mode=decode`: keys and values of all contexts")
MBU = _quantity(
    "mbu",
    "`mode=decode`: bytes of parameters and cache over time (`device/graph` first) and "
    "`ceiling/bytes_per_second`",
    heading="MBU at {time}",
    is_share=True,
    pooled=Pooled.BY_TIME,
)
MFU_OF_CEILING = _quantity(
    "mfu_of_ceiling",
    "The same over the measured ceiling",
    heading="MFU of ceiling at samples/s",
    is_share=True,
    pooled=Pooled.BY_RATE,
    note="MFU of ceiling is of the peak of matrix products on this device {precision}",
)
FLOPS_CEILING = _quantity(
    "ceiling/flops_per_second",
    "Highest sustained rate for matrix products",
    symbol="FLOP/s",
    unit="1/s",
)
BYTES_CEILING = _quantity(
    "ceiling/bytes_per_second", "Highest sustained rate for copies", symbol="B/s", unit="bytes/s"
)

ENERGY = _quantity(
    "energy/per_call_joules",
    "Mean power × mean time per call in the windows, with an interval",
    csv="energy_per_inference_j",
)
IMAGE_ENERGY = _quantity("energy/per_image_joules", "The same per sample")
QUEUED_ENERGY = _quantity(
    "energy/queued_per_call_joules",
    "The same while CUDA-graph replays keep the device busy, if the host limits the loop",
)
QUEUED_POWER = _quantity("energy/queued_power_watts", "Mean power in those windows")
QUEUED_SECONDS = _quantity(
    "energy/queued_call_seconds",
    "Mean time per call in those windows",
    heading="energy/time of a queued call as a CUDA graph",
)
EPOCH_ENERGY = _quantity(
    "energy/per_epoch_joules", "Energy per training epoch, if the data has an end (estimated)"
)
NET_ENERGY = _quantity("energy/net_per_call_joules", "Energy per call above the idle power")
NET_IMAGE_ENERGY = _quantity(
    "energy/net_per_image_joules", "Energy per sample above the idle power"
)
NET_EPOCH_ENERGY = _quantity("energy/net_per_epoch_joules", "Energy per epoch above the idle power")
POWER = _quantity("energy/power_mean_watts", "Mean power in the windows", csv="power_mean_w")
IDLE_POWER = _quantity("energy/idle_power_watts", "Power with the model loaded and nothing running")
COUNTER_POWER = _quantity("energy/counter_power_watts", "Power by the energy counter")
INTEGRAL_POWER = _quantity("energy/integral_power_watts", "Power by integrated power readings")
DIFFERENCE = _quantity("energy/integral_difference", "Relative difference between the two")
UNCERTAINTY = _quantity(
    "energy/integral_uncertainty", "The integral's relative standard uncertainty"
)
WINDOW_SECONDS = _quantity("energy/window_seconds", "All windows together")
CALL_SECONDS = _quantity(
    "energy/call_seconds",
    "Mean time per call in the windows",
    heading="energy/time of a call",
)
CALLS = _quantity("energy/calls", "Calls in the windows")
METER_ACCURACY = _quantity(
    "energy/meter_accuracy",
    "The meter's relative scale error, if a source is known; no interval includes it",
    is_apart=True,
)
METER_POWER = _quantity(
    "energy/meter_*/power_mean_watts", "Mean power by meter, if there are several"
)
METER_ENERGY = _quantity("energy/meter_*/per_call_joules", "Energy by meter, if there are several")

CLOSURE = _quantity(
    "layers/closure",
    "Relative difference between the layers together and the call without profiling",
    heading="layers − call",
    is_share=True,
)
LAYER_FLOPS = _quantity(
    "layers/flops",
    "Always null, with the reason why the layers have no counted work",
    symbol="FLOP",
)
GAP_SHARE = _quantity("layers/gap_share", "Share of time in gaps between kernels", is_share=True)
UNATTRIBUTED = _quantity(
    "layers/unattributed_share",
    "Share of time that could not be joined to a layer",
    is_share=True,
)

COVERAGE = _quantity(
    "algorithm/flops_share",
    "Share of the convolutions' FLOPs that ran the requested algorithm",
    heading="algorithm coverage",
    is_share=True,
)
PROVEN = _quantity(
    "algorithm/proven_share",
    "The part of it that is proven: by an algorithm that perfexp composed, or by cuDNN kernels "
    "that it checked. torch's own choice (`algorithm=fastest`, or a layer with `default`) is not: "
    "its algorithm was not observed.",
    is_share=True,
    is_apart=True,
)
WORKSPACE = _quantity(
    "algorithm/workspace_peak_bytes",
    "Largest cuDNN workspace in any process, if known",
    pooled=Pooled.LARGEST,
)
LAUNCHED = _quantity(
    "algorithm/launched_share",
    "Share of cuDNN passes that were launched as captured graphs",
)
ALGORITHM_ERROR = _quantity(
    "algorithm/output_error", "Relative L2 difference between the model's outputs and `default`"
)
SPEEDUP = _quantity(
    "algorithm/speedup_over_*",
    "`fastest` only: whole model against `default` and `benchmark`, all launched kernel by "
    "kernel, with interval",
    pooled=Pooled.SPEEDUP,
)
CAPTURED_SPEEDUP = _quantity(
    "algorithm/captured_speedup_over_*",
    "The same with all calls captured as CUDA graphs",
    pooled=Pooled.SPEEDUP,
)
PROMISED_SPEEDUP = _quantity(
    "algorithm/promised_speedup_over_*",
    "The same for the convolutions, each timed alone, with interval; the mean over processes, "
    "unless choices were cached",
    pooled=Pooled.SPEEDUP,
)

ATTENTION_COVERAGE = _quantity(
    "attention/flops_share",
    "Share of attention's FLOPs that the requested backend computed",
    heading="attention coverage",
    is_share=True,
)
ATTENTION_PROVEN = _quantity(
    "attention/proven_share",
    "The part of it that is proven by the kernels that ran (`execution.attention_verify=true`)",
    is_share=True,
    is_apart=True,
)
RANKS_RATE = _quantity(
    "ranks/samples_per_second", "All ranks, from bursts", unit="samples/s", is_apart=True
)
RANK_RATE = _quantity("ranks/*/samples_per_second", "Each rank", unit="samples/s", is_apart=True)
EFFICIENCY = _quantity(
    "ranks/scaling_efficiency",
    "One rank's step time alone over all ranks' step time, same batch each; 1 is perfect",
    heading="scaling efficiency",
    is_apart=True,
)
COMMUNICATION = _quantity(
    "ranks/communication_share",
    "Share of a step that waits for gradients",
    heading="waiting for gradients",
    is_apart=True,
)
STATISTICS = _quantity(
    "ranks/statistics_share",
    "Share of a step for SyncBatchNorm, the model's other collective operations, and "
    "DistributedDataParallel itself",
    heading="other communication",
    is_apart=True,
)
CONTENTION = _quantity(
    "ranks/contention_share",
    "Share of a step because the ranks share the host",
    heading="sharing the host",
    is_apart=True,
)


@lru_cache(maxsize=4096)
def named(name: str, unit: str = "1") -> Quantity:
    """Return the quantity with this name; for a family's member the family's entry with this name.

    A name that is not registered, such as a user's `custom/…`, gets a new quantity in `unit`.
    """
    for quantity in QUANTITIES.values():
        if fnmatchcase(name, quantity.name):
            return quantity._replace(name=name)
    return Quantity(name, unit, "")


class HasUnit(Protocol):
    """Anything with a name and a unit, such as a record's metric."""

    name: str
    unit: str


def of(metric: HasUnit) -> Quantity:
    """Return a metric's quantity, by its name."""
    return named(metric.name, metric.unit)


def member(family: str, part: object) -> str:
    """Return a name in a family, for example `ranks/0/samples_per_second`.

    Code that measures builds the name of a rank's or baseline's metric with it.

    Args:
        family: name with a wildcard, such as `ranks/*/samples_per_second`.
        part: text that replaces the wildcard.
    """
    return family.replace(ANY, str(part))
