"""perfexp predict: memory, time and energy without measuring, and how good predictions are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from perfexp.cli.composition import compose
from perfexp.commands.app import ConfigDir, Json, app, command_line, echo, emit
from perfexp.errors import PerfexpError, UserError
from perfexp.forecast import corpus, lookup, skill_table
from perfexp.forecast.corpus import QUANTITIES, MeasuredCurve, MeasuredDevice
from perfexp.forecast.lookup import Answer
from perfexp.forecast.predictions import MEASURED
from perfexp.host import gpu_sheets
from perfexp.orchestration.worker_query import query
from perfexp.plan import config
from perfexp.records import units
from perfexp.records.record import Key
from perfexp.summaries.grid import Section
from perfexp.summaries.subject import label, subject
from perfexp.summaries.wording import supported_digits

#: Curves with at least this many points are scored with the points of a sparse sweep, shorter
#: curves by leaving one out.
_DENSE = 20
#: Notes below the predictions for a quantity.
_NOTES = {
    "memory": "memory is of the timed calls; the first ones may take more (perfexp show DIR)",
    "energy": "energy is at that loop's pace, which the host may set; its interval leaves the meter's scale out",
}

Corpus = Annotated[
    list[Path] | None,
    typer.Option("--corpus", metavar="DIR", help="Folder of records; default: outputs."),
]


class _Prediction(NamedTuple):
    """One quantity at one point."""

    key: Key
    quantity: str
    answer: Answer


@app.command()
def predict(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE… | check [DIR…]",
            help="Overrides of a run (model=vgg16 batch_size=32 gpu=h200); or check, and folders of records.",
        ),
    ] = None,
    corpus_folders: Corpus = None,
    measured: Annotated[
        int,
        typer.Option(
            help="check: number of points that a sparse sweep would measure.", min=4, max=100
        ),
    ] = 12,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Trace the peak memory.")
    ] = True,
    as_json: Json = False,
    config_dir: ConfigDir = None,
) -> None:
    """Predict memory, time and energy without measuring, or check predictions on your records.

    Memory is traced without a GPU. cuDNN's convolution workspaces are added if the GPU is present,
    or if an earlier prediction measured them.

    Time, energy and peak memory during timed calls (with workspaces) come from records with the
    same settings on the same device. They are measured, interpolated with a 90 % interval, or
    refused.

    Example: perfexp predict model=vgg16 batch_size=32 gpu=h200
    """
    words = list(overrides or ())
    folders = corpus_folders or [Path("outputs")]
    if words[:1] == ["check"]:
        _check([Path(word) for word in words[1:]] or folders, measured, as_json=as_json)
        return
    missing = [str(folder) for folder in corpus_folders or () if not folder.is_dir()]
    if missing:
        raise UserError(f"--corpus {missing[0]} is not a folder.")
    arguments = command_line(words, config_dir)
    plain = compose(arguments)
    plan = config.typed(plain)
    if plan.seeks_batch:
        raise UserError(
            "perfexp predict prints the largest batch that fits: set batch_size=1 instead of max."
        )
    found = _looked_up(plan, plain, corpus.find_curves(folders))
    traced = _traced(plain) if memory else None
    parts = (
        [Section("memory, traced", list(_memory_lines(traced, plan)))] if traced is not None else []
    )
    parts.append(
        Section(f"from records in {', '.join(map(str, folders))}", list(_answer_lines(found)))
    )
    raised = dict.fromkeys(
        (str(one), one.help) for each in found for one in each.answer.diagnostics
    )
    notes = [line for text, remedy in raised for line in (text, f"  help: {remedy}")]
    emit(_document(found, traced), [str(subject(plain)), *parts, *notes], as_json=as_json)


def _traced(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Trace memory in a worker; if that fails, return a reason and no points."""
    try:
        return query(plain, "memory", waiting=lambda text: echo(text, err=True))
    except PerfexpError as error:
        return {"points": [], "reason": str(error)}


def _looked_up(
    plan: config.Plan, plain: Mapping[str, Any], curves: Sequence[MeasuredCurve]
) -> list[_Prediction]:
    file = gpu_sheets.read(plan.config_dirs()).get(plan.gpu_name)
    known = corpus.Corpus([curve for curve in curves if _is_of(curve.device, plan, file)])
    installed: dict[str, str] = {}
    with suppress(PackageNotFoundError):
        installed["torch"] = version("torch")
    keys = dict.fromkeys(key for key in plan.timed_keys() if not key.replicate)
    return [
        _Prediction(key, name, lookup.look_up(key, name, plain, known, installed))
        for key in keys
        for name in QUANTITIES
    ]


def _is_of(device: MeasuredDevice, plan: config.Plan, file: gpu_sheets.GpuFile | None) -> bool:
    """Return whether the plan would use this device; gpu=auto may use any."""
    kind = plan.gpu["_target_"].split(".")[-2]  # of perfexp.devices.KIND.open_device
    is_product = file is None or file.is_of(device.product)
    is_alike = (device.ranks, device.nodes) == (plan.ranks, plan.nodes)
    return is_alike and kind in ("auto", device.kind) and is_product


def _memory_lines(traced: Mapping[str, Any], plan: config.Plan) -> Iterator[str]:
    if "reason" in traced:
        yield str(traced["reason"])
    for point in traced["points"]:
        key = msgspec.convert(point["key"], Key)
        if "reason" in point:
            yield f"{label(key)}: {point['reason']}"
            continue
        parts = sorted(point["categories"].items(), key=lambda item: -item[1])
        yield f"{label(key)}: peak {units.format_bytes(point['peak_bytes'])}"
        yield f"  {', '.join(f'{name} {units.format_bytes(size)}' for name, size in parts)}"
        yield from (f"  {text}" for text in _workspaces_text(point["workspaces"]))
        if point["capacity_bytes"]:
            yield f"  {_largest_text(point, is_sheet=point['gpu'] == plan.gpu_name)}"
    predicted = [point for point in traced["points"] if "categories" in point]
    if any(_lacks_workspaces(point["workspaces"]) for point in predicted):
        yield "without workspaces of cuDNN, which may be larger than all of it; records include them"
    if any(not point["capacity_bytes"] for point in predicted):
        yield f"gpu={plan.gpu_name} names no memory size: set gpu=NAME for the largest batch that fits"


def _largest_text(point: Mapping[str, Any], *, is_sheet: bool) -> str:
    """Return the largest batch that fits the device or its data-sheet memory, as text."""
    largest, device = point["largest_batch"], point["gpu"]
    fits = (
        f"{'at most about' if is_sheet else 'at most'} batch {largest} fits in"
        if largest
        else "no sample fits in"
    )
    if not is_sheet:
        return f"{fits} {units.format_bytes(point['capacity_bytes'])} of {device}; batch_size=max finds the largest"
    size = f"the {point['capacity_bytes'] / 1e9:g} GB of {device}'s data sheet (drivers report up to 7 % more)"
    return f"{fits} {size}; batch_size=max finds the largest on a device"


def _lacks_workspaces(workspaces: Mapping[str, Any] | None) -> bool:
    """Return whether a peak lacks all convolution workspaces.

    Unknown workspaces count as lacking.
    """
    return workspaces is None or bool(workspaces["convolutions"] and not workspaces["known"])


def _workspaces_text(workspaces: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield how many convolution workspaces a peak includes, and why others are missing."""
    known, total, reason = (
        (workspaces or {}).get(name) for name in ("known", "convolutions", "reason")
    )
    if known and total:
        others = (
            "" if known == total else "; without those of the others, the peak is a lower bound"
        )
        of = "all" if known == total else f"{known} of"
        yield f"with workspaces of cuDNN for {of} {total} convolutions, from {(workspaces or {})['device']}{others}"
    if reason and total:
        yield f"workspaces of {units.counted(total - (known or 0), 'convolution')} not measured: {reason}"


def _answer_lines(found: Sequence[_Prediction]) -> Iterator[str]:
    for key, quantity, answer in found:
        name = "energy of a call in the loop" if quantity == "energy" else quantity
        yield f"{label(key)}: {name} {answer_text(answer, QUANTITIES[quantity])}"
    known = [one for one in found if one.answer.predicted.value]
    yield from (
        note for quantity, note in _NOTES.items() if any(one.quantity == quantity for one in known)
    )
    if any(one.answer.predicted.source == MEASURED for one in known):
        yield "a measured interval is that of its record, or of the calls of its only process"


def answer_text(answer: Answer, unit: str) -> str:
    """Return a predicted quantity with interval, source, and nearest measured point."""
    predicted, curve = answer.predicted, answer.curve
    if predicted.value is None or curve is None:
        return f"refused: {predicted.reason}"
    ends = [end for end in (predicted.value.low, predicted.value.high) if end is not None]
    figures = max(supported_digits(predicted.value), 3) if len(ends) == 2 else 3
    low_to_high = " to ".join(_formatted(end, unit, figures) for end in ends)
    interval = f" ({low_to_high}, 90 %)" if len(ends) == 2 else ""
    nearest = (
        ""
        if predicted.nearest == predicted.pair
        else f", nearest measured {lookup.pair_text(predicted.nearest)}"
    )
    where = f"{curve.about.device or 'an unknown device'}, {curve.folder}"
    kind = f"{curve.kind} " if curve.quantity == "time" else ""
    return f"{kind}{_formatted(predicted.value.value, unit, figures)}{interval}, {predicted.source}{nearest} ({where})"


def _formatted(value: float, unit: str, figures: int) -> str:
    if unit == "bytes":
        return units.format_bytes(value)
    return (
        units.format_seconds(value, figures)
        if unit == "seconds"
        else f"{units.digits(value, figures)} J"
    )


def _document(found: Sequence[_Prediction], traced: Mapping[str, Any] | None) -> dict[str, Any]:
    points: dict[Key, dict[str, Any]] = {}
    for key, quantity, answer in found:
        value, curve = answer.predicted.value, answer.curve
        points.setdefault(key, {"key": msgspec.to_builtins(key)})[quantity] = {
            "source": answer.predicted.source,
            **{name: getattr(value, name, None) for name in ("value", "low", "high")},
            "unit": QUANTITIES[quantity],
            "kind": curve.kind if curve else None,
            "nearest": answer.predicted.nearest,
            "reason": answer.predicted.reason,
            "record": str(curve.folder) if curve else None,
            "doubts": [one.code for one in answer.diagnostics],
        }
    return {"points": list(points.values()), **({"memory": traced} if traced is not None else {})}


def _check(folders: Sequence[Path], measured: int, *, as_json: bool) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder: name folders of records, or run something first."
            )
    tables = skill_table.score_all(corpus.find_curves(folders), measured=measured, dense=_DENSE)
    if not tables:
        raise UserError(
            f"No record in {', '.join(map(str, folders))} has enough sizes or batch sizes of one kind: measure at "
            "least six (experiment=quick)."
        )
    grids = (
        (Section(table.title, table.methods()), Section("worst curves first", table.worst()))
        for table in tables
    )
    emit(
        {table.quantity: table.as_json() for table in tables},
        chain.from_iterable(grids),
        as_json=as_json,
    )
