"""Tables of the algorithms that support a model's convolutions, from `perfexp.worker.entry.algorithms`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfexp.records.units import format_bytes
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import number_format, one_line

#: JSON values.
Survey = Mapping[str, Any]

#: What stands for an algorithm that can't compute a layer.
NOT = "–"
_PASSES = {"forward": "fwd", "backward_data": "data", "backward_filter": "filter"}
#: Layers that are named for a reason before the rest is counted.
_NAMED = 3


def subject(survey: Survey) -> str:
    """Return model, phase, size, precision and device of a survey in one line."""
    height, width = survey["input_size"]
    size = height if height == width else f"{height}x{width}"
    parts = (survey["model"], survey["phase"], size, f"batch {survey['batch_size']}")
    precision = number_format(survey["precision"], [survey])
    return f"{' · '.join(map(str, parts))} · {precision} · on {survey['device']['name']}"


def table(survey: Survey) -> Grid:
    """Return a row for each layer, or for its passes of the same support, with a column for each algorithm."""
    names, shapes, passes, cells = list[str](), list[str](), list[str](), list[tuple[str, ...]]()
    for layer in survey["layers"]:
        for number, (support, which) in enumerate(_alike(layer["algorithms"]).items()):
            names.append("" if number else _layer_name(layer))
            shapes.append("" if number else shape_text(layer))
            passes.append(_passes_text(which))
            cells.append(support)
    columns = [Column("layer", names, prose=True, is_key=True), Column("shape", shapes, prose=True, is_key=True)]
    if _trains(survey):
        columns.append(Column("pass", passes, prose=True, is_key=True))
    by_algorithm = zip(*cells, strict=True) if cells else [[] for _ in survey["algorithms"]]
    for rank, (name, of_algorithm) in enumerate(zip(survey["algorithms"], by_algorithm, strict=True)):
        columns.append(Column(name, of_algorithm, rank=rank))
    return Grid(columns, list(_notes(survey)))


def _alike(algorithms: Mapping[str, Any]) -> dict[tuple[str, ...], list[str]]:
    """The passes of a layer by their support, a cell for each algorithm."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for which in next(iter(algorithms.values())):
        cells = tuple(_cell(name, answers[which]) for name, answers in algorithms.items())
        alike.setdefault(cells, []).append(which)
    return alike


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


def _cell(algorithm: str, answer: Mapping[str, Any]) -> str:
    if answer["reason"] is not None:
        return NOT
    if algorithm == "guess":
        return str(answer["engine"].rpartition(".")[2])
    size = f" {format_bytes(answer['workspace_bytes'])}" if answer["workspace_bytes"] else ""
    return f"{answer['backend']}{size}"


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


def _passes_text(passes: Sequence[str]) -> str:
    return "all" if len(passes) == len(_PASSES) else "+".join(_PASSES[which] for which in passes)


def _notes(survey: Survey) -> Iterator[str]:
    """Yield the meaning of the table's words, and the survey's diagnostics."""
    if "guess" in survey["algorithms"]:
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
