"""Main: the Hydra application. Composes plans, has each measured, and ends with an exit code."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from perfexp import __version__, config, interrupts, naming, usage, validation
from perfexp.errors import PerfexpError, UserError
from perfexp.explain import FOREIGN_ERRORS, user_error
from perfexp.overrides import axes_of, flag_values, parsed, refuse_targets, refuse_words, values_of
from perfexp.paths import disk_error
from perfexp.resume import CONFIG_DIR, MULTIRUN, joined_flags, with_resumed

if TYPE_CHECKING:
    from hydra.conf import HydraConf

    from perfexp.campaign import Campaign
    from perfexp.job import Assignment
    from perfexp.record import Record
    from perfexp.sinks.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Run what a command line of Hydra overrides asks for.

    Args:
        argv: command line without the program's name; the process's own if not given.

    Returns:
        0 if all was measured, 1 if a measurement or a profile failed, 2 if the user has something to mend, 130 if
        interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if usage.is_asked_for(arguments):
        print(usage.text([config.conf_dir(), *map(Path, flag_values(arguments, *CONFIG_DIR))]))
        return 0
    if arguments == ["--version"]:
        print(f"perfexp {__version__}")
        return 0
    application = _Application()
    with interrupts.handled():
        try:
            _measure(application, arguments)
        except KeyboardInterrupt:
            application.interrupted()
        finally:
            application.close()
    return max(application.exit_codes, default=0)


def _measure(application: _Application, arguments: list[str]) -> None:
    try:
        arguments = joined_flags(arguments)
        refuse_words(arguments)
        application.arguments = arguments = with_resumed(arguments)
        _hand_over(arguments, application)
        application.measure_rounds()
    except PerfexpError as error:
        application.failed(error)
    except FOREIGN_ERRORS as error:
        application.failed(user_error(error))
    except OSError as error:
        application.failed(disk_error(error))
    except MemoryError as error:
        application.failed(PerfexpError(f"The memory is not enough. {error}".rstrip()))


def compose(arguments: Sequence[str]) -> dict[str, Any]:
    """The plan that a command line of overrides makes, as plain data; nothing is measured.

    Args:
        arguments: overrides of one run, and `--config-dir=DIR`.

    Raises:
        UserError: what a run would refuse before it begins.
    """
    found: list[tuple[DictConfig, dict[str, Any]]] = []

    def keep(composed: DictConfig) -> None:
        found.append((composed, dict(HydraConfig.get().runtime.choices)))

    try:
        _hand_over([*arguments, "hydra.mode=RUN"], keep)  # a file of the experiment's may ask for a sweep
        plain = config.plan_of(*found[0], arguments)
    except FOREIGN_ERRORS as error:
        raise user_error(error) from error
    validation.check(config.typed(plain))
    return plain


def _hand_over(arguments: Sequence[str], function: Callable[[DictConfig], None]) -> None:
    """Have Hydra call a function with what it composes, once for each job."""
    refuse_targets(arguments)
    with _hydra_arguments(arguments):
        config.register()
        hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(function)()


class _Application:
    """The function that Hydra calls for each job; a job that fails never ends the sweep."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self._waiting: list[Assignment] = []
        self.exit_codes: list[int] = []
        self.campaign: Campaign | None = None
        self._console: Console | None = None
        self._folder: Path | None = None

    @property
    def console(self) -> Console:
        """Where everything is reported; plain until a plan says otherwise."""
        if self._console is None:
            from perfexp.sinks.console import Console

            self._console = Console()
        return self._console

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
        try:
            if self.campaign is not None:
                self.campaign.close()
        except KeyboardInterrupt:
            self.interrupted()

    def __call__(self, composed: DictConfig) -> None:
        """Measure one composition.

        Args:
            composed: by Hydra, without its own node.
        """
        from perfexp import job
        from perfexp.record import Record
        from perfexp.sinks.console import Console

        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN and not str(settings.launcher["_target_"]).endswith("BasicLauncher"):
            raise UserError(
                "Runs of a sweep are measured one after the other, on this machine: leave hydra/launcher at basic."
            )
        command = [f"--config-dir={folder}" for folder in flag_values(self.arguments, *CONFIG_DIR)]
        command += list(settings.overrides.task)
        self._console = Console(quiet=composed.quiet)
        try:
            if settings.mode == RunMode.MULTIRUN:
                self._join()
            plain = config.plan_of(composed, settings.runtime.choices, command)
            assignment = self._assignment(plain)
            self._folder = assignment.folder
            if self.campaign is not None:
                self.campaign.announce(assignment.plan)
        except PerfexpError as error:
            self.failed(error)
            if self.campaign is not None:
                self.campaign.refused(*self._place(self.campaign), error)
            return
        if settings.mode == RunMode.MULTIRUN and assignment.plan.replicate > 1:
            self._waiting.append(assignment)
            return
        try:
            record = job.run(assignment, self.console)
        except PerfexpError as error:
            self._ended(assignment, error)
        except OSError as error:
            self._ended(assignment, disk_error(error))
        except KeyboardInterrupt:
            with suppress(UserError), interrupts.held():  # interrupted so early that there is no record
                self._enter(assignment, Record.load(assignment.folder))
            raise
        else:
            self._ended(assignment, record)

    def measure_rounds(self) -> None:
        """Measure the runs of a sweep that have several replicates, which are interleaved."""
        if self._waiting:
            from perfexp import rounds

            rounds.measure(self._waiting, self.console, self._ended)

    def _ended(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        """Remember how a run ended, and enter it in the sweep's summary."""
        if isinstance(outcome, PerfexpError):
            self.failed(outcome)
        else:
            from perfexp import job

            self.exit_codes.append(job.exit_code(outcome))
        self._enter(assignment, outcome)

    def _assignment(self, plain: dict[str, Any]) -> Assignment:
        """What this job has to do, and where its files go."""
        from perfexp.job import Assignment

        plan, campaign = config.typed(plain), self.campaign
        parts = (plan.model_name, plan.algorithm_name, plan.mode.name)
        if campaign is None:
            name = naming.run_name(parts, {})
            return Assignment(plan=plan, plain=plain, folder=naming.run_folder(plan, name), name=name)
        number, axes = self._place(campaign)
        folder = naming.child_folder(plan, campaign.paths.root, number, axes)
        return Assignment(
            plan=plan,
            plain=plain,
            folder=folder,
            name=naming.run_name(parts, axes),
            sweep=campaign.membership(number, axes, folder),
        )

    def _place(self, campaign: Campaign) -> tuple[int, dict[str, str]]:
        """The number of this job in its sweep, and its values of what varies."""
        settings = HydraConfig.get()
        values = values_of(list(settings.overrides.task))
        return int(settings.job.num), {axis: values.get(axis, "") for axis in campaign.axes}

    def _join(self) -> None:
        """Take part in the sweep that this job belongs to; its first job begins it."""
        if self.campaign is None:
            from perfexp.campaign import Campaign

            settings = HydraConfig.get()
            given = {override.key_or_group for override in parsed(self.arguments)}
            params = {key: value for key, value in _sweeper_params(settings).items() if key not in given}
            axes = axes_of([*self.arguments, *(f"{key}={value}" for key, value in params.items())])
            basic = str(settings.sweeper["_target_"]).endswith("BasicSweeper")
            jobs = math.prod(axes.values()) if basic and all(axes.values()) else None
            folder = Path(settings.sweep.dir)
            self.campaign = Campaign(
                folder=folder, command=self.arguments, axes=list(axes), jobs=jobs, console=self.console
            )

    def _enter(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        if self.campaign is not None and assignment.sweep is not None:
            self.campaign.ended(assignment.sweep, assignment.name, assignment.folder, outcome)


def _sweeper_params(settings: HydraConf) -> dict[str, Any]:
    """Axes that a configuration file gives to the sweeper."""
    return dict(settings.sweeper.get("params") or {})


@contextmanager
def _hydra_arguments(arguments: Sequence[str]) -> Iterator[None]:
    """Hand a command line to Hydra, which reads sys.argv, and have it raise its errors instead of printing them."""
    # argparse takes flags before or after all overrides, but not between them
    ordered = sorted(arguments, key=lambda text: text not in MULTIRUN and not re.match("--[^=]+=", text))
    saved, sys.argv = sys.argv, ["perfexp", *ordered]
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = saved
        if full_error is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
