"""Model support: the convolution algorithms and backends for the layers of a model on this device."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfexp.cli.composition import compose
from perfexp.commands.app import echo
from perfexp.errors import PerfexpError, UserError
from perfexp.host.process import SilenceError, WorkerProcess, worker_command
from perfexp.plan import plan_file
from perfexp.reports import support_table
from perfexp.reports.console import Console
from perfexp.reports.support_table import Survey


def show(overrides: Sequence[str], *, config_dir: Path | None, reasons: bool, as_json: bool) -> None:
    """Print the algorithms for each convolution of a model, which `overrides` choose as for a run."""
    survey = gather(overrides, config_dir)
    if as_json:
        echo(json.dumps(survey, indent=1))
        return
    console = Console()
    _show_layers(survey, console)
    refused = support_table.refusals(survey, every=reasons)
    if refused.lines:
        console.show_grid(f"not supported ({support_table.NOT})", refused)
    if reasons and (others := support_table.passed_over(survey)).lines:
        console.show_grid("supported, but not by the first backend tried", others)


def gather(overrides: Sequence[str], config_dir: Path | None) -> Survey:
    """Compose a plan as for a run, and query the algorithms in a worker."""
    for text in overrides:
        if "=" not in text:
            raise UserError(f"'{text}' is not an override: set key=value, such as model=resnet18.")
    # any algorithm will do: all are queried, with the settings that they share (backend, workspace_bytes)
    chosen = [] if any(text.startswith("algorithm=") for text in overrides) else ["algorithm=gemm"]
    folder = [f"--config-dir={config_dir}"] if config_dir else []
    return query(compose([*folder, *chosen, *overrides]))


def query(plain: Mapping[str, Any]) -> Survey:
    """Query the algorithms for the layers of a model in a worker.

    Raises:
        PerfexpError: the worker refused, or ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        content, log = plan_file.to_yaml(plain), Path(folder) / "run.log"
        (Path(folder) / "plan.yaml").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        process = WorkerProcess(worker_command(folder, "--what=algorithms", f"--plan-sha256={sha256}"), log)
        answer, failure = None, None
        try:
            for event in process.events(plain["timeout_seconds"]):
                if event["event"] == "algorithms":
                    answer = event["answer"]
                elif event["event"] in ("refused", "failed"):
                    failure = event
                elif event.get("patient"):
                    echo(event["text"], err=True)
        except SilenceError as error:
            failure = {"message": f"The worker sent no progress for {error.seconds:g} s and was terminated."}
        finally:
            code = process.end()
        if failure is not None:
            raise (UserError if failure.get("exit_code") == 2 else PerfexpError)(failure["message"])
        if answer is None:
            lines = [line for line in log.read_text(errors="replace").splitlines()[1:] if line.strip()]
            last = f": {lines[-1].strip()}" if lines else ""
            raise PerfexpError(f"The worker ended with code {code}{last}.")
        return dict(answer)


def _show_layers(survey: Survey, console: Console) -> None:
    title = support_table.subject(survey)
    for short in (False, True):
        grid = support_table.table(survey, short=short)
        if console.has_room(grid):
            console.show_grid(title, grid)
            return
    head, layers = support_table.bands(survey)
    console.show_grid(title, None)
    console.note(head)
    for layer, lines in layers:
        console.show_grid(layer, None)
        for line in lines:
            console.note(line)
    for note in support_table.notes(survey, short=True):
        console.note(note)
