"""Answers without measuring: this machine's equipment, a plan's algorithms, its peak memory.

The commands doctor, `list algorithms` and predict need torch or the device to answer, which only a
worker may import. They start one with `--what=survey`, `algorithms` or `memory`; the answer is a
JSON event to the parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from perfexp.convolution.default import Default
from perfexp.devices import Device, nvml
from perfexp.errors import DeviceMismatch, Unsupported, UserError
from perfexp.plan import config
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.worker.workbench import Workbench

if TYPE_CHECKING:
    from perfexp.measuring.probes.workspaces import Workspaces


def survey(index: int | None, emit: Events) -> None:
    """Determine this machine's equipment for the doctor, and send each part at once.

    A later part may crash the process. A part that raises an exception is sent as its `error`.

    Args:
        index: CUDA device for the clock test; None for no test.
    """
    for name, determine in _survey_parts(index):
        emit("block", text=name)
        try:
            facts = determine()
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {error}".strip()}
        emit("part", name=name, answer=facts)


def _survey_parts(index: int | None) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each part's name and the function that determines its facts, in order.

    NVML comes first, because it lists other processes: later this process would be among them.
    """
    yield "boards", nvml.all_boards
    yield "torch", partial(_ask_torch, "torch_build")
    yield "torchvision", _torchvision
    yield "cuda", partial(_ask_torch, "cuda_devices")
    yield "mps", partial(_ask_torch, "apple_gpu")
    if index is not None:
        yield "clocks", partial(_ask_torch, "try_clocks", index)
    yield "energy", partial(_ask_torch, "try_energy", index)


def _ask_torch(function: str, *arguments: Any) -> dict[str, Any]:
    """Call a function in `detected_devices`, which imports torch.

    The import is here, so that a broken torch becomes the error of each part that needs it.
    """
    from perfexp.doctor import detected_devices

    facts: dict[str, Any] = getattr(detected_devices, function)(*arguments)
    return facts


def _torchvision() -> dict[str, Any]:
    """Return facts about torchvision, which the doctor compares with torch."""
    from perfexp.models import torchvision_import

    torchvision_import.import_torchvision()
    return torchvision_import.torchvision_facts()


def algorithms(plan: config.Plan, paths: RunPaths, emit: Events) -> dict[str, Any]:
    """Find the algorithms that can compute the convolutions in the plan's first point.

    Nothing is measured. `perfexp list algorithms` asks for it.

    Returns:
        The result of `perfexp.convolution.layer_support.survey`, the device and the settings, as
        JSON values.

    Raises:
        UserError: the model has no layers, or a setting is wrong.
    """
    from perfexp.models.fake import FakeModel  # for tests

    if config.locate(plan.model) is FakeModel:
        raise UserError(
            f"model={plan.model_name} is scripted and has no layers. Choose a torch model."
        )
    config.build(plan.algorithm)  # raises if its settings are wrong
    keys, settings = plan.timed_keys(), plan.algorithm
    key, bench = keys[0], Workbench(plan, paths, emit)
    bench.find_device()
    bench.open_data()
    # on a CPU, nothing is computed that could disturb another measurement
    with bench.reserved(bench.device) if bench.device.asynchronous else nullcontext():
        bench.device.start()
        bench.load_model()
        from perfexp.convolution.layer_support import survey  # imports torch

        support = survey(
            bench.session,
            key,
            backend=settings.get("backend"),
            workspace_bytes=settings.get("workspace_bytes"),
            backward={
                name: settings[name]
                for name in ("backward_data", "backward_filter")
                if settings.get(name)
            },
            progress=emit.block,
        )
    session = bench.session.facts()
    return {
        "model": plan.model_name,
        "device": {**bench.device.facts(), "kind": bench.device.kind, "name": bench.device.name},
        "phase": key.phase,
        "input_size": key.input_size,
        "batch_size": key.batch_size,
        "inputs": len({(key.input_size, key.batch_size) for key in keys}),
        "precision": session["precision"],
        "session": session,
        "doubts": msgspec.to_builtins(bench.session.doubts()),
        **support,
    }


def memory(plan: config.Plan, paths: RunPaths, emit: Events) -> dict[str, Any]:
    """Trace the peak memory for the plan's points without a device; `perfexp predict` asks for it.

    If the plan's device is present, unknown convolution workspaces are measured on it, and it
    stays reserved from then on.

    Returns:
        The model's name, and for each point a `MemoryTrace.report`, or the reason why it cannot be
        traced.
    """
    from perfexp.worker.peak_memory import MemoryTrace  # imports torch's stand-ins

    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        trace = MemoryTrace(plan, workspaces(Workbench(plan, paths, emit), stack))
        for key in plan.first_keys():
            emit.block(f"tracing {key}")
            try:
                points.append(trace.report(key))
            except Unsupported as error:
                points.append({"key": msgspec.to_builtins(key), "reason": str(error)})
    return {"model": plan.model_name, "points": points}


def workspaces(bench: Workbench, stack: ExitStack) -> Workspaces | None:
    """Return the convolution workspaces for the plan's CUDA device, present or not.

    None for other devices, for which they are unknown, and for non-default algorithms.

    Args:
        bench: workbench without a device.
        stack: the device is reserved in it from the first measurement on.
    """
    from perfexp.measuring.probes.workspaces import Workspaces  # imports torch

    plan = bench.plan
    device: Device | None = None
    if not isinstance(config.build(plan.algorithm), Default):
        return None
    with suppress(DeviceMismatch):  # the plan's GPU is not in this machine
        device = config.build(plan.gpu)
    if device is not None and device.kind != "cuda":
        return None

    def start() -> None:
        assert device is not None
        stack.enter_context(bench.reserved(device))
        device.start()

    return Workspaces(
        precision=plan.precision,
        execution=plan.execution,
        device=device,
        match=plan.gpu.get("match"),
        start=start,
        progress=bench.emit.block,
    )
