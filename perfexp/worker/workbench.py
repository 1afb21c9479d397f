"""Workbench: a worker's device, data, model and measuring procedure, built from its plan.

It also keeps other processes off the device while the worker measures, and writes the run's
environment file: facts about host, job and device, and diagnostics about them.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.devices import Device, lock
from perfexp.devices.cpu import CpuDevice
from perfexp.doctor import environment
from perfexp.errors import PerfexpError, UserError, line_of
from perfexp.host import host_turns
from perfexp.host.cache import cache_folder
from perfexp.host.files import disk_error, write_atomically
from perfexp.models import Attention
from perfexp.plan import config, plan_fields, prerequisites
from perfexp.records import diagnostics, units
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.messages import Events
from perfexp.records.paths import FINAL_WEIGHTS, RunPaths, refuse_link
from perfexp.records.record import Point, read_points
from perfexp.statistics import distributions

if TYPE_CHECKING:
    from perfexp.convolution import AppliedAlgorithm
    from perfexp.data import Data
    from perfexp.devices.meters import DeviceMeters
    from perfexp.measuring.probes.energy import EnergyProcedure
    from perfexp.measuring.procedure import Procedure
    from perfexp.models import Session

#: Interval between reports on which process holds the device.
_REPORT_SECONDS = 60.0


class Workbench:
    """Everything that a worker measures with.

    `opened` takes all steps in order, for a worker with one device. A cold start times each step by
    itself, and ranks have the group's steps in between.

    Args:
        paths: files of the run.
        emit: sends progress to the parent process.
        live: returns the caller's own model in the caller's process; None to build the plan's
            model.

    Attributes:
        device: set by `find_device`.
        data: source of the inputs; set by `open_data`.
        session: the model, loaded on the device; set by `load_model`.
        turn: context of a turn on the host, which runs of a sweep share; see `sharing_host`.
    """

    device: Device
    data: Data
    session: Session

    def __init__(
        self,
        plan: config.Plan,
        paths: RunPaths,
        emit: Events,
        live: Callable[[], Any] | None = None,
    ) -> None:
        self.plan, self.paths, self.emit, self._live = plan, paths, emit, live
        self.turn: host_turns.Turn = host_turns.free

    @contextmanager
    def sharing_host(self) -> Iterator[None]:
        """Take turns with a sweep's other runs inside the `with` block, if the plan sets that.

        Runs on several devices of one host would otherwise disturb each other's timing on the CPU.
        """
        if self.plan.host_sharing is not plan_fields.HostSharing.turns:
            yield
            return
        with host_turns.joined(waiting=lambda text: self.emit.block(text, patient=True)) as turn:
            self.turn = turn
            yield

    @contextmanager
    def opened(self, *, profiled: bool = False) -> Iterator[Procedure]:
        """Load the model on a reserved device and yield the procedure that measures it.

        Args:
            profiled: whether a profiler is attached. It changes the device's facts, so that
                existing facts are compared but not written again.
        """
        with ExitStack() as stack:
            stack.enter_context(self.sharing_host())
            self.emit.block("loading")
            self.find_device()
            self.open_data()
            trace = stack.enter_context(self._memory_trace())
            self.check()
            stack.enter_context(self.reserved(self.device))
            # only once reserved: even an idle context disturbs other measurements on the device
            self.device.start()
            self.load_model()
            self._check_checkpoint()
            if profiled and self.paths.environment.exists():
                self.require_same_environment()
            else:
                self.write_environment()
            procedure = stack.enter_context(self.procedure())
            procedure.memory_trace = trace
            if self.plan.probes.energy:
                procedure.energy = self.energy_of(self.device.meters())
            yield procedure

    def _memory_trace(self) -> AbstractContextManager[Callable[..., Any] | None]:
        """Return a process that traces peak memory, if the plan needs one; see `forked_trace`."""
        if not self.plan.traces_memory:
            return nullcontext()
        # imports torch's stand-ins, which other plans do not need
        from perfexp.worker.peak_memory import forked_trace

        return forked_trace(self.plan)

    def find_device(self) -> None:
        """Build the plan's device without starting it.

        Raises:
            UserError: the plan names a GPU by its index, and there is none.
        """
        self.device = config.build(self.plan.gpu)
        index = self.plan.gpu.get("index")
        if index and self.plan.ranks == 1 and self.device.kind == "cpu":
            raise UserError(
                f"gpu.index={index} does not exist: torch finds no GPU. Leave it out to measure "
                "the CPU."
            )

    def check(self) -> None:
        """Check what can be checked without the device, before the worker waits for it.

        The model is opened on the host only if the algorithm must be able to compute every layer.

        Raises:
            UserError: a setting is wrong.
        """
        plan = self.plan
        prerequisites.check_kind(plan, self.device.kind)
        algorithm = config.build(plan.algorithm)
        for node in (*(getattr(plan.mode, phase) for phase in plan.phases), *plan.probe.values()):
            config.build(node)
        if (train := plan.mode.train) is not None and train.get("resume_from"):
            from perfexp.models.trainer import read_checkpoint  # imports torch

            read_checkpoint(Path(train["resume_from"]).expanduser())
        if self._live is None and self.device.identifier and hasattr(algorithm, "check"):
            algorithm.check(partial(self._open_model, CpuDevice()), self.device.identifier)

    def open_data(self) -> None:
        """Build the plan's input source."""
        self.data = config.build(self.plan.data)

    @contextmanager
    def reserved(self, device: Device) -> Iterator[None]:
        """Keep this user's other perfexp processes off the device inside the `with` block.

        Raises:
            UserError: another process holds the device, and the plan does not wait for it.
        """
        wait, purpose = self.plan.device_lock is plan_fields.DeviceLock.wait, str(self.paths.root)
        with ExitStack() as stack:
            with ExitStack() as reporting:  # ends as soon as the lock is taken

                def report(owner: str) -> None:
                    """Begin to report the owner of the lock; called if there is one."""
                    reporting.enter_context(self._reporting_wait(owner))

                stack.enter_context(
                    lock.held(device.lock_name, wait=wait, purpose=purpose, waiting=report)
                )
            self.emit.block("loading")
            device.settle()
            yield

    @contextmanager
    def _reporting_wait(self, owner: str) -> Iterator[None]:
        """Report every minute which process holds the device, in a thread: a silent job looks hung.

        Args:
            owner: description of that process.
        """
        acquired = threading.Event()

        def report() -> None:
            for minutes in count():
                duration = f" (for {minutes} min; Ctrl-C stops)" if minutes else ""
                self.emit.block(f"waiting for the device{duration}: {owner}", patient=True)
                if acquired.wait(_REPORT_SECONDS):
                    return

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            acquired.set()
            thread.join()

    def load_model(self) -> None:
        """Load the plan's model on the device."""
        try:
            self.session = self._open_model(self.device)
        except Exception as error:
            error.add_note("while the model was built")
            raise
        if len(self.plan.phases) > 1 or self._live is not None:
            self.session.keep_differentiable()

    def _open_model(self, device: Device) -> Session:
        """Open the plan's model on a device, with as many classes as the data has labels.

        Raises:
            UserError: the data or the model cannot be used.
        """
        from perfexp.data import check  # already imported in a cold start's data lap

        check(self.data)
        model = config.build(self.plan.model) if self._live is None else self._live()
        if "torch" in sys.modules:  # the model may be a user's torch module
            from perfexp.models.module import adapt

            model = adapt(model, self.plan.model_name)
        elif not hasattr(model, "open"):  # a class that was typed as module:name
            model = model()
        session: Session = model.open(
            device=device,
            precision=self.plan.precision,
            execution=self.plan.execution,
            num_classes=self.data.num_classes if self.data.labelled else None,
            seed=self.plan.seed,
        )
        return session

    def _check_checkpoint(self) -> None:
        """Check that a training's checkpoint fits, before its first point begins.

        Raises:
            UserError: the checkpoint does not fit the model or the optimizer.
        """
        train = self.plan.mode.train
        if train is not None and train.get("resume_from"):
            key = next(key for key in self.plan.timed_keys() if key.phase == "train")
            # loads the checkpoint as training would, which raises the error
            config.build(train).updating(self.session, key.batch_size)

    @contextmanager
    def procedure(self) -> Iterator[Procedure]:
        """Yield the measuring procedure, with the plan's algorithm applied to the model."""
        # imports all probes, which a cold start does not need
        from perfexp.measuring.procedure import Procedure

        plan, probes = self.plan, self.plan.probes
        trained_weights = None
        if plan.infers_trained:
            trained_weights = self.trained_weights()
        with (
            config.build(plan.algorithm).applied(self.session) as applied,
            self.attention() as attention,
        ):
            distributions.preload()
            gc.collect()
            gc.freeze()  # the collection before each timed block need not visit what stays loaded
            modes = {phase: config.build(getattr(plan.mode, phase)) for phase in plan.phases}
            yield Procedure(
                session=self.session,
                device=self.device,
                data=self.data,
                modes=modes,
                stopping=plan.stopping_rule,
                algorithm=applied,
                attention=attention,
                percentiles=plan.percentiles,
                probes={name: config.build(node) for name, node in plan.probe.items()},
                epochs=plan.epochs,
                cache=plan.cache,
                graph=plan.execution.cuda_graph,
                takes_call_times=probes.call_times,
                reads_load=probes.loaded_clock,
                counts_work=probes.work,
                checks_outputs=probes.correctness,
                compares_alone=probes.scaling,
                peaks=sheet_peaks(plan, self.device),
                seed=plan.seed,
                turn=self.turn,
                checkpoint=self._checkpoint,
                trained_weights=trained_weights,
                progress=self.emit.block,
                report=self._report_epoch,
            )

    def attention(self) -> AbstractContextManager[AppliedAlgorithm | None]:
        """Return a context that applies the plan's attention backend to the model.

        Raises:
            UserError: the model or the device cannot use it.
        """
        execution = self.plan.execution
        is_auto = execution.attention is Attention.auto
        # `auto` only records, until the report, which backend runs. Of several ranks only the first
        # reports, so the others would never stop recording. A model without torch has no attention
        if is_auto and (self.plan.ranks > 1 or "torch" not in sys.modules):
            return nullcontext()
        from perfexp.convolution import attention  # imports torch

        return attention.applied(self.session, execution)

    def trained_weights(self) -> Path:
        """Return the path of the final weights that the plan's training writes."""
        return self._checkpoint_path(FINAL_WEIGHTS)

    def _report_epoch(self, text: str, point: Point) -> None:
        """Send a finished epoch to the parent, which shows it and logs it while training runs.

        Args:
            text: line for the console.
            point: the training's point; only its last epoch is sent.
        """
        last = msgspec.structs.replace(
            point, series=[], metrics=[], facts={}, doubts=[], epochs=point.epochs[-1:]
        )
        self.emit.block(text, is_result=True, training=msgspec.to_builtins(last))

    def _checkpoint(self, name: str) -> Path:
        """Return a checkpoint path in an existing folder, after adding it to the manifest.

        The manifest lists the run's own files, which `perfexp clean` may delete.

        Args:
            name: kind of checkpoint, for example `best`.
        """
        path = self._checkpoint_path(name)
        path.parent.mkdir(exist_ok=True)
        self.paths.claim(path)
        return path

    def _checkpoint_path(self, name: str) -> Path:
        """Return the path of a kind of checkpoint; raise an error if its folder is a link."""
        path = self.paths.checkpoint(
            self.plan.model_name, self.plan.choices.get("data", "data"), name
        )
        refuse_link(path.parent)
        return path

    def energy_of(self, meters: DeviceMeters) -> EnergyProcedure:
        """Return the plan's energy measurement with these meters, e.g. for all ranks' devices."""
        from perfexp.measuring.probes.energy import EnergyProcedure, rules_for

        target = getattr(config.build(self.plan.stopping), "target", None)
        rules = rules_for(window_seconds=self.plan.probes.energy_seconds, target=target)
        return EnergyProcedure(
            device=self.device, detected=meters, cache=cache_folder("idle"), rules=rules
        )

    def write_environment(self, further: Sequence[Diagnostic] = (), **extra: Any) -> None:
        """Write this process's facts and diagnostics to the environment file.

        Earlier diagnostics stay.

        Args:
            further: diagnostics to add.
            extra: facts to add.

        Raises:
            UserError: the folder has points measured in another environment.
        """
        facts = {**self.facts(), "session": self.session.facts(), **extra}
        diagnostics_here = [
            *self.device.doubts(),
            *self.session.doubts(),
            *self._data_diagnostics(),
            *self._host_diagnostics(facts),
            *further,
        ]
        if self._live is not None:
            facts["in_process"] = True
            diagnostics_here.append(diagnostics.make("in_process"))
        earlier = self._earlier_diagnostics(facts)
        everything = [*earlier, *(item for item in diagnostics_here if item not in earlier)]
        content = json.dumps(
            {"environment": facts, "doubts": msgspec.to_builtins(everything)}, indent=1, default=str
        )
        write_atomically(self.paths.environment, content.encode() + b"\n")

    def _data_diagnostics(self) -> list[Diagnostic]:
        """Return a diagnostic if data files were unusable; otherwise an empty list."""
        problems = list(getattr(self.data, "problems", ()))
        if not problems:
            return []
        files = units.counted(len(problems), "file")
        message = f"left out, since unusable: {files}; the first: {problems[0]}"
        return [
            diagnostics.make(
                "data_incomplete",
                what=message,
                advice="repair or remove the files that details/run.log lists",
            )
        ]

    def _host_diagnostics(self, facts: Mapping[str, Any]) -> list[Diagnostic]:
        """Return diagnostics if other jobs, or other runs of the sweep, use this host."""
        if self.plan.host_sharing is not plan_fields.HostSharing.together:
            return node_diagnostics(facts)
        # the user chose to measure the sweep's runs at the same time
        shared = diagnostics.make(
            "shared_host", others="other runs of the sweep, on its other devices"
        )
        return [shared, *node_diagnostics(facts)]

    def require_same_environment(self) -> None:
        """Check that the folder's points were measured in this environment, if it has points.

        Raises:
            UserError: the environment has changed.
        """
        self._earlier_diagnostics(self.facts())

    def facts(self) -> dict[str, Any]:
        """Return facts about this host, its job and its device, as JSON values."""
        return {**environment.collect(), "device": self.device.facts()}

    def _earlier_diagnostics(self, facts: dict[str, Any]) -> list[Diagnostic]:
        """Return the diagnostics of the folder's earlier points, after comparing the environments.

        They are empty if the folder has no points.

        Args:
            facts: this worker's environment.

        Raises:
            UserError: the points were measured in another environment.
        """
        path = self.paths.environment
        if not path.exists() or not read_points(self.paths.points):
            return []
        before, earlier = environment.load(path)
        differences = environment.differences(before, facts)
        changed = [f"{name}: {old} → {new}" for name, old, new in differences]
        if changed and facts.get("job") and {name for name, _, _ in differences} == {"device.uuid"}:
            # a requeued job may get another GPU in the same node, or of the same kind
            mixed = diagnostics.make(
                "mixed_devices",
                what="devices before and after its job restarted",
                changes=f"{'; '.join(changed)} on {facts.get('host')}",
            )
            return [*earlier, mixed]
        if changed:
            raise UserError(
                f"The points in {self.paths.root} were measured in another environment "
                f"({'; '.join(changed)}). Choose another output_dir: a record holds one "
                "environment."
            )
        return earlier


def sheet_peaks(plan: config.Plan, device: Device) -> Mapping[str, float | None] | None:
    """Return FLOP/s by data type from the device's data sheet; None for a CPU without one.

    It is empty for a GPU without a data sheet.
    """
    if device.kind == "cpu":
        return plan.sheet(None)[1].peak_flops_per_second or None
    return plan.sheet(device.name)[1].peak_flops_per_second or {}


def node_diagnostics(facts: Mapping[str, Any]) -> list[Diagnostic]:
    """Return a diagnostic if other SLURM jobs use this node's other GPUs or CPUs.

    Args:
        facts: environment of a host. `job.others` counts the `gpus` and `cpus` that other jobs
            use there.
    """
    others = (facts.get("job") or {}).get("others") or {}
    if not any(others.values()):
        return []
    used = f"{others['gpus']} GPUs and {others['cpus']} CPUs"
    text = f"other jobs, with {used} of node {facts['job'].get('node', '?')} at the start"
    return [diagnostics.make("shared_host", others=text)]


def report_failure(error: Exception, emit: Events) -> int:
    """Send an event for an error that ends the worker, and log its traceback.

    Returns:
        The worker's exit code: the error's own, or 1 for an error that is not perfexp's.
    """
    if isinstance(error, OSError):  # from writing results
        error = disk_error(error)
    if isinstance(error, PerfexpError):
        emit("refused", message=str(error), exit_code=error.exit_code)
    else:  # from loading the model or opening the device
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error}".strip()
        emit("failed", message=f"{text}{line_of(error)}{where}")
    with suppress(OSError):  # a full disk has no room for a traceback; the event reports it
        traceback.print_exc()
    if not isinstance(error, PerfexpError):
        return 1
    return error.exit_code
