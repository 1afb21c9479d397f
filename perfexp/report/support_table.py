"""Support table: what can compute a model's convolutions and attention, layer by layer.

`perfexp list algorithms model=NAME` shows it. A worker answers the survey on the device
(`perfexp.worker.answers`): for each layer, algorithm and pass, the backend or the reason why not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfexp.records.grid import Column, Grid
from perfexp.records.subject import number_format, one_line
from perfexp.records.units import format_bytes

#: A worker's answer as JSON values: model, point, device, `layers` with their `algorithms`, and
#: `attention` with its `backends`.
Survey = Mapping[str, Any]

#: Cell for an algorithm that can't compute a layer.
NOT = "–"
_PASSES = {"forward": "fwd", "backward_data": "data", "backward_filter": "filter"}
#: Layers named per reason; the rest is counted.
_NAMED = 3


def subject(survey: Survey) -> str:
    """Return a survey's model, phase, size, precision and device in one line.

    It is the title of the table.
    """
    height, width = survey["input_size"]
    size = height if height == width else f"{height}x{width}"
    parts = (survey["model"], survey["phase"], size, f"batch {survey['batch_size']}")
    precision = number_format(survey["precision"], [survey])
    return f"{' · '.join(map(str, parts))} · {precision} · on {survey['device']['name']}"


def table(survey: Survey) -> Grid:
    """Return the support table, with a row per layer and a column per algorithm.

    If passes differ in support, a layer has several rows.
    """
    rows: list[tuple[str, ...]] = []
    for layer in survey["layers"]:
        about = (_layer_name(layer), shape_text(layer))
        for support, same_passes in _alike(layer["algorithms"]).items():
            rows.append((*about, _passes_text(same_passes), *support))
            about = ("", "")
    columns_of_rows = list(zip(*rows, strict=True)) or [()] * (3 + len(survey["algorithms"]))
    layers, shapes, passes, *cells = columns_of_rows
    columns = [
        Column("layer", layers, prose=True, is_key=True),
        Column("shape", shapes, prose=True, is_key=True),
    ]
    if _trains(survey):
        columns.append(Column("pass", passes, prose=True, is_key=True))
    for rank, (title, texts) in enumerate(zip(survey["algorithms"], cells, strict=True)):
        columns.append(Column(title, texts, rank=rank))
    return Grid(columns, list(_notes(survey)))


def attention_table(survey: Survey) -> Grid:
    """Return the support table of attention, with a row per shape and a column per backend."""
    rows = []
    for entry in survey["attention"]:
        cells = {name: NOT if reason else "yes" for name, reason in entry["backends"].items()}
        shape = f"{entry['shape']} {entry['dtype']}"
        rows.append({"attention": shape, **cells, entry["auto"]: "auto"})
    notes = ["auto: torch's choice; execution.attention=NAME forces another backend"]
    if not survey["layers"]:  # otherwise the other table has them
        notes += _diagnostics(survey)
    return replace(Grid.of_rows(rows), notes=notes)


def _alike(algorithms: Mapping[str, Any]) -> dict[tuple[str, ...], list[str]]:
    """Return a layer's passes grouped by their support; a group's key has a cell per algorithm."""
    passes_by_cells: dict[tuple[str, ...], list[str]] = {}
    for pass_name in next(iter(algorithms.values())):
        cells = tuple(_cell(name, answers[pass_name]) for name, answers in algorithms.items())
        passes_by_cells.setdefault(cells, []).append(pass_name)
    return passes_by_cells


def refusals(survey: Survey, *, every: bool) -> Grid:
    """Return a table of unsupported layers, grouped by reason.

    Args:
        every: whether to name all layers, not only the first few.
    """
    refused = []
    for layer, algorithm, answers in _answers(survey):
        reasons: dict[str, list[str]] = {}
        for pass_name, answer in answers.items():
            if answer["reason"] is not None:
                reasons.setdefault(answer["reason"], []).append(pass_name)
        for reason, passes in reasons.items():
            name = algorithm
            if len(passes) < len(answers):
                name += f" ({_passes_text(passes)})"
            refused.append((name, reason, _layer_name(layer)))
    for entry in survey["attention"]:
        for backend, reason in entry["backends"].items():
            if reason:
                refused.append((backend, reason, entry["shape"]))
    return _reasons(refused, every=every)


def passed_over(survey: Survey) -> Grid:
    """Return a table of the reasons why preferred backends cannot compute a layer.

    An algorithm with several backends uses the first that can.
    """
    passed = []
    for layer, algorithm, answers in _answers(survey):
        for backend, reason in answers["forward"]["passed_over"].items():
            if backend not in reason.lower():
                reason = f"{backend}: {reason}"
            passed.append((algorithm, reason, _layer_name(layer)))
    return _reasons(passed, every=True)


def _answers(survey: Survey) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """Yield each layer and algorithm with its answers by pass."""
    for layer in survey["layers"]:
        for algorithm, answers in layer["algorithms"].items():
            yield layer, algorithm, answers


def _trains(survey: Survey) -> bool:
    """Return whether the survey is about training, with backward passes."""
    return bool(survey["phase"] == "train")


def _cell(algorithm: str, answer: Mapping[str, Any]) -> str:
    """Return the backend for a pass with its workspace, cuDNN's guess, or `NOT`."""
    if answer["reason"] is not None:
        return NOT
    if algorithm == "guess":
        return str(answer["engine"].rpartition(".")[2])
    if answer["workspace_bytes"]:
        return f"{answer['backend']} {format_bytes(answer['workspace_bytes'])}"
    return str(answer["backend"])


def shape_text(layer: Mapping[str, Any]) -> str:
    """Return a layer's shape, e.g. `64→128 3×3 s2 56×56`.

    The parts are channels, kernel, stride, dilation, groups and input size; stride, dilation and
    groups are left out if they are 1.
    """
    how = layer["convolution"]
    words = [f"{how['in_channels']}→{how['out_channels']}", "×".join(map(str, how["kernel"]))]
    for letter, (down, across) in (("s", how["stride"]), ("d", how["dilation"])):
        if (down, across) != (1, 1):
            words.append(f"{letter}{down}" if down == across else f"{letter}{down}×{across}")
    if how["groups"] > 1:
        words.append(f"g{how['groups']}")
    return " ".join([*words, "×".join(map(str, layer["input_shape"][2:]))])


def _layer_name(layer: Mapping[str, Any]) -> str:
    """Return the first of equal layers' names, with the number of the others.

    Convolutions with equal shapes and settings are one entry of the survey.
    """
    first, *others = layer["names"]
    name = first or "the model"  # is a convolution itself
    if others:
        return f"{name} (+{len(others)})"
    return str(name)


def _passes_text(passes: Sequence[str]) -> str:
    """Return the short names of passes, such as `fwd+data`; `all` for all three."""
    if len(passes) == len(_PASSES):
        return "all"
    return "+".join(_PASSES[pass_name] for pass_name in passes)


def _notes(survey: Survey) -> Iterator[str]:
    """Yield explanations for the table's words, and the survey's diagnostics.

    They stand below the support table.
    """
    if "guess" in survey["algorithms"]:
        yield "guess: what cuDNN's heuristic ranks first"
    yield "shape: channels, kernel, s: stride, d: dilation, g: groups, height × width of the inputs"
    if survey["inputs"] > 1:
        yield f"the first of the plan's {survey['inputs']} input and batch sizes"
    if _trains(survey):
        yield (
            "pass: fwd computes the outputs, data the gradient of the inputs, filter that of the "
            "weights"
        )
    if survey["unused"]:
        yield f"not used in {survey['phase']}: {', '.join(survey['unused'])}"
    yield from _diagnostics(survey)


def _diagnostics(survey: Survey) -> Iterator[str]:
    """Yield the survey's diagnostics as lines below a table."""
    for diagnostic in survey["doubts"]:
        yield f"{diagnostic['severity']}: {diagnostic['detail']} ({diagnostic['code']})"
        yield f"  help: {diagnostic['remedy']}"


def _reasons(refused: Iterable[tuple[str, str, str]], *, every: bool) -> Grid:
    """Return algorithms, reasons and layers as a table.

    Algorithms that refuse the same layers for the same reason share a line.

    Args:
        refused: algorithm, reason and layer.
        every: whether to name all layers, not only the first few.
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    for algorithm, reason, layer in refused:
        grouped.setdefault((algorithm, reason), []).append(layer)
    lines: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (algorithm, reason), layers in grouped.items():
        lines.setdefault((reason, tuple(layers)), []).append(algorithm)
    why, named = list[str](), list[str]()
    for reason, shared in lines:
        why.append(one_line(reason))
        if every or len(shared) <= _NAMED + 1:
            named.append(", ".join(shared))
        else:
            named.append(f"{', '.join(shared[:_NAMED])}, {len(shared) - _NAMED} more")
    columns = [
        Column("algorithm", map(", ".join, lines.values()), prose=True),
        Column("why not", why, prose=True),
        Column("layers", named, prose=True),
    ]
    return Grid(columns)
