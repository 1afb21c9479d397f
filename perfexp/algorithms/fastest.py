"""Race all algorithms that can compute a convolution, and compute it by the fastest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch

from perfexp import kernels
from perfexp.algorithms import T
from perfexp.algorithms.backends import Choice, Cudnn, Kernels, PassChoice, Support, no_kernels
from perfexp.algorithms.coverage import Pass
from perfexp.algorithms.cudnn import CudnnError, why_no_cudnn
from perfexp.algorithms.engines import TORCH, Engines, plan_of
from perfexp.algorithms.operators import BENCHMARK, CUDNN, DEFAULT, TRITON
from perfexp.algorithms.problem import Problem
from perfexp.convolutions.portable import ALGORITHMS
from perfexp.devices import Device
from perfexp.host.cache import JsonCache
from perfexp.probes import depth, queue, timing
from perfexp.work.tensors import tensors_in

#: Torch's own choice stays unless another engine is faster by this fraction, the usual difference of equal runs.
_MARGIN = 0.02
#: Default limit of the relative L2 error against float64: a multiple of the rounding error of the data type.
_MAX_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
_MAX_ERROR_TF32 = 3e-3
#: Turns of each call.
_ROUNDS = 5
#: Minimum duration of a turn, and of a sample on an asynchronous device, which groups calls to reach it.
_TURN_SECONDS, _SAMPLE_SECONDS = 2e-3, 100e-6
_MOST_SAMPLES = 16
#: A call that is slower than the best by this factor in both of the first rounds is dropped.
_HOPELESS = 1.5

Run = Callable[[], Any]
_Winners = dict[Pass, PassChoice]


class Threads:
    """Isolated threads by name, which have the grad mode and device of their caller and end with `end`.

    Torch caches cuDNN's chosen algorithms per thread. It consults that cache before it searches (`benchmark`) or calls
    the heuristic: for the same shape, whichever of the two ran first in a thread decides for both (ATen's Conv_v8.cpp).
    """

    def __init__(self) -> None:
        self._threads: defaultdict[str, ThreadPoolExecutor] = defaultdict(partial(ThreadPoolExecutor, 1))

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run `work`, backward passes included, in a thread and return its result or raise its error."""
        inferring, recorded = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> T:
            if device is not None:
                torch.cuda.set_device(device)
            with (
                torch.inference_mode(inferring),
                torch.set_grad_enabled(recorded),
                torch.autograd.set_multithreading_enabled(False),
            ):
                return work()

        return self._threads[name].submit(run).result()

    def end(self) -> None:
        """Shut all threads down."""
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()


@dataclass(frozen=True, kw_only=True, eq=False)
class Fastest(Support):
    """Races all candidates, torch itself among them, and chooses the fastest.

    On an NVIDIA GPU each pass has a race of its own between torch's choice, torch's search, cuDNN's algorithms and
    Triton kernels. Elsewhere the algorithms in torch operations compete; they include their own backward passes, so the
    three passes of training are one race. `max_error` limits the relative L2 error against float64, by default to the
    data type's usual one; winners of earlier processes may be reused.
    """

    device: Device
    threads: Threads
    workspace_bytes: int | None = None
    max_error: float | None = None
    choices: JsonCache
    reuse: bool = True
    _known: dict[str, _Winners] = field(default_factory=dict)
    _chosen: list[str] = field(default_factory=list)

    def choose(self, problem: Problem) -> Choice:
        if why_no_cudnn(problem.device) is None:
            return {which: self._remembered(problem, (which,), self._of_pass)[which] for which in problem.passes}
        return self._remembered(problem, problem.passes, self._of_all_passes)

    def _remembered(
        self, problem: Problem, passes: tuple[Pass, ...], hold_race: Callable[[Problem, tuple[Pass, ...]], _Winners]
    ) -> _Winners:
        kind = f"{problem.dtype} {_tf32(problem)} {problem.convolution} {problem.shape} {problem.channels_last}"
        key = f"{kind} {' '.join(passes)}"
        winners = self._known.get(key) or self._read(key, passes, problem)
        if winners is None:
            with torch.no_grad():
                winners = self.threads.run("race", partial(hold_race, problem, passes))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            entry = {which.value: {**asdict(winner), "kept_since": now} for which, winner in winners.items()}
            self.choices.add(key, entry)
        self._known[key] = winners
        self._chosen.append(key)
        return winners

    def discard_choices(self) -> None:
        """Remove all choices from the cache for other processes; this process continues to use them."""
        self.choices.remove(self._chosen)

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
        is_able = backend in (CUDNN, DEFAULT, BENCHMARK)
        if backend == CUDNN:
            plan_of(which, engine, problem)
        elif backend == TORCH:
            is_able = ALGORITHMS[name].supports(problem.convolution, problem.dtype) is None
        elif backend == TRITON:
            is_able = no_kernels(problem.device) is None
        if not is_able:
            raise ValueError(engine)

    def _of_pass(self, problem: Problem, passes: tuple[Pass, ...]) -> _Winners:
        (which,) = passes
        try:
            return {which: self._raced(which, problem.even())}
        except torch.OutOfMemoryError:  # a race needs more memory than the model
            return {which: PassChoice()}
        finally:
            torch.cuda.empty_cache()  # the losers' workspaces

    def _raced(self, which: Pass, problem: Problem) -> PassChoice:
        entrants = dict(self._entrants(which, problem))
        tensors = _tensors(problem, which)
        runs: dict[str, Run] = {name: _runner(which, name, problem, tensors) for name in entrants}
        reference = _runner(which, DEFAULT, problem, [tensor.double() for tensor in tensors])()
        winner, errors, seconds = self._winner(runs, reference, problem)
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
        winner, errors, seconds = self._winner(runs, reference, problem)
        others = {which: PassChoice(engine=winner) for which in passes[1:]}  # the times are those of all passes
        return {passes[0]: PassChoice(engine=winner, errors=errors, seconds=seconds), **others}

    def _entrants(self, which: Pass, problem: Problem) -> Iterator[tuple[str, PassChoice]]:
        yield DEFAULT, PassChoice()
        yield BENCHMARK, PassChoice(engine=BENCHMARK)
        for choice in Cudnn(name=DEFAULT, workspace_bytes=self.workspace_bytes).candidates(which, problem):
            yield choice.engine, choice
        if no_kernels(problem.device) is None:
            choices = (Kernels(name=name).candidate(which, problem) for name in kernels.ALGORITHMS)
            yield from ((choice.engine, choice) for choice in choices if choice.reason is None)

    def _winner(
        self, runs: Mapping[str, Run], reference: Any, problem: Problem
    ) -> tuple[str, dict[str, float], dict[str, float]]:
        """The fastest of the sufficiently exact engines, the errors of all, and the times of the exact ones."""
        usual = _MAX_ERROR_TF32 if _tf32(problem) else _MAX_ERROR[problem.dtype]
        limit = usual if self.max_error is None else self.max_error
        errors: dict[str, float] = {}
        for name, run in runs.items():
            try:
                errors[name] = self._thread(name)(partial(_error, run, reference))
            except torch.OutOfMemoryError:
                if name == DEFAULT:
                    raise
        exact = {name: run for name, run in runs.items() if name == DEFAULT or errors.get(name, limit + 1) <= limit}
        seconds = race(exact, self.device, self._thread)
        best = min(seconds, key=lambda name: seconds[name])
        return (best if seconds[best] < (1 - _MARGIN) * seconds[DEFAULT] else DEFAULT), errors, seconds

    def _thread(self, name: str) -> Callable[[Callable[[], Any]], Any]:
        """The thread of an engine: torch's search must not use the cached choice of its heuristic."""
        return partial(self.threads.run, "search") if name == BENCHMARK else lambda work: work()


def _tensors(problem: Problem, which: Pass) -> list[torch.Tensor]:
    made = (torch.randn(shape, device=problem.device) for shape in problem.reads(which))
    return [tensor.to(problem.dtype, memory_format=problem.layout) for tensor in made]


def _runner(which: Pass, engine: str, problem: Problem, tensors: Sequence[torch.Tensor]) -> Run:
    operators, settings, (first, second) = torch.ops.perfexp, (*problem.settings, problem.channels_last), tensors
    if which is Pass.forward:
        return lambda: operators.convolution(first, second, *settings, engine, DEFAULT, DEFAULT)
    if which is Pass.backward_data:
        inputs = problem.empty(problem.shape).to(first.dtype)
        return lambda: operators.convolution_backward_data(second, inputs, first, *settings, engine)
    weight = problem.empty(problem.convolution.weight_shape).to(first.dtype)
    return lambda: operators.convolution_backward_filter(second, first, weight, *settings, engine)


def _error(run: Run, reference: Any) -> float:
    """Relative L2 error of a run, the largest of several tensors; infinite where a number is not finite."""
    pairs = zip(tensors_in(run()), tensors_in(reference), strict=True)
    errors = [float((one.double() - other).norm() / other.norm().clamp_min(1e-300)) for one, other in pairs]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _tf32(problem: Problem) -> bool:
    return problem.dtype is torch.float32 and problem.device.type == "cuda" and torch.backends.cudnn.allow_tf32


def race(
    calls: Mapping[str, timing.Call], device: Device, where: Callable[[str], Callable[[Callable[[], Any]], Any]]
) -> dict[str, float]:
    """Median seconds of each call, in device time where available; hopeless calls stop after two rounds.

    Each call has run before; the first one is never dropped. `where` maps a name to the function that runs its work, in
    this thread or an isolated one.
    """
    blocks = {name: where(name)(partial(_block, call, device)) for name, call in calls.items()}
    first = next(iter(calls))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    running = list(calls)
    with timing.undisturbed():
        for round_ in range(_ROUNDS):
            for name in running:
                taken[name].append(where(name)(blocks[name]))
            if round_ == 1:
                best = min(min(seconds) for seconds in taken.values())
                running = [name for name in running if name == first or min(taken[name]) <= _HOPELESS * best]
    return {name: float(np.median(seconds)) for name, seconds in taken.items()}


def _block(call: timing.Call, device: Device) -> Callable[[], float]:
    """One turn of a call: the median of a few samples."""
    if not device.asynchronous:
        chain = timing.HostChain(call, device)
        chain(1)
        rough = max(float(chain(1)[0]), 1e-9)
        samples = max(1, min(_MOST_SAMPLES, math.ceil(_TURN_SECONDS / rough)))
        return lambda: float(np.median(chain(samples)))
    fits = depth.samples_in_queue(call, device, most=_MOST_SAMPLES)
    if not fits:  # thousands of launches exceed the queue: time them as the host issues them
        loop = queue.Loop(call, device)
        return lambda: float(np.median(loop(2)))
    single = queue.Chain(call, device, min(fits, 4))
    single(2)
    rough = max(float(np.median(single(3))), 1e-9)
    k = max(1, min(_MOST_SAMPLES, math.ceil(_SAMPLE_SECONDS / rough)))
    samples = max(2, min(_MOST_SAMPLES // k + 2, math.ceil(_TURN_SECONDS / (k * rough))))
    held = queue.Chain(call, device, max(1, min(samples, fits // k)), k if fits >= k else 1)
    return lambda: float(np.median(held(samples)))
