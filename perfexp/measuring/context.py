"""Context: what the passes over a point share and may use.

The worker's workbench builds it once for all points, as a `Procedure`. Passes get it as `context`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from perfexp.convolution import AppliedAlgorithm
from perfexp.cost import Work
from perfexp.data import Batches, Data
from perfexp.data.synthetic import Rotating
from perfexp.devices import Cache, Device
from perfexp.errors import Unsupported, UserError
from perfexp.host import host_turns
from perfexp.measuring import verdicts
from perfexp.measuring.modes import Mode, Step, graphed
from perfexp.measuring.probes import Probe
from perfexp.measuring.probes.energy import EnergyProcedure
from perfexp.measuring.ranks import ProcessGroup
from perfexp.measuring.times import Times
from perfexp.models import Session
from perfexp.records.record import Key, Metric, Point
from perfexp.records.sizes import Size
from perfexp.timing import collecting
from perfexp.timing.stopping import StoppingRule

#: Seed distance between the shuffles of two epochs: no two runs with small seeds share an order.
_SEEDS_PER_EPOCH = 1_000_003


@dataclass(kw_only=True)
class Context:
    """What a pass may use: the model, the device, the data and the settings of a run.

    Attributes:
        session: the loaded model.
        modes: kind of call by phase.
        stopping: rule that ends each series.
        algorithm: algorithm applied to the model; None for torch's own choice.
        attention: attention backend applied to the model, or a record of torch's choice.
        percentiles: latency percentiles to report, in percent.
        probes: the user's probes by name.
        epochs: full passes over the training data; None if the stopping rule sets the step count.
        cache: state of the device's caches at the start of a call.
        graph: whether calls are captured and launched as a CUDA graph (execution.cuda_graph).
        takes_call_times: whether latency, device time and phases are measured in addition to the
            rate (probes.call_times).
        reads_load: whether clock and power are read while the device works (probes.loaded_clock).
        counts_work: whether a call's MACs, FLOPs and bytes are counted (probes.work).
        checks_outputs: whether outputs are compared with plain fp32 outputs (probes.correctness).
        peaks: data-sheet FLOP/s by data type; None for a device without a data sheet.
        energy: measures call energy (probes.energy), or None.
        anchors: (size, batch size) pairs that also get the extra passes: CUDA-graph time, and
            energy with the device kept busy. None means every point.
        ceilings: highest rates that the device reached (probes.ceilings), or None.
        seed: seed for data and shuffling.
        group: the process group of all ranks; the current rank measures.
        compares_alone: whether all ranks together are compared with a single rank (probes.scaling).
        checkpoint: returns the path of a training checkpoint, given its name (e.g. `best`); None
            to write none.
        trained_weights: weights file to measure inference with; None for the loaded weights.
        memory_trace: traced peak of a point in bytes, or the largest batch for a memory size; None
            if not needed.
        turn: context that keeps a sweep's other runs off the host.
        progress: called with a status line between timed blocks.
        report: called after each epoch with a status line and the epoch's point.
    """

    session: Session
    device: Device
    data: Data
    modes: dict[str, Mode]
    stopping: StoppingRule
    algorithm: AppliedAlgorithm | None = None
    attention: AppliedAlgorithm | None = None
    percentiles: Sequence[float] = (50.0, 95.0, 99.0)
    probes: dict[str, Probe] = field(default_factory=dict)
    epochs: int | None = None
    cache: Cache = Cache.warm
    graph: bool = False
    takes_call_times: bool = True
    reads_load: bool = True
    counts_work: bool = False
    checks_outputs: bool = False
    peaks: Mapping[str, float | None] | None = field(default_factory=dict)
    energy: EnergyProcedure | None = None
    anchors: Collection[tuple[Size, int]] | None = None
    ceilings: Mapping[str, float] | None = None
    seed: int = 0
    group: ProcessGroup = field(default_factory=ProcessGroup)
    compares_alone: bool = False
    checkpoint: Callable[[str], Path] | None = None
    trained_weights: Path | None = None
    memory_trace: Callable[..., Any] | None = None
    turn: host_turns.Turn = host_turns.free
    progress: Callable[[str], None] = lambda _: None
    report: Callable[[str, Point], None] = lambda _, __: None

    def __post_init__(self) -> None:
        """Build the timing of calls from the settings."""
        self.times = Times(
            device=self.device,
            stopping=self.stopping,
            percentiles=self.percentiles,
            cache=self.cache,
            progress=self.progress,
            takes_call_times=self.takes_call_times,
            reads_load=self.reads_load,
        )

    def is_anchor(self, key: Key) -> bool:
        """Return whether a point gets the extra passes; a large sweep has three such points."""
        return self.anchors is None or (key.input_size, key.batch_size) in self.anchors

    def run_optional(
        self, point: Point, metric: str, action: Callable[[], None], *, together: bool = False
    ) -> None:
        """Run a step after the timing; if it fails, record its metric as missing.

        Args:
            metric: metric that is missing if the step fails, for example `algorithm/proof`.
            action: the step, which adds its own metrics to the point.
            together: whether all ranks run the step. A failure then leaves the ranks out of step,
                so it is raised.

        Raises:
            UserError: the plan is wrong.
            Exception: the step's own error, if the device is lost or ranks are out of step.
        """
        self.progress(metric.rpartition("/")[2])
        try:
            without_exit(action)
        except Exception as error:
            # a wrong plan affects all points; on a lost device or with ranks out of step nothing
            # can follow
            is_out_of_step = together and self.group.size > 1 and not isinstance(error, Unsupported)
            if isinstance(error, UserError) or is_out_of_step or self.device.is_lost():
                raise
            _, text = verdicts.verdict(error, self.device)
            point.metrics.append(Metric.of(metric, None, reason=text))

    def run_for_algorithm(
        self,
        point: Point,
        figure: str,
        action: Callable[[AppliedAlgorithm], None],
        *,
        together: bool = False,
    ) -> None:
        """Run an optional step for the applied algorithm and for the attention backend.

        Torch's own choices are left out. The metric that is missing after a failure is, for
        example, `algorithm/proof`.

        Args:
            figure: last part of that metric's name.
            action: the step, given what is applied.
            together: see `run_optional`.
        """
        for applied in self.applied:
            if applied.is_forced:
                self.run_optional(
                    point, f"{applied.group}/{figure}", partial(action, applied), together=together
                )

    @contextmanager
    def step(self, key: Key) -> Iterator[tuple[Step, Batches]]:
        """Yield a point's call and its batches, ready for the first call, on all ranks.

        The loaded weights are restored and the memory peak is reset before.
        """
        self.group.open(key)
        for applied in self.applied:
            applied.begin_point()
        self.session.reset()
        if self.trained_weights is not None and key.phase == "inference":
            self.session.adopt(self.trained_weights)
        self.device.reset_peak_memory()
        mode = self.modes[key.phase]
        with self._batches(key, training=key.phase == "train") as batches:
            self.progress("first call")
            step = mode.prepare(session=self.session, batches=batches, batch_size=key.batch_size)
            with step.active():
                yield self.group.joined(step), batches
        self.group.close()

    @contextmanager
    def _batches(self, key: Key, *, training: bool, epoch: int = 0) -> Iterator[Batches]:
        """Open a point's batches, in the order of an epoch; with cache=rotate, inputs change."""
        # synthetic inputs stay the same: a graph may have captured them
        seed = self.seed + (_SEEDS_PER_EPOCH * epoch if self.data.labelled else 0)
        opened = self.data.open(
            session=self.session,
            input_size=key.input_size,
            batch_size=key.batch_size,
            training=training,
            seed=seed,
        )
        with opened as batches:
            rotate = self.cache is Cache.rotate and batches.constant
            yield Rotating(batches, self.session, self.device.cache_bytes) if rotate else batches

    def first_call(self, step: Step, batches: Batches) -> float | None:
        """Make a point's first call, outside all statistics: it chooses kernels and fills caches.

        Returns:
            The loss of the first training step; None for inference.
        """
        self.group.first()
        self.first_forward(batches)
        step.call()
        self.device.synchronize()
        if self.attention is not None:
            self.attention.report()  # the backends are settled for further calls
        if not step.trains:
            return None
        return self.session.number(step.state.loss)

    @property
    def applied(self) -> list[AppliedAlgorithm]:
        """Return what is applied to the model: an algorithm, an attention backend, both or none."""
        return [applied for applied in (self.algorithm, self.attention) if applied is not None]

    def first_forward(self, batches: Batches) -> None:
        """Make a point's first forward pass, in which algorithms choose how to compute layers."""
        self.session.first_forward(batches.next())
        for applied in self.applied:
            applied.begin_call()

    def capture(self, step: Step, batches: Batches) -> collecting.Capture:
        """Return a function that captures the call as a CUDA graph and returns the graph's call."""
        return lambda: graphed(step, self.session, constant=batches.constant).call

    def steps_per_epoch(self, batches: Batches) -> int | None:
        """Return the steps in which all ranks together see the data once; None for endless data."""
        if batches.per_epoch is None:
            return None
        return math.ceil(batches.per_epoch / self.group.size)

    @cached_property
    def host_rate(self) -> float | None:
        """Return the FLOP/s of a matrix product on the CPU; None for other devices."""
        if self.device.identifier != "cpu":
            return None
        # imports torch, which a scripted device does not need
        from perfexp.measuring.probes.ceilings import host_flops_per_second

        return host_flops_per_second(self.session.formats.products)

    def work(self, step: Step, batches: Batches) -> Work | None:
        """Count a call's analytic work, in MACs, FLOPs and bytes; None for a scripted model.

        The count uses torch's own convolutions, because an algorithm may multiply in its own way.

        Raises:
            Unsupported: the model can't be traced.
        """
        inputs = batches.next().inputs
        count = partial(self.session.work, inputs, training=step.trains)
        for applied in self.applied:
            if applied.is_forced:
                count = partial(applied.run_baseline, "default", count)
        return count()


def without_exit(action: Callable[[], None]) -> None:
    """Run an action, and turn `sys.exit` in the model's code into an error.

    Raises:
        RuntimeError: the model's code would have ended the process.
    """
    try:
        action()
    except SystemExit as end:
        raise RuntimeError(f"the model's code called sys.exit({end.code!r})") from end
