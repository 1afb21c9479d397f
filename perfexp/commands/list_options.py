"""perfexp list: finished runs, the options in each group, and what can compute a model's layers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
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
from perfexp.records.grid import Section
from perfexp.report import support_table
from perfexp.report.support_table import Survey
from perfexp.run.worker_query import query

#: Width of prose.
_WIDTH = 80


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
            f"'{words[0]}': overrides are for algorithms only: perfexp list algorithms …"
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
    title = support_table.subject(survey)
    if survey["layers"]:
        yield Section(title, support_table.table(survey))
        title = "attention"
    if survey["attention"]:
        yield Section(title, support_table.attention_table(survey))
    refused = support_table.refusals(survey, every=reasons)
    if refused.lines:
        yield Section(f"not supported ({support_table.NOT})", refused)
    if reasons and (others := support_table.passed_over(survey)).lines:
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
