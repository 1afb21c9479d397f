"""The measuring command: compose plans with Hydra, measure them, and return an exit code.

Hydra calls `_Application` for a run, or for each run of a sweep (`-m`). The application turns the
configuration into an `Assignment` (plan, folder, name) and has `run.driver` measure it: a single
run at once, a sweep after all its runs are composed. An *element* is a run of a sweep inside a
cluster job; a *campaign* is a sweep whose runs a launcher submits as jobs.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TextIO

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from perfexp.cli import own_models
from perfexp.cli.composition import SCRATCH, call_with_hydra, refuse_words
from perfexp.cli.resume import with_resumed
from perfexp.errors import PerfexpError, UserError
from perfexp.host import credentials, fork_server, interrupts, scheduler
from perfexp.host.files import refuse_deleted_cwd
from perfexp.plan import config, naming, plan_file, prerequisites, validation
from perfexp.plan.flags import (
    CONFIG_DIR,
    DRY_RUN,
    JSON,
    MAX_JOBS,
    OVERWRITE,
    VERBOSE,
    flag_values,
    joined_flags,
)
from perfexp.plan.hydra_errors import as_perfexp_error
from perfexp.plan.override_keys import key_of
from perfexp.plan.overrides import (
    as_typed,
    axes_of,
    max_jobs,
    refuse_many,
    values_of,
    without_credentials,
)
from perfexp.records.analysis import Analysis
from perfexp.records.old_names import arguments_of_today
from perfexp.records.paths import RunPaths, SweepPaths, refuse_link
from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.report.console import Console
from perfexp.report.tables import json_results
from perfexp.run import driver, dry_run
from perfexp.run.cluster.campaign import campaign_of
from perfexp.run.cluster.default_site import with_site
from perfexp.run.cluster.element import Campaign, Element, of_arguments
from perfexp.run.job import exit_code
from perfexp.run.preparation import (
    Assignment,
    OtherCode,
    holds_other_plan,
    is_finished,
    refuse_other_plan,
)
from perfexp.run.sweep_run import OPTIMUM, SweepRun

#: Exit code if everything was measured but a tracker did not accept a record.
_NOT_SENT = 3
_LAUNCHER = "hydra/launcher"
#: A sweep with more runs takes several seconds to compose, so a note is printed.
_MANY = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line of Hydra overrides and return its exit code.

    `argv` defaults to the command line of this process. Exit codes:

    * 0: everything was measured.
    * 1: a measurement or a profile failed.
    * 2: the command or the configuration is wrong.
    * 3: everything was measured, but a tracker did not accept a record.
    * 130: interrupted.
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
    # a failed measurement (1, 2) counts more than an undelivered record (3)
    codes = set(application.exit_codes)
    code = max(codes - {_NOT_SENT}, default=0) or max(codes, default=0)
    if application.element is None:
        return code
    return application.element.end(code)


def _measure(application: _Application, arguments: list[str]) -> None:
    """Read perfexp's own flags, then let Hydra call the application for each run.

    Errors become messages and exit codes of the application.
    """
    try:
        refuse_deleted_cwd()
        arguments = without_credentials(arguments_of_today(joined_flags(arguments)))
        application.most_jobs = max_jobs(arguments)
        application.is_dry, application.overwrites = DRY_RUN in arguments, OVERWRITE in arguments
        application.is_verbose = any(flag in arguments for flag in VERBOSE)
        application.print_json(JSON in arguments)
        flags = (DRY_RUN, OVERWRITE, JSON, *VERBOSE)
        arguments = [
            text for text in arguments if text not in flags and text.partition("=")[0] != MAX_JOBS
        ]
        refuse_words(arguments)
        if application.overwrites and any(text.startswith("resume=") for text in arguments):
            raise UserError(
                f"resume= continues a run, {OVERWRITE} measures it again: leave one of them out."
            )
        arguments, application.element = of_arguments(arguments)
        application.resumes = any(text.startswith("resume=") for text in arguments)
        arguments = with_resumed(arguments if application.element else with_site(arguments))
        application.arguments = arguments
        own_models.find(arguments)
        if not application.is_dry:
            fork_server.prepare()  # it starts while the plan is composed
        call_with_hydra(
            arguments,
            application,
            begun=application.begin_sweep,
            composed=application.measure_composed,
            ended=application.end_sweep,
        )
        application.measure_composed()
    except Exception as error:
        application.failed(as_perfexp_error(error))


class _Application:
    """The function that Hydra calls for each run; a failing run never ends the sweep.

    Attributes:
        arguments: the command line after the flags that concern perfexp alone.
        most_jobs: limit on the runs of a sweep.
        is_dry: whether to print the points without measuring (`--dry-run`).
        resumes: whether `resume=DIR` was typed.
        overwrites: whether to replace the results in a folder (`--overwrite`).
        element: the sweep's run that this cluster job measures; None outside.
        exit_codes: exit codes of all runs so far.
        sweep_run: the sweep; None for a single run.
    """

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self.most_jobs = 0
        self.is_dry = self.resumes = self.overwrites = self.is_verbose = self._is_refused = (
            self._optimizes
        ) = False
        self.element: Element | None = None
        self._campaign: Campaign | None = None
        #: Whether submitted jobs go on without this process.
        self._is_left = False
        #: Folders that runs of this command use.
        self._taken: set[Path] = set()
        #: Runs that are composed and not yet measured.
        self._waiting: list[Assignment] = []
        self.exit_codes: list[int] = []
        self.sweep_run: SweepRun | None = None
        self._out: TextIO | None = None
        self._results: list[dict[str, Any]] | None = None
        self.console = Console()  # until a plan sets `quiet`
        #: Folder of the latest run, for the message after an interrupt.
        self._folder: Path | None = None
        self._shown: list[PerfexpError] = []

    def print_json(self, is_set: bool) -> None:
        """Print results as JSON on stdout and everything else on stderr, if `is_set`."""
        self._results, self._out = ([], sys.stderr) if is_set else (None, None)
        self.console = Console(out=self._out)

    def failed(self, error: PerfexpError) -> None:
        """Print an error and remember its exit code; each error counts once."""
        if error not in self._shown:  # an optimizing sweeper raises the error again
            self._shown.append(error)
            self.console.error(str(error))
            self.exit_codes.append(error.exit_code)

    def begin_sweep(self, settings: HydraConf) -> None:
        """Choose the launcher that measures the runs; called before Hydra composes the first one.

        Raises:
            UserError: the launcher cannot measure these runs, or there are too many runs.
        """
        self._campaign = campaign_of(
            settings.runtime.choices[_LAUNCHER], settings.launcher, is_sweep=True
        )
        self._optimizes = not _is_basic(settings)
        if not self._optimizes:
            refuse_many(_swept(self.arguments, settings), self.most_jobs)
        if self._optimizes and (self.is_dry or self._campaign is not None):
            flag = DRY_RUN if self.is_dry else _LAUNCHER
            sweeper = settings.runtime.choices["hydra/sweeper"]
            raise UserError(
                f"hydra/sweeper={sweeper} chooses runs by the figures of earlier ones: leave out "
                f"{flag}."
            )

    def end_sweep(self, scratch: Path) -> None:
        """Move an optimizing sweeper's results from Hydra's folder to the sweep folder."""
        if self.sweep_run is not None and (file := scratch / OPTIMUM).is_file():
            self.sweep_run.add(file)

    def interrupted(self) -> None:
        """Print the first interrupt, with the command to continue, and remember its exit code."""
        with suppress(KeyboardInterrupt), interrupts.held():  # another interrupt adds nothing
            if 130 not in self.exit_codes:
                self.exit_codes.append(130)
                folder = self.sweep_run.paths.root if self.sweep_run is not None else self._folder
                text = "Interrupted before anything was measured."
                if self._is_left:
                    text = f"Interrupted. To continue, repeat the command with output_dir={folder}."
                elif folder is not None and folder.is_dir():
                    override = shlex.quote(f"resume={folder}")
                    text = (
                        f"Interrupted. Finished points are on disk; to continue: perfexp {override}"
                    )
                self.console.error(text)

    def close(self) -> None:
        """Print JSON results and finish the sweep, at the end of the command.

        An interrupt cuts this short. While submitted jobs are still queued, the sweep is only
        unlocked.
        """
        if self.is_dry:
            return
        if self._results is not None:
            facts = {"sweep": str(self.sweep_run.paths.root)} if self.sweep_run is not None else {}
            document = json_results.document(self._results, **facts)
            print(credentials.mask(json_results.text(document)))
        if self.sweep_run is None:
            return
        if self._is_left:
            self.sweep_run.unlock()
            return
        try:
            if not self.sweep_run.close():
                self.exit_codes.append(_NOT_SENT)
        except KeyboardInterrupt:
            self.interrupted()
        except Exception as error:
            self.failed(as_perfexp_error(error))

    def __call__(self, composed: DictConfig) -> float | list[float] | None:
        """Measure a composed configuration; Hydra calls this for each run.

        Exceptions stay inside, because Hydra would print a traceback. Under an optimizing sweeper,
        such as Optuna, return the run's figures and raise its failure: such a sweeper accepts
        exceptions.
        """
        try:
            outcome = self._take(composed)
        except Exception as error:
            outcome = as_perfexp_error(error)
            self.failed(outcome)
        if not self._optimizes:
            return None
        if isinstance(outcome, Record):
            return _objective(outcome, HydraConfig.get().sweeper.get("direction"))
        raise outcome or PerfexpError("The sweep was refused.")

    def _take(self, composed: DictConfig) -> Record | PerfexpError | None:
        """Prepare a composed run, and measure it or keep it for later.

        Returns:
            The record, or the reason why the run was refused or failed. None if the run waits for
            `measure_composed`, or if the sweep is refused as a whole.
        """
        if self._is_refused:
            return None
        settings = HydraConfig.get()
        if settings.mode != RunMode.MULTIRUN:
            campaign_of(settings.runtime.choices[_LAUNCHER], settings.launcher, is_sweep=False)
        if self.sweep_run is None:  # the sweep prints above the bars of its runs, on one console
            self.console = Console(quiet=composed.quiet, verbose=self.is_verbose, out=self._out)
        try:
            assignment = self._prepare(composed, settings)
        except Exception as error:
            refusal = as_perfexp_error(error)
            self.failed(refusal)
            # no table may mix old and new code
            if isinstance(refusal, OtherCode) and self.sweep_run is not None:
                self._is_refused = True
                self.sweep_run.unlock()
                self.sweep_run = None
            if self.sweep_run is not None and not self.is_dry:
                number, axes = self._place(self.sweep_run)
                self.sweep_run.refused(number, as_typed(axes), refusal)
            return refusal
        if self.is_dry or (settings.mode == RunMode.MULTIRUN and not self._optimizes):
            self._waiting.append(assignment)
            return None
        return self._measure(assignment)

    def _prepare(self, composed: DictConfig, settings: HydraConf) -> Assignment:
        """Return the assignment for a composed configuration, after all checks.

        The fork server begins to import what the run's worker needs.

        Raises:
            PerfexpError: the run cannot be measured.
        """
        command = [f"--config-dir={folder}" for folder in flag_values(self.arguments, *CONFIG_DIR)]
        command += _overrides(settings)
        if settings.mode == RunMode.MULTIRUN:
            self._join(composed)
        plain = config.plan_of(composed, settings.runtime.choices, command)
        assignment = self._assignment(plain)
        plan, paths = assignment.plan, RunPaths(assignment.folder)
        if not self.overwrites:
            refuse_other_plan(paths, plain)  # before building anything
        if self.resumes and self.sweep_run is not None:
            self.sweep_run.refuse_other_runs(assignment.folder)
        self._folder = assignment.folder
        validation.check(plan)
        is_here = self._campaign is None or not self._campaign.outlives
        if is_here and not is_finished(paths, plan):
            prerequisites.check_here(plan)
        is_new = self._campaign is None and not self.is_dry and not paths.points.exists()
        if is_new and (imports := config.imports(plain)) is not None:
            fork_server.prepare(imports)
        if self._campaign is not None:
            self._campaign.add(assignment, config.cluster_of(composed), command)
        elif plan.nodes > 1:
            scheduler.require_nodes(plan.nodes)
        if self.sweep_run is not None:
            self.sweep_run.accept(assignment)
        return assignment

    def _measure(self, assignment: Assignment) -> Record | PerfexpError:
        """Measure a run and return its outcome, a record or a failure, after it is entered."""
        outcome: Record | PerfexpError
        try:
            outcome = driver.run(assignment, self.console)
        except Exception as error:
            outcome = as_perfexp_error(error, RunPaths(assignment.folder).log)
        except KeyboardInterrupt:
            # an early interrupt leaves no record, which is a UserError
            with suppress(UserError), interrupts.held():
                self._enter(assignment, Record.load(assignment.folder))
            raise
        self._ended(assignment, outcome)
        return outcome

    def measure_composed(self) -> None:
        """Measure the runs of a fully composed sweep, or print the dry run.

        Runs with several processes take turns, process by process. The others run one after
        another. A campaign's runs are submitted instead.
        """
        waiting, self._waiting = self._waiting, []
        if waiting and self.is_dry:
            is_here = self._campaign is None or not self._campaign.outlives
            dry_run.show(waiting, self.sweep_run, self.console, is_here=is_here)
        elif waiting and self.sweep_run is not None:
            self.sweep_run.plan(waiting)
            if self._campaign is not None:
                self._is_left = self._campaign.outlives  # if an interrupt comes now
                self._is_left = not self._campaign.measure(
                    self.sweep_run, self.console, self._ended
                )
                return
            in_turns = list[Assignment]()
            for assignment in waiting:
                if (assignment.plan.processes or 1) > 1:
                    in_turns.append(assignment)
                else:
                    self._measure(assignment)
            if in_turns:
                driver.measure(in_turns, self.console, self._ended)

    def _ended(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        """Remember the exit code of a run that has ended, and enter its outcome into the sweep."""
        if isinstance(outcome, PerfexpError):
            self.failed(outcome)
        else:
            self.exit_codes += [exit_code(outcome), *([] if assignment.is_sent else [_NOT_SENT])]
        self._enter(assignment, outcome)

    def _assignment(self, plain: dict[str, Any]) -> Assignment:
        """Return the assignment for a plan: its folder, its name, and its place in the sweep.

        Args:
            plain: plan as plain data.

        Raises:
            UserError: a folder is a link, or the plan has wrong types.
        """
        plan, sweep_run = config.typed(plain), self.sweep_run
        parts = (plan.model_name, plan.algorithm_name, plan.mode.name)
        # a SLURM job of a sweep: folder and name were planned when it was submitted
        if self.element is not None:
            name, folder = self.element.child.name, self.element.folder
            refuse_link(folder)
            self.element.wait_for_folder()
            return Assignment(
                plan=plan, plain=plain, folder=folder, name=name, sweep=self.element.membership
            )
        # a single run
        if sweep_run is None:
            name = naming.run_name(parts, {})
            folder = self._free(plan, plain, naming.run_folder(plan))
            for candidate in (folder, folder.parent) if plan.output_dir is None else ():
                refuse_link(candidate)
            return Assignment(
                plan=plan, plain=plain, folder=folder, name=name, overwrites=self.overwrites
            )
        number, axes = self._place(sweep_run)
        folder = self._free(
            plan, plain, naming.child_folder(plan, sweep_run.paths.root, number, axes)
        )
        for candidate in (folder, folder.parent) if plan.stage else (folder,):
            refuse_link(candidate)
        return Assignment(
            plan=plan,
            plain=plain,
            folder=folder,
            name=naming.run_name(parts, as_typed(axes)),
            sweep=sweep_run.membership(number, as_typed(axes), folder),
            begun=sweep_run.announce,
            whole=sweep_run.whole,
            number=number + 1,
            overwrites=self.overwrites,
        )

    def _free(self, plan: config.Plan, plain: dict[str, Any], folder: Path) -> Path:
        """Return the run's folder.

        A run with a stage gets the first numbered folder that no other plan and no other run uses.

        Args:
            folder: folder without a number.
        """
        if not plan.stage or (plan.output_dir and self.sweep_run is None):
            return folder
        free = next(
            path
            for path in naming.numbered(folder)
            if path not in self._taken
            and (self.overwrites or not holds_other_plan(RunPaths(path), plain))
        )
        self._taken.add(free)
        return free

    def _place(self, sweep_run: SweepRun) -> tuple[int, dict[str, str]]:
        """Return the run's number in the sweep, and its axis values by key."""
        settings = HydraConfig.get()
        values = values_of(_overrides(settings))
        return int(settings.job.num), {axis: values.get(axis, "") for axis in sweep_run.axes}

    def _join(self, composed: DictConfig) -> None:
        """Join this run to its sweep; the first run starts the sweep.

        Raises:
            UserError: the sweep cannot start.
        """
        if self.sweep_run is None:
            self._is_refused = True
            settings = HydraConfig.get()
            axes = axes_of(_swept(self.arguments, settings))
            jobs = math.prod(count or 0 for count in axes.values()) if _is_basic(settings) else 0
            written = Path(settings.sweep.dir)
            folder = _sweep_folder(written, composed.output_dir, axes)
            if not (_is_basic(settings) or self.overwrites) and SweepPaths(folder).summary.exists():
                raise UserError(
                    f"{folder} has a study, which can't go on: choose another output_dir, or "
                    "--overwrite."
                )
            sweep_run = SweepRun(
                folder=folder,
                command=self.arguments,
                axes=axes,
                jobs=jobs or None,
                console=self.console,
                multirun=plan_file.hide_credentials(_multirun(written)),
            )
            if not self.is_dry:
                sweep_run.begin()
            if jobs > _MANY and not self.is_dry:
                self.console.note(f"{jobs} runs are composed before the first one is measured")
            self.sweep_run = sweep_run
            self._is_refused = False

    def _enter(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        """Add a run's outcome to the JSON results and to the sweep, as far as there are any."""
        if self._results is not None:
            failure = {"name": assignment.name, "status": "failed", "error": str(outcome)}
            self._results.append(
                json_results.of_run(Analysis.of(outcome), assignment.folder)
                if isinstance(outcome, Record)
                else failure
            )
        if self.sweep_run is not None and assignment.sweep is not None:
            self.sweep_run.ended(assignment.sweep, assignment.name, assignment.folder, outcome)


def _overrides(settings: HydraConf) -> list[str]:
    """Return a run's overrides as typed.

    Interpolations stay unresolved, because they may hold credentials. In a sweep Hydra puts a
    backslash before the colon of `hf:bert`, by which a resumed run would not find the model.
    """
    texts = map(str, OmegaConf.to_container(settings.overrides.task, resolve=False) or ())
    return [text if {"'", '"'} & set(text) else text.replace("\\:", ":") for text in texts]


def _swept(arguments: Sequence[str], settings: HydraConf) -> list[str]:
    """Return the sweep overrides: typed overrides, then those from configuration files.

    A typed key wins over the same key in a file.
    """
    typed = set(map(key_of, arguments))
    params = dict(settings.sweeper.get("params") or {})
    return [*arguments, *(f"{key}={value}" for key, value in params.items() if key not in typed)]


def _is_basic(settings: HydraConf) -> bool:
    """Return whether Hydra's own sweeper lists the runs.

    Any other sweeper chooses each run by the figures of earlier runs.
    """
    return str(settings.sweeper["_target_"]).endswith(".BasicSweeper")


def _multirun(written: Path) -> bytes:
    """Return the sweep's configuration as YAML, which is stored with the sweep.

    Only Hydra's own sweeper writes the file; otherwise, dump the current configuration.

    Args:
        written: Hydra's folder of the sweep.
    """
    file = written / "multirun.yaml"
    if file.is_file():
        return file.read_bytes()
    return OmegaConf.to_yaml({"hydra": HydraConfig.get()}).encode()


def _objective(record: Record, direction: Any) -> float | list[float]:
    """Return the figures to optimize, one for each direction.

    For "minimize" this is the call time in seconds, for "maximize" the rate in samples/s. Several
    points give their geometric mean.

    Raises:
        PerfexpError: a figure is missing.
    """
    if not isinstance(direction, Sequence) or isinstance(direction, str):
        return _figure(record, is_rate=str(direction).endswith("maximize"))
    return [_figure(record, is_rate=str(goal).endswith("maximize")) for goal in direction]


def _figure(record: Record, *, is_rate: bool) -> float:
    """Return the geometric mean of all points' samples/s, or seconds per call.

    An optimizing sweeper minimizes or maximizes it.

    Raises:
        PerfexpError: a point has no figure, or the run failed.
    """
    timed = rows(record)
    figures = [row.samples_per_second if is_rate else row.time and row.time.median for row in timed]
    values = [figure.value for figure in figures if figure]
    if not values or len(values) < len(figures) or exit_code(record):
        raise PerfexpError(
            f"{record.name}: no figure to optimize, for not every point was measured."
        )
    return geometric_mean(values)


def _sweep_folder(written: Path, output_dir: str | None, axes: Iterable[str]) -> Path:
    """Return the folder for the sweep's own files.

    A configuration file's `hydra.sweep.dir` comes first, then `output_dir`, then the default name.

    Args:
        written: Hydra's folder of the sweep; a temporary one if no file sets it.
    """
    if not written.name.startswith(SCRATCH):
        return written
    if output_dir:
        return Path(output_dir)
    return naming.sweep_folder(axes)
