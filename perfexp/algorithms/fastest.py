"""Race all algorithms that can compute a convolution, and compute it by the fastest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from perfexp.algorithms.backends import Choice, Cudnn, Kernels, PassChoice, Support, no_kernels
from perfexp.algorithms.cudnn import CudnnError, why_no_cudnn
from perfexp.algorithms.engines import TORCH, Engines, plan_of
from perfexp.algorithms.isolated_thread import Apart
from perfexp.algorithms.operators import BENCHMARK, CUDNN, DEFAULT, TRITON
from perfexp.algorithms.passes import Pass
from perfexp.algorithms.problem import Problem
from perfexp.algorithms.race import race
from perfexp.convolutions.portable import ALGORITHMS
from perfexp.devices import Device
from perfexp.host.cache import JsonCache

#: Torch's own choice stays unless another engine is faster by this fraction, the usual difference of equal runs.
_MARGIN = 0.02
#: Default limit of the relative L2 error against float64: a multiple of the rounding error of the data type.
_MAX_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
_MAX_ERROR_TF32 = 3e-3

Run = Callable[[], Any]
_Winners = dict[Pass, PassChoice]


@dataclass(frozen=True, kw_only=True)
class Fastest(Support):
    """Races all candidates, torch itself among them, and chooses the fastest.

    On an NVIDIA GPU each pass has a race of its own between torch's choice, torch's search, cuDNN's algorithms and
    Triton kernels. Elsewhere the algorithms in torch operations compete; they include their own backward passes, so the
    three passes of training are one race.

    Attributes:
        max_error: largest relative L2 error against float64; None for the data type's usual error.
        reuse: whether to reuse winners of earlier processes.
    """

    device: Device
    workspace_bytes: int | None = None
    max_error: float | None = None
    choices: JsonCache
    reuse: bool = True
    _known: dict[str, _Winners] = field(default_factory=dict, compare=False)
    _chosen: list[str] = field(default_factory=list, compare=False)
    _apart: dict[str, Apart] = field(default_factory=lambda: defaultdict(Apart), compare=False)

    def choose(self, problem: Problem) -> Choice:
        if why_no_cudnn(problem.device) is None:
            return {which: self._remembered(problem, (which,), self._of_pass)[which] for which in problem.passes}
        return self._remembered(problem, problem.passes, self._of_all_passes)

    def _remembered(
        self, problem: Problem, passes: tuple[Pass, ...], hold_race: Callable[[Problem, tuple[Pass, ...]], _Winners]
    ) -> _Winners:
        """The cached choice for such a problem, or the winner of a new race."""
        kind = f"{problem.dtype} {_tf32(problem)} {problem.convolution} {problem.shape} {problem.channels_last}"
        key = f"{kind} {' '.join(passes)}"
        winners = self._known.get(key) or self._read(key, passes, problem)
        if winners is None:
            with torch.no_grad():
                winners = self._apart["race"](partial(hold_race, problem, passes))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            entry = {which.value: {**asdict(winner), "kept_since": now} for which, winner in winners.items()}
            self.choices.add(key, entry)
        self._known[key] = winners
        self._chosen.append(key)
        return winners

    def discard_choices(self) -> None:
        """Remove all choices from the cache for other processes; this process continues to use them."""
        self.choices.remove(self._chosen)

    def end(self) -> None:
        """End the threads of the races."""
        for thread in self._apart.values():
            thread.end()
        self._apart.clear()

    def _read(self, key: str, passes: tuple[Pass, ...], problem: Problem) -> _Winners | None:
        """The choice of an earlier process, if it is still possible."""
        entry = self.choices.find(key) if self.reuse else None
        try:
            winners = {which: PassChoice(**entry[which.value]) for which in passes} if entry else None
            for which, choice in (winners or {}).items():
                if choice.kept_since is None:
                    raise ValueError("cached by an earlier version, without a date")
                self._check(which, choice.engine, problem)
        except (KeyError, TypeError, ValueError, CudnnError):
            return None
        return winners

    def _check(self, which: Pass, engine: str, problem: Problem) -> None:
        """Check that an engine can compute a pass; raises `ValueError` or `CudnnError` otherwise."""
        backend, _, name = engine.partition(".")
        if backend == CUDNN:
            plan_of(which, engine, problem)
        elif (backend == TORCH and ALGORITHMS[name].supports(problem.convolution, problem.dtype) is None) or (
            backend == TRITON and no_kernels(problem.device) is None
        ):
            return
        elif engine not in (DEFAULT, BENCHMARK):
            raise ValueError(engine)

    def _of_pass(self, problem: Problem, passes: tuple[Pass, ...]) -> _Winners:
        """The winner of one pass on an NVIDIA GPU."""
        (which,) = passes
        problem = problem.even()
        try:
            return {which: self._raced(which, problem)}
        except torch.OutOfMemoryError:  # a race needs more memory than the model
            return {which: PassChoice()}
        finally:
            torch.cuda.empty_cache()  # the losers' workspaces

    def _raced(self, which: Pass, problem: Problem) -> PassChoice:
        entrants = dict(self._entrants(which, problem))
        tensors = _tensors(problem, which)
        runs: dict[str, Run] = {name: _runner(which, name, problem, tensors) for name in entrants}
        reference = _runner(which, DEFAULT, problem, [tensor.double() for tensor in tensors])()
        winner, errors, seconds = self._winner(runs, lambda run: _error(run(), reference), problem)
        return replace(entrants[winner], errors=errors, seconds=seconds)

    def _of_all_passes(self, problem: Problem, passes: tuple[Pass, ...]) -> _Winners:
        """The winner of all passes together, among the algorithms in torch operations."""
        convolution = problem.convolution
        able = [name for name in ALGORITHMS if ALGORITHMS[name].supports(convolution, problem.dtype) is None]
        names = [DEFAULT, *(f"{TORCH}.{name}" for name in able)]
        tensors = [_tensors(problem, Pass.forward)[0], *_tensors(problem, Pass.backward_data)]

        def runner(name: str, values: list[torch.Tensor]) -> Run:
            engines = Engines(name, name, name)
            inputs, weight, grad = values
            if passes == (Pass.forward,):
                return lambda: [engines.compute(convolution, inputs, weight, None)]
            gradients = ((Pass.backward_data, inputs), (Pass.backward_filter, weight))
            wanted = [tensor.requires_grad_() for which, tensor in gradients if which in passes]

            def run() -> list[torch.Tensor]:
                with torch.enable_grad():
                    outputs = engines.compute(convolution, inputs, weight, None)
                    return [outputs.detach(), *torch.autograd.grad(outputs, wanted, grad)]

            return run

        runs = {name: runner(name, tensors) for name in names}
        reference = runner(DEFAULT, [tensor.double() for tensor in tensors])()

        def error(run: Run) -> float:
            return max(_error(one, other) for one, other in zip(run(), reference, strict=True))

        winner, errors, seconds = self._winner(runs, error, problem)
        others = {which: PassChoice(engine=winner) for which in passes[1:]}  # the times are those of all passes
        return {passes[0]: PassChoice(engine=winner, errors=errors, seconds=seconds), **others}

    def _entrants(self, which: Pass, problem: Problem) -> Iterator[tuple[str, PassChoice]]:
        """Engines that can compute a pass on an NVIDIA GPU."""
        yield DEFAULT, PassChoice()
        yield BENCHMARK, PassChoice(engine=BENCHMARK)
        for choice in Cudnn(name=DEFAULT, workspace_bytes=self.workspace_bytes).candidates(which, problem):
            yield choice.engine, choice
        for name in ("direct", "winograd"):
            if no_kernels(problem.device) is None:
                choice = Kernels(name=name).candidate(which, problem)
                if choice.reason is None:
                    yield choice.engine, choice

    def _winner(
        self, runs: Mapping[str, Run], error: Callable[[Run], float], problem: Problem
    ) -> tuple[str, dict[str, float], dict[str, float]]:
        """The fastest of the sufficiently exact engines, the errors of all, and the times of the exact ones."""
        limit = self.max_error if self.max_error is not None else _usual_error(problem)
        errors: dict[str, float] = {}
        for name, run in runs.items():
            try:
                errors[name] = self._thread(name)(partial(error, run))
            except torch.OutOfMemoryError:
                if name == DEFAULT:
                    raise
        exact = {name: run for name, run in runs.items() if name == DEFAULT or errors.get(name, limit + 1) <= limit}
        seconds = race(exact, self.device, self._thread)
        best = min(seconds, key=lambda name: seconds[name])
        return (best if seconds[best] < (1 - _MARGIN) * seconds[DEFAULT] else DEFAULT), errors, seconds

    def _thread(self, name: str) -> Callable[[Callable[[], Any]], Any]:
        """The thread of an engine: torch's search must not use the cached choice of its heuristic."""
        return self._apart["search"] if name == BENCHMARK else _here


def _here(work: Callable[[], Any]) -> Any:
    return work()


def _tensors(problem: Problem, which: Pass) -> list[torch.Tensor]:
    made = (torch.randn(shape, device=problem.device) for shape in problem.reads(which))
    return [tensor.to(problem.dtype, memory_format=problem.layout) for tensor in made]


def _runner(which: Pass, engine: str, problem: Problem, tensors: Sequence[torch.Tensor]) -> Run:
    """A call of an engine for a pass of a problem with symmetric padding."""
    operators, settings, (first, second) = torch.ops.perfexp, (*problem.settings, problem.channels_last), tensors
    if which is Pass.forward:
        return lambda: operators.convolution(first, second, *settings, engine, DEFAULT, DEFAULT)
    if which is Pass.backward_data:
        inputs = problem.empty(problem.shape).to(first.dtype)
        return lambda: operators.convolution_backward_data(second, inputs, first, *settings, engine)
    weight = problem.empty(problem.convolution.weight_shape).to(first.dtype)
    return lambda: operators.convolution_backward_filter(second, first, weight, *settings, engine)


def _error(outputs: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 error; infinite where a number is not finite."""
    error = float((outputs.double() - reference).norm() / reference.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def _tf32(problem: Problem) -> bool:
    return problem.dtype is torch.float32 and problem.device.type == "cuda" and torch.backends.cudnn.allow_tf32


def _usual_error(problem: Problem) -> float:
    return _MAX_ERROR_TF32 if _tf32(problem) else _MAX_ERROR[problem.dtype]
