"""Apply a plan: the engines of a run compute a module in the user's own program.

Here a plan is the file from `perfexp export RUN --plan FILE`: the engine for each layer and pass
that a run with `algorithm=fastest` chose, and attention backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from perfexp.convolution import T
from perfexp.convolution.attention import BACKENDS, AttentionBackends
from perfexp.convolution.backends import PassChoice, Support
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CudnnError
from perfexp.convolution.fastest import check_engine
from perfexp.convolution.forced import Forced
from perfexp.convolution.layer import Layer, all_installed
from perfexp.convolution.problem import Problem
from perfexp.convolution.race import software_of
from perfexp.devices import Device
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.cuda import CudaDevice
from perfexp.errors import UserError
from perfexp.models import Attention, tf32
from perfexp.records.algorithm_plan import AlgorithmPlan, read

_REMEDY = "measure here, or pass remeasure=True (--remeasure)"


@dataclass(frozen=True, eq=False)
class _Planned(Support):
    """The engines of a plan for one layer, by input shape and data type; otherwise torch's own.

    Attributes:
        used: names of the layers that got an engine so far, of all layers.
    """

    name: str
    engines: Mapping[tuple[tuple[int, ...], str], Mapping[str, str]]
    used: set[str]

    def candidate(self, pass_type: Pass, problem: Problem) -> PassChoice:
        """Return the plan's engine for one pass, or torch's own if it is missing or impossible."""
        dtype = str(problem.dtype).removeprefix("torch.")
        engine = self.engines.get((problem.shape, dtype), {}).get(pass_type)
        if engine is None:
            return PassChoice()
        try:
            check_engine(problem, pass_type, engine)
        except (CudnnError, KeyError, ValueError):  # a file may contain anything
            return PassChoice()
        self.used.add(self.name)
        return PassChoice(engine=engine)


class Applied:
    """A plan applied to a module until `remove`, or until its `with` block ends.

    It has the methods of an `AppliedAlgorithm` that timing a module against torch needs.

    Attributes:
        used: names of the convolution layers that got an engine of the plan so far; None if the
            plan has more than these layers, or is raced again.

    Args:
        contexts: functions that return contexts; each applies a part of the plan while entered.
    """

    name = "plan"

    def __init__(self, device: Device, contexts: list[Any], used: set[str] | None) -> None:
        self.device, self._contexts, self.used = device, contexts, used
        self._stack = ExitStack()
        self._install()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give the module back its own computation."""
        self._stack.close()

    def baselines(self) -> tuple[str, ...]:
        """Return the baseline: torch's own choices."""
        return ("default",)

    def run_baseline(self, baseline: str, work: Callable[[], T]) -> T:
        """Run work with torch's own choices."""
        self.remove()
        try:
            return work()
        finally:
            self._install()

    def run_eager(self, work: Callable[[], T]) -> T:
        """Run work with the plan."""
        return work()

    def _install(self) -> None:
        """Enter all contexts, again after `remove`."""
        for context in self._contexts:
            self._stack.enter_context(context())


def apply(
    module: torch.nn.Module, plan: str | os.PathLike[str], *, remeasure: bool = False
) -> Applied:
    """Let a run's convolution algorithms and attention backends compute a module.

    The module stays changed until `remove` of the result, or until its `with` block ends. Shapes
    that the plan does not have are left to torch. The attention backends hold for all attention of
    this process with the shapes of the plan.

    >>> import perfexp
    >>> module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    >>> settings = {"gpu": "cpu", "tracking": "none", "stopping": "fixed", "input_size": 8}
    >>> record = perfexp.measure(module, algorithm="gemm", output_dir="run", **settings)
    >>> with apply(module, "run"):
    ...     module(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 4, 6, 6])

    Args:
        plan: file made by `perfexp export RUN --plan FILE`, or the folder of a run.
        remeasure: race again on the first calls, if the plan is of another device or library.

    Raises:
        UserError: the plan does not fit the device, the libraries or the module.
    """
    torch_device = next(
        (parameter.device for parameter in module.parameters()), torch.device("cpu")
    )
    device: Device = CpuDevice()
    if torch_device.type == "cuda":
        device = CudaDevice(index=torch_device.index or 0)
    return _applied(module, read(Path(plan)), device, remeasure=remeasure)


def _applied(
    module: torch.nn.Module, plan: AlgorithmPlan, device: Device, *, remeasure: bool
) -> Applied:
    """Return the applied plan; see `apply`.

    If device or libraries differ, `remeasure` races again on the first calls instead of using the
    plan.
    """
    software = software_of(device)
    differences = plan.differences(
        **{name: software[name] for name in ("device", "torch", "cudnn")},
        cudnn_allow_tf32=tf32.allowed()[1],
    )
    if differences and not remeasure:
        raise UserError(f"The plan is for {', '.join(differences)}: {_REMEDY}.")
    contexts: list[Any] = []
    used: set[str] = set()
    if plan.layers and differences:
        contexts.append(partial(_raced, module, device))
    elif plan.layers:
        contexts.append(partial(_planned, module, plan, used))
    stored = {
        (entry.name, entry.dtype, "backward" in entry.passes): entry.passes.get("forward", "math")
        for entry in plan.attention
    }
    if stored:
        if unknown := sorted(set(stored.values()) - set(BACKENDS)):
            raise UserError(
                f"The plan names the attention backend {unknown[0]!r}, which is unknown."
            )
        backends = AttentionBackends(
            Attention.fastest, device, compiled=True, stored=None if differences else stored
        )
        contexts.append(backends.applied)
    return Applied(device, contexts, used if plan.layers and not (differences or stored) else None)


@contextmanager
def _planned(module: torch.nn.Module, plan: AlgorithmPlan, used: set[str]) -> Iterator[None]:
    """Let the plan's engines compute the module's layers while entered; `used` gets their names.

    Raises `UserError` if the module has no 2-D convolution with a layer's name.
    """
    children = dict(module.named_modules())
    engines: dict[str, dict[Any, dict[str, str]]] = {}
    for layer in plan.layers:
        if not isinstance(children.get(layer.name), torch.nn.Conv2d):
            raise UserError(
                f"The plan is of {plan.model}: this module has no 2-D convolution {layer.name!r}."
            )
        by_inputs = engines.setdefault(layer.name, {})
        by_inputs.setdefault((layer.input_shape, layer.dtype), {}).update(layer.passes)
    installed = [
        Layer(name, children[name], "plan", [_Planned(name, of_layer, used)], lambda *_: None)
        for name, of_layer in engines.items()
    ]
    with all_installed(installed):
        yield


@contextmanager
def _raced(module: torch.nn.Module, device: Device) -> Iterator[None]:
    """Let `algorithm=fastest` compute the module while entered; the plan is not used."""
    session: Any = SimpleNamespace(module=module, device=device, discard_compiled=lambda: None)
    with Forced(name="fastest").applied(session):
        yield
