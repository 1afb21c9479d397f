"""list: the options of each group of the configuration, and the algorithms that a model's layers support."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from perfexp.cli.composition import compose
from perfexp.cli.usage import comment_of, keys_below
from perfexp.commands.app import ConfigDir, app, echo, group_folders
from perfexp.errors import UserError, did_you_mean
from perfexp.models import torchvision_names
from perfexp.orchestration.worker_query import query
from perfexp.reports import support_table
from perfexp.reports.console import Console
from perfexp.reports.support_table import Survey

#: Width of prose.
_WIDTH = 80


@app.command("list")
def list_options(
    group: Annotated[
        str | None, typer.Argument(help="models, algorithms, gpus, modes, experiments, …; all if none.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="With algorithms: overrides of a run (model=vgg16 gpu=h200 mode=train), to list by layer.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
    reasons: Annotated[
        bool, typer.Option("--reasons", help="With a model: the reasons of all backends for each unsupported layer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the options of a group, or which convolution algorithms the layers of a model support on this device."""
    if overrides:
        if group not in ("algorithms", "algorithm"):
            raise UserError(f"'{overrides[0]}': overrides are for algorithms only: perfexp list algorithms …")
        _show_support(overrides, config_dir=config_dir, reasons=reasons, as_json=as_json)
        return
    if reasons:
        raise UserError("--reasons is for the layers of a model: perfexp list algorithms model=resnet18 --reasons")
    if group and "=" in group:
        raise UserError(f"group '{group}' not found; for a model's layers: perfexp list algorithms {group}")
    folders = group_folders(config_dir)
    groups = sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")})
    if group is None and as_json:
        echo(json.dumps({name: [file.stem for file in _files(folders, name)] for name in groups}, indent=1))
        return
    if group is None:
        for name in groups:
            echo(f"{name:<12} {', '.join(file.stem for file in _files(folders, name))}")
        return
    chosen = next((name for name in groups if group in (name, f"{name}s", f"{name}es")), None)
    if group != "hydra" and (keys := keys_below(folders[0] / "config.yaml", group)):
        _show_keys(keys, {chosen: [file.stem for file in _files(folders, chosen)]} if chosen else {}, as_json=as_json)
        return
    if chosen is None:
        raise UserError(f"group '{group}' not found. {did_you_mean(group, groups)}")
    files = _files(folders, chosen)
    if as_json:
        by_name = dict.fromkeys(torchvision_names.names(), "of torchvision") if chosen == "model" else {}
        echo(json.dumps({**by_name, **{file.stem: _about(file) for file in files}}, indent=1))
        return
    width = max(len(file.stem) for file in files) + 2
    for file in files:
        echo(f"{file.stem:<{width}}{_about(file)}".rstrip())
    if chosen == "model":
        others = sorted(set(torchvision_names.names()) - {file.stem for file in files})
        echo(textwrap.fill(f"by name, of torchvision: {', '.join(others)}; of timm: timm:NAME", _WIDTH))


def _show_keys(keys: Mapping[str, str], options: Mapping[str, Sequence[str]], *, as_json: bool) -> None:
    """Print the keys of a section of config.yaml, and the options of the group of the same name."""
    if as_json:
        echo(json.dumps({**keys, **options}, indent=1))
        return
    width = max(map(len, keys)) + 2
    for key, about in keys.items():
        default, _, comment = (part.strip() for part in about.partition("#"))
        echo(f"{key:<{width}}{default:<7}{comment}".rstrip())
    for group, names in options.items():
        echo(f"options of the group {group}: {', '.join(names)}")


def _files(folders: list[Path], group: str) -> list[Path]:
    return sorted({file.stem: file for folder in folders for file in folder.glob(f"{group}/*.yaml")}.values())


def _about(file: Path) -> str:
    """Return the comment of a file, with bandwidth and power for a device."""
    about = comment_of(file)
    facts = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("facts")
    if not facts:
        return about
    bandwidth = f"{facts['memory_bytes_per_second'] / 1e12:.2f} TB/s"
    power = f"{facts['power_watts']:.0f} W" if facts["power_watts"] else "power unknown"
    return f"{about}; {bandwidth}, {power}"


def _show_support(overrides: Sequence[str], *, config_dir: Path | None, reasons: bool, as_json: bool) -> None:
    survey = _survey(overrides, config_dir)
    if as_json:
        echo(json.dumps(survey, indent=1))
        return
    console = Console()
    console.show_grid(support_table.subject(survey), support_table.table(survey))
    refused = support_table.refusals(survey, every=reasons)
    if refused.lines:
        console.show_grid(f"not supported ({support_table.NOT})", refused)
    if reasons and (others := support_table.passed_over(survey)).lines:
        console.show_grid("supported, but not by the first backend tried", others)


def _survey(overrides: Sequence[str], config_dir: Path | None) -> Survey:
    for text in overrides:
        if "=" not in text:
            raise UserError(f"'{text}' is not an override: set key=value, such as model=resnet18.")
    # any algorithm will do: all are queried, with the settings that they share (backend, workspace_bytes)
    chosen = [] if any(text.startswith("algorithm=") for text in overrides) else ["algorithm=gemm"]
    folder = [f"--config-dir={config_dir}"] if config_dir else []
    return query(compose([*folder, *chosen, *overrides]), "algorithms", waiting=lambda text: echo(text, err=True))
