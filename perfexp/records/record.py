"""Record: what one run measured, as versioned JSON; knows nothing of plans, torch or sinks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.records.diagnostics import Diagnostic

#: History: 1 — first version.
SCHEMA_VERSION = 1


class Status(StrEnum):
    """How the measurement of a point, or of a whole run, ended."""

    OK = "ok"
    OOM = "oom"
    OOM_PREDICTED = "oom_predicted"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    TIMEOUT = "timeout"
    KILLED = "killed"
    INTERRUPTED = "interrupted"


#: Phases whose calls are timed, and what a phase's layers are called.
TIMED = ("train", "inference")
_LAYERS = "_layers"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What identifies a point within its run.

    Attributes:
        phase: `inference`, `train`; `ttfp` (time to first prediction of a fresh process); `inference_layers`,
            `train_layers` (where the time of their calls goes, from a process of its own); `inference_profile`,
            `train_profile` (what a profiler saw of them, likewise).
        input_size: height and width in pixels.
        batch_size: samples per call.
        precision: name of the precision.
        replicate: number of the process that measured it, from 0.
    """

    phase: str
    input_size: tuple[int, int]
    batch_size: int
    precision: str
    replicate: int = 0

    @property
    def is_timed(self) -> bool:
        """Whether it is a point whose calls are timed."""
        return self.phase in TIMED

    @property
    def size_label(self) -> str:
        """`224` for a square, `512x1024` (height × width) otherwise."""
        height, width = self.input_size
        return str(height) if height == width else f"{height}x{width}"

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.input_size[0] * self.input_size[1]

    def __str__(self) -> str:
        text = f"{self.phase} {self.size_label} batch {self.batch_size} {self.precision}"
        return f"{text} replicate {self.replicate}" if self.replicate else text


def layers_key(key: Key) -> Key:
    """Of the layers of a timed point.

    Args:
        key: of that point.
    """
    return msgspec.structs.replace(key, phase=key.phase + _LAYERS)


def timed_key(key: Key) -> Key:
    """Of the timed point whose layers these are.

    Args:
        key: of the layers.
    """
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_LAYERS))


def is_layers(key: Key) -> bool:
    """Whether it is a point of layers.

    Args:
        key: of any point.
    """
    return key.phase.endswith(_LAYERS)


class Stop(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Why a block of measurements ended.

    Attributes:
        reason: `precision` (the interval is narrow enough), `max_seconds`, `max_calls`, `fixed`, or `epochs`.
        target: the relative half-width of the median's interval that was asked for, or None.
        achieved: the one that was reached, or None where no interval exists.
    """

    reason: str
    target: float | None = None
    achieved: float | None = None


class Series(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Raw samples of one time, in the order in which they were measured; none is ever dropped.

    Attributes:
        name: `latency`, `throughput`, `device`, `phase/forward`, `ttfp/imports`, …
        unit: unit of the samples, SI.
        samples: all of them, warm-up first. A sample is a mean of `calls_per_sample` calls.
        warmup: how many of the first samples are warm-up and stay out of the statistics.
        calls_per_sample: k.
        stop: why the block ended.
    """

    name: str
    unit: str = "seconds"
    samples: list[float]
    warmup: int = 0
    calls_per_sample: int = 1
    stop: Stop | None = None

    @property
    def measured(self) -> list[float]:
        """The samples without the warm-up."""
        return self.samples[self.warmup :]


class Metric(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One figure beside the series.

    Attributes:
        name: ends in its unit; a slash makes a group (`memory/peak_bytes`).
        value: None where it can't be known; then `reason` says why.
        unit: SI unit; `1` for a ratio.
        reason: why there is no value.
        estimated: computed from something else that was measured, not measured itself.
    """

    name: str
    value: float | None
    unit: str
    reason: str | None = None
    estimated: bool = False


class Point(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The result of one point; one line of points.jsonl.

    Attributes:
        key: which point.
        status: how it ended.
        error: text of the error where it did not end well.
        series: raw samples.
        metrics: single figures.
        doubts: diagnostics of this point.
        facts: what was true while it was measured (load average, thread counts, …).
        started: date and time, ISO 8601 with time zone.
        wall_seconds: how long measuring it took in all.
    """

    key: Key
    status: Status
    error: str | None = None
    series: list[Series] = []
    metrics: list[Metric] = []
    doubts: list[Diagnostic] = []
    facts: dict[str, Any] = {}
    started: str | None = None
    wall_seconds: float | None = None

    def find_series(self, name: str) -> Series | None:
        """The series of that name, or None."""
        return next((series for series in self.series if series.name == name), None)

    def metric(self, name: str) -> Metric | None:
        """The metric of that name, or None."""
        return next((metric for metric in self.metrics if metric.name == name), None)


class Artifact(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A file that the run wrote.

    Attributes:
        path: relative to the run's folder, with forward slashes.
        kind: `config`, `data`, `plots`, `tables`, `profiles`, `logs` or `report`.
    """

    path: str
    kind: str


class SweepMembership(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """To which sweep a run belongs.

    Attributes:
        uid: identifies the sweep.
        job: number of the run in it, from 0.
        jobs: how many runs the sweep has, or None where it is not known.
        axes: the overrides that vary in it, as they were given (`{"batch_size": "1"}`).
        directory: the sweep's folder, relative to the run's.
    """

    uid: str
    job: int
    jobs: int | None = None
    axes: dict[str, str] = {}
    directory: str = ".."


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that one run left to be known.

    Attributes:
        schema_version: version of this layout.
        uid: identifies the run for ever, wherever its record is copied to.
        name: `MODEL-ALGORITHM-MODE`, or longer where more varies.
        perfexp_version: version of perfexp that measured it.
        status: `ok` if every point is; otherwise the status of the first one that isn't.
        started: date and time, ISO 8601 with time zone.
        ended: likewise.
        command: the overrides as the user typed them.
        plan: the resolved configuration.
        plan_hash: SHA-256 of the plan without output, tracking and console.
        environment: facts of machine, software and device.
        points: one for each key of the plan.
        doubts: diagnostics of the whole run.
        artifacts: the files that the run wrote.
        sweep: the sweep that it belongs to, if any.
    """

    schema_version: int = SCHEMA_VERSION
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

    def to_json(self) -> bytes:
        """The record as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, text: bytes, source: str = "record.json") -> Record:
        """Read a record of this or an earlier schema version.

        Args:
            text: JSON.
            source: what to call it in an error.

        Raises:
            UserError: it is no record, or one of a later version of perfexp.
        """
        try:
            version = msgspec.json.decode(text, type=_Version).schema_version
            if version > SCHEMA_VERSION:
                raise UserError(
                    f"{source} has schema version {version}; this perfexp reads up to {SCHEMA_VERSION}. Update perfexp."
                )
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{source} is not a perfexp record: {error}.") from error

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read record.json, given it or the folder that holds it.

        Raises:
            UserError: there is none, or it can't be read.
        """
        file = path / "record.json" if path.is_dir() else path
        try:
            return cls.from_json(untrusted.read_bytes(file), source=str(file))
        except OSError as error:
            raise UserError(
                f"No record can be read at {file}: {error.strerror}. Name a run's folder or its record.json."
            ) from error


class _Version(msgspec.Struct):
    schema_version: int


def point_to_line(point: Point) -> bytes:
    """A point as one line of points.jsonl."""
    return msgspec.json.encode(point) + b"\n"


def points_from_lines(text: bytes) -> list[Point]:
    """The points in a points.jsonl; a last line that was cut off by a crash is left out.

    Raises:
        UserError: a line before the last one can't be read.
    """
    lines = text.split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    try:
        points = [msgspec.json.decode(line, type=Point) for line in complete if line.strip()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"points.jsonl holds a line that is no point: {error}.") from error
    if rest.strip():
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            points.append(msgspec.json.decode(rest, type=Point))
    return points


def read_points(path: Path) -> list[Point]:
    """The points in a points.jsonl; none where there is no such file.

    Args:
        path: the file.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        return points_from_lines(untrusted.read_bytes(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def missing(keys: Iterable[Key], path: Path) -> list[Key]:
    """The points that have no result in a points.jsonl yet.

    Args:
        keys: all of them.
        path: the file.
    """
    done = {point.key for point in read_points(path)}
    return [key for key in keys if key not in done]


def overall_status(points: Iterable[Point]) -> Status:
    """`ok` if every point is, otherwise the status of the first that isn't; `failed` where there is none."""
    statuses = [point.status for point in points]
    if not statuses:
        return Status.FAILED
    return next((status for status in statuses if status is not Status.OK), Status.OK)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a record; shipped as `perfexp/records/record-1.json`."""
    schema = msgspec.json.schema(Record)
    title = f"perfexp record, schema version {SCHEMA_VERSION}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}
