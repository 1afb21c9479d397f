"""Algorithm plans: the engines that a run chose, as a file for the user's own program.

With `algorithm=fastest` a run races the available engines for each convolution layer and pass, and
chooses the fastest. `perfexp export RUN --plan FILE` writes the choices. `perfexp.apply` reads them
and lets the same engines compute a module in the user's own program.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import UserError
from perfexp.records import quantities
from perfexp.records.races import is_own_choice
from perfexp.records.record import Point, Record
from perfexp.records.summary import by_point, pooled_speedup

_FORMAT = 1


class Planned(msgspec.Struct, frozen=True):
    """Engines of a convolution layer, or backends of a shape of attention, by pass.

    Attributes:
        name: layer name.
        input_shape: shape of the layer's input, for example (N, C, H, W).
        dtype: data type by torch name.
        passes: engine or backend by pass: `forward`, …
    """

    name: str
    input_shape: tuple[int, ...]
    dtype: str
    passes: dict[str, str]


class AlgorithmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of a run, and what they are valid for.

    Attributes:
        device: name of the device, as torch has it.
        cudnn: version as a number; None without cuDNN.
        cudnn_allow_tf32: whether float32 convolutions could use TF32; None without cuDNN, and in
            older plans.
        layers: chosen engines of convolution layers.
        attention: chosen backends by shape of attention.
        gains: speedups of the whole model as [value, low, high], by phase, size and baseline, with
            the interval over processes if there are several.
    """

    format: int = _FORMAT
    model: str
    device: str
    torch: str
    cudnn: int | None
    cudnn_allow_tf32: bool | None = None
    layers: tuple[Planned, ...] = ()
    attention: tuple[Planned, ...] = ()
    gains: dict[str, tuple[float | None, float | None, float | None]] = {}

    def differences(
        self, *, device: str, torch: str, cudnn: int | None, cudnn_allow_tf32: bool
    ) -> list[str]:
        """Return how this device, software and torch's flag for TF32 differ from the plan's.

        For example: `torch 2.8.0, not 2.9.0`. Empty if the plan is valid here. `perfexp.apply`
        refuses a plan that differs, unless it may measure again.
        """
        current: dict[str, Any] = {"device": device, "torch": torch, "cudnn": cudnn}
        is_float32 = any(layer.dtype == "float32" for layer in self.layers)
        if is_float32 and self.cudnn_allow_tf32 is not None:
            current["cudnn_allow_tf32"] = cudnn_allow_tf32
        return [
            f"{name} {getattr(self, name)}, not {value}"
            for name, value in current.items()
            if getattr(self, name) != value
        ]


def of_record(record: Record) -> AlgorithmPlan:
    """Return a run's choices.

    `perfexp export --plan` writes them to a file.

    Raises:
        UserError: the run left all convolutions and all attention to torch.
    """
    layers, attention = _choices(record, "algorithm"), _choices(record, "attention")
    gains = {}
    for key, points in by_point(record).items():
        point_text = f"{key.phase} {'×'.join(map(str, key.input_size))} batch {key.batch_size}"
        for metric in points[0].metrics:
            if metric.name.startswith(quantities.member(quantities.SPEEDUP, "")):
                gain = pooled_speedup(points, metric.name) or metric
                baseline = metric.name.rpartition("_")[2]
                gains[f"{point_text} over {baseline}"] = (gain.value, gain.low, gain.high)
    if not (layers or attention):
        why = (
            "it left everything to torch; measure with algorithm=fastest or "
            "execution.attention=fastest"
        )
        if "fastest" in str((record.plan.get("algorithm"), record.plan.get("execution"))):
            why = "torch's own choice was the fastest everywhere"
        raise UserError(f"This run has no plan: {why}.")
    device = record.environment.get("device") or {}
    session = record.environment.get("session") or {}
    return AlgorithmPlan(
        model=str(record.plan.get("choices", {}).get("model", "")),
        device=str(device.get("name")),
        torch=str(session.get("torch")),
        cudnn=device.get("cudnn"),
        cudnn_allow_tf32=session.get("cudnn_allow_tf32") if device.get("cudnn") else None,
        layers=layers,
        attention=attention,
        gains=gains,
    )


def _choices(record: Record, group: str) -> tuple[Planned, ...]:
    """Return a record's choices, equal ones in several points once.

    Args:
        group: `algorithm` for convolution layers, or `attention`.
    """
    choices = {}
    for point in record.points:
        for planned in _choices_at(point, group):
            choices[repr(planned)] = planned
    return tuple(choices.values())


def _choices_at(point: Point, group: str) -> Iterator[Planned]:
    """Yield layers with passes that a chosen engine computed; `group` as in `_choices`.

    A pass is left out if torch chose its engine, or if the chosen engine could not compute it
    (`fallback`).
    """
    facts = point.facts.get(group) or {}
    if facts.get("name") == "auto":  # attention backends as torch chooses them
        return
    for layer in facts.get("layers", ()):
        chosen = {}
        for one_pass in layer["passes"]:
            engine, status = one_pass["selected"], one_pass["status"]
            if status != "fallback" and not is_own_choice(engine, status):
                chosen[one_pass["which"]] = engine
        if chosen:
            yield Planned(layer["name"], tuple(layer["input_shape"]), layer["dtype"], chosen)


def encoded(plan: AlgorithmPlan) -> bytes:
    """Return a plan as the content of a file: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def read(path: Path) -> AlgorithmPlan:
    """Return the plan in a file, or of the run in a folder; only data is read.

    Raises:
        UserError: the file is not a plan or has a newer format, or the run has no choices.
    """
    if path.is_dir():
        return of_record(Record.load(path))
    try:
        content: Any = path.read_bytes()
        plan = msgspec.json.decode(content, type=AlgorithmPlan)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path} is not an algorithm plan ({error}): make one with perfexp export RUN "
            "--plan FILE."
        ) from error
    if plan.format != _FORMAT:
        raise UserError(f"{path} has format {plan.format}; this perfexp reads {_FORMAT}.")
    return plan
