"""algorithm=fastest: race all algorithms that can compute a convolution, and use the winner.

A race times engines on random tensors in the problem's shape; `race` has the rules. Winners are
cached for later processes, unless the times were unsteady.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from perfexp.convolution import T, kernels, replays
from perfexp.convolution.backends import Choice, Cudnn, Kernels, PassChoice, Support, no_kernels
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CudnnError, why_no_cudnn
from perfexp.convolution.engines import TORCH, Engines, plan_of
from perfexp.convolution.operators import BENCHMARK, CUDNN, DEFAULT, TRITON
from perfexp.convolution.portable.algorithms import ALGORITHMS
from perfexp.convolution.problem import Problem
from perfexp.convolution.race import Race
from perfexp.cost.tensors import tensors_in
from perfexp.devices import Device
from perfexp.devices.cpu import processor_name
from perfexp.host.cache import JsonCache
from perfexp.models import cuda_graphs, tf32
from perfexp.version import __version__

#: Default limits of the relative L2 error against float64: a multiple of the data type's rounding
#: error.
MAX_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
_MAX_ERROR_TF32 = 3e-3

Run = Callable[[], Any]
Runner = Callable[[str, Sequence[torch.Tensor]], Run]
Winners = dict[Pass, PassChoice]


class Threads:
    """Isolated threads by name, with the caller's grad mode and device; `end` ends them.

    torch caches cuDNN's chosen algorithms per thread. It consults that cache before it searches
    (`benchmark`) or calls the heuristic. So for the same shape, whichever runs first in a thread
    decides for both (ATen's Conv_v8.cpp).
    """

    def __init__(self) -> None:
        self._threads: defaultdict[str, ThreadPoolExecutor] = defaultdict(
            partial(ThreadPoolExecutor, 1)
        )

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run `work`, backward passes included, in a thread and return its result.

        Errors in `work` are raised here.
        """
        is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> T:
            """Set up this thread like the caller's, and run the work."""
            if device is not None:
                torch.cuda.set_device(device)
            with (
                torch.inference_mode(is_inference),
                torch.set_grad_enabled(has_gradients),
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
class Races:
    """Races engines that compute the same, and remembers the winners.

    Winners of earlier processes may be reused.

    Attributes:
        max_error: limit of the relative L2 error against float64; None for the data type's default.
        choices: cache of winners for other processes.
        reuse: whether to use winners from that cache.
    """

    device: Device
    threads: Threads
    max_error: float | None = None
    choices: JsonCache
    reuse: bool = True
    _winners: dict[str, Winners] = field(default_factory=dict)
    _used_keys: list[str] = field(default_factory=list)

    def remembered(
        self,
        key: str,
        passes: tuple[Pass, ...],
        hold_race: Callable[[], Winners],
        check: Callable[[Pass, str], None],
    ) -> Winners:
        """Return the winner of each pass: from this process, an earlier one, or a new race.

        Convolutions (`Fastest`) and attention (`FastestBackend`) use it.

        Args:
            key: identifies the problem and its passes in the cache.
            hold_race: races the engines and returns the winners.
            check: raises ValueError or CudnnError if an engine cannot compute a pass.
        """
        winners = self._winners.get(key) or self._read(key, passes, check)
        if winners is None:
            # like torch's passes, all passes in a race are launched kernel by kernel
            with torch.no_grad(), replays.eager():
                winners = self.threads.run("race", hold_race)
            # `not_cached` is a reason, for example unsteady times
            if not any(winner.not_cached for winner in winners.values()):
                now = datetime.now(UTC).isoformat(timespec="seconds")
                entry = {
                    which.value: {**asdict(winner), "kept_since": now}
                    for which, winner in winners.items()
                }
                self.choices.add(key, entry)
        self._winners[key] = winners
        self._used_keys.append(key)
        return winners

    def discard_choices(self) -> None:
        """Remove all choices from the cache for other processes; this process keeps using them."""
        self.choices.remove(self._used_keys)

    def _read(
        self, key: str, passes: tuple[Pass, ...], check: Callable[[Pass, str], None]
    ) -> Winners | None:
        """Return an earlier process's choice.

        None if there is none, or it is no longer possible.
        """
        entry = self.choices.find(key) if self.reuse else None
        if not entry:
            return None
        try:
            winners = {which: PassChoice(**entry[which.value]) for which in passes}
            for which, choice in winners.items():
                if choice.kept_since is None:
                    raise ValueError("cached by an earlier version, without a date")
                check(which, choice.engine)
        except (KeyError, TypeError, ValueError, CudnnError):
            return None
        return winners

    def winner(
        self,
        names: Sequence[str],
        runner: Runner,
        draw: Callable[[], list[torch.Tensor]],
        limit: float,
        *,
        default: str = DEFAULT,
        reference: str = DEFAULT,
        exactly: Runner | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Return the winner among the sufficiently exact engines, and facts about all engines.

        The facts are fields for `EngineFacts`, such as errors and times in seconds.

        Args:
            names: engines to race.
            runner: returns a function that runs a named engine on some tensors.
            draw: returns random tensors; the deciding race gets fresh ones.
            limit: usual limit of the error, unless `max_error` is set.
            default: the engine to beat, which may exceed the limit.
            reference: the engine that computes in float64.
            exactly: runner for the errors, if a race's results are random.
        """
        captures = partial(cuda_graphs.captures, self.device) if self.device.asynchronous else None
        race = Race(device=self.device, default=default, where=self._thread, captures=captures)
        tensors = draw()
        exactly = exactly or runner
        expected = exactly(reference, [tensor.double() for tensor in tensors])()
        trials = {name: exactly(name, tensors) for name in names}
        errors = self._errors(trials, expected, default)
        del expected, trials  # their memory is needed for the race
        limit = limit if self.max_error is None else self.max_error
        exact = [name for name in names if name == default or errors.get(name, math.inf) <= limit]
        nominees = race.nominate({name: runner(name, tensors) for name in exact})
        finalists = [*nominees, *(name for name in (default, BENCHMARK) if name in exact)]
        tensors = draw()
        calls = {name: runner(name, tensors) for name in dict.fromkeys(finalists)}
        outcome = race.decide(calls, nominees[0])
        return outcome.chosen, {"errors": errors, **outcome.facts()}

    def _errors(self, runs: dict[str, Run], expected: Any, default: str) -> dict[str, float]:
        """Return the relative L2 errors of the engines that fit into memory.

        Args:
            runs: calls by engine.
            expected: the reference's result in float64.
            default: engine for which too little memory is an error.
        """
        errors: dict[str, float] = {}
        for name, run in runs.items():
            try:
                errors[name] = self._thread(name)(partial(_error, run, expected))
            except torch.OutOfMemoryError:
                if name == default:
                    raise
        return errors

    def _thread(self, name: str) -> Callable[[Callable[[], Any]], Any]:
        """Return a runner for an engine.

        Torch's search gets its own thread, because it must not use its heuristic's cached choice.
        """
        if name == BENCHMARK:
            return partial(self.threads.run, "search")
        return lambda work: work()


@dataclass(frozen=True, kw_only=True, eq=False)
class Fastest(Races, Support):
    """Races all candidates, including torch itself, and chooses the fastest.

    On an NVIDIA GPU each pass has its own race between torch's choice, torch's search, cuDNN
    algorithms and Triton kernels. Elsewhere the algorithms in torch operations compete. They
    include their own backward passes, so the three training passes share a race.
    """

    workspace_bytes: int | None = None

    def choose(self, problem: Problem) -> Choice:
        """Return the fastest engine for each pass, from the cache or a race."""
        if why_no_cudnn(problem.device) is not None:
            return self._remembered(problem, problem.passes, self._race_passes_jointly)
        winners: Winners = {}
        for which in problem.passes:
            winners |= self._remembered(problem, (which,), self._race_pass)
        return winners

    def _remembered(
        self,
        problem: Problem,
        passes: tuple[Pass, ...],
        hold_race: Callable[[Problem, tuple[Pass, ...]], Winners],
    ) -> Winners:
        """Return cached winners for some passes of a problem, or those of a new race.

        Args:
            hold_race: races the engines for these passes.
        """
        kind = f"{problem.dtype} {_uses_tf32(problem)} {problem.convolution} {problem.shape}"
        kind += f" {problem.channels_last}"
        check = partial(check_engine, problem)
        hold = partial(hold_race, problem, passes)
        return self.remembered(f"{kind} {' '.join(passes)}", passes, hold, check)

    def _race_pass(self, problem: Problem, passes: tuple[Pass, ...]) -> Winners:
        """Return the winner for the only pass in `passes`, on an NVIDIA GPU.

        Without enough memory for a race, it is torch's own choice.
        """
        (which,) = passes
        problem = problem.even()
        try:
            entrants = dict(self._entrants(which, problem))
            runner = partial(_runner, which, problem)
            draw = partial(_tensors, problem, which)
            winner, facts = self.winner(list(entrants), runner, draw, _limit(problem))
            return {which: replace(entrants[winner], **facts)}
        except torch.OutOfMemoryError:  # a race needs more memory than the model
            return {which: PassChoice()}
        finally:
            torch.cuda.empty_cache()  # the losers' workspaces

    def _race_passes_jointly(self, problem: Problem, passes: tuple[Pass, ...]) -> Winners:
        """Return the joint winner for all passes, among the algorithms in torch operations.

        Each call computes the outputs and all gradients that the passes need.
        """
        convolution = problem.convolution
        able = [
            name
            for name, algorithm in ALGORITHMS.items()
            if algorithm.supports(convolution, problem.dtype) is None
        ]

        def draw() -> list[torch.Tensor]:
            return [_tensors(problem, Pass.forward)[0], *_tensors(problem, Pass.backward_data)]

        def runner(name: str, values: Sequence[torch.Tensor]) -> Run:
            """Return a function that computes the outputs and the needed gradients by an engine."""
            engines = Engines(name, name, name)
            inputs, weight, grad = values
            if passes == (Pass.forward,):
                return lambda: [engines.compute(convolution, inputs, weight, None)]
            gradients = ((Pass.backward_data, inputs), (Pass.backward_filter, weight))
            leaves = [tensor.requires_grad_() for which, tensor in gradients if which in passes]

            def run() -> list[torch.Tensor]:
                with torch.enable_grad():
                    outputs = engines.compute(convolution, inputs, weight, None)
                    return [outputs.detach(), *torch.autograd.grad(outputs, leaves, grad)]

            return run

        names = [DEFAULT, *(f"{TORCH}.{name}" for name in able)]
        winner, facts = self.winner(names, runner, draw, _limit(problem))
        winners = dict.fromkeys(passes, PassChoice(engine=winner))
        # the times cover all passes, so they are reported once
        winners[passes[0]] = PassChoice(engine=winner, **facts)
        return winners

    def _entrants(self, which: Pass, problem: Problem) -> Iterator[tuple[str, PassChoice]]:
        """Yield all engines that can compute a pass on an NVIDIA GPU, by name."""
        yield DEFAULT, PassChoice()
        yield BENCHMARK, PassChoice(engine=BENCHMARK)
        cudnn = Cudnn(name=DEFAULT, workspace_bytes=self.workspace_bytes)
        for choice in cudnn.candidates(which, problem):
            yield choice.engine, choice
        if no_kernels(problem.device) is None:
            for name in kernels.ALGORITHMS:
                choice = Kernels(name=name).candidate(which, problem)
                if choice.reason is None:
                    yield choice.engine, choice


def check_engine(problem: Problem, which: Pass, engine: str) -> None:
    """Check that an engine from a cache or a plan can compute a pass here.

    Raises:
        ValueError: the engine cannot compute the pass.
        CudnnError: cuDNN refuses.
        KeyError: there is no such algorithm.
    """
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


def _tensors(problem: Problem, which: Pass) -> list[torch.Tensor]:
    """Return random tensors as a pass reads them, in cuDNN's order."""
    drawn = (torch.randn(shape, device=problem.device) for shape in problem.reads(which))
    return [tensor.to(problem.dtype, memory_format=problem.layout) for tensor in drawn]


def _runner(which: Pass, problem: Problem, engine: str, tensors: Sequence[torch.Tensor]) -> Run:
    """Return a function that computes a pass by an engine.

    Args:
        tensors: the two tensors that the pass reads, in cuDNN's order.
    """
    operators, (first, second) = torch.ops.perfexp, tensors
    settings = (*problem.settings, problem.channels_last)
    if which is Pass.forward:
        return lambda: operators.convolution(first, second, *settings, engine, DEFAULT, DEFAULT)
    if which is Pass.backward_data:
        inputs = problem.empty(problem.shape).to(first.dtype)
        return lambda: operators.convolution_backward_data(second, inputs, first, *settings, engine)
    weight = problem.empty(problem.convolution.weight_shape).to(first.dtype)
    return lambda: operators.convolution_backward_filter(second, first, weight, *settings, engine)


def _error(run: Run, reference: Any) -> float:
    """Return a run's relative L2 error, the largest over its tensors.

    The error is infinite if a number is not finite.
    """
    errors = []
    for output, exact in zip(tensors_in(run()), tensors_in(reference), strict=True):
        errors.append(float((output.double() - exact).norm() / exact.norm().clamp_min(1e-300)))
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _uses_tf32(problem: Problem) -> bool:
    """Return whether torch may round this problem's float32 products to TF32."""
    return problem.dtype is torch.float32 and problem.device.type == "cuda" and tf32.allowed()[1]


def context_of(device: Device) -> dict[str, Any]:
    """Return what all races on a device depend on; another context has its own cached winners."""
    return {**software_of(device), "perfexp": __version__, **device.limits()}


def software_of(device: Device) -> dict[str, Any]:
    """Return the device and the libraries that a choice of engines is for.

    A plan from `perfexp export --plan` fits only if device, torch and cuDNN are equal.
    """
    is_cuda = device.kind == "cuda"
    return {
        "device": torch.cuda.get_device_name(device.identifier) if is_cuda else processor_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "threads": None if is_cuda else torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _limit(problem: Problem) -> float:
    """Return the default limit of the relative L2 error for a problem's data type."""
    return _MAX_ERROR_TF32 if _uses_tf32(problem) else MAX_ERROR[problem.dtype]
