"""Algorithm plans: the engines that a run chose, as a file for the user's own program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import UserError
from perfexp.records import quantities
from perfexp.records.races import is_own_choice
from perfexp.records.record import Point, Record

_FORMAT = 1
_RECORD = "record.json"


class Planned(msgspec.Struct, frozen=True):
    """Engines of a convolution layer, or backends of a shape of attention, by pass."""

    name: str
    input_shape: tuple[int, ...]
    dtype: str
    passes: dict[str, str]


class AlgorithmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of a run, and what they are valid for.

    Attributes:
        device: name of the device, as torch has it.
        cudnn: version as a number; None without cuDNN.
        gains: speedups of the whole model as [value, low, high], by phase, size and baseline.
    """

    format: int = _FORMAT
    model: str
    device: str
    torch: str
    cudnn: int | None
    layers: tuple[Planned, ...] = ()
    attention: tuple[Planned, ...] = ()
    gains: dict[str, tuple[float | None, float | None, float | None]] = {}

    def differences(self, *, device: str, torch: str, cudnn: int | None) -> list[str]:
        """Return in what another place differs from the plan's."""
        here = {"device": device, "torch": torch, "cudnn": cudnn}
        own = {name: getattr(self, name) for name in here}
        return [f"{name} {own[name]}, not {here[name]}" for name in here if own[name] != here[name]]


def of_record(record: Record) -> AlgorithmPlan:
    """Return a run's choices.

    Raises:
        UserError: the run left all convolutions and all attention to torch.
    """
    layers, attention = (
        tuple(
            {repr(one): one for point in record.points for one in _planned(point, group)}.values()
        )
        for group in ("algorithm", "attention")
    )
    gains = {}
    for point in record.points:
        for metric in point.metrics:
            if metric.name.startswith(quantities.member(quantities.SPEEDUP, "")):
                size = "×".join(map(str, point.key.input_size))
                place = f"{point.key.phase} {size} batch {point.key.batch_size}"
                gains[f"{place} over {metric.name.rpartition('_')[2]}"] = (
                    metric.value,
                    metric.low,
                    metric.high,
                )
    if not (layers or attention):
        raise UserError(
            "This run left everything to torch, so there is no plan: measure with "
            "algorithm=fastest "
            "or execution.attention=fastest."
        )
    device, session = (record.environment.get(name) or {} for name in ("device", "session"))
    return AlgorithmPlan(
        model=str(record.plan.get("choices", {}).get("model", "")),
        device=str(device.get("name")),
        torch=str(session.get("torch")),
        cudnn=device.get("cudnn"),
        layers=layers,
        attention=attention,
        gains=gains,
    )


def _planned(point: Point, group: str) -> Iterator[Planned]:
    facts = point.facts.get(group) or {}
    for layer in facts.get("layers", ()) if facts.get("name") != "auto" else ():
        chosen = {
            one["which"]: one["selected"]
            for one in layer["passes"]
            if not is_own_choice(one["selected"], one["status"]) and one["status"] != "fallback"
        }
        if chosen:
            yield Planned(layer["name"], tuple(layer["input_shape"]), layer["dtype"], chosen)


def encoded(plan: AlgorithmPlan) -> bytes:
    """Return a plan as the content of a file."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def read(place: Path) -> AlgorithmPlan:
    """Return the plan in a file, or of the run in a folder; only data is read.

    Raises:
        UserError: there is none.
    """
    if place.is_dir():
        return of_record(Record.load(place / _RECORD))
    try:
        content: Any = place.read_bytes()
        plan = msgspec.json.decode(content, type=AlgorithmPlan)
    except OSError as error:
        raise UserError(f"{place} can't be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise UserError(
            f"{place} is not an algorithm plan ({error}): make one with perfexp export RUN "
            "--plan FILE."
        ) from error
    if plan.format != _FORMAT:
        raise UserError(f"{place} has format {plan.format}; this perfexp reads {_FORMAT}.")
    return plan
