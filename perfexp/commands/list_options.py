"""perfexp list: finished runs, the options in each group, and what can compute a model's layers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from perfexp.cli import keys
from perfexp.cli.composition import compose
from perfexp.cli.conf_files import comment_of, options_below
from perfexp.commands import list_runs
from perfexp.commands.app import ConfigDir, Json, app, command_line, echo, emit, group_folders
from perfexp.errors import UserError, did_you_mean
from perfexp.models import torchvision_names
from perfexp.records.grid import Column, Grid, Section
from perfexp.records.subject import number_format, one_line
from perfexp.records.units import format_bytes
from perfexp.run.worker_query import query

#: Width of prose.
_WIDTH = 80
#: A worker's answer as JSON values: model, point, device, `layers` with their `algorithms`, and
#: `attention` with its `backends`.
Survey = Mapping[str, Any]
#: Cell for an algorithm that can't compute a layer.
NOT = "–"
_PASSES = {"forward": "fwd", "backward_data": "data", "backward_filter": "filter"}
#: Layers named per reason; the rest is counted.
_NAMED = 3


@app.command("list")
def list_options(
    group: Annotated[
        str | None,
        typer.Argument(
            help="runs, models, algorithms, gpus, modes, experiments, …; all groups if none."
        ),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="With runs: a folder, and values of their plans (model=vgg16). "
            "With algorithms: overrides of a run (model=vgg16 gpu=h200 mode=train), "
            "to list by layer.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="With runs: those that ended since then: 12h, 7d, 2w."),
    ] = None,
    reasons: Annotated[
        bool,
        typer.Option(
            "--reasons",
            help="With a model: the reasons of all backends for each unsupported layer.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List finished runs, the options in a group, or what can compute a model's layers.

    Example: perfexp list runs --since 7d model=resnet50
    """
    if group == "runs":
        list_runs.show(words or (), since, as_json=as_json)
    elif since:
        raise UserError("--since is for runs: perfexp list runs --since 7d")
    elif words and group in ("algorithms", "algorithm"):
        survey = _survey(words, config_dir)
        emit(survey, _support(survey, reasons=reasons), as_json=as_json)
    elif words:
        raise UserError(
            f"'{words[0]}': leave it out. Overrides are for algorithms only: perfexp list "
            "algorithms …"
        )
    elif reasons:
        raise UserError(
            "--reasons is for the layers of a model: "
            "perfexp list algorithms model=resnet18 --reasons"
        )
    else:
        _list(group, group_folders(config_dir), as_json=as_json)


def _list(name: str | None, folders: list[Path], *, as_json: bool) -> None:
    """Print the options in a group, the keys in a section of config.yaml, or all groups.

    Args:
        name: name of a group, its plural, or a section; None for all groups.
        folders: folders with groups.
    """
    groups = options_below(folders)
    if name is None:
        texts = [f"{group:<12} {', '.join(files)}" for group, files in sorted(groups.items())]
        names = dict(zip(groups, map(list, groups.values()), strict=True))
        emit(names, texts, as_json=as_json)
        return
    if "=" in name:
        raise UserError(
            f"group '{name}' not found; for a model's layers: perfexp list algorithms {name}"
        )
    group = next((group for group in groups if name in (group, f"{group}s", f"{group}es")), None)
    section = [key for key in keys.keys(folders[0])["plan"] if key.name.startswith(f"{name}.")]
    if section and name not in groups:
        width = max(len(key.name) for key in section) + 2
        document: dict[str, Any] = {}
        texts = []
        for key in section:
            text = f"{key.default:<7} {key.meaning}".replace("`", "")
            document[key.name] = text
            texts.append(f"{key.name:<{width}}{text}")
        if group:
            document[group] = list(groups[group])
            texts.append(f"options of the group {group}: {', '.join(groups[group])}")
        emit(document, texts, as_json=as_json)
        return
    if group is None:
        raise UserError(f"group '{name}' not found. {did_you_mean(name, groups)}")
    descriptions = {option: _about(file) for option, file in groups[group].items()}
    width = max(map(len, descriptions)) + 2
    texts = [f"{option:<{width}}{text}".rstrip() for option, text in descriptions.items()]
    if group == "model" and (
        others := sorted(set(torchvision_names.names()) - descriptions.keys())
    ):
        by_name = (
            f"by name, of torchvision: {', '.join(others)}; of timm: timm:NAME; "
            "of Hugging Face: hf:NAME; your own: model=FILE:CLASS"
        )
        texts.append(textwrap.fill(by_name, _WIDTH))
        descriptions = dict.fromkeys(others, "of torchvision") | descriptions
    if group == "algorithm":
        meaning = f"execution.attention: {keys.descriptions()['execution.attention']}"
        texts.append(textwrap.fill(meaning.replace("`", ""), _WIDTH))
    emit(descriptions, texts, as_json=as_json)


def _about(file: Path) -> str:
    """Return the comment in a file; for a GPU, add bandwidth and power."""
    description = comment_of(file)
    facts = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("facts")
    if not facts:
        return description
    bandwidth = f"{facts['memory_bytes_per_second'] / 1e12:.2f} TB/s"
    power = f"{facts['power_watts']:.0f} W" if facts["power_watts"] else "power unknown"
    return f"{description}; {bandwidth}, {power}"


def _support(survey: Survey, *, reasons: bool) -> Iterator[Section]:
    """Yield the tables of supported algorithms and backends, and reasons against others."""
    title = survey_title(survey)
    if survey["layers"]:
        yield Section(title, support_table(survey))
        title = "attention"
    if survey["attention"]:
        yield Section(title, attention_table(survey))
    refused = refusals(survey, every=reasons)
    if refused.lines:
        yield Section(f"not supported ({NOT})", refused)
    if reasons and (others := passed_over(survey)).lines:
        yield Section("supported, but not by the first backend tried", others)


def _survey(overrides: Sequence[str], config_dir: Path | None) -> Survey:
    """Return which algorithms can compute the convolutions of a run's model, from a worker."""
    # any algorithm will do: all are queried, with their shared settings (backend, workspace_bytes)
    chosen = [] if any(text.startswith("algorithm=") for text in overrides) else ["algorithm=gemm"]
    words = command_line([*chosen, *overrides], config_dir)
    return query(
        compose(words),
        "algorithms",
        waiting=lambda text: echo(text, err=True),
    )


def survey_title(survey: Survey) -> str:
    """Return a survey's model, phase, size, precision and device in one line.

    It is the title of the table.
    """
    height, width = survey["input_size"]
    size = height if height == width else f"{height}x{width}"
    parts = (survey["model"], survey["phase"], size, f"batch {survey['batch_size']}")
    precision = number_format(survey["precision"], [survey])
    return f"{' · '.join(map(str, parts))} · {precision} · on {survey['device']['name']}"


def support_table(survey: Survey) -> Grid:
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
