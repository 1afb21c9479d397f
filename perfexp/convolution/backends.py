"""Backends: whether cuDNN, a Triton kernel or torch operations can compute a convolution.

A `Support` answers that for one algorithm on one backend, and names the engine for each pass of a
problem. `Layer` takes the first backend that can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from perfexp.convolution import Backend, kernels
from perfexp.convolution.convolution_plan import guess, plan
from perfexp.convolution.coverage import EngineFacts, LayerStatus, Pass, PassReport
from perfexp.convolution.cudnn import (
    BACKWARD,
    CODES,
    DATA_TYPES,
    UNREPEATABLE,
    CudnnError,
    why_no_cudnn,
)
from perfexp.convolution.engines import SEARCH, TORCH, shape_of
from perfexp.convolution.operators import CUDNN, DEFAULT, TRITON, turned_around
from perfexp.convolution.portable.algorithms import ALGORITHMS
from perfexp.convolution.portable.geometry import Convolution
from perfexp.convolution.problem import Problem
from perfexp.errors import UserError
from perfexp.records.units import format_bytes

#: Algorithms that apply to a whole model and cannot be chosen per layer. The value checks torch's
#: name for the implementation that it then selects.
SWITCHED: dict[str, Callable[[str], bool]] = {
    "benchmark": lambda name: name.startswith("Cudnn"),
    "onednn": lambda name: name.startswith("Mkldnn"),
    "native": lambda name: not name.startswith(("Mkldnn", "Cudnn", "Miopen", "Mps")),
}
#: cuDNN's heuristic chooses, layer by layer.
GUESS = "guess"


@dataclass(frozen=True, kw_only=True)
class PassChoice(EngineFacts):
    """The engine for a pass (see `perfexp.convolution.engines`), and why it was chosen.

    With a `reason`, the requested algorithm is impossible and torch computes.
    """

    engine: str = DEFAULT

    def report(self, pass_type: Pass, flops: int) -> PassReport:
        """Return a pass report with this choice.

        Args:
            pass_type: pass that the engine computes.
            flops: FLOPs of one call.
        """
        status = LayerStatus.ok
        if self.reason is not None:
            status = LayerStatus.fallback
        elif self.engine.startswith("cudnn."):  # cuDNN may run another algorithm than requested
            status = LayerStatus.requested
        facts = {name: value for name, value in vars(self).items() if name != "engine"}
        return PassReport(
            which=pass_type, selected=self.engine, status=status, flops=flops, **facts
        )


Choice = Mapping[Pass, PassChoice]


class Support:
    """An algorithm on one backend; the base class is torch's own, which takes everything."""

    def rejects(self, convolution: Convolution, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot compute a convolution at any input size; None if it may."""
        return None

    def choose(self, problem: Problem) -> Choice:
        """Return the engine for each pass.

        Torch's own, with a reason, if the backend cannot compute it.
        """
        return {pass_type: self.candidate(pass_type, problem) for pass_type in problem.passes}

    def candidate(self, pass_type: Pass, problem: Problem) -> PassChoice:
        """Return the engine for one pass."""
        return PassChoice()


def first_able(supports: Sequence[Support], problem: Problem) -> tuple[Choice, list[str]]:
    """Return the choice of the first backend that can compute the outputs, and refusals.

    If no backend can, the choice is torch's. The refusals are the reasons of the backends before
    the chosen backend, in the same order.
    """
    reasons: list[str] = []
    for support in supports:
        choice = support.choose(problem)
        reason = choice[Pass.forward].reason
        if reason is None:
            return choice, reasons
        reasons.append(reason)
    return dict.fromkeys(problem.passes, PassChoice(reason=joined(reasons) or None)), reasons


def joined(reasons: Iterable[str]) -> str:
    """Join distinct reasons into one text, separated by semicolons."""
    return "; ".join(dict.fromkeys(reasons))


@dataclass(frozen=True, kw_only=True)
class PortableSupport(Support):
    """An algorithm in torch operations, for all passes."""

    name: str
    backend = TORCH

    def rejects(self, convolution: Convolution, dtype: torch.dtype) -> str | None:
        """Return the limit of the algorithm that the convolution exceeds; None if there is none."""
        return ALGORITHMS[self.name].supports(convolution, dtype)

    def candidate(self, pass_type: Pass, problem: Problem) -> PassChoice:
        """Return the algorithm, the same for all passes because autograd differentiates it."""
        return self._able(problem.convolution, problem.dtype)

    def _able(self, convolution: Convolution, dtype: torch.dtype) -> PassChoice:
        """Return the engine's choice, or torch's with the reason."""
        if reason := self.rejects(convolution, dtype):
            return PassChoice(reason=reason)
        return PassChoice(engine=f"{self.backend}.{self.name}")


class Kernels(PortableSupport):
    """A Triton kernel for the forward pass, and for input gradients that are such a convolution."""

    backend = TRITON

    def candidate(self, pass_type: Pass, problem: Problem) -> PassChoice:
        """Return the Triton kernel for a pass, or torch's engine with the reason.

        At stride 1, the input gradient is a convolution with rotated weights.
        """
        convolution: Convolution | None = problem.convolution
        if pass_type is Pass.backward_filter:
            return PassChoice(reason="there is no Triton kernel for the gradient of the weights")
        if pass_type is Pass.backward_data:
            convolution = turned_around(problem.convolution)
        if convolution is None:
            return PassChoice(reason="the gradient of the inputs is not a convolution of stride 1")
        return self._able(convolution, problem.dtype)


@dataclass(frozen=True, kw_only=True)
class Cudnn(Support):
    """A cuDNN algorithm, or the first choice of cuDNN's heuristic.

    Attributes:
        name: algorithm of the forward pass, or `guess` for the heuristic.
        workspace_bytes: limit of the workspace; None for no limit.
        backward: algorithms that replace the default for some backward passes.
    """

    name: str
    workspace_bytes: int | None = None
    backward: Mapping[Pass, str] = field(default_factory=dict)

    def rejects(self, convolution: Convolution, dtype: torch.dtype) -> str | None:
        """Return why cuDNN cannot compute a data type; other limits show when cuDNN is called."""
        if dtype in DATA_TYPES:
            return None
        return f"cuDNN has no algorithms for {str(dtype).removeprefix('torch.')}"

    def candidates(self, pass_type: Pass, problem: Problem) -> Iterator[PassChoice]:
        """Yield all cuDNN algorithms that can compute a pass."""
        if self.rejects(problem.convolution, problem.dtype) is None:
            choices = (
                self._choice(algorithm, pass_type, problem) for algorithm in CODES[pass_type]
            )
            yield from (choice for choice in choices if choice.reason is None)

    def candidate(self, pass_type: Pass, problem: Problem) -> PassChoice:
        """Return the configured algorithm for a pass, or torch's engine with the reason.

        For `guess`, cuDNN's heuristic names the algorithm.
        """
        if reason := self.rejects(problem.convolution, problem.dtype):
            return PassChoice(reason=reason)
        if self.name != GUESS:
            return self._choice(self._algorithm(pass_type), pass_type, problem)
        try:
            return self._choice(
                guess(pass_type, shape_of(problem), self.workspace_bytes), pass_type, problem
            )
        except CudnnError as error:
            return PassChoice(reason=f"cuDNN: {error}")

    def _choice(self, algorithm: str, pass_type: Pass, problem: Problem) -> PassChoice:
        """Return the choice of an algorithm after a trial on uninitialized tensors.

        It is torch's engine, with the reason, if the algorithm is not deterministic although torch
        must be, if its workspace is too large, or if cuDNN refuses.
        """
        reason, size = None, 0
        if torch.are_deterministic_algorithms_enabled() and (pass_type, algorithm) in UNREPEATABLE:
            return PassChoice(reason=f"{algorithm} is not deterministic")
        try:
            cudnn_plan = plan(pass_type, algorithm, shape_of(problem))
            size = cudnn_plan.workspace_bytes
            if self.workspace_bytes is not None and size > self.workspace_bytes:
                limit = f"algorithm.workspace_bytes={self.workspace_bytes}"
                reason = f"it needs {format_bytes(size)} of workspace, more than {limit}"
            else:  # cuDNN may refuse a problem after reporting a workspace
                even = problem.even()
                with unset_fake_temporarily(), torch.inference_mode():
                    cudnn_plan(*(even.empty(shape) for shape in even.reads(pass_type)))
        except CudnnError as error:
            reason = f"cuDNN: {error}"
        except torch.OutOfMemoryError:
            reason = f"there is no room for its {format_bytes(size)} of workspace"
        if reason:
            return PassChoice(reason=reason)
        return PassChoice(engine=f"{CUDNN}.{algorithm}", workspace_bytes=size)

    def _algorithm(self, pass_type: Pass) -> str:
        """Return the configured algorithm for a pass, or the closest to the forward algorithm.

        The GEMMs, for example, share a backward algorithm.
        """
        if pass_type is Pass.forward:
            return self.name
        data, weights = BACKWARD[self.name]
        return self.backward.get(pass_type, data if pass_type is Pass.backward_data else weights)


@dataclass(frozen=True, kw_only=True)
class TorchSetting(Support):
    """Torch's own convolution under a global setting, if torch then selects the expected code.

    `algorithm=benchmark`, `onednn` and `native` are such settings.
    """

    name: str

    def candidate(self, pass_type: Pass, problem: Problem) -> PassChoice:
        """Return torch's engine, with a reason if torch selects other code for this problem.

        torch's selection is queried with uninitialized tensors and computes nothing.
        """
        even = problem.even()
        *moves, groups = even.settings
        with unset_fake_temporarily():
            inputs, weight = (even.empty(shape) for shape in even.reads(Pass.forward))
            selected = torch._C._select_conv_backend(
                inputs, weight, None, *moves, False, (0, 0), groups
            )
        implementation = str(selected).rpartition(".")[2]
        if not SWITCHED[self.name](implementation):
            return PassChoice(reason=f"torch takes {implementation} for it")
        return PassChoice(engine=SEARCH if self.name == "benchmark" else self.name)


@dataclass(frozen=True)
class Switches:
    """Global torch settings for convolutions."""

    benchmark: bool
    onednn: bool

    @classmethod
    def now(cls) -> Switches:
        """Return the current settings."""
        return cls(torch._C._get_cudnn_benchmark(), torch._C._get_mkldnn_enabled())

    def of(self, algorithm: str) -> Switches:
        """Return the settings for an algorithm; most algorithms need no change.

        Raises:
            UserError: the algorithm needs oneDNN, and torch lacks it.
        """
        if algorithm == "benchmark":
            return replace(self, benchmark=True)
        if algorithm == "onednn" and not torch.backends.mkldnn.is_available():
            raise UserError("this torch has no oneDNN; choose algorithm=default.")
        if algorithm in ("onednn", "native"):
            return replace(self, onednn=algorithm == "onednn")
        return self

    @contextmanager
    def set(self) -> Iterator[None]:
        """Apply these settings while entered."""
        before = Switches.now()
        self._apply()
        try:
            yield
        finally:
            before._apply()

    def _apply(self) -> None:
        """Set torch's global flags."""
        torch._C._set_cudnn_benchmark(self.benchmark)
        torch._C._set_mkldnn_enabled(self.onednn)


def no_kernels(device: torch.device) -> str | None:
    """Return why a device cannot run Triton kernels; None if it can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "Triton's kernels are for NVIDIA GPUs"
    return kernels.available(device)


def supports_of(
    name: str,
    backend: Backend,
    device: torch.device,
    workspace_bytes: int | None,
    backward: Mapping[Pass, str],
) -> list[Support]:
    """Return an algorithm's backends on a device, the most native first; none for `default`.

    Args:
        name: algorithm, for example `winograd`.
        backend: the only backend to return; `auto` for all.
        workspace_bytes: limit of cuDNN's workspace; None for no limit.
        backward: cuDNN algorithms that replace the default for some backward passes.

    Raises:
        UserError: the backend lacks the algorithm; for `auto`, every backend lacks it.
    """
    if name == DEFAULT:
        return []
    if name == "benchmark" and device.type != "cuda":
        raise UserError(
            f"algorithm=benchmark needs cuDNN: {why_no_cudnn(device)}; choose algorithm=default."
        )
    if name in SWITCHED:
        return [TorchSetting(name=name)]
    cudnn = Cudnn(name=name, workspace_bytes=workspace_bytes, backward=backward)
    no_triton: str | None = f"there is no Triton kernel for {name}"
    if name in kernels.ALGORITHMS:
        no_triton = no_kernels(device)
    no_torch = None if name in ALGORITHMS else f"{name} is cuDNN's own"
    candidates: list[tuple[Backend, Support, str | None]] = [
        (Backend.cudnn, cudnn, why_no_cudnn(device)),
        (Backend.triton, Kernels(name=name), no_triton),
        (Backend.torch, PortableSupport(name=name), no_torch),
    ]
    candidates = [candidate for candidate in candidates if backend in (Backend.auto, candidate[0])]
    supports = [support for _, support, reason in candidates if reason is None]
    reasons = [reason for *_, reason in candidates if reason is not None]
    if not supports:
        raise UserError(f"algorithm={name} algorithm.backend={backend}: {'; '.join(reasons)}.")
    return supports
