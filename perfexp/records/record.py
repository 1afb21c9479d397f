"""Record of one run as versioned JSON: keys, raw samples, metrics, diagnostics and environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.records import old_names, quantities
from perfexp.records.diagnostics import Diagnostic
from perfexp.statistics.prior import Prior

#: History: 1 — first version.
SCHEMA_VERSION = 1


#: Limits on what is read, far beyond every measurement: no sum, ratio or square of such numbers overflows.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Positive = Annotated[float, msgspec.Meta(gt=1e-15, le=1e9)]
_Value = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Work = Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None
CountFromOne = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Several = msgspec.Meta(max_length=2000)
_MOST_SAMPLES = 20_000_000


class Status(StrEnum):
    """Final status of a point or of a run."""

    OK = "ok"
    OOM = "oom"
    OOM_PREDICTED = "oom_predicted"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    TIMEOUT = "timeout"
    KILLED = "killed"
    INTERRUPTED = "interrupted"


#: Phases whose calls are timed, and the suffix of the phase of their layers.
TIMED = ("train", "inference")
_LAYERS, _TRIAL = "_layers", "_trial"
#: Batch size of a key whose batch is searched for: the largest that fits (batch_size=max).
LARGEST = 0
#: Precision of plans that name none: torch's own flags.
USUAL_PRECISION = "torch"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a point within its run.

    Attributes:
        phase: `inference` or `train`; `ttfp` for the cold start (time to first prediction of a fresh process);
            `inference_layers` and `train_layers` for layer times, `inference_profile` and `train_profile` for
            profiles, each measured in a separate process; `inference_trial` and `train_trial` for the trials of
            batch_size=max, which are in points.jsonl alone.
        input_size: height and width in pixels.
        batch_size: samples per call; 0 for the largest that fits while it is searched for.
        precision: name of the precision.
        replicate: number of the process that measured the point, from 0.
    """

    phase: str
    input_size: tuple[CountFromOne, CountFromOne]
    batch_size: Count
    precision: str
    replicate: Count = 0

    @property
    def is_timed(self) -> bool:
        """Whether the calls of this point are timed."""
        return self.phase in TIMED

    @property
    def size_label(self) -> str:
        """`224` for a square, `512x1024` (height × width) otherwise."""
        height, width = self.input_size
        return str(height) if height == width else f"{height}x{width}"

    @property
    def batch_label(self) -> str:
        """The batch size, or `max` while it is searched for."""
        return "max" if self.batch_size == LARGEST else str(self.batch_size)

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.input_size[0] * self.input_size[1]

    def __str__(self) -> str:
        text = f"{self.phase} {self.size_label} batch {self.batch_label}"
        text += f" {self.precision}" if self.precision != USUAL_PRECISION else ""
        return f"{text} process {self.replicate + 1}" if self.replicate else text


def without_replicate(key: Key) -> Key:
    """The key of the same point in the first process."""
    return msgspec.structs.replace(key, replicate=0)


def layers_key(key: Key) -> Key:
    """The key of the layers of a timed point."""
    return msgspec.structs.replace(key, phase=key.phase + _LAYERS)


def timed_key(key: Key) -> Key:
    """The key of the timed point that a point of layers belongs to."""
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_LAYERS))


def is_layers(key: Key) -> bool:
    """Whether a key identifies a point of layers."""
    return key.phase.endswith(_LAYERS)


def trial_key(key: Key) -> Key:
    """The key of a trial whether the batch of a timed point fits."""
    return msgspec.structs.replace(key, phase=key.phase + _TRIAL, replicate=0)


def is_trial(key: Key) -> bool:
    """Whether a key identifies a trial."""
    return key.phase.endswith(_TRIAL)


def tried_key(key: Key) -> Key:
    """The key of the timed point that a trial is for."""
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_TRIAL))


class Stop(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reason for the end of a series.

    Attributes:
        reason: `precision` (the interval is narrow enough), `max_seconds`, `max_calls`, `fixed`, or `epochs`.
        target: requested relative half-width of the median's interval, or None.
        achieved: relative half-width that was reached; None without an interval.
    """

    reason: str
    target: Seconds | None = None
    achieved: Seconds | None = None


class Series(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Raw samples of one time in the order of measurement. No sample is ever dropped.

    Attributes:
        name: `latency`, `throughput`, `device`, `phase/forward`, `ttfp/imports`, …
        unit: SI unit of the samples.
        samples: all samples, warm-up first; each is the mean of `calls_per_sample` calls.
        warmup: number of warm-up samples at the beginning, which the statistics exclude.
        blocks: number of the first sample of each block; between two blocks, the other times of the point had their
            turn. Empty for a single block.
        calls_per_sample: number of calls per sample.
        stop: reason for the end of the series.
    """

    name: str
    unit: str = "seconds"
    samples: list[Seconds]
    warmup: Count = 0
    blocks: list[Count] = []
    calls_per_sample: CountFromOne = 1
    stop: Stop | None = None

    def __post_init__(self) -> None:
        """Refuse a series in another unit, or without samples; raises `ValueError`."""
        if self.unit != "seconds":
            raise ValueError(f"series {self.name} is in {self.unit!r}, not in seconds")
        if self.warmup >= len(self.samples):
            raise ValueError(f"series {self.name} has no sample after its warm-up")
        if self.blocks != sorted({*self.blocks}) or self.blocks[-1:] >= [len(self.samples)]:
            raise ValueError(f"series {self.name} has blocks that are not in order")

    @property
    def measured(self) -> list[float]:
        """The samples without the warm-up."""
        return self.samples[self.warmup :]


class Epoch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One whole pass over the training data.

    Attributes:
        number: number of the epoch in its training, from 1; a resumed one begins later.
        seconds: duration of the pass alone.
        samples_per_second: training samples over those seconds.
        loss: mean of the losses that were kept, or the loss of the last step; None if it is not finite.
        learning_rate: learning rate of the last step; None where the model trains by settings of its own.
        accuracy: top-1 accuracy after the epoch; None without an evaluation.
        evaluation_seconds: duration of that evaluation.
        checkpoint_seconds: duration of writing checkpoints.
        metrics: custom metrics that were added during the epoch, its evaluation included; the last value of each.
    """

    number: CountFromOne
    seconds: _Positive
    samples_per_second: _Value
    loss: _Value | None = None
    learning_rate: _Value | None = None
    accuracy: _Value | None = None
    evaluation_seconds: Seconds = 0.0
    checkpoint_seconds: Seconds = 0.0
    metrics: list[Metric] = []

    @property
    def total_seconds(self) -> float:
        """Duration of the pass with its evaluation and its checkpoints."""
        return self.seconds + self.evaluation_seconds + self.checkpoint_seconds

    @property
    def figures(self) -> dict[str, float | None]:
        """All figures by name, those of custom metrics as `custom/NAME`."""
        own = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in ("number", "metrics")
        }
        return own | {metric.name: metric.value for metric in self.metrics}


class Metric(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A single figure of a point.

    Attributes:
        name: name with the unit at its end and the group before a slash (`memory/peak_bytes`).
        value: None if unknown.
        unit: SI unit; `1` for a ratio.
        reason: reason for a missing value.
        estimated: whether the value is computed from other measurements instead of measured.
        low: lower end of the 95 % confidence interval; None without an interval.
        high: its upper end.
    """

    name: str
    value: _Value | None
    unit: str
    reason: str | None = None
    estimated: bool = False
    low: _Value | None = None
    high: _Value | None = None

    @classmethod
    def of(cls, name: str, value: float | None, **further: Any) -> Metric:
        """Return a metric of the registry, whose unit its name has."""
        return cls(name=name, value=value, unit=quantities.named(name).unit, **further)


class _LayerKey(msgspec.Struct):
    which: str
    path: str | None = None
    operation: Count | None = None


class _Spread(msgspec.Struct):
    mean: Seconds
    median: Seconds
    low: Seconds | None
    high: Seconds | None


class _Layer(msgspec.Struct):
    key: _LayerKey | None
    kind: str
    seconds: _Spread
    gap_seconds: _Spread
    share: Seconds
    macs: _Work
    flops: _Work
    bytes_min: _Work
    activation_bytes: _Work
    parameters: _Work
    arithmetic_intensity: _Value | None
    flops_per_second: _Value | None
    inputs: list[list[Count]]
    outputs: list[list[Count]]
    convolution: dict[str, bool | Count | list[Count] | None] | None
    kernels: dict[str, _Value]


class Layers(msgspec.Struct):
    """What readers of `facts["layers"]` rely on, with the lines of `perfexp.layers.table`."""

    method: str
    call_seconds: Annotated[list[_Positive], msgspec.Meta(min_length=1)]
    lines: list[_Layer]


class _Profile(msgspec.Struct):
    """What readers of `facts["profile"]` rely on: names of files in the run's folder itself."""

    files: list[Annotated[str, msgspec.Meta(pattern=r"^[ -.0-~]{1,255}\Z")]] | None = None


#: Facts that are read again, by their keys.
_FACTS = {"layers": Layers, "profile": _Profile}


class Point(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The result of one point; one line of points.jsonl.

    Attributes:
        key: identity of the point.
        status: final status.
        error: error message of a point without a result.
        series: raw samples.
        metrics: single figures.
        epochs: whole passes of a training, in their order.
        doubts: diagnostics.
        facts: conditions of the measurement (load average, thread counts, …).
        started: start, ISO 8601 with time zone.
        wall_seconds: total duration of the measurement.
    """

    key: Key
    status: Status
    error: str | None = None
    series: list[Series] = []
    metrics: Annotated[list[Metric], _Several] = []
    epochs: Annotated[list[Epoch], msgspec.Meta(max_length=100_000)] = []
    doubts: Annotated[list[Diagnostic], _Several] = []
    facts: dict[str, Any] = {}
    started: str | None = None
    wall_seconds: Seconds | None = None

    def find_series(self, name: str) -> Series | None:
        """The series with this name, or None."""
        return next((series for series in self.series if series.name == name), None)

    def metric(self, name: str) -> Metric | None:
        """The metric with this name, or None."""
        return next((metric for metric in self.metrics if metric.name == name), None)


class Artifact(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A file of a run.

    Attributes:
        path: path relative to the run's folder, with forward slashes.
        kind: `config`, `data`, `plots`, `tables`, `profiles`, `logs` or `report`.
    """

    path: str
    kind: str


class SweepMembership(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The place of a run in its sweep.

    Attributes:
        uid: identifier of the sweep.
        job: number of the run in the sweep, from 0.
        jobs: number of runs of the sweep; None if unknown.
        axes: values of the varying overrides as typed (`{"batch_size": "1"}`).
        directory: folder of the sweep, relative to the folder of the run.
        level: level of verdicts on the runs of the sweep, whose processes took turns until `perfexp ab` had decided;
            None for an ordinary sweep.
    """

    uid: str
    job: Count
    jobs: Count | None = None
    axes: dict[str, str] = {}
    directory: str = ".."
    level: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Complete result of one run; record.json.

    Attributes:
        schema_version: version of this layout.
        uid: permanent identifier of the run.
        name: `MODEL-ALGORITHM-MODE`, or longer if more varies.
        perfexp_version: version of perfexp that measured the run.
        status: `ok` if every point is; otherwise the status of the first point that is not.
        started: start, ISO 8601 with time zone.
        ended: end, ISO 8601 with time zone.
        command: overrides as typed.
        plan: resolved configuration.
        plan_hash: SHA-256 of the plan without output, tracking and console.
        environment: facts about machine, software and device.
        points: one point per key of the plan.
        doubts: diagnostics of the whole run.
        artifacts: files of the run.
        sweep: place in a sweep, if any.
        priors: how much the figures of its device were known to differ between processes, by class.
        earlier: entry of records of earlier versions that is not read; `selfcheck` is another one.
    """

    schema_version: CountFromOne = SCHEMA_VERSION
    uid: str
    name: str
    perfexp_version: str
    status: Status
    started: str
    ended: str
    command: list[str] = []
    plan: dict[str, Any]
    plan_hash: str
    environment: dict[str, Any] = {}
    points: list[Point] = []
    doubts: list[Diagnostic] = []
    artifacts: list[Artifact] = []
    sweep: SweepMembership | None = None
    priors: dict[str, Prior] = {}
    earlier: list[Any] | msgspec.UnsetType = msgspec.UNSET
    selfcheck: list[Any] | msgspec.UnsetType = msgspec.UNSET

    #: Text of a record for readers; `perfexp.api` sets it to the table of `perfexp show`.
    text: ClassVar[Callable[[Record], str]] = repr

    def __str__(self) -> str:
        return type(self).text(self)

    def to_json(self) -> bytes:
        """The record as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, text: bytes, source: str = "record.json") -> Record:
        """Read a record of this or an earlier schema version; raises `UserError` for others, and for other texts."""
        try:
            version = foreign.from_json(text, _Version).schema_version
            if version > SCHEMA_VERSION:
                raise UserError(
                    f"{source} has schema version {version}; this perfexp reads up to {SCHEMA_VERSION}. Update perfexp."
                )
            record = foreign.from_json(text, cls)
            _check(record.points)
            _check_points(record.points)
            record.plan = old_names.plan_of_today(record.plan)
        except foreign.DECODING_ERRORS as error:
            raise UserError(f"{source} is not a perfexp record: {error}.") from error
        return record

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record.json, or that of a folder; raises `UserError` if it is missing or invalid."""
        file = path / "record.json" if path.is_dir() else path
        try:
            return cls.from_json(foreign.read_bytes(file), source=str(file))
        except OSError as error:
            raise UserError(
                f"No record can be read at {file}: {error.strerror}. Name a run's folder or its record.json."
            ) from error


class _Version(msgspec.Struct):
    schema_version: CountFromOne


def _check(points: Sequence[Any]) -> None:
    """Raise `msgspec.ValidationError` for layers and profiles of another form than is measured, or too many samples."""
    if (
        sum(len(series.samples) for point in points for series in getattr(point, "series", ()))
        > _MOST_SAMPLES
    ):
        raise msgspec.ValidationError(f"it has more than {_MOST_SAMPLES:,} samples")
    for point in points:
        for name in _FACTS.keys() & getattr(point, "facts", {}).keys():
            msgspec.convert(point.facts[name], _FACTS[name])


def _check_points(points: Sequence[Point]) -> None:
    """Raise `msgspec.ValidationError` for a point that is there twice, or a metric in another unit than its own."""
    for key, number in Counter(point.key for point in points).items():
        if number > 1:
            raise msgspec.ValidationError(f"it has {key} twice")
    for metric in (metric for point in points for metric in point.metrics):
        own_unit = quantities.of(metric).unit
        if metric.value is not None and metric.unit != own_unit:
            raise msgspec.ValidationError(
                f"{metric.name} is in {metric.unit!r}, not in {own_unit!r}"
            )


def point_to_line(point: Point) -> bytes:
    """Encode a point as one line of points.jsonl, with question marks for halves of surrogate pairs."""
    try:
        return msgspec.json.encode(point) + b"\n"
    except UnicodeEncodeError:  # in an error text, for one
        text = json.dumps(msgspec.to_builtins(point), ensure_ascii=False)
        return msgspec.json.encode(json.loads(text.encode(errors="replace"))) + b"\n"


def points_from_lines(text: bytes, kind: Any = Point) -> list[Any]:
    """Decode lines of a points.jsonl, as a type with some of a point's fields; `UserError` for one that is invalid.

    A truncated last line is skipped.
    """
    decoder = msgspec.json.Decoder(kind)
    *complete, rest = text.split(b"\n")
    try:
        points = [decoder.decode(line) for line in complete if line.strip()]
        _check(points)
    except foreign.DECODING_ERRORS as error:
        raise UserError(f"points.jsonl has a line that is not a point: {error}.") from error
    with suppress(*foreign.DECODING_ERRORS):  # a last line that a crash truncated, or none
        points.append(decoder.decode(rest))
    return points


def read_points(path: Path) -> list[Point]:
    """Read a points.jsonl; a missing file has no points. Raises `UserError` for an unreadable one."""
    try:
        return points_from_lines(foreign.read_bytes(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def missing(keys: Iterable[Key], path: Path) -> list[Key]:
    """The keys without a result in a points.jsonl."""
    done = {point.key for point in read_points(path)}
    return [key for key in keys if key not in done]


def timestamp() -> str:
    """Return the time now, as a record has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def overall_status(points: Iterable[Point]) -> Status:
    """`ok` if every point is, otherwise the status of the first point that is not; `failed` without points."""
    statuses = [point.status for point in points] or [Status.FAILED]
    return next((status for status in statuses if status is not Status.OK), Status.OK)
