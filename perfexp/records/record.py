"""Record: a run's result as versioned JSON: samples, metrics, diagnostics and environment.

A run measures points: one for each phase (training, inference, …), input size, batch size,
precision and process. The worker appends each `Point` to points.jsonl as soon as it is measured.
At the end the parent process puts them into one `Record`, record.json. Reports, comparisons and
predictions read only these files, so every file is checked while it is read.
"""

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

#: History: 1 is the first version.
SCHEMA_VERSION = 1


#: Limits on stored numbers, far beyond any measurement: sums, ratios and squares cannot overflow.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=1e-15, le=1e9)]
_Value = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Work = Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None
CountFromOne = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_LimitedLength = msgspec.Meta(max_length=2000)
_MOST_SAMPLES = 20_000_000  # in a whole record


class Status(StrEnum):
    """Final status of a point or of a run.

    `oom` is out of memory. `oom_predicted` was not tried, because a smaller point ran out of memory
    or its traced peak exceeds the device. `unsupported` is a combination that model, algorithm or
    device refuse. `killed` is a worker that died, and `timeout` a worker that sent no progress.
    """

    OK = "ok"
    OOM = "oom"
    OOM_PREDICTED = "oom_predicted"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    TIMEOUT = "timeout"
    KILLED = "killed"
    INTERRUPTED = "interrupted"


#: Phases with timed calls, and the suffixes of their layer and trial phases (see `Key`).
TIMED = ("train", "inference")
_LAYERS, _TRIAL = "_layers", "_trial"
#: Batch size while the largest that fits is searched for (batch_size=max).
LARGEST = 0
#: Precision of plans without one: torch's own flags decide.
USUAL_PRECISION = "torch"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a point within its run.

    Besides `inference` and `train`, there are these phases:

    - `ttfp`: cold start (time to first prediction in a fresh process).
    - `inference_layers` and `train_layers`: layer times, measured after all times of the process.
    - `inference_profile` and `train_profile`: profiles, each measured in a separate process.
    - `inference_trial` and `train_trial`: trials for batch_size=max, stored only in points.jsonl.

    Attributes:
        phase: `inference`, `train`, or one of the phases above.
        input_size: height and width in pixels.
        batch_size: samples per call; 0 while the largest batch that fits is searched for.
        precision: precision name.
        replicate: number of the process that measured the point, from 0.
    """

    phase: str
    input_size: tuple[CountFromOne, CountFromOne]
    batch_size: Count
    precision: str
    replicate: Count = 0

    @property
    def is_timed(self) -> bool:
        """Return whether the phase is `train` or `inference`, so that the point's calls are timed.

        Only such points appear as rows in reports and comparisons.
        """
        return self.phase in TIMED

    @property
    def size_label(self) -> str:
        """Return the size as a label: `224` for a square, otherwise `512x1024` (height × width).

        Tables, labels and file names show it.
        """
        height, width = self.input_size
        if height == width:
            return str(height)
        return f"{height}x{width}"

    @property
    def batch_label(self) -> str:
        """Return the batch size, or `max` while it is searched for."""
        if self.batch_size == LARGEST:
            return "max"
        return str(self.batch_size)

    @property
    def pixels(self) -> int:
        """Return the pixels of an input: height times width."""
        return self.input_size[0] * self.input_size[1]

    def __str__(self) -> str:
        text = f"{self.phase} {self.size_label} batch {self.batch_label}"
        text += f" {self.precision}" if self.precision != USUAL_PRECISION else ""
        if self.replicate:
            return f"{text} process {self.replicate + 1}"
        return text


def without_replicate(key: Key) -> Key:
    """Return the key of the same point in the first process, to group a point's processes."""
    return msgspec.structs.replace(key, replicate=0)


def layers_key(key: Key) -> Key:
    """Return the key of the layer point, which has the layer times of a timed point."""
    return msgspec.structs.replace(key, phase=key.phase + _LAYERS)


def timed_key(key: Key) -> Key:
    """Return the key of the timed point that a layer point belongs to.

    Layers are shown with the name and the times of that point.
    """
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_LAYERS))


def is_layers(key: Key) -> bool:
    """Return whether a key identifies a layer point, which has the layer times of another point."""
    return key.phase.endswith(_LAYERS)


def trial_key(key: Key) -> Key:
    """Return the key for trying whether a timed point's batch fits (`batch_size=max`).

    All processes use the trials of the first, so the replicate is 0.
    """
    return msgspec.structs.replace(key, phase=key.phase + _TRIAL, replicate=0)


def is_trial(key: Key) -> bool:
    """Return whether a key identifies a trial.

    Reports leave trials out, because they only try whether a batch fits.
    """
    return key.phase.endswith(_TRIAL)


def tried_key(key: Key) -> Key:
    """Return the key of the timed point that a trial belongs to.

    The worker runs one call of that point to try the batch.
    """
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_TRIAL))


class Stop(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reason why a series ended.

    Attributes:
        reason: `precision` (the interval is narrow enough), `max_seconds`, `max_calls`, `fixed`, or
            `epochs`.
        target: requested relative half-width of the median's interval, or None.
        achieved: relative half-width that was reached; None without an interval.
    """

    reason: str
    target: Seconds | None = None
    achieved: Seconds | None = None


class Series(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Raw samples of one time, in measured order. Samples are never dropped.

    Attributes:
        name: `latency`, `throughput`, `device`, `phase/forward`, `ttfp/imports`, …
        unit: SI unit of the samples.
        samples: all samples, warm-up first; each is the mean over `calls_per_sample` calls.
        warmup: number of warm-up samples at the start, which statistics exclude.
        blocks: index of each block's first sample; empty for a single block. The point's other
            times are measured between blocks.
        calls_per_sample: number of calls per sample.
        stop: reason why the series ended.
    """

    name: str
    unit: str = "seconds"
    samples: list[Seconds]
    warmup: Count = 0
    blocks: list[Count] = []
    calls_per_sample: CountFromOne = 1
    stop: Stop | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for another unit, for missing samples, or for blocks out of order."""
        if self.unit != "seconds":
            raise ValueError(f"series {self.name} is in {self.unit!r}, not in seconds")
        if self.warmup >= len(self.samples):
            raise ValueError(f"series {self.name} has no sample after its warm-up")
        if self.blocks != sorted({*self.blocks}) or self.blocks[-1:] >= [len(self.samples)]:
            raise ValueError(f"series {self.name} has blocks that are not in order")

    @property
    def measured(self) -> list[float]:
        """Return the samples without the warm-up, in seconds per call, in measured order.

        Statistics use only these.
        """
        return self.samples[self.warmup :]


class Epoch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Pass over the whole training data.

    Attributes:
        number: epoch number within the training, from 1; a resumed training starts at a later
            number.
        seconds: duration of the pass alone.
        samples_per_second: training samples divided by `seconds`.
        loss: mean over the stored losses, or the last step's loss; None if it is not finite.
        learning_rate: learning rate at the last step; None if the model sets its own.
        accuracy: top-1 accuracy after the epoch; None without an evaluation.
        evaluation_seconds: duration of the evaluation.
        checkpoint_seconds: time to write checkpoints.
        metrics: last value of each custom metric added during the epoch, including its evaluation.
    """

    number: CountFromOne
    seconds: _PositiveSeconds
    samples_per_second: _Value
    loss: _Value | None = None
    learning_rate: _Value | None = None
    accuracy: _Value | None = None
    evaluation_seconds: Seconds = 0.0
    checkpoint_seconds: Seconds = 0.0
    metrics: list[Metric] = []

    @property
    def total_seconds(self) -> float:
        """Return the duration with evaluation and checkpoints."""
        return self.seconds + self.evaluation_seconds + self.checkpoint_seconds

    @property
    def figures(self) -> dict[str, float | None]:
        """Return all figures by name, for tables and MLflow; custom metrics are `custom/NAME`."""
        fields = [name for name in self.__struct_fields__ if name not in ("number", "metrics")]
        direct = {name: getattr(self, name) for name in fields}
        return direct | {metric.name: metric.value for metric in self.metrics}


class Metric(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Single figure of a point.

    Attributes:
        name: name that ends in its unit, with the group before a slash (`memory/peak_bytes`).
        value: None if unknown.
        unit: SI unit; `1` for a ratio.
        reason: reason why the value is missing.
        estimated: whether the value is computed from other measurements instead of measured.
        low: lower end of the 95 % confidence interval; None without an interval.
        high: upper end of the interval.
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
        """Return a metric with the unit that the registry in `quantities` has for its name.

        Args:
            further: other fields of the metric, such as `reason` or `low` and `high`.
        """
        return cls(name=name, value=value, unit=quantities.named(name).unit, **further)


class _LayerKey(msgspec.Struct):
    """Pass (`forward`, …), module path, and number of a call in the module's own code."""

    which: str
    path: str | None = None
    operation: Count | None = None


class _Spread(msgspec.Struct):
    """Statistics over the profiled calls, with the median's 95 % confidence interval."""

    mean: Seconds
    median: Seconds
    low: Seconds | None
    high: Seconds | None


class _Layer(msgspec.Struct):
    """Line for a layer in one pass, or for device time outside all layers (`key` is None).

    Attributes:
        kind: operation, for example `Conv2d`.
        seconds: device time per call.
        gap_seconds: idle device time before the layer, per call.
        share: share of all layers' time, from 0 to 1.
        inputs: shapes of the input tensors.
        outputs: shapes of the output tensors.
        convolution: parameters of a convolution, such as `kernel_size`.
        kernels: seconds by kernel name.
    """

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
    """Content of `facts["layers"]` that readers rely on, from `measuring.layers.table`.

    Attributes:
        method: how the layers were timed.
        call_seconds: duration of each profiled call.
        lines: layers in execution order.
    """

    method: str
    call_seconds: Annotated[list[_PositiveSeconds], msgspec.Meta(min_length=1)]
    lines: list[_Layer]


class _Profile(msgspec.Struct):
    """Content of `facts["profile"]` that readers rely on: names of files in the run's folder."""

    files: list[Annotated[str, msgspec.Meta(pattern=r"^[ -.0-~]{1,255}\Z")]] | None = None


#: Facts that perfexp reads back, by key.
_FACTS = {"layers": Layers, "profile": _Profile}


class Point(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Result of a point; a line of points.jsonl.

    Attributes:
        key: identity of the point.
        status: final status.
        error: error message if there is no result.
        series: raw samples.
        metrics: single figures.
        epochs: training epochs in order.
        doubts: diagnostics.
        facts: measurement conditions, such as load average and thread counts.
        started: start time, ISO 8601 with time zone.
        wall_seconds: total duration of the measurement.
    """

    key: Key
    status: Status
    error: str | None = None
    series: list[Series] = []
    metrics: Annotated[list[Metric], _LimitedLength] = []
    epochs: Annotated[list[Epoch], msgspec.Meta(max_length=100_000)] = []
    doubts: Annotated[list[Diagnostic], _LimitedLength] = []
    facts: dict[str, Any] = {}
    started: str | None = None
    wall_seconds: Seconds | None = None

    def find_series(self, name: str) -> Series | None:
        """Return the series with this name, or None if it was not measured."""
        return next((series for series in self.series if series.name == name), None)

    def metric(self, name: str) -> Metric | None:
        """Return the metric with this name, or None if the point has no such metric."""
        return next((metric for metric in self.metrics if metric.name == name), None)


class Artifact(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """File that belongs to a run.

    Attributes:
        path: path relative to the run's folder, with forward slashes.
        kind: `config`, `data`, `plots`, `tables`, `profiles`, `logs` or `report`.
    """

    path: str
    kind: str


class SweepMembership(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Place of a run in its sweep.

    Attributes:
        uid: sweep identifier.
        job: number of the run in the sweep, from 0.
        jobs: number of runs in the sweep; None if unknown.
        axes: values of the varying overrides as typed (`{"batch_size": "1"}`).
        directory: sweep folder, relative to the run's folder.
        level: level of a verdict on these runs, whose processes alternated until `perfexp ab`
            reached it. None for an ordinary sweep.
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
        perfexp_version: perfexp version that measured the run.
        status: `ok` if every point is ok; otherwise the status of the first point that is not.
        started: start time, ISO 8601 with time zone.
        ended: end time, ISO 8601 with time zone.
        command: overrides as typed.
        plan: resolved configuration.
        plan_hash: SHA-256 of the plan without output, tracking and console.
        environment: facts about machine, software and device.
        points: one point per key in the plan.
        doubts: diagnostics about the whole run.
        artifacts: files of the run.
        sweep: place in a sweep, if any.
        priors: known variation between processes on this device, by class of figures.
        earlier: entry in records of earlier versions, accepted and ignored.
        selfcheck: entry in records of earlier versions, accepted and ignored.
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

    #: Text form of a record; `perfexp.api` sets it to the `perfexp show` table.
    text: ClassVar[Callable[[Record], str]] = repr

    def __str__(self) -> str:
        return type(self).text(self)

    def to_json(self) -> bytes:
        """Return the record as indented JSON.

        The parent process writes it as record.json when a run ends.
        """
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, text: bytes, source: str = "record.json") -> Record:
        """Read a record with this or an earlier schema version.

        Earlier names in its plan are replaced by today's.

        Args:
            source: file name for error messages.

        Raises:
            UserError: the text is not a record, or its version is newer.
        """
        try:
            version = foreign.from_json(text, _Version).schema_version
            if version > SCHEMA_VERSION:
                raise UserError(
                    f"{source} has schema version {version}; this perfexp reads up to "
                    f"{SCHEMA_VERSION}. Update perfexp."
                )
            record = foreign.from_json(text, cls)
            _check_facts(record.points)
            _check_points(record.points)
            record.plan = old_names.plan_of_today(record.plan)
        except foreign.DECODING_ERRORS as error:
            raise UserError(f"{source} is not a perfexp record: {error}.") from error
        return record

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record.json, given the file or its folder.

        Raises:
            UserError: the file is missing or invalid.
        """
        file = path / "record.json" if path.is_dir() else path
        try:
            return cls.from_json(foreign.read_bytes(file), source=str(file))
        except OSError as error:
            raise UserError(
                f"No record can be read at {file}: {error.strerror}. Name a run's folder or its "
                "record.json."
            ) from error


class _Version(msgspec.Struct):
    """Schema version of a record, read before anything else in it."""

    schema_version: CountFromOne


def _check_facts(points: Sequence[Any]) -> None:
    """Raise `msgspec.ValidationError` for malformed layers or profiles, or for too many samples.

    Points may be of any type that `points_from_lines` decodes, so fields may be missing.
    """
    num_samples = 0
    for point in points:
        num_samples += sum(len(series.samples) for series in getattr(point, "series", ()))
    if num_samples > _MOST_SAMPLES:
        raise msgspec.ValidationError(f"it has more than {_MOST_SAMPLES:,} samples")
    for point in points:
        for name in _FACTS.keys() & getattr(point, "facts", {}).keys():
            msgspec.convert(point.facts[name], _FACTS[name])


def _check_points(points: Sequence[Point]) -> None:
    """Raise `msgspec.ValidationError` for a duplicate point or a metric in the wrong unit.

    Units are fixed by the registry of quantities.
    """
    for key, number in Counter(point.key for point in points).items():
        if number > 1:
            raise msgspec.ValidationError(f"it has {key} twice")
    for point in points:
        for metric in point.metrics:
            own_unit = quantities.of(metric).unit
            if metric.value is not None and metric.unit != own_unit:
                raise msgspec.ValidationError(
                    f"{metric.name} is in {metric.unit!r}, not in {own_unit!r}"
                )


def point_to_line(point: Point) -> bytes:
    """Encode a point as one line of points.jsonl, newline included.

    Lone surrogates, which UTF-8 cannot encode, become question marks.
    """
    try:
        return msgspec.json.encode(point) + b"\n"
    except UnicodeEncodeError:  # for example in an error text
        text = json.dumps(msgspec.to_builtins(point), ensure_ascii=False)
        return msgspec.json.encode(json.loads(text.encode(errors="replace"))) + b"\n"


def points_from_lines(text: bytes, kind: Any = Point) -> list[Any]:
    """Decode lines of a points.jsonl. A truncated last line is skipped.

    Runs in progress are read this way, too.

    Args:
        kind: type to decode, with some or all of a point's fields. Callers that need only a few
            fields, such as the status, pass their own type, which decodes faster.

    Raises:
        UserError: a line is invalid.
    """
    decoder = msgspec.json.Decoder(kind)
    *complete, last_line = text.split(b"\n")
    try:
        points = [decoder.decode(line) for line in complete if line.strip()]
        _check_facts(points)
    except foreign.DECODING_ERRORS as error:
        raise UserError(f"points.jsonl has a line that is not a point: {error}.") from error
    with suppress(*foreign.DECODING_ERRORS):  # the last line may be empty or truncated by a crash
        points.append(decoder.decode(last_line))
    return points


def read_points(path: Path) -> list[Point]:
    """Read a points.jsonl; a missing file has no points.

    Resuming, supervision and dry runs see this way what has been measured.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return points_from_lines(foreign.read_bytes(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def missing(keys: Iterable[Key], results: Iterable[Point]) -> list[Key]:
    """Return the keys without a result, for example to resume a run."""
    done = {point.key for point in results}
    return [key for key in keys if key not in done]


def timestamp() -> str:
    """Return the current time in the format that records use.

    The time zone is UTC, in milliseconds.
    """
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def overall_status(points: Iterable[Point]) -> Status:
    """Return a run's status from its points when the record is assembled.

    It is `ok` if all points are ok, otherwise the first other status; `failed` without points.
    """
    statuses = [point.status for point in points] or [Status.FAILED]
    return next((status for status in statuses if status is not Status.OK), Status.OK)
