"""perfexp log: send records on disk to MLflow, for the first time or again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import RECORD, SWEEP, app, echo
from perfexp.errors import PerfexpError, UserError
from perfexp.records.folders import below
from perfexp.records.record import Record
from perfexp.records.sweep_record import Sweep
from perfexp.tracking.mlflow_sink import MlflowSink


@app.command()
def log(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="A run's folder, or any folder above runs.")],
    uri: Annotated[str | None, typer.Option(help="Tracking store; by default outputs/mlflow.db here.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Experiment; by default that of each record's plan.")] = None,
) -> None:
    """Send records to MLflow; sending one twice does no harm."""
    sending = _Sending(uri=uri, experiment=experiment)
    for folder in folders:
        sending.send_below(folder)
    for line in sending.links.values():
        echo(line)
    raise typer.Exit(sending.exit_code)


@dataclass(kw_only=True)
class _Sending:
    """Records to send, the address of the last sent record by store, and the exit code of the worst error.

    Records do not choose the store, since they are data; `experiment` is None for that of each plan.
    """

    uri: str | None
    experiment: str | None
    links: dict[str, str] = field(default_factory=dict)
    exit_code: int = 0
    _tracking: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def send_below(self, folder: Path) -> None:
        """Send every record in or below a folder, then their sweeps."""
        if not folder.exists():
            self._failed(folder, UserError("there is no such folder; set the store with --uri"))
            return
        files = sorted([folder] if folder.is_file() else below(folder, RECORD, SWEEP, refused=lambda error: None))
        if not any(file.name == RECORD for file in files):
            self._failed(folder, UserError(f"no {RECORD} in it or below it"))
        for name, send in ((RECORD, self._send_record), (SWEEP, self._send_sweep)):
            for file in files:
                try:
                    if file.name == name:
                        send(file)
                except PerfexpError as error:
                    self._failed(file.parent, error)

    def _send_record(self, file: Path) -> None:
        record = Record.load(file)
        tracking = record.plan.get("tracking")
        settings = tracking if isinstance(tracking, Mapping) else {}
        if record.sweep:
            # a sweep goes to the experiment of its runs
            self._tracking[record.sweep.uid] = settings
        sink = self._sink(settings)
        self._sent(record.name, file.parent, sink.uri, sink.publish(record, file.parent))

    def _send_sweep(self, file: Path) -> None:
        sweep = Sweep.load(file)
        sink = self._sink(self._tracking.get(sweep.uid, {}))
        self._sent(sweep.name, file.parent, sink.uri, sink.publish_sweep(sweep, file.parent))

    def _sink(self, settings: Mapping[str, Any]) -> MlflowSink:
        return MlflowSink(uri=self.uri, experiment=self.experiment or settings.get("experiment"))

    def _sent(self, name: str, folder: Path, uri: str, link: str) -> None:
        echo(f"sent    {name}  {folder}")
        self.links[uri] = link

    def _failed(self, folder: Path, error: PerfexpError) -> None:
        echo(f"failed  {folder}: {error}", err=True)
        self.exit_code = max(self.exit_code, error.exit_code)
