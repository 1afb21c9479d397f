"""perfexp doctor: check if this machine can measure, and how to fix what is missing.

perfexp env: print the machine facts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import ConfigDir, Json, app, emit, group_folders
from perfexp.data import cityscapes_folder
from perfexp.devices import lock
from perfexp.doctor import CheckResult, Choice, Facts, Finding, devices, environment, whole
from perfexp.errors import UserError, did_you_mean
from perfexp.host import gpu_sheets
from perfexp.records import priors
from perfexp.records.grid import Grid, Section
from perfexp.records.subject import one_line
from perfexp.report.tracking.store import database, store_uri
from perfexp.run import machine_priors, worker_query

_LAYOUT = "cityscapes"
_OVERRIDES = ("data", "data.root")


@app.command()
def doctor(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="data.root=DIR", help="Check this data set for data=cityscapes instead."
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="Device to check, as in gpu=NAME.")
    ] = "auto",
    gpu_index: Annotated[
        int, typer.Option(metavar="N", min=0, help="Its number, as in gpu.index=N.")
    ] = 0,
    pairs: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Images and masks of each split to read whole; 0 for all."
        ),
    ] = 20,
    as_json: Json = False,
    config_dir: ConfigDir = None,
) -> None:
    """Check whether this machine can measure and how to get what is missing.

    With data.root=DIR, check instead whether a data set is complete. The exit code is 0 if
    everything needed works, otherwise 1.

    Example: perfexp doctor --gpu auto
    """
    subject: dict[str, Any] = {}
    facts: Facts
    if settings:
        root = _data_root(settings)
        facts = cityscapes_folder.survey(root, pairs)
        findings = list(whole.dataset_findings(facts))
        title, able = f"the data in {root}", "be used"
    else:
        choice = Choice(name=gpu, index=gpu_index)
        subject = {"gpu": dataclasses.asdict(choice)}
        facts = gather(choice, _gpu_files(config_dir))
        findings = whole.diagnose(facts, choice)
        title, able = f"this machine, for gpu={choice.name}", "measure"
    works = whole.works(findings)
    verdicts = [finding.verdict for finding in findings]
    counts = [f"{verdicts.count(kind)} {kind.value}" for kind in CheckResult if kind in verdicts]
    emit(
        {
            "works": works,
            **subject,
            "findings": list(map(dataclasses.asdict, findings)),
            "facts": facts,
        },
        [
            Section(title, table(findings)),
            f"it {'can' if works else 'cannot'} {able}: {', '.join(counts)}",
        ],
        as_json=as_json,
    )
    raise typer.Exit(0 if works else 1)


@app.command()
def env() -> None:
    """Print the facts of this machine and its software as JSON.

    Example: perfexp env > machine.json
    """
    emit(environment.collect(), (), as_json=True)


def gather(choice: Choice, gpu_files: dict[str, dict[str, Any]]) -> Facts:
    """Return all facts for a diagnosis.

    `diagnose` judges them.

    Args:
        choice: device to check.
        gpu_files: match, product and power from conf/gpu, by file name.

    Raises:
        UserError: no file in conf/gpu has the device's name.
    """
    if choice.name not in gpu_files:
        raise UserError(f"There is no gpu '{choice.name}'. {did_you_mean(choice.name, gpu_files)}")
    store = database(store_uri(None))
    folders = {"outputs": Path("outputs"), "lock": lock.lock_path("cpu").parent}
    if store:
        folders["store"] = store.parent
    machine = environment.machine_facts(folders, store)  # first, since the survey is a load itself
    surveyed = worker_query.survey(None if choice.name in ("cpu", "fake", "mps") else choice.index)
    locks = {"cpu": lock.holder("cpu")}
    for device in surveyed["parts"].get("cuda", {}).get("devices", ()):
        uuid = str(device["uuid"])
        locks[uuid] = lock.holder(uuid)
    facts = {"machine": machine, "survey": surveyed, "gpu_files": gpu_files, "locks": locks}
    return {**facts, "processes": _spread_here(facts, choice)}


def _spread_here(facts: Facts, choice: Choice) -> dict[str, Any]:
    """Return how much figures differ between processes on the device, by class.

    Each class has its relative `spread` and the number of `measurements` behind it.
    """
    chosen = devices.choose(facts, choice)
    kind, device = "cpu", chosen.name
    if chosen.device:
        kind, device = "cuda", str(chosen.device["uuid"])
    driver = (devices.board_of(facts, chosen) or {"facts": {}})["facts"].get("driver")
    spreads = machine_priors.known(machine_priors.cache_of(facts["machine"], device, driver), kind)
    before = priors.of_kind(kind)
    return {
        name: {
            "spread": math.expm1(math.sqrt(class_prior.variance)),
            "measurements": class_prior.cells - before[name].cells,
        }
        for name, class_prior in spreads.items()
    }


def table(findings: Sequence[Finding]) -> Grid:
    """Return a table with a line per finding; remedies follow observations.

    `doctor` prints one for each group of findings.
    """
    rows = []
    for finding in findings:
        texts = filter(None, (finding.found, finding.remedy))
        rows.append(
            {
                "what": finding.check.replace(" ", "\N{NO-BREAK SPACE}"),
                "verdict": finding.verdict.value,
                "found → what to do": one_line(" → ".join(texts)),
            }
        )
    return Grid.of_rows(rows)


def _data_root(settings: Sequence[str]) -> Path:
    """Return the folder in the overrides.

    Raises:
        UserError: there is no folder, or another override.
    """
    overrides = {}
    for setting in settings:
        key, _, overrides[key] = setting.partition("=")
        if key not in _OVERRIDES:
            raise UserError(
                f"doctor takes data.root=DIR, not {key}; choose a device with --gpu NAME. "
                f"{did_you_mean(key, _OVERRIDES)}"
            )
    if overrides.get("data", _LAYOUT) != _LAYOUT:
        raise UserError(f"data={overrides['data']}: doctor only checks folders of data={_LAYOUT}.")
    if not overrides.get("data.root"):
        raise UserError("data.root is required; set data.root=DIR.")
    return Path(overrides["data.root"]).expanduser()


def _gpu_files(config_dir: Path | None) -> dict[str, dict[str, Any]]:
    """Return match, product and power from the files in the gpu group, by file name."""
    files = gpu_sheets.read(group_folders(config_dir))
    return {
        name: {
            "match": file.match,
            "product": file.facts.product,
            "power_watts": file.facts.power_watts,
        }
        for name, file in files.items()
    }
