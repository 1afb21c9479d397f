"""perfexp predict: memory, time and energy without measuring, and how good predictions are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from perfexp.cli.composition import compose
from perfexp.commands.app import ConfigDir, Json, app, command_line, echo, emit
from perfexp.errors import PerfexpError, UserError
from perfexp.host import gpu_sheets
from perfexp.plan import config
from perfexp.prediction import corpus, lookup, skill
from perfexp.prediction.corpus import QUANTITIES, MeasuredCurve, MeasuredDevice
from perfexp.prediction.lookup import Answer, PredictedLayer
from perfexp.prediction.predictions import MEASURED
from perfexp.records import units
from perfexp.records.grid import Section
from perfexp.records.record import Key, Record
from perfexp.records.subject import label, subject
from perfexp.records.wording import supported_digits
from perfexp.run.worker_query import query

#: Curves with at least this many points are scored with the points of a sparse sweep, shorter
#: curves by leaving one out.
_DENSE = 20
#: Layers of a point that the console lists.
_MOST_LAYERS = 10
#: Notes below the predictions for a quantity.
_NOTES = {
    "memory": "memory is of the timed calls; the first ones may take more (perfexp show DIR)",
    "energy": "energy is at that loop's pace, which the host may set; "
    "its interval leaves the meter's scale out",
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


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE… | check [DIR…]",
        help="Overrides of a run (model=vgg16 batch_size=32 gpu=h200); "
        "or check, and folders of records.",
    ),
]


@app.command()
def predict(
    overrides: Overrides = None,
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
    layers: Annotated[bool, typer.Option("--layers", help="Predict the layers' times.")] = False,
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
        _check(list(map(Path, words[1:])) or folders, measured, as_json=as_json)
        return
    for folder in corpus_folders or ():
        if not folder.is_dir():
            raise UserError(f"--corpus {folder} is not a folder.")
    arguments = command_line(words, config_dir)
    plain = compose(arguments)
    plan = config.typed(plain)
    if plan.seeks_batch:
        raise UserError(
            "perfexp predict prints the largest batch that fits: set batch_size=1 instead of max."
        )
    predictions = _looked_up(plan, plain, corpus.find_curves(folders))
    document = _document(predictions)
    parts: list[Section | str] = [str(subject(plain))]
    if memory:
        document["memory"] = traced = _traced(plain)
        parts.append(Section("memory, traced", list(_memory_lines(traced, plan))))
    parts.append(
        Section(f"from records in {', '.join(map(str, folders))}", list(_answer_lines(predictions)))
    )
    if layers:
        times = [one for one in predictions if one.quantity == "time"]
        parts.append(Section("layers", list(_layer_lines(times, document["points"]))))
    diagnostics = chain.from_iterable(prediction.answer.diagnostics for prediction in predictions)
    for text, remedy in dict.fromkeys(
        (str(diagnostic), diagnostic.help) for diagnostic in diagnostics
    ):
        parts += [text, f"  help: {remedy}"]
    emit(document, parts, as_json=as_json)


def _traced(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Trace memory in a worker; if that fails, return a reason and no points."""
    try:
        return query(plain, "memory", waiting=lambda text: echo(text, err=True))
    except PerfexpError as error:
        return {"points": [], "reason": str(error)}


def _looked_up(
    plan: config.Plan, plain: Mapping[str, Any], curves: Sequence[MeasuredCurve]
) -> list[_Prediction]:
    """Return the prediction of each quantity at each of the plan's points.

    Args:
        plan: plan of the points.
        plain: the plan as plain data.
        curves: curves from records, of any device.
    """
    file = gpu_sheets.read(plan.config_dirs()).get(plan.gpu_name)
    matching = corpus.Corpus([curve for curve in curves if _is_of(curve.device, plan, file)])
    installed: dict[str, str] = {}
    with suppress(PackageNotFoundError):
        installed["torch"] = version("torch")
    keys = plan.first_keys()
    predictions = []
    for key, name in product(keys, QUANTITIES):
        answer = lookup.look_up(key, name, plain, matching, installed)
        predictions.append(_Prediction(key, name, answer))
    return predictions


def _is_of(device: MeasuredDevice, plan: config.Plan, file: gpu_sheets.GpuFile | None) -> bool:
    """Return whether the plan would use this device; gpu=auto may use any."""
    is_product = file is None or file.is_of(device.product)
    is_alike = (device.ranks, device.nodes) == (plan.ranks, plan.nodes)
    return is_alike and plan.device_kind in ("auto", device.kind) and is_product


def _memory_lines(traced: Mapping[str, Any], plan: config.Plan) -> Iterator[str]:
    """Yield the traced memory of each point in words, with what it leaves out.

    Args:
        traced: answer of a worker, see `_traced`.
    """
    if "reason" in traced:
        yield str(traced["reason"])
    lacks_workspaces = lacks_capacity = False
    for point in traced["points"]:
        key = msgspec.convert(point["key"], Key)
        if "reason" in point:
            yield f"{label(key)}: {point['reason']}"
            continue
        parts = sorted(point["categories"].items(), key=lambda item: -item[1])
        yield f"{label(key)}: peak {units.format_bytes(point['peak_bytes'])}"
        yield f"  {', '.join(f'{name} {units.format_bytes(size)}' for name, size in parts)}"
        workspaces = point["workspaces"]
        if workspaces:
            yield from map("  {}".format, _workspaces_text(workspaces))
        # unknown workspaces count as lacking
        if not workspaces or (workspaces["convolutions"] and not workspaces["known"]):
            lacks_workspaces = True
        if point["capacity_bytes"]:
            yield f"  {_largest_text(point, is_sheet=point['gpu'] == plan.gpu_name)}"
        else:
            lacks_capacity = True
    if plan.device_kind == "cpu":
        if lacks_capacity:
            yield "of tensors alone; records of a CPU have the memory of the process"
        return
    if lacks_workspaces:
        yield (
            "without workspaces of cuDNN, which may be larger than all of it; records include them"
        )
    if lacks_capacity:
        yield (
            f"gpu={plan.gpu_name} names no memory size: "
            "set gpu=NAME for the largest batch that fits"
        )


def _largest_text(point: Mapping[str, Any], *, is_sheet: bool) -> str:
    """Return the upper bound of the batch that fits the device or its data-sheet memory."""
    device, largest = point["gpu"], point["largest_batch"]
    size = f"{units.format_bytes(point['capacity_bytes'])} of {device}"
    qualifier = on_device = ""
    if is_sheet:
        qualifier, on_device = "about ", " on a device"
        gigabytes = f"{point['capacity_bytes'] / 1e9:g} GB"
        size = f"the {gigabytes} of {device}'s data sheet (drivers report up to 7 % more)"
    if not largest:
        return f"no sample fits in {size}"
    return (
        f"at most {qualifier}batch {largest} in {size} "
        f"(upper bound; found by trial with batch_size=max{on_device})"
    )


def _workspaces_text(workspaces: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many convolution workspaces a peak includes, and why others are missing."""
    num_known, total = workspaces.get("known") or 0, workspaces.get("convolutions")
    if not total:
        return
    if num_known == total:
        yield (
            f"with workspaces of cuDNN for all {total} convolutions, from {workspaces['device']}"
        )
    elif num_known:
        yield (
            f"with workspaces of cuDNN for {num_known} of {total} convolutions, "
            f"from {workspaces['device']}; without those of the others, the peak is a lower bound"
        )
    if reason := workspaces.get("reason"):
        unmeasured = units.counted(total - num_known, "convolution")
        yield f"workspaces of {unmeasured} not measured: {reason}"


def _answer_lines(predictions: Sequence[_Prediction]) -> Iterator[str]:
    """Yield each predicted quantity in words, then notes."""
    texts: dict[tuple[str, str], list[str]] = {}  # quantities refused for the same reason together
    for key, quantity, answer in predictions:
        name = "energy of a call in the loop" if quantity == "energy" else quantity
        text = answer_text(answer, QUANTITIES[quantity])
        texts.setdefault((label(key), text), []).append(name)
    for (place, text), names in texts.items():
        yield f"{place}: {', '.join(names)} {text}"
    quantities, sources = set(), set()
    for prediction in predictions:
        if prediction.answer.predicted.value:
            quantities.add(prediction.quantity)
            sources.add(prediction.answer.predicted.source)
    for quantity, note in _NOTES.items():
        if quantity in quantities:
            yield note
    if MEASURED in sources:
        yield "a measured interval is that of its record"


def answer_text(answer: Answer, unit: str) -> str:
    """Return a predicted quantity with interval, source, and nearest measured point.

    The report of `perfexp predict` has one for each point and quantity.
    """
    predicted, curve = answer.predicted, answer.curve
    if predicted.value is None or curve is None:
        return f"refused: {predicted.reason}"
    low, high = predicted.value.low, predicted.value.high
    figures, interval = 3, ""
    if low is not None and high is not None:
        figures = max(supported_digits(predicted.value), 3)
        ends = f"{_formatted(low, unit, figures)} to {_formatted(high, unit, figures)}"
        interval = f" ({ends}, 90 %)"
    text = f"{_formatted(predicted.value.value, unit, figures)}{interval}, {predicted.source}"
    if curve.quantity == "time":
        text = f"{curve.kind} {text}"
    if predicted.nearest != predicted.pair:
        text += f", nearest measured {lookup.pair_text(predicted.nearest)}"
    return f"{text} ({curve.about.device or 'an unknown device'}, {curve.folder})"


def _formatted(value: float, unit: str, figures: int) -> str:
    """Return a value with its unit as text."""
    if unit == "bytes":
        return units.format_bytes(value)
    if unit == "seconds":
        return units.format_seconds(value, figures)
    return f"{units.digits(value, figures)} J"


def _layers(prediction: _Prediction) -> list[PredictedLayer]:
    """Return the layers of a point, longest first, by the record of its predicted time.

    Raises:
        UserError: no record has its time, or the record lacks layers around it.
    """
    curve = prediction.answer.curve
    if curve is None:
        raise UserError(f"{label(prediction.key)}: {prediction.answer.predicted.reason}.")
    predicted = lookup.layers_at(prediction.key, Record.load(curve.folder))
    return sorted(predicted, key=lambda one: -one.seconds.value)


def _layer_lines(times: Sequence[_Prediction], points: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the longest layers of each point in words, and add all layers to its JSON values."""
    for prediction, point in zip(times, points, strict=True):
        layers, key = _layers(prediction), label(prediction.key)
        point["layers"] = msgspec.to_builtins(layers)
        for one in layers[:_MOST_LAYERS]:
            ends = one.seconds.value, one.seconds.low or 0.0, one.seconds.high or 0.0
            value, low, high = (_formatted(number, "seconds", 3) for number in ends)
            yield f"{key}: {one.layer} {one.pass_type} {value} ({low} to {high}, 90 %)"
        if (more := len(layers) - _MOST_LAYERS) > 0:
            yield f"{key}: {units.counted(more, 'shorter layer')} (--json has all)"


def _document(predictions: Sequence[_Prediction]) -> dict[str, Any]:
    """Return the predictions as JSON values, point by point."""
    points: dict[Key, dict[str, Any]] = {}
    for key, quantity, answer in predictions:
        predicted, curve = answer.predicted, answer.curve
        points.setdefault(key, {"key": msgspec.to_builtins(key)})[quantity] = {
            "source": predicted.source,
            "value": getattr(predicted.value, "value", None),
            "low": getattr(predicted.value, "low", None),
            "high": getattr(predicted.value, "high", None),
            "unit": QUANTITIES[quantity],
            "kind": curve and curve.kind,
            "nearest": predicted.nearest,
            "reason": predicted.reason,
            "record": curve and str(curve.folder),
            "doubts": [diagnostic.code for diagnostic in answer.diagnostics],
        }
    return {"points": list(points.values())}


def _check(folders: Sequence[Path], measured: int, *, as_json: bool) -> None:
    """Print how well the corpus predicts itself (`perfexp predict check`).

    Args:
        folders: folders of records.
        measured: number of points that a sparse sweep measures.

    Raises:
        UserError: a folder is missing, or no record has enough points.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder: name folders of records, or run something first."
            )
    tables = skill.score_all(corpus.find_curves(folders), measured=measured, dense=_DENSE)
    if not tables:
        raise UserError(
            f"No record in {', '.join(map(str, folders))} has enough sizes or batch sizes "
            "of one kind: measure at least six (experiment=quick)."
        )
    document = {}
    parts = []
    for table in tables:
        document[table.quantity] = table.as_json()
        parts.append(Section(table.title, table.methods()))
        parts.append(Section("worst curves first", table.worst()))
    emit(document, parts, as_json=as_json)
