"""algorithm=fastest: race all algorithms that can compute a convolution, and use the winner.

Engines compute random tensors in the problem's shape; `race` has the rules and caches winners for
later processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from perfexp.convolution import kernels
from perfexp.convolution.backends import Choice, Cudnn, Kernels, PassChoice, Support, no_kernels
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import why_no_cudnn
from perfexp.convolution.engines import TORCH, Engines, plan_of
from perfexp.convolution.operators import BENCHMARK, CUDNN, DEFAULT, TRITON
from perfexp.convolution.portable.algorithms import ALGORITHMS
from perfexp.convolution.problem import Problem
from perfexp.convolution.race import MAX_ERROR, Races, Run, Winners
from perfexp.models import tf32

#: Default limit of the relative L2 error against float64, if products may round to TF32.
_MAX_ERROR_TF32 = 3e-3


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
        for pass_type in problem.passes:
            winners |= self._remembered(problem, (pass_type,), self._race_pass)
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
        (pass_type,) = passes
        problem = problem.even()
        try:
            entrants = dict(self._entrants(pass_type, problem))
            runner = partial(_runner, pass_type, problem)
            draw = partial(_tensors, problem, pass_type)
            winner, facts = self.winner(list(entrants), runner, draw, _limit(problem))
            return {pass_type: replace(entrants[winner], **facts)}
        except torch.OutOfMemoryError:  # a race needs more memory than the model
            return {pass_type: PassChoice()}
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
            leaves = [
                tensor.requires_grad_() for pass_type, tensor in gradients if pass_type in passes
            ]

            def run() -> list[torch.Tensor]:
                """Convolve forward and backward; return the outputs and the gradients."""
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

    def _entrants(self, pass_type: Pass, problem: Problem) -> Iterator[tuple[str, PassChoice]]:
        """Yield all engines that can compute a pass on an NVIDIA GPU, by name."""
        yield DEFAULT, PassChoice()
        yield BENCHMARK, PassChoice(engine=BENCHMARK)
        cudnn = Cudnn(name=DEFAULT, workspace_bytes=self.workspace_bytes)
        for choice in cudnn.candidates(pass_type, problem):
            yield choice.engine, choice
        if no_kernels(problem.device) is None:
            for name in kernels.ALGORITHMS:
                choice = Kernels(name=name).candidate(pass_type, problem)
                if choice.reason is None:
                    yield choice.engine, choice


def check_engine(problem: Problem, pass_type: Pass, engine: str) -> None:
    """Check that an engine from a cache or a plan can compute a pass here.

    Raises:
        ValueError: the engine cannot compute the pass.
        CudnnError: cuDNN refuses.
        KeyError: there is no such algorithm.
    """
    backend, _, name = engine.partition(".")
    is_able = backend in (CUDNN, DEFAULT, BENCHMARK)
    if backend == CUDNN:
        plan_of(pass_type, engine, problem)
    elif backend == TORCH:
        is_able = ALGORITHMS[name].supports(problem.convolution, problem.dtype) is None
    elif backend == TRITON:
        is_able = no_kernels(problem.device) is None
    if not is_able:
        raise ValueError(engine)


def _tensors(problem: Problem, pass_type: Pass) -> list[torch.Tensor]:
    """Return random tensors as a pass reads them, in cuDNN's order."""
    tensors = (torch.randn(shape, device=problem.device) for shape in problem.reads(pass_type))
    return [tensor.to(problem.dtype, memory_format=problem.layout) for tensor in tensors]


def _runner(pass_type: Pass, problem: Problem, engine: str, tensors: Sequence[torch.Tensor]) -> Run:
    """Return a function that computes a pass by an engine.

    Args:
        tensors: the two tensors that the pass reads, in cuDNN's order.
    """
    operators, (first, second) = torch.ops.perfexp, tensors
    settings = (*problem.settings, problem.channels_last)
    if pass_type is Pass.forward:
        return lambda: operators.convolution(first, second, *settings, engine, DEFAULT, DEFAULT)
    if pass_type is Pass.backward_data:
        inputs = problem.empty(problem.shape).to(first.dtype)
        return lambda: operators.convolution_backward_data(second, inputs, first, *settings, engine)
    weight = problem.empty(problem.convolution.weight_shape).to(first.dtype)
    return lambda: operators.convolution_backward_filter(second, first, weight, *settings, engine)


def _uses_tf32(problem: Problem) -> bool:
    """Return whether torch may round this problem's float32 products to TF32."""
    return problem.dtype is torch.float32 and problem.device.type == "cuda" and tf32.allowed()[1]


def _limit(problem: Problem) -> float:
    """Return the default limit of the relative L2 error for a problem's data type."""
    return _MAX_ERROR_TF32 if _uses_tf32(problem) else MAX_ERROR[problem.dtype]
