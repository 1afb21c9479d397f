"""perfexp doctor: check whether this machine can measure, and how to fix what is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from perfexp.commands.app import app
from perfexp.commands.output import echo
from perfexp.data import cityscapes_folder
from perfexp.devices import lock
from perfexp.diagnosis import Choice, Facts, Finding, Verdict, dataset, environment, whole
from perfexp.errors import UserError, did_you_mean
from perfexp.host import gpu_sheets, installation
from perfexp.orchestration import capabilities
from perfexp.reports.console import Console
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import one_line
from perfexp.tracking.store import database, store_uri

if TYPE_CHECKING:
    from perfexp.summaries.grid import Grid

_LAYOUT = "cityscapes"
_OVERRIDES = ("data", "data.root")


@app.command()
def doctor(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="data.root=DIR", help="Check this data set for data=cityscapes instead."),
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Device to check, as in gpu=NAME.")] = "auto",
    gpu_index: Annotated[int, typer.Option(metavar="N", min=0, help="Its number, as in gpu.index=N.")] = 0,
    pairs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Images and masks of each split to read whole; 0 for all.")
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all facts.")] = False,
    config_dir: Annotated[Path | None, typer.Option(help="Folder with groups of your own.")] = None,
) -> None:
    """Check whether this machine can measure and how to get what is missing; or whether a data set is complete.

    Exit code 0 if everything necessary for measuring on the device works, 1 otherwise.
    """
    if settings:
        _examine(_data_root(settings), pairs, as_json=as_json)
    choice = Choice(name=gpu, index=gpu_index)
    facts = gather(choice, _gpu_files(config_dir))
    findings = whole.diagnose(facts, choice)
    works = whole.works(findings)
    if as_json:
        answer = {
            "works": works,
            "gpu": dataclasses.asdict(choice),
            "findings": list(map(dataclasses.asdict, findings)),
        }
        echo(json.dumps({**answer, "facts": facts}, indent=1))
    else:
        _show(choice, findings, works=works)
    raise typer.Exit(0 if works else 1)


def gather(choice: Choice, gpu_files: dict[str, dict[str, Any]]) -> Facts:
    """All facts for a diagnosis; raises `UserError` if no file of conf/gpu has the device's name."""
    if choice.name not in gpu_files:
        raise UserError(f"There is no gpu '{choice.name}'. {did_you_mean(choice.name, gpu_files)}")
    store = database(store_uri(None))
    folders = {"outputs": Path("outputs"), "lock": lock.lock_path("cpu").parent}
    here = environment.machine_facts(
        folders | ({"store": store.parent} if store else {}), store
    )  # first, since the survey is a load itself
    surveyed = capabilities.conduct(None if choice.name in ("cpu", "fake", "mps") else choice.index)
    locks = ["cpu", *(str(device["uuid"]) for device in surveyed["parts"].get("cuda", {}).get("devices", ()))]
    return {
        "machine": here,
        "survey": surveyed,
        "gpu_files": gpu_files,
        "locks": {name: lock.holder(name) for name in locks},
    }


def table(findings: Sequence[Finding]) -> Grid:
    """A table with a line per finding; remedies follow observations."""
    texts = (f"{finding.found} → {finding.remedy}" if finding.remedy else finding.found for finding in findings)
    return Grid(
        columns=(
            Column(
                title="what",
                cells=tuple(finding.check.replace(" ", "\N{NO-BREAK SPACE}") for finding in findings),
                prose=True,
            ),
            Column(title="verdict", cells=tuple(finding.verdict.value for finding in findings), prose=True),
            Column(title="found → what to do", cells=tuple(map(one_line, texts)), prose=True),
        )
    )


def _data_root(settings: Sequence[str]) -> Path:
    """The folder in the overrides; raises `UserError` without one, or for another override."""
    overrides = {key: value for key, _, value in (setting.partition("=") for setting in settings)}
    if wrong := [key for key in overrides if key not in _OVERRIDES]:
        raise UserError(
            f"doctor takes data.root=DIR, not {wrong[0]}; choose a device with --gpu NAME. "
            f"{did_you_mean(wrong[0], _OVERRIDES)}"
        )
    if overrides.get("data", _LAYOUT) != _LAYOUT:
        raise UserError(f"data={overrides['data']}: doctor only checks folders of data={_LAYOUT}.")
    if not overrides.get("data.root"):
        raise UserError("data.root is required; set data.root=DIR.")
    return Path(overrides["data.root"]).expanduser()


def _examine(root: Path, pairs: int, *, as_json: bool) -> NoReturn:
    facts = cityscapes_folder.survey(root, pairs)
    findings = list(dataset.findings(facts))
    works = whole.works(findings)
    if as_json:
        answer = {"works": works, "findings": list(map(dataclasses.asdict, findings)), "facts": facts}
        echo(json.dumps(answer, indent=1))
    else:
        _print(f"the data in {root}", findings, "it can be used" if works else "it can not be used")
    raise typer.Exit(0 if works else 1)


def _show(choice: Choice, findings: list[Finding], *, works: bool) -> None:
    _print(f"this machine, for gpu={choice.name}", findings, "it can measure" if works else "it can not measure")


def _print(title: str, findings: list[Finding], verdict: str) -> None:
    console = Console()
    console.show_grid(title, table(findings))
    counts = {
        verdict_value.value: sum(finding.verdict is verdict_value for finding in findings) for verdict_value in Verdict
    }
    console.note(f"{verdict}: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}")


def _gpu_files(config_dir: Path | None) -> dict[str, dict[str, Any]]:
    """Match, product and power of the files of the gpu group, by the files' names."""
    files = gpu_sheets.read([installation.conf_dir(), *([config_dir] if config_dir else [])])
    return {
        name: {"match": file.match, "product": file.facts.product, "power_watts": file.facts.power_watts}
        for name, file in files.items()
    }
