"""doctor: whether this machine can measure, what is missing, and how to get it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from perfexp import config
from perfexp.diagnosis import Choice, Facts, Finding, Verdict
from perfexp.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from perfexp.sinks.grid import Grid


def doctor(
    gpu: Annotated[str, typer.Option(metavar="NAME", help="The device that is meant, as in gpu=NAME.")] = "auto",
    gpu_index: Annotated[int, typer.Option(metavar="N", min=0, help="Its number, as in gpu.index=N.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, with all facts.")] = False,
    config_dir: Annotated[Path | None, typer.Option(help="Folder with groups of your own.")] = None,
) -> None:
    """Tell whether this machine can measure, what is missing, and how to get it.

    Exit code 0 if everything works that measuring on the device needs, 1 if something does not.
    """
    from perfexp.diagnosis import whole  # late: `perfexp --help` imports all commands

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
        typer.echo(json.dumps({**answer, "facts": facts}, indent=1))
    else:
        _show(choice, findings, works=works)
    raise typer.Exit(0 if works else 1)


def gather(choice: Choice, gpu_files: dict[str, dict[str, Any]]) -> Facts:
    """Everything that a diagnosis is made from.

    Args:
        choice: the device that is asked for.
        gpu_files: those of conf/gpu, by name.

    Raises:
        UserError: no file has the device's name.
    """
    from perfexp import machine, survey
    from perfexp.devices import lock
    from perfexp.sinks.store import database, store_uri

    if choice.name not in gpu_files:
        raise UserError(f"There is no gpu '{choice.name}'. {did_you_mean(choice.name, gpu_files)}")
    store = database(store_uri(None))
    folders = {"outputs": Path("outputs"), "lock": lock.lock_path("cpu").parent}
    here = machine.facts(folders | ({"store": store.parent} if store else {}), store)  # first: the survey is a load too
    surveyed = survey.conduct(None if choice.name in ("cpu", "fake", "mps") else choice.index)
    locks = ["cpu", *(str(device["uuid"]) for device in surveyed["parts"].get("cuda", {}).get("devices", ()))]
    return {
        "machine": here,
        "survey": surveyed,
        "gpu_files": gpu_files,
        "locks": {name: lock.holder(name) for name in locks},
    }


def table(findings: Sequence[Finding]) -> Grid:
    """The findings as a table, a line each; what is to be done follows what was found.

    Args:
        findings: of a diagnosis.
    """
    from perfexp.sinks.grid import Column, Grid
    from perfexp.sinks.subject import one_line

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


def _show(choice: Choice, findings: list[Finding], *, works: bool) -> None:
    from perfexp.sinks.console import Console

    console = Console()
    console.show_grid(f"this machine, for gpu={choice.name}", table(findings))
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    console.note(f"{'it can measure' if works else 'it can not measure'}: {told}")


def _gpu_files(config_dir: Path | None) -> dict[str, dict[str, Any]]:
    """What the files of the gpu group say of the devices that they are for, by the files' names."""
    folders = [config.conf_dir(), *([config_dir] if config_dir else [])]
    return {file.stem: _gpu_file(file) for folder in folders for file in sorted(folder.glob("gpu/*.yaml"))}


def _gpu_file(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        facts, match = content.get("facts") or {}, content.get("match")
        re.compile(match or "")
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError, re.error) as error:
        raise UserError(f"{file} can't be read: {error}. Mend it, or leave out --config-dir.") from error
    return {"match": match, "product": facts.get("product"), "power_watts": facts.get("power_watts")}
