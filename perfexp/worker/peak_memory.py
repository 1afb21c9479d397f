"""Peak memory of a point, traced with tensors without storage, and the largest batch that fits.

A trace runs the model's code once on the host, with stand-ins for tensors: they have a shape but no
numbers. It adds up what torch's allocator would hold. `perfexp predict` reports it, a search for
the largest batch starts from it, and `sweep.skip_oom=true` skips points by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from operator import ge
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.host.forked import Ended, Forked
from perfexp.models import Execution, Precision, Unwaiting
from perfexp.plan import config
from perfexp.plan.largest_batch import Trial, bracket, next_batch
from perfexp.records import units
from perfexp.records.record import Key, Point, Status

if TYPE_CHECKING:
    from perfexp.cost.allocations import Peak
    from perfexp.cost.operator_calls import OperatorCall
    from perfexp.measuring.probes.workspaces import Workspaces, WorkspaceSizes

#: Workspace that cuBLAS takes per thread from torch's allocator, by major compute capability, and
#: for all others.
_CUBLAS_BYTES, _OTHER_CUBLAS_BYTES = {"9": 32 << 20, "10": 32 << 20}, 8320 << 10
#: Memory that tensors cannot use, taken by a CUDA context with its modules: at least, and for
#: training on an H100. Source: docs/results/largest-batch.json
LEAST_CONTEXT_BYTES, CONTEXT_BYTES = 512 << 20, 768 << 20
#: Limit on traces when searching for the largest batch.
_MOST_TRACES = 12


class MemoryTrace:
    """A plan's model on the host, ready to trace the calls of its points.

    Args:
        plan: plan with the model, the data, the phases and the GPU.
        workspaces: convolution workspaces on the plan's device; None to leave them out.

    Raises:
        UserError: the plan cannot be traced.
    """

    def __init__(self, plan: config.Plan, workspaces: Workspaces | None = None) -> None:
        from perfexp.models.fake import FakeModel  # for tests

        if config.locate(plan.model) is FakeModel:
            raise UserError(
                f"model={plan.model_name} is scripted and has no memory. Choose a torch model."
            )
        for is_set, setting in (
            (plan.execution.compile, f"execution.compile={plan.execution.compile}"),
            (plan.execution.cuda_graph, "execution.cuda_graph=true"),
            (plan.devices > 1, f"gpu.count={plan.devices}"),
            (plan.nodes > 1, f"gpu.nodes={plan.nodes}"),
        ):
            if is_set:
                raise UserError(
                    f"{setting} changes the memory in a way that is not traced: leave it out."
                )
        self._plan, self._data, self._workspaces = plan, config.build(plan.data), workspaces
        #: Name of the GPU and its data sheet, which has the memory and the compute capability.
        self._gpu_name, self._facts = plan.sheet(workspaces.device_name if workspaces else None)
        if self._data.labelled:
            raise UserError(
                "Memory is traced with data=synthetic, whose batches have the same size: leave "
                "data out."
            )
        node = dict(plan.model)
        if "weights" in node:
            node["weights"] = None  # pretrained numbers do not matter
        from perfexp.models.module import adapt  # imports torch

        model = adapt(config.build(node), plan.model_name)
        execution = Execution(channels_last=plan.execution.channels_last)
        self._session: Any = model.open(
            device=CpuDevice(),
            precision=_traceable(plan.precision),
            execution=execution,
            num_classes=None,
            seed=0,
        )

    def peak(self, key: Key, workspaces: Mapping[OperatorCall, int] = MappingProxyType({})) -> Peak:
        """Trace a point's peak memory in its steady state, in a forked process.

        Args:
            workspaces: bytes that each convolution takes while it runs.

        Returns:
            The peak in bytes, by category, and the convolutions in it.

        Raises:
            Unsupported: the model cannot be traced.
        """
        from perfexp.cost import Inconclusive
        from perfexp.cost.trial import MODULE_ERRORS, isolated

        try:
            return isolated(self._trace_calls)(key, workspaces)
        except (Inconclusive, *MODULE_ERRORS) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise Unsupported(
                f"the model can't be followed without its numbers: {reason}"
            ) from error

    def _trace_calls(self, key: Key, workspaces: Mapping[OperatorCall, int]) -> Peak:
        """Prepare the point's call as in the measurement, with stand-ins, and trace it."""
        from perfexp.cost.allocations import (
            INPUTS,
            Allocations,
            by_operators,
            peak_of_calls,
            without_memory,
        )
        from perfexp.cost.tensors import tensors_in

        session = self._session
        mode = config.build(self._mode_node(key.phase))
        is_training = key.phase == "train"
        with ExitStack() as stack:
            stack.enter_context(without_memory(session.module))
            if is_training and isinstance(session, Unwaiting):  # side results are read back
                stack.enter_context(session.without_waits())
            opened = self._data.open(
                session=session,
                input_size=key.input_size,
                batch_size=key.batch_size,
                training=is_training,
                seed=0,
            )
            operator_context = nullcontext() if is_training else by_operators()
            with (
                opened as batches,
                _prepared(mode, session, batches, key) as step,
                operator_context,
            ):
                session.first_forward(batches.next())

                def segments(allocations: Allocations) -> Mapping[str, Callable[[], object]]:
                    """Return the call's phases, after adding the inputs that stay allocated."""
                    # synthetic data has 8 sets of labels for the same inputs
                    held = [batches.next() for _ in range(8)]
                    allocations.add(
                        tensors_in([(batch.inputs, batch.targets) for batch in held]), INPUTS
                    )
                    return dict(step.segments)

                return peak_of_calls(session.module, segments, workspaces=workspaces)

    def _mode_node(self, phase: str) -> dict[str, Any]:
        """Return a phase's configuration with `foreach` set for its optimizer.

        The trace runs on the host, where torch's default is to update one parameter after another.
        On CUDA devices it updates all together, which needs more memory.

        Args:
            phase: `train` or `inference`.
        """
        node: dict[str, Any] = dict(getattr(self._plan.mode, phase))
        if isinstance(node.get("optimizer"), Mapping):
            node["optimizer"] = {"foreach": True, **node["optimizer"]}
        return node

    def needed_bytes(self, key: Key) -> int:
        """Trace a point's peak memory in bytes, with cuBLAS workspaces, without convolutions'.

        Raises:
            Unsupported: the model cannot be traced.
        """
        peak = self.peak(key)
        return peak.total_bytes + self.workspace_bytes(peak)

    def workspace_bytes(self, peak: Peak) -> int:
        """Return the bytes that cuBLAS takes from torch's allocator on the plan's device."""
        if self._plan.device_kind == "cpu":
            return 0
        capability = str(self._facts.compute_capability or "").partition(".")[0]
        return peak.multiplying_threads * _CUBLAS_BYTES.get(capability, _OTHER_CUBLAS_BYTES)

    def with_workspaces(self, key: Key, traced: Peak) -> tuple[Peak, WorkspaceSizes | None]:
        """Trace a peak again with the known convolution workspaces.

        Args:
            traced: the point's peak without them.

        Returns:
            The new peak, and which workspaces are known; None without `workspaces`.
        """
        sizes = self._workspaces.of(traced.convolutions) if self._workspaces else None
        if sizes is None or not any(sizes.sizes.values()):
            return traced, sizes
        return self.peak(key, sizes.sizes), sizes

    def report(self, key: Key) -> dict[str, Any]:
        """Return a point's peak memory by category, and the largest batch that fits the device.

        The peak is given with and without convolution workspaces. All sizes are in bytes. Capacity
        and batch are None if the device's memory is unknown.

        Raises:
            Unsupported: the model cannot be traced.
        """
        traced = self.peak(key)
        workspace = self.workspace_bytes(traced)
        capacity = self._facts.memory_bytes
        gpu: str | None = self._gpu_name
        if self._workspaces and self._workspaces.memory_bytes:
            capacity, gpu = self._workspaces.memory_bytes, self._workspaces.device_name
        peak, sizes = self.with_workspaces(key, traced)
        categories = dict(peak.categories)
        if workspace:
            categories["workspace of cuBLAS"] = workspace
        context = largest = None
        if capacity:
            context, largest = CONTEXT_BYTES, self.largest_batch(key, capacity)
        return {
            "key": msgspec.to_builtins(key),
            "peak_bytes": peak.total_bytes + workspace,
            "peak_without_workspaces_bytes": traced.total_bytes + workspace,
            "workspaces": sizes and sizes.facts(),
            "categories": categories,
            "gpu": gpu,
            "capacity_bytes": capacity,
            "context_bytes": context,
            "largest_batch": largest,
        }

    def largest_batch(self, key: Key, capacity_bytes: int) -> int | None:
        """Return the largest batch that fits by its traced peak; None if not even one sample fits.

        Gaps between allocator blocks are left out. So are convolution workspaces: without room for
        them cuDNN has engines that need less. A larger batch therefore does not fit even by its
        tensors alone.

        Args:
            key: point; the search starts with its batch.
            capacity_bytes: memory of the device.
        """
        limit, trials = capacity_bytes - CONTEXT_BYTES, []
        batch: int | None = key.batch_size
        while batch is not None:
            try:
                peak = self.needed_bytes(msgspec.structs.replace(key, batch_size=batch))
            except Unsupported:  # some models refuse a single sample
                trials.append(Trial(batch, fits=False))
            else:
                trials.append(Trial(batch, peak <= limit, peak))
            batch = next_batch(trials, start=1, capacity_bytes=limit, most=_MOST_TRACES)
        return bracket(trials)[0] or None


def forked_trace(plan: config.Plan) -> Forked:
    """Start a process that traces the plan's memory, before the device starts.

    If the parent process has used autograd on a device, a forked process cannot compute gradients.

    Returns:
        A function of a point's key that returns its peak in bytes. With a memory capacity in bytes
        as second argument it returns the largest batch that fits. It raises `Unsupported` if the
        model cannot be traced, and `Ended` if the process has died.
    """
    traces: list[MemoryTrace] = []

    def answer(key: Key, capacity_bytes: int | None = None) -> int | None:
        """Answer a question in the forked process."""
        if not traces:  # the model is loaded for the first question
            traces.append(MemoryTrace(plan))
        if capacity_bytes is None:
            return traces[0].needed_bytes(key)
        return traces[0].largest_batch(key, capacity_bytes)

    return Forked(answer)


class MemoryGuard:
    """Predicts which points exceed a device's memory, for `sweep.skip_oom=true`.

    A trace takes seconds, so a point is not traced if a larger point has already succeeded.

    Args:
        trace: returns a point's peak in bytes, such as `forked_trace`.
        capacity_bytes: the device's memory.
    """

    def __init__(self, trace: Callable[[Key], int], capacity_bytes: int) -> None:
        self._trace, self._limit = trace, capacity_bytes - LEAST_CONTEXT_BYTES

    def refuse(self, key: Key, results: Iterable[Point]) -> Point | None:
        """Return a result for a point that would run out of memory; None if not, or if unknown.

        Args:
            key: point to measure next.
            results: points with a result.
        """
        if any(point.status is Status.OK and _is_at_least(point.key, key) for point in results):
            return None
        try:
            peak = self._trace(key)
        except (Unsupported, Ended):
            return None
        if peak <= self._limit:
            return None
        sizes = f"{units.format_bytes(peak)} of {units.format_bytes(self._limit)}"
        text = f"not tried: the traced peak needs {sizes} (sweep.skip_oom)"
        return Point(key=key, status=Status.OOM_PREDICTED, error=text)


def _is_at_least(key: Key, other: Key) -> bool:
    """Return whether `key` has no smaller inputs or batch than `other`, in the same phase."""
    same = (key.phase, key.precision) == (other.phase, other.precision)
    return (
        same
        and key.batch_size >= other.batch_size
        and all(map(ge, key.input_size, other.input_size))
    )


@contextmanager
def _prepared(mode: Any, session: Any, batches: Any, key: Key) -> Iterator[Any]:
    """Yield the mode's step for a point, which is active inside the `with` block."""
    step = mode.prepare(session=session, batches=batches, batch_size=key.batch_size)
    with step.active():
        yield step


def _traceable(precision: Precision) -> Precision:
    """Return a precision that needs the same memory, and can be traced on the host without values.

    Autocast to float16 becomes bfloat16, since loss scaling compares a value with infinity. TF32
    becomes fp32, which has the same size.
    """
    if precision.autocast == "float16":
        return Precision(name="amp_bf16", storage=precision.storage, autocast="bfloat16")
    if precision.tf32:
        return Precision(name="fp32")
    return precision
