"""Support: the tables of what can compute a model's convolutions, as `perfexp.worker.entry.algorithms` returns it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.records.units import format_bytes
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import one_line

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


def subject(found: Survey) -> str:
    """What was asked about, in one line.

    Args:
        found: of a model.
    """
    height, width = found["input_size"]
    size = height if height == width else f"{height}x{width}"
    parts = (found["model"], found["phase"], size, f"batch {found['batch_size']}", found["precision"])
    return f"{' · '.join(map(str, parts))} · on {found['device']['name']}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What computes some passes of a layer.

    Attributes:
        layer: its name, and how many others are like it.
        shape: in words.
        passes: of which it is true.
        cells: one for each algorithm.
    """

    layer: str
    shape: str
    passes: str
    cells: tuple[str, ...]


def rows(found: Survey, *, short: bool) -> list[Row]:
    """The table's rows: one for each layer, or several where its passes differ.

    Args:
        found: of a model.
        short: whether words are cut to a few letters.
    """
    return [row for layer in found["layers"] for row in _rows_of(layer, short=short)]


def table(found: Survey, *, short: bool) -> Grid:
    """All layers in one table.

    Args:
        found: of a model.
        short: whether words are cut to a few letters.
    """
    known = rows(found, short=short)
    before = [("layer", [row.layer for row in known]), ("shape", [row.shape for row in known])]
    if _trains(found):
        before.append(("pass", [row.passes for row in known]))
    titles = [_title(name, short=short) for name in found["algorithms"]]
    return Grid(
        columns=(
            *(Column(title=title, cells=tuple(cells), prose=True) for title, cells in before),
            *(
                Column(title=title, cells=tuple(row.cells[index] for row in known))
                for index, title in enumerate(titles)
            ),
        ),
        notes=tuple(notes(found, short=short)),
    )


def bands(found: Survey) -> tuple[str, list[tuple[str, list[str]]]]:
    """The same for a narrow terminal: each layer has its own line above those of its figures.

    Args:
        found: of a model.

    Returns:
        The line of the algorithms' names; and for each layer what it is, and its lines.
    """
    known = rows(found, short=True)
    head = [_title(name, short=True) for name in found["algorithms"]]
    first = [max(len(row.passes) for row in known)] if _trains(found) else []
    widths = [max(len(title), *(len(row.cells[index]) for row in known)) for index, title in enumerate(head)]

    def line(label: str, cells: Sequence[str]) -> str:
        start = [label.ljust(width) for width in first]
        return " " + " ".join([*start, *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])

    layers: list[tuple[str, list[str]]] = []
    for row in known:
        if row.layer:
            layers.append((f"{row.layer}: {row.shape}", []))
        layers[-1][1].append(line(row.passes, row.cells))
    return line("", head), layers


def refusals(found: Survey, *, every: bool) -> Grid:
    """What is not supported, by reason.

    Args:
        found: of a model.
        every: whether each layer is named.
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    for layer in found["layers"]:
        for algorithm, answers in layer["algorithms"].items():
            for reason, passes in _by_reason(answers).items():
                where = "" if len(passes) == len(answers) else f" ({_told(passes)})"
                grouped.setdefault((f"{algorithm}{where}", reason), []).append(_layer_name(layer))
    return _reasons(grouped, every=every)


def passed_over(found: Survey) -> Grid:
    """Why backends that were asked before the one that computes can't.

    Args:
        found: of a model.
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    for layer in found["layers"]:
        for algorithm, answers in layer["algorithms"].items():
            for backend, reason in answers["forward"]["passed_over"].items():
                told = reason if backend in reason.lower() else f"{backend}: {reason}"
                grouped.setdefault((algorithm, told), []).append(_layer_name(layer))
    return _reasons(grouped, every=True)


def _trains(found: Survey) -> bool:
    return bool(found["phase"] == "train")


def _rows_of(layer: Mapping[str, Any], *, short: bool) -> Iterator[Row]:
    """Passes for which all algorithms say the same share a row; only the first has the layer's name."""
    algorithms = layer["algorithms"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for which in next(iter(algorithms.values())):
        cells = tuple(_cell(name, answers[which], short=short) for name, answers in algorithms.items())
        alike.setdefault(cells, []).append(which)
    name, shape = _layer_name(layer), shape_text(layer)
    for cells, passes in alike.items():
        yield Row(layer=name, shape=shape, passes=_told(passes), cells=cells)
        name = shape = ""


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
    """`64→128 3×3 s2 56×56`: channels, kernel, stride, dilation and groups unless 1, height and width of the inputs.

    Args:
        layer: of a survey.
    """
    how = layer["convolution"]
    words = [f"{how['in_channels']}→{how['out_channels']}", _times(how["kernel"])]
    for letter, (down, across) in (("s", how["stride"]), ("d", how["dilation"])):
        if (down, across) != (1, 1):
            words.append(f"{letter}{down}" if down == across else f"{letter}{down}×{across}")
    words += [f"g{how['groups']}"] if how["groups"] > 1 else []
    return " ".join([*words, _times(layer["input_shape"][2:])])


def _times(pair: Sequence[int]) -> str:
    return "×".join(map(str, pair))


def _layer_name(layer: Mapping[str, Any]) -> str:
    first, *others = layer["names"]
    name = first or "the model"  # is a convolution itself
    return f"{name} (+{len(others)})" if others else str(name)


def _title(algorithm: str, *, short: bool) -> str:
    return _SHORT.get(algorithm, algorithm) if short else algorithm


def _told(passes: Sequence[str]) -> str:
    """`data+filter`, or `all`."""
    return "all" if len(passes) == len(_PASSES) else "+".join(_PASSES[which] for which in passes)


def notes(found: Survey, *, short: bool) -> Iterator[str]:
    """What the words of the table mean, and what else is to be said.

    Args:
        found: of a model.
        short: whether words are cut to a few letters.
    """
    names = found["algorithms"]
    if short:
        yield ", ".join(f"{_SHORT[name]}: {name}" for name in names if name in _SHORT)
    answers = [each for layer in found["layers"] for by in layer["algorithms"].values() for each in by.values()]
    if short and any(each["workspace_bytes"] for each in answers):
        yield "a size: by cuDNN, with so much workspace (K: KiB, M: MiB, G: GiB)"
    if "guess" in names:
        yield "guess: what cuDNN's heuristic ranks first"
    yield "shape: channels, kernel, s: stride, d: dilation, g: groups, height × width of the inputs"
    if found["inputs"] > 1:
        yield f"the first of the plan's {found['inputs']} input and batch sizes"
    if _trains(found):
        yield "pass: fwd computes the outputs, data the gradient of the inputs, filter that of the weights"
    if found["unused"]:
        yield f"not used in {found['phase']}: {', '.join(found['unused'])}"
    for doubt in found["doubts"]:
        yield f"{doubt['severity']}: {doubt['detail']} ({doubt['code']})"
        yield f"  help: {doubt['remedy']}"


def _by_reason(answers: Mapping[str, Any]) -> dict[str, list[str]]:
    """The passes that can't be computed, by the reason."""
    passes: dict[str, list[str]] = {}
    for which, answer in answers.items():
        if answer["reason"] is not None:
            passes.setdefault(answer["reason"], []).append(which)
    return passes


def _reasons(grouped: Mapping[tuple[str, str], Sequence[str]], *, every: bool) -> Grid:
    """Algorithms that refuse the same layers for the same reason share a line."""
    lines: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (algorithm, reason), layers in grouped.items():
        lines.setdefault((reason, tuple(layers)), []).append(algorithm)

    def named(layers: Sequence[str]) -> str:
        rest = [] if every or len(layers) <= _NAMED + 1 else [f"{len(layers) - _NAMED} more"]
        return ", ".join([*(layers[:_NAMED] if rest else layers), *rest])

    return Grid(
        columns=(
            Column(title="algorithm", cells=tuple(", ".join(names) for names in lines.values()), prose=True),
            Column(title="why not", cells=tuple(one_line(reason) for reason, _ in lines), prose=True),
            Column(title="layers", cells=tuple(named(layers) for _, layers in lines), prose=True),
        )
    )
