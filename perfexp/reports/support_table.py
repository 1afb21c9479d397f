"""Tables of the algorithms that support a model's convolutions, from `perfexp.worker.entry.algorithms`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perfexp.records.units import format_bytes
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import number_format, one_line

#: JSON values.
Survey = Mapping[str, Any]

#: What stands for an algorithm that can't compute a layer.
NOT = "–"
_PASSES = {"forward": "fwd", "backward_data": "data", "backward_filter": "filter"}
#: Names that are too long for the head of a column.
_SHORT = {
    "implicit_gemm": "impl",
    "implicit_precomp_gemm": "prec",
    "fft_tiling": "tile",
    "winograd": "wino",
    "winograd_nonfused": "nonf",
    "benchmark": "bench",
}
#: Layers that are named for a reason before the rest is counted.
_NAMED = 3


def subject(survey: Survey) -> str:
    """Return model, phase, size, precision and device of a survey in one line."""
    height, width = survey["input_size"]
    size = height if height == width else f"{height}x{width}"
    parts = (survey["model"], survey["phase"], size, f"batch {survey['batch_size']}")
    precision = number_format(survey["precision"], [survey])
    return f"{' · '.join(map(str, parts))} · {precision} · on {survey['device']['name']}"


class Row(NamedTuple):
    """Support for some passes of a layer, with a cell for each algorithm."""

    layer: str
    shape: str
    passes: str
    cells: tuple[str, ...]


def table(survey: Survey, *, short: bool) -> Grid:
    """Return all layers in one table; `short` cuts words to a few letters."""
    lines = _rows(survey, short=short)
    columns = [
        Column("layer", (row.layer for row in lines), prose=True),
        Column("shape", (row.shape for row in lines), prose=True),
    ]
    if _trains(survey):
        columns.append(Column("pass", (row.passes for row in lines), prose=True))
    for index, name in enumerate(survey["algorithms"]):
        columns.append(Column(_title(name, short=short), [row.cells[index] for row in lines]))
    return Grid(columns, list(notes(survey, short=short)))


def bands(survey: Survey) -> tuple[str, list[tuple[str, list[str]]]]:
    """Return the line of algorithm names and, for each layer, its name and lines: the table for a narrow terminal."""
    lines = _rows(survey, short=True)
    head = [_title(name, short=True) for name in survey["algorithms"]]
    first = [max(len(row.passes) for row in lines)] if _trains(survey) else []
    widths = [max(len(title), *(len(row.cells[index]) for row in lines)) for index, title in enumerate(head)]

    def line(label: str, cells: Sequence[str]) -> str:
        start = [label.ljust(width) for width in first]
        return " " + " ".join([*start, *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])

    layers: list[tuple[str, list[str]]] = []
    for row in lines:
        if row.layer:
            layers.append((f"{row.layer}: {row.shape}", []))
        layers[-1][1].append(line(row.passes, row.cells))
    return line("", head), layers


def refusals(survey: Survey, *, every: bool) -> Grid:
    """Return unsupported layers, grouped by reason; `every` names each layer."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for layer, algorithm, answers in _answers(survey):
        reasons: dict[str, list[str]] = {}
        for which, answer in answers.items():
            if answer["reason"] is not None:
                reasons.setdefault(answer["reason"], []).append(which)
        for reason, passes in reasons.items():
            where = "" if len(passes) == len(answers) else f" ({_passes_text(passes)})"
            grouped.setdefault((f"{algorithm}{where}", reason), []).append(_layer_name(layer))
    return _reasons(grouped, every=every)


def passed_over(survey: Survey) -> Grid:
    """Return why preferred backends cannot compute a layer."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for layer, algorithm, answers in _answers(survey):
        for backend, reason in answers["forward"]["passed_over"].items():
            text = reason if backend in reason.lower() else f"{backend}: {reason}"
            grouped.setdefault((algorithm, text), []).append(_layer_name(layer))
    return _reasons(grouped, every=True)


def _answers(survey: Survey) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    for layer in survey["layers"]:
        for algorithm, answers in layer["algorithms"].items():
            yield layer, algorithm, answers


def _trains(survey: Survey) -> bool:
    return bool(survey["phase"] == "train")


def _rows(survey: Survey, *, short: bool) -> list[Row]:
    """Passes of a layer with the same support by all algorithms share a row; only the first has the layer's name."""
    lines = []
    for layer in survey["layers"]:
        algorithms = layer["algorithms"]
        alike: dict[tuple[str, ...], list[str]] = {}
        for which in next(iter(algorithms.values())):
            cells = tuple(_cell(name, answers[which], short=short) for name, answers in algorithms.items())
            alike.setdefault(cells, []).append(which)
        name, shape = _layer_name(layer), shape_text(layer)
        for cells, passes in alike.items():
            lines.append(Row(layer=name, shape=shape, passes=_passes_text(passes), cells=cells))
            name = shape = ""
    return lines


def _cell(algorithm: str, answer: Mapping[str, Any], *, short: bool) -> str:
    if answer["reason"] is not None:
        return NOT
    if algorithm == "guess":
        return _title(answer["engine"].rpartition(".")[2], short=short)
    if not answer["workspace_bytes"]:
        return str(answer["backend"])
    size = format_bytes(answer["workspace_bytes"])
    return size.replace(" ", "").replace("iB", "") if short else f"{answer['backend']} {size}"


def shape_text(layer: Mapping[str, Any]) -> str:
    """Return `64→128 3×3 s2 56×56`: channels, kernel, stride, dilation and groups unless 1, input size."""
    how = layer["convolution"]
    words = [f"{how['in_channels']}→{how['out_channels']}", "×".join(map(str, how["kernel"]))]
    for letter, (down, across) in (("s", how["stride"]), ("d", how["dilation"])):
        if (down, across) != (1, 1):
            words.append(f"{letter}{down}" if down == across else f"{letter}{down}×{across}")
    words += [f"g{how['groups']}"] if how["groups"] > 1 else []
    return " ".join([*words, "×".join(map(str, layer["input_shape"][2:]))])


def _layer_name(layer: Mapping[str, Any]) -> str:
    first, *others = layer["names"]
    name = first or "the model"  # is a convolution itself
    return f"{name} (+{len(others)})" if others else str(name)


def _title(algorithm: str, *, short: bool) -> str:
    return _SHORT.get(algorithm, algorithm) if short else algorithm


def _passes_text(passes: Sequence[str]) -> str:
    return "all" if len(passes) == len(_PASSES) else "+".join(_PASSES[which] for which in passes)


def notes(survey: Survey, *, short: bool) -> Iterator[str]:
    """Yield the meaning of the table's words, and the survey's diagnostics."""
    names = survey["algorithms"]
    if short:
        yield ", ".join(f"{_SHORT[name]}: {name}" for name in names if name in _SHORT)
    answers = (answer for _, _, by_pass in _answers(survey) for answer in by_pass.values())
    if short and any(answer["workspace_bytes"] for answer in answers):
        yield "a size: by cuDNN, with so much workspace (K: KiB, M: MiB, G: GiB)"
    if "guess" in names:
        yield "guess: what cuDNN's heuristic ranks first"
    yield "shape: channels, kernel, s: stride, d: dilation, g: groups, height × width of the inputs"
    if survey["inputs"] > 1:
        yield f"the first of the plan's {survey['inputs']} input and batch sizes"
    if _trains(survey):
        yield "pass: fwd computes the outputs, data the gradient of the inputs, filter that of the weights"
    if survey["unused"]:
        yield f"not used in {survey['phase']}: {', '.join(survey['unused'])}"
    for diagnostic in survey["doubts"]:
        yield f"{diagnostic['severity']}: {diagnostic['detail']} ({diagnostic['code']})"
        yield f"  help: {diagnostic['remedy']}"


def _reasons(grouped: Mapping[tuple[str, str], Sequence[str]], *, every: bool) -> Grid:
    """Algorithms that refuse the same layers for the same reason share a line."""
    lines: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (algorithm, reason), layers in grouped.items():
        lines.setdefault((reason, tuple(layers)), []).append(algorithm)

    def named(layers: Sequence[str]) -> str:
        rest = [] if every or len(layers) <= _NAMED + 1 else [f"{len(layers) - _NAMED} more"]
        return ", ".join([*(layers[:_NAMED] if rest else layers), *rest])

    columns = [
        Column("algorithm", (", ".join(names) for names in lines.values()), prose=True),
        Column("why not", (one_line(reason) for reason, _ in lines), prose=True),
        Column("layers", (named(layers) for _, layers in lines), prose=True),
    ]
    return Grid(columns)
