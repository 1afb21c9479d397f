"""Main: the Hydra application. Composes plans, has each measured, and ends with an exit code."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from perfexp.cli.composition import SCRATCH, call_with_hydra
from perfexp.cli.flags import CONFIG_DIR, DRY_RUN, OVERWRITE, flag_values, joined_flags
from perfexp.cli.overrides import (
    axes_of,
    limited_jobs,
    parsed,
    refuse_words,
    values_of,
    without_credentials,
    without_max_jobs,
)
from perfexp.cli.resume import with_resumed
from perfexp.cli.stored_command import Offer, check_targets
from perfexp.errors import PerfexpError, UserError
from perfexp.host import interrupts
from perfexp.host.files import refuse_deleted_cwd
from perfexp.orchestration import dry_run, job, replicates
from perfexp.orchestration.assignment import Assignment
from perfexp.orchestration.preparation import holds_other_plan, refuse_other_plan
from perfexp.orchestration.record_assembly import exit_code
from perfexp.orchestration.sweep_run import Campaign
from perfexp.plan import config, naming, plan_file, validation
from perfexp.plan.hydra_errors import explained
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record
from perfexp.reports.console import Console

if TYPE_CHECKING:
    from hydra.conf import HydraConf


#: Exit code where everything was measured and a record is on disk only.
_NOT_SENT = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run what a command line of Hydra overrides asks for.

    Args:
        argv: command line without the program's name; the process's own if not given.

    Returns:
        0 if all was measured, 1 if a measurement or a profile failed, 2 if the command or the configuration is wrong,
        3 if all was measured and a tracker did not take a record, 130 if interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    application = _Application()
    with interrupts.handled():
        try:
            _measure(application, arguments)
        except KeyboardInterrupt:
            application.interrupted()
        finally:
            application.close()
    codes = set(application.exit_codes)
    return max(codes - {_NOT_SENT}, default=0) or max(codes, default=0)


def _measure(application: _Application, arguments: list[str]) -> None:
    try:
        refuse_deleted_cwd()
        arguments, most_jobs = without_max_jobs(without_credentials(joined_flags(arguments)))
        application.is_dry, application.overwrites = DRY_RUN in arguments, OVERWRITE in arguments
        arguments = [text for text in arguments if text not in (DRY_RUN, OVERWRITE)]
        refuse_words(arguments)
        if application.overwrites and any(text.startswith("resume=") for text in arguments):
            raise UserError(
                f"resume= goes on with what is there, {OVERWRITE} measures it again: leave one of them out."
            )
        arguments, application.offer = with_resumed(arguments)
        application.arguments = arguments
        with limited_jobs(most_jobs):
            call_with_hydra(arguments, application)
        application.measure_rounds()
    except Exception as error:
        application.failed(explained(error))


class _Application:
    """The function that Hydra calls for each job; a job that fails never ends the sweep."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self.offer: Offer | None = None
        self.is_dry = self.overwrites = False
        self._taken: set[Path] = set()
        self._is_refused = False
        self._waiting: list[Assignment] = []
        self.exit_codes: list[int] = []
        self.campaign: Campaign | None = None
        self.console = Console()  # plain until a plan sets it
        self._folder: Path | None = None

    def failed(self, error: PerfexpError) -> None:
        """Report an error and remember its exit code."""
        self.console.error(str(error))
        self.exit_codes.append(error.exit_code)

    def interrupted(self) -> None:
        """Report an interrupt, once, and remember its exit code."""
        with suppress(KeyboardInterrupt), interrupts.held():  # another one tells nothing new
            if 130 not in self.exit_codes:
                self.exit_codes.append(130)
                folder = self.campaign.paths.root if self.campaign is not None else self._folder
                again = None if folder is None or not folder.is_dir() else shlex.quote(f"resume={folder}")
                self.console.error(
                    f"Interrupted. What is finished is on disk; go on with it: perfexp {again}"
                    if again
                    else "Interrupted before anything was measured."
                )

    def close(self) -> None:
        """Sum the sweep up, if it is one; whoever does not want to wait for that interrupts it."""
        if self.is_dry:
            return
        try:
            if self.campaign is not None and not self.campaign.close():
                self.exit_codes.append(_NOT_SENT)
        except KeyboardInterrupt:
            self.interrupted()
        except Exception as error:
            self.failed(explained(error))

    def __call__(self, composed: DictConfig) -> None:
        """Measure one composition; Hydra would write a traceback of any exception that it sees.

        Args:
            composed: by Hydra, without its own node.
        """
        try:
            self._take(composed)
        except Exception as error:
            self.failed(explained(error))

    def _take(self, composed: DictConfig) -> None:
        """See `__call__`."""
        if self._is_refused:
            return
        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN and not str(settings.launcher["_target_"]).endswith("BasicLauncher"):
            raise UserError(
                "Runs of a sweep are measured one after the other, on this machine: leave hydra/launcher at basic."
            )
        command = [f"--config-dir={folder}" for folder in flag_values(self.arguments, *CONFIG_DIR)]
        command += _overrides(settings)
        self.console = Console(quiet=composed.quiet)
        try:
            if settings.mode == RunMode.MULTIRUN:
                self._join(composed)
            plain = config.plan_of(composed, settings.runtime.choices, command)
            if self.offer is not None:
                check_targets(plain, self.offer)
            assignment = self._assignment(plain)
            if not self.overwrites:
                refuse_other_plan(RunPaths(assignment.folder), plain)  # before anything of the plan is built
            if self.offer is not None and self.campaign is not None:
                self.campaign.refuse_other_runs(assignment.folder)
            self._folder = assignment.folder
            validation.check(assignment.plan)
            if self.campaign is not None:
                self.campaign.accept(assignment)
        except Exception as error:
            refusal = explained(error)
            self.failed(refusal)
            if self.campaign is not None and not self.is_dry:
                self.campaign.refused(*self._place(self.campaign), refusal)
            return
        if self.is_dry or (settings.mode == RunMode.MULTIRUN and assignment.plan.replicate > 1):
            self._waiting.append(assignment)
            return
        try:
            record = job.run(assignment, self.console)
        except Exception as error:
            self._ended(assignment, explained(error, assignment.folder))
        except KeyboardInterrupt:
            with suppress(UserError), interrupts.held():  # interrupted so early that there is no record
                self._enter(assignment, Record.load(assignment.folder))
            raise
        else:
            self._ended(assignment, record)

    def measure_rounds(self) -> None:
        """Measure the runs of a sweep that have several replicates, which are interleaved; or say what would be."""
        if self._waiting and self.is_dry:
            dry_run.show(self._waiting, self.campaign, self.console)
        elif self._waiting:
            replicates.measure(self._waiting, self.console, self._ended)

    def _ended(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        """Remember how a run ended, and enter it in the sweep's summary."""
        if isinstance(outcome, PerfexpError):
            self.failed(outcome)
        else:
            self.exit_codes += [exit_code(outcome), *([] if assignment.is_sent else [_NOT_SENT])]
        self._enter(assignment, outcome)

    def _assignment(self, plain: dict[str, Any]) -> Assignment:
        """What this job has to do, and where its files go."""
        plan, campaign = config.typed(plain), self.campaign
        parts = (plan.model_name, plan.algorithm_name, plan.mode.name)
        if campaign is None:
            name = naming.run_name(parts, {})
            folder = self._free(plan, plain, naming.run_folder(plan, name))
            _refuse_links(*((folder, folder.parent) if plan.output_dir is None else ()))
            return Assignment(plan=plan, plain=plain, folder=folder, name=name, overwrites=self.overwrites)
        number, axes = self._place(campaign)
        folder = self._free(plan, plain, naming.child_folder(plan, campaign.paths.root, number, axes))
        _refuse_links(folder, *((folder.parent,) if plan.stage else ()))
        return Assignment(
            plan=plan,
            plain=plain,
            folder=folder,
            name=naming.run_name(parts, axes),
            sweep=campaign.membership(number, axes, folder),
            begun=campaign.announce,
            whole=campaign.whole,
            number=number + 1,
            overwrites=self.overwrites,
        )

    def _free(self, plan: config.Plan, plain: dict[str, Any], folder: Path) -> Path:
        """The folder; for a stage's run, which names none, the first that no other plan and no run of the sweep has."""
        if not plan.stage or (plan.output_dir and self.campaign is None):
            return folder
        found = next(
            path
            for path in naming.numbered(folder)
            if path not in self._taken and (self.overwrites or not holds_other_plan(RunPaths(path), plain))
        )
        self._taken.add(found)
        return found

    def _place(self, campaign: Campaign) -> tuple[int, dict[str, str]]:
        """The number of this job in its sweep, and its values of what varies."""
        settings = HydraConfig.get()
        values = values_of(_overrides(settings))
        return int(settings.job.num), {axis: values.get(axis, "") for axis in campaign.axes}

    def _join(self, composed: DictConfig) -> None:
        """Take part in the sweep that this job belongs to; its first job begins it.

        Raises:
            UserError: it cannot be begun; no job of it is tried.
        """
        if self.campaign is None:
            self._is_refused = True
            settings = HydraConfig.get()
            given = {override.key_or_group for override in parsed(self.arguments)}
            params = {key: value for key, value in _sweeper_params(settings).items() if key not in given}
            axes = axes_of([*self.arguments, *(f"{key}={value}" for key, value in params.items())])
            basic = str(settings.sweeper["_target_"]).endswith("BasicSweeper")
            jobs = math.prod(axes.values()) if basic and all(axes.values()) else None
            written = Path(settings.sweep.dir)
            campaign = Campaign(
                folder=_sweep_folder(written, composed.output_dir),
                command=self.arguments,
                axes=list(axes),
                jobs=jobs,
                console=self.console,
                multirun=plan_file.hide_credentials((written / "multirun.yaml").read_bytes()),
            )
            if not self.is_dry:
                campaign.begin()
            self.campaign = campaign
            self._is_refused = False

    def _enter(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        if self.campaign is not None and assignment.sweep is not None:
            self.campaign.ended(assignment.sweep, assignment.name, assignment.folder, outcome)


def _refuse_links(*folders: Path) -> None:
    """Refuse to write through links that nobody named: a folder of somebody else may hold them.

    Raises:
        UserError: one is a link.
    """
    for folder in folders:
        if folder.is_symlink():
            raise UserError(f"{folder} is a link: results are written into real folders only. Remove it.")


def _overrides(settings: HydraConf) -> list[str]:
    """The overrides of a job as they were typed: interpolations, which may hold credentials, are not resolved."""
    return list(map(str, OmegaConf.to_container(settings.overrides.task, resolve=False) or ()))


def _sweep_folder(written: Path, output_dir: str | None) -> Path:
    """Where a sweep's own files go.

    Args:
        written: where Hydra wrote its own; a folder that a file names by hydra.sweep.dir, or perfexp's scratch.
        output_dir: the folder that the user named, if any.
    """
    if not written.name.startswith(SCRATCH):
        return written
    return Path(output_dir) if output_dir else Path("outputs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-sweep")


def _sweeper_params(settings: HydraConf) -> dict[str, Any]:
    """Axes that a configuration file gives to the sweeper."""
    return dict(settings.sweeper.get("params") or {})
