"""Apply a plan: the engines of a run compute a module in the user's own program."""

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
from perfexp.convolution.backends import Choice, PassChoice, Support
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CudnnError
from perfexp.convolution.fastest import check_engine, software_of
from perfexp.convolution.forced import Forced
from perfexp.convolution.layer import Layer
from perfexp.convolution.problem import Problem
from perfexp.devices import Device
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.cuda import CudaDevice
from perfexp.errors import UserError
from perfexp.models import Attention
from perfexp.records.algorithm_plan import AlgorithmPlan, read

_REMEDY = "measure here, or pass remeasure=True"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Planned(Support):
    """The engines of a plan for one layer, by input shape and data type; otherwise torch's own."""

    engines: Mapping[tuple[tuple[int, ...], str], Mapping[str, str]]

    def choose(self, problem: Problem) -> Choice:
        dtype = str(problem.dtype).removeprefix("torch.")
        named = self.engines.get((problem.shape, dtype), {})
        return {which: _able(problem, which, named.get(which)) for which in problem.passes}


def _able(problem: Problem, which: Pass, engine: str | None) -> PassChoice:
    if engine is None:
        return PassChoice()
    try:
        check_engine(problem, which, engine)
    except (CudnnError, KeyError, ValueError):  # a file may say anything
        return PassChoice()
    return PassChoice(engine=engine)


class Applied:
    """A plan applied to a module until `remove`, or until its `with` block ends."""

    name = "plan"

    def __init__(self, device: Device, contexts: list[Any]) -> None:
        self.device, self._contexts = device, contexts
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
    place = next((one.device for one in module.parameters()), torch.device("cpu"))
    device: Device = CudaDevice(index=place.index or 0) if place.type == "cuda" else CpuDevice()
    return _applied(module, read(Path(plan)), device, remeasure=remeasure)


def _applied(
    module: torch.nn.Module, plan: AlgorithmPlan, device: Device, *, remeasure: bool
) -> Applied:
    here = software_of(device)
    differences = plan.differences(**{name: here[name] for name in ("device", "torch", "cudnn")})
    if differences and not remeasure:
        raise UserError(f"The plan is for {', '.join(differences)}: {_REMEDY}.")
    contexts: list[Any] = []
    if plan.layers:
        by_layer = partial(_raced if differences else _planned, module, plan, device)
        contexts.append(by_layer)
    if plan.attention:
        stored = {
            (one.name, one.dtype, "backward" in one.passes): one.passes.get("forward", "math")
            for one in plan.attention
        }
        if unknown := sorted(set(stored.values()) - set(BACKENDS)):
            raise UserError(
                f"The plan names the attention backend {unknown[0]!r}, which is unknown."
            )
        backends = AttentionBackends(
            Attention.fastest, device, compiled=True, stored=None if differences else stored
        )
        contexts.append(backends.applied)
    return Applied(device, contexts)


@contextmanager
def _planned(module: torch.nn.Module, plan: AlgorithmPlan, _: Device) -> Iterator[None]:
    children = dict(module.named_modules())
    engines: dict[str, dict[Any, dict[str, str]]] = {}
    for layer in plan.layers:
        if not isinstance(children.get(layer.name), torch.nn.Conv2d):
            raise UserError(
                f"The plan is of {plan.model}: this module has no 2-D convolution {layer.name!r}."
            )
        engines.setdefault(layer.name, {}).setdefault((layer.input_shape, layer.dtype), {}).update(
            layer.passes
        )
    layers = [
        Layer(name, children[name], "plan", [_Planned(engines=own)], lambda *_: None)
        for name, own in engines.items()
    ]
    for each in layers:
        each.install()
    try:
        yield
    finally:
        for each in reversed(layers):
            each.remove()


@contextmanager
def _raced(module: torch.nn.Module, _: AlgorithmPlan, device: Device) -> Iterator[None]:
    session: Any = SimpleNamespace(module=module, device=device, discard_compiled=lambda: None)
    with Forced(name="fastest").applied(session):
        yield
